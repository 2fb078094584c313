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

TARGET inline F values(U words, int, float) { return _mm512_castsi512_ps(words); }

// Even and odd elements of the first eight words, then of the last eight: the order in which narrower registers add.
TARGET inline F values(U words, int part, Bf16) {
    U even = _mm512_slli_epi32(words, 16);
    U odd = _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xFFFF0000)));
    return _mm512_castsi512_ps(part ? _mm512_shuffle_i64x2(even, odd, 0xEE) : _mm512_shuffle_i64x2(even, odd, 0x44));
}

TARGET inline F values(U words, int part, F16Bits) {
    return _mm512_cvtph_ps(part ? _mm512_extracti64x4_epi64(words, 1) : _mm512_castsi512_si256(words));
}

TARGET inline F everywhere(float x) { return _mm512_set1_ps(x); }
TARGET inline F lower(F a, F b) { return _mm512_min_ps(a, b); }
TARGET inline F higher(F a, F b) { return _mm512_max_ps(a, b); }
TARGET inline void store(float *p, F x) { _mm512_storeu_ps(p, x); }

TARGET inline U count_zeros(U counts, F x) {
    __mmask16 zero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ);
    return _mm512_mask_add_epi32(counts, zero, counts, _mm512_set1_epi32(1));
}

TARGET inline int64_t total32(U counts) {
    uint32_t part[16];
    int64_t sum = 0;
    _mm512_storeu_si512(part, counts);
    for (uint32_t x : part) sum += x;
    return sum;
}

TARGET inline D eight(double x) { return _mm512_set1_pd(x); }
TARGET inline D load(const double *p) { return _mm512_loadu_pd(p); }
TARGET inline D load(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
TARGET inline D load(const Bf16 *p) {
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)));
}
TARGET inline D load(const F16Bits *p) {
    return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
TARGET inline void store(double *p, D x) { _mm512_storeu_pd(p, x); }
TARGET inline D add(D x, D y) { return _mm512_add_pd(x, y); }
TARGET inline D subtract(D x, D y) { return _mm512_sub_pd(x, y); }
TARGET inline D square(D x) { return _mm512_mul_pd(x, x); }
TARGET inline D lower(D x, D y) { return _mm512_min_pd(x, y); }
TARGET inline D higher(D x, D y) { return _mm512_max_pd(x, y); }

TARGET inline D first_eight(F x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
TARGET inline D last_eight(F x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
TARGET inline D add(D sum, F x) { return add(add(sum, first_eight(x)), last_eight(x)); }

// Squares of float32 are exact in float64, so that fusing them changes no bit.
TARGET inline D add_exact_square(D sum, D x) { return _mm512_fmadd_pd(x, x, sum); }
TARGET inline D add_exact_square(D sum, F x) {
    return add_exact_square(add_exact_square(sum, first_eight(x)), last_eight(x));
}

// How many lanes are equal.
TARGET inline int equal_in(D x, D y) {
    return __builtin_popcount(static_cast<unsigned>(_mm512_cmp_pd_mask(x, y, _CMP_EQ_OQ)));
}

TARGET inline D add_signed(D sum, D x, unsigned bits) {
    return _mm512_mask_sub_pd(_mm512_add_pd(sum, x), static_cast<__mmask8>(bits), sum, x);
}
