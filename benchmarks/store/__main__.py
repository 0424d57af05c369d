"""The command line of `python -m benchmarks.store`: its cases and their targets, the processes of a round, the figures.

A case's name is kind/rows x dim/optimizer/ids/threads. The kinds:

    train       lookup + update of a batch, all rows present, against plain PyTorch, FBGEMM, and copies of rows
    lookup      lookup alone, against index_select on an array
    shared      train with the rows in a shared-memory file, against anonymous memory
    memory      bytes of a row beyond its values and state, at capacity
    growth      the longest batch while a table without a capacity grows, and its bytes beyond values and state
    snapshot    save to and load from memory-backed files
    save_beside training while a thread saves: the longest step during a save
    resolve     the core's part of a step of rows on a device, ids to frames, beside a lookup of rows in memory
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness.case import MILLION, Case, Target
from benchmarks.harness.forms import Form, all_cores, peer_forms, satrap_forms
from benchmarks.harness.record import Ratio, Rounds
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind, Plan, Suite
from benchmarks.workload import DIMS, ids_file, table_bytes

ALL_OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise", "adam", "adamw", "ftrl")
BASE = Case(kind="", optimizer="adagrad", num_threads=2, num_warmup=5, num_steps=30)
RESOLVE = replace(BASE, kind="resolve", rows=20 * MILLION, dim=16, num_warmup=10, num_steps=100)
PEERS, ARRAY = ("torch", "fbgemm"), ("index_select",)
TRAIN: dict[str, Ratio] = {
    "ratio": ("satrap", PEERS),
    "ratio_plain": ("satrap_plain", PEERS),
    "ratio_direct": ("satrap_direct", PEERS),
    "direct_to_hashed": ("satrap_direct", ("satrap",)),
    "limit": ("satrap", ARRAY),
    "limit_direct": ("satrap_direct", ARRAY),
}
LOOKUP: dict[str, Ratio] = {
    "ratio": ("satrap", ARRAY),
    "ratio_eval": ("satrap_eval", ARRAY),
    "ratio_direct": ("satrap_direct", ARRAY),
}
SHARED: dict[str, Ratio] = {"ratio": ("satrap_shared", ("satrap",))}


def full_cases() -> list[Case]:
    """Return every case that the pages quote."""
    reading = tuple(Target(figure=figure, at_least=0.8) for figure in ("ratio", "ratio_eval"))
    memory = Target(figure="overhead_bytes_per_row", at_most=24.0)
    sizes = [*((2 * MILLION, name) for name in ALL_OPTIMIZERS), (20 * MILLION, "adagrad")]
    stall = Target(figure="stall_ms", at_most=50.0)
    limits = {"overhead_bytes_per_row": 32.0, "resident_overhead_bytes_per_row": 40.0}
    growth = (stall, *(Target(figure=figure, at_most=most) for figure, most in limits.items()))
    speed = tuple(Target(figure=figure, at_least=1.0) for figure in ("save_gb_per_s", "load_gb_per_s"))
    cases = [
        train_case(rows * MILLION, dim, optimizer, Target(figure="ratio", at_least=least))
        for (rows, least), dim, optimizer in product(((1, 3.0), (20, 5.0)), DIMS, ("adagrad", "rowwise"))
    ]
    cases += [replace(case, ids="uniform", targets=()) for case in cases if case.rows == 20 * MILLION]
    cases.append(replace(BASE, kind="lookup", rows=20 * MILLION, dim=64, ids="uniform", targets=reading))
    cases += [replace(BASE, kind="shared", rows=5 * MILLION, dim=dim, ids="zipf") for dim in DIMS]
    cases += [
        replace(BASE, kind="memory", rows=rows, dim=16, optimizer=name, targets=(memory,)) for rows, name in sizes
    ]
    cases += [replace(BASE, kind="growth", rows=20 * MILLION, dim=dim, targets=growth) for dim in DIMS]
    cases.append(replace(BASE, kind="snapshot", rows=5 * MILLION, dim=64, targets=speed))
    cases.append(replace(BASE, kind="save_beside", rows=20 * MILLION, dim=16, num_threads=1, targets=(stall,)))
    twice = (Target(figure="ratio", at_least=2.0),)
    return [*cases, replace(RESOLVE, ids="zipf", targets=twice), replace(RESOLVE, ids="uniform")]


def train_case(rows: int, dim: int, optimizer: str, *targets: Target) -> Case:
    return replace(BASE, kind="train", rows=rows, dim=dim, optimizer=optimizer, ids="zipf", targets=targets)


def quick_cases() -> list[Case]:
    """Return a small case of every kind, which show in a minute or two that all of it runs."""
    sizes = {"lookup": MILLION, "growth": 2 * MILLION, "save_beside": MILLION}
    first = {case.kind: case for case in full_cases()}
    small = [replace(case, rows=sizes.get(kind, MILLION // 2), targets=()) for kind, case in first.items()]
    return [replace(case, num_warmup=3, num_steps=8) for case in small]


def plan_with_peers(ours: dict[str, str], mode: str, peers: Sequence[str]) -> Plan:
    """Return a plan of Satrap's runs, by label and mode, and those of every form of the peers."""

    def plan(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
        cores = group[0].num_threads
        planned = [(modes, form) for form in satrap_forms(cores) for modes in (ours, {"satrap_direct": mode})]
        for peer, form in product(peers, peer_forms(cores)):
            if form.num_processes == 1 or peer in PEERS:
                planned.append(({peer: mode}, form))
        return [steps_run(group, number, batches, modes, form) for modes, form in planned]

    return plan


def plan_shared(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the runs of Satrap with rows in anonymous and in shared memory."""
    form = all_cores(group[0].num_threads)
    runs = [steps_run(group, number, batches, {name: "train"}, form) for name in ("satrap", "satrap_shared")]
    return [runs[0], replace(runs[1], folder_bytes=runs[1].needed_bytes)]


def steps_run(group: Sequence[Case], number: int, batches: Path, modes: dict[str, str], form: Form) -> Run:
    """Return one contender's run. Streams are labelled ids:name; each draws batches that no earlier one has used up."""
    case = group[0]
    streams = []
    for position, (threads, (name, mode)) in enumerate(product(form.threads, modes.items())):
        for member in group:
            part = 2 * number + position  # a run has two streams of a case at most
            file = ids_file(batches, case.rows, member.ids, case.num_warmup + case.num_steps, part)
            label = f"{member.stream}{form.label(name, threads)}"
            streams.append({"label": label, "mode": mode, "file": str(file), "num_threads": threads})
    table = {"rows": case.rows, "dim": case.dim, "optimizer": case.optimizer, "num_threads": form.threads[0]}
    first = next(iter(modes))
    contender = first.partition("_shared")[0]
    job: dict[str, Any] = {"module": "benchmarks.store.steps", "contender": contender, "table": table}
    job |= {"streams": streams, "num_warmup": case.num_warmup, "num_steps": case.num_steps}
    job |= {"compare": case.kind == "train" and contender not in ARRAY, "num_processes": form.num_processes}
    return Run(
        label=form.label(first),
        contender=contender,
        job=job,
        needed_bytes=table_bytes(case.rows, case.dim, case.optimizer),
        environment=form.environment,
    )


def plan_alone(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the run of Satrap that `upkeep.py` or `resolve.py` measures."""
    (case,) = group
    module = "resolve" if case.kind == "resolve" else "upkeep"
    job = {**asdict(case), "module": f"benchmarks.store.{module}", "part": number}
    size, is_saved = table_bytes(case.rows, case.dim, case.optimizer), case.kind in ("snapshot", "save_beside")
    return [
        Run(
            label="satrap",
            contender="satrap",
            job=job,
            needed_bytes=3 * size if is_saved else 2 * size,
            folder_bytes=size if is_saved else None,
            environment=all_cores(case.num_threads).environment,
        )
    ]


def record_with(ratios: Mapping[str, Ratio]) -> Callable[[Case, Rounds], dict[str, Any]]:
    """Return a function that records rates and these ratios of them."""

    def record(case: Case, rounds: Rounds) -> dict[str, Any]:
        rates = {"rows_per_s": rounds.spreads("rows_per_s"), "step_ms": rounds.spreads("median_step_ms")}
        work = rounds.work() if case.kind == "train" else {}
        return rates | {"figures": rounds.ratios(ratios, "rows_per_s")} | work

    return record


def record_resolve(case: Case, rounds: Rounds) -> dict[str, Any]:
    rates = rounds.spreads("rows_per_s")
    figures = rounds.ratios({"ratio": ("resolve", ("lookup",))}, "rows_per_s")
    return {"rows_per_s": rates, "figures": figures}


def record_alone(case: Case, rounds: Rounds) -> dict[str, Any]:
    return {"figures": rounds.figures_of("satrap")}


plan_train = plan_with_peers({"satrap": "train", "satrap_plain": "train_plain"}, "train", (*PEERS, *ARRAY))
plan_lookup = plan_with_peers({"satrap": "lookup", "satrap_eval": "lookup_eval"}, "lookup", ARRAY)
SUITE = Suite(
    name="store",
    purpose="Measure the speed and size of Satrap's table beside its peers, one JSON line per case.",
    full_cases=full_cases(),
    quick_cases=quick_cases(),
    kinds={
        "train": Kind(plan=plan_train, record=record_with(TRAIN), shares_table=True),
        "lookup": Kind(plan=plan_lookup, record=record_with(LOOKUP), shares_table=True),
        "shared": Kind(plan=plan_shared, record=record_with(SHARED), shares_table=True),
        "resolve": Kind(plan=plan_alone, record=record_resolve, required="satrap"),
        **dict.fromkeys(("memory", "growth", "snapshot", "save_beside"), Kind(plan=plan_alone, record=record_alone)),
    },
    contenders=("satrap", "satrap_direct", *PEERS, *ARRAY),
    table=("train/*/adagrad/zipf", "lookup"),
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
