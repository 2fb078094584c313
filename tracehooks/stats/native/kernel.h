// One block of elements, in terms of the registers that were included before. Included once for each instruction set;
// all of them add the same numbers to the same lanes in the same order, so that they agree to the last bit.

// The elements that fill no register, with others behind them: bytes of one value.
template <class T, int64_t SIZE> struct Padded {
    T at[SIZE];
    Padded(const T *p, int64_t count, int byte) {
        std::memset(at, byte, sizeof(at));
        std::memcpy(at, p, static_cast<size_t>(count) * sizeof(T));
    }
};
constexpr int ZEROS = 0, NANS = 0xFF;

// A second reading of a block leaves memory idle: meanwhile the next block is fetched. Prefetching never faults.
template <class T> TARGET inline void fetch_next(const T *at) {
    __builtin_prefetch(reinterpret_cast<const char *>(at) + BLOCK * sizeof(T), 0, 2);
}

#include "histogram.h"

// What the first pass keeps in registers. Of GROUP elements, each first half adds to one set of lanes and each second
// half to another, since an addition takes longer than the next elements to come.
struct Lanes {
    D sum = everywhere(0.0), squares[2] = {sum, sum}, sketch[2] = {sum, sum};
    H highest = halves_of(-0x8000), lowest = halves_of(0), smallest = halves_of(0xFFFF);
};

// Squares of narrower types are exact in float64, so that fusing them with the sum changes no bit.
template <class T> TARGET inline D add_square(D sum, D x) {
    if constexpr (sizeof(T) < sizeof(double)) return add_exact_square(sum, x);
    return add(sum, multiply(x, x));
}

template <class T, bool SKETCHED> TARGET inline void take(Lanes &lanes, const T *p, uint64_t signs) {
    D x = load(p), y = load(p + LANES);
    lanes.sum = add(lanes.sum, add(x, y));
    lanes.squares[0] = add_square<T>(lanes.squares[0], x);
    lanes.squares[1] = add_square<T>(lanes.squares[1], y);
    if constexpr (SKETCHED) {
        lanes.sketch[0] = add_signed(lanes.sketch[0], x, signs);
        lanes.sketch[1] = add_signed(lanes.sketch[1], y, signs >> LANES);
    }
    H half = halves(p);
    lanes.highest = most_signed(lanes.highest, half);
    lanes.lowest = most(lanes.lowest, half);
    lanes.smallest = least(lanes.smallest, doubled(half));
}

// What the first pass finds. The sum of squares is finite if and only if every element is (of float64, only if):
// otherwise only the hash holds. Low and high are bounds.
struct Sums {
    double sum = 0, squares = 0, low = 0, high = 0;
    bool zeros = false;  // there may be some
    uint64_t hash = 0;
};

template <class T> TARGET static void finish(const Lanes &lanes, Sums &sums, double *sketch) {
    double lane[LANES];
    store(lane, lanes.sum);
    sums.sum = reduced(lane);
    store(lane, add(lanes.squares[0], lanes.squares[1]));
    sums.squares = reduced(lane);
    if (sketch) store(sketch, lanes.sketch[0]), store(sketch + LANES, lanes.sketch[1]);
    uint16_t half[3][GROUP], lowest = 0, smallest = 0xFFFF;
    int16_t highest = -0x8000;
    store(half[0], lanes.highest), store(half[1], lanes.lowest), store(half[2], lanes.smallest);
    for (uint16_t x : half[0]) highest = std::max(highest, static_cast<int16_t>(x));
    for (uint16_t x : half[1]) lowest = std::max(lowest, x);
    for (uint16_t x : half[2]) smallest = std::min(smallest, x);
    double nearest = magnitude_with<T>(smallest / 2);
    sums.zeros = smallest == 0;
    sums.high = highest >= 0 ? magnitude_with<T>(highest, true) : -nearest;
    sums.low = lowest & 0x8000 ? -magnitude_with<T>(lowest & 0x7FFF, true) : nearest;
}

