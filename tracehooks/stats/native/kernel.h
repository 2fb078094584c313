// One block of elements, in terms of the lanes that were included before. Included once for each instruction set; all
// of them add the same numbers to the same lanes in the same order, so that they agree to the last bit.

struct Sums {
    double sum = 0, squares = 0, low = INF, high = -INF;
    int64_t zeros = 0;
    uint64_t hash = 0;
};

template <class T> constexpr int LANE_SHIFT = 0;
template <> constexpr int LANE_SHIFT<Bf16> = 1;  // even and odd neighbours share a lane

// The lanes of one block while it is read.
struct Lanes {
    D sum, squares;
    F low, high;
    U zeros;
};

// The values x of one register of words; float32 is read again from `at`, since widening is cheapest on the way in.
template <class T> TARGET inline void take(Lanes &lanes, F x, const T *at) {
    if constexpr (sizeof(T) == 4) {
        for (int k = 0; k < WORDS; k += LANES) {
            D wide_x = load(at + k);
            lanes.sum = add(lanes.sum, wide_x);
            lanes.squares = add_exact_square(lanes.squares, wide_x);
        }
    } else {
        lanes.sum = add(lanes.sum, x);
        lanes.squares = add_exact_square(lanes.squares, x);
    }
    lanes.low = lower(lanes.low, x);
    lanes.high = higher(lanes.high, x);
    lanes.zeros = count_zeros(lanes.zeros, x);
}

// Registers brought together, and the elements from `done` on, which filled none.
template <class T> TARGET static void finish_lanes(const Lanes &lanes, const T *p, int64_t done, int64_t n, Sums &out) {
    double sum[LANES], squares[LANES];
    float low[WORDS], high[WORDS];
    store(sum, lanes.sum), store(squares, lanes.squares), store(low, lanes.low), store(high, lanes.high);
    float lowest = low[0], highest = high[0];
    for (int k = 1; k < WORDS; ++k) {
        lowest = low[k] < lowest ? low[k] : lowest;
        highest = high[k] > highest ? high[k] : highest;
    }
    out.zeros = total32(lanes.zeros);
    for (int64_t i = done; i < n; ++i) {
        float x = to_float(p[i]);
        double wide_x = x;
        int lane = static_cast<int>(i >> LANE_SHIFT<T>) & (LANES - 1);
        sum[lane] += wide_x;
        squares[lane] += wide_x * wide_x;
        lowest = x < lowest ? x : lowest;
        highest = x > highest ? x : highest;
        out.zeros += x == 0;
    }
    out.sum = reduced(sum), out.squares = reduced(squares), out.low = lowest, out.high = highest;
}

// One pass over at most BLOCK elements of at most 32 bits. The sum of squares is finite if and only if every element
// is: otherwise only the hash holds.
template <class T, bool HASHED> TARGET static Sums scan(const T *p, int64_t n, uint64_t tile) {
    constexpr int PARTS = 4 / sizeof(T);
    Sums out;
    constexpr float LOWEST = static_cast<float>(-INF), HIGHEST = static_cast<float>(INF);
    Lanes lanes{eight(0), eight(0), everywhere(HIGHEST), everywhere(LOWEST), no_words()};
    int64_t bytes = n * static_cast<int64_t>(sizeof(T)), done = 0;
    for (; done < bytes; ++tile) {
        const char *start = reinterpret_cast<const char *>(p) + done;
        int64_t size = bytes - done < 4 * TILE ? bytes - done : 4 * TILE, words = size / 4 / WORDS * WORDS;
        U terms = no_words();
        for (int64_t i = 0; i < words; i += WORDS) {
            U x = load_words(start + 4 * i);
            if constexpr (HASHED) terms = add_terms(terms, mix(x, load_words(KEYS.at + i)));
            const T *at = reinterpret_cast<const T *>(start + 4 * i);
            for (int part = 0; part < PARTS; ++part) take(lanes, values(x, part, T{}), at);
        }
        done += 4 * words;
        if (HASHED) {
            uint64_t last = last_terms(start + 4 * words, size - 4 * words, words);
            out.hash += tile_digest(total64(terms) + last, tile);
        }
        if (4 * words < size) break;
    }
    finish_lanes(lanes, p, done / static_cast<int64_t>(sizeof(T)), n, out);
    return out;
}

