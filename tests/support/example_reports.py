"""Example reports: one of training with every field, one with an evaluation, one with only the required fields; and a
clock and a sink for tests of progress."""

from dataclasses import replace

from satrap.monitor.report import Report

FULL = Report(
    step=1200,
    samples=4_915_200,
    end_step=2400,
    seconds=62.5,
    samples_per_second=81_234.5,
    steps_per_second=19.2,
    loss=0.44118,
    window=65_536,
    auc=0.78124,
    normalised_entropy=0.84006,
    staleness=3.25,
    max_staleness=4,
    rows={"user": 1_000_000, "item": 230_000},
    stages={"lookup": 0.0021, "dense": 0.0402},
    lost={"batches/overflow": 2, "rows/malformed": 1500},
)
EVALUATED = replace(FULL, validation={"auc": 0.79, "log_loss": 0.43211}, is_best=True)
BARE = Report(step=3, samples=30, seconds=3725.0, samples_per_second=0.0)


class Clock:
    """A clock that advances on request."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class ListSink:
    """A sink that keeps its reports."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.num_closed = 0

    def write(self, report: Report) -> None:
        self.reports.append(report)

    def close(self) -> None:
        self.num_closed += 1
