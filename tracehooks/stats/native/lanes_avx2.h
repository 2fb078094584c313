// The registers of AVX2: eight 32-bit words, sixteen halves of words, eight float32, two times four float64.
#define TARGET __attribute__((target("avx2,fma,f16c,popcnt")))

constexpr int WORDS = 8;

using U = __m256i;  // words
using F = __m256;   // float32
struct D {          // float64, one for each lane
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

#include "halves_avx2.h"

TARGET inline F values(const float *p) { return _mm256_loadu_ps(p); }
TARGET inline F values(const Bf16 *p) {
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
TARGET inline F values(const F16Bits *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
TARGET inline void store(float *p, F x) { _mm256_storeu_ps(p, x); }
TARGET inline F everywhere(float x) { return _mm256_set1_ps(x); }
TARGET inline F lower(F a, F b) { return _mm256_min_ps(b, a); }
TARGET inline F higher(F a, F b) { return _mm256_max_ps(b, a); }
TARGET inline F count_equal(F counts, F x, F y) {
    __m256i equal = _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_EQ_OQ));
    return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(counts), equal));
}
TARGET inline F finite_or(F x, F other) {
    return _mm256_blendv_ps(other, x, _mm256_cmp_ps(_mm256_sub_ps(x, x), _mm256_setzero_ps(), _CMP_EQ_OQ));
}

TARGET inline D wide(F x) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}
TARGET inline D load(const double *p) { return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}; }
TARGET inline D load(const float *p) {  // twice from memory: widening is cheapest on the way in
    return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))};
}
template <class T> TARGET inline D load(const T *p) { return wide(values(p)); }
TARGET inline D values(const double *p) { return load(p); }
TARGET inline void store(double *p, D x) { _mm256_storeu_pd(p, x.a), _mm256_storeu_pd(p + 4, x.b); }
TARGET inline D everywhere(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
TARGET inline D add(D x, D y) { return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b)}; }
TARGET inline D subtract(D x, D y) { return {_mm256_sub_pd(x.a, y.a), _mm256_sub_pd(x.b, y.b)}; }
TARGET inline D multiply(D x, D y) { return {_mm256_mul_pd(x.a, y.a), _mm256_mul_pd(x.b, y.b)}; }
TARGET inline D lower(D x, D y) { return {_mm256_min_pd(y.a, x.a), _mm256_min_pd(y.b, x.b)}; }
TARGET inline D higher(D x, D y) { return {_mm256_max_pd(y.a, x.a), _mm256_max_pd(y.b, x.b)}; }

TARGET inline D add_exact_square(D sum, D x) {
    return {_mm256_fmadd_pd(x.a, x.a, sum.a), _mm256_fmadd_pd(x.b, x.b, sum.b)};
}

TARGET inline __m256d count_equal(__m256d counts, __m256d x, __m256d y) {
    __m256i equal = _mm256_castpd_si256(_mm256_cmp_pd(x, y, _CMP_EQ_OQ));
    return _mm256_castsi256_pd(_mm256_sub_epi64(_mm256_castpd_si256(counts), equal));
}
TARGET inline D count_equal(D counts, D x, D y) {
    return {count_equal(counts.a, x.a, y.a), count_equal(counts.b, x.b, y.b)};
}
TARGET inline __m256d finite_or(__m256d x, __m256d other) {
    return _mm256_blendv_pd(other, x, _mm256_cmp_pd(_mm256_sub_pd(x, x), _mm256_setzero_pd(), _CMP_EQ_OQ));
}
TARGET inline D finite_or(D x, D other) { return {finite_or(x.a, other.a), finite_or(x.b, other.b)}; }

struct SignTable {
    alignas(32) double at[16][4];
    constexpr SignTable() : at() {
        for (int bits = 0; bits < 16; ++bits)
            for (int k = 0; k < 4; ++k) at[bits][k] = bits >> k & 1 ? -1.0 : 1.0;
    }
};
inline constexpr SignTable SIGN{};

// Adds with the signs of eight bits: products with one are exact.
TARGET inline D add_signed(D sum, D x, uint64_t bits) {
    return {_mm256_fmadd_pd(x.a, _mm256_load_pd(SIGN.at[bits & 15]), sum.a),
            _mm256_fmadd_pd(x.b, _mm256_load_pd(SIGN.at[bits >> 4 & 15]), sum.b)};
}
