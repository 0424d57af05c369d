"""Running the processes that a group of cases needs: A B C, A B C, ..., one at a time.

A `Run` is one process with one contender. Every round starts each contender anew, so that two tables are never in
memory together and rounds are independent; within a round all get the same batches. A run that would not fit in memory,
or whose contender is not installed, is left out with a line on stderr.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clock import available_bytes
from benchmarks.machine import ROOT
from benchmarks.peers import runs

TIMEOUT_SECONDS = 1800


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One process: a contender, its job, and what it needs of the machine."""

    label: str
    contender: str
    job: dict[str, Any]
    needed_bytes: int
    shared_bytes: int = 0
    needs: tuple[str, ...] = ()
    """Statements that the contender's interpreter must be able to run."""
    environment: dict[str, str] = field(default_factory=dict)


Round = dict[str, Any] | None
"""What a run returned in one round, None where it was left out or failed."""
Results = dict[str, list[Round]]
"""By a run's label, its rounds."""


class RunFailed(Exception):
    """A worker ended badly; the message is the end of what it said."""


def run_rounds(name: str, plan: Callable[[int], Sequence[Run]], settings: Settings) -> tuple[Results, list[str]]:
    """The rounds of every run that succeeded at least once, and a line for every one that failed.

    `plan` gives the runs of a round, by its number; `name` is what the progress calls the group.
    """
    results: Results = {}
    failures: list[str] = []
    for round_number in range(settings.num_rounds):
        for run in plan(round_number):
            results.setdefault(run.label, []).append(None)
            missing = _why_not(run, settings)
            if missing:
                if round_number == 0:
                    say(f"{name}: {run.label} left out: {missing}")
                continue
            say(f"{name}: round {round_number + 1} of {settings.num_rounds}, {run.label}")
            try:
                results[run.label][-1] = _run(run, settings)
            except RunFailed as failure:
                failures.append(f"{name}: {run.label} failed in round {round_number + 1}: {failure}")
                say(failures[-1])
    return {label: rounds for label, rounds in results.items() if any(rounds)}, failures


def say(line: str) -> None:
    """Progress and complaints go to stderr; stdout has results only."""
    print(line, file=sys.stderr, flush=True)


def _why_not(run: Run, settings: Settings) -> str | None:
    if run.contender not in settings.contenders:
        return "not among --contenders"
    if run.contender not in settings.pythons:
        return f"{run.contender} is not installed; --make-peers installs the peers"
    for statement in run.needs:
        if not runs(settings.pythons[run.contender], statement):
            return f"{statement!r} fails in its environment"
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
    return run_process([str(python), "-m", "benchmarks.worker", json.dumps(job)], environment | run.environment)


def run_process(command: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a process says in its last line. Whatever becomes of it, the processes that it started end with it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"still running after {TIMEOUT_SECONDS} s") from None
        finally:
            with suppress(ProcessLookupError):  # nobody is left, as it should be
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise RunFailed(f"exit status {process.returncode}: {' | '.join(stderr.strip().splitlines()[-3:])}")
    result: dict[str, Any] = json.loads(stdout.strip().splitlines()[-1])
    return result
