// The index of one bucket: hash -> row slot, in pages (index_page.hpp). It is rebuilt from the heads of the rows, never
// saved or shared. A full page of 256 to 511 groups is split in two, so no insertion moves more than some 5,000 entries
// however many the index has, and nothing is outgrown: the old page is one of the two. A smaller page is replaced by a
// larger one.
//
// A directory names the page of a hash by its bits from bit 40 (extendible hashing): page p has the hashes whose first
// depth(p) of these bits are its prefix, and so 2^(depth of the directory - depth(p)) places in the directory.
// Pages of other prefixes, and of other buckets, are split at other sizes: hashes are spread evenly, and equal pages
// would otherwise all be split in the same few batches.
// An index that is to hold at most kMostInOnePage entries has one page, which ends with room for just these: pages that
// are split are between half full and full.
// Invariants: mask_ + 1 = 2^(depth of the directory); pages_[i].number = p <=> i mod 2^depth(p) = prefix(p);
//   size() = sum of states_[p].size; a page has at most capacity() entries; the directory is at most 8 times longer
//   than pages are many, even if the hashes are chosen: a page deeper than evenly spread hashes can make it is replaced
//   by a larger one.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "base/prefetch.hpp"
#include "storage/arena.hpp"
#include "storage/index_page.hpp"

namespace satrap {

class Index {
  public:
    static constexpr std::uint32_t kPageGroups = 256;
    static constexpr std::uint64_t kMostInOnePage = 131072;

    Index() = default;
    Index(const Index&) = delete;
    Index& operator=(const Index&) = delete;
    ~Index() { clear(); }

    // limit: the largest number of entries, 0: there is none. phase: in [0, 1), of the bucket.
    void init(Arena& arena, std::uint64_t limit, double phase) {
        SATRAP_ASSERT(states_.empty());
        SATRAP_ASSERT(phase >= 0.0 && phase < 1.0);
        arena_ = &arena;
        limit_ = limit;
        phase_ = phase;
    }

    std::size_t size() const { return size_; }
    std::size_t bytes() const {
        return page_bytes_ + directory_.capacity() * sizeof(IndexPage) + states_.capacity() * sizeof(State);
    }
    std::size_t num_pages() const { return states_.size(); }

    SATRAP_ALWAYS_INLINE void prefetch(std::uint64_t hash) const {
        const IndexPage& page = page_of(hash);
        prefetch_early(&page.groups[page.home(hash)]);
    }
    std::uint32_t candidate(std::uint64_t hash) const { return page_of(hash).candidate(hash); }
    template <typename IsIt> std::uint32_t find(std::uint64_t hash, IsIt is_it) const {
        return page_of(hash).find(hash, is_it);
    }
    const IndexPage& page_of(std::uint64_t hash) const {
        SATRAP_ASSERT((std::uint64_t{mask_} & (std::uint64_t{mask_} + 1)) == 0);
        SATRAP_ASSERT(mask_ == 0 || mask_ + 1 == directory_.size());
        return pages_[(hash >> kFirstBit) & mask_];
    }

    bool has_room(std::uint64_t hash) const {
        const IndexPage& page = page_of(hash);
        return page.number < states_.size() && states_[page.number].size < page.capacity();
    }

    // Makes room for the hash. `slots` knows the entries: slots.hash_of(slot), slots.prefetch(slot). If it throws, the
    // entries are as before.
    template <typename Slots> void make_room(std::uint64_t hash, const Slots& slots) {
        SATRAP_ASSERT(arena_ != nullptr);
        while (!has_room(hash)) {
            if (states_.empty())
                grow(0, 1, slots);
            else if (const std::uint32_t number = page_of(hash).number; may_split(number))
                split(number, slots);
            else
                grow(number, states_[number].size + 1, slots);
        }
    }

    // Makes room for so many entries in all, of which there are none yet; otherwise later calls of make_room do.
    template <typename Slots> void reserve(std::uint64_t entries, const Slots& slots) {
        SATRAP_ASSERT(arena_ != nullptr);
        if (size_ != 0 || entries == 0) return;
        grow(0, has_one_page() ? entries : std::min(entries, IndexPage::capacity_of(full_groups(0))), slots);
        for (std::uint32_t number = 0; number < states_.size(); ++number) // split() adds to them
            while (may_split(number) && expected(entries, number) > page_at(number).capacity()) split(number, slots);
    }

