"""An engine whose rows are on a device: what `_core.Engine` is to a Store, a TableGroup and a snapshot.

The core's engine knows the frame of each row. This object adds what is in the frames, wherever a caller reads or writes
rows, and passes every other call on.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from satrap import _core
from satrap.config.cores import thread_count
from satrap.config.tables import Table
from satrap.device.row_memory import RowMemory, memories_of
from satrap.errors import InputError
from satrap.interrupts import Uninterrupted
from satrap.table.engine import Slot, native_config


class DeviceEngine:
    """The engine of some tables, and the memory of their rows."""

    keeps_cuts = False
    """A save must be complete before training continues; see `export_cut`."""

    def __init__(self, tables: Sequence[Table], device: torch.device, *, seed: int, num_threads: int | None) -> None:
        """Create empty tables. seed and num_threads are those of `Store`."""
        state_dims = [native_config(table).state_dim for table in tables]
        self.tables, self.device = tables, device
        self.memories = memories_of(tables, state_dims, device)
        pools = {number: pool for pool, memory in enumerate(self.memories) for number in memory.tables}
        configs = [native_config(table, pools[number]) for number, table in enumerate(tables)]
        self.core = _core.Engine(configs, seed, thread_count(num_threads))
        self._lock = threading.Lock()
        self._inserted: list[dict[str, NDArray[Any]]] = []  # rows whose frames have no values yet
        self._pools = pools

    def slots(self, seed: int) -> list[Slot]:
        """Return the tables for a TableGroup."""
        engine, count = cast(_core.Engine, self), len(self.tables)
        return [
            Slot(engine=engine, index=i, num_tables=count, table=table, seed=seed)
            for i, table in enumerate(self.tables)
        ]

    def __getattr__(self, name: str) -> Any:
        if name == "core":  # an object that is being copied has none yet
            raise AttributeError(name)
        return getattr(self.core, name)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other calls while frames are chosen, and until the kernels that use them are on the device's queue.

        Before that, write the rows that a call could not write which an error or Ctrl-C ended. In a fork, where the
        lock may be held forever, raise ForkError."""
        self.require_same_process()
        with self._lock:
            self.initialise_inserted()
            yield

    def require_same_process(self) -> None:
        """Raise ForkError in a fork of the process that created the engine."""
        self.core.version(0)

    def memory(self, table: int) -> RowMemory:
        """Return the memory of a table's rows."""
        return self.memories[self._pools[table]]

    # -- what the kernels need -----------------------------------------------------------------------------------------

    def reserve(self, counts: NDArray[np.int64]) -> None:
        """Make room for the rows that a call may insert, before it changes anything. counts: of ids by table."""
        for pool, memory in enumerate(self.memories):
            used = self.core.frames_used(pool)
            free = self.core.frames_free(pool)
            memory.reserve(
                used + max(0, int(counts[memory.tables].sum()) - free), [self.tables[t].name for t in memory.tables]
            )

    def initialise_inserted(self) -> None:
        """Write the initial values and states of the rows that lookups have inserted."""
        with Uninterrupted():
            self._inserted.append(self.core.take_inserted())
        while self._inserted:
            inserted = self._inserted[0]
            for table in np.unique(inserted["tables"]).tolist():
                rows = inserted["tables"] == table
                self.memory(table).write(inserted["frames"][rows], *self.initial_rows(table, inserted["ids"][rows]))
            del self._inserted[0]

    def initial_rows(self, table: int, ids: NDArray[np.uint64]) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Return the values, of 16 bits as uint16, and states that rows of the ids begin with."""
        layout = self.memory(table).layout
        values = np.empty((len(ids), layout.dim), np.float32 if layout.dtype == "float32" else np.uint16)
        state = np.empty((len(ids), layout.state_dim), np.float32)
        self.core.initial_rows(table, ids, values, state)
        return values, state

    # -- as an engine --------------------------------------------------------------------------------------------------

    def read(
        self,
        table: int,
        ids: NDArray[np.uint64],
        values: NDArray[np.float32],
        state: NDArray[np.float32],
        present: NDArray[np.bool_],
    ) -> None:
        """Fill the lines of ids that have a row."""
        with self.exclusive():
            frames = self.core.read_frames(table, ids)
            present[:] = frames >= 0
            values[present], state[present] = self.memory(table).read_floats(frames[present])

    def next_step(self) -> int:
        """Refuse: a store's lookup wants to train."""
        raise InputError(
            f"the rows are on {self.device}, where only a stream of `Embeddings` trains them: pass train=False"
        )

    def lookup(
        self,
        ids: NDArray[np.uint64],
        offsets: NDArray[np.int64],
        step: int,
        oldest_open: int,
        train: bool,
        out: NDArray[np.float32],
        ticket: bool,
    ) -> None:
        """Fill `out` with the rows of the ids of each table, one after another. Without training only."""
        if train:
            self.next_step()
        flat, at = out.reshape(-1), 0
        for number, table in enumerate(self.tables):
            of_table = ids[offsets[number] : offsets[number + 1]]
            values = np.zeros((len(of_table), table.dim), np.float32)
            present = np.empty(len(of_table), np.bool_)
            state = np.empty((len(of_table), self.memory(number).layout.state_dim), np.float32)
            self.read(number, of_table, values, state, present)
            if table.absent == "initial":
                initial, _ = self.initial_rows(number, of_table[~present])
                values[~present] = self.memory(number).as_floats(initial)
            flat[at : at + values.size] = values.reshape(-1)
            at += values.size

    def prepare(self, *_: object) -> None:
        """Refuse: there is no flat update on a device."""
        raise InputError(f"the rows are on {self.device}, where only a stream of `Embeddings` updates them")

    def export_rows(self, table: int, first: int, last: int, since: int) -> dict[str, NDArray[Any]]:
        """Return the rows of some buckets as columns, as the core does."""
        with self.exclusive():
            columns = self.core.export_rows(table, first, last, since)
            columns["values"], columns["state"] = self.memory(table).read(columns.pop("frame"))
        return columns

    def export_cut(self, table: int, first: int, last: int, since: int) -> dict[str, Any]:
        """Return the rows of some buckets as columns, as the core does. They are those of this moment: frames are
        changed in place, and nothing keeps what they were at the cut."""
        with self.exclusive():
            columns: dict[str, Any] = self.core.export_cut(table, first, last, since)
            columns["values"], columns["state"] = self.memory(table).read(columns.pop("frame"))
        return columns

    def import_rows(
        self,
        table: int,
        ids: NDArray[np.uint64],
        steps: NDArray[np.uint32],
        values: NDArray[Any],
        state: NDArray[np.float32],
    ) -> None:
        """Insert or replace rows."""
        with self.exclusive():
            counts = np.zeros(len(self.tables), np.int64)
            counts[table] = len(ids)
            self.reserve(counts)
            self.memory(table).write(self.core.import_frames(table, ids, steps), values, state)

    def stats(self, table: int) -> dict[str, int]:
        """Return the counts of a table; its bytes include its rows on the device."""
        counts: dict[str, int] = self.core.stats(table)
        counts["bytes"] += counts["rows"] * self.memory(table).layout.row_bytes
        return counts

    def check(self, table: int) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self.core.check(table)
        with self.exclusive():
            self.core.check_frames()
            for pool, memory in enumerate(self.memories):
                assert self.core.frames_used(pool) <= len(memory.values), "a frame is beyond the memory"
