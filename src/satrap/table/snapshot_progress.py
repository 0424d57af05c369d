"""The progress of the saves and restores of one table, for status and metrics. Thread-safe; changes nothing."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class WorkProgress:
    """The save or the restore that is running, or else the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = self._rows_done = self._finished = 0
        self._started_at: float | None = None  # None: not running
        self._seconds = self._ended_at = 0.0

    @contextmanager
    def running(self, rows: int) -> Iterator[None]:
        """Cover the work on this number of rows, of which `add` counts those that are done."""
        with self._lock:
            self._rows, self._rows_done, self._started_at = rows, 0, time.monotonic()
        is_finished = False
        try:
            yield
            is_finished = True
        finally:
            with self._lock:
                started_at, self._started_at = self._started_at, None
                if is_finished and started_at is not None:
                    self._seconds, self._ended_at = time.monotonic() - started_at, time.time()
                    self._finished += 1

    def add(self, rows: int) -> None:
        """Count rows that are done."""
        with self._lock:
            self._rows_done += rows

    def to_dict(self) -> dict[str, float]:
        """Return `running` (0 or 1), `rows`, `rows_done`, `finished` (how often it was completed), and of the last time
        its `seconds` and when it `ended_at`, as Unix time."""
        with self._lock:
            return {
                "running": int(self._started_at is not None),
                "rows": self._rows,
                "rows_done": self._rows_done,
                "finished": self._finished,
                "seconds": self._seconds,
                "ended_at": self._ended_at,
            }


class SnapshotProgress:
    """The progress of one table."""

    def __init__(self) -> None:
        self.save, self.restore = WorkProgress(), WorkProgress()

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return `WorkProgress.to_dict` of "save" and of "restore"."""
        return {"save": self.save.to_dict(), "restore": self.restore.to_dict()}
