// Where the rows of some tables on a device are: each in a frame of the device, or in a slot at home, which is this
// process's host memory; never in both. A row keeps the word for it as its payload. Without set_device_frames all rows
// are in frames. A FramePool is the interface of a tier: it takes places, gives them back and lists the free ones.
// Invariant: each frame and each slot is free, or one row has it.
#pragma once

#include <memory>

#include "base/atomic_max.hpp"
#include "table/frame_order.hpp"
#include "table/frame_pool.hpp"

namespace satrap {

inline constexpr std::uint32_t kAtHome = 1U << 31; // this bit of a word: the others are a slot at home

inline bool is_frame(std::uint32_t place) { return place < kAtHome; }
inline bool is_at_home(std::uint32_t place) { return place >= kAtHome && place != kNoFrame; }

// Copies a row from a slot into a frame, from the frame into the slot, or both at once.
struct Move {
    std::uint32_t pool;
    std::uint32_t frame;
    std::uint32_t slot;
    std::uint32_t directions;
    static constexpr std::uint32_t kIn = 1, kOut = 2;
};

class RowPlaces {
  public:
    FramePool device;
    FramePool home;

    // Before the first row: at most so many rows are in frames, all others at home.
    void set_device_frames(std::uint32_t frames) {
        SATRAP_ASSERT(frames <= kMostFrames);
        SATRAP_ASSERT(device.used() == 0 && home.used() == 0);
        device.set_limit(frames);
        order_ = std::make_unique<FrameOrder>(frames);
    }
    bool is_tiered() const { return order_ != nullptr; }
    FrameOrder& order() const {
        SATRAP_ASSERT(is_tiered());
        return *order_;
    }

    // Fills a prefix of `out` with free frames and returns its length. Rows can be ordered in them without an error.
    std::size_t take_frames(std::span<std::uint32_t> out) {
        const std::size_t n = device.take(out);
        try {
            for (std::size_t i = 0; is_tiered() && i < n; ++i) order_->reserve(out[i]);
        } catch (...) {
            device.give(out.first(n));
            throw;
        }
        return n;
    }

    // Returns a place for a new row: a frame if one is free, else a slot; kNoFrame if there is none.
    std::uint32_t take() {
        std::uint32_t place;
        if (take_frames({&place, 1}) == 1) return place;
        return is_tiered() && home.take({&place, 1}) == 1 ? place | kAtHome : kNoFrame;
    }
    void give(std::uint32_t place) {
        SATRAP_ASSERT(place != kNoFrame);
        if (is_frame(place)) {
            if (is_tiered()) order_->clear(place);
            device.give({&place, 1});
        } else {
            place &= ~kAtHome;
            home.give({&place, 1});
        }
    }

    // Notes that a row that was last used in this step leaves its place, or gets an older stamp.
    void note_left(std::uint32_t stamp) { raise_to(last_left_, stamp); }
    // Returns whether every row that was used in this step or later is still in its place, with its stamp.
    bool kept_since(std::uint32_t step) const { return last_left_.load() < step; }

  private:
    std::unique_ptr<FrameOrder> order_;
    std::atomic<std::uint32_t> last_left_{0};
};

} // namespace satrap
