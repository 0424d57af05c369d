// AppliedSteps against a set of all applied steps: steps within reach are answered exactly, others are
// known to be forgotten.
#include "table/applied_steps.hpp"

#include <set>

#include "testing.hpp"

using namespace satrap;
using testing::Random;

namespace {

CASE(agrees_with_a_set, testing::scaled(400)) {
    StepWindow window{};
    std::set<std::uint32_t> applied;
    std::uint32_t around = random.chance(0.3) ? 0xfffffff0U - 400 : 1;
    for (unsigned n = 0; n < 400; ++n) {
        around += random.chance(0.02) ? random.below(200) : random.below(3);
        const std::uint32_t back = random.below(random.chance(0.1) ? 60 : 12);
        const std::uint32_t step = back < around ? around - back : 1;
        if (window.forgot(step)) {
            CHECK(window.newest() - step >= StepWindow::kSteps);
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

// What a window says that is a set's: of the steps within reach of `newest`.
void is_the_set(const StepWindow& window, const std::set<std::uint32_t>& steps) {
    for (std::uint32_t step = 1; step < 200; ++step)
        if (!window.forgot(step)) CHECK_EQ(window.applied(step), steps.contains(step));
}

CASE(two_windows_together_and_both, testing::scaled(2000)) {
    StepWindow windows[2] = {};
    std::set<std::uint32_t> steps[2], any, common;
    for (int w = 0; w < 2; ++w) {
        const std::uint32_t around = 1 + random.below(random.chance(0.2) ? 100 : 10);
        for (unsigned n = random.below(20); n-- > 0;) {
            const std::uint32_t step = around + random.below(random.chance(0.2) ? 60 : 20);
            if (windows[w].forgot(step)) continue;
            windows[w].mark(step);
            steps[w].insert(step);
        }
    }
    any = steps[0];
    any.insert(steps[1].begin(), steps[1].end());
    // One forgets what the other reaches: of those steps nothing is claimed that is not so.
    for (std::uint32_t step : steps[0])
        if (steps[1].contains(step) && !windows[0].forgot(step) && !windows[1].forgot(step)) common.insert(step);
    StepWindow together = windows[0], both = windows[0], copy{};
    together.add(windows[1]);
    is_the_set(together, any);
    CHECK_EQ(together.newest(), std::max(windows[0].newest(), windows[1].newest()));
    both.keep_common(windows[1]);
    is_the_set(both, common);
    CHECK(both.newest() <= std::min(windows[0].newest(), windows[1].newest()));
    copy.take(both.as_word());
    is_the_set(copy, common);
}

CASE(finished_is_what_every_bucket_has_applied, 1) {
    AnonymousArena arena(1);
    AppliedSteps source, target;
    source.init(arena, 3);
    target.init(arena, 3);
    for (std::uint32_t step : {5U, 6U, 7U}) source.finish(0, step);
    for (std::uint32_t step : {6U, 7U, 8U}) target.finish(0, step);
    source.of(0)[1].mark(9); // applied there, while the whole of it was not
    const std::uint32_t moved[] = {1};
    source.hand_over(moved);
    target.of(0)[1].take(source.of(0)[1].as_word());
    target.take_over(moved, false);
    for (std::uint32_t step = 5; step < 10; ++step) CHECK_EQ(target.finished(0, step), step == 6 || step == 7);
    CHECK(target.of(0)[1].applied(9) && target.of(0)[1].applied(5));
    target.take_over(moved, true); // nothing else is there
    for (std::uint32_t step = 5; step < 10; ++step) CHECK_EQ(target.finished(0, step), step != 8);
    CHECK_EQ(source.trainers().size(), 1);
}

CASE(every_trainer_has_its_own, 1) {
    AnonymousArena arena(1);
    AppliedSteps windows;
    windows.init(arena, 3);
    StepWindow* first = windows.of(5);
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

CASE(chunks_come_back, 1) {
    AnonymousArena arena(1);
    AppliedSteps windows;
    windows.init(arena, 2);
    std::vector<StepWindow> memory(3);
    auto* bytes = reinterpret_cast<std::byte*>(memory.data());
    memory[1].mark(9);
    windows.adopt(2, bytes, 3 * sizeof(StepWindow));
    CHECK(windows.of(2)[1].applied(9));
    CHECK_THROWS(InvariantError, "two chunks", windows.adopt(2, bytes, 3 * sizeof(StepWindow)));
    CHECK_THROWS(InvariantError, "of trainer 1", windows.adopt(1, bytes, 3 * sizeof(StepWindow) - 1));
    CHECK_THROWS(InvariantError, "of trainer 4096", windows.adopt(kMostTrainers, bytes, 3 * sizeof(StepWindow)));
}

} // namespace
