"""The loop of a run: what it leaves behind when it is interrupted, and the lock of its folder."""

from __future__ import annotations

import fcntl
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from logged import logged
from satrap.config.durable import opened, try_lock
from satrap.errors import ConfigError
from satrap.launch.process_command import Script
from satrap.launch.run_events import Event
from satrap.launch.run_loop import lock_run_folder, run
from satrap.launch.run_state import RunState
from satrap.launch.supervisor import RunConfig

SIZES = RunConfig(servers=1, workers=0, trainers=1)


class Parts:
    """A launcher, a scaler or a monitor of a run, some of whose calls fail."""

    progress = None

    def __init__(self, *failing: str) -> None:
        self.failing, self.calls = failing, list[str]()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise KeyboardInterrupt if name != "close" else PermissionError(30, "Read-only file system")

    def remove_files(self, name: str) -> None:
        self._call(f"remove {name}")

    def start(self, spec: Any) -> None:
        self._call("start")

    def poll(self, timeout: float = 0.0) -> list[Event]:
        return []

    def watch(self, servers: Any) -> None:
        self._call("watch")

    def observe(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        self._call("close")


def start(folder: Path, launcher: Any, scaler: Any = None, monitor: Any = None) -> None:
    (script := folder / "script.py").touch()
    parts: list[Any] = [launcher, scaler or Parts(), monitor or Parts()]
    run(Script(path=script), SIZES, folder, *parts)


def test_files_of_a_killed_run_are_removed_by_a_later_one(tmp_path: Path) -> None:
    """The next run may be killed while it removes them, which takes up to a minute on a cluster."""
    RunState(name="killed", launch=3).write(tmp_path / "run.json")
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, Parts("remove killed"))
    launcher = Parts("start")
    with (
        logged(
            "satrap.launch", r"^adds launch 4 to the records in .* \(--folder names another folder\)$", logging.INFO
        ),
        pytest.raises(KeyboardInterrupt),
    ):
        start(tmp_path, launcher)
    assert launcher.calls[0] == "remove killed"
    state = RunState.read(tmp_path / "run.json")
    assert state is not None and (state.name != "killed", state.launch, state.first_launch) == (True, 3, 4)


def test_processes_end_whatever_else_fails_at_the_end(tmp_path: Path) -> None:
    """For example status.json cannot be removed, since the disk is read-only after an error."""
    launcher = Parts("start")
    with pytest.raises(PermissionError):
        start(tmp_path, launcher, Parts("close"), Parts("close"))
    assert launcher.calls[:2] == ["start", "close"] and launcher.calls[2].startswith("remove ")


def test_a_run_starts_beside_readers_of_its_folder(tmp_path: Path) -> None:
    """`satrap status --watch` looks at the lock again and again, and shares it for a moment."""
    with opened(tmp_path) as reader, opened(tmp_path) as other:
        assert try_lock(reader, shared=True)
        timer = threading.Timer(0.2, fcntl.flock, (reader, fcntl.LOCK_UN))
        timer.start()
        with lock_run_folder(tmp_path):
            assert not try_lock(other, shared=True)
        timer.join()
    with lock_run_folder(tmp_path), pytest.raises(ConfigError, match="another run uses"), lock_run_folder(tmp_path):
        pass
