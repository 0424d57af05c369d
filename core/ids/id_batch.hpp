// The ids of one call, grouped by bucket and de-duplicated: a lookup prepares them and its update reuses them.
//
// Two parallel passes: count (how many ids of each thread's range fall into each bucket) and scatter (stable, so the
// order of appearance is kept within a bucket); then the thread that visits a bucket makes its ids unique.
// Invariants, for bucket b with entries begin[b] .. begin[b+1]-1:
//   entry e stands for position positions[e] of its table's ids (in a batch of bags: for a place of bag_layout.hpp),
//   and its id is unique[begin[b] + local[e]]; local ids number 0 .. num_unique[b]-1 in order of first appearance;
//   num_unique[b] <= entries of b.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "base/buffers.hpp"
#include "base/errors.hpp"
#include "base/hash.hpp"
#include "base/thread_pool.hpp"
#include "ids/bag_layout.hpp"
#include "storage/index.hpp"

namespace satrap {

// Numbers the buckets of all tables consecutively: table t has buckets first[t] .. first[t+1]-1. num_rows[t] != 0: it
// is direct, and may have ids below that.
struct BucketNumbering {
    std::vector<std::uint32_t> first{0};
    std::vector<std::uint8_t> bits;
    std::vector<std::uint64_t> num_rows;
    std::vector<std::string> names; // one for each table
    void add_table(unsigned num_bits, std::uint64_t rows = 0, std::string name = {}) {
        SATRAP_ASSERT(num_bits <= 16 && total() < ~0U - (1U << num_bits));
        bits.push_back(static_cast<std::uint8_t>(num_bits));
        num_rows.push_back(rows);
        names.push_back(std::move(name));
        first.push_back(total() + (1U << num_bits));
    }
    std::uint32_t total() const { return first.back(); }
    std::size_t num_tables() const { return bits.size(); }
};

// Makes `count` ids unique in place, in order of first appearance, and numbers each; returns how many there
// are. `table` is scratch.
inline std::uint32_t deduplicate_ids(std::uint64_t* ids, std::uint32_t count, std::uint32_t* numbers,
                                     Buffer<std::uint32_t>& table) {
    SATRAP_ASSERT(count <= 1U << 30);
    const std::uint32_t mask = std::bit_ceil(2 * count) - 1;
    std::uint32_t* slots = table.reserve(mask + 1); // number + 1; 0: empty
    std::memset(slots, 0, (static_cast<std::size_t>(mask) + 1) * sizeof(std::uint32_t));
    std::uint32_t num_unique = 0; // never overtakes e
    for (std::uint32_t e = 0; e < count; ++e) {
        const std::uint64_t id = ids[e];
        ids[num_unique] = id; // an empty slot reads as this position, so that a new id needs no branch
        std::uint32_t at = static_cast<std::uint32_t>(mix64(id) >> 8) & mask;
        std::uint32_t number = slots[at] == 0 ? num_unique : slots[at] - 1;
        while (ids[number] != id) {
            at = (at + 1) & mask;
            number = slots[at] == 0 ? num_unique : slots[at] - 1;
        }
        slots[at] = number + 1;
        SATRAP_ASSERT(number <= num_unique && num_unique <= e);
        numbers[e] = number;
        num_unique += number == num_unique;
    }
    return num_unique;
}

struct Batch {
    std::vector<std::int64_t> offsets; // [tables + 1] into the caller's ids
    std::vector<std::uint32_t> begin;  // [buckets + 1]
    std::vector<std::uint32_t> num_unique;
    Buffer<std::uint64_t> unique; // while grouping: the ids of all entries
    Buffer<std::uint32_t> positions;
    Buffer<std::uint32_t> local;
    Buffer<std::uint32_t> hints;   // slots found by the lookup, for the update
    Buffer<std::uint32_t> indexes; // each entry's id in the call, for rows on a device
    BagEntries bags;               // for a batch of bags
    bool hinted = false;
    std::vector<std::uint32_t> counts; // [threads][buckets], scratch of group()

    std::size_t size() const {
        SATRAP_ASSERT(!offsets.empty() && offsets.front() == 0);
        return static_cast<std::size_t>(offsets.back());
    }

    // Calls visit(table, first, last) for the parts of [from, to) that lie in one table.
    template <typename Visitor> void by_table(std::size_t from, std::size_t to, Visitor visit) const {
        SATRAP_ASSERT(from <= to && to <= size());
        for (std::size_t t = 0; t + 1 < offsets.size(); ++t) {
            std::size_t first = std::max(from, static_cast<std::size_t>(offsets[t]));
            std::size_t last = std::min(to, static_cast<std::size_t>(offsets[t + 1]));
            if (first < last) visit(t, first, last);
        }
    }