TARGET static Sums scan64(const double *p, int64_t n) {
    D sum = eight(0), squares = eight(0), low = eight(INF), high = eight(-INF);
    Sums out;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        D x = load(p + i);
        sum = add(sum, x), squares = add(squares, square(x));
        low = lower(low, x), high = higher(high, x);
        out.zeros += equal_in(x, eight(0));
    }
    double lane[4][LANES];
    store(lane[0], sum), store(lane[1], squares), store(lane[2], low), store(lane[3], high);
    for (; i < n; ++i) {
        int k = static_cast<int>(i) & (LANES - 1);
        double x = p[i];
        lane[0][k] += x, lane[1][k] += x * x;
        lane[2][k] = x < lane[2][k] ? x : lane[2][k];
        lane[3][k] = x > lane[3][k] ? x : lane[3][k];
        out.zeros += x == 0;
    }
    for (int k = 0; k < LANES; ++k) {
        out.low = lane[2][k] < out.low ? lane[2][k] : out.low;
        out.high = lane[3][k] > out.high ? lane[3][k] : out.high;
    }
    out.sum = reduced(lane[0]), out.squares = reduced(lane[1]);
    return out;
}

// A second reading of a block leaves memory idle: meanwhile the next block is fetched. Prefetching never faults.
template <class T> TARGET inline void fetch_next(const T *at) {
    __builtin_prefetch(reinterpret_cast<const char *>(at) + BLOCK * sizeof(T), 0, 2);
}

// Sum of squared distances from the mean, corrected for the rounding of that mean (Chan, Golub and LeVeque, 1983).
template <class T> TARGET static void read_again(const T *p, int64_t n, double mean, Record &record) {
    D sum = eight(0), squares = eight(0), center = eight(mean);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        fetch_next(p + i);
        D x = subtract(load(p + i), center);
        sum = add(sum, x), squares = add(squares, square(x));
    }
    double lane[2][LANES];
    store(lane[0], sum), store(lane[1], squares);
    for (; i < n; ++i) {
        double x = to_double(p[i]) - mean;
        lane[0][i & (LANES - 1)] += x, lane[1][i & (LANES - 1)] += x * x;
    }
    double total = reduced(lane[0]);
    record.rest = total / static_cast<double>(n);
    record.spread = std::max(0.0, reduced(lane[1]) - total * record.rest);
}

// Where squares and mean cancel, the elements (still in the nearest cache) are read again.
template <class T> TARGET static void record_moments(const T *p, int64_t n, const Sums &sums, Record &record) {
    double mean = sums.sum / static_cast<double>(n), spread = sums.squares - sums.sum * mean;
    record = {n, sums.sum, sums.squares, spread};
    if (!(spread > sums.squares / 64)) read_again(p, n, mean, record);
}

template <class T> TARGET static void add_sketch(const T *p, int64_t n, int64_t first, double *sketch) {
    D even = eight(0), odd = eight(0);
    uint64_t group = static_cast<uint64_t>(first) / 64;
    int64_t i = 0;
    for (; i + 64 <= n; i += 64, ++group) {
        uint64_t bits = signs(group);
        for (int k = 0; k < 64; k += 16) {
            fetch_next(p + i + k);
            even = add_signed(even, load(p + i + k), static_cast<unsigned>(bits >> k & 0xFF));
            odd = add_signed(odd, load(p + i + k + 8), static_cast<unsigned>(bits >> (k + 8) & 0xFF));
        }
    }
    store(sketch, even), store(sketch + LANES, odd);
    for (uint64_t bits = signs(group); i < n; ++i, bits >>= 1)
        sketch[i % SKETCH] += bits & 1 ? -to_double(p[i]) : to_double(p[i]);
}

inline int bucket(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<int>(bits >> 23 & 0xFF) - 127 - LOWEST_EXPONENT;
}

inline int bucket(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    return static_cast<int>(bits >> 52 & 0x7FF) - 1023 - LOWEST_EXPONENT;
}

inline double measured(double x) { return x; }
template <class T> inline float measured(T x) { return to_float(x); }

// Counts of finite elements. Subnormals lie below the lowest bucket, and so in it; so do zeros, which are taken out.
template <class T> TARGET static void add_histogram(const T *p, int64_t n, int64_t zeros, int64_t *histogram) {
    uint32_t found[4][BUCKETS] = {};  // four, because neighbours are often in one bucket
    for (int64_t i = 0; i < n; ++i) {
        int b = bucket(measured(p[i]));
        ++found[i & 3][b < 0 ? 0 : b >= BUCKETS ? BUCKETS - 1 : b];
    }
    for (int b = 0; b < BUCKETS; ++b)
        histogram[b] += int64_t{found[0][b]} + int64_t{found[1][b]} + int64_t{found[2][b]} + int64_t{found[3][b]};
    histogram[0] -= zeros;
}

template <class T>
TARGET static void take_block(const Job &job, const T *p, int64_t n, const Sums &sums, Totals &totals, Record &record) {
    totals.zeros += sums.zeros;
    totals.low = sums.low < totals.low ? sums.low : totals.low;
    totals.high = sums.high > totals.high ? sums.high : totals.high;
    if (job.flags & HISTOGRAM) add_histogram(p, n, sums.zeros, totals.histogram);
    record_moments(p, n, sums, record);
}

