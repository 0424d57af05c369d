// The index of one bucket against std::unordered_map: found exactly when it is there, `passed` exactly as its header
// says, under loads, hashes and orders of erasing that make groups overflow.
#include <algorithm>
#include <unordered_map>

#include "base/hash.hpp"
#include "storage/index.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

// The index with the hash of every slot beside it, as Rows has it in its heads.
struct Indexed {
    AnonymousArena arena{0};
    Index index;
    std::unordered_map<std::uint64_t, std::uint32_t> slot_of; // the oracle
    std::vector<std::uint64_t> hash_of;

    explicit Indexed(std::uint64_t groups) { index.reset(arena, groups); }

    std::uint32_t find(std::uint64_t hash) const {
        return index.find(hash, [&](std::uint32_t slot) { return hash_of[slot] == hash; });
    }
    void insert(std::uint64_t hash) {
        const auto slot = static_cast<std::uint32_t>(hash_of.size());
        hash_of.push_back(hash);
        index.insert(hash, slot);
        slot_of[hash] = slot;
    }
    void erase(std::uint64_t hash) {
        index.erase(hash, slot_of.at(hash));
        slot_of.erase(hash);
    }

    void check() const {
        CHECK(slot_of.size() <= index.limit());
        std::vector<std::uint32_t> passed(index.num_groups());
        std::size_t entries = 0;
        for (std::uint64_t g = 0; g < index.num_groups(); ++g)
            for (unsigned i = 0; i < Group::kWidth; ++i) {
                if (index.group(g).tags[i] == 0) continue;
                ++entries;
                const std::uint32_t slot = index.group(g).slots[i];
                CHECK_EQ(slot_of.at(hash_of[slot]), slot);
                CHECK_EQ(index.group(g).tags[i], Index::tag_of(hash_of[slot]));
                for (std::uint64_t at = index.home(hash_of[slot]); at != g; at = index.next(at)) ++passed[at];
            }
        CHECK_EQ(entries, slot_of.size());
        for (std::uint64_t g = 0; g < index.num_groups(); ++g)
            if (index.group(g).passed != 255) CHECK_EQ(index.group(g).passed, passed[g]);
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
    Indexed indexed(random.between(1, random.chance(0.5) ? 4 : 60));
    const unsigned kind = random.below(5);
    std::vector<std::uint64_t> there, gone;
    for (unsigned i = 0; i < 3000; ++i) {
        const std::size_t most = indexed.index.limit();
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
    Indexed indexed(2);
    auto hash = [](std::uint64_t home, std::uint64_t n) { return (home << 39) | (n << 48) | 1; };
    for (std::uint64_t n = 0; n < 13; ++n) indexed.insert(hash(0, n));
    for (std::uint64_t n = 0; n < 12; ++n) indexed.erase(hash(0, n));
    for (std::uint64_t n = 0; n < 12; ++n) indexed.insert(hash(1, n));
    CHECK(indexed.index.group(0).passed != 0 && indexed.index.group(1).passed != 0);
    CHECK_EQ(indexed.find(hash(0, 100)), kNoSlot);
    CHECK_EQ(indexed.find(hash(1, 100)), kNoSlot);
    indexed.check();
}

// One home for hundreds of entries: its count sticks at 255, and nothing is lost when they go again.
CASE(passed_sticks_at_255, 5) {
    Indexed indexed(50);
    std::vector<std::uint64_t> hashes;
    for (std::uint64_t n = 0; n < 400; ++n) hashes.push_back((n << 48) | random.between(1, 255));
    for (std::uint64_t hash : hashes) indexed.insert(hash);
    CHECK_EQ(indexed.index.group(0).passed, 255);
    indexed.check();
    for (std::size_t i = 0; i < 390; ++i) indexed.erase(hashes[i]);
    CHECK_EQ(indexed.index.group(0).passed, 255);
    indexed.check();
    for (std::size_t i = 0; i < 390; ++i) CHECK_EQ(indexed.find(hashes[i]), kNoSlot);
}

CASE(candidate_is_in_the_home_group, 20) {
    Indexed indexed(8);
    while (indexed.slot_of.size() < 40) indexed.insert(random.bits());
    for (const auto& [hash, slot] : indexed.slot_of) {
        const std::uint32_t candidate = indexed.index.candidate(hash);
        const Group& home = indexed.index.group(indexed.index.home(hash));
        const bool at_home = std::count(home.slots, home.slots + Group::kWidth, slot) != 0;
        if (candidate == kNoSlot)
            CHECK(!at_home);
        else
            CHECK_EQ(Index::tag_of(indexed.hash_of[candidate]), Index::tag_of(hash));
    }
}

CASE(room_is_as_promised, 1) {
    AnonymousArena arena(0);
    for (std::uint64_t entries = 1; entries < 5000; entries += entries < 200 ? 1 : 97) {
        Index index;
        index.reset(arena, Index::groups_for(entries));
        CHECK(index.limit() >= entries);
        CHECK_EQ(index.bytes(), index.num_groups() * 64);
    }
    for (unsigned tag = 0; tag < 256; ++tag) CHECK(Index::tag_of(0xabcd00U | tag) != 0);
}

} // namespace
