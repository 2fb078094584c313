// What every instruction set shares: constants of the definitions, the records that blocks fill, scalar conversions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace tracehooks {

constexpr int ABI = 6;               // of the records below: stats/cpu.py says the same
constexpr int64_t BLOCK = 4096;      // elements whose moments one record holds
constexpr int64_t TILE = 1024;       // 32-bit words under one digest of the hash
constexpr int LANES = 8;             // partial sums of a block: element i belongs to lane i mod 8, whatever the registers
constexpr int GROUP = 16;            // elements taken at a time: sums go to lanes by twos, squares to two sets of lanes
constexpr int SKETCH = 16;
constexpr int BUCKETS = 64;          // of the histogram: powers of two from LOWEST_EXPONENT on
constexpr int LOWEST_EXPONENT = -32;
constexpr double INF = std::numeric_limits<double>::infinity();
constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();

constexpr uint32_t GOLDEN32 = 0x9E3779B1u, MIX_A = 0x85EBCA6Bu, MIX_B = 0xC2B2AE35u;
constexpr uint64_t GOLDEN64 = 0x9E3779B97F4A7C15u, FINAL_A = 0xFF51AFD7ED558CCDu, FINAL_B = 0xC4CEB9FE1A85EC53u;

enum Dtype { F32, F64, BF16, F16, BOOL, U8, I8, U16, I16, U32, I32, U64, I64 };
enum Flag { HASH = 1, SKETCHED = 2, HISTOGRAM = 4 };
enum Kind { HAS_NAN = 1, HAS_POSINF = 2, HAS_NEGINF = 4 };

struct Bf16 { uint16_t bits; };
struct F16Bits { uint16_t bits; };

// MurmurHash3's finalisers (Appleby, 2011).
constexpr uint32_t finish32(uint32_t h) {
    h = (h ^ (h >> 16)) * MIX_A;
    h = (h ^ (h >> 13)) * MIX_B;
    return h ^ (h >> 16);
}

constexpr uint64_t finish64(uint64_t h) {
    h = (h ^ (h >> 33)) * FINAL_A;
    h = (h ^ (h >> 33)) * FINAL_B;
    return h ^ (h >> 33);
}

struct Keys {
    alignas(64) uint32_t at[TILE];
    constexpr Keys() : at() {
        for (uint32_t j = 0; j < TILE; ++j) at[j] = finish32((j + 1) * GOLDEN32);
    }
};
inline constexpr Keys KEYS{};

constexpr uint32_t mixed(uint32_t word, uint32_t key) {
    uint32_t h = word + key;
    return (h ^ (h >> 16)) * MIX_A;
}

constexpr uint64_t pair_term(uint32_t even, uint32_t odd, int64_t j) {
    uint64_t a = mixed(even, KEYS.at[j]), b = mixed(odd, KEYS.at[j + 1]);
    return a * b + a + (b << 32);
}

constexpr uint64_t tile_digest(uint64_t sum, uint64_t tile) { return finish64(sum + (tile + 1) * GOLDEN64); }

// Terms of the last words of a tile, which fill no register: the bytes at p, padded with zeros to pairs of words.
inline uint64_t last_terms(const void *p, int64_t bytes, int64_t j) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < bytes; i += 8, j += 2) {
        uint32_t pair[2] = {0, 0};
        std::memcpy(pair, static_cast<const char *>(p) + i, static_cast<size_t>(bytes - i < 8 ? bytes - i : 8));
        sum += pair_term(pair[0], pair[1], j);
    }
    return sum;
}

// Signs of the elements 64 k … 64 k + 63: a set bit is minus.
constexpr uint64_t signs(uint64_t k) { return finish64((k + 1) * GOLDEN64); }

// What a block leaves for the moments of the whole.
struct Record {
    int64_t finite = 0;
    double sum = 0, squares = 0, spread = 0;  // spread: sum of squared distances from the block's own mean
    double rest = 0;  // what sum / finite lacks to that mean, where it was worth finding out
};

// What merges exactly, whatever the order.
struct Totals {
    int64_t nan = 0, posinf = 0, neginf = 0, zeros = 0;
    double low = INF, high = -INF;
    uint64_t hash = 0;
    int64_t histogram[BUCKETS] = {};

    void merge(const Totals &other) {
        nan += other.nan, posinf += other.posinf, neginf += other.neginf, zeros += other.zeros;
        low = other.low < low ? other.low : low;
        high = other.high > high ? other.high : high;
        hash += other.hash;
        for (int b = 0; b < BUCKETS; ++b) histogram[b] += other.histogram[b];
    }
};

struct Job {
    const void *data, *before;  // before: as many elements, whose difference from data is measured; or null
    int64_t count;
    int dtype, flags;
    double scale_a = 1, scale_b = 1;  // float64 of extreme magnitude is multiplied by both before it is squared
};

struct Kernel {
    const char *name;
    void (*block)(const Job &job, int64_t index, Totals &totals, Record &record, double *sketch);
    uint64_t (*hash)(const void *data, int64_t bytes, uint64_t first_tile);
    int (*nonfinite)(const Job &job, int64_t index);  // Kinds in a block
};

inline float to_float(float x) { return x; }

inline float to_float(Bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float to_float(F16Bits x) {
    uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7FFFu, bits;
    float value;
    if (magnitude >= 0x7C00u) {  // infinities and NaN keep their mantissa
        bits = sign | 0x7F800000u | (magnitude & 0x3FFu) << 13;
    } else if (magnitude >= 0x400u) {
        bits = sign | ((magnitude << 13) + (112u << 23));
    } else {  // zeros and subnormals: a multiple of 2**-24, exact
        value = static_cast<float>(magnitude) * 0x1p-24f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    std::memcpy(&value, &bits, 4);
    return value;
}

// What holds an element exactly and is cheapest to calculate with.
template <class T> using Value = std::conditional_t<sizeof(T) == 8, double, float>;

// The least magnitude with these upper sixteen bits, and the largest one, where all others are set.
template <class T> inline double magnitude_with(int upper, bool others = false) {
    if constexpr (sizeof(T) == 2) {
        return to_float(T{static_cast<uint16_t>(upper)});
    } else {
        constexpr int SHIFT = 8 * sizeof(T) - 16;
        uint64_t bits = static_cast<uint64_t>(upper) << SHIFT | (others ? (uint64_t{1} << SHIFT) - 1 : 0);
        T value;
        std::memcpy(&value, &bits, sizeof(T));
        return value;
    }
}

inline double to_double(double x) { return x; }
template <class T> inline double to_double(T x) { return static_cast<double>(to_float(x)); }

// The sum of a block's lanes, always in this order.
inline double reduced(const double *lane) {
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// What a call asks: of one tensor, and of many (threads: for those that ask for none of their own).
struct Request {
    const void *data;
    int64_t count, packed;
    int64_t *out;
    const void *before;
};

struct ManyRequest {
    const Request *requests;
    int64_t count, threads;
};

}  // namespace tracehooks
