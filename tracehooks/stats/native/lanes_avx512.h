// The registers of AVX-512: sixteen 32-bit words, sixteen float32, eight float64.
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c,popcnt")))

constexpr int WORDS = 16;

using U = __m512i;
using F = __m512;
using D = __m512d;

TARGET inline U load_words(const void *p) { return _mm512_loadu_si512(p); }
TARGET inline U no_words() { return _mm512_setzero_si512(); }

TARGET inline U mix(U words, U keys) {
    U h = _mm512_add_epi32(words, keys);
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
    return _mm512_mullo_epi32(h, _mm512_set1_epi32(static_cast<int>(MIX_A)));
}

TARGET inline U add_terms(U sum, U h) {
    U product = _mm512_mul_epu32(h, _mm512_srli_epi64(h, 32));
    return _mm512_add_epi64(_mm512_add_epi64(sum, h), product);
}

TARGET inline uint64_t total64(U sum) {
    uint64_t part[8], all = 0;
    _mm512_storeu_si512(part, sum);
    for (uint64_t x : part) all += x;
    return all;
}

#include "halves_avx2.h"

TARGET inline F values(const float *p) { return _mm512_loadu_ps(p); }
TARGET inline F values(const Bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(p, 0)), 16));
}
TARGET inline F values(const F16Bits *p) { return _mm512_cvtph_ps(load_halves(p, 0)); }
TARGET inline void store(float *p, F x) { _mm512_storeu_ps(p, x); }
TARGET inline F everywhere(float x) { return _mm512_set1_ps(x); }
TARGET inline F lower(F a, F b) { return _mm512_min_ps(b, a); }
TARGET inline F higher(F a, F b) { return _mm512_max_ps(b, a); }
TARGET inline F count_equal(F counts, F x, F y) {
    U all = _mm512_castps_si512(counts);
    __mmask16 equal = _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ);
    return _mm512_castsi512_ps(_mm512_mask_add_epi32(all, equal, all, _mm512_set1_epi32(1)));
}
TARGET inline F finite_or(F x, F other) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(_mm512_sub_ps(x, x), _mm512_setzero_ps(), _CMP_EQ_OQ), other, x);
}

TARGET inline D load(const double *p) { return _mm512_loadu_pd(p); }
TARGET inline D load(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
TARGET inline D load(const Bf16 *p) {
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)));
}
TARGET inline D load(const F16Bits *p) {
    return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
TARGET inline D values(const double *p) { return load(p); }
TARGET inline void store(double *p, D x) { _mm512_storeu_pd(p, x); }
TARGET inline D everywhere(double x) { return _mm512_set1_pd(x); }
TARGET inline D add(D x, D y) { return _mm512_add_pd(x, y); }
TARGET inline D subtract(D x, D y) { return _mm512_sub_pd(x, y); }
TARGET inline D multiply(D x, D y) { return _mm512_mul_pd(x, y); }
TARGET inline D lower(D x, D y) { return _mm512_min_pd(y, x); }
TARGET inline D higher(D x, D y) { return _mm512_max_pd(y, x); }

TARGET inline D add_exact_square(D sum, D x) { return _mm512_fmadd_pd(x, x, sum); }

TARGET inline D count_equal(D counts, D x, D y) {
    U all = _mm512_castpd_si512(counts);
    __mmask8 equal = _mm512_cmp_pd_mask(x, y, _CMP_EQ_OQ);
    return _mm512_castsi512_pd(_mm512_mask_add_epi64(all, equal, all, _mm512_set1_epi64(1)));
}
TARGET inline D finite_or(D x, D other) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(_mm512_sub_pd(x, x), _mm512_setzero_pd(), _CMP_EQ_OQ), other, x);
}

TARGET inline D add_signed(D sum, D x, uint64_t bits) {
    return _mm512_mask_sub_pd(_mm512_add_pd(sum, x), static_cast<__mmask8>(bits), sum, x);
}
