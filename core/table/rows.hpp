// The rows of one bucket: id -> slot -> [id | head | values | state], with a free list and an exact LRU order.
// The same class without payload keeps the sightings of ids that have no row yet. Bucket makes all decisions.
//
// In a direct table the slot is computed from the id, which is therefore not stored: [head | values | state]. All slots
// are in use, and a chunk is allocated when the first of its rows is inserted.
//
// Slots 0..used-1 lie in chunks of 16, 16, 32, 64 ... 512 rows, then kChunkRows each, so a small table stays small and
// growing copies nothing. The first of those is shortened by the bucket's shift: the buckets of a table fill alike, and
// would otherwise all need fresh memory in the same few batches. The head is directly before its row, so that both
// cost one page walk and often one cache line.
//
// Invariants: head.changed == 0 <=> the slot is free (then its id is the next free slot);
//   used = size + free; every live slot has exactly one index entry and no free slot has one;
//   direct: used = all slots; a slot whose chunk is not allocated is free; there is no index, free list or LRU order;
//   victims_, if not empty, holds the smallest (stamp, id) pairs of the bucket in falling order, as they were when
//   collected: a pair whose stamp has risen since is skipped, so the next victim is always the true minimum. A stamp
//   that falls within their range (a late step) clears them.
// Thread safety: none; the bucket's lock is held (candidate prefetches aside).
// In a file that outlives the process the order of writes matters: payload and id before `changed` (insertion),
// `changed` before anything else (removal). Release stores order the compiler; x86 and kill -9 keep program order.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <optional>
#include <string>
#include <vector>

#include "base/hash.hpp"
#include "base/inlining.hpp"
#include "storage/arena.hpp"
#include "storage/index.hpp"
#include "table/old_rows.hpp"

namespace satrap {

struct Head {
    std::uint32_t stamp;   // the last step that used the row; see table.hpp for a late first one
    std::uint32_t changed; // the table's version at its last change; for sightings: how often seen. 0: free
};
static_assert(sizeof(Head) == 8 && alignof(Head) == 4);

// The ids of a bucket of a direct table: slot s is that of id (s << shift) + low.
struct DirectSlots {
    std::uint32_t count;
    unsigned shift;
    std::uint64_t low;

    static DirectSlots of(std::uint64_t num_rows, unsigned bucket_bits, std::uint32_t bucket) {
        const std::uint64_t low = bucket_bits == 0 ? 0 : reverse_bits(std::uint64_t{bucket} << (64 - bucket_bits));
        const std::uint64_t count = num_rows <= low ? 0 : ((num_rows - low - 1) >> bucket_bits) + 1;
        SATRAP_ASSERT(count <= kNoSlot);
        return {static_cast<std::uint32_t>(count), bucket_bits, low};
    }
};

class Rows {
  public:
    static constexpr std::uint32_t kFirstChunk = 16;
    static constexpr std::uint32_t kChunkRows = 1024;

    // limit: the maximum number of rows (the last chunk is cut to it), 0 if unknown.
    // direct: the ids, if the table is direct.
    void init(Arena* arena, ChunkTag tag, std::size_t row_bytes, std::uint64_t limit,
              std::optional<DirectSlots> direct = std::nullopt) {
        SATRAP_ASSERT(arena != nullptr && chunks_.empty());
        SATRAP_ASSERT(!direct || limit == 0);
        SATRAP_ASSERT(row_bytes % alignof(Head) == 0);
        arena_ = arena;
        tag_ = tag;
        row_bytes_ = row_bytes;
        direct_ = direct;
        stride_ = id_bytes() + sizeof(Head) + row_bytes;
        limit_ = limit;
        if (direct) {
            used_ = capacity_ = direct->count;
            chunks_.resize(used_ == 0 ? 0 : chunk_of(used_ - 1) + 1, nullptr);
            return;
        }
        shift_ = static_cast<std::uint32_t>(phase() * kChunkRows);
        index_.init(*arena, limit, phase());
    }

    std::size_t size() const { return size_; }
    bool full() const { return limit_ != 0 && size_ >= limit_; }
    std::size_t row_bytes() const { return row_bytes_; }
    std::uint32_t capacity() const { return capacity_; } // slots in the chunks
    std::size_t bytes() const {
        return chunk_bytes_ + index_.bytes() + chunks_.capacity() * sizeof(std::byte*) +
               victims_.capacity() * sizeof(Victim);
    }
    const Index& index() const { return index_; }
    std::uint32_t used() const { return used_; }

