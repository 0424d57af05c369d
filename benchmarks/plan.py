"""Which processes a group of the store's cases needs in a round, and what each is told to do. Starts nothing."""

from collections.abc import Sequence
from typing import Any

from benchmarks.cases import Case
from benchmarks.runs import TORCH_HUGE_PAGES, Run, Settings
from benchmarks.workload import batch_file

TRAIN_MODES = {"satrap": "train", "satrap_plain": "train_plain"}
LOOKUP_MODES = {"satrap": "lookup", "satrap_eval": "lookup_eval"}
STATES = {"sgd": 0, "rowwise": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2, "ftrl": 2}


def plan(group: Sequence[Case], round_number: int, settings: Settings) -> list[Run]:
    """The runs of one round for cases that share a table."""
    case = group[0]
    if case.kind in ("memory", "growth", "snapshot"):
        return [_upkeep_run(case, settings)]
    if case.kind == "lookup":
        modes = {"satrap": LOOKUP_MODES, "index_select": {"index_select": "lookup"}}
        huge = {"index_select_huge": "lookup"}
        runs = [_steps_run(group, round_number, settings, name, modes[name]) for name in ("satrap", "index_select")]
        return [*runs, _steps_run(group, round_number, settings, "index_select", huge, TORCH_HUGE_PAGES)]
    if case.kind == "first_seen":
        return [_steps_run(group, round_number, settings, "satrap", {"satrap": "train"}, filled=False)]
    if case.kind == "shared":
        kept = {"satrap_shared": "train"}
        return [
            _steps_run(group, round_number, settings, "satrap", {"satrap": "train"}),
            _steps_run(group, round_number, settings, "satrap", kept, shared=True),
        ]
    environment = TORCH_HUGE_PAGES if settings.peer_huge_pages else {}
    return [
        _steps_run(group, round_number, settings, "satrap", TRAIN_MODES),
        *(_steps_run(group, round_number, settings, p, {p: "train"}, environment) for p in ("torch", "fbgemm")),
    ]


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
    contender: str,
    modes: dict[str, str],
    environment: dict[str, str] | None = None,
    *,
    filled: bool = True,
    shared: bool = False,
) -> Run:
    """Streams are labelled ids:name; every name after the first draws its own batches, since the first used its up."""
    case = group[0]
    streams = []
    for number, (name, mode) in enumerate(modes.items()):
        part = len(TRAIN_MODES) * round_number + number
        for member in group:
            assert member.ids is not None
            num_steps = settings.num_warmup + settings.num_steps
            file = batch_file(settings.batches, case.rows, member.ids, num_steps, part)
            streams.append({"label": f"{member.ids}:{name}", "mode": mode, "file": str(file)})
    table: dict[str, Any] = {"rows": case.rows, "dim": case.dim, "optimizer": case.optimizer}
    table["num_threads"] = case.num_threads
    if not filled:
        table["filled"] = False
    job: dict[str, Any] = {"kind": "steps", "contender": contender, "table": table, "streams": streams}
    job |= {"num_warmup": settings.num_warmup, "num_steps": settings.num_steps, "compare": case.kind == "train"}
    size = table_bytes(case.rows, case.dim, case.optimizer)
    return Run(
        label=next(iter(modes)),
        contender=contender,
        job=job,
        needed_bytes=size,
        shared_bytes=size if shared else 0,
        environment=environment or {},
    )