// One pass over at most BLOCK elements, the first of which has a number in the whole that is a multiple of BLOCK.
template <class T, bool HASHED, bool SKETCHED> TARGET static Sums scan(const T *p, int64_t n, int64_t first, double *sketch) {
    constexpr int64_t SIZE = sizeof(T), PER_TILE = 4 * TILE / SIZE, STEP = SIZE < 4 ? 64 / SIZE : GROUP;
    Lanes lanes;
    Sums sums;
    int64_t whole = n / STEP * STEP, number = first / PER_TILE;
    uint64_t bits = 0;
    auto take_step = [&](const T *at, int64_t i) TARGET {
        if (SKETCHED && i % 64 == 0) bits = signs(static_cast<uint64_t>(first + i) / 64);
        for (int64_t k = 0; k < STEP; k += GROUP, bits >>= GROUP) take<T, SKETCHED>(lanes, at + k, bits);
    };
    for (int64_t tile = 0; tile < n; tile += PER_TILE, ++number) {
        int64_t end = std::min(tile + PER_TILE, n), last = std::min(end, whole);
        U terms = no_words();
        for (int64_t i = tile; i < last; i += STEP) {
            if constexpr (HASHED) {
                const char *words = reinterpret_cast<const char *>(p + i);
                const uint32_t *keys = KEYS.at + (i - tile) * SIZE / 4;
                for (int64_t k = 0; k < STEP * SIZE / 4; k += WORDS)
                    terms = add_terms(terms, mix(load_words(words + 4 * k), load_words(keys + k)));
            }
            take_step(p + i, i);
        }
        if (HASHED) {
            uint64_t rest = last_terms(p + last, (end - last) * SIZE, (last - tile) * SIZE / 4);
            sums.hash += tile_digest(total64(terms) + rest, static_cast<uint64_t>(number));
        }
    }
    if (whole < n) take_step(Padded<T, STEP>(p + whole, n - whole, ZEROS).at, whole);
    finish<T>(lanes, sums, SKETCHED ? sketch : nullptr);
    return sums;
}

// Sum of squared distances of the finite elements from their mean, corrected for the rounding of that mean (Chan, Golub
// and LeVeque, 1983).
template <class T, bool HOLES>
TARGET static void measure_spread(const T *p, int64_t n, double mean, Record &record) {
    D sum = everywhere(0.0), squares = sum, none = sum, center = everywhere(mean);
    auto take_away = [&](D x, bool holes) TARGET {
        x = subtract(x, center);
        if (holes) x = finite_or(x, none);
        sum = add(sum, x), squares = add(squares, multiply(x, x));
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        fetch_next(p + i);
        take_away(load(p + i), HOLES);
    }
    if (i < n) take_away(load(Padded<T, LANES>(p + i, n - i, NANS).at), true);
    double lane[2][LANES];
    store(lane[0], sum), store(lane[1], squares);
    double total = reduced(lane[0]);
    record.rest = total / static_cast<double>(record.finite);
    record.spread = std::max(0.0, reduced(lane[1]) - total * record.rest);
}

// Where squares and mean cancel, the elements (still in the nearest cache) are read again.
template <class T, bool HOLES>
TARGET static void measure_moments(const T *p, int64_t n, int64_t finite, const Sums &sums, Record &record) {
    if (!finite) return;
    double mean = sums.sum / static_cast<double>(finite), spread = sums.squares - sums.sum * mean;
    record = {finite, sums.sum, sums.squares, spread};
    if (!(spread > sums.squares / 64)) measure_spread<T, HOLES>(p, n, mean, record);
}

// The sum of counts that `count_equal` left in the bits of a register of values.
template <class T, class V> TARGET inline int64_t total(V counts) {
    using Count = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
    Value<T> found[sizeof(V) / sizeof(Count)];
    Count count[sizeof(V) / sizeof(Count)];
    store(found, counts);
    std::memcpy(count, found, sizeof(count));
    int64_t sum = 0;
    for (Count one : count) sum += one;
    return sum;
}

