// Statistics of tensors in the memory of the processor: one pass, all definitions of docs/statistics.md. A plain C
// interface, which stats/cpu.py calls. The result does not depend on instruction set, threads or floating-point mode.

#include <atomic>
#include <memory>
#include <new>

#include "native/common.h"
#include "native/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
namespace tracehooks::avx2 {
#include "native/lanes_avx2.h"
#include "native/kernel.h"
#include "native/nonfinite.h"
#undef TARGET
}  // namespace tracehooks::avx2
namespace tracehooks::avx512 {
#include "native/lanes_avx512.h"
#include "native/kernel.h"
#include "native/nonfinite.h"
#undef TARGET
}  // namespace tracehooks::avx512
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
namespace tracehooks::neon {
#include "native/lanes_neon.h"
#include "native/kernel.h"
#include "native/nonfinite.h"
#undef TARGET
}  // namespace tracehooks::neon
#endif

namespace tracehooks::portable {
#include "native/lanes_portable.h"
#include "native/kernel.h"
#include "native/nonfinite.h"
#undef TARGET
}  // namespace tracehooks::portable

namespace tracehooks {
namespace {

constexpr int64_t BLOCKS_AT_A_TIME = 8;
enum Status { DONE, UNSUPPORTED, OUT_OF_MEMORY };

// Rounding to nearest and subnormals kept, whatever the calling thread has chosen, until the end of a scope.
class PlainFloats {
#if defined(__x86_64__)
    unsigned before_ = _mm_getcsr();

  public:
    PlainFloats() { _mm_setcsr(0x1F80); }
    ~PlainFloats() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
    uint64_t before_;

  public:
    PlainFloats() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
    }
    ~PlainFloats() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
#endif
};

const Kernel KERNELS[] = {
    {"portable", portable::block, portable::hash_bytes, portable::nonfinite},
#if defined(__x86_64__)
    {"avx2", avx2::block, avx2::hash_bytes, avx2::nonfinite},
    {"avx512", avx512::block, avx512::hash_bytes, avx512::nonfinite},
#elif defined(__aarch64__) && defined(__ARM_NEON)
    {"neon", neon::block, neon::hash_bytes, neon::nonfinite},
#endif
};
constexpr int LEVELS = sizeof(KERNELS) / sizeof(KERNELS[0]);

int best_level() {
#if defined(__x86_64__)
    static const int best = [] {
        __builtin_cpu_init();
        bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        bool wider = wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
        return wider ? 2 : wide ? 1 : 0;
    }();
    return best;
#else
    return LEVELS - 1;  // what the processor must have to run this at all
#endif
}

// Options of a call, packed by stats/cpu.py: dtype, flags, 1 + level (0: the best), threads.
struct Options {
    int dtype, flags, threads, level;
    explicit Options(int64_t packed)
        : dtype(packed & 0xFF), flags(packed >> 8 & 0xFF), threads(packed >> 32 & 0xFFFF),
          level(static_cast<int>(packed >> 16 & 0xFF) - 1) {
        if (level < 0) level = best_level();
    }
    bool supported() const { return level <= best_level(); }
};

// The measuring of one tensor: threads take blocks as they come, each block leaves its record in its own place.
struct Measuring {
    Job job;
    const Kernel &kernel;
    int64_t blocks;
    Record *records;
    double *sketches;  // SKETCH of each block, or null
    Totals totals;
    std::mutex mutex;
    std::atomic<int64_t> next{0};

    // All blocks in this thread, which needs no lock.
    void take_all() {
        for (int64_t i = 0; i < blocks; ++i) kernel.block(job, i, totals, records[i], sketch_of(i));
    }

    void take_blocks() {
        PlainFloats plain;
        Totals found;
        for (;;) {
            int64_t index = next.fetch_add(BLOCKS_AT_A_TIME), end = std::min(index + BLOCKS_AT_A_TIME, blocks);
            if (index >= end) break;
            for (; index < end; ++index)
                kernel.block(job, index, found, records[index], sketch_of(index));
        }
        std::lock_guard<std::mutex> hold(mutex);
        totals.merge(found);
    }

    double *sketch_of(int64_t index) const { return sketches ? sketches + index * SKETCH : nullptr; }

