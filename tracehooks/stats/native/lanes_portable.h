// Eight lanes as compilers with vector extensions make them for any processor (SSE2, NEON …): registers of 16 bytes.
#define TARGET

constexpr int WORDS = 8;

using Words4 = uint32_t __attribute__((vector_size(16)));
using Words2 = uint64_t __attribute__((vector_size(16)));
using Floats4 = float __attribute__((vector_size(16)));
using Doubles2 = double __attribute__((vector_size(16)));

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

// The upper halves of sixteen elements, which bound the elements themselves.
using Halves8 = uint16_t __attribute__((vector_size(16)));
using Signed8 = int16_t __attribute__((vector_size(16)));

struct H { Halves8 x[2]; };

template <class T> inline H halves(const T *p) {
    constexpr size_t PER = sizeof(T) / 2;
    uint16_t all[GROUP * PER], upper[GROUP];
    std::memcpy(all, p, sizeof(all));
    for (int k = 0; k < GROUP; ++k) upper[k] = all[PER * k + PER - 1];
    return load_bits<H>(upper);
}

inline H halves_of(int x) {
    Halves8 all = Halves8{} + static_cast<uint16_t>(x);
    return {{all, all}};
}

inline H doubled(H h) { return {{h.x[0] + h.x[0], h.x[1] + h.x[1]}}; }

inline H most_signed(H a, H b) {
    for (int k = 0; k < 2; ++k)
        a.x[k] = reinterpret_cast<Signed8>(a.x[k]) > reinterpret_cast<Signed8>(b.x[k]) ? a.x[k] : b.x[k];
    return a;
}

inline H most(H a, H b) {
    for (int k = 0; k < 2; ++k) a.x[k] = a.x[k] > b.x[k] ? a.x[k] : b.x[k];
    return a;
}

inline H least(H a, H b) {
    for (int k = 0; k < 2; ++k) a.x[k] = a.x[k] < b.x[k] ? a.x[k] : b.x[k];
    return a;
}

inline void store(uint16_t *p, H h) { std::memcpy(p, &h, sizeof(h)); }

inline F values(const float *p) { return load_bits<F>(p); }

template <class T> inline F values(const T *p) {
    float value[8];
    for (int k = 0; k < 8; ++k) value[k] = to_float(p[k]);
    return load_bits<F>(value);
}

inline void store(float *p, F x) { std::memcpy(p, &x, sizeof(x)); }

inline F everywhere(float x) {
    Floats4 all = {x, x, x, x};
    return {{all, all}};
}

inline D everywhere(double x) {
    Doubles2 both = {x, x};
    return {{both, both, both, both}};
}

// The same for float32 and float64, register after register.

template <class V> inline V lower(V a, V b) {
    for (size_t k = 0; k < sizeof(V) / 16; ++k) a.x[k] = b.x[k] < a.x[k] ? b.x[k] : a.x[k];
    return a;
}

template <class V> inline V higher(V a, V b) {
    for (size_t k = 0; k < sizeof(V) / 16; ++k) a.x[k] = b.x[k] > a.x[k] ? b.x[k] : a.x[k];
    return a;
}

template <class V> inline V count_equal(V counts, V a, V b) {
    for (size_t k = 0; k < sizeof(V) / 16; ++k) {
        auto equal = a.x[k] == b.x[k];
        counts.x[k] = reinterpret_cast<decltype(a.x[k] + b.x[k])>(reinterpret_cast<decltype(equal)>(counts.x[k]) - equal);
    }
    return counts;
}

template <class V> inline V finite_or(V a, V b) {
    for (size_t k = 0; k < sizeof(V) / 16; ++k) a.x[k] = a.x[k] - a.x[k] == 0 ? a.x[k] : b.x[k];
    return a;
}

inline D load(const double *p) { return load_bits<D>(p); }
inline D values(const double *p) { return load(p); }

template <class T> inline D load(const T *p) {
    F x = values(p);
    D d;
    for (int k = 0; k < 4; ++k) {
        Floats4 v = x.x[k / 2];
        int at = k % 2 * 2;
        d.x[k] = Doubles2{static_cast<double>(v[at]), static_cast<double>(v[at + 1])};
    }
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

inline D multiply(D x, D y) {
    for (int k = 0; k < 4; ++k) x.x[k] *= y.x[k];
    return x;
}

inline D add_exact_square(D sum, D x) { return add(sum, multiply(x, x)); }

inline D add_signed(D sum, D x, uint64_t bits) {
    for (int k = 0; k < 4; ++k, bits >>= 2) sum.x[k] += x.x[k] * Doubles2{bits & 1 ? -1.0 : 1.0, bits & 2 ? -1.0 : 1.0};
    return sum;
}
