// A page of an index: hash -> row slot. It holds no ids: a tag match is a candidate, and Rows compares the id in the
// slot's head, so all 2^64 ids are valid and never collide. Index has the pages.
//
// A Group is one cache line: 12 one-byte tags (0: empty), the count of ids whose probe passed this full group,
// and 12 slots. Groups are probed linearly from home(hash), the top 32 of the hash's low 40 bits, scaled.
// Invariants: entries <= capacity = 0.8 * 12 * groups; an id's entry is in the first group from home that had room;
//   group.passed = number of entries stored beyond this group whose probe passed it (sticky at 255).
// So a lookup of a missing id ends at the first group with passed == 0: one line in most cases. No tombstones.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#include "base/assertions.hpp"

namespace satrap {

inline constexpr std::uint32_t kNoSlot = 0xffffffffU;

struct alignas(64) Group {
    static constexpr unsigned kWidth = 12;
    std::uint8_t tags[kWidth];
    std::uint8_t passed;
    std::uint8_t unused[3];
    std::uint32_t slots[kWidth];

    // Bit i is set where tags[i] == tag.
    unsigned match(std::uint8_t tag) const {
        SATRAP_ASSERT(reinterpret_cast<std::uintptr_t>(this) % alignof(Group) == 0);
#if defined(__SSE2__)
        __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(tags));
        return static_cast<unsigned>(_mm_movemask_epi8(_mm_cmpeq_epi8(line, _mm_set1_epi8(static_cast<char>(tag))))) &
               0xfffU;
#else
        unsigned bits = 0;
        for (unsigned i = 0; i < kWidth; ++i) bits |= static_cast<unsigned>(tags[i] == tag) << i;
        return bits;
#endif
    }
};
static_assert(sizeof(Group) == 64);

struct IndexPage {
    Group* groups;
    std::uint32_t num_groups;
    std::uint32_t number; // among the pages of its index

    static std::uint64_t groups_for(std::uint64_t entries) { return (entries * 10 + 95) / 96 + (entries != 0); }
    static std::uint64_t capacity_of(std::uint64_t groups) { return groups * 96 / 10; } // load 0.8

    std::uint64_t capacity() const { return capacity_of(num_groups); }
    std::size_t bytes() const { return std::size_t{num_groups} * sizeof(Group); }

    // Returns the first slot whose tag matches in the home group, unverified; kNoSlot if none.
    std::uint32_t candidate(std::uint64_t hash) const {
        const Group& group = groups[home(hash)];
        unsigned bits = group.match(tag_of(hash));
        return bits == 0 ? kNoSlot : group.slots[__builtin_ctz(bits)];
    }

    template <typename IsIt> std::uint32_t find(std::uint64_t hash, IsIt is_it) const {
        const std::uint8_t tag = tag_of(hash);
        const std::uint64_t start = home(hash);
        std::uint64_t g = start;
        do {
            const Group& group = groups[g];
            for (unsigned bits = group.match(tag); bits != 0; bits &= bits - 1) {
                std::uint32_t slot = group.slots[__builtin_ctz(bits)];
                if (is_it(slot)) return slot;
            }
            if (group.passed == 0) return kNoSlot;
            g = next(g);
        } while (g != start); // in a small page probes may have passed every group
        return kNoSlot;
    }

    // Requires that the id is absent and that there are fewer entries than capacity().
    void insert(std::uint64_t hash, std::uint32_t slot) const {
        SATRAP_ASSERT(slot != kNoSlot);
        for (std::uint64_t g = home(hash);; g = next(g)) {
            Group& group = groups[g];
            unsigned empty = group.match(0);
            if (empty != 0) {
                unsigned i = static_cast<unsigned>(__builtin_ctz(empty));
                group.tags[i] = tag_of(hash);
                group.slots[i] = slot;
                return;
            }
            if (group.passed != 255) ++group.passed;
            SATRAP_ASSERT(next(g) != home(hash)); // else every group is full
        }
    }

    // Removes the entry of `slot`, which must exist.
    void erase(std::uint64_t hash, std::uint32_t slot) const {
        const std::uint8_t tag = tag_of(hash);
        for (std::uint64_t g = home(hash);; g = next(g)) {
            Group& group = groups[g];
            for (unsigned bits = group.match(tag); bits != 0; bits &= bits - 1) {
                unsigned i = static_cast<unsigned>(__builtin_ctz(bits));
                if (group.slots[i] != slot) continue;
                group.tags[i] = 0;
                return;
            }
            SATRAP_ASSERT(group.passed != 0 && next(g) != home(hash)); // else there is no entry of the slot
            if (group.passed != 255) --group.passed;                   // one probe fewer passes it
        }
    }

    // Calls visit(slot, tag) for each entry.
    template <typename Visitor> void for_each(Visitor visit) const {
        for (std::uint32_t g = 0; g < num_groups; ++g)
            for (unsigned i = 0; i < Group::kWidth; ++i)
                if (groups[g].tags[i] != 0) visit(groups[g].slots[i], groups[g].tags[i]);
    }

    std::uint64_t home(std::uint64_t hash) const {
        SATRAP_ASSERT(groups != nullptr && num_groups != 0);
        return (((hash >> 8) & 0xffffffffU) * num_groups) >> 32;
    }
    static std::uint8_t tag_of(std::uint64_t hash) {
        auto tag = static_cast<std::uint8_t>(hash);
        return tag != 0 ? tag : 1;
    }
    std::uint64_t next(std::uint64_t g) const {
        SATRAP_ASSERT(g < num_groups);
        return g + 1 == num_groups ? 0 : g + 1;
    }
};
static_assert(sizeof(IndexPage) == 16);

} // namespace satrap
