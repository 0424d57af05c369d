// The ids whose rows no update changes: a range, or a set of any ids. A set is built once, with its table's
// configuration, and is read by all threads.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/assertions.hpp"
#include "base/hash.hpp"
#include "base/inlining.hpp"

namespace satrap {

// Distinct ids, at least one: a hash table with linear probing, 1.5 to 3 places for an id. A search reads one place in
// most cases, so it costs one miss of the cache.
//
// Invariants: places_.size() = 2^(64 - shift_) > number of ids; places_[i] = an id, or empty_, which is no id of the
// set; between hash(id) >> shift_ and the place of the id no place is empty.
class IdSet {
  public:
    // The ids rise.
    explicit IdSet(std::span<const std::uint64_t> ids) {
        SATRAP_ASSERT(!ids.empty());
        while (empty_ < ids.size() && ids[empty_] == empty_) ++empty_; // the smallest number that is no id of the set
        const std::size_t size = std::bit_ceil(ids.size() + ids.size() / 2 + 1);
        shift_ = 64 - static_cast<unsigned>(std::countr_zero(size));
        places_.assign(size, empty_);
        for (const std::uint64_t id : ids) {
            std::size_t at = home(id);
            while (places_[at] != empty_) at = next(at);
            places_[at] = id;
        }
    }

    bool has(std::uint64_t id) const {
        for (std::size_t at = home(id);; at = next(at)) {
            if (places_[at] == id) return id != empty_;
            if (places_[at] == empty_) return false;
        }
    }
    SATRAP_ALWAYS_INLINE void prefetch(std::uint64_t id) const { __builtin_prefetch(&places_[home(id)]); }

  private:
    std::size_t home(std::uint64_t id) const { return mix64(id) >> shift_; }
    std::size_t next(std::size_t at) const { return (at + 1) & (places_.size() - 1); }

    std::uint64_t empty_ = 0;
    unsigned shift_ = 0;
    std::vector<std::uint64_t> places_;
};

// From first to last, none if first > last; with a set, those of the set alone, of which these are the ends.
struct FrozenIds {
    std::uint64_t first = 1, last = 0;
    std::shared_ptr<const IdSet> set = nullptr;

    // The ids rise; there may be none.
    static FrozenIds of(std::span<const std::uint64_t> ids) {
        if (ids.empty()) return {};
        return {ids.front(), ids.back(), std::make_shared<const IdSet>(ids)};
    }

    bool any() const { return first <= last; }
    bool has(std::uint64_t id) const { return first <= id && id <= last && (set == nullptr || set->has(id)); }

    // Writes for each of n ids whether it is frozen; returns whether one is.
    bool mark(const std::uint64_t* ids, std::size_t n, std::uint8_t* marks) const {
        bool some = false;
        for (std::size_t i = 0; i < n; ++i) {
            marks[i] = first <= ids[i] && ids[i] <= last;
            some |= marks[i] != 0;
        }
        if (set == nullptr || !some) return some;
        some = false;
        for (std::size_t i = 0; i < n; ++i) {
            if (i + kAhead < n) set->prefetch(ids[i + kAhead]);
            marks[i] = marks[i] != 0 && set->has(ids[i]);
            some |= marks[i] != 0;
        }
        return some;
    }

  private:
    static constexpr std::size_t kAhead = 8;
};

} // namespace satrap
