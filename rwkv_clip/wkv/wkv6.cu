// The bidirectional WKV recurrence on a GPU, forward and backward. docs/rwkv_clip.md derives what is computed here.
//
// A block of threads takes one head of one batch entry at a time and walks through time in chunks of L positions. What
// lies before a chunk reaches it through one N x N state, what lies after it through another. Within a chunk, the weight
// of position s on position t is the product of the decays strictly between them. It is split where the two part: on the
// halving grid (halves, quarters, ... of the chunk) there is one block in which t and s lie in different halves, and the
// product is that from t to the border of the halves times that from s to the border. So all pairs are plain matrix
// products of weighed rows; every factor is a product of decays, at most 1; nothing is divided, nothing is the
// difference of two sums, and where a decay underflows its weight is an exact zero.
//
// Compiled for one HEAD_SIZE (N) and two storage types: INPUT of r, k, v, y and their gradients, DECAY of w and its
// gradient. All arithmetic is float. Tensors are contiguous (B, T, H, N), aligned to four elements; u is float (H, N).
// Every output element is written exactly once. There are no atomics: the same inputs give the same bits.

struct BFloat16 { unsigned short bits; };
struct Half { unsigned short bits; };

namespace {

constexpr int N = HEAD_SIZE;
constexpr int TILE = 4;                               // a thread owns TILE x TILE numbers of a matrix
constexpr int ROWS = 8;                               // tiles along a chunk
constexpr int COLUMNS = N / TILE;                     // tiles along a head
constexpr int L = ROWS * TILE;                        // positions of a chunk
constexpr int THREADS = ROWS * COLUMNS;
constexpr int STRIDE = COLUMNS % 2 ? N : N + TILE;    // an odd number of float4s: neighbouring rows use other banks
constexpr int STATE_TILES = (COLUMNS + ROWS - 1) / ROWS;

using Rows = float (*)[STRIDE];
using Pairs = float (*)[L + TILE];
using Tile = float[TILE][TILE];

template <typename X> struct alignas(TILE * sizeof(X)) Four { X at[TILE]; };
template <typename X> __device__ Four<X>& four(X* first) { return *reinterpret_cast<Four<X>*>(first); }
template <typename X> __device__ const Four<X>& four(const X* first) { return *reinterpret_cast<const Four<X>*>(first); }

__device__ Four<float> weigh(Four<float> x, const Four<float>& weight) {
    for (int c = 0; c < TILE; ++c) x.at[c] *= weight.at[c];
    return x;
}
__device__ float dot(const Four<float>& x, const Four<float>& y) {
    float sum = 0.0f;
    for (int c = 0; c < TILE; ++c) sum += x.at[c] * y.at[c];
    return sum;
}

// ---- storage types ---------------------------------------------------------------------------------------------------

__device__ float widen(float x) { return x; }
__device__ float widen(BFloat16 x) { return __uint_as_float(static_cast<unsigned int>(x.bits) << 16); }
__device__ float widen(Half x) {
    const unsigned int size = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
    if (size >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | size << 13);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(size << 13) * 0x1p112f));
}

