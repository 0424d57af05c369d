// Sets of frozen ids: equal to std::set for random ids and those at the ends of the 64-bit numbers.
#include <set>

#include "base/frozen_ids.hpp"
#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

std::uint64_t draw_id(Random& random) {
    const std::uint64_t border = std::vector<std::uint64_t>{0, 1ULL << 32, 1ULL << 63, ~0ULL}[random.below(4)];
    return random.chance(0.2) ? random.bits() : border + random.below(20) - 10;
}

CASE(sets_equal_a_tree, testing::scaled(200)) {
    std::set<std::uint64_t> ids;
    const bool begins_at_0 = random.chance(0.5);
    for (std::uint32_t n = begins_at_0 ? random.below(10) : 0; n > 0; --n) ids.insert(n - 1);
    for (std::uint32_t n = random.below(random.chance(0.5) ? 3 : 300); n > 0; --n) ids.insert(draw_id(random));
    const FrozenIds frozen = FrozenIds::of(std::vector<std::uint64_t>(ids.begin(), ids.end()));
    CHECK_EQ(frozen.any(), !ids.empty());
    std::vector<std::uint64_t> asked(ids.begin(), ids.end());
    for (int i = 0; i < 300; ++i) asked.push_back(draw_id(random));
    for (std::uint64_t id = 0; id < 20; ++id) asked.push_back(id);
    std::vector<std::uint8_t> marks(asked.size(), 7);
    for (const std::size_t n : {asked.size(), std::size_t{0}}) {
        bool some = false;
        for (std::size_t i = 0; i < n; ++i) some |= ids.contains(asked[i]);
        CHECK_EQ(frozen.mark(asked.data(), n, marks.data()), some);
    }
    for (std::size_t i = 0; i < asked.size(); ++i) {
        CHECK_EQ(frozen.has(asked[i]), ids.contains(asked[i]));
        CHECK_EQ(marks[i], ids.contains(asked[i]) ? 1 : 0);
    }
}

CASE(ranges_have_their_ends, testing::scaled(100)) {
    const FrozenIds frozen{draw_id(random), draw_id(random)};
    CHECK_EQ(frozen.any(), frozen.first <= frozen.last);
    for (int i = 0; i < 100; ++i) {
        const std::uint64_t id = random.chance(0.5) ? draw_id(random) : random.chance(0.5) ? frozen.first : frozen.last;
        std::uint8_t mark = 7;
        CHECK_EQ(frozen.has(id), frozen.first <= id && id <= frozen.last);
        CHECK_EQ(frozen.mark(&id, 1, &mark), frozen.has(id));
        CHECK_EQ(mark, frozen.has(id) ? 1 : 0);
    }
}

} // namespace