// Exact extremes and the number of zeros; if there are holes, also how many of which kind, and the elements with zeros
// in their places. Returns the number of finite elements.
template <class T, bool HOLES> TARGET static int64_t look_closer(const T *p, int64_t n, Totals &totals, Value<T> *kept) {
    using V = decltype(values(p));
    constexpr int64_t SIZE = sizeof(V) / sizeof(Value<T>);
    const V zero = everywhere(Value<T>(0)), top = everywhere(Value<T>(INF)), bottom = everywhere(Value<T>(-INF));
    V low = top, high = bottom, zeros = zero, posinf = zero, neginf = zero, numbers = zero;
    auto look = [&](V x) TARGET {
        low = lower(low, HOLES ? finite_or(x, top) : x);
        high = higher(high, HOLES ? finite_or(x, bottom) : x);
        zeros = count_equal(zeros, x, zero);
        if constexpr (HOLES) {
            posinf = count_equal(posinf, x, top), neginf = count_equal(neginf, x, bottom);
            numbers = count_equal(numbers, x, x);
            store(kept, finite_or(x, zero));
            kept += SIZE;
        }
    };
    int64_t i = 0;
    for (; i + SIZE <= n; i += SIZE) {
        fetch_next(p + i);
        look(values(p + i));
    }
    if (i < n) look(values(Padded<T, SIZE>(p + i, n - i, NANS).at));
    Value<T> lowest[SIZE], highest[SIZE];
    store(lowest, low), store(highest, high);
    for (int64_t k = 0; k < SIZE; ++k) {
        totals.low = std::min<double>(totals.low, lowest[k]);
        totals.high = std::max<double>(totals.high, highest[k]);
    }
    totals.zeros += total<T>(zeros);
    if constexpr (!HOLES) return n;
    int64_t all = total<T>(numbers), positive = total<T>(posinf), negative = total<T>(neginf);
    totals.posinf += positive, totals.neginf += negative, totals.nan += n - all;
    return all - positive - negative;
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

template <class T> using Scan = Sums (*)(const T *, int64_t, int64_t, double *);
template <class T> inline Scan<T> scan_for(bool hashed, bool sketched) {
    return hashed ? sketched ? scan<T, true, true> : scan<T, true, false>
                  : sketched ? scan<T, false, true> : scan<T, false, false>;
}

// A block of floating-point elements; p is the place of the first one of `first` in the whole.
template <class T>
TARGET static void take_floats(const T *p, int64_t n, int64_t first, int flags, Totals &totals, Record &record,
                               double *sketch) {
    Sums sums = scan_for<T>(flags & HASH, sketch)(p, n, first, sketch);
    totals.hash += sums.hash;
    if (sums.squares < INF) {
        if (sums.zeros || sums.low < totals.low || sums.high > totals.high)
            look_closer<T, false>(p, n, totals, nullptr);
        measure_moments<T, false>(p, n, n, sums, record);
        if (flags & HISTOGRAM) add_histogram(p, n, totals.histogram);
        return;
    }
    Value<T> kept[BLOCK + GROUP];
    int64_t finite = look_closer<T, true>(p, n, totals, kept);
    sums = scan_for<Value<T>>(false, sketch)(kept, n, first, sketch);
    measure_moments<T, true>(p, n, finite, sums, record);
    if (flags & HISTOGRAM) add_histogram(kept, n, totals.histogram);
}

template <class T>
TARGET static void block_of(const Job &job, int64_t index, Totals &totals, Record &record, double *sketch) {
    int64_t first = index * BLOCK, n = job.count - first < BLOCK ? job.count - first : BLOCK;
    const T *p = static_cast<const T *>(job.data) + first;
    if constexpr (std::numeric_limits<T>::is_integer) {
        constexpr int64_t SIZE = sizeof(T);
        double wide_p[BLOCK];
        for (int64_t i = 0; i < n; ++i) wide_p[i] = static_cast<double>(p[i]);
        if (job.flags & HASH) totals.hash += hash_bytes(p, n * SIZE, static_cast<uint64_t>(first * SIZE / (4 * TILE)));
        take_floats(wide_p, n, first, job.flags & ~HASH, totals, record, sketch);
    } else if (job.before) {  // in what holds elements exactly and calculates
        using V = Value<T>;
        const T *q = static_cast<const T *>(job.before) + first;
        V changes[BLOCK], scale_a = static_cast<V>(job.scale_a), scale_b = static_cast<V>(job.scale_b);
        for (int64_t i = 0; i < n; ++i) changes[i] = static_cast<V>(to_double(p[i])) - static_cast<V>(to_double(q[i]));
        if (scale_a != 1)
            for (int64_t i = 0; i < n; ++i) changes[i] *= scale_a, changes[i] *= scale_b;
        take_floats(changes, n, first, job.flags, totals, record, sketch);
    } else if (sizeof(T) == 8 && job.scale_a != 1) {
        double scaled[BLOCK];
        for (int64_t i = 0; i < n; ++i) scaled[i] = to_double(p[i]) * job.scale_a * job.scale_b;
        take_floats(scaled, n, first, job.flags, totals, record, sketch);
    } else {
        take_floats(p, n, first, job.flags, totals, record, sketch);
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
