// The registers of NEON, by twos and fours: eight 32-bit words, sixteen halves of words, eight float32, eight float64.
#define TARGET

constexpr int WORDS = 8;

struct U { uint32x4_t x[2]; };
struct H { uint16x8_t x[2]; };
struct F { float32x4_t x[2]; };
struct D { float64x2_t x[4]; };

inline U load_words(const void *p) {
    auto *bytes = static_cast<const uint8_t *>(p);
    return {{vreinterpretq_u32_u8(vld1q_u8(bytes)), vreinterpretq_u32_u8(vld1q_u8(bytes + 16))}};
}

inline U no_words() { return {{vdupq_n_u32(0), vdupq_n_u32(0)}}; }

inline U mix(U words, U keys) {
    for (int k = 0; k < 2; ++k) {
        uint32x4_t h = vaddq_u32(words.x[k], keys.x[k]);
        words.x[k] = vmulq_u32(veorq_u32(h, vshrq_n_u32(h, 16)), vdupq_n_u32(MIX_A));
    }
    return words;
}

inline U add_terms(U sum, U h) {
    uint32x4_t even = vuzp1q_u32(h.x[0], h.x[1]), odd = vuzp2q_u32(h.x[0], h.x[1]);
    uint64x2_t all[2];
    for (int k = 0; k < 2; ++k) all[k] = vaddq_u64(vreinterpretq_u64_u32(sum.x[k]), vreinterpretq_u64_u32(h.x[k]));
    all[0] = vmlal_u32(all[0], vget_low_u32(even), vget_low_u32(odd));
    all[1] = vmlal_high_u32(all[1], even, odd);
    return {{vreinterpretq_u32_u64(all[0]), vreinterpretq_u32_u64(all[1])}};
}

inline uint64_t total64(U sum) {
    return vaddvq_u64(vaddq_u64(vreinterpretq_u64_u32(sum.x[0]), vreinterpretq_u64_u32(sum.x[1])));
}

// The upper halves of sixteen elements, which bound the elements themselves.
inline uint16x8_t load_halves(const void *p) { return vld1q_u16(static_cast<const uint16_t *>(p)); }
inline uint16x8_t upper(const float *p) { return vuzp2q_u16(load_halves(p), load_halves(p + 4)); }
inline uint32x4_t upper_words(const double *p) {
    return vuzp2q_u32(vreinterpretq_u32_u16(load_halves(p)), vreinterpretq_u32_u16(load_halves(p + 2)));
}
inline uint16x8_t upper(const double *p) {
    return vuzp2q_u16(vreinterpretq_u16_u32(upper_words(p)), vreinterpretq_u16_u32(upper_words(p + 4)));
}
template <class T> inline uint16x8_t upper(const T *p) { return load_halves(p); }
template <class T> inline H halves(const T *p) { return {{upper(p), upper(p + 8)}}; }

inline H halves_of(int x) {
    uint16x8_t all = vdupq_n_u16(static_cast<uint16_t>(x));
    return {{all, all}};
}
inline H doubled(H a) { return {{vaddq_u16(a.x[0], a.x[0]), vaddq_u16(a.x[1], a.x[1])}}; }
inline uint16x8_t most_signed(uint16x8_t a, uint16x8_t b) {
    return vreinterpretq_u16_s16(vmaxq_s16(vreinterpretq_s16_u16(a), vreinterpretq_s16_u16(b)));
}
inline H most_signed(H a, H b) { return {{most_signed(a.x[0], b.x[0]), most_signed(a.x[1], b.x[1])}}; }
inline H most(H a, H b) { return {{vmaxq_u16(a.x[0], b.x[0]), vmaxq_u16(a.x[1], b.x[1])}}; }
inline H least(H a, H b) { return {{vminq_u16(a.x[0], b.x[0]), vminq_u16(a.x[1], b.x[1])}}; }
inline void store(uint16_t *p, H a) { vst1q_u16(p, a.x[0]), vst1q_u16(p + 8, a.x[1]); }

