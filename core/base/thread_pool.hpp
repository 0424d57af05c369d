// A pool that runs one function on num_threads threads, including the caller's. It does not affect results:
// callers split work so that the split cannot matter. A caller that finds the pool busy works alone; one that
// has borrowed threads (borrowed_openmp.hpp) uses those instead.
// Lock: busy_ is held for a whole run; mutex_ guards the hand-over only. An exception must not leave the function
// because it could not be delivered from here: a job that may throw, or run out of memory, catches its exceptions.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/borrowed_openmp.hpp"
#include "base/errors.hpp"

namespace satrap {

inline void relax_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class ThreadPool {
  public:
    explicit ThreadPool(unsigned num_threads) {
        try {
            for (unsigned i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
        } catch (const std::exception& error) {
            const std::size_t started = threads_.size();
            stop();
            throw InputError("num_threads=" + std::to_string(num_threads) + ": only " + std::to_string(started) +
                             " threads could be started (" + error.what() +
                             "); use fewer, or raise the system's limit of threads or memory");
        }
    }
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    ~ThreadPool() { stop(); }

    unsigned num_threads() const { return static_cast<unsigned>(threads_.size()) + 1; }

    // Calls job(thread, threads) once for each thread in 0..threads-1 and returns when all are done.
    void run(const std::function<void(unsigned, unsigned)>& job) {
        if (threads_.empty()) return job(0, 1);
        if (const OpenMp* openmp = OpenMp::borrowed()) return openmp->run(num_threads(), job);
        std::unique_lock alone(busy_, std::try_to_lock);
        if (!alone.owns_lock()) return job(0, 1);
        running_.store(static_cast<unsigned>(threads_.size()));
        {
            std::lock_guard lock(mutex_);
            job_ = &job;
            generation_.fetch_add(1);
        }
        wake_.notify_all();
        job(0, num_threads());
        for (unsigned spin = 0; running_.load(std::memory_order_acquire) != 0; ++spin) {
            if (spin < kWaitSpins)
                relax_cpu();
            else
                std::this_thread::yield();
        }
    }

  private:
    // About 10 us, within which the next phase of a batch usually follows. A server and a worker on one machine share
    // its cores, which the other one needs after a call.
    static constexpr unsigned kIdleSpins = 400;
    static constexpr unsigned kWaitSpins = 4000; // about 100 us, then others may run

    void stop() {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
            generation_.fetch_add(1);
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    void serve(unsigned thread) {
        std::uint64_t seen = 0;
        for (;;) {
            for (unsigned spin = 0; spin < kIdleSpins && generation_.load(std::memory_order_acquire) == seen; ++spin)
                relax_cpu();
            const std::function<void(unsigned, unsigned)>* job;
            {
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load() != seen; });
                seen = generation_.load();
                if (stopping_) return;
                job = job_;
            }
            (*job)(thread, num_threads());
            running_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex busy_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<std::uint64_t> generation_{0};
    std::atomic<unsigned> running_{0};
    const std::function<void(unsigned, unsigned)>* job_ = nullptr;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

} // namespace satrap
