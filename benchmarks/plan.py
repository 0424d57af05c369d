"""Which processes a group of the store's cases needs in a round, and what each is told to do. Starts nothing."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.cases import Case
from benchmarks.forms import Form, own_forms, peer_forms
from benchmarks.runs import Run, Settings
from benchmarks.workload import batch_file

# Satrap's modes by label, the peers' mode, the peers.
TRAINED = {"satrap": "train", "satrap_plain": "train_plain"}, "train", ("torch", "fbgemm")
LOOKED_UP = {"satrap": "lookup", "satrap_eval": "lookup_eval"}, "lookup", ("index_select",)
STREAMS = 2  # at most, of one run
STATES = {"sgd": 0, "rowwise": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2, "ftrl": 2}


def plan(group: Sequence[Case], round_number: int, settings: Settings) -> list[Run]:
    """The runs of one round for cases that share a table."""
    case = group[0]
    if case.kind in ("memory", "growth", "snapshot"):
        return [_upkeep_run(case, settings)]
    if case.kind == "first_seen":
        return [_steps_run(group, round_number, settings, {"satrap": "train"}, filled=False)]
    if case.kind == "shared":
        kept = _steps_run(group, round_number, settings, {"satrap_shared": "train"}, shared=True)
        return [_steps_run(group, round_number, settings, {"satrap": "train"}), kept]
    ours, mode, peers = TRAINED if case.kind == "train" else LOOKED_UP
    runs = [_steps_run(group, round_number, settings, ours, form) for form in own_forms(case.num_threads)]
    for peer in peers:
        for form in peer_forms(case.num_threads):
            if form.num_processes == 1:
                runs.append(_steps_run(group, round_number, settings, {peer: mode}, form))
            elif case.kind == "train":
                modes = {peer: "train_exchanged", f"{peer}_apart": "train"}
                runs.append(_steps_run(group, round_number, settings, modes, form))
    return runs


def table_bytes(rows: int, dim: int, optimizer: str) -> int:
    """Values and state, and a tenth for everything beside them."""
    return int(1.1 * rows * (4 * dim * (1 + STATES[optimizer]) + 24))


def _upkeep_run(case: Case, settings: Settings) -> Run:
    job = {"kind": case.kind, "rows": case.rows, "dim": case.dim, "optimizer": case.optimizer}
    job |= {"num_threads": case.num_threads, "tmpfs": str(settings.tmpfs)}
    files = table_bytes(case.rows, case.dim, case.optimizer) if case.kind == "snapshot" else 0
    return Run(
        label="satrap",
        contender="satrap",
        job=job,
        needed_bytes=table_bytes(case.rows, case.dim, case.optimizer) + 2 * files,
        shared_bytes=files,
    )


def _steps_run(
    group: Sequence[Case],
    round_number: int,
    settings: Settings,
    modes: dict[str, str],
    form: Form | None = None,
    *,
    filled: bool = True,
    shared: bool = False,
) -> Run:
    """Streams are labelled ids:name; every stream after the first draws its own batches, as the first used its up."""
    case = group[0]
    form = form or Form(cores=case.num_threads, threads=(case.num_threads,))
    steps = settings.num_warmup + settings.num_steps
    streams = []
    for number, (threads, (name, mode)) in enumerate(product(form.threads, modes.items())):
        for member in group:
            assert member.ids is not None
            file = batch_file(settings.batches, case.rows, member.ids, steps, STREAMS * round_number + number)
            label = f"{member.ids}:{form.label(name, threads)}"
            streams.append({"label": label, "mode": mode, "file": str(file), "num_threads": threads})
    table: dict[str, Any] = {"rows": case.rows, "dim": case.dim, "optimizer": case.optimizer}
    table["num_threads"] = form.threads[0]
    if not filled:
        table["filled"] = False
    first = next(iter(modes))
    contender = first.partition("_shared")[0]
    job: dict[str, Any] = {"kind": "steps", "contender": contender, "table": table, "streams": streams}
    job |= {"num_warmup": settings.num_warmup, "num_steps": settings.num_steps, "compare": case.kind == "train"}
    job["num_processes"] = form.num_processes
    size = table_bytes(case.rows, case.dim, case.optimizer)
    return Run(
        label=form.label(first),
        contender=contender,
        job=job,
        needed_bytes=size,
        shared_bytes=size if shared else 0,
        environment=form.environment,
    )
