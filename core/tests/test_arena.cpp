// Anonymous memory: zeroed, aligned, never shared by two owners, and released blocks come back joined.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>

#include "storage/arena.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

constexpr ChunkTag kTag{ChunkKind::rows, 0, 0, 0};

bool all_bytes_are(const std::byte* memory, std::size_t bytes, int value) {
    for (std::size_t i = 0; i < bytes; ++i)
        if (memory[i] != static_cast<std::byte>(value)) return false;
    return true;
}

struct Block {
    std::size_t bytes;
    int filling;
    bool may_go;
};

CASE(blocks_never_overlap, testing::scaled(40)) {
    AnonymousArena arena(0);
    std::map<std::byte*, Block> live;
    for (unsigned i = 0; i < 1500; ++i) {
        if (random.chance(i / 300 % 2 == 0 ? 0.7 : 0.4)) {
            const std::size_t bytes = random.chance(0.9) ? random.between(1, 3000) : random.between(3000, 60000);
            const bool is_index = random.chance(0.7);
            std::byte* memory = is_index ? arena.allocate_index(bytes) : arena.allocate(kTag, bytes);
            CHECK_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0);
            CHECK(all_bytes_are(memory, bytes, 0));
            const auto after = live.lower_bound(memory);
            CHECK(after == live.end() || memory + bytes <= after->first);
            CHECK(after == live.begin() || std::prev(after)->first + std::prev(after)->second.bytes <= memory);
            const int filling = static_cast<int>(random.between(1, 255));
            std::memset(memory, filling, bytes);
            live[memory] = {bytes, filling, is_index};
        } else if (!live.empty()) {
            auto at = live.lower_bound(live.begin()->first + random.below(1U << 20));
            if (at == live.end()) at = live.begin();
            CHECK(all_bytes_are(at->first, at->second.bytes, at->second.filling)); // nothing else wrote here
            if (!at->second.may_go) continue;
            arena.release_index(at->first, at->second.bytes);
            live.erase(at);
        }
    }
    for (const auto& [memory, block] : live) CHECK(all_bytes_are(memory, block.bytes, block.filling));
}

CASE(released_neighbours_join, 50) {
    AnonymousArena arena(0);
    std::vector<std::pair<std::byte*, std::size_t>> blocks;
    std::size_t total = 0;
    for (unsigned i = 0; i < 20; ++i) {
        const std::size_t bytes = 64 * random.between(1, 100) - random.below(64); // released as it was asked for
        blocks.emplace_back(arena.allocate_index(bytes), bytes);
        std::memset(blocks.back().first, 0xff, bytes);
        total += round_up(bytes, 64);
    }
    std::byte* const first = blocks[0].first;
    std::byte* const wall = arena.allocate_index(64);
    while (!blocks.empty()) {
        std::swap(blocks[random.below(blocks.size())], blocks.back());
        arena.release_index(blocks.back().first, blocks.back().second);
        blocks.pop_back();
    }
    std::byte* const whole = arena.allocate(kTag, total); // only fits if all of them were joined
    CHECK(whole == first);
    CHECK(all_bytes_are(whole, total, 0));
    CHECK(arena.allocate_index(64) > wall); // and nothing of it is left
}

CASE(smallest_fit_and_remainder, 1) {
    AnonymousArena arena(0);
    std::byte* const small = arena.allocate_index(640);
    arena.allocate_index(64);
    std::byte* const large = arena.allocate_index(6400);
    arena.allocate_index(64);
    arena.release_index(large, 6400);
    arena.release_index(small, 640);
    CHECK(arena.allocate_index(600) == small);
    CHECK(arena.allocate_index(3200) == large);
    CHECK(arena.allocate_index(3200) == large + 3200);
}

CASE(larger_than_a_region, 1) {
    AnonymousArena arena(0);
    constexpr std::size_t kBytes = (std::size_t{70} << 20) + 1;
    std::byte* const one = arena.allocate(kTag, 100);
    std::byte* const big = arena.allocate(kTag, kBytes);
    std::byte* const two = arena.allocate(kTag, 100);
    for (std::size_t at = 0; at < kBytes; at += 1 << 20) CHECK(big[at] == std::byte{0});
    big[0] = big[kBytes - 1] = std::byte{7};
    CHECK(all_bytes_are(one, 100, 0) && all_bytes_are(two, 100, 0));
}

CASE(threads_share_it, 4) {
    AnonymousArena arena(0);
    const std::uint64_t seed = random.bits();
    testing::in_threads(3, [&](unsigned thread) {
        Random own(seed + thread);
        std::vector<std::pair<std::byte*, std::size_t>> mine;
        for (unsigned i = 0; i < 400; ++i) {
            if (mine.size() < 20 || own.chance(0.5)) {
                const std::size_t bytes = own.between(1, 4000);
                std::byte* memory = own.chance(0.8) ? arena.allocate_index(bytes) : arena.allocate(kTag, bytes);
                CHECK(all_bytes_are(memory, bytes, 0));
                std::memset(memory, static_cast<int>(thread) + 1, bytes);
                mine.emplace_back(memory, bytes);
            } else {
                auto [memory, bytes] = mine.back();
                mine.pop_back();
                CHECK(all_bytes_are(memory, bytes, static_cast<int>(thread) + 1));
                arena.release_index(memory, bytes);
            }
        }
    });
}

// Linux limits the mappings of a process to 65530; a machine may have terabytes. Nothing here is touched.
CASE(many_bytes_are_few_mappings, testing::kSanitized ? 0 : 1) {
    const auto mappings = [] {
        std::ifstream maps("/proc/self/maps");
        return std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
    };
    const auto before = mappings();
    AnonymousArena arena(0);
    for (unsigned i = 0; i < 1024; ++i) arena.allocate(kTag, std::size_t{48} << 20); // 48 GiB
    CHECK(mappings() - before < 256);
}

} // namespace
