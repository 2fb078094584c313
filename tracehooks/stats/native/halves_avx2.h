// The upper halves of sixteen elements, which bound the elements themselves: their signs, exponents and the first bits
// of their mantissas. Unaligned loads put each half where it is wanted. AVX2 and AVX-512 share these.

using H = __m256i;

TARGET inline H load_halves(const void *p, int offset) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(static_cast<const char *>(p) + offset));
}
TARGET inline H halves(const Bf16 *p) { return load_halves(p, 0); }
TARGET inline H halves(const F16Bits *p) { return load_halves(p, 0); }
TARGET inline H halves(const float *p) {
    return _mm256_blend_epi16(load_halves(p + 8, 0), load_halves(p, 2), 0x55);
}
TARGET inline H halves(const double *p) {
    H first = _mm256_blend_epi16(load_halves(p, 6), load_halves(p + 4, 4), 0x22);
    H last = _mm256_blend_epi16(load_halves(p + 8, 2), load_halves(p + 12, 0), 0x88);
    return _mm256_blend_epi16(first, last, 0xCC);
}

TARGET inline H halves_of(int x) { return _mm256_set1_epi16(static_cast<short>(x)); }
TARGET inline H doubled(H x) { return _mm256_add_epi16(x, x); }
TARGET inline H most_signed(H x, H y) { return _mm256_max_epi16(x, y); }
TARGET inline H most(H x, H y) { return _mm256_max_epu16(x, y); }
TARGET inline H least(H x, H y) { return _mm256_min_epu16(x, y); }
TARGET inline void store(uint16_t *p, H x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x); }
