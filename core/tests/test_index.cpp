// A page of an index, and an index of many, against std::unordered_map: found exactly when it is there, `passed`
// exactly as its header says, under loads, hashes and orders of erasing that make groups overflow and pages split.
#include <algorithm>
#include <unordered_map>

#include "base/hash.hpp"
#include "storage/index.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

// A page with the hash of every slot beside it, as Rows has it in its heads.
struct Paged {
    std::vector<Group> groups;
    IndexPage page;
    std::unordered_map<std::uint64_t, std::uint32_t> slot_of; // the oracle
    std::vector<std::uint64_t> hash_of;

    explicit Paged(std::uint32_t num_groups) : groups(num_groups), page{groups.data(), num_groups, 0} {}

    std::uint32_t find(std::uint64_t hash) const {
        return page.find(hash, [&](std::uint32_t slot) { return hash_of[slot] == hash; });
    }
    void insert(std::uint64_t hash) {
        const auto slot = static_cast<std::uint32_t>(hash_of.size());
        hash_of.push_back(hash);
        page.insert(hash, slot);
        slot_of[hash] = slot;
    }
    void erase(std::uint64_t hash) {
        page.erase(hash, slot_of.at(hash));
        slot_of.erase(hash);
    }

    void check() const {
        CHECK(slot_of.size() <= page.capacity());
        std::vector<std::uint32_t> passed(page.num_groups);
        std::size_t entries = 0;
        for (std::uint64_t g = 0; g < page.num_groups; ++g)
            for (unsigned i = 0; i < Group::kWidth; ++i) {
                if (groups[g].tags[i] == 0) continue;
                ++entries;
                const std::uint32_t slot = groups[g].slots[i];
                CHECK_EQ(slot_of.at(hash_of[slot]), slot);
                CHECK_EQ(groups[g].tags[i], IndexPage::tag_of(hash_of[slot]));
                for (std::uint64_t at = page.home(hash_of[slot]); at != g; at = page.next(at)) ++passed[at];
            }
        CHECK_EQ(entries, slot_of.size());
        for (std::uint64_t g = 0; g < page.num_groups; ++g)
            if (groups[g].passed != 255) CHECK_EQ(groups[g].passed, passed[g]);
        for (const auto& [hash, slot] : slot_of) CHECK_EQ(find(hash), slot);
    }
};

// Hashes that collide in various ways: any, few homes, few tags, all the same home and tag.
std::uint64_t draw_hash(Random& random, unsigned kind) {
    const std::uint64_t hash = random.bits();
    switch (kind) {
    case 0: return hash;
    case 1: return hash & ~std::uint64_t{0xffffff0000};           // home in the first 1/256
    case 2: return hash & ~std::uint64_t{0xfe};                   // two tags, which are one
    case 3: return (hash & ~std::uint64_t{0xffffffffff}) | 7;     // one home, one tag
    default: return (hash & 1) != 0 ? hash | 0xffffff0000 : hash; // half of them in the last group, going round
    }
}

CASE(agrees_with_a_map, testing::scaled(400)) {
    Paged indexed(static_cast<std::uint32_t>(random.between(1, random.chance(0.5) ? 4 : 60)));
    const unsigned kind = random.below(5);
    std::vector<std::uint64_t> there, gone;
    for (unsigned i = 0; i < 3000; ++i) {
        const std::size_t most = indexed.page.capacity();
        const bool grow = random.chance(i / 500 % 2 == 0 ? 0.8 : 0.3);
        if (grow && there.size() < most) {
            const std::uint64_t hash =
                !gone.empty() && random.chance(0.3) ? random.pick(gone) : draw_hash(random, kind);
            if (indexed.slot_of.contains(hash)) continue;
            CHECK_EQ(indexed.find(hash), kNoSlot);
            indexed.insert(hash);
            there.push_back(hash);
        } else if (!there.empty()) {
            const std::size_t at = random.below(there.size());
            indexed.erase(there[at]);
            CHECK_EQ(indexed.find(there[at]), kNoSlot);
            gone.push_back(there[at]);
            there[at] = there.back();
            there.pop_back();
        }
        if (!there.empty()) CHECK_EQ(indexed.find(there[0]), indexed.slot_of.at(there[0]));
        if (i % 250 == 0) indexed.check();
    }
    indexed.check();
}