inline F values(const float *p) { return {{vld1q_f32(p), vld1q_f32(p + 4)}}; }
inline F values(const Bf16 *p) {
    uint16x8_t half = load_halves(p);
    return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(half), 16)),
             vreinterpretq_f32_u32(vshll_high_n_u16(half, 16))}};
}
inline F values(const F16Bits *p) {
    float16x8_t half = vreinterpretq_f16_u16(load_halves(p));
    return {{vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)}};
}
inline void store(float *p, F a) { vst1q_f32(p, a.x[0]), vst1q_f32(p + 4, a.x[1]); }
inline F everywhere(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x)}}; }

inline D load(const double *p) { return {{vld1q_f64(p), vld1q_f64(p + 2), vld1q_f64(p + 4), vld1q_f64(p + 6)}}; }
template <class T> inline D load(const T *p) {
    F a = values(p);
    return {{vcvt_f64_f32(vget_low_f32(a.x[0])), vcvt_high_f64_f32(a.x[0]), vcvt_f64_f32(vget_low_f32(a.x[1])),
             vcvt_high_f64_f32(a.x[1])}};
}
inline D values(const double *p) { return load(p); }
inline void store(double *p, D a) {
    for (int k = 0; k < 4; ++k) vst1q_f64(p + 2 * k, a.x[k]);
}
inline D everywhere(double x) {
    float64x2_t both = vdupq_n_f64(x);
    return {{both, both, both, both}};
}

// An operation on each register of a group.
template <class V, class Operation> inline V each(V a, V b, Operation operation) {
    for (size_t k = 0; k < sizeof(V) / 16; ++k) a.x[k] = operation(a.x[k], b.x[k]);
    return a;
}

inline F lower(F a, F b) { return each(a, b, vminnmq_f32); }
inline F higher(F a, F b) { return each(a, b, vmaxnmq_f32); }
inline D lower(D a, D b) { return each(a, b, vminnmq_f64); }
inline D higher(D a, D b) { return each(a, b, vmaxnmq_f64); }
inline D add(D a, D b) { return each(a, b, vaddq_f64); }
inline D subtract(D a, D b) { return each(a, b, vsubq_f64); }
inline D multiply(D a, D b) { return each(a, b, vmulq_f64); }

inline D add_exact_square(D sum, D a) {
    return each(sum, a, [](float64x2_t s, float64x2_t x) { return vfmaq_f64(s, x, x); });
}

inline F finite_or(F a, F b) {
    return each(a, b, [](float32x4_t x, float32x4_t y) { return vbslq_f32(vceqzq_f32(vsubq_f32(x, x)), x, y); });
}
inline D finite_or(D a, D b) {
    return each(a, b, [](float64x2_t x, float64x2_t y) { return vbslq_f64(vceqzq_f64(vsubq_f64(x, x)), x, y); });
}

inline F count_equal(F counts, F a, F b) {
    for (int k = 0; k < 2; ++k) {
        uint32x4_t all = vreinterpretq_u32_f32(counts.x[k]);
        counts.x[k] = vreinterpretq_f32_u32(vsubq_u32(all, vceqq_f32(a.x[k], b.x[k])));
    }
    return counts;
}
inline D count_equal(D counts, D a, D b) {
    for (int k = 0; k < 4; ++k) {
        uint64x2_t all = vreinterpretq_u64_f64(counts.x[k]);
        counts.x[k] = vreinterpretq_f64_u64(vsubq_u64(all, vceqq_f64(a.x[k], b.x[k])));
    }
    return counts;
}

inline constexpr double SIGN[4][2] = {{1, 1}, {-1, 1}, {1, -1}, {-1, -1}};

// Adds with the signs of eight bits: products with one are exact.
inline D add_signed(D sum, D a, uint64_t bits) {
    for (int k = 0; k < 4; ++k) sum.x[k] = vfmaq_f64(sum.x[k], a.x[k], vld1q_f64(SIGN[bits >> (2 * k) & 3]));
    return sum;
}
