// Rows as they were at a cut. A save takes its cut of all buckets at once and writes them later; until a bucket is
// written, whatever changes one of its rows first keeps a copy here. Rows decides when; engine_cut.cpp merges the
// copies with the rows that did not change.
//
// CutMemory is the engine's account of those copies: their bytes, the bound at which calls that would add to them wait
// for the save, and how long they did.
// Thread safety: OldRows none, its bucket's lock is held; CutMemory all.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "base/assertions.hpp"
#include "base/atomic_max.hpp"

namespace satrap {

// The figures of the copies of an engine.
struct CutFigures {
    std::size_t bytes = 0;                            // now
    std::size_t peak = 0;                             // since the last cut
    std::uint64_t kept = 0, waits = 0, waited_ns = 0; // since the engine was created
};

class CutMemory {
  public:
    void begin(std::size_t limit, std::chrono::nanoseconds patience) {
        std::lock_guard lock(mutex_);
        limit_.store(limit);
        patience_ = patience;
        peak_ = bytes_.load();
        progress_at_ = std::chrono::steady_clock::now();
    }

    void take(std::size_t bytes) noexcept { raise_to(peak_, bytes_.fetch_add(bytes) + bytes); }
    void count_kept() { kept_.fetch_add(1, std::memory_order_relaxed); }
    bool has_kept() const { return bytes_.load(std::memory_order_relaxed) != 0; }

    // Releases bytes; called with 0 when a part of the save was exported.
    void give(std::size_t bytes) {
        SATRAP_ASSERT(bytes <= bytes_.load());
        bytes_.fetch_sub(bytes);
        std::lock_guard lock(mutex_);
        progress_at_ = std::chrono::steady_clock::now();
        room_.notify_all();
    }

    // Waits while the copies exceed the bound; a call that got room may exceed it by what the call itself keeps.
    // Returns false if the save has exported nothing for as long as the patience lasts.
    bool wait_for_room() {
        if (bytes_.load(std::memory_order_relaxed) <= limit_.load(std::memory_order_relaxed)) return true;
        const auto begin = std::chrono::steady_clock::now();
        std::unique_lock lock(mutex_);
        if (bytes_.load() <= limit_.load()) return true;
        ++waits_;
        bool has_room = true;
        while (has_room && bytes_.load() > limit_.load()) {
            const auto until = std::max(progress_at_, begin) + patience_;
            has_room = room_.wait_until(lock, until) == std::cv_status::no_timeout ||
                       std::chrono::steady_clock::now() < std::max(progress_at_, begin) + patience_;
        }
        waited_ns_ += static_cast<std::uint64_t>(
            std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count());
        return has_room;
    }

    CutFigures figures() {
        std::lock_guard lock(mutex_);
        return {bytes_.load(), peak_.load(), kept_.load(), waits_, waited_ns_};
    }

  private:
    std::atomic<std::size_t> bytes_{0}, peak_{0}, limit_{SIZE_MAX};
    std::atomic<std::uint64_t> kept_{0};
    std::mutex mutex_; // guards what follows
    std::condition_variable room_;
    std::chrono::nanoseconds patience_{0};
    std::chrono::steady_clock::time_point progress_at_{};
    std::uint64_t waits_ = 0, waited_ns_ = 0;
};

class OldRows {
  public:
    struct OldRow {
        std::uint32_t slot;
        std::uint64_t id;
        const std::byte* line; // head and payload
    };

    // slots: those that were in use at the cut; the rows of later ones do not belong to it.
    OldRows(CutMemory& memory, std::uint32_t slots, std::size_t line_bytes)
        : memory_(memory), slots_(slots), line_bytes_(line_bytes), is_done_((slots + 63) / 64) {}
    OldRows(const OldRows&) = delete;
    OldRows& operator=(const OldRows&) = delete;
    ~OldRows() {
        if (bytes_ != 0) memory_.give(bytes_);
    }

    std::uint32_t slots() const { return slots_; }
    // Returns whether the slot's row of the cut no longer has to be read from the slot: it was copied, here or by the
    // save, or the slot was free.
    bool is_done(std::uint32_t slot) const { return slot >= slots_ || ((is_done_[slot / 64] >> (slot % 64)) & 1) != 0; }
    void set_done(std::uint32_t slot) {
        SATRAP_ASSERT(slot < slots_);
        is_done_[slot / 64] |= std::uint64_t{1} << (slot % 64);
    }

    // Makes room for so many copies: `keep` then throws nothing.
    void reserve(std::size_t count) {
        SATRAP_ASSERT(rows_.capacity() >= rows_.size() + room_);
        if (room_ >= count) return;
        const std::size_t usual = std::min<std::size_t>(kMostLines, std::max<std::size_t>(16, rows_.size()));
        const std::size_t lines = std::max(count, usual);
        if (rows_.capacity() < rows_.size() + lines)
            rows_.reserve(std::max(rows_.size() + lines, 2 * rows_.capacity()));
        chunks_.push_back(std::make_unique<std::byte[]>(lines * line_bytes_));
        next_ = chunks_.back().get();
        room_ = lines;
        bytes_ += lines * (line_bytes_ + sizeof(OldRow));
        memory_.take(lines * (line_bytes_ + sizeof(OldRow)));
    }

    // Copies the slot's line, if it holds a row of the cut that was not copied yet.
    void keep(std::uint32_t slot, std::uint64_t id, const std::byte* line, bool is_live) {
        if (is_done(slot)) return;
        SATRAP_ASSERT(line != nullptr);
        if (is_live) {
            reserve(1);
            SATRAP_ASSERT(room_ != 0 && rows_.size() < rows_.capacity());
            std::memcpy(next_, line, line_bytes_);
            rows_.push_back({slot, id, next_});
            next_ += line_bytes_;
            --room_;
            memory_.count_kept();
        }
        set_done(slot);
    }

    const std::vector<OldRow>& rows() const { return rows_; }

  private:
    static constexpr std::size_t kMostLines = 512; // in a chunk, unless more are reserved at once

    CutMemory& memory_;
    std::uint32_t slots_;
    std::size_t line_bytes_;
    std::vector<std::uint64_t> is_done_; // a bit for each slot
    std::vector<OldRow> rows_;
    std::vector<std::unique_ptr<std::byte[]>> chunks_;
    std::byte* next_ = nullptr; // in the last chunk
    std::size_t room_ = 0, bytes_ = 0;
};

} // namespace satrap
