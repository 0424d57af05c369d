// Which buckets an engine serves, which updates each of them has applied, and what migrates with a bucket besides its
// rows and sightings, which are exported and imported as for a snapshot (engine_snapshot.cpp). Buckets are numbered
// over all tables. The coordinator of a migration ensures that no call runs where one is forbidden here.
//
// Nouns: the owner of a bucket is a server; this engine is server `self`. A frozen bucket migrates: it is read and not
// changed. A shared one, of rows on devices, is looked up and updated in the engines of all servers, which have the
// same rows; only its owner exports and counts it. A bucket's windows hold the steps it has applied of each trainer.
// Invariants: owners_[b] = owner of b + (frozen(b) ? kFrozen : 0); before set(), self_ = owners_[b] = 0 for every b;
//   is_shared_ is the same for all buckets of a table, and 0 unless its rows are on a device.
// Locks: none. owners_ and self_ are atomic, so that a call beside freeze() sees a bucket frozen or not; a window is
// guarded by its bucket's lock, which export_counters, import_counters and forget take one at a time.
#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "engine/tables.hpp"
#include "table/applied_steps.hpp"

namespace satrap {

class Ownership {
  public:
    // The tables must outlive it.
    explicit Ownership(const Tables& tables) : tables_(tables) {}
    // Called when all tables were added: the engine owns all of their buckets.
    void init(Arena& arena) {
        steps_.init(arena, tables_.map().total());
        owners_ = std::vector<std::atomic<std::uint32_t>>(tables_.map().total());
        is_shared_.assign(tables_.map().total(), 0);
    }

    // Lookups and updates that touch a bucket of another server, or a frozen one, are refused before they change
    // anything; reads of frozen ones are not. No call may run while owners are set; one that runs while a bucket is
    // frozen may still change it.
    void set(std::span<const std::uint32_t> owners, std::uint32_t self);
    void freeze(std::span<const std::uint32_t> buckets, bool frozen);
    // Lets this engine look up and update all buckets of a table whose rows are on devices.
    void share(std::size_t t);
    bool shares(std::size_t t) const { return is_shared_[tables_.map().first[t]] != 0; }
    bool owns(std::size_t t, std::uint32_t b) const {
        SATRAP_ASSERT(b < tables_[t].config().num_buckets);
        return (owners_[tables_.map().first[t] + b].load(std::memory_order_relaxed) & ~kFrozen) == self_.load();
    }
    // Throws MovedError if a call that has ids in these buckets, and changes their rows or not, must not run here.
    template <typename Has> void require(Has has, bool changes) const {
        const std::uint32_t self = self_.load(std::memory_order_relaxed);
        for (std::uint32_t b = 0; b < owners_.size(); ++b)
            if (const std::uint32_t owner = owners_[b].load(std::memory_order_relaxed);
                owner != self && is_shared_[b] == 0 && has(b) && (changes || (owner & ~kFrozen) != self))
                refuse_moved(b, owner, self);
    }

    AppliedSteps& steps() { return steps_; }
    // words[i * buckets + b] is trainers[i]'s window of buckets[b]; counters are Counters::kCount for each bucket.
    std::vector<std::uint64_t> export_windows(std::span<const std::uint32_t> buckets,
                                              std::vector<std::uint32_t>& trainers);
    void import_windows(std::span<const std::uint32_t> buckets, std::span<const std::uint32_t> trainers,
                        std::span<const std::uint64_t> words);
    std::vector<std::uint64_t> export_counters(std::span<const std::uint32_t> buckets);
    void import_counters(std::span<const std::uint32_t> buckets, std::span<const std::uint64_t> counters);
    // Empties the buckets: no row, no sighting, no window, no count.
    void forget(std::span<const std::uint32_t> buckets);

  private:
    static constexpr std::uint32_t kFrozen = 1U << 31;

    [[noreturn]] void refuse_moved(std::uint32_t b, std::uint32_t owner, std::uint32_t self) const;

    const Tables& tables_;
    AppliedSteps steps_;
    std::vector<std::atomic<std::uint32_t>> owners_; // [buckets]
    std::atomic<std::uint32_t> self_{0};
    std::vector<std::uint8_t> is_shared_; // [buckets]
};

} // namespace satrap
