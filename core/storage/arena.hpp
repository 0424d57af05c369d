// The memory of rows: an Arena allocates chunks of zeroed memory that stay in place until the arena is destroyed, and
// memory for indexes, which is always anonymous and may be released. It knows nothing of rows. Rows allocates chunks;
// SharedArena (shared_arena.hpp) allocates them from a file.
//
// Invariants: a chunk is 64-byte aligned; chunks never move or overlap, and are never released.
// Lock: one mutex, taken last (under a bucket's lock), held for a search in a small tree or one mmap.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/assertions.hpp"
#include "base/errors.hpp"

namespace satrap {

enum class ChunkKind : std::uint32_t { rows = 1, sightings = 2, undo = 3, windows = 4, note = 5 };

// The owner of a chunk, so that a later process finds it again in a file.
struct ChunkTag {
    ChunkKind kind;
    std::uint32_t table;
    std::uint32_t bucket;
    std::uint32_t sequence; // the owner's chunk number
};

// The few numbers of a table that must survive its process. A new table has zeros, except for version.
struct TableLedger {
    std::atomic<std::uint32_t> version;
    std::atomic<std::uint32_t> expire_before; // rows stamped before this step have expired
    std::atomic<std::uint64_t> lr_bits;
};

class Arena {
  public:
    explicit Arena(std::size_t num_tables) : own_ledgers_(num_tables) {}
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    virtual ~Arena() = default;

    virtual std::byte* allocate(const ChunkTag& tag, std::size_t bytes) = 0;
    virtual std::byte* allocate_index(std::size_t bytes) = 0;
    virtual void release_index(std::byte* block, std::size_t bytes) = 0;
    virtual bool survives_process() const { return false; }
    // Whether a later process may use this content; false while a snapshot is being loaded.
    virtual void set_complete(bool) {}
    // In a fork, instead of destruction: closes what would keep the owner's file locked, and takes no lock.
    virtual void leave() noexcept {}
    virtual TableLedger& ledger(std::size_t table) {
        SATRAP_ASSERT(table < own_ledgers_.size());
        return own_ledgers_[table];
    }
    virtual std::atomic<std::uint32_t>& latest_step() { return own_latest_step_; }
    // The attempt of a run's processes: those of an older one may no longer write. See AppliedSteps.
    virtual std::atomic<std::uint32_t>& attempt() { return own_attempt_; }

    // A short text of the owner that lives as long as the rows and is replaced as a whole.
    virtual std::string note() { return own_note_; }
    virtual void set_note(const std::string& note) { own_note_ = note; }

  private:
    std::string own_note_;
    std::vector<TableLedger> own_ledgers_;
    std::atomic<std::uint32_t> own_latest_step_{0};
    std::atomic<std::uint32_t> own_attempt_{0};
};

inline std::size_t round_up(std::size_t bytes, std::size_t unit) {
    SATRAP_ASSERT(unit != 0 && bytes <= SIZE_MAX - unit);
    return (bytes + unit - 1) / unit * unit;
}

// Anonymous memory in regions of huge pages. Blocks of all buckets and sizes are carved from them, so small ones share
// a huge page; released blocks (outgrown indexes) are merged with free neighbours and reused, for rows too.
class AnonymousArena final : public Arena {
  public:
    using Arena::Arena;

    ~AnonymousArena() override {
        for (auto [address, bytes] : regions_) munmap(address, bytes);
    }

    std::byte* allocate(const ChunkTag&, std::size_t bytes) override {
        bool fresh = false;
        std::byte* chunk = take(bytes, fresh);
        if (!fresh) std::memset(chunk, 0, bytes);
        return chunk;
    }

    // Memory for an index: like a chunk, but it may be released.
    std::byte* allocate_index(std::size_t bytes) override { return allocate({}, bytes); }
    void release_index(std::byte* block, std::size_t bytes) override {
        std::lock_guard lock(mutex_);
        add_free(block, round_up(bytes, 64));
    }

  private:
    static constexpr std::size_t kHugePage = std::size_t{2} << 20;
    static constexpr std::size_t kRegion = std::size_t{64} << 20;

    // Returns the smallest released block that fits, else the next bytes of the newest region (`fresh`: zero).
    std::byte* take(std::size_t bytes, bool& fresh) {
        SATRAP_ASSERT(bytes != 0);
        bytes = round_up(bytes, 64);
        std::lock_guard lock(mutex_);
        if (auto fit = by_size_.lower_bound({bytes, nullptr}); fit != by_size_.end()) {
            auto [size, block] = *fit;
            by_size_.erase(fit);
            by_address_.erase(block);
            SATRAP_ASSERT(size >= bytes);
            if (size > bytes) add_free(block + bytes, size - bytes);
            return block;
        }
        fresh = true;
        if (bytes > left_) add_region(bytes);
        std::byte* block = next_;
        next_ += bytes;
        left_ -= bytes;
        return block;
    }

    void add_free(std::byte* block, std::size_t bytes) {
        SATRAP_ASSERT(reinterpret_cast<std::uintptr_t>(block) % 64 == 0);
        SATRAP_ASSERT(bytes != 0 && bytes % 64 == 0);
        auto after = by_address_.lower_bound(block);
        SATRAP_ASSERT(after == by_address_.end() || block + bytes <= after->first); // nothing is released twice
        if (after != by_address_.end() && block + bytes == after->first) {
            bytes += after->second;
            by_size_.erase({after->second, after->first});
            after = by_address_.erase(after);
        }
        if (after != by_address_.begin()) {
            auto before = std::prev(after);
            SATRAP_ASSERT(before->first + before->second <= block);
            if (before->first + before->second == block) {
                block = before->first;
                bytes += before->second;
                by_size_.erase({before->second, before->first});
                by_address_.erase(before);
            }
        }
        by_address_[block] = bytes;
        by_size_.insert({bytes, block});
    }

    void add_region(std::size_t bytes) {
        SATRAP_ASSERT(bytes > left_ && bytes % 64 == 0);
        // A share of what there is already: the number of a process's mappings is limited. What is not used is free.
        std::size_t usable = round_up(std::max({bytes, kRegion, mapped_ / 16}), kHugePage);
        std::size_t mapped = usable + kHugePage; // room to align
        void* address =
            mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (address == MAP_FAILED) throw std::bad_alloc();
        regions_.emplace_back(address, mapped);
        mapped_ += mapped;
        auto start = round_up(reinterpret_cast<std::uintptr_t>(address), kHugePage);
        next_ = reinterpret_cast<std::byte*>(start);
        left_ = usable;
        madvise(next_, usable, MADV_HUGEPAGE); // only advice: kernels without huge pages may refuse it
    }

    std::mutex mutex_;
    std::vector<std::pair<void*, std::size_t>> regions_;
    std::size_t mapped_ = 0;                       // bytes of the regions
    std::map<std::byte*, std::size_t> by_address_; // released blocks, merged
    std::set<std::pair<std::size_t, std::byte*>> by_size_;
    std::byte* next_ = nullptr;
    std::size_t left_ = 0;
};

} // namespace satrap
