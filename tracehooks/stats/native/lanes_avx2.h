// The registers of AVX2: eight 32-bit words, eight float32, two times four float64.
#define TARGET __attribute__((target("avx2,fma,f16c,popcnt")))

constexpr int WORDS = 8;

using U = __m256i;  // words
using F = __m256;   // values of one register of words
struct D {          // the eight lanes of a block's sums
    __m256d a, b;
};

TARGET inline U load_words(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
TARGET inline U no_words() { return _mm256_setzero_si256(); }

TARGET inline U mix(U words, U keys) {
    U h = _mm256_add_epi32(words, keys);
    h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
    return _mm256_mullo_epi32(h, _mm256_set1_epi32(static_cast<int>(MIX_A)));
}

TARGET inline U add_terms(U sum, U h) {
    U product = _mm256_mul_epu32(h, _mm256_srli_epi64(h, 32));
    return _mm256_add_epi64(_mm256_add_epi64(sum, h), product);
}

TARGET inline uint64_t total64(U sum) {
    uint64_t part[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(part), sum);
    return (part[0] + part[1]) + (part[2] + part[3]);
}

TARGET inline F values(U words, int, float) { return _mm256_castsi256_ps(words); }

TARGET inline F values(U words, int part, Bf16) {  // even elements, then odd ones
    return _mm256_castsi256_ps(part ? _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xFFFF0000)))
                                    : _mm256_slli_epi32(words, 16));
}

TARGET inline F values(U words, int part, F16Bits) {  // the lower half, then the upper one
    return _mm256_cvtph_ps(part ? _mm256_extracti128_si256(words, 1) : _mm256_castsi256_si128(words));
}

TARGET inline F everywhere(float x) { return _mm256_set1_ps(x); }
TARGET inline F lower(F a, F b) { return _mm256_min_ps(a, b); }
TARGET inline F higher(F a, F b) { return _mm256_max_ps(a, b); }
TARGET inline void store(float *p, F x) { _mm256_storeu_ps(p, x); }

TARGET inline U count_zeros(U counts, F x) {
    return _mm256_sub_epi32(counts, _mm256_castps_si256(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ)));
}

TARGET inline int64_t total32(U counts) {
    uint32_t part[8];
    int64_t sum = 0;
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(part), counts);
    for (uint32_t x : part) sum += x;
    return sum;
}

TARGET inline D eight(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
TARGET inline D wide(F x) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}
TARGET inline D load(const double *p) { return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}; }
TARGET inline D load(const float *p) {
    return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))};
}
TARGET inline D load(const Bf16 *p) {
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return wide(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)));
}
TARGET inline D load(const F16Bits *p) {
    return wide(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
TARGET inline void store(double *p, D x) { _mm256_storeu_pd(p, x.a), _mm256_storeu_pd(p + 4, x.b); }
TARGET inline D add(D x, D y) { return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b)}; }
TARGET inline D subtract(D x, D y) { return {_mm256_sub_pd(x.a, y.a), _mm256_sub_pd(x.b, y.b)}; }
TARGET inline D square(D x) { return {_mm256_mul_pd(x.a, x.a), _mm256_mul_pd(x.b, x.b)}; }
TARGET inline D lower(D x, D y) { return {_mm256_min_pd(x.a, y.a), _mm256_min_pd(x.b, y.b)}; }
TARGET inline D higher(D x, D y) { return {_mm256_max_pd(x.a, y.a), _mm256_max_pd(x.b, y.b)}; }

// Squares of float32 are exact in float64, so that fusing them changes no bit.
TARGET inline D add_exact_square(D sum, D x) {
    return {_mm256_fmadd_pd(x.a, x.a, sum.a), _mm256_fmadd_pd(x.b, x.b, sum.b)};
}
TARGET inline D add(D sum, F x) { return add(sum, wide(x)); }
TARGET inline D add_exact_square(D sum, F x) { return add_exact_square(sum, wide(x)); }

// How many lanes are equal.
TARGET inline int equal_in(D x, D y) {
    int a = _mm256_movemask_pd(_mm256_cmp_pd(x.a, y.a, _CMP_EQ_OQ));
    int b = _mm256_movemask_pd(_mm256_cmp_pd(x.b, y.b, _CMP_EQ_OQ));
    return __builtin_popcount(static_cast<unsigned>(a | b << 4));
}

struct SignTable {
    alignas(32) double at[16][4];
    constexpr SignTable() : at() {
        for (int bits = 0; bits < 16; ++bits)
            for (int k = 0; k < 4; ++k) at[bits][k] = bits >> k & 1 ? -1.0 : 1.0;
    }
};
inline constexpr SignTable SIGN{};

// Adds with the signs of eight bits: products with one are exact.
TARGET inline D add_signed(D sum, D x, unsigned bits) {
    return {_mm256_fmadd_pd(x.a, _mm256_load_pd(SIGN.at[bits & 15]), sum.a),
            _mm256_fmadd_pd(x.b, _mm256_load_pd(SIGN.at[bits >> 4 & 15]), sum.b)};
}