    SATRAP_ALWAYS_INLINE Head& head(std::uint32_t slot) const {
        SATRAP_ASSERT(slot < capacity_ && has_chunk(slot));
        if (slot >= kChunkRows) {
            const std::size_t at = std::size_t{slot} + shift_;
            return *reinterpret_cast<Head*>(chunks_[at / kChunkRows + kDoublings - 1] + at % kChunkRows * stride_);
        }
        const std::uint32_t first = slot < kFirstChunk ? 0 : std::bit_floor(slot);
        return *reinterpret_cast<Head*>(chunks_[static_cast<std::size_t>(std::bit_width(slot / kFirstChunk))] +
                                        (slot - first) * stride_);
    }
    std::byte* row(std::uint32_t slot) const { return reinterpret_cast<std::byte*>(&head(slot) + 1); }
    // The first byte of the slot: what is to be prefetched.
    const std::byte* line(std::uint32_t slot) const {
        return reinterpret_cast<const std::byte*>(&head(slot)) - id_bytes();
    }
    // Whether some row's byte `bytes - 1` is in a cache line that none of its bytes 0, 64, 128 ... is in. Chunks begin
    // at a cache line, so rows begin at multiples of the largest power of two in their stride.
    bool ends_apart(std::size_t bytes) const {
        const std::size_t step = std::min<std::size_t>(64, stride_ & (~stride_ + 1));
        return 64 - step + (bytes - 1) % 64 >= 64;
    }
    std::size_t id_bytes() const { return direct_ ? 0 : sizeof(std::uint64_t); }
    std::uint64_t id(std::uint32_t slot) const {
        return direct_ ? (std::uint64_t{slot} << direct_->shift) + direct_->low : stored_id(head(slot));
    }
    bool live(std::uint32_t slot) const { return head(slot).changed != 0; }
    // Returns whether a slot kept from an earlier call still belongs to the id.
    bool holds(std::uint32_t slot, std::uint64_t id) const {
        SATRAP_ASSERT(!direct_);
        if (slot >= used_) return false;
        const Head& h = head(slot);
        return stored_id(h) == id && h.changed != 0;
    }

    std::uint32_t find(std::uint64_t id, std::uint64_t hash) const {
        SATRAP_ASSERT(hash == mix64(id));
        if (direct_) {
            const std::uint32_t slot = direct_slot(id);
            return slot != kNoSlot && live(slot) ? slot : kNoSlot;
        }
        return index_.find(hash, [&](std::uint32_t slot) { return stored_id(head(slot)) == id; });
    }

    bool is_direct() const { return direct_.has_value(); }
    // Returns the slot of an id of this bucket in a direct table; kNoSlot if it certainly has no row.
    std::uint32_t direct_slot(std::uint64_t id) const {
        const std::uint64_t slot = id >> direct_->shift;
        return slot < used_ && has_chunk(static_cast<std::uint32_t>(slot)) ? static_cast<std::uint32_t>(slot) : kNoSlot;
    }

    // Makes room in the index for so many rows, if there are none yet.
    void reserve(std::size_t rows) {
        if (!direct_) index_.reserve(rows, Hashes{*this});
    }

    // Returns a slot for a new id, in the index but still free in its head: fill the payload, then publish().
    std::uint32_t insert(std::uint64_t id, std::uint64_t hash) {
        SATRAP_ASSERT(find(id, hash) == kNoSlot);
        SATRAP_ASSERT(!full());
        if (!direct_ && !index_.has_room(hash)) index_.make_room(hash, Hashes{*this});
        if (in_cut()) old_rows(); // may throw, which it must not once the slot is taken
        const std::uint32_t slot = direct_ ? static_cast<std::uint32_t>(id >> direct_->shift) : take_slot();
        SATRAP_ASSERT(slot < used_);
        if (direct_ && !has_chunk(slot)) allocate_chunk(chunk_of(slot));
        keep(slot);
        if (!direct_) {
            index_.insert(hash, slot);
            set_stored_id(head(slot), id);
        }
        ++size_;
        return slot;
    }

    void publish(std::uint32_t slot, std::uint32_t stamp, std::uint32_t changed) {
        SATRAP_ASSERT(slot < used_ && changed != 0);
        Head& h = head(slot);
        h.stamp = stamp;
        std::atomic_ref(h.changed).store(changed, std::memory_order_release);
        SATRAP_ASSERT(find(id(slot), mix64(id(slot))) == slot);
        if (!victims_.empty()) spoil({id(slot), stamp, slot}); // the stamp may be an old one
    }

