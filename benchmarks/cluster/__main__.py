"""The command line of `python -m benchmarks.cluster`: the cases and their targets, and the processes of a round.

A case's name is kind/rows x dim/threads of the server. The kinds:

    echo    ids out and rows back through satrap.rpc, against a loop over plain TCP sockets
    rows    lookup and update on one server, against the same on rows in the worker and Paddle's parameter server
    train   whole steps of the light DLRM over one server, against Paddle's parameter server
    modules whole steps over two servers with modules that look up inside the model, against those with a stream
    bytes   what a lookup and an update put on the wire, against a row and a gradient for every id of a batch
    restart a server that is killed with its rows in shared memory, until it answers again

All use batches of 26 features x 4096 ids, drawn by Zipf(1.05).
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

from benchmarks.cluster import echo, restart, rows, train, wire
from benchmarks.harness.case import MILLION, Case, Target
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind, Suite
from benchmarks.workload import DIMS, table_bytes

PADDLE_ROW_BYTES = 320  # measured bound on what both of its processes need for a row beside its numbers
BASE = Case(kind="", rows=20 * MILLION, num_threads=2, num_warmup=5, num_steps=40)


def full_cases() -> list[Case]:
    """Return every case that the pages quote."""
    least = {
        "echo": {"ratio": 0.7, "ratio_free": 0.7},
        "rows": {"ratio_local": 0.55, "ratio_paddle": 7.12},
        "train": {"ratio": 3.0, "ratio_stale": 3.0},
        "modules": {"ratio_stream": 0.9},
    }
    most = {"bytes": {"share": 0.55, "share_float16": 0.30}, "restart": {"away_s": 2.0}}
    every = [
        replace(BASE, kind="echo", num_warmup=50, num_steps=400),
        replace(BASE, kind="rows", num_steps=200),
        replace(BASE, kind="train"),
        replace(BASE, kind="modules"),
        replace(BASE, kind="bytes", num_warmup=1, num_steps=10),
        replace(BASE, kind="restart", rows=10 * MILLION, num_steps=3),
    ]
    cases = []
    for case in every:
        for dim in DIMS:
            targets = [Target(figure=figure, at_least=limit) for figure, limit in least.get(case.kind, {}).items()]
            targets += [Target(figure=figure, at_most=limit) for figure, limit in most.get(case.kind, {}).items()]
            cases.append(replace(case, dim=dim, targets=tuple(targets)))
    return cases


def quick_cases() -> list[Case]:
    """Return the same with dim 16, small, to see in seconds that all of it runs."""
    small = [case for case in full_cases() if case.dim == DIMS[0]]
    return [replace(case, rows=26_000, num_warmup=1, num_steps=4, targets=()) for case in small]


def kind(module: ModuleType, num_tables: int = 1, *, with_paddle: bool = False) -> Kind:
    """Return the kind that a module's `measure` and `record` define. num_tables: tables with all rows at one time."""

    def plan(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
        (case,) = group
        job = {**asdict(case), "part": number, "batches": str(batches), "module": module.__name__}
        size = num_tables * table_bytes(case.rows, case.dim, "rowwise")
        runs = [Run(label="worker", contender="satrap", job=job, needed_bytes=size, folder_bytes=0)]
        if with_paddle:
            job = {**job, "module": "benchmarks.cluster.paddle"}
            size = case.rows * (4 * case.dim + PADDLE_ROW_BYTES)
            runs.append(Run(label="paddle", contender="paddle", job=job, needed_bytes=size))
        return runs

    return Kind(plan=plan, record=module.record, required="worker")


SUITE = Suite(
    name="cluster",
    purpose="Measure what rows on servers cost beside the peers, one JSON line per case.",
    full_cases=full_cases(),
    quick_cases=quick_cases(),
    kinds={
        "echo": kind(echo, 0),
        "rows": kind(rows, 2, with_paddle=True),
        "train": kind(train, with_paddle=True),
        "modules": kind(train),
        "bytes": kind(wire),
        "restart": kind(restart),
    },
    contenders=("satrap", "paddle"),
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
