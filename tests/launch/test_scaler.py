"""The threads of a run that scale it: whatever goes wrong in them, the run learns of it, and scales later."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from logged import logged
from satrap.launch import scaler
from satrap.launch.run_events import Event, MigrationEnded
from satrap.launch.scaler import Scaler
from satrap.server.migration.coordinator import Migration
from satrap.sharding.autoscaler import ScaleLimits
from waiting import wait_until


def test_the_autoscaler_waits_for_servers_without_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that have not listened yet: in a run that resumes in a folder, or whose servers restart empty."""
    monkeypatch.setattr(scaler, "_WINDOW_SECONDS", 0.01)
    asked = threading.Semaphore(0)

    def servers() -> Sequence[str]:
        asked.release()
        return "", f"ipc://{tmp_path}"  # no name in a folder

    watcher = Scaler(tmp_path, limits=ScaleLimits(min_servers=1, max_servers=3))
    watcher.watch(servers)
    try:
        for _ in range(3):
            assert asked.acquire(timeout=60.0), "the autoscaler has ended"
    finally:
        watcher.close()


def test_a_migration_ends_whatever_its_error_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the run would wait for its end, and refuse every request, until its own."""

    def fail(_: Migration) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Migration, "run", fail)
    runner, events = Scaler(tmp_path), list[Event]()
    with logged("satrap.launch", match="unexpected error"):
        runner.migrate(["ipc:///a/b"], ["ipc:///a/c"], is_urgent=False)

        def has_ended() -> bool:
            events.extend(runner.poll())
            return bool(events)

        wait_until(has_ended)
    assert events == [MigrationEnded("OSError: [Errno 24] Too many open files")]
    assert runner.progress is None
