"""The processes of a round of the store benchmark, and the figures of a case. Starts nothing."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness.case import Case
from benchmarks.harness.forms import Form, all_cores, peer_forms, satrap_forms
from benchmarks.harness.record import Ratio, Rounds
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind, Plan
from benchmarks.workload import ids_file

STREAMS = 2  # of one run, at most
STATES = {"sgd": 0, "rowwise": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2, "ftrl": 2}


def table_bytes(rows: int, dim: int, optimizer: str) -> int:
    """Return the bytes of values and state, and a tenth for everything beside them."""
    return int(1.1 * rows * (4 * dim * (1 + STATES[optimizer]) + 24))


def plan_with_peers(ours: dict[str, str], mode: str, peers: Sequence[str]) -> Plan:
    """Return a plan of Satrap's runs, by label and mode, and those of every form of the peers."""

    def plan(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
        cores = group[0].num_threads
        planned = [(modes, form) for form in satrap_forms(cores) for modes in (ours, {"satrap_direct": mode})]
        for peer, form in product(peers, peer_forms(cores)):
            if form.num_processes == 1:
                planned.append(({peer: mode}, form))
            elif mode == "train":
                planned.append(({peer: "train_exchanged", f"{peer}_apart": "train"}, form))
        return [steps_run(group, number, batches, modes, form) for modes, form in planned]

    return plan


def plan_first_seen(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the run of Satrap with a table that starts empty."""
    return [steps_run(group, number, batches, {"satrap": "train"}, filled=False)]


def plan_shared(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the runs of Satrap with rows in anonymous and in shared memory."""
    return [
        steps_run(group, number, batches, {"satrap": "train"}),
        steps_run(group, number, batches, {"satrap_shared": "train"}, shared=True),
    ]


def plan_upkeep(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the run of Satrap that `upkeep.py` measures."""
    (case,) = group
    job = {"module": "benchmarks.store.upkeep", "kind": case.kind, "rows": case.rows, "dim": case.dim}
    job |= {"optimizer": case.optimizer, "num_threads": case.num_threads}
    size = table_bytes(case.rows, case.dim, case.optimizer)
    is_snapshot = case.kind in ("snapshot", "save_beside")
    return [
        Run(
            label="satrap",
            contender="satrap",
            job=job,
            needed_bytes=size + 2 * size * is_snapshot,
            folder_bytes=size if is_snapshot else None,
            environment=all_cores(case.num_threads).environment,
        )
    ]


def plan_resolve(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the run of `resolve.py`, which has a table with rows and a directory without."""
    (case,) = group
    names = ("rows", "dim", "ids", "num_threads", "num_warmup", "num_steps")
    job = {"module": "benchmarks.store.resolve", "part": number, **{name: getattr(case, name) for name in names}}
    return [
        Run(
            label="satrap",
            contender="satrap",
            job=job,
            needed_bytes=2 * table_bytes(case.rows, case.dim, case.optimizer),
            environment=all_cores(case.num_threads).environment,
        )
    ]


def steps_run(
    group: Sequence[Case],
    number: int,
    batches: Path,
    modes: dict[str, str],
    form: Form | None = None,
    *,
    filled: bool = True,
    shared: bool = False,
) -> Run:
    """Return one contender's run. Streams are labelled ids:name; each draws batches that no earlier one has used up."""
    case = group[0]
    form = form or all_cores(case.num_threads)
    num_batches = case.num_warmup + case.num_steps
    streams = []
    for position, (threads, (name, mode)) in enumerate(product(form.threads, modes.items())):
        for member in group:
            file = ids_file(batches, case.rows, member.ids, num_batches, STREAMS * number + position)
            label = f"{member.stream}{form.label(name, threads)}"
            streams.append({"label": label, "mode": mode, "file": str(file), "num_threads": threads})
    table: dict[str, Any] = {"rows": case.rows, "dim": case.dim, "optimizer": case.optimizer}
    table["num_threads"] = form.threads[0]
    if not filled:
        table["filled"] = False
    first = next(iter(modes))
    contender = first.partition("_shared")[0]
    job: dict[str, Any] = {"module": "benchmarks.store.steps", "contender": contender, "table": table}
    job |= {"streams": streams, "num_warmup": case.num_warmup, "num_steps": case.num_steps}
    job |= {"compare": case.kind == "train", "num_processes": form.num_processes}
    size = table_bytes(case.rows, case.dim, case.optimizer)
    return Run(
        label=form.label(first),
        contender=contender,
        job=job,
        needed_bytes=size,
        folder_bytes=size if shared else None,
        environment=form.environment,
    )


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
    return {"rows_per_s": rates, "figures": figures | {f"{name}_rows_per_s": rates[name] for name in RESOLVED}}


def record_upkeep(case: Case, rounds: Rounds) -> dict[str, Any]:
    return {"figures": rounds.figures_of("satrap")}


PEERS, ARRAY = ("torch", "fbgemm"), ("index_select",)
TRAIN: dict[str, Ratio] = {
    "ratio": ("satrap", PEERS),
    "ratio_plain": ("satrap_plain", PEERS),
    "ratio_direct": ("satrap_direct", PEERS),
    "direct_to_hashed": ("satrap_direct", ("satrap",)),
    "ratio_apart": ("satrap", tuple(f"{peer}_apart" for peer in PEERS)),
}
LOOKUP: dict[str, Ratio] = {
    "ratio": ("satrap", ARRAY),
    "ratio_eval": ("satrap_eval", ARRAY),
    "ratio_direct": ("satrap_direct", ARRAY),
}
RESOLVED = ("resolve", "update")
SHARED: dict[str, Ratio] = {"ratio": ("satrap_shared", ("satrap",))}
plan_train = plan_with_peers({"satrap": "train", "satrap_plain": "train_plain"}, "train", PEERS)
plan_lookup = plan_with_peers({"satrap": "lookup", "satrap_eval": "lookup_eval"}, "lookup", ARRAY)
KINDS = {
    "train": Kind(plan=plan_train, record=record_with(TRAIN), shares_table=True),
    "lookup": Kind(plan=plan_lookup, record=record_with(LOOKUP), shares_table=True),
    "first_seen": Kind(plan=plan_first_seen, record=record_with({})),
    "resolve": Kind(plan=plan_resolve, record=record_resolve, required="satrap"),
    "shared": Kind(plan=plan_shared, record=record_with(SHARED), shares_table=True),
    **dict.fromkeys(("memory", "growth", "snapshot", "save_beside"), Kind(plan=plan_upkeep, record=record_upkeep)),
}
