// A std::mutex that can be asked, in builds with assertions, whether the calling thread holds it: functions that expect
// their caller to hold a lock assert is_held(). In other builds it is a std::mutex of the same size and code.
#pragma once

#include <mutex>

#include "base/assertions.hpp"

#ifdef SATRAP_ASSERTIONS
#include <atomic>
#include <thread>
#endif

namespace satrap {

#ifdef SATRAP_ASSERTIONS
class Mutex {
  public:
    void lock() {
        SATRAP_ASSERT(!is_held());
        mutex_.lock();
        owner_.store(std::this_thread::get_id());
    }
    void unlock() {
        SATRAP_ASSERT(is_held());
        owner_.store({});
        mutex_.unlock();
    }
    bool is_held() const { return owner_.load() == std::this_thread::get_id(); }

  private:
    std::mutex mutex_;
    std::atomic<std::thread::id> owner_{};
};
#else
class Mutex : public std::mutex {
  public:
    bool is_held() const { return true; } // never asked
};
#endif

} // namespace satrap
