"""The tables of one engine at a cut, and how they are saved from it, by any thread, while they are used.

`TableGroup.take_cut` takes it; `satrap.worker.sharded_cut` is the same for tables on servers.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.errors import SnapshotError
from satrap.table.engine import Slot
from satrap.table.snapshot.cut import require_changes, take_cuts
from satrap.table.snapshot.directory import folder_path
from satrap.table.snapshot.writer import row_bytes, write_cut
from satrap.table.store import Store, history_of, save_lock_of
from satrap.transfer import Transfer

_LOG = logging.getLogger("satrap.table")
_THREADS_OF_WRITER = 4  # one thread writes for so many of the engine's, while those train


class GroupCut:
    """Tables as they were at one moment, until they are written or released. One thread uses it at a time."""

    def __init__(
        self,
        where: str,
        stores: Mapping[str, Store],
        slots: Sequence[Slot],
        since: Mapping[str, int] | None,
        owned: Sequence[NDArray[np.bool_]] | None,
        memory: int,
    ) -> None:
        """where: the tables, in words. See `TableGroup.take_cut`."""
        self._where, self._stores = where, stores
        self._held: list[threading.Lock] = []
        try:
            for store in stores.values():
                lock = save_lock_of(store)
                lock.acquire()
                self._held.append(lock)
            cuts = take_cuts(slots, owned, memory)
        except BaseException:
            self._admit_saves()
            raise
        self._cuts = dict(zip(stores, cuts, strict=True))
        self.snapshot_ids: dict[str, str] = {}
        """The id of each table's snapshot that was written."""
        self._since = {}
        self.changes_known = since is not None
        """Whether the changes since the versions that `take_cut` was given can be written."""
        try:
            for name, version in (since or {}).items():
                self._since[name] = history_of(stores[name]).find(f"table {name!r}", version)
                require_changes(self._cuts[name].slot, self._since[name])
        except SnapshotError:
            self.changes_known = False
        except BaseException:
            self.release()
            raise

    @property
    def versions(self) -> dict[str, int]:
        """The version at which the cut fixes each table, by name."""
        return {name: cut.version for name, cut in self._cuts.items()}

    @property
    def map_version(self) -> int:
        """The version of the bucket map at the cut: 0, because the rows of this process do not migrate."""
        return 0

    @property
    def num_rows(self) -> dict[str, int]:
        """The approximate number of rows of each table, by name."""
        return {name: cut.rows for name, cut in self._cuts.items()}

    def write(
        self, folders: Mapping[str, str | os.PathLike[str]], *, is_full: bool, is_beside: bool = True
    ) -> dict[str, int]:
        """Write each table, or what had changed in it, into its folder, and release the cut; return how many rows each
        table had.

        is_beside: whether training continues meanwhile. A quarter of the engine's threads then write, at least one.
        """
        rows = {}
        first = next(iter(self._cuts.values()))
        threads = first.slot.engine.num_threads
        if is_beside:
            threads = max(1, threads // _THREADS_OF_WRITER)
        total = sum(cut.rows * row_bytes(cut.slot.table) for cut in self._cuts.values()) if is_full else None
        what = f"save of {self._where} at step {first.latest_step:,}"
        try:
            with Transfer(_LOG, "save", what, total=total, among=first.slot.transfers):
                for name, cut in self._cuts.items():
                    folder = folder_path(f"table {name!r}", folders[name])
                    saved = write_cut(cut, folder, None if is_full else self._since[name], threads)
                    cut.end()
                    history_of(self._stores[name]).add(saved.manifest)
                    rows[name], self.snapshot_ids[name] = saved.rows, saved.manifest.id
        finally:
            self.release()
        return rows

    def cancel(self) -> None:
        """Make `write`, which another thread runs, give up soon, because the rows that it writes are about to be
        replaced."""
        for cut in self._cuts.values():
            cut.cancelled.set()

    def release(self) -> None:
        """Give the cut up, unless it was written. Idempotent."""
        if self._held:
            for cut in self._cuts.values():
                cut.end()
            self._admit_saves()

    def figures(self) -> dict[str, Any]:
        """Return what the engine kept for its cuts: `bytes` now, their `peak`, and since the engine was created the
        number of rows `kept`, how often calls had to wait at the bound (`waits`) and for how long
        (`waited_seconds`)."""
        cut = next(iter(self._cuts.values()))
        figures: dict[str, Any] = cut.slot.engine.cut_figures()
        return figures

    def _admit_saves(self) -> None:
        while self._held:
            self._held.pop().release()
