"""A tour of the buckets of a job: they migrate to one number of servers after another while a test trains."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from satrap.server.migration.coordinator import Migration
from waiting import DEADLINE_SECONDS

TOUR = (2, 3, 1, 2, 1, 3, 2, 1)  # the number of servers after each migration


class Tour:
    """Migrates in a thread: from one server to each number of servers of the tour in turn."""

    def __init__(self, addresses: list[str], **options: Any) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._migrations = self._pool.submit(self._migrate, addresses, **options)

    def _migrate(self, addresses: list[str], **options: Any) -> None:
        now = addresses[:1]
        for num_servers in TOUR:
            wanted = addresses[:num_servers]
            Migration(now, wanted, deadline=DEADLINE_SECONDS, pause_ratio=0.0, **options).run()
            now = wanted

    def over(self) -> bool:
        """Return whether the tour has ended; raise its error if it has failed."""
        return self._migrations.done() and self._migrations.result() is None

    def __enter__(self) -> Tour:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
