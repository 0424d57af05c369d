"""Which processes a group of cases needs, and running them: A B C, A B C, ..., one at a time.

A `Run` is one process with one contender. Every round starts each contender anew, so that two tables are never in
memory together and rounds are independent; within a round all get the same batches. A run that would not fit in memory,
or whose contender is not installed, is left out with a line on stderr.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.clock import available_bytes
from benchmarks.machine import ROOT
from benchmarks.workload import batch_file

TIMEOUT_SECONDS = 1800
# Asks torch to back large arrays with huge pages, which numpy and Satrap do unasked.
TORCH_HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
TRAIN_MODES = {"satrap": "train", "satrap_plain": "train_plain"}
LOOKUP_MODES = {"satrap": "lookup", "satrap_eval": "lookup_eval"}
STATES = {"sgd": 0, "rowwise": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2, "ftrl": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How long to measure, with whom, and where things are."""

    num_rounds: int
    num_warmup: int
    num_steps: int
    contenders: tuple[str, ...]
    pythons: dict[str, Path]
    """The interpreter of every contender that is installed."""
    batches: Path
    tmpfs: Path
    peer_huge_pages: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One process: a contender, its job, and what it needs of the machine."""

    label: str
    contender: str
    job: dict[str, Any]
    needed_bytes: int
    shared_bytes: int = 0
    environment: dict[str, str] = field(default_factory=dict)


Round = dict[str, Any] | None
"""What a run returned in one round, None where it was left out or failed."""
Results = dict[str, list[Round]]
"""By a run's label, its rounds."""


class RunFailed(Exception):
    """A worker ended badly; the message is the end of what it said."""


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


def _table_bytes(case: Case) -> int:
    """Values and state, and a tenth for everything beside them."""
    return int(1.1 * case.rows * (4 * case.dim * (1 + STATES[case.optimizer]) + 24))


def _upkeep_run(case: Case, settings: Settings) -> Run:
    job = {"kind": case.kind, "rows": case.rows, "dim": case.dim, "optimizer": case.optimizer}
    job |= {"num_threads": case.num_threads, "tmpfs": str(settings.tmpfs)}
    files = _table_bytes(case) if case.kind == "snapshot" else 0
    return Run(
        label="satrap", contender="satrap", job=job, needed_bytes=_table_bytes(case) + 2 * files, shared_bytes=files
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
    size = _table_bytes(case)
    return Run(
        label=next(iter(modes)),
        contender=contender,
        job=job,
        needed_bytes=size,
        shared_bytes=size if shared else 0,
        environment=environment or {},
    )


def run_rounds(group: Sequence[Case], settings: Settings) -> tuple[Results, list[str]]:
    """The rounds of every run that succeeded at least once, and a line for every one that failed."""
    results: Results = {}
    failures: list[str] = []
    for round_number in range(settings.num_rounds):
        for run in plan(group, round_number, settings):
            results.setdefault(run.label, []).append(None)
            missing = _why_not(run, settings)
            if missing:
                if round_number == 0:
                    say(f"{group[0].name}: {run.label} left out: {missing}")
                continue
            say(f"{group[0].name}: round {round_number + 1} of {settings.num_rounds}, {run.label}")
            try:
                results[run.label][-1] = _run(run, settings)
            except RunFailed as failure:
                failures.append(f"{group[0].name}: {run.label} failed in round {round_number + 1}: {failure}")
                say(failures[-1])
    return {label: rounds for label, rounds in results.items() if any(rounds)}, failures


def say(line: str) -> None:
    """Progress and complaints go to stderr; stdout has results only."""
    print(line, file=sys.stderr, flush=True)


def _why_not(run: Run, settings: Settings) -> str | None:
    if run.contender not in settings.contenders:
        return "not among --contenders"
    if run.contender not in settings.pythons:
        made = {"fbgemm": "FBGEMM is not installed; --make-peers installs it", "satrap": "satrap does not import"}
        return made.get(run.contender, "torch does not import; --make-peers installs it")
    available = available_bytes()
    if run.needed_bytes > available:
        return f"it needs {run.needed_bytes / 2**30:.1f} GiB of memory and {available / 2**30:.1f} are available"
    if run.shared_bytes:
        if not settings.tmpfs.is_dir():
            return f"{settings.tmpfs} is not a folder; --tmpfs names one in memory"
        free = shutil.disk_usage(settings.tmpfs).free
        if run.shared_bytes > free:
            return f"it needs {run.shared_bytes / 2**30:.1f} GiB in {settings.tmpfs}, {free / 2**30:.1f} are free"
    return None


def _run(run: Run, settings: Settings) -> dict[str, Any]:
    python = settings.pythons[run.contender]
    if run.job["kind"] != "steps" or not run.shared_bytes:
        return _start(run, run.job, python)
    # The folder of the shared-memory file goes whatever becomes of the worker.
    with tempfile.TemporaryDirectory(prefix="satrap-bench-", dir=settings.tmpfs) as folder:
        table = {**run.job["table"], "shared": str(Path(folder) / "table")}
        return _start(run, {**run.job, "table": table}, python)


def _start(run: Run, job: dict[str, Any], python: Path) -> dict[str, Any]:
    threads = str(job["table"]["num_threads"] if "table" in job else job["num_threads"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    command = [str(python), "-m", "benchmarks.worker", json.dumps(job)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment | run.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"still running after {TIMEOUT_SECONDS} s") from error
    if done.returncode != 0:
        raise RunFailed(f"exit status {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
