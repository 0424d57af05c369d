// Windows against a set of all steps that were applied: what is within reach is answered exactly, what is not is known
// to be forgotten.
#include "windows.hpp"

#include <set>

#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

void agrees_with_a_set(Random& random) {
    Window window{};
    std::set<std::uint32_t> applied;
    std::uint32_t around = random.chance(0.3) ? 0xfffffff0U - 400 : 1;
    for (unsigned n = 0; n < 400; ++n) {
        around += random.chance(0.02) ? random.below(200) : random.below(3);
        const std::uint32_t back = random.below(random.chance(0.1) ? 60 : 12);
        const std::uint32_t step = back < around ? around - back : 1;
        if (window.forgot(step)) {
            CHECK(window.newest() - step >= Window::kSteps);
            CHECK(!window.applied(step));
            continue;
        }
        CHECK_EQ(window.applied(step), applied.contains(step));
        window.mark(step);
        applied.insert(step);
        CHECK(window.applied(step));
        CHECK_EQ(window.newest(), *applied.rbegin());
    }
}

void every_trainer_has_its_own(Random&) {
    AnonymousArena arena(1);
    Windows windows;
    windows.init(arena, 3);
    Window* first = windows.of(5);
    for (int b = 0; b <= 3; ++b) CHECK_EQ(first[b].newest(), 0);
    first[3].mark(7);
    CHECK_EQ(windows.of(kMostTrainers - 1)[3].newest(), 0);
    CHECK(windows.of(5) == first);
    CHECK(first[3].applied(7));
    CHECK(!windows.of(6)[3].applied(7));
    CHECK(windows.finished(5, 7) && !windows.finished(5, 8) && !windows.finished(6, 7));
    windows.finish(6, 8);
    CHECK(windows.finished(6, 8));
    windows.clear();
    CHECK(!windows.finished(6, 8));
    CHECK(!first[3].applied(7));
    CHECK_EQ(first[3].newest(), 0);
}

void chunks_come_back(Random&) {
    AnonymousArena arena(1);
    Windows windows;
    windows.init(arena, 2);
    std::vector<Window> memory(3);
    auto* bytes = reinterpret_cast<std::byte*>(memory.data());
    memory[1].mark(9);
    windows.adopt(2, bytes, 3 * sizeof(Window));
    CHECK(windows.of(2)[1].applied(9));
    CHECK_THROWS(InvariantError, "two chunks", windows.adopt(2, bytes, 3 * sizeof(Window)));
    CHECK_THROWS(InvariantError, "of trainer 1", windows.adopt(1, bytes, 3 * sizeof(Window) - 1));
    CHECK_THROWS(InvariantError, "of trainer 4096", windows.adopt(kMostTrainers, bytes, 3 * sizeof(Window)));
}

} // namespace

int main(int argc, char** argv) {
    return testing::run(argc, argv,
                        {{"agrees_with_a_set", testing::scaled(400), agrees_with_a_set},
                         {"every_trainer_has_its_own", 1, every_trainer_has_its_own},
                         {"chunks_come_back", 1, chunks_come_back}});
}