    // Stamps the row as used at `step`.
    void touch(std::uint32_t slot, std::uint32_t step) {
        SATRAP_ASSERT(slot < used_ && live(slot));
        Head& h = head(slot);
        if (step <= h.stamp) return;
        h.stamp = step;
        if (!victims_.empty()) spoil({id(slot), step, slot});
    }

    void erase(std::uint32_t slot) {
        SATRAP_ASSERT(slot < used_ && live(slot) && size_ != 0);
        keep(slot);
        Head& h = head(slot);
        if (!direct_) index_.erase(mix64(stored_id(h)), slot);
        std::atomic_ref(h.changed).store(0, std::memory_order_release);
        --size_;
        if (direct_) return;
        set_stored_id(h, free_);
        free_ = slot;
    }

    // Removes all rows. Their memory is released only if the arena can reuse it: in a file the rows become free slots.
    void clear() {
        end_cut();
        if (arena_->survives_process()) {
            if (size_ != 0) for_each([&](std::uint32_t slot, const Head&) { erase(slot); });
            return;
        }
        for (std::uint32_t number = 0; number < chunks_.size(); ++number) {
            if (chunks_[number] == nullptr) continue;
            arena_->release_index(chunks_[number] + before_first(number), chunk_size(rows_of(number)));
            chunks_[number] = nullptr;
        }
        chunk_bytes_ = size_ = 0;
        if (direct_) return;
        chunks_ = {};
        victims_ = {};
        used_ = capacity_ = 0;
        free_ = kNoSlot;
        index_.clear();
    }

    // Returns the row with the smallest (stamp, id); kNoSlot if there is none.
    std::uint32_t oldest() {
        for (;;) {
            while (!victims_.empty()) {
                const Victim& v = victims_.back();
                const Head& h = head(v.slot);
                if (h.changed != 0 && stored_id(h) == v.id && h.stamp == v.stamp) return v.slot;
                victims_.pop_back();
            }
            if (size_ == 0) return kNoSlot;
            collect_victims();
        }
    }

    // The visitor may erase the row that it is called with.
    template <typename Visitor> void for_each(Visitor visit) const {
        for (std::uint32_t number = 0; number < chunks_.size(); ++number) {
            if (chunks_[number] == nullptr) continue;
            const std::uint64_t end = std::min<std::uint64_t>(used_, first_slot(number + 1));
            for (auto slot = static_cast<std::uint32_t>(first_slot(number)); slot < end; ++slot)
                if (Head& h = head(slot); h.changed != 0) visit(slot, h);
        }
    }

    // -- a cut: until it ends, a slot is kept before its row changes, whichever way. insert() and erase() do so.

    void begin_cut(CutMemory& memory) {
        old_.reset();
        cut_memory_ = &memory;
    }
    bool in_cut() const { return cut_memory_ != nullptr; }
    void end_cut() {
        cut_memory_ = nullptr;
        old_.reset();
    }
    // Ends the cut; returns the copies, if there are any.
    std::unique_ptr<OldRows> take_cut() {
        cut_memory_ = nullptr;
        return std::move(old_);
    }
    // Copies the slot's row if it belongs to the cut and was not copied yet.
    SATRAP_ALWAYS_INLINE void keep(std::uint32_t slot) {
        SATRAP_ASSERT(slot < used_);
        if (in_cut()) keep_in_cut(slot);
    }
    // Nothing was inserted before the first call since the cut, so the slots in use are those of the cut.
    OldRows& old_rows() {
        SATRAP_ASSERT(in_cut());
        if (old_ == nullptr) old_ = std::make_unique<OldRows>(*cut_memory_, used_, sizeof(Head) + row_bytes_);
        return *old_;
    }

    // After a restart: adopts the chunks in sequence; rebuild() then recreates index and free list.
    void adopt_chunk(std::uint32_t sequence, std::byte* memory, std::size_t bytes) {
        const bool expected =
            direct_ ? sequence < chunks_.size() && chunks_[sequence] == nullptr : sequence == chunks_.size();
        if (!expected) throw InvariantError("chunk out of sequence");
        if (bytes < chunk_size(rows_of(sequence))) throw InvariantError("chunk too small for its rows");
        add_chunk(sequence, memory);
    }

    void rebuild() {
        SATRAP_ASSERT(!in_cut() && victims_.empty());
        size_ = 0;
        if (direct_) return for_each([&](std::uint32_t, const Head&) { ++size_; });
        used_ = capacity_;
        free_ = kNoSlot;
        for (std::uint32_t slot = used_; slot-- > 0;) {
            if (live(slot)) {
                ++size_;
            } else {
                set_stored_id(head(slot), free_);
                free_ = slot;
            }
        }
        index_.clear();
        reserve(size_);
        for_each([&](std::uint32_t slot, const Head& h) {
            const std::uint64_t hash = mix64(stored_id(h));
            if (!index_.has_room(hash)) index_.make_room(hash, Hashes{*this});
            index_.insert(hash, slot);
        });
    }