// Group 0 overflowed into 1 and emptied, then 1 into 0: every group has been passed, and a missing id must still end.
CASE(search_ends_when_all_groups_were_passed, 1) {
    Paged indexed(2);
    auto hash = [](std::uint64_t home, std::uint64_t n) { return (home << 39) | (n << 48) | 1; };
    for (std::uint64_t n = 0; n < 13; ++n) indexed.insert(hash(0, n));
    for (std::uint64_t n = 0; n < 12; ++n) indexed.erase(hash(0, n));
    for (std::uint64_t n = 0; n < 12; ++n) indexed.insert(hash(1, n));
    CHECK(indexed.groups[0].passed != 0 && indexed.groups[1].passed != 0);
    CHECK_EQ(indexed.find(hash(0, 100)), kNoSlot);
    CHECK_EQ(indexed.find(hash(1, 100)), kNoSlot);
    indexed.check();
}

// One home for hundreds of entries: its count sticks at 255, and nothing is lost when they go again.
CASE(passed_sticks_at_255, 5) {
    Paged indexed(50);
    std::vector<std::uint64_t> hashes;
    for (std::uint64_t n = 0; n < 400; ++n) hashes.push_back((n << 48) | random.between(1, 255));
    for (std::uint64_t hash : hashes) indexed.insert(hash);
    CHECK_EQ(indexed.groups[0].passed, 255);
    indexed.check();
    for (std::size_t i = 0; i < 390; ++i) indexed.erase(hashes[i]);
    CHECK_EQ(indexed.groups[0].passed, 255);
    indexed.check();
    for (std::size_t i = 0; i < 390; ++i) CHECK_EQ(indexed.find(hashes[i]), kNoSlot);
}

CASE(candidate_is_in_the_home_group, 20) {
    Paged indexed(8);
    while (indexed.slot_of.size() < 40) indexed.insert(random.bits());
    for (const auto& [hash, slot] : indexed.slot_of) {
        const std::uint32_t candidate = indexed.page.candidate(hash);
        const Group& home = indexed.groups[indexed.page.home(hash)];
        const bool at_home = std::count(home.slots, home.slots + Group::kWidth, slot) != 0;
        if (candidate == kNoSlot)
            CHECK(!at_home);
        else
            CHECK_EQ(IndexPage::tag_of(indexed.hash_of[candidate]), IndexPage::tag_of(hash));
    }
}

CASE(room_is_as_promised, 1) {
    for (std::uint64_t entries = 1; entries < 5000; entries += entries < 200 ? 1 : 97)
        CHECK(IndexPage::capacity_of(IndexPage::groups_for(entries)) >= entries);
    for (unsigned tag = 0; tag < 256; ++tag) CHECK(IndexPage::tag_of(0xabcd00U | tag) != 0);
}

// An index with the hash of every slot beside it.
struct Indexed {
    AnonymousArena arena{0};
    Index index;
    std::unordered_map<std::uint64_t, std::uint32_t> slot_of; // the oracle
    std::vector<std::uint64_t> hashes;
    mutable std::size_t most_moved = 0, moved = 0; // entries that one insertion moved

    Indexed(std::uint64_t limit, double phase) { index.init(arena, limit, phase); }

    std::uint64_t hash_of(std::uint32_t slot) const {
        ++moved;
        return hashes[slot];
    }
    void prefetch(std::uint32_t) const {}

    std::uint32_t find(std::uint64_t hash) const {
        return index.find(hash, [&](std::uint32_t slot) { return hashes[slot] == hash; });
    }
    void insert(std::uint64_t hash) {
        const auto slot = static_cast<std::uint32_t>(hashes.size());
        hashes.push_back(hash);
        moved = 0;
        if (!index.has_room(hash)) index.make_room(hash, *this);
        most_moved = std::max(most_moved, moved);
        index.insert(hash, slot);
        slot_of[hash] = slot;
    }
    void erase(std::uint64_t hash) {
        index.erase(hash, slot_of.at(hash));
        slot_of.erase(hash);
    }

    void check() const {
        std::size_t entries = 0, bytes = 0;
        index.for_each_page([&](const IndexPage& page, std::size_t counted) {
            std::size_t here = 0;
            bytes += page.bytes();
            page.for_each([&](std::uint32_t slot, std::uint8_t tag) {
                ++here;
                CHECK_EQ(slot_of.at(hashes[slot]), slot);
                CHECK_EQ(tag, IndexPage::tag_of(hashes[slot]));
                CHECK_EQ(index.page_of(hashes[slot]).groups, page.groups);
            });
            CHECK_EQ(here, counted);
            CHECK(here <= page.capacity());
            entries += here;
        });
        CHECK_EQ(entries, slot_of.size());
        CHECK_EQ(index.size(), slot_of.size());
        CHECK(index.bytes() >= bytes);
        for (const auto& [hash, slot] : slot_of) CHECK_EQ(find(hash), slot);
    }
};

