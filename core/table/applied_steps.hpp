// Records which updates each bucket has applied, so that a duplicate is applied once: for every trainer the newest
// step, and a bit for each of the 32 steps up to it. They live in the arena beside the rows, a chunk per trainer, so
// they survive the process where rows do. One more window, the last, is for whole updates, which every bucket has
// applied.
//
// Invariant: bit i of a window is step newest - i; newest 0 is an empty window, and bits 0 then. A window is one word
// and is written at once: killed at any moment, it holds the old or the new value.
// Lock: the bucket's lock guards its windows; a lock in here guards the list of trainers and the last windows. Windows
// stay in place until the arena is destroyed.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <span>
#include <vector>

#include "storage/arena.hpp"

namespace satrap {

class StepWindow {
  public:
    static constexpr std::uint32_t kSteps = 32;

    std::uint32_t newest() const { return static_cast<std::uint32_t>(word()); }
    // Too long ago to know; the sender has exceeded the bound on steps in flight.
    bool forgot(std::uint32_t step) const { return newest() >= kSteps && step <= newest() - kSteps; }
    bool applied(std::uint32_t step) const {
        return step <= newest() && newest() - step < kSteps && (bits() >> (newest() - step) & 1) != 0;
    }
    void mark(std::uint32_t step) {
        SATRAP_ASSERT(step != 0);
        if (forgot(step)) return;
        const std::uint32_t by = step > newest() ? step - newest() : 0;
        const std::uint32_t now = by == 0 ? bits() | 1U << (newest() - step) : (by < kSteps ? bits() << by : 0) | 1;
        put(std::uint64_t{now} << 32 | std::max(step, newest()));
    }
    void clear() { put(0); }

    // For the migration of buckets: the window as one number, and the union and intersection of two windows.
    std::uint64_t as_word() const { return word(); }
    void take(std::uint64_t word) { put(word); }
    void add(const StepWindow& other) {
        if (other.newest() > newest()) put(shifted(other.newest()));
        put(word() | std::uint64_t{other.at(newest())} << 32);
    }
    void keep_common(const StepWindow& other) {
        if (other.newest() < newest()) put(std::uint64_t{at(other.newest())} << 32 | other.newest());
        put(std::uint64_t{bits() & other.at(newest())} << 32 | newest());
    }

  private:
    // Returns the bits relative to a newest step of `step`.
    std::uint32_t at(std::uint32_t step) const {
        const std::uint32_t by = step > newest() ? step - newest() : newest() - step;
        return by >= kSteps ? 0 : step > newest() ? bits() << by : bits() >> by;
    }
    std::uint64_t shifted(std::uint32_t step) const { return std::uint64_t{at(step)} << 32 | step; }
    // May be read without the bucket's lock.
    std::uint64_t word() const {
        return std::atomic_ref(const_cast<std::uint64_t&>(word_)).load(std::memory_order_relaxed);
    }
    std::uint32_t bits() const { return static_cast<std::uint32_t>(word() >> 32); }
    void put(std::uint64_t word) { std::atomic_ref(word_).store(word, std::memory_order_relaxed); }

    alignas(8) std::uint64_t word_ = 0;
};
static_assert(sizeof(StepWindow) == 8);

inline constexpr std::uint32_t kMostTrainers = 4096;
inline constexpr std::uint32_t kNoTrainer = ~0U;

// The window in which an update records that a bucket has applied it. Without one, duplicates are applied too.
struct UpdateMark {
    std::uint32_t trainer = kNoTrainer;
    StepWindow* window = nullptr;
};

class AppliedSteps {
  public:
    // buckets: the number of buckets of all tables.
    void init(Arena& arena, std::uint32_t buckets) {
        SATRAP_ASSERT(arena_ == nullptr);
        arena_ = &arena;
        size_ = std::size_t{buckets} + 1;
    }

