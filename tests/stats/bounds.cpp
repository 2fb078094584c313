// Calls every entry of the kernel on heap blocks of exactly the size that it is told, so that a sanitizer sees any
// access beyond. Prints the number of calls.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

extern "C" int tracehooks_level();
extern "C" int tracehooks_summarize(const void *);
extern "C" int tracehooks_summarize_many(const void *);
extern "C" int tracehooks_hash_rows(const void *);

int main() {
    const int sizes[] = {4, 8, 2, 2, 1, 1, 1, 2, 2, 4, 4, 8, 8};
    long calls = 0;
    for (int64_t level = 0; level <= tracehooks_level(); ++level)
        for (int64_t dtype = 0; dtype < 13; ++dtype)
            for (int64_t n = 0; n < 9000; n += n < 200 || (n > 4000 && n < 4200) ? 1 : 97) {
                size_t bytes = static_cast<size_t>(n) * sizes[dtype];
                auto *data = static_cast<unsigned char *>(std::malloc(bytes));
                for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(i * 2654435761u >> (n % 24));
                if (dtype == 4)
                    for (size_t i = 0; i < bytes; ++i) data[i] &= 1;
                for (int64_t flags : {0, 1, 7}) {
                    size_t width = 12 + (flags & 2 ? 16 : 0) + (flags & 4 ? 64 : 0);
                    auto *row = static_cast<int64_t *>(std::malloc(8 * width));
                    int64_t options = dtype | flags << 8 | (level + 1) << 16 | int64_t{2} << 32;
                    int64_t request[5] = {reinterpret_cast<int64_t>(data), n, options, reinterpret_cast<int64_t>(row), 0};
                    if (tracehooks_summarize(request) != (!data && n ? 1 : 0)) return 1;
                    auto *rows = static_cast<int64_t *>(std::malloc(8 * 3 * width));
                    auto *requests = static_cast<int64_t *>(std::malloc(3 * sizeof(request)));
                    for (int i = 0; i < 3; ++i) {  // two that share the threads, one that has them to itself
                        request[2] = i == 1 ? options : options & 0xFFFFFFFF;
                        request[3] = reinterpret_cast<int64_t>(rows + i * width);
                        std::memcpy(requests + 5 * i, request, sizeof(request));
                    }
                    int64_t many[3] = {reinterpret_cast<int64_t>(requests), 3, 2};
                    if (tracehooks_summarize_many(many) != (!data && n ? 1 : 0)) return 1;
                    for (int i = 0; i < 3; ++i)
                        if (std::memcmp(row, rows + i * width, 8 * width)) return 1;
                    request[4] = request[0];  // a change of nothing
                    if (tracehooks_summarize(request) != ((!data && n) || dtype > 3 ? 1 : 0)) return 1;
                    std::free(row), std::free(rows), std::free(requests), ++calls;
                }
                auto *hash = static_cast<int64_t *>(std::malloc(8));
                int64_t request[5] = {reinterpret_cast<int64_t>(data), 1, (level + 1) << 16,
                                      reinterpret_cast<int64_t>(hash), static_cast<int64_t>(bytes)};
                if (tracehooks_hash_rows(request)) return 1;
                std::free(hash), std::free(data), ++calls;
            }
    std::printf("%ld\n", calls);
}
