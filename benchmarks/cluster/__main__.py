"""The command line of `python -m benchmarks.cluster`, and the processes of a round: a worker, then Paddle's."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from benchmarks.cluster import echo, fan_out, machines, network, restart, rows, train, wire
from benchmarks.cluster.cases import full_cases, quick_cases
from benchmarks.harness.case import Case
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind, Suite


def kind(module: ModuleType, *, with_paddle: bool = False, unable: Callable[[], str | None] = lambda: None) -> Kind:
    """Return the kind that a module's `measure` and `record` define."""
    runs = [("worker", "satrap", module.__name__)]
    if with_paddle:
        runs.append(("paddle", "paddle", "benchmarks.cluster.paddle"))

    def plan(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
        (case,) = group
        job = {**asdict(case), "part": number, "batches": str(batches)}
        return [
            Run(label=label, contender=contender, job={**job, "module": name}, folder_bytes=0)
            for label, contender, name in runs
        ]

    return Kind(plan=plan, record=module.record, required="worker", unable=unable)


SUITE = Suite(
    name="cluster",
    purpose="Measure what rows on servers cost beside the peers, one JSON line per case.",
    full_cases=full_cases,
    quick_cases=quick_cases,
    kinds={
        "echo": kind(echo),
        "rows": kind(rows, with_paddle=True),
        "train": kind(train, with_paddle=True),
        "bytes": kind(wire),
        "network": kind(network, unable=machines.unable),
        "restart": kind(restart),
        "fan_out": kind(fan_out),
    },
    contenders=("satrap", "paddle"),
    num_rounds=5,
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