    void check(std::uint64_t share) const;

  private:
    struct Victim {
        std::uint64_t id;
        std::uint32_t stamp;
        std::uint32_t slot;
        bool operator<(const Victim& other) const { return stamp != other.stamp ? stamp < other.stamp : id < other.id; }
    };

    // What the index needs to know of its entries.
    struct Hashes {
        const Rows& rows;
        std::uint64_t hash_of(std::uint32_t slot) const { return mix64(rows.id(slot)); }
        SATRAP_ALWAYS_INLINE void prefetch(std::uint32_t slot) const { __builtin_prefetch(&rows.head(slot)); }
    };

    static constexpr std::uint32_t kDoublings =
        std::bit_width(kChunkRows / kFirstChunk); // chunks before those of constant size

    void keep_in_cut(std::uint32_t slot) {
        old_rows().keep(slot, id(slot), reinterpret_cast<const std::byte*>(&head(slot)), live(slot));
    }

    // Clears the collected victims if a row's stamp falls within their range, which would break their order.
    void spoil(const Victim& now) {
        if (!victims_.empty() && now < victims_.front()) victims_.clear();
    }

    // Returns the bucket's number in [0, 1).
    double phase() const { return static_cast<double>(tag_.bucket * 0x9e3779b9U) * 0x1p-32; }

    std::size_t chunk_size(std::uint32_t rows) const { return rows * stride_; }

    // The number of the slot's chunk, and a chunk's first slot.
    std::uint32_t chunk_of(std::uint32_t slot) const {
        if (slot < kChunkRows) return static_cast<std::uint32_t>(std::bit_width(slot / kFirstChunk));
        return static_cast<std::uint32_t>((std::size_t{slot} + shift_) / kChunkRows) + kDoublings - 1;
    }
    std::uint64_t first_slot(std::uint32_t number) const {
        if (number == 0) return 0;
        if (number <= kDoublings) return kFirstChunk << (number - 1);
        return std::uint64_t{kChunkRows} * (number - kDoublings + 1) - shift_;
    }
    bool has_chunk(std::uint32_t slot) const { return chunks_[chunk_of(slot)] != nullptr; }

    // Returns the rows of a chunk: the regular size, bounded by the limit, so that a bounded bucket wastes nothing.
    std::uint32_t rows_of(std::uint32_t number) const {
        const std::uint64_t first = first_slot(number), most = direct_ ? used_ : limit_;
        const std::uint64_t end = most > first ? std::min(most, first_slot(number + 1)) : first_slot(number + 1);
        if (end > kNoSlot)
            throw CapacityError("bucket " + std::to_string(tag_.bucket) + " holds " + std::to_string(first) +
                                " rows, the maximum of a bucket: give the table more num_buckets");
        return static_cast<std::uint32_t>(end - first);
    }

    // The bytes from where slot head() computes with to the chunk's memory; negative: less.
    std::ptrdiff_t before_first(std::uint32_t number) const {
        const std::size_t missing = number == kDoublings ? shift_ * stride_ : 0; // rows that the chunk does not have
        return static_cast<std::ptrdiff_t>(missing) - static_cast<std::ptrdiff_t>(id_bytes());
    }

    void allocate_chunk(std::uint32_t number) {
        const std::size_t bytes = chunk_size(rows_of(number));
        tag_.sequence = number;
        add_chunk(number, arena_->allocate(tag_, bytes));
    }

    void add_chunk(std::uint32_t number, std::byte* memory) {
        SATRAP_ASSERT(memory != nullptr && reinterpret_cast<std::uintptr_t>(memory) % alignof(Head) == 0);
        const std::uint32_t rows = rows_of(number);
        SATRAP_ASSERT(rows != 0 && rows <= kChunkRows);
        if (!direct_) {
            chunks_.push_back(nullptr);
            capacity_ += rows;
        }
        chunks_[number] = memory - before_first(number);
        chunk_bytes_ += chunk_size(rows);
    }

    // In a hashed table the id is directly before its head.
    static std::uint64_t stored_id(const Head& head) {
        std::uint64_t id;
        std::memcpy(&id, reinterpret_cast<const std::byte*>(&head) - sizeof(id), sizeof(id));
        return id;
    }
    static void set_stored_id(Head& head, std::uint64_t id) {
        std::memcpy(reinterpret_cast<std::byte*>(&head) - sizeof(id), &id, sizeof(id));
    }

