// What of a stretch of elements is not finite, by the bits alone. Included once for each instruction set, for which the
// compiler vectorises it.

template <class Bits> TARGET static int nonfinite_in(const Bits *p, int64_t n, Bits exponent, Bits sign) {
    Bits found = 0;
    for (int64_t i = 0; i < n; ++i) found |= static_cast<Bits>(-((p[i] & exponent) == exponent));
    if (!found) return 0;
    Bits nan = 0, positive = 0, negative = 0, minus = exponent | sign;
    for (int64_t i = 0; i < n; ++i) {
        nan |= static_cast<Bits>(-((p[i] & static_cast<Bits>(~sign)) > exponent));
        positive |= static_cast<Bits>(-(p[i] == exponent));
        negative |= static_cast<Bits>(-(p[i] == minus));
    }
    return (nan ? HAS_NAN : 0) | (positive ? HAS_POSINF : 0) | (negative ? HAS_NEGINF : 0);
}

TARGET static int nonfinite(const Job &job, int64_t index) {
    int64_t first = index * BLOCK, n = std::min(BLOCK, job.count - first);
    auto halves = static_cast<const uint16_t *>(job.data) + first;
    switch (job.dtype) {
        case F32:
            return nonfinite_in<uint32_t>(static_cast<const uint32_t *>(job.data) + first, n, 0x7F800000u, 1u << 31);
        case F64:
            return nonfinite_in<uint64_t>(static_cast<const uint64_t *>(job.data) + first, n, 0x7FFull << 52, 1ull << 63);
        case BF16: return nonfinite_in<uint16_t>(halves, n, 0x7F80, 0x8000);
        case F16: return nonfinite_in<uint16_t>(halves, n, 0x7C00, 0x8000);
        default: return 0;
    }
}
