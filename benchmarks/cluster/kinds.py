"""The kinds of the cluster benchmark: which file measures each, and whether Paddle is measured after it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from benchmarks.cluster import echo, machines, network, restart, rows, train, wire
from benchmarks.harness.case import Case
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind


def kind(module: ModuleType, *, with_paddle: bool = False, unable: Callable[[], str | None] = lambda: None) -> Kind:
    """Return the kind that a module's `measure` and `record` define."""
    workers = {"worker": ("satrap", module.__name__)}
    if with_paddle:
        workers["paddle"] = ("paddle", "benchmarks.cluster.paddle")

    def plan(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
        (case,) = group
        job = {**asdict(case), "part": number, "batches": str(batches)}
        return [
            Run(label=label, contender=contender, job={**job, "module": name}, folder_bytes=0)
            for label, (contender, name) in workers.items()
        ]

    return Kind(plan=plan, record=module.record, required="worker", unable=unable)


KINDS = {
    "echo": kind(echo),
    "rows": kind(rows, with_paddle=True),
    "train": kind(train, with_paddle=True),
    "bytes": kind(wire),
    "network": kind(network, unable=machines.unable),
    "restart": kind(restart),
}