// As float64, with zeros up to a whole register.
template <class T> TARGET static void widen(const T *p, int64_t n, double *out) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        fetch_next(p + i);
        store(out + i, load(p + i));
    }
    for (int64_t end = (n + LANES - 1) / LANES * LANES; i < end; ++i) out[i] = i < n ? to_double(p[i]) : 0;
}

// A block with non-finite elements, or one of float64 that has to be scaled: its finite elements, moved together.
template <class T>
TARGET static void careful_block(const Job &job, const T *p, int64_t n, int64_t first, Totals &totals, Record &record,
                                 double *sketch) {
    double all[BLOCK + LANES], kept[BLOCK + LANES];
    widen(p, n, all);
    int64_t count = 0, posinf = 0, neginf = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        posinf += equal_in(load(all + i), eight(INF));
        neginf += equal_in(load(all + i), eight(-INF));
    }
    for (int64_t i = 0; i < n; ++i) {
        kept[count] = all[i];
        count += std::fabs(all[i]) < INF;
    }
    totals.posinf += posinf, totals.neginf += neginf, totals.nan += n - count - posinf - neginf;
    if (job.scale_a != 1)
        for (int64_t i = 0; i < count; ++i) kept[i] = kept[i] * job.scale_a * job.scale_b;
    if (count) take_block(job, kept, count, scan64(kept, count), totals, record);
    if (sketch) {
        for (int64_t i = 0; i < n; ++i) all[i] = std::fabs(all[i]) < INF ? all[i] : 0;
        add_sketch(all, n, first, sketch);
    }
}

TARGET static uint64_t hash_bytes(const void *data, int64_t bytes, uint64_t tile) {
    uint64_t hash = 0;
    for (int64_t done = 0; done < bytes; done += 4 * TILE, ++tile) {
        const char *start = static_cast<const char *>(data) + done;
        int64_t size = bytes - done < 4 * TILE ? bytes - done : 4 * TILE, words = size / 4 / WORDS * WORDS;
        U terms = no_words();
        for (int64_t i = 0; i < words; i += WORDS)
            terms = add_terms(terms, mix(load_words(start + 4 * i), load_words(KEYS.at + i)));
        hash += tile_digest(total64(terms) + last_terms(start + 4 * words, size - 4 * words, words), tile);
    }
    return hash;
}

template <class T>
TARGET static void block_of(const Job &job, int64_t index, Totals &totals, Record &record, double *sketch) {
    int64_t first = index * BLOCK, n = job.count - first < BLOCK ? job.count - first : BLOCK;
    const T *p = static_cast<const T *>(job.data) + first;
    uint64_t tile = static_cast<uint64_t>(first) * sizeof(T) / (4 * TILE);
    if constexpr (std::numeric_limits<T>::is_integer) {
        double wide_p[BLOCK + LANES];
        for (int64_t i = 0; i < n; ++i) wide_p[i] = static_cast<double>(p[i]);
        if (job.flags & HASH) totals.hash += hash_bytes(p, n * static_cast<int64_t>(sizeof(T)), tile);
        take_block(job, wide_p, n, scan64(wide_p, n), totals, record);
        if (sketch) add_sketch(wide_p, n, first, sketch);
    } else {
        Sums sums;
        if constexpr (sizeof(T) == 8) {
            sums = scan64(p, n);
            if (job.flags & HASH) sums.hash = hash_bytes(p, n * 8, tile);
        } else {
            sums = job.flags & HASH ? scan<T, true>(p, n, tile) : scan<T, false>(p, n, tile);
        }
        totals.hash += sums.hash;
        if (!(sums.squares < INF) || job.scale_a != 1) {
            careful_block(job, p, n, first, totals, record, sketch);
            return;
        }
        take_block(job, p, n, sums, totals, record);
        if (sketch) add_sketch(p, n, first, sketch);
    }
}

TARGET static void block(const Job &job, int64_t index, Totals &totals, Record &record, double *sketch) {
    switch (job.dtype) {
        case F32: return block_of<float>(job, index, totals, record, sketch);
        case F64: return block_of<double>(job, index, totals, record, sketch);
        case BF16: return block_of<Bf16>(job, index, totals, record, sketch);
        case F16: return block_of<F16Bits>(job, index, totals, record, sketch);
        case BOOL: case U8: return block_of<uint8_t>(job, index, totals, record, sketch);
        case I8: return block_of<int8_t>(job, index, totals, record, sketch);
        case U16: return block_of<uint16_t>(job, index, totals, record, sketch);
        case I16: return block_of<int16_t>(job, index, totals, record, sketch);
        case U32: return block_of<uint32_t>(job, index, totals, record, sketch);
        case I32: return block_of<int32_t>(job, index, totals, record, sketch);
        case U64: return block_of<uint64_t>(job, index, totals, record, sketch);
        default: return block_of<int64_t>(job, index, totals, record, sketch);
    }
}