    // Returns the trainer's windows, one for each bucket, then the last; creates those of a new trainer. Throws if
    // there is no memory.
    StepWindow* of(std::uint32_t trainer) {
        SATRAP_ASSERT(arena_ != nullptr && trainer < kMostTrainers);
        std::lock_guard lock(mutex_);
        if (trainer >= of_trainer_.size()) of_trainer_.resize(trainer + 1);
        StepWindow*& windows = of_trainer_[trainer];
        if (windows == nullptr)
            windows = reinterpret_cast<StepWindow*>(
                arena_->allocate({ChunkKind::windows, 0, 0, trainer}, size_ * sizeof(StepWindow)));
        return windows;
    }

    // After a restart: takes over a chunk of the file.
    void adopt(std::uint32_t trainer, std::byte* memory, std::size_t bytes) {
        SATRAP_ASSERT(reinterpret_cast<std::uintptr_t>(memory) % alignof(StepWindow) == 0);
        if (trainer >= kMostTrainers || bytes < size_ * sizeof(StepWindow))
            throw InvariantError("a chunk of windows of trainer " + std::to_string(trainer));
        if (trainer >= of_trainer_.size()) of_trainer_.resize(trainer + 1);
        if (of_trainer_[trainer] != nullptr) throw InvariantError("two chunks of windows of one trainer");
        of_trainer_[trainer] = reinterpret_cast<StepWindow*>(memory);
    }

    bool finished(std::uint32_t trainer, std::uint32_t step) {
        StepWindow* windows = of(trainer);
        std::lock_guard lock(mutex_);
        return windows[size_ - 1].applied(step);
    }
    void finish(std::uint32_t trainer, std::uint32_t step) {
        StepWindow* windows = of(trainer);
        std::lock_guard lock(mutex_);
        windows[size_ - 1].mark(step);
    }

    // Returns the trainers that have windows.
    std::vector<std::uint32_t> trainers() {
        std::lock_guard lock(mutex_);
        std::vector<std::uint32_t> numbers;
        for (std::uint32_t r = 0; r < of_trainer_.size(); ++r)
            if (of_trainer_[r] != nullptr) numbers.push_back(r);
        return numbers;
    }
    // Before these buckets leave: marks what is finished here at each of them. No update may run.
    void hand_over(std::span<const std::uint32_t> buckets) {
        SATRAP_ASSERT(have_windows(buckets));
        std::lock_guard lock(mutex_);
        for (StepWindow* windows : of_trainer_)
            for (std::uint32_t b : buckets)
                if (windows != nullptr) windows[b].add(windows[size_ - 1]);
    }
    // After these buckets arrived: a step is finished if it is so at each of them and, unless they are the first here,
    // was so before. No update may run.
    void take_over(std::span<const std::uint32_t> buckets, bool first) {
        SATRAP_ASSERT(have_windows(buckets));
        std::lock_guard lock(mutex_);
        for (StepWindow* windows : of_trainer_) {
            if (windows == nullptr) continue;
            if (first && !buckets.empty()) windows[size_ - 1].take(windows[buckets[0]].as_word());
            for (std::uint32_t b : buckets) windows[size_ - 1].keep_common(windows[b]);
        }
    }

    // Starts a new attempt, of which no update has been applied. No update may run.
    void clear() {
        std::lock_guard lock(mutex_);
        for (StepWindow* windows : of_trainer_)
            for (std::size_t w = 0; windows != nullptr && w < size_; ++w) windows[w].clear();
    }

  private:
    // The last window is of no bucket.
    bool have_windows(std::span<const std::uint32_t> buckets) const {
        return std::all_of(buckets.begin(), buckets.end(), [&](std::uint32_t b) { return b + 1 < size_; });
    }

    Arena* arena_ = nullptr;
    std::size_t size_ = 0;
    std::mutex mutex_;
    std::vector<StepWindow*> of_trainer_;
};

} // namespace satrap
