// The CUDA source itself, compiled for the host, as a library with one function that launches its kernels.
#include "cuda_on_host.h"

#include WKV6_SOURCE

namespace {
Four<float> shared_memory[host::MOST_SHARED_BYTES / sizeof(Four<float>)];
std::string error;

void forward(void** arguments) { host::call(wkv6_forward, arguments); }
void backward(void** arguments) { host::call(wkv6_backward, arguments); }
}  // namespace

// arguments: a pointer to each of the kernel's arguments. Returns what went wrong, or null.
extern "C" const char* launch(bool backwards, unsigned int blocks, unsigned int threads, std::size_t shared_bytes,
                              unsigned int seed, void** arguments) try {
    const std::size_t needed = backwards ? sizeof(BackwardMemory) : sizeof(Memory);
    if (threads != THREADS) throw std::runtime_error("expected " + std::to_string(THREADS) + " threads");
    if (shared_bytes != needed) throw std::runtime_error("expected " + std::to_string(needed) + " shared bytes");
    host::launch(backwards ? backward : forward, arguments, blocks, threads, shared_memory, shared_bytes, seed);
    return nullptr;
} catch (const std::exception& thrown) {
    error = thrown.what();
    return error.c_str();
}

// Every number of a storage type widened, and floats narrowed to it.
extern "C" void widen_all(const INPUT* from, float* to, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}
extern "C" void narrow_all(const float* from, INPUT* to, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) narrow(from[i], to[i]);
}