    void run(int threads) {
        threads = static_cast<int>(std::min<int64_t>(threads, (blocks + BLOCKS_AT_A_TIME - 1) / BLOCKS_AT_A_TIME));
        if (threads <= 1) return take_all();
        in_threads(threads, [](void *self) { static_cast<Measuring *>(self)->take_blocks(); }, this);
    }
};

// A sum with its rounding errors carried along (Neumaier, 1974).
struct Precise {
    double sum = 0, error = 0;
    void add(double x) {
        double next = sum + x;
        error += std::fabs(sum) >= std::fabs(x) ? (sum - next) + x : (x - next) + sum;
        sum = next;
    }
    double value() const { return sum + error; }
};

struct Moments {
    double mean, std, rms;
};

Moments merged(const Record *records, int64_t blocks) {
    int64_t finite = 0;
    Precise sum, squares, spread;
    for (int64_t i = 0; i < blocks; ++i) {
        finite += records[i].finite;
        sum.add(records[i].sum), sum.add(records[i].rest * static_cast<double>(records[i].finite));
        squares.add(records[i].squares);
    }
    double n = static_cast<double>(finite), mean = sum.value() / n;
    for (int64_t i = 0; i < blocks; ++i) {
        if (!records[i].finite) continue;
        double size = static_cast<double>(records[i].finite), away = records[i].sum / size - mean + records[i].rest;
        spread.add(records[i].spread), spread.add(size * away * away);
    }
    return {mean, std::sqrt(spread.value() / n), std::sqrt(squares.value() / n)};
}

bool extreme(double absmax) { return absmax > 0x1p500 || (absmax > 0 && absmax < 0x1p-400); }

// Moments of float64 whose squares overflow or vanish: a second pass over values scaled by a power of two, which is
// exact. The power is split, since one factor may not be representable.
Moments scaled(const Measuring &first, double absmax, int threads) {
    int exponent = std::ilogb(absmax), half = exponent / 2;
    Job job = first.job;
    job.flags = 0, job.scale_a = std::ldexp(1.0, -half), job.scale_b = std::ldexp(1.0, half - exponent);
    Measuring again{job, first.kernel, first.blocks, first.records, nullptr};
    again.run(threads);
    Moments m = merged(first.records, first.blocks);
    // none of them is larger than the largest element: a rounding upwards must not become an infinity
    auto back = [=](double x) { return std::clamp(x / job.scale_b / job.scale_a, -absmax, absmax); };
    return {back(m.mean), back(m.std), back(m.rms)};
}

void write_row(const Measuring &done, Moments moments, int64_t *row) {
    const Totals &t = done.totals;
    bool any = t.low <= t.high;
    // Adding zero makes a negative zero positive: which zero a minimum finds depends on the order of comparing.
    double low = any ? t.low + 0.0 : NOT_A_NUMBER, high = any ? t.high + 0.0 : NOT_A_NUMBER;
    double absmax = any ? std::max(std::fabs(low), std::fabs(high)) : NOT_A_NUMBER;
    if (!any) moments = {NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER};
    uint64_t bytes_hash = done.job.flags & HASH ? t.hash : 0;
    int64_t counts[6] = {done.job.count, t.nan, t.posinf, t.neginf, t.zeros, static_cast<int64_t>(bytes_hash)};
    double floats[6] = {low, high, moments.mean, moments.std, moments.rms, absmax};
    std::memcpy(row, counts, sizeof(counts));
    std::memcpy(row + 6, floats, sizeof(floats));
    row += 12;
    if (done.sketches) {
        double sums[SKETCH] = {};
        for (int64_t i = 0; i < done.blocks * SKETCH; ++i) sums[i % SKETCH] += done.sketches[i];
        std::memcpy(row, sums, sizeof(sums));
        row += SKETCH;
    }
    if (done.job.flags & HISTOGRAM) std::memcpy(row, t.histogram, sizeof(t.histogram));
}

int64_t size_of(int dtype) {
    switch (dtype) {
        case F64: case U64: case I64: return 8;
        case F32: case U32: case I32: return 4;
        case BOOL: case U8: case I8: return 1;
        default: return 2;
    }
}

// Of what is hashed: the elements as they are, or the changes of such.
int64_t hashed_size(const Job &job) { return job.before && size_of(job.dtype) == 2 ? 4 : size_of(job.dtype); }

uint64_t finished(uint64_t sum, int64_t bytes) { return finish64(sum ^ static_cast<uint64_t>(bytes) * GOLDEN64); }

int measure(const Job &job, const Options &options, Record *records, double *sketches, int64_t *row) {
    PlainFloats plain;
    int64_t blocks = (job.count + BLOCK - 1) / BLOCK;
    Measuring all{job, KERNELS[options.level], blocks, records, job.flags & SKETCHED ? sketches : nullptr};
    all.run(options.threads);
    all.totals.hash = finished(all.totals.hash, job.count * hashed_size(job));
    double absmax = std::max(std::fabs(all.totals.low), std::fabs(all.totals.high));
    bool again = job.dtype == F64 && all.totals.low <= all.totals.high && extreme(absmax);
    write_row(all, again ? scaled(all, absmax, options.threads) : merged(records, blocks), row);
    return DONE;
}

// Rows of equal size, each hashed by one thread.
struct Hashing {
    const char *data;
    int64_t rows, row_bytes;
    const Kernel &kernel;
    int64_t *out;
    std::atomic<int64_t> next{0};

    void take_rows() {
        for (int64_t i; (i = next.fetch_add(1)) < rows;)
            out[i] = static_cast<int64_t>(finished(kernel.hash(data + i * row_bytes, row_bytes, 0), row_bytes));
    }
};

// What of one tensor is not finite. No record is kept: kinds found in any block are found in all.
struct Watching {
    Job job;
    const Kernel &kernel;
    std::atomic<int64_t> next{0};
    std::atomic<int> kinds{0};

    int64_t blocks() const { return (job.count + BLOCK - 1) / BLOCK; }