// To nearest, ties to even.
__device__ void narrow(float x, float& to) { to = x; }
__device__ void narrow(float x, BFloat16& to) {
    const unsigned int bits = __float_as_uint(x);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = static_cast<unsigned short>((nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
__device__ void narrow(float x, Half& to) {
    const unsigned int bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    unsigned int half;
    if (size > 0x7f800000u) half = 0x7e00u;
    else if (size >= 0x477ff000u) half = 0x7c00u;  // 65520 and more
    else if (size < 0x38800000u) half = __float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u;  // subnormal
    else half = (size + 0xc8000fffu + (size >> 13 & 1u)) >> 13;
    to.bits = static_cast<unsigned short>((bits >> 16 & 0x8000u) | half);
}

// ---- where things are ------------------------------------------------------------------------------------------------

__device__ int row() { return threadIdx.x / COLUMNS; }     // this thread's tile: rows 4 row() .. 4 row() + 3
__device__ int column() { return threadIdx.x % COLUMNS; }  // and columns 4 column() .. 4 column() + 3
__device__ int channel() { return threadIdx.x; }           // in steps along time a thread has one channel, if it is < N

struct Sequence {  // one head of one batch entry
    long long start, step;
    int T, chunks, length;

    __device__ Sequence(int index, int T_, int H)
        : start((static_cast<long long>(index / H) * T_ * H + index % H) * N), step(static_cast<long long>(H) * N), T(T_),
          chunks((T_ + L - 1) / L), length((T_ + chunks - 1) / chunks) {}
    __device__ int first(int chunk) const { return chunk * length; }
    __device__ int count(int chunk) const { return min(length, T - chunk * length); }
    __device__ long long at(int t) const { return start + t * step; }
};

struct Memory {  // of a block: a chunk's rows as float
    alignas(16) float r[L][STRIDE], k[L][STRIDE], v[L][STRIDE], a[L][STRIDE];
    float e[L][STRIDE];          // products of decays from each position to some border
    float s[L][L + TILE];        // one number for each pair of positions
    float total[STRIDE];         // the product of all the chunk's decays
};
struct BackwardMemory : Memory {
    float gy[L][STRIDE];
    float ge[L][STRIDE];         // the gradient of e
};

// Rows of a chunk from x, zero beyond its end.
template <typename X> __device__ void load(Rows to, const X* x, const Sequence& of, int chunk) {
    for (int t = row(); t < L; t += ROWS) {
        Four<float> values = {};
        if (t < of.count(chunk)) {
            const Four<X> seen = four(x + of.at(of.first(chunk) + t) + TILE * column());
            for (int c = 0; c < TILE; ++c) values.at[c] = widen(seen.at[c]);
        }
        four(&to[t][TILE * column()]) = values;
    }
}

// Decays exp(-exp(w)) of a chunk, 1 beyond its end: there nothing decays.
__device__ void load_decays(Rows to, const DECAY* w, const Sequence& of, int chunk) {
    load(to, w, of, chunk);
    for (int t = row(); t < L; t += ROWS) {
        Four<float>& values = four(&to[t][TILE * column()]);
        for (int c = 0; c < TILE; ++c) values.at[c] = t < of.count(chunk) ? expf(-expf(values.at[c])) : 1.0f;
    }
}

// This thread's tile into the rows of a chunk of x.
template <typename X> __device__ void store(X* x, const Tile& tile, const Sequence& of, int chunk) {
    for (int a = 0; a < TILE; ++a) {
        const int t = TILE * row() + a;
        if (t >= of.count(chunk)) break;
        Four<X> values;
        for (int b = 0; b < TILE; ++b) narrow(tile[a][b], values.at[b]);
        four(x + of.at(of.first(chunk) + t) + TILE * column()) = values;
    }
}

// ---- products of decays ----------------------------------------------------------------------------------------------

// Walk `steps` positions of one channel: e[t] becomes the product of the decays passed before t. Returns that of all.
__device__ float walk(Rows e, Rows a, int from, int direction, int steps) {
    float product = 1.0f;
#pragma unroll 4
    for (int n = 0; n < steps; ++n) {
        const int t = from + n * direction;
        e[t][channel()] = product;
        product *= a[t][channel()];
    }
    return product;
}

// The gradient of walk: from ge, that of e, and g, that of the product of all, add those of the decays to ga.
template <int DIRECTION, int STEPS>
__device__ void walk_back(float (&ga)[L], int from, float g, Rows e, Rows a, Rows ge) {
#pragma unroll
    for (int n = STEPS - 1; n >= 0; --n) {
        const int t = from + n * DIRECTION;
        ga[t] += g * e[t][channel()];
        g = ge[t][channel()] + g * a[t][channel()];
    }
}

// e[t]: the product between t and the border of the two halves of its block of 2M positions.
template <int M> __device__ void walk_to_borders(Rows e, Rows a) {
    if (channel() < N)
        for (int border = M; border < L; border += 2 * M) {
            walk(e, a, border - 1, -1, M);
            walk(e, a, border, 1, M);
        }
}

template <int M> __device__ void walk_back_from_borders(float (&ga)[L], Rows e, Rows a, Rows ge) {
    if (channel() < N) {
#pragma unroll
        for (int border = M; border < L; border += 2 * M) {
            walk_back<-1, M>(ga, border - 1, 0.0f, e, a, ge);
            walk_back<1, M>(ga, border, 0.0f, e, a, ge);
        }
    }
}

// ---- pairs of positions ----------------------------------------------------------------------------------------------

// Pairs in different halves of their block of 2M: s[t][s] = sum_j r_t e_t e_s k_s. Four pairs to a thread.
template <int M> __device__ void scores_across(Memory& m) {
    walk_to_borders<M>(m.e, m.a);
    __syncthreads();
    constexpr int HALF = M / 2;
    for (int unit = threadIdx.x; unit < L * HALF / 2; unit += THREADS) {
        const int first = unit / HALF % HALF + unit / (HALF * HALF) * M;
        const int second = (first / M ^ 1) * M + unit % HALF;
        float sum[2][2] = {};
#pragma unroll 2
        for (int j = 0; j < N; j += TILE) {
            Four<float> left[2], right[2];
            for (int a = 0; a < 2; ++a) {
                left[a] = weigh(four(&m.r[first + a * HALF][j]), four(&m.e[first + a * HALF][j]));
                right[a] = weigh(four(&m.k[second + a * HALF][j]), four(&m.e[second + a * HALF][j]));
            }
            for (int a = 0; a < 2; ++a)
                for (int b = 0; b < 2; ++b) sum[a][b] += dot(left[a], right[b]);
        }
        for (int a = 0; a < 2; ++a)
            for (int b = 0; b < 2; ++b) m.s[first + a * HALF][second + b * HALF] = sum[a][b];
    }
    __syncthreads();
}

// s[t][s] = sum_j r_t[j] P_ts[j] k_s[j], with the bonus u in place of P where t = s.
__device__ void scores(Memory& m, const float* u) {
    for (int pair = threadIdx.x; pair < L * TILE; pair += THREADS) {  // those within a tile, one by one
        const int t = pair / TILE, s = t / TILE * TILE + pair % TILE;
        float sum = 0.0f;
#pragma unroll 2
        for (int j = 0; j < N; j += TILE) {
            Four<float> left = four(&m.r[t][j]);
            const Four<float> right = four(&m.k[s][j]);
            if (t == s) left = weigh(left, four(&u[j]));
            for (int between = min(t, s) + 1; between < max(t, s); ++between) left = weigh(left, four(&m.a[between][j]));
            sum += dot(left, right);
        }
        m.s[t][s] = sum;
    }
    scores_across<4>(m);
    scores_across<8>(m);
    scores_across<16>(m);
}

// s[t][s] = sum_i gy_t[i] v_s[i], the gradient of the scores. Four pairs to a thread.
__device__ void score_gradients(BackwardMemory& m) {
    constexpr int HALF = L / 2;
    for (int unit = threadIdx.x; unit < HALF * HALF; unit += THREADS) {
        const int t = unit / HALF, s = unit % HALF;
        float sum[2][2] = {};
#pragma unroll 2
        for (int i = 0; i < N; i += TILE)
            for (int a = 0; a < 2; ++a)
                for (int b = 0; b < 2; ++b) sum[a][b] += dot(four(&m.gy[t + a * HALF][i]), four(&m.v[s + b * HALF][i]));
        for (int a = 0; a < 2; ++a)
            for (int b = 0; b < 2; ++b) m.s[t + a * HALF][s + b * HALF] = sum[a][b];
    }
}

// ---- matrix products, each thread its tile ---------------------------------------------------------------------------

// tile += pairs x, (L, L) times (L, N).
__device__ void multiply(Tile& tile, Pairs pairs, Rows x, int count) {
#pragma unroll 2
    for (int s = 0; s < count; s += TILE) {
        Four<float> left[TILE];
        for (int a = 0; a < TILE; ++a) left[a] = four(&pairs[TILE * row() + a][s]);
        for (int c = 0; c < TILE; ++c) {
            const Four<float> right = four(&x[s + c][TILE * column()]);
            for (int a = 0; a < TILE; ++a)
                for (int b = 0; b < TILE; ++b) tile[a][b] += left[a].at[c] * right.at[b];
        }
    }
}

// tile += pairs^T x.
__device__ void multiply_transposed(Tile& tile, Pairs pairs, Rows x, int count) {
#pragma unroll 2
    for (int t = 0; t < count; ++t) {
        const Four<float> left = four(&pairs[t][TILE * row()]), right = four(&x[t][TILE * column()]);
        for (int a = 0; a < TILE; ++a)
            for (int b = 0; b < TILE; ++b) tile[a][b] += left.at[a] * right.at[b];
    }
}

// tile += (x, weighed by e) state, (L, N) times (N, N); e may be null.
__device__ void multiply(Tile& tile, Rows x, Rows e, const float* state) {
#pragma unroll 2
    for (int j = 0; j < N; j += TILE) {
        Four<float> left[TILE];
        for (int a = 0; a < TILE; ++a) {
            left[a] = four(&x[TILE * row() + a][j]);
            if (e) left[a] = weigh(left[a], four(&e[TILE * row() + a][j]));
        }
        for (int c = 0; c < TILE; ++c) {
            const Four<float> right = four(&state[(j + c) * N + TILE * column()]);
            for (int a = 0; a < TILE; ++a)
                for (int b = 0; b < TILE; ++b) tile[a][b] += left[a].at[c] * right.at[b];
        }
    }
}

// ---- states between chunks -------------------------------------------------------------------------------------------

// Walk through the chunks, adding x_t z_t^T at every position, and write the state at each border between two chunks:
// what lies before it (direction 1) or after it (-1). Straight (j, i) or transposed (i, j), where the pointer is given.
__device__ __noinline__ void sweep(int direction, float* straight, float* transposed, const INPUT* x, const INPUT* z,
                                   const DECAY* w, const Sequence of, Memory& m) {
    float state[STATE_TILES][TILE][TILE] = {};
    for (int n = 0; n < of.chunks - 1; ++n) {
        const int chunk = direction > 0 ? n : of.chunks - 1 - n, border = direction > 0 ? chunk : chunk - 1;
        load(m.k, x, of, chunk);
        load(m.v, z, of, chunk);
        load_decays(m.a, w, of, chunk);
        __syncthreads();
        if (channel() < N) m.total[channel()] = walk(m.e, m.a, direction > 0 ? L - 1 : 0, -direction, L);
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < STATE_TILES; ++tile) {
            const int j = TILE * (row() + tile * ROWS), i = TILE * column();
            if (j >= N) continue;
            for (int a = 0; a < TILE; ++a)
                for (int b = 0; b < TILE; ++b) state[tile][a][b] *= m.total[j + a];
#pragma unroll 2
            for (int t = 0; t < of.count(chunk); ++t) {
                const Four<float> left = weigh(four(&m.k[t][j]), four(&m.e[t][j])), right = four(&m.v[t][i]);
                for (int a = 0; a < TILE; ++a)
                    for (int b = 0; b < TILE; ++b) state[tile][a][b] += left.at[a] * right.at[b];
            }
            for (int a = 0; a < TILE; ++a) {
                Four<float> along, across;
                for (int b = 0; b < TILE; ++b) along.at[b] = state[tile][a][b], across.at[b] = state[tile][b][a];
                if (straight) four(&straight[(border * N + j + a) * N + i]) = along;
                if (transposed) four(&transposed[(border * N + i + a) * N + j]) = across;
            }
        }
        __syncthreads();
    }
}

// ---- gradients within a chunk ----------------------------------------------------------------------------------------

struct Gradients {  // this thread's tiles
    Tile r, k, v;
    float u[TILE];
};

// Pairs within a tile. The gradient of the decays goes to ge.
__device__ void gradients_within_tiles(Gradients& g, BackwardMemory& m, const float* u) {
    const int t0 = TILE * row(), j = TILE * column();
    const Four<float> bonus = four(&u[j]);
    Four<float> r[TILE], k[TILE], a[TILE], ga[TILE] = {}, on[TILE];
    for (int t = 0; t < TILE; ++t) {
        r[t] = four(&m.r[t0 + t][j]), k[t] = four(&m.k[t0 + t][j]), a[t] = four(&m.a[t0 + t][j]);
        on[t] = four(&m.s[t0 + t][t0]);
    }
#pragma unroll
    for (int b = 0; b < TILE; ++b)
#pragma unroll
        for (int t = 0; t < TILE; ++t) {
            g.r[t][b] += on[t].at[t] * bonus.at[b] * k[t].at[b];
            g.k[t][b] += on[t].at[t] * bonus.at[b] * r[t].at[b];
            g.u[b] += on[t].at[t] * r[t].at[b] * k[t].at[b];
#pragma unroll
            for (int s = 0; s < t; ++s) {
                const float on_weight = on[t].at[s] * r[t].at[b] * k[s].at[b] + on[s].at[t] * r[s].at[b] * k[t].at[b];
                float weight = 1.0f;
#pragma unroll
                for (int between = s + 1; between < t; ++between) {
                    float others = on_weight;
#pragma unroll
                    for (int other = s + 1; other < t; ++other)
                        if (other != between) others *= a[other].at[b];
                    ga[between].at[b] += others;
                    weight *= a[between].at[b];
                }
                g.r[t][b] += on[t].at[s] * weight * k[s].at[b];
                g.k[s][b] += on[t].at[s] * weight * r[t].at[b];
                g.r[s][b] += on[s].at[t] * weight * k[t].at[b];
                g.k[t][b] += on[s].at[t] * weight * r[s].at[b];
            }
        }
    for (int t = 0; t < TILE; ++t) four(&m.ge[t0 + t][j]) = ga[t];
}

// Add what comes through e: read is the gradient of r e, sent that of k e. The gradient of e goes to ge.
__device__ void gradients_through_products(Gradients& g, const Tile& read, const Tile& sent, BackwardMemory& m) {
    for (int a = 0; a < TILE; ++a) {
        const int t = TILE * row() + a, j = TILE * column();
        const Four<float> e = four(&m.e[t][j]), r = four(&m.r[t][j]), k = four(&m.k[t][j]);
        Four<float> ge;
        for (int b = 0; b < TILE; ++b) {
            g.r[a][b] += e.at[b] * read[a][b];
            g.k[a][b] += e.at[b] * sent[a][b];
            ge.at[b] = r.at[b] * read[a][b] + k.at[b] * sent[a][b];
        }
        four(&m.ge[t][j]) = ge;
    }
}

// Pairs in different halves of their block of 2M.
template <int M> __device__ void gradients_across(Gradients& g, float (&ga)[L], BackwardMemory& m) {
    walk_to_borders<M>(m.e, m.a);
    __syncthreads();
    const int t0 = TILE * row(), other = (t0 / M ^ 1) * M;
    Tile read = {}, sent = {};
#pragma unroll 2
    for (int s = other; s < other + M; ++s) {
        const Four<float> e = four(&m.e[s][TILE * column()]), k = four(&m.k[s][TILE * column()]);
        const Four<float> r = four(&m.r[s][TILE * column()]), on_s = four(&m.s[s][t0]);
        for (int a = 0; a < TILE; ++a)
            for (int b = 0; b < TILE; ++b) {
                read[a][b] += m.s[t0 + a][s] * (k.at[b] * e.at[b]);
                sent[a][b] += on_s.at[a] * (r.at[b] * e.at[b]);
            }
    }
    gradients_through_products(g, read, sent, m);
    __syncthreads();
    walk_back_from_borders<M>(ga, m.e, m.a, m.ge);
}

// What crosses one edge of the chunk: the first (DIRECTION 1: products from the first position on) or the last (-1).
// `seen` is the transposed state that y read there, `felt` the gradient of the state that k and v wrote to there, and
// g_total the gradient of the product of all the chunk's decays.
template <int DIRECTION>
__device__ void gradients_at_edge(Gradients& g, float (&ga)[L], const float* seen, const float* felt,
                                  const float* felt_transposed, float g_total, BackwardMemory& m) {
    constexpr int FROM = DIRECTION > 0 ? 0 : L - 1;
    if (channel() < N) walk(m.e, m.a, FROM, DIRECTION, L);
    __syncthreads();
    Tile read = {}, sent = {};
    multiply(read, m.gy, nullptr, seen);
    multiply(sent, m.v, nullptr, felt_transposed);
    multiply(g.v, m.k, m.e, felt);
    gradients_through_products(g, read, sent, m);
    __syncthreads();
    if (channel() < N) walk_back<DIRECTION, L>(ga, FROM, g_total, m.e, m.a, m.ge);
}

extern __shared__ Four<float> shared_memory[];

}  // namespace

// states: for each block, the state before and the one after each border between chunks, (2, chunks - 1, N, N).
extern "C" __global__ void __launch_bounds__(THREADS)
wkv6_forward(int B, int T, int H, const INPUT* r, const INPUT* k, const INPUT* v, const DECAY* w, const float* u, INPUT* y,
             float* states) {
    Memory& m = *reinterpret_cast<Memory*>(shared_memory);
    for (int index = blockIdx.x; index < B * H; index += gridDim.x) {
        const Sequence of(index, T, H);
        const long long borders = static_cast<long long>(of.chunks - 1) * N * N;
        float* const before = states + blockIdx.x * 2 * borders;
        float* const after = before + borders;
        sweep(1, before, nullptr, k, v, w, of, m);
        sweep(-1, after, nullptr, k, v, w, of, m);
        for (int chunk = 0; chunk < of.chunks; ++chunk) {
            load(m.r, r, of, chunk);
            load(m.k, k, of, chunk);
            load(m.v, v, of, chunk);
            load_decays(m.a, w, of, chunk);
            __syncthreads();
            scores(m, u + index % H * N);
            Tile tile = {};
            multiply(tile, m.s, m.v, of.count(chunk));
            if (chunk > 0) {
                if (channel() < N) walk(m.e, m.a, 0, 1, L);
                __syncthreads();
                multiply(tile, m.r, m.e, before + (chunk - 1) * N * N);
                __syncthreads();
            }
            if (chunk < of.chunks - 1) {
                if (channel() < N) walk(m.e, m.a, L - 1, -1, L);
                __syncthreads();
                multiply(tile, m.r, m.e, after + chunk * N * N);
            }
            store(y, tile, of, chunk);
            __syncthreads();
        }
    }
}

// gu is float (B, H, N), to be summed over B. states: for each block, (6, chunks - 1, N, N), the states before and after
// each border, transposed, and the gradients that reach them there, straight and transposed.
extern "C" __global__ void __launch_bounds__(THREADS)
wkv6_backward(int B, int T, int H, const INPUT* r, const INPUT* k, const INPUT* v, const DECAY* w, const float* u,
              const INPUT* gy, INPUT* gr, INPUT* gk, INPUT* gv, DECAY* gw, float* gu, float* states) {
    BackwardMemory& m = *reinterpret_cast<BackwardMemory*>(shared_memory);
    for (int index = blockIdx.x; index < B * H; index += gridDim.x) {
        const Sequence of(index, T, H);
        const float* const bonus = u + index % H * N;
        const long long borders = static_cast<long long>(of.chunks - 1) * N * N;
        float* const before = states + blockIdx.x * 6 * borders;
        float* const after = before + borders;
        float *const g_before = after + borders, *const g_before_transposed = g_before + borders;
        float *const g_after = g_before_transposed + borders, *const g_after_transposed = g_after + borders;
        sweep(1, nullptr, before, k, v, w, of, m);
        sweep(-1, nullptr, after, k, v, w, of, m);
        sweep(-1, g_before, g_before_transposed, r, gy, w, of, m);  // gradients run against their states
        sweep(1, g_after, g_after_transposed, r, gy, w, of, m);

        Gradients g = {};
        for (int chunk = 0; chunk < of.chunks; ++chunk) {
            load(m.r, r, of, chunk);
            load(m.k, k, of, chunk);
            load(m.v, v, of, chunk);
            load(m.gy, gy, of, chunk);
            load_decays(m.a, w, of, chunk);
            __syncthreads();
            for (int a = 0; a < TILE; ++a)
                for (int b = 0; b < TILE; ++b) g.r[a][b] = g.k[a][b] = g.v[a][b] = 0.0f;
            scores(m, bonus);
            multiply_transposed(g.v, m.s, m.gy, of.count(chunk));
            __syncthreads();
            score_gradients(m);
            __syncthreads();
            gradients_within_tiles(g, m, bonus);
            __syncthreads();
            float ga[L];
#pragma unroll
            for (int t = 0; t < L; ++t) ga[t] = channel() < N ? m.ge[t][channel()] : 0.0f;
            gradients_across<4>(g, ga, m);
            gradients_across<8>(g, ga, m);
            gradients_across<16>(g, ga, m);

            const int here = (chunk - 1) * N * N, next = chunk * N * N;  // the borders at the chunk's two edges
            if (chunk > 0) {
                float g_total = 0.0f;
                if (chunk < of.chunks - 1 && channel() < N)
                    for (int i = 0; i < N; ++i) {
                        const int at = i * N + channel();
                        g_total += before[here + at] * g_before_transposed[next + at];
                        g_total += after[next + at] * g_after_transposed[here + at];
                    }
                gradients_at_edge<1>(g, ga, before + here, g_after + here, g_after_transposed + here, g_total, m);
            }
            if (chunk < of.chunks - 1)
                gradients_at_edge<-1>(g, ga, after + next, g_before + next, g_before_transposed + next, 0.0f, m);

            store(gr, g.r, of, chunk);
            store(gk, g.k, of, chunk);
            store(gv, g.v, of, chunk);
            if (channel() < N) {
#pragma unroll
                for (int t = 0; t < L; ++t)
                    if (t < of.count(chunk)) {
                        const long long at = of.at(of.first(chunk) + t) + channel();
                        const float raw = widen(w[at]);
                        narrow(-ga[t] * expf(raw - expf(raw)), gw[at]);
                    }
            }
            __syncthreads();
        }
        for (int b = 0; b < TILE; ++b) m.ge[row()][TILE * column() + b] = g.u[b];
        __syncthreads();
        if (channel() < N) {
            float sum = 0.0f;
            for (int p = 0; p < ROWS; ++p) sum += m.ge[p][channel()];
            gu[static_cast<long long>(index) * N + channel()] = sum;
        }
    }
}
