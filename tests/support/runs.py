"""Runs for tests: starts `satrap run` as a process, watches it, and checks that it leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from child_processes import SATRAP, child_process
from waiting import DEADLINE_SECONDS, wait_until

JOB = Path(__file__).with_name("run_job.py")


def write_changed_job(folder: Path, *changes: tuple[str, str], job: Path = JOB) -> Path:
    """Writes the job, with some of its text replaced, into the folder and returns its path."""
    text = job.read_text()
    for before, after in changes:
        assert before in text, f"{job.name} has no {before!r} any more"
        text = text.replace(before, after)
    (script := folder / "job.py").write_text(text)
    for module in ("loop.py", "lean_torch.py"):
        (folder / module).write_text(JOB.with_name(module).read_text())
    return script


@contextmanager
def start_run(
    folder: Path, script: Path, *options: str, arguments: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Starts a run whose directory and rows are in the folder. It is killed when the context ends."""
    (folder / "memory").mkdir(exist_ok=True)
    command = [str(SATRAP), "run", str(script), "--folder", str(folder / "run"), "--memory", str(folder / "memory")]
    command += [*options, "--", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child_process(command, 4 * DEADLINE_SECONDS, text=True, **pipes) as process:
        yield process


def wait_for_exit(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, out, err


def run_to_its_end(folder: Path, script: Path, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Returns status, output and errors of a run."""
    with start_run(folder, script, *options, arguments=arguments) as run:
        return wait_for_exit(run)


def request_scale(folder: Path, servers: int) -> None:
    command = [str(SATRAP), "scale", "--servers", str(servers), "--folder", str(folder / "run")]
    assert "requested" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def scale_to(folder: Path, run: subprocess.Popen[str], servers: int) -> None:
    """Requests this number of servers and waits until the run has them."""
    request_scale(folder, servers)
    wait_for_output(run, f"buckets moved: the run has {servers} server")


def wait_for_output(run: subprocess.Popen[str], text: str) -> None:
    """Waits until a line of the run's standard error contains the text."""
    assert run.stderr is not None
    timer = threading.Timer(DEADLINE_SECONDS, run.kill)
    timer.start()
    try:
        while text not in (line := run.stderr.readline()):
            assert line, f"{text!r} was not printed; {wait_for_exit(run)}"
    finally:
        timer.cancel()
        timer.join()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def name_processes(pids: Iterable[str], *marks: str) -> dict[str, int]:
    """Returns ids of a run's processes by name: "server 0", "trainer 1", "worker". Their commands hold the marks."""
    found = {}
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if not all(mark in " ".join(words) for mark in marks):
            continue
        if "trainer" in words:
            found[f"trainer {json.loads(words[words.index('--context') + 1])['rank']}"] = int(pid)
        elif "--shared" in words:
            found[f"server {words[words.index('--shared') + 1][-1]}"] = int(pid)
        elif "worker" in words:
            found["worker"] = int(pid)
    return found


def assert_nothing_is_left(folder: Path, pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)))
    assert not list((folder / "memory").iterdir()), "rows in shared memory"
    assert not list((folder / "run").glob("rendezvous*"))
    name = json.loads((folder / "run" / "run.json").read_text())["name"]
    assert not (Path(tempfile.gettempdir()) / f"satrap-{name}").exists(), "the run's sockets"


def num_checkpoints(folder: Path) -> int:
    """Returns the number of checkpoints that were ever saved."""
    names = sorted(each.name for each in (folder / "checkpoints").glob("[0-9]*-step-*"))
    return int(names[-1].partition("-")[0]) if names else 0


def assert_same_result(folder: Path, expected: dict[str, np.ndarray]) -> None:
    with np.load(folder / "end.npz") as result:
        assert result.keys() == expected.keys() and all(
            np.array_equal(result[name], expected[name]) for name in expected
        )


def require_same_end(folder: Path, run: subprocess.Popen[str], expected: dict[str, np.ndarray]) -> tuple[str, str]:
    """Waits for a run, which must end with these results and leave nothing; returns its output and errors."""
    status, out, err = wait_for_exit(run)
    assert status == 0, err
    assert_same_result(folder, expected)
    assert_nothing_is_left(folder, [])
    return out, err
