// A few threads for large tensors: torch's own team where it has one to share, or else some that sleep until they are
// wanted. One call at a time has them; another that comes meanwhile does its work alone. A child process after fork has
// none of its parent's threads, and cannot use a team any more: it starts with an empty pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#define TRACEHOOKS_POSIX 1
#endif

namespace tracehooks {

// Threads inherit the mask of signals of whoever starts them: with all blocked, signals still go to Python's own.
class SignalsBlocked {
#ifdef TRACEHOOKS_POSIX
    sigset_t before_;

  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
#endif
};

class Pool {
  public:
    using Work = void (*)(void *context);

    // Calls work(context) in this thread and in up to `helpers` others at once; returns when all have returned.
    void run(int helpers, Work work, void *context) {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            grow(helpers);
            work_ = work, context_ = context, wanted_ = std::min(helpers, threads_);
        }
        wake_.notify_all();
        work(context);
        std::unique_lock<std::mutex> hold(mutex_);
        wanted_ = 0;  // whoever wakes only now finds nothing to do
        idle_.wait(hold, [this] { return busy_ == 0; });
    }

  private:
    void grow(int helpers) {
        SignalsBlocked blocked;
        try {
            for (; threads_ < std::min(helpers, MOST); ++threads_) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error &) {  // as many as the system gives
        }
    }

    void serve() {
        std::unique_lock<std::mutex> hold(mutex_);
        for (;;) {
            wake_.wait(hold, [this] { return wanted_ > 0; });
            --wanted_, ++busy_;
            Work work = work_;
            void *context = context_;
            hold.unlock();
            work(context);
            hold.lock();
            if (--busy_ == 0) idle_.notify_one();
        }
    }

    static constexpr int MOST = 63;
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    Work work_ = nullptr;
    void *context_ = nullptr;
    int threads_ = 0, wanted_ = 0, busy_ = 0;
};

// `GOMP_parallel` of the OpenMP runtime that torch runs on: calls work(context) in as many threads at once.
using Team = void (*)(Pool::Work work, void *context, unsigned threads, unsigned flags);

// The threads of this process. The pool is kept forever: sleeping threads may outlive main.
struct Pools {
    std::atomic<Team> team{nullptr};
    std::atomic<Pool *> pool{nullptr};
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
};

inline Pools &pools() {
    static Pools *const only = [] {
        auto *made = new Pools;
#ifdef TRACEHOOKS_POSIX
        pthread_atfork(nullptr, nullptr, [] {
            pools().team.store(nullptr);
            pools().pool.store(nullptr);
            pools().taken.clear();
        });
#endif
        return made;
    }();
    return *only;
}

// work(context) in up to `threads` threads, this one among them.
inline void in_threads(int threads, Pool::Work work, void *context) {
    if (threads <= 1 || pools().taken.test_and_set(std::memory_order_acquire)) return work(context);
    if (Team team = pools().team.load()) {
        team(work, context, static_cast<unsigned>(threads), 0);
    } else {
        if (!pools().pool.load()) pools().pool.store(new Pool);
        pools().pool.load()->run(threads - 1, work, context);
    }
    pools().taken.clear(std::memory_order_release);
}

}  // namespace tracehooks
