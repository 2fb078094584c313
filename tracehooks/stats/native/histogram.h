// Counts by power of two, in terms of the registers that were included before.

constexpr uint8_t NO_BUCKET = 0xFF;
using Bytes = uint8_t __attribute__((vector_size(32)));

template <class B, int MANTISSA, int BIAS, class V> TARGET inline uint8_t bucket_of(V x) {
    B bits;
    std::memcpy(&bits, &x, sizeof(bits));
    B magnitude = bits & (B(-1) >> 1);
    int bucket = static_cast<int>(magnitude >> MANTISSA) - BIAS - LOWEST_EXPONENT;  // subnormals below the lowest
    bucket = bucket < 0 ? 0 : bucket >= BUCKETS ? BUCKETS - 1 : bucket;
    return static_cast<uint8_t>(magnitude ? bucket : NO_BUCKET);
}
TARGET inline uint8_t bucket_of(float x) { return bucket_of<uint32_t, 23, 127>(x); }
TARGET inline uint8_t bucket_of(double x) { return bucket_of<uint64_t, 52, 1023>(x); }

// Finite elements that are not zero. Their buckets, a byte each, are few: counting one after the other by comparing
// whole registers is faster than counting in memory, where neighbours wait for one another.
template <class T> TARGET static void add_histogram(const T *p, int64_t n, int64_t *histogram) {
    constexpr int64_t SIZE = sizeof(values(p)) / sizeof(Value<T>);
    alignas(32) uint8_t bucket[BLOCK];
    auto assign = [&](const T *at, int64_t i) TARGET {
        Value<T> x[SIZE];
        store(x, values(at));
        for (int64_t k = 0; k < SIZE; ++k) bucket[i + k] = bucket_of(x[k]);
    };
    int64_t i = 0;
    for (; i + SIZE <= n; i += SIZE) {
        fetch_next(p + i);
        assign(p + i, i);
    }
    if (i < n) assign(Padded<T, SIZE>(p + i, n - i, ZEROS).at, i), i += SIZE;
    for (; i % sizeof(Bytes); ++i) bucket[i] = NO_BUCKET;
    uint8_t first = NO_BUCKET, last = 0;
    for (int64_t k = 0; k < i; ++k) {
        first = std::min(first, bucket[k]);
        last = std::max<uint8_t>(last, static_cast<uint8_t>(bucket[k] + 1));  // none becomes zero
    }
    for (int b = first; b < last; ++b) {
        Bytes counts = {}, wanted = Bytes{} + static_cast<uint8_t>(b);
        for (int64_t k = 0; k < i; k += sizeof(Bytes)) {
            Bytes found;
            std::memcpy(&found, bucket + k, sizeof(found));
            counts -= reinterpret_cast<Bytes>(found == wanted);
        }
        for (size_t k = 0; k < sizeof(Bytes); ++k) histogram[b] += counts[k];
    }
}
