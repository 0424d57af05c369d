"""The processes of a group of cases, started one at a time: A B C, A B C, ...

A `Run` is one process with one contender. Every round starts each contender again, so that two tables are never in
memory together and rounds are independent; within a round all contenders get the same batches. A run that does not fit
in memory, or whose contender is not installed, is left out with a line on stderr.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import peers
from benchmarks.harness.clock import available_bytes
from benchmarks.harness.machine import ROOT

TIMEOUT_SECONDS = 1800
Round = dict[str, Any] | None
"""The result of a run in one round; None where it was left out or failed."""
Results = dict[str, list[Round]]
"""The rounds of each run, by its label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One process: a contender, its job, and what it needs of the machine."""

    label: str
    contender: str
    job: dict[str, Any]
    """Arguments of `measure` in the file that job["module"] names."""
    needed_bytes: int = 0
    folder_bytes: int | None = None
    """Bytes that it writes to a folder in memory, job["folder"]; None if it needs no such folder."""
    environment: dict[str, str] = field(default_factory=dict)


class RunFailed(Exception):
    """A process failed; the message ends with the last lines of its stderr."""


def say(line: str) -> None:
    """Print progress or a complaint on stderr; stdout has results only."""
    print(line, file=sys.stderr, flush=True)


def run_rounds(
    name: str, plan: Sequence[Sequence[Run]], contenders: Sequence[str], tmpfs: Path
) -> tuple[Results, list[str]]:
    """Return the rounds of every run that succeeded at least once, and a line for every failure.

    name: the group's name in progress lines. plan: the runs of each round. tmpfs: a folder in memory.
    """
    results: Results = {}
    failures: list[str] = []
    for number, runs in enumerate(plan):
        for run in runs:
            results.setdefault(run.label, []).append(None)
            python = peers.find_python(run.contender) if run.contender in contenders else None
            if obstacle := _obstacle(run, python, contenders, tmpfs):
                if number == 0:
                    say(f"{name}: {run.label} left out: {obstacle}")
                continue
            say(f"{name}: round {number + 1} of {len(plan)}, {run.label}")
            try:
                results[run.label][-1] = _start(run, str(python), tmpfs)
            except RunFailed as failure:
                failures.append(f"{name}: {run.label} failed in round {number + 1}: {failure}")
                say(failures[-1])
    return {label: rounds for label, rounds in results.items() if any(rounds)}, failures


def _obstacle(run: Run, python: Path | None, contenders: Sequence[str], tmpfs: Path) -> str | None:
    """Return why a run cannot be started, None if it can."""
    if run.contender not in contenders:
        return "not among --contenders"
    if python is None:
        return f"{run.contender} is not installed; --make-peers installs the peers, make setup Satrap"
    available = available_bytes()
    if run.needed_bytes > available:
        return f"it needs {run.needed_bytes / 2**30:.1f} GiB of memory and {available / 2**30:.1f} are available"
    if run.folder_bytes is not None:
        if not tmpfs.is_dir():
            return f"{tmpfs} is not a folder; --tmpfs names one in memory"
        free = shutil.disk_usage(tmpfs).free
        if run.folder_bytes > free:
            return f"it needs {run.folder_bytes / 2**30:.1f} GiB in {tmpfs}, {free / 2**30:.1f} are free"
    return None


def _start(run: Run, python: str, tmpfs: Path) -> dict[str, Any]:
    command, environment = [python, "-m", "benchmarks.harness.worker"], {**os.environ, **run.environment}
    if run.folder_bytes is None:
        return run_process([*command, json.dumps(run.job)], environment)
    # The worker may be killed, so the folder is this process's.
    with tempfile.TemporaryDirectory(prefix="satrap-bench-", dir=tmpfs) as folder:
        return run_process([*command, json.dumps({**run.job, "folder": folder})], environment)


def run_process(command: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the last line that a process prints, as JSON. The processes that it started end with it in any case."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"still running after {TIMEOUT_SECONDS} s") from None
        finally:
            with suppress(ProcessLookupError):  # the usual case: every process has exited
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise RunFailed(f"exit status {process.returncode}: {' | '.join(stderr.strip().splitlines()[-3:])}")
    result: dict[str, Any] = json.loads(stdout.strip().splitlines()[-1])
    return result
