"""The count of all trainers' samples, over restarts: the same as that of a run without them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.launch.run_progress import RunProgress
from satrap.monitor.report import Report, run_bar

BATCHES = st.lists(st.integers(1, 50), min_size=30, max_size=30)


class Run:
    """Trainers that report every step to a run, each with batches of other sizes."""

    def __init__(self, *batches: list[int]) -> None:
        self.progress, self.batches, self.launch = RunProgress(0.0), batches, 0

    def train(self, first: int, last: int, **more: int) -> None:
        """Train the steps from first to last in a new launch."""
        self.launch += 1
        for rank, sizes in enumerate(self.batches):
            loop = f"{rank}-{self.launch}"
            self.progress.add(rank, {"kind": "start", "launch": self.launch, "id": loop})
            for step in range(first, last + 1):
                samples = sum(sizes[first - 1 : step])
                shown: dict[str, Any] = {"id": loop, "first": first, "step": step, "samples": samples, **more}
                self.progress.add(rank, {"kind": "progress", **shown})
                self.progress.add(rank, {"kind": "interval", "loss": 0.25 + rank, "auc": 0.5})

    def samples_until(self, step: int) -> int:
        return sum(sum(sizes[:step]) for sizes in self.batches)

    def report(self, now: float) -> Report:
        report = self.progress.report(now)
        assert report is not None
        return report


@given(BATCHES, BATCHES, st.lists(st.tuples(st.integers(0, 29), st.integers(1, 30)), max_size=5))
def test_the_count_over_launches_is_that_of_one(
    one: list[int], two: list[int], launches: list[tuple[int, int]]
) -> None:
    """Each launch resumes after a step that was reached, and stops at a later one."""
    run, reached = Run(one, two), 0
    for resumed, last in [(0, 10), *launches, (0, 30)]:
        first = min(resumed, reached) + 1
        run.train(first, reached := max(first, last))
        assert run.report(1.0).samples == run.samples_until(reached)


def test_steps_before_the_first_launch_have_samples_like_those_after_it() -> None:
    run = Run([4] * 30, [8] * 30)
    run.train(11, 20)
    assert run.report(1.0).samples == run.samples_until(20) == 240
    run.train(16, 30)
    assert run.report(1.0).samples == 360


def test_rate_and_share_are_those_of_all_trainers() -> None:
    run = Run([4] * 30, [8] * 30)
    run.train(1, 10, end_step=30)
    run.report(100.0)
    run.train(11, 12, end_step=30)
    first = run.report(110.0)
    assert first.samples_per_second == 0.0, "a launch begins a new measurement"
    for rank, size in ((0, 4), (1, 8)):
        shown = {"id": f"{rank}-2", "first": 11, "step": 15, "samples": 5 * size, "end_step": 30}
        run.progress.add(rank, {"kind": "progress", **shown})
    report = run.report(120.0)
    assert (report.step, report.end_step, report.samples, report.loss) == (15, 30, 180, 0.75)
    assert report.samples_per_second == pytest.approx(36 / 10)
    text = run_bar(report, 200, "#.", ["1 restart"])
    assert text == (
        "##########..........  50% 00:50 left | 1 restart | 180 samples, 4/s | loss 0.7500 | AUC 0.5000 | "
        "step 15 of 30 | 02:00 since the start"
    )
    assert run_bar(report, 200, "#.", ["1 restart"], is_over=True) == text.replace(" 00:50 left", "")
    for columns in range(200):
        assert len(run_bar(report, columns, "#.", ["1 restart"])) <= columns
    assert run_bar(report, 19, "#.", ["1 restart"]) == "##..  50% 00:50 lef"


def test_a_trainer_that_is_no_longer_there_keeps_its_samples() -> None:
    run = Run([4] * 30, [8] * 30)
    run.train(1, 20)
    run.batches = ([4] * 30,)
    run.train(11, 12)
    assert run.report(1.0).samples == 120 + 8
    assert RunProgress(0.0).report(1.0) is None


def test_a_record_without_numbers_changes_nothing() -> None:
    run = Run([4] * 30)
    run.train(1, 3)
    run.progress.add(0, {"kind": "progress", "id": "x", "first": None, "step": 5, "samples": 3})
    run.progress.add(7, {"kind": "interval", "loss": 1.0})
    assert run.report(1.0).samples == 12