CASE(many_pages_agree_with_a_map, testing::scaled(12)) {
    const unsigned kind = random.below(6); // 5: all in the pages of one prefix
    Indexed indexed(random.chance(0.3) ? random.between(1, 300000) : 0, random.below(1000) / 1000.0);
    const std::uint64_t limit = 30000;
    std::vector<std::uint64_t> there, gone;
    for (unsigned i = 0; i < 60000; ++i) {
        const bool grow = random.chance(i / 15000 % 2 == 0 ? 0.9 : 0.3);
        if (grow && there.size() < limit) {
            std::uint64_t hash = !gone.empty() && random.chance(0.1) ? random.pick(gone) : draw_hash(random, kind % 5);
            if (kind == 3) hash = random.bits() & ~std::uint64_t{0xff}; // one home is too slow for so many
            if (kind == 5) hash &= ~(std::uint64_t{0xffffff} << 40);
            if (indexed.slot_of.contains(hash)) continue;
            CHECK_EQ(indexed.find(hash), kNoSlot);
            indexed.insert(hash);
            there.push_back(hash);
        } else if (!there.empty()) {
            const std::size_t at = random.below(there.size());
            indexed.erase(there[at]);
            CHECK_EQ(indexed.find(there[at]), kNoSlot);
            gone.push_back(there[at]);
            there[at] = there.back();
            there.pop_back();
        }
        if (i % 10000 == 0) indexed.check();
    }
    indexed.check();
    indexed.index.clear();
    indexed.slot_of.clear();
    indexed.check();
}

// What grows without a limit stalls for no longer, and costs no more memory, the larger it is.
CASE(growing_moves_few_entries_at_once, 2) {
    constexpr std::size_t kRows = 300000;
    Indexed indexed(0, random.below(1000) / 1000.0);
    std::size_t splits = 0, pages = 0, most_splits = 0;
    for (std::size_t i = 0; i < kRows; ++i) {
        indexed.insert(random.bits());
        if (i < kRows / 10) continue;
        if (i % (kRows / 100) == 0) most_splits = std::max(most_splits, std::exchange(splits, 0));
        splits += std::exchange(pages, indexed.index.num_pages()) < indexed.index.num_pages();
        CHECK(i % 1000 != 0 || indexed.index.bytes() < 13 * i);
    }
    indexed.check();
    CHECK(indexed.most_moved < 10000);
    CHECK(most_splits < indexed.index.num_pages() / 4); // no one hundredth of the insertions splits them all
}

// Chosen hashes do not make the directory long.
CASE(chosen_hashes_cost_no_more, 1) {
    Indexed indexed(0, 0.0);
    for (std::uint64_t n = 0; n < 60000; ++n) indexed.insert(mix64(n) & ~(std::uint64_t{0xffffff} << 40));
    indexed.check();
    CHECK(indexed.index.bytes() < 60000 * 20);
}

CASE(reserved_room_is_enough, testing::scaled(10)) {
    const std::uint64_t limit = random.chance(0.5) ? random.between(1, 200000) : 0;
    const std::uint64_t entries = random.between(1, limit == 0 ? 100000 : limit);
    Indexed indexed(limit, random.below(1000) / 1000.0);
    indexed.index.reserve(entries, indexed);
    const std::size_t reserved = indexed.index.bytes();
    for (std::uint64_t n = 0; n < entries; ++n) indexed.insert(random.bits());
    indexed.check();
    CHECK(indexed.index.bytes() <= reserved + reserved / 4);
    if (limit != 0 && limit <= Index::kMostInOnePage) CHECK_EQ(indexed.most_moved, 0);
}

// A bucket that is full has room for its rows and no more.
CASE(a_limited_index_ends_small, 4) {
    const std::uint64_t limit = random.between(1000, 100000);
    Indexed indexed(limit, random.below(1000) / 1000.0);
    for (std::uint64_t n = 0; n < limit; ++n) indexed.insert(random.bits());
    indexed.check();
    CHECK_EQ(indexed.index.num_pages(), 1);
    CHECK(indexed.index.bytes() < 6.8 * static_cast<double>(limit) + 100);
}

} // namespace
