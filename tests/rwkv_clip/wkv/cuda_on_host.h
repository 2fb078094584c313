// The part of CUDA's language that the kernels use, on the host: a block's threads are fibers, run one after another from
// barrier to barrier, in an order that may be shuffled so that a forgotten barrier shows in the numbers. Shared memory is
// full of NaN when a block starts and, under the address sanitizer, ends where the launch said.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __noinline__
#define __shared__
#define __launch_bounds__(threads)

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

struct Index {
    unsigned int x;
};
inline Index threadIdx, blockIdx, gridDim;

inline float __uint_as_float(unsigned int bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline unsigned int __float_as_uint(float x) {
    unsigned int bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

namespace host {

constexpr std::size_t STACK_BYTES = 64 * 1024;
constexpr std::size_t MOST_SHARED_BYTES = 227 * 1024;  // what a block may have at most, of the GPUs compiled for

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool finished = false;
    void* sanitizer = nullptr;
};

inline ucontext_t scheduler;
inline void* scheduler_sanitizer = nullptr;
inline const void* scheduler_stack = nullptr;
inline std::size_t scheduler_stack_bytes = 0;
inline std::vector<Fiber> fibers;
inline void (*kernel)(void**);
inline void** arguments;

inline void arrived() {  // in a fiber, right after the scheduler switched to it
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fibers[threadIdx.x].sanitizer, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

inline void leave(bool for_good) {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.finished = for_good;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.sanitizer, scheduler_stack, scheduler_stack_bytes);
#endif
    swapcontext(&fiber.context, &scheduler);
    arrived();
}

inline void start() {
    arrived();
    kernel(arguments);
    leave(true);
}

inline void resume(unsigned int thread) {
    threadIdx.x = thread;
    Fiber& fiber = fibers[thread];
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&scheduler_sanitizer, fiber.stack.data(), STACK_BYTES);
#endif
    swapcontext(&scheduler, &fiber.context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(scheduler_sanitizer, nullptr, nullptr);
#endif
}

inline void shuffle(std::vector<unsigned int>& order, unsigned int& state) {
    for (std::size_t left = order.size(); left > 1; --left) {
        state = 1664525u * state + 1013904223u;  // Numerical Recipes' generator; its high bits are the random ones
        std::swap(order[left - 1], order[(state >> 16) % left]);
    }
}

inline void run_block(unsigned int threads, unsigned int& seed) {
    fibers.resize(threads);
    std::vector<unsigned int> order;
    for (Fiber& fiber : fibers) {
        fiber.finished = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.context, start, 0);
        order.push_back(order.size());
    }
    unsigned int finished = 0;
    while (finished == 0) {
        if (seed) shuffle(order, seed);
        for (unsigned int thread : order) resume(thread);
        for (const Fiber& fiber : fibers) finished += fiber.finished;
    }
    if (finished != threads)
        throw std::runtime_error(std::to_string(finished) + " threads ended, the others wait at a barrier");
}

// Run a grid of blocks, one after another. seed 0: threads in ascending order, else shuffled at every barrier.
inline void launch(void (*kernel_)(void**), void** arguments_, unsigned int blocks, unsigned int threads, void* shared,
                   std::size_t shared_bytes, unsigned int seed) {
    kernel = kernel_, arguments = arguments_, gridDim.x = blocks;
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(static_cast<char*>(shared) + shared_bytes, MOST_SHARED_BYTES - shared_bytes);
#endif
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (std::size_t i = 0; i < shared_bytes / sizeof(float); ++i)
            static_cast<float*>(shared)[i] = std::numeric_limits<float>::quiet_NaN();
        run_block(threads, seed);
    }
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(shared, MOST_SHARED_BYTES);
#endif
}

// Call a function with arguments[0], arguments[1], ..., each a pointer to a value of its type.
template <typename... Types, std::size_t... Places>
void call(void (*function)(Types...), void** arguments, std::index_sequence<Places...>) {
    function(*static_cast<Types*>(arguments[Places])...);
}
template <typename... Types>
void call(void (*function)(Types...), void** arguments) {
    call(function, arguments, std::index_sequence_for<Types...>{});
}

}  // namespace host

inline void __syncthreads() { host::leave(false); }
