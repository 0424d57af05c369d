"""Runs for tests: `satrap run` as a process, watched from outside, and what it must leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

DEADLINE_SECONDS = 300.0
JOB = Path(__file__).with_name("run_job.py")
SATRAP = Path(sys.executable).with_name("satrap")


def changed_job(folder: Path, *changes: tuple[str, str]) -> Path:
    """The job with some of its text replaced, in the folder."""
    text = JOB.read_text()
    for before, after in changes:
        assert before in text, f"{JOB.name} has no {before!r} any more"
        text = text.replace(before, after)
    (script := folder / "job.py").write_text(text)
    (folder / "loop.py").write_text(JOB.with_name("loop.py").read_text())
    return script


@contextmanager
def started(
    folder: Path, script: Path, *options: str, arguments: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A run in the folder, its rows in the folder, too. Killed if the test leaves it."""
    (folder / "memory").mkdir(exist_ok=True)
    command = [str(SATRAP), "run", str(script), "--folder", str(folder / "run"), "--memory", str(folder / "memory")]
    process = subprocess.Popen(
        [*command, *options, "--", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, out, err


def until(what: Callable[[], object], of: subprocess.Popen[str] | None = None) -> None:
    """Returns once it is so."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not what():
        assert time.monotonic() < deadline, "it took too long"
        assert of is None or of.poll() is None, finished(of)
        time.sleep(0.01)


def scale(folder: Path, servers: int) -> None:
    command = [str(SATRAP), "scale", "--servers", str(servers), "--folder", str(folder / "run")]
    assert "asked for" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def scaled(folder: Path, run: subprocess.Popen[str], servers: int) -> None:
    """Returns once it has as many."""
    scale(folder, servers)
    said(run, f"buckets are moved: {servers} server")


def said(run: subprocess.Popen[str], text: str) -> None:
    """Returns once it has said so."""
    assert run.stderr is not None
    late = threading.Timer(DEADLINE_SECONDS, run.kill)
    late.start()
    try:
        while text not in (line := run.stderr.readline()):
            assert line, f"{text!r} was not said; {finished(run)}"
    finally:
        late.cancel()
        late.join()


def is_left(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def nothing_is_left(folder: Path, pids: list[int]) -> None:
    until(lambda: not any(map(is_left, pids)))
    assert not list((folder / "memory").iterdir()), "rows in shared memory"
    assert not list((folder / "run").glob("meeting*"))
    name = json.loads((folder / "run" / "run.json").read_text())["name"]
    assert not (Path(tempfile.gettempdir()) / f"satrap-{name}").exists(), "the run's sockets"


def num_checkpoints(folder: Path) -> int:
    """How many were ever saved."""
    names = sorted(each.name for each in (folder / "checkpoints").glob("[0-9]*-step-*"))
    return int(names[-1].partition("-")[0]) if names else 0


def same(folder: Path, wanted: dict[str, np.ndarray]) -> None:
    with np.load(folder / "end.npz") as found:
        assert found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)