    // A cursor over consecutive positions in the table.
    struct Positions {
        std::uint32_t* positions;
        std::uint32_t next;
        void put(std::uint32_t e) { positions[e] = next++; }
    };

    struct IndexedPositions {
        Positions positions;
        std::uint32_t* indexes;
        std::uint32_t next;
        void put(std::uint32_t e) {
            positions.put(e);
            indexes[e] = next++;
        }
    };

    void group(const std::uint64_t* ids, const BucketNumbering& map, ThreadPool& pool) {
        group(ids, map, pool, no_feature, [this](std::size_t t, std::size_t first) {
            return Positions{positions.data(),
                             static_cast<std::uint32_t>(first - static_cast<std::size_t>(offsets[t]))};
        });
    }

    // The same, with the index of each entry's id.
    void group_with_indexes(const std::uint64_t* ids, const BucketNumbering& map, ThreadPool& pool) {
        indexes.reserve(size());
        group(ids, map, pool, no_feature, [this](std::size_t t, std::size_t first) {
            const auto at = static_cast<std::uint32_t>(first - static_cast<std::size_t>(offsets[t]));
            return IndexedPositions{{positions.data(), at}, indexes.data(), static_cast<std::uint32_t>(first)};
        });
    }

    // cursor_at(table, i) returns a cursor at id i; its put(e) is called with the entry of id i, i + 1, ... Throws
    // InputError if an id cannot be in its table; feature_of(i) names its feature for the message.
    template <typename FeatureOf, typename CursorAt>
    void group(const std::uint64_t* ids, const BucketNumbering& map, ThreadPool& pool, FeatureOf feature_of,
               CursorAt cursor_at);

    // Makes bucket b's ids unique; `table` is scratch.
    void deduplicate(std::uint32_t b, Buffer<std::uint32_t>& table) {
        SATRAP_ASSERT(b < num_unique.size() && begin.size() == num_unique.size() + 1 && begin[b] <= begin[b + 1]);
        SATRAP_ASSERT(num_unique[b] == 0); // else the ids of the entries are no longer there
        num_unique[b] =
            deduplicate_ids(unique.data() + begin[b], begin[b + 1] - begin[b], local.data() + begin[b], table);
    }
    // Leaves bucket b's ids as they are, for a lookup that changes no row and has no update: `unique` has repeats then.
    void keep_repeats(std::uint32_t b) {
        SATRAP_ASSERT(b < num_unique.size() && num_unique[b] == 0);
        num_unique[b] = begin[b + 1] - begin[b];
        std::iota(local.data() + begin[b], local.data() + begin[b + 1], 0U);
    }

