// Counts by power of two, in terms of the registers that were included before.

constexpr uint8_t NO_BUCKET = 0xFF;
using Bytes = uint8_t __attribute__((vector_size(32)));

// From the upper word of a magnitude, not zero unless all of it is. Subnormals lie below the lowest bucket.
template <int MANTISSA, int BIAS> TARGET inline uint8_t bucket_of(uint32_t magnitude) {
    int bucket = static_cast<int>(magnitude >> MANTISSA) - BIAS - LOWEST_EXPONENT;
    bucket = bucket < 0 ? 0 : bucket >= BUCKETS ? BUCKETS - 1 : bucket;
    return static_cast<uint8_t>(magnitude ? bucket : NO_BUCKET);
}
TARGET inline uint8_t bucket_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bucket_of<23, 127>(bits & 0x7FFFFFFF);
}
TARGET inline uint8_t bucket_of(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bucket_of<20, 1023>(static_cast<uint32_t>(bits >> 32 & 0x7FFFFFFF) | (static_cast<uint32_t>(bits) != 0));
}

// Finite elements that are not zero. Their buckets, a byte each, are few: counting one after the other by comparing
// whole registers is faster than counting in memory, where neighbours wait for one another.
template <class T> TARGET static void add_histogram(const T *p, int64_t n, int64_t *histogram) {
    constexpr int64_t SIZE = sizeof(values(p)) / sizeof(Value<T>), STEP = sizeof(Bytes);
    Value<T> x[BLOCK];
    alignas(STEP) uint8_t bucket[BLOCK];
    int64_t end = (n + STEP - 1) / STEP * STEP, i = 0;
    for (; i + SIZE <= n; i += SIZE) {
        fetch_next(p + i);
        store(x + i, values(p + i));
    }
    for (; i < end; ++i) x[i] = i < n ? static_cast<Value<T>>(to_double(p[i])) : 0;
    for (i = 0; i < end; ++i) bucket[i] = bucket_of(x[i]);
    uint8_t first = NO_BUCKET, last = 0;
    for (int64_t k = 0; k < end; ++k) {
        first = std::min(first, bucket[k]);
        last = std::max<uint8_t>(last, static_cast<uint8_t>(bucket[k] + 1));  // none becomes zero
    }
    for (int b = first; b < last; ++b) {
        Bytes counts = {}, wanted = Bytes{} + static_cast<uint8_t>(b);
        for (int64_t k = 0; k < end; k += STEP) {
            Bytes found;
            std::memcpy(&found, bucket + k, sizeof(found));
            counts -= reinterpret_cast<Bytes>(found == wanted);
        }
        int total = 0;
        for (int64_t k = 0; k < STEP; ++k) total += counts[k];
        histogram[b] += total;
    }
}