    std::uint32_t take_slot() {
        if (free_ != kNoSlot) {
            std::uint32_t slot = free_;
            SATRAP_ASSERT(slot < used_ && !live(slot));
            free_ = static_cast<std::uint32_t>(stored_id(head(slot)));
            return slot;
        }
        SATRAP_ASSERT(size_ == used_ && used_ <= capacity_);
        if (used_ == capacity_) allocate_chunk(static_cast<std::uint32_t>(chunks_.size()));
        return used_++;
    }

    // Collects the oldest 1/32 in one scan, so that an eviction costs about 32 heads; the result is the same for any
    // share.
    void collect_victims() {
        SATRAP_ASSERT(size_ != 0 && victims_.empty());
        std::size_t target = std::max<std::size_t>(1, size_ / 32);
        std::vector<Victim> heap; // a max-heap of the smallest so far
        heap.reserve(target);
        for_each([&](std::uint32_t slot, const Head& h) {
            Victim v{stored_id(h), h.stamp, slot};
            if (heap.size() == target && !(v < heap.front())) return;
            if (heap.size() == target) {
                std::pop_heap(heap.begin(), heap.end());
                heap.pop_back();
            }
            heap.push_back(v);
            std::push_heap(heap.begin(), heap.end());
        });
        std::sort(heap.begin(), heap.end(), [](const Victim& a, const Victim& b) { return b < a; });
        SATRAP_ASSERT(heap.size() == target);
        victims_ = std::move(heap);
    }

    // First what a lookup reads, on two cache lines: a small batch visits buckets that are in no cache.
    std::size_t stride_ = 0;
    std::optional<DirectSlots> direct_;
    std::uint32_t shift_ = 0;
    std::uint32_t used_ = 0;
    std::vector<std::byte*> chunks_;
    std::vector<Victim> victims_;
    CutMemory* cut_memory_ = nullptr; // for a cut that has not ended
    Index index_;
    Arena* arena_ = nullptr;
    ChunkTag tag_{};
    std::size_t row_bytes_ = 0;
    std::uint64_t limit_ = 0;
    std::size_t chunk_bytes_ = 0;
    std::size_t size_ = 0;
    std::uint32_t capacity_ = 0;
    std::uint32_t free_ = kNoSlot;
    std::unique_ptr<OldRows> old_; // for the cut, created at the first change since
};

inline void Rows::check(std::uint64_t share) const {
    auto require = [&](bool holds, const char* what) {
        if (!holds) throw InvariantError(std::string("bucket ") + std::to_string(tag_.bucket) + ": " + what);
    };
    std::size_t live_rows = 0;
    for_each([&](std::uint32_t slot, const Head& h) {
        ++live_rows;
        const std::uint64_t id = this->id(slot);
        require(h.changed != 0 && find(id, mix64(id)) == slot,
                "a live row is not found by its id, or two rows have one id");
    });
    require(live_rows == size_, "size differs from the number of live rows");
    if (direct_) return require(index_.size() == 0 && victims_.empty(), "a direct table has an index or victims");
    std::size_t free_rows = 0;
    for (std::uint32_t slot = free_; slot != kNoSlot; slot = static_cast<std::uint32_t>(stored_id(head(slot)))) {
        require(slot < used_ && !live(slot), "the free list names a live row or none");
        require(++free_rows <= used_, "the free list is a ring");
    }
    require(live_rows + free_rows == used_, "used != live + free");
    require(used_ <= capacity_, "more rows than the chunks hold");
    require(share == 0 || size_ <= share, "more rows than the bucket's share of the capacity");
    std::size_t entries = 0;
    index_.for_each_page([&](const IndexPage& page, std::size_t counted) {
        std::size_t here = 0;
        page.for_each([&](std::uint32_t slot, std::uint8_t tag) {
            ++here;
            require(slot < used_ && live(slot), "an index entry names a free row");
            const std::uint64_t hash = mix64(id(slot));
            require(tag == IndexPage::tag_of(hash), "an index tag differs from its id's");
            require(index_.page_of(hash).groups == page.groups, "an index entry is in another page than its id's");
        });
        require(here == counted, "a page of the index counts other entries than it has");
        require(here <= page.capacity(), "a page of the index is fuller than its limit");
        entries += here;
    });
    require(entries == size_ && index_.size() == size_, "index entries != rows");
}

} // namespace satrap
