// Eight lanes as compilers with vector extensions make them for any processor (SSE2, NEON …): registers of 16 bytes.
#define TARGET

constexpr int WORDS = 8;

using Words4 = uint32_t __attribute__((vector_size(16)));
using Words2 = uint64_t __attribute__((vector_size(16)));
using Floats4 = float __attribute__((vector_size(16)));
using Doubles2 = double __attribute__((vector_size(16)));
using Masks2 = int64_t __attribute__((vector_size(16)));

struct U { Words4 x[2]; };
struct F { Floats4 x[2]; };
struct D { Doubles2 x[4]; };

template <class V> inline V load_bits(const void *p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
}

inline U load_words(const void *p) { return load_bits<U>(p); }
inline U no_words() { return {}; }

inline U mix(U words, U keys) {
    for (int k = 0; k < 2; ++k) {
        Words4 h = words.x[k] + keys.x[k];
        words.x[k] = (h ^ (h >> 16)) * MIX_A;
    }
    return words;
}

inline Words2 products(Words4 h) {
#if defined(__SSE2__)
    __m128i pairs = reinterpret_cast<__m128i>(h);
    return reinterpret_cast<Words2>(_mm_mul_epu32(pairs, _mm_srli_epi64(pairs, 32)));
#else
    return Words2{uint64_t{h[0]} * h[1], uint64_t{h[2]} * h[3]};
#endif
}

inline U add_terms(U sum, U h) {
    for (int k = 0; k < 2; ++k) {
        Words2 terms = reinterpret_cast<Words2>(sum.x[k]) + reinterpret_cast<Words2>(h.x[k]) + products(h.x[k]);
        sum.x[k] = reinterpret_cast<Words4>(terms);
    }
    return sum;
}

inline uint64_t total64(U sum) {
    uint64_t part[4];
    std::memcpy(part, &sum, sizeof(sum));
    return (part[0] + part[1]) + (part[2] + part[3]);
}

inline F values(U words, int, float) { return load_bits<F>(&words); }

inline F values(U words, int part, Bf16) {  // even elements, then odd ones
    for (Words4 &x : words.x) x = part ? x & 0xFFFF0000u : x << 16;
    return load_bits<F>(&words);
}

inline F values(U words, int part, F16Bits) {  // the lower half, then the upper one
    F16Bits halves[8];
    float value[8];
    std::memcpy(halves, &words.x[part], 16);
    for (int k = 0; k < 8; ++k) value[k] = to_float(halves[k]);
    return load_bits<F>(value);
}

inline F everywhere(float x) {
    Floats4 all = {x, x, x, x};
    return {{all, all}};
}

inline F lower(F a, F b) {
    for (int k = 0; k < 2; ++k) a.x[k] = b.x[k] < a.x[k] ? b.x[k] : a.x[k];
    return a;
}

inline F higher(F a, F b) {
    for (int k = 0; k < 2; ++k) a.x[k] = b.x[k] > a.x[k] ? b.x[k] : a.x[k];
    return a;
}

inline void store(float *p, F x) { std::memcpy(p, &x, sizeof(x)); }

inline U count_zeros(U counts, F x) {
    for (int k = 0; k < 2; ++k) counts.x[k] -= reinterpret_cast<Words4>(x.x[k] == 0.0f);
    return counts;
}

inline int64_t total32(U counts) {
    int64_t sum = 0;
    for (const Words4 &x : counts.x) sum += int64_t{x[0]} + x[1] + x[2] + x[3];
    return sum;
}

inline D eight(double x) {
    Doubles2 both = {x, x};
    return {{both, both, both, both}};
}

template <class T> inline D load(const T *p) {
    D d;
    for (int k = 0; k < 4; ++k) d.x[k] = Doubles2{to_double(p[2 * k]), to_double(p[2 * k + 1])};
    return d;
}

inline void store(double *p, D x) { std::memcpy(p, &x, sizeof(x)); }

inline D add(D x, D y) {
    for (int k = 0; k < 4; ++k) x.x[k] += y.x[k];
    return x;
}

inline D subtract(D x, D y) {
    for (int k = 0; k < 4; ++k) x.x[k] -= y.x[k];
    return x;
}

inline D square(D x) {
    for (Doubles2 &d : x.x) d *= d;
    return x;
}

inline D lower(D x, D y) {
    for (int k = 0; k < 4; ++k) x.x[k] = y.x[k] < x.x[k] ? y.x[k] : x.x[k];
    return x;
}

inline D higher(D x, D y) {
    for (int k = 0; k < 4; ++k) x.x[k] = y.x[k] > x.x[k] ? y.x[k] : x.x[k];
    return x;
}

inline D wide(F x) {
    D d;
    for (int k = 0; k < 4; ++k) {
        Floats4 v = x.x[k / 2];
        int at = k % 2 * 2;
        d.x[k] = Doubles2{static_cast<double>(v[at]), static_cast<double>(v[at + 1])};
    }
    return d;
}

inline D add(D sum, F x) { return add(sum, wide(x)); }
inline D add_exact_square(D sum, D x) { return add(sum, square(x)); }
inline D add_exact_square(D sum, F x) { return add_exact_square(sum, wide(x)); }

// How many lanes are equal.
inline int equal_in(D x, D y) {
    Masks2 found = {};
    for (int k = 0; k < 4; ++k) found -= x.x[k] == y.x[k];
    return static_cast<int>(found[0] + found[1]);
}

inline D add_signed(D sum, D x, unsigned bits) {
    for (int k = 0; k < 4; ++k, bits >>= 2) sum.x[k] += x.x[k] * Doubles2{bits & 1 ? -1.0 : 1.0, bits & 2 ? -1.0 : 1.0};
    return sum;
}
