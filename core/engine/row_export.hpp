// Rows on their way to a file: columns that grow, and the order of their lines. Used by the exports of rows as they are
// (engine_snapshot.cpp) and as they were at a cut (engine_cut.cpp).
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "base/buffers.hpp"
#include "base/hash.hpp"
#include "base/table_config.hpp"
#include "table/rows.hpp"

namespace satrap {

// The rows of one table's bucket range as columns, for files.
struct RowColumns {
    BlockPool::Block id, step, values, state;
    std::size_t rows = 0;
};

// The slots of one bucket by the hash of the id. Hashes are spread evenly, so a counting sort by their first bits
// leaves some eight in each bin; std::sort keeps the worst case of chosen ids at n log n.
class HashOrder {
  public:
    explicit HashOrder(bool direct) : direct_(direct) {}

    struct Entry {
        std::uint64_t hash;
        std::uint32_t slot; // or another number that the caller finds the row by
    };

    void clear() { entries_.clear(); }
    void add(std::uint64_t id, std::uint32_t slot) { entries_.push_back({order_hash(id, direct_), slot}); }
    std::size_t size() const { return entries_.size(); }

    // bucket_bits: how many of the first bits are the same in all of them.
    std::span<const Entry> sorted(unsigned bucket_bits) {
        const auto by_hash = [](const Entry& a, const Entry& b) { return a.hash < b.hash; };
        const unsigned bin_bits = static_cast<unsigned>(std::bit_width(entries_.size() / 8));
        if (bin_bits == 0) {
            std::sort(entries_.begin(), entries_.end(), by_hash);
            return entries_;
        }
        const auto bin = [&](const Entry& entry) { return (entry.hash << bucket_bits) >> (64 - bin_bits); };
        ends_.assign((std::size_t{1} << bin_bits) + 1, 0);
        for (const Entry& entry : entries_) ++ends_[bin(entry) + 1];
        for (std::size_t i = 1; i < ends_.size(); ++i) ends_[i] += ends_[i - 1];
        binned_.resize(entries_.size());
        for (const Entry& entry : entries_) binned_[ends_[bin(entry)]++] = entry; // now ends_[i] is the end of bin i
        std::size_t begin = 0;
        for (std::size_t i = 0; i + 1 < ends_.size(); begin = ends_[i++])
            std::sort(binned_.begin() + static_cast<std::ptrdiff_t>(begin),
                      binned_.begin() + static_cast<std::ptrdiff_t>(ends_[i]), by_hash);
        return binned_;
    }

  private:
    bool direct_;
    std::vector<Entry> entries_, binned_;
    std::vector<std::size_t> ends_;
};

// Sorts the ids from `begin` on by their hashes and removes repeated ones.
inline void sort_hashed(std::vector<std::uint64_t>& ids, std::size_t begin, bool direct) {
    SATRAP_ASSERT(begin <= ids.size());
    const auto from = ids.begin() + static_cast<std::ptrdiff_t>(begin);
    std::sort(from, ids.end(),
              [&](std::uint64_t a, std::uint64_t b) { return order_hash(a, direct) < order_hash(b, direct); });
    ids.erase(std::unique(from, ids.end()), ids.end());
}

// Columns with room for the lines of some rows. They go back to the pool if the export fails.
class RowExport {
  public:
    // Takes rows as a table stores them. A row on a device has the number of its frame as its values.
    RowExport(BlockPool& blocks, const TableConfig& config)
        : RowExport(blocks, config.frame_pool ? config.payload_bytes() : config.dim * config.element_bytes(),
                    config.frame_pool ? 0 : config.state_dim() * sizeof(float), config.value_bytes()) {}
    // value_bytes, state_bytes: of a line. state_at: where the state begins in a row.
    RowExport(BlockPool& blocks, std::size_t value_bytes, std::size_t state_bytes, std::size_t state_at)
        : blocks_(blocks), value_bytes_(value_bytes), state_bytes_(state_bytes), state_at_(state_at) {}
    RowExport(const RowExport&) = delete;
    RowExport& operator=(const RowExport&) = delete;
    ~RowExport() {
        for (BlockPool::Block block : {columns_.id, columns_.step, columns_.values, columns_.state})
            if (block.memory != nullptr) blocks_.give(block);
    }

    std::size_t rows() const { return columns_.rows; }
    // Makes room for so many rows in all, of which the caller then adds some.
    void reserve(std::size_t rows) {
        grow(columns_.id, 0, 8, rows);
        grow(columns_.step, 1, 4, rows);
        grow(columns_.values, 2, value_bytes_, rows);
        grow(columns_.state, 3, state_bytes_, rows);
    }
    // Counts rows as added; put() fills their lines, in any order.
    std::size_t add(std::size_t count) {
        SATRAP_ASSERT((columns_.rows + count) * sizeof(std::uint64_t) <= capacity_[0]); // there is room
        return std::exchange(columns_.rows, columns_.rows + count);
    }
    void put(std::size_t line, std::uint64_t id, const Head& head, const std::byte* values) {
        SATRAP_ASSERT(line < columns_.rows);
        std::memcpy(columns_.id.memory + line * 8, &id, 8);
        std::memcpy(columns_.step.memory + line * 4, &head.stamp, 4);
        std::memcpy(columns_.values.memory + line * value_bytes_, values, value_bytes_);
        if (state_bytes_ != 0)
            std::memcpy(columns_.state.memory + line * state_bytes_, values + state_at_, state_bytes_);
    }
    RowColumns done() { return std::exchange(columns_, RowColumns{}); }

  private:
    void grow(BlockPool::Block& column, std::size_t number, std::size_t width, std::size_t rows) {
        std::size_t& capacity = capacity_[number];
        std::size_t needed = rows * width;
        if (needed <= capacity) return;
        needed = std::max(needed, capacity + capacity / 2);
        BlockPool::Block larger = blocks_.take(needed);
        if (columns_.rows != 0) std::memcpy(larger.memory, column.memory, columns_.rows * width);
        if (column.memory != nullptr) blocks_.give(column);
        column = larger;
        capacity = needed;
    }

    BlockPool& blocks_;
    std::size_t value_bytes_, state_bytes_, state_at_;
    RowColumns columns_{};
    std::size_t capacity_[4] = {};
};

} // namespace satrap