    // Requires that the id is absent and that there is room.
    void insert(std::uint64_t hash, std::uint32_t slot) {
        SATRAP_ASSERT(has_room(hash));
        const IndexPage& page = page_of(hash);
        page.insert(hash, slot);
        ++states_[page.number].size;
        ++size_;
    }
    // Removes the entry of `slot`, which must exist.
    void erase(std::uint64_t hash, std::uint32_t slot) {
        const IndexPage& page = page_of(hash);
        SATRAP_ASSERT(size_ != 0 && page.number < states_.size() && states_[page.number].size != 0);
        page.erase(hash, slot);
        --states_[page.number].size;
        --size_;
    }

    // Removes all entries and releases the memory.
    void clear() {
        for (std::uint32_t number = 0; number < states_.size(); ++number) release(page_at(number));
        states_ = {};
        directory_ = {};
        only_ = {&empty_group, 1, 0};
        pages_ = &only_;
        mask_ = 0;
        size_ = page_bytes_ = 0;
    }

    // Calls visit(page, entries that the page counts) for each page.
    template <typename Visitor> void for_each_page(Visitor visit) const {
        for (std::uint32_t number = 0; number < states_.size(); ++number) visit(page_at(number), states_[number].size);
    }

  private:
    static constexpr unsigned kFirstBit = 40; // the first that names a page
    static constexpr unsigned kMostBits = 24;

    struct State {
        std::uint32_t size;
        std::uint32_t prefix;
        std::uint32_t depth; // bits of the prefix
    };
    struct Entry {
        std::uint64_t hash;
        std::uint32_t slot;
    };

    static inline Group empty_group{}; // for every index without entries; never written

    bool has_one_page() const { return limit_ != 0 && limit_ <= kMostInOnePage; }
    const IndexPage& page_at(std::uint32_t number) const {
        SATRAP_ASSERT(number < states_.size());
        SATRAP_ASSERT(states_[number].depth <= kMostBits && states_[number].prefix >> states_[number].depth == 0);
        SATRAP_ASSERT(pages_[states_[number].prefix].number == number);
        return pages_[states_[number].prefix];
    }

    // Returns at how many groups a page of the prefix is split instead of replaced by a larger one.
    std::uint32_t full_groups(std::uint32_t prefix) const {
        constexpr unsigned kBits = 5;
        double phase = phase_;
        for (unsigned bit = 0; bit < kBits; ++bit)
            if ((prefix >> bit & 1) != 0) phase += 1.0 / static_cast<double>(2U << bit);
        return static_cast<std::uint32_t>(kPageGroups * std::exp2(phase - std::floor(phase)));
    }

    // Returns how many of so many entries the page has if they are spread evenly, and some more for their deviation.
    std::uint64_t expected(std::uint64_t entries, std::uint32_t number) const {
        return (entries + entries / 16) >> states_[number].depth;
    }

    bool may_split(std::uint32_t number) const {
        const State& state = states_[number];
        if (has_one_page() || state.depth >= kMostBits || page_at(number).num_groups < full_groups(state.prefix))
            return false;
        return std::uint64_t{1} << state.depth <= 4 * std::max<std::uint64_t>(states_.size(), 1);
    }

    Group* allocate(std::uint64_t groups) {
        SATRAP_ASSERT(groups != 0);
        return reinterpret_cast<Group*>(arena_->allocate_index(groups * sizeof(Group)));
    }
    void release(const IndexPage& page) {
        SATRAP_ASSERT(page.groups != &empty_group);
        SATRAP_ASSERT(page_bytes_ >= page.bytes());
        arena_->release_index(reinterpret_cast<std::byte*>(page.groups), page.bytes());
        page_bytes_ -= page.bytes();
    }

    template <typename Slots> static std::vector<Entry> entries_of(const IndexPage& page, const Slots& slots) {
        constexpr std::size_t kAhead = 16;
        std::vector<Entry> entries;
        entries.reserve(page.capacity());
        page.for_each([&](std::uint32_t slot, std::uint8_t) { entries.push_back({0, slot}); });
        SATRAP_ASSERT(entries.size() <= page.capacity());
        for (std::size_t i = 0; i < entries.size(); ++i) {
            if (i + kAhead < entries.size()) slots.prefetch(entries[i + kAhead].slot);
            entries[i].hash = slots.hash_of(entries[i].slot);
        }
        return entries;
    }