  private:
    static std::string no_feature(std::size_t) { return {}; }
    void begin_buckets(std::uint32_t ranges, std::uint32_t buckets);
    bool count_ids(const std::uint64_t* ids, const BucketNumbering& map, std::size_t from, std::size_t to,
                   std::uint32_t* count);
    template <typename FeatureOf>
    [[noreturn]] void refuse_ids(const std::uint64_t* ids, const BucketNumbering& map, FeatureOf feature_of) const;
};

// The bucket of an id; kNoBucket: the table cannot have it.
inline constexpr std::uint32_t kNoBucket = 0xffffffffU;
struct HashedBuckets {
    unsigned bits;
    static constexpr bool kRefuses = false;
    std::uint32_t operator()(std::uint64_t id) const { return bucket_of(mix64(id), bits); }
};
struct DirectBuckets {
    unsigned bits;
    std::uint64_t num_rows;
    static constexpr bool kRefuses = true;
    std::uint32_t operator()(std::uint64_t id) const {
        return id < num_rows ? bucket_of(reverse_bits(id), bits) : kNoBucket;
    }
};

// Calls visit with the buckets of table t.
template <typename Visit> void with_buckets_of(const BucketNumbering& map, std::size_t t, Visit visit) {
    if (map.num_rows[t] == 0)
        visit(HashedBuckets{map.bits[t]});
    else
        visit(DirectBuckets{map.bits[t], map.num_rows[t]});
}

// Replaces the counts by where each range's entries of each bucket begin.
inline void Batch::begin_buckets(std::uint32_t ranges, std::uint32_t buckets) {
    SATRAP_ASSERT(counts.size() == std::size_t{ranges} * buckets);
    begin.resize(buckets + 1);
    std::uint32_t at = 0;
    for (std::uint32_t b = 0; b < buckets; ++b) {
        begin[b] = at;
        for (std::uint32_t r = 0; r < ranges; ++r) {
            std::uint32_t& count = counts[static_cast<std::size_t>(r) * buckets + b];
            std::uint32_t here = count;
            count = at;
            at += here;
        }
    }
    SATRAP_ASSERT(at == size());
    begin[buckets] = at;
}

template <typename FeatureOf>
void Batch::refuse_ids(const std::uint64_t* ids, const BucketNumbering& map, FeatureOf feature_of) const {
    by_table(0, size(), [&](std::size_t t, std::size_t first, std::size_t last) {
        for (std::size_t i = first; i < last && map.num_rows[t] != 0; ++i)
            if (ids[i] >= map.num_rows[t])
                throw InputError(feature_of(i) + "table '" + map.names[t] +
                                 "': " + id_out_of_range(ids[i], map.num_rows[t]) + "; nothing was changed");
    });
    throw InputError("the ids changed during the call: another thread wrote to their array; pass each call its own "
                     "array");
}

// Counts some of the ids in the buckets of their tables, and keeps each one's bucket in `local`; returns false if a
// table cannot have one.
inline bool Batch::count_ids(const std::uint64_t* ids, const BucketNumbering& map, std::size_t from, std::size_t to,
                             std::uint32_t* count) {
    bool permitted = true;
    by_table(from, to, [&](std::size_t t, std::size_t first, std::size_t last) {
        std::uint32_t* of_table = count + map.first[t];
        with_buckets_of(map, t, [&](auto bucket_at) {
            for (std::size_t i = first; i < last; ++i) {
                local[i] = bucket_at(ids[i]);
                if (bucket_at.kRefuses && local[i] == kNoBucket) {
                    permitted = false;
                    return;
                }
                ++of_table[local[i]];
            }
        });
    });
    return permitted;
}

template <typename FeatureOf, typename CursorAt>
void Batch::group(const std::uint64_t* ids, const BucketNumbering& map, ThreadPool& pool, FeatureOf feature_of,
                  CursorAt cursor_at) {
    constexpr std::size_t kAlone = 2048; // below this, waking threads costs more than it saves
    const std::size_t n = size();
    const std::uint32_t buckets = map.total();
    SATRAP_ASSERT(offsets.size() == map.num_tables() + 1 && std::is_sorted(offsets.begin(), offsets.end()));
    SATRAP_ASSERT(n < 1U << 30 && buckets != 0);
    num_unique.assign(buckets, 0);
    unique.reserve(n);
    positions.reserve(n);
    local.reserve(n);
    hints.reserve(n);
    hinted = false;

    std::uint32_t ranges = n < kAlone ? 1 : pool.num_threads(); // one thread may do several
    counts.assign(static_cast<std::size_t>(ranges) * buckets, 0);
    auto run = [&](auto&& pass) {
        if (ranges == 1) return pass(0);
        pool.run([&](unsigned thread, unsigned threads) {
            for (std::uint32_t r = thread; r < ranges; r += threads) pass(r);
        });
    };
    auto range_begin = [&](std::uint32_t r) { return n * r / ranges; };

    std::atomic<bool> refused{false};
    run([&](std::uint32_t r) {
        if (!count_ids(ids, map, range_begin(r), range_begin(r + 1),
                       counts.data() + static_cast<std::size_t>(r) * buckets))
            refused.store(true);
    });
    if (refused.load()) refuse_ids(ids, map, feature_of);
    begin_buckets(ranges, buckets);
    run([&](std::uint32_t r) {
        std::uint32_t* next = counts.data() + static_cast<std::size_t>(r) * buckets;
        by_table(range_begin(r), range_begin(r + 1), [&](std::size_t t, std::size_t first, std::size_t last) {
            std::uint32_t* of_table = next + map.first[t];
            auto cursor = cursor_at(t, first);
            bool same = true; // the caller's array is read twice, and an id must not get into another bucket
            with_buckets_of(map, t, [&](auto bucket_at) {
                for (std::size_t i = first; i < last; ++i) {
                    std::uint32_t e = of_table[local[i]]++;
                    const std::uint64_t id =
                        std::atomic_ref(const_cast<std::uint64_t&>(ids[i])).load(std::memory_order_relaxed);
                    unique[e] = id;
                    same &= bucket_at(id) == local[i];
                    cursor.put(e);
                }
            });
            if (!same) refused.store(true);
        });
    });
    if (refused.load()) refuse_ids(ids, map, feature_of);
}

} // namespace satrap