    void take_blocks() {
        int found = 0;
        for (;;) {
            int64_t index = next.fetch_add(BLOCKS_AT_A_TIME), end = std::min(index + BLOCKS_AT_A_TIME, blocks());
            if (index >= end) break;
            for (; index < end; ++index) found |= kernel.nonfinite(job, index);
        }
        kinds.fetch_or(found);
    }
};

}  // namespace
}  // namespace tracehooks

#if defined(_WIN32)
#define EXPORTED extern "C" __declspec(dllexport)
#else
#define EXPORTED extern "C" __attribute__((visibility("default")))
#endif

using namespace tracehooks;

EXPORTED int tracehooks_abi() { return ABI; }

// The best instruction set of this processor, and what a level is called (null: not compiled in).
EXPORTED int tracehooks_level() { return best_level(); }
EXPORTED const char *tracehooks_level_name(int level) {
    return level >= 0 && level < LEVELS ? KERNELS[level].name : nullptr;
}

// From now on threads are those of an OpenMP runtime, by its GOMP_parallel (null: this library's own).
EXPORTED void tracehooks_use_team(void *parallel) { pools().team.store(reinterpret_cast<Team>(parallel)); }

// All take their arguments as one record of numbers and addresses, which costs ctypes least, and return a Status.

// Packed row of `count` elements, or of their changes: of floating-point ones, in float32 or wider.
EXPORTED int tracehooks_summarize(const void *record) {
    Request request;
    std::memcpy(&request, record, sizeof(request));
    Options options(request.packed);
    if (!options.supported() || (!request.data && request.count)) return UNSUPPORTED;
    if (request.before && options.dtype > F16) return UNSUPPORTED;
    Job job{request.data, request.before, request.count, options.dtype, options.flags};
    int64_t blocks = (request.count + BLOCK - 1) / BLOCK;
    if (blocks <= 1) {
        Record moments;
        double sketch[SKETCH] = {};
        return measure(job, options, &moments, sketch, request.out);
    }
    std::unique_ptr<Record[]> records(new (std::nothrow) Record[static_cast<size_t>(blocks)]);
    std::unique_ptr<double[]> sketches;
    if (job.flags & SKETCHED) sketches.reset(new (std::nothrow) double[static_cast<size_t>(blocks * SKETCH)]);
    if (!records || (job.flags & SKETCHED && !sketches)) return OUT_OF_MEMORY;
    return measure(job, options, records.get(), sketches.get(), request.out);
}

// Many tensors: those that ask for threads of their own one after another, the others shared out among threads.
struct Many {
    const Request *requests;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<int> status{DONE};

    bool alone(int64_t i) const { return Options(requests[i].packed).threads > 1; }

    void take(int64_t i) {
        if (int failed = tracehooks_summarize(requests + i)) status.store(failed);
    }

    void take_small() {
        for (int64_t i; (i = next.fetch_add(1)) < count;)
            if (!alone(i)) take(i);
    }
};

// Packed rows of `count` tensors, by requests as tracehooks_summarize takes them.
EXPORTED int tracehooks_summarize_many(const void *record) {
    ManyRequest request;
    std::memcpy(&request, record, sizeof(request));
    Many all{request.requests, request.count};
    for (int64_t i = 0; i < all.count; ++i)
        if (all.alone(i)) all.take(i);
    in_threads(static_cast<int>(request.threads), [](void *self) { static_cast<Many *>(self)->take_small(); }, &all);
    return all.status.load();
}

// Which Kinds of non-finite values `count` tensors hold together, or -1 - Status. (`out` is not read.)
EXPORTED int tracehooks_nonfinite(const void *record) {
    ManyRequest request;
    std::memcpy(&request, record, sizeof(request));
    int kinds = 0;
    for (int64_t i = 0; i < request.count; ++i) {
        const Request &one = request.requests[i];
        Options options(one.packed);
        if (!options.supported() || (!one.data && one.count)) return -1 - UNSUPPORTED;
        Watching all{Job{one.data, nullptr, one.count, options.dtype, 0}, KERNELS[options.level]};
        in_threads(options.threads, [](void *self) { static_cast<Watching *>(self)->take_blocks(); }, &all);
        kinds |= all.kinds.load();
    }
    return kinds;
}

struct RowsRequest {
    const void *data;
    int64_t count, packed;
    int64_t *out;
    int64_t row_bytes;
};

// Hash of each of `count` rows of row_bytes bytes.
EXPORTED int tracehooks_hash_rows(const void *record) {
    RowsRequest request;
    std::memcpy(&request, record, sizeof(request));
    Options options(request.packed);
    if (!options.supported() || (!request.data && request.count && request.row_bytes)) return UNSUPPORTED;
    const Kernel &kernel = KERNELS[options.level];
    Hashing all{static_cast<const char *>(request.data), request.count, request.row_bytes, kernel, request.out};
    int threads = static_cast<int>(std::min<int64_t>(options.threads, request.count));
    in_threads(threads, [](void *self) { static_cast<Hashing *>(self)->take_rows(); }, &all);
    return DONE;
}
