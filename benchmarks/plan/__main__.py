"""The command line of `python -m benchmarks.plan`: the cases and their targets, and the processes of a round.

Each case is a run of `job.py`: a fully connected network over 26 features of Criteo's text, in which rows have `dim`
numbers. `satrap plan --calibrate` measures the machine once for all of them, in the same command. The kinds:

    local     one process with the rows, synchronous
    servers   a trainer and two servers, at staleness 4
    trainers  two trainers, which average their gradients, and two servers, at staleness 4

The figures divide a prediction by what the run has: `cpu` seconds of a core for a sample, of all processes together;
`rate` in samples a second; `memory` of a row. CPU time hardly depends on the load of the machine, the rate does.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.case import MILLION, Case, Target
from benchmarks.harness.record import Rounds
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind, Suite
from benchmarks.plan.runs import PROCESSES

WITHIN = 0.25
TARGETS = tuple(Target(figure=figure, at_least=1 - WITHIN, at_most=1 + WITHIN) for figure in ("cpu", "rate", "memory"))
BASE = Case(kind="", rows=MILLION, dim=16, stalenesses=(4,), num_warmup=10, num_steps=60, targets=TARGETS)
CASES = [
    replace(BASE, kind="local", stalenesses=(0,)),
    replace(BASE, kind="servers", dim=32),
    replace(BASE, kind="trainers"),
]


def plan(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the run of a round."""
    (case,) = group
    job = {**asdict(case), "module": "benchmarks.plan.runs", "data": str(batches)}
    return [Run(label="run", contender="satrap", job=job)]


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return the figures: predictions over measurements, and the measurements."""
    return {"figures": rounds.figures_of("run")}


SUITE = Suite(
    name="plan",
    purpose="Compare predictions of satrap plan with real runs on this machine, one JSON line per run.",
    full_cases=CASES,
    quick_cases=[replace(case, rows=20_000, num_warmup=2, num_steps=6, targets=()) for case in CASES],
    kinds=dict.fromkeys(PROCESSES, Kind(plan=plan, record=record, required="run")),
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
