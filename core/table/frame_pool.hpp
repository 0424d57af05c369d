// Numbers of frames: a frame is the memory of one row on a device, which the core knows by its number alone. Tables
// whose rows have the same layout share a pool. Such a table keeps ids, stamps and versions as every table does; the
// payload of its rows is the number of their frame.
// Invariants: a frame is free, or one row has it: free_ and the frames of rows are together 0 .. used_-1, each once;
//   used_ <= limit_ <= kMostFrames. Thread-safe: buckets take and give frames at the same time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "base/assertions.hpp"

namespace satrap {

inline constexpr std::uint32_t kMostFrames = 0x7fffffffU; // the device counts them in int32
inline constexpr std::uint32_t kNoFrame = 0xffffffffU;

class FramePool {
  public:
    // Fills a prefix of `out` with free frames and returns its length, which is less only at the limit.
    std::size_t take(std::span<std::uint32_t> out) {
        std::lock_guard lock(mutex_);
        SATRAP_ASSERT(used_ <= limit_ && free_.size() <= used_);
        std::size_t n = 0;
        for (; n < out.size() && !free_.empty(); free_.pop_back()) out[n++] = free_.back();
        for (; n < out.size() && used_ < limit_; ++used_) out[n++] = used_;
        return n;
    }

    void give(std::span<const std::uint32_t> frames) {
        std::lock_guard lock(mutex_);
        SATRAP_ASSERT(std::all_of(frames.begin(), frames.end(), [&](std::uint32_t frame) { return frame < used_; }));
        SATRAP_ASSERT(free_.size() + frames.size() <= used_); // none is given twice
        free_.insert(free_.end(), frames.rbegin(), frames.rend());
    }

    // How many frames the device's memory must have: one more than the largest number that was taken.
    std::uint32_t used() const {
        std::lock_guard lock(mutex_);
        return used_;
    }
    // How many frames below used() are free.
    std::uint32_t num_free() const {
        std::lock_guard lock(mutex_);
        return static_cast<std::uint32_t>(free_.size());
    }
    std::uint32_t limit() const {
        std::lock_guard lock(mutex_);
        return limit_;
    }
    // Never below used().
    void set_limit(std::uint32_t limit) {
        std::lock_guard lock(mutex_);
        limit_ = std::max(used_, std::min(limit, kMostFrames));
    }
    std::vector<std::uint32_t> free() const {
        std::lock_guard lock(mutex_);
        return free_;
    }

  private:
    mutable std::mutex mutex_;
    std::vector<std::uint32_t> free_;
    std::uint32_t used_ = 0;
    std::uint32_t limit_ = kMostFrames;
};

} // namespace satrap
