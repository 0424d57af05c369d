"""The command line of `python -m benchmarks.plan`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.case import Case
from benchmarks.harness.record import Rounds
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind, Suite
from benchmarks.plan.cases import PROCESSES, full_cases, quick_cases


def plan(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the run of a round."""
    (case,) = group
    job = {**asdict(case), "module": "benchmarks.plan.runs", "data": str(batches)}
    return [Run(label="run", contender="satrap", job=job)]


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return the figures: predictions over measurements, and both."""
    return {"figures": rounds.figures_of("run")}


KIND = Kind(plan=plan, record=record, required="run")
SUITE = Suite(
    name="plan",
    purpose="Compare predictions of satrap plan with real runs on this machine, one JSON line per run.",
    full_cases=full_cases,
    quick_cases=quick_cases,
    kinds=dict.fromkeys(PROCESSES, KIND),
    contenders=("satrap",),
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