    // Returns the groups of a page for so many entries. Pages grow by half each time, from a start between 8 and 12
    // that differs by bucket. The last step before the limit is taken early, so that later rows reuse the memory of the
    // outgrown page.
    std::uint64_t larger_groups(std::uint64_t entries, std::uint32_t prefix, bool is_small) const {
        SATRAP_ASSERT(entries != 0);
        double target = 8.0 + 4.0 * phase_;
        while (target < static_cast<double>(entries)) target *= 1.5;
        auto room = static_cast<std::uint64_t>(target);
        if (has_one_page() && room + room / 2 > limit_) room = std::max(limit_, entries);
        const std::uint64_t groups = IndexPage::groups_for(room);
        return is_small && !has_one_page() ? std::min<std::uint64_t>(groups, full_groups(prefix)) : groups;
    }

    // Replaces a page by one that has room for so many entries.
    template <typename Slots> void grow(std::uint32_t number, std::uint64_t entries, const Slots& slots) {
        const bool is_first = states_.empty();
        SATRAP_ASSERT(is_first ? number == 0 : entries > states_[number].size);
        const State state = is_first ? State{0, 0, 0} : states_[number];
        const IndexPage old = pages_[state.prefix];
        const std::vector<Entry> moved = is_first ? std::vector<Entry>() : entries_of(old, slots);
        const bool is_small = IndexPage::capacity_of(full_groups(state.prefix)) >= entries;
        const auto groups = static_cast<std::uint32_t>(larger_groups(entries, state.prefix, is_small));
        states_.reserve(1);
        const IndexPage larger{allocate(groups), groups, number}; // nothing throws from here on
        SATRAP_ASSERT(larger.capacity() >= entries && moved.size() < larger.capacity());
        page_bytes_ += larger.bytes();
        if (is_first)
            states_.push_back(state);
        else
            release(old);
        for (std::uint32_t at = state.prefix; at <= mask_; at += 1U << state.depth) pages_[at] = larger;
        for (const Entry& entry : moved) larger.insert(entry.hash, entry.slot);
    }

    // Moves the entries of a page whose next bit is 1 to a new page.
    template <typename Slots> void split(std::uint32_t number, const Slots& slots) {
        SATRAP_ASSERT(may_split(number));
        const IndexPage old = page_at(number);
        const std::uint32_t depth = states_[number].depth, bit = 1U << depth, prefix = states_[number].prefix | bit;
        const std::vector<Entry> entries = entries_of(old, slots);
        SATRAP_ASSERT(entries.size() == states_[number].size);
        const auto leaves = std::count_if(entries.begin(), entries.end(), [&](const Entry& entry) {
            return (entry.hash >> (kFirstBit + depth) & 1) != 0;
        });
        if (states_.size() == states_.capacity()) states_.reserve(states_.size() + states_.size() / 2 + 1);
        if (bit > mask_) double_directory();
        const auto needed = IndexPage::groups_for(static_cast<std::uint64_t>(leaves));
        const auto groups = std::max(full_groups(prefix), static_cast<std::uint32_t>(needed));
        const IndexPage added{allocate(groups), groups,
                              static_cast<std::uint32_t>(states_.size())}; // then nothing throws
        page_bytes_ += added.bytes();
        states_.push_back({0, prefix, depth + 1});
        states_[number].depth = depth + 1;
        for (std::uint32_t at = prefix; at <= mask_; at += 2 * bit) pages_[at] = added;
        std::memset(static_cast<void*>(old.groups), 0, old.bytes());
        states_[number].size = 0;
        size_ -= entries.size();
        for (const Entry& entry : entries) insert(entry.hash, entry.slot);
    }

    void double_directory() {
        SATRAP_ASSERT(mask_ < 1U << (kMostBits - 1));
        std::vector<IndexPage> twice;
        twice.reserve(2 * (std::size_t{mask_} + 1));
        for (int half = 0; half < 2; ++half) twice.insert(twice.end(), pages_, pages_ + mask_ + 1);
        directory_ = std::move(twice);
        pages_ = directory_.data();
        mask_ = 2 * mask_ + 1;
    }

    IndexPage only_{&empty_group, 1, 0}; // the directory until a page is split
    IndexPage* pages_ = &only_;
    std::uint32_t mask_ = 0;
    std::size_t size_ = 0;
    std::size_t page_bytes_ = 0;
    Arena* arena_ = nullptr;
    std::uint64_t limit_ = 0;
    double phase_ = 0.0;
    std::vector<IndexPage> directory_;
    std::vector<State> states_;
};

} // namespace satrap
