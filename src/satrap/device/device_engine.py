"""Rows on a device, whose directory is an engine: implements `satrap.table.engine.RowAccess`.

The core's engine knows the frame of each row, and all that a row has but its numbers. This object adds what is in the
frames. It also orders what calls do on the device: frames are chosen, rows moved, initialised and used.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Never, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap import _core
from satrap.config.cores import thread_count
from satrap.config.tables import Table
from satrap.device.device_memory import DeviceMemory
from satrap.device.device_stream import DeviceStream, Mark, new_stream
from satrap.device.initial_values import InitialValues
from satrap.device.row_memory import RowMemory, memories_of
from satrap.device.table_shards import ALONE, Part, Trainer, capacities_of, kind_of
from satrap.errors import InputError, SnapshotError
from satrap.interrupts import Uninterrupted
from satrap.table.engine import Directory, Slot, native_config, slots_of, state_dim


class MoveQueue:
    """The order in which a device moves rows between frames and home, beside what it computes.

    Moves run on a second stream, so that those for the next batch overlap the present step. A move waits for every
    earlier use of frames; the lookup that needs its rows waits for it. The lock of the rows is held during each call.
    """

    def __init__(self, rows: DeviceStream, moves: DeviceStream) -> None:
        """rows: where rows are used. moves: where they are moved; the same one, if none ever is."""
        self._rows, self._moves = rows, moves
        self._used: Mark | None = None
        self._moved: Mark | None = None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Run the device's work inside the block after all earlier uses and moves of rows."""
        self._moves.wait(self._used)
        with self._moves.running():
            yield
        self._moved = self._moves.mark()

    @property
    def moved(self) -> Mark | None:
        """A mark at the end of the moves so far."""
        return self._moved

    def wait(self, moved: Mark | None) -> None:
        """Let the uses that follow wait for the moves before this mark."""
        self._rows.wait(moved)

    def note_use(self) -> None:
        """Let the moves that follow wait for all uses so far."""
        if self._moves is not self._rows:
            self._used = self._rows.mark()

    def share(self, memory: Sequence[Tensor]) -> None:
        """Let moves use memory that was allocated on the stream of the rows."""
        self._moves.keep(memory)
        self.note_use()


PendingWork = Callable[[], "Sequence[PendingWork] | None"]
"""Work on the device that what the core has already recorded requires. It returns the work that has to follow it."""


class FrameDirectory(Directory, Protocol):
    """What knows which ids have rows, and in which frames. Its methods are those of `_core.Engine`."""

    def read_frames(self, table: int, ids: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return the frame of each id's row; -1: it has none; below: it is at home."""

    def import_frames(self, table: int, ids: NDArray[np.uint64], steps: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Insert or replace rows of a snapshot; return their frames."""

    def export_cut(self, table: int, bucket_begin: int, bucket_end: int, since: int) -> dict[str, Any]:
        """Return the rows of some buckets at the cut as columns: their ids and frames, and what else is known."""

    def stats(self, table: int) -> dict[str, int]:
        """Return the counts of a table."""


class DeviceEngine:
    """The engine of some tables, and the memory of their rows."""

    def __init__(
        self,
        tables: Sequence[Table],
        device: torch.device,
        *,
        seed: int,
        num_threads: int | None,
        device_memory: DeviceMemory = None,
        trainer: Trainer = ALONE,
        stream: DeviceStream | None = None,
    ) -> None:
        """Create empty tables. seed, num_threads: as in `Store`. device_memory: as in `Embeddings`. trainer: which of
        several trainers this is. stream: the stream on which rows are read and changed; None: a new one."""
        self.tables, self.device, self._trainer = tables, device, trainer
        self.stream = new_stream(device) if stream is None else stream
        self._columns = [trainer.columns(table, state_dim(table)) for table in tables]
        layouts = [columns.layout(table.dtype) for columns, table in zip(self._columns, tables, strict=True)]
        self.memories = memories_of(tables, layouts, device, device_memory, self._most_rows())
        pools = {number: pool for pool, memory in enumerate(self.memories) for number in memory.tables}
        configs = [native_config(table, pools[number]) for number, table in enumerate(tables)]
        self.core = _core.Engine(configs, seed, thread_count(num_threads))
        self.directory: FrameDirectory = self.core
        for pool, memory in enumerate(self.memories):
            if memory.home is not None and memory.most is not None:
                self.core.set_device_frames(pool, memory.most)
        for number, table in enumerate(tables):
            if trainer.world_size > 1 and kind_of(table) != "rows":
                self.core.share_buckets(number)
        self._initial = [InitialValues.of(table, seed, device) for table in tables]
        self._is_tiered = any(memory.home is not None for memory in self.memories)
        self.moves = MoveQueue(self.stream, new_stream(device) if self._is_tiered else self.stream)
        self._lock = threading.Lock()
        self._pending: list[PendingWork] = []
        self._pools = pools

    def slots(self, seed: int) -> list[Slot]:
        """Return the slots from which a `TableGroup` is made."""
        return slots_of(self.core, self.tables, seed, self)

    @contextmanager
    def exclusive(self, counts: NDArray[np.int64] | None = None) -> Iterator[None]:
        """Exclude other calls while frames are chosen, and until the kernels that use them are on the stream of the
        rows. The calling thread's work on other streams comes before and after them.

        Before that, do the pending work of a call that an error or Ctrl-C ended. In a fork, where the lock may be
        held forever, raise ForkError.

        counts: how many rows of each table the call may insert; there is room for them, or CapacityError is raised.
            Memory at home takes long to allocate: that is done while other calls go on."""
        self.require_same_process()
        while True:
            with self._lock, self.stream.joined():
                self.place_rows()
                if counts is None or (missing := self._reserve(counts)) is None:
                    yield
                    break
            missing()
        if counts is not None:
            self._keep_reserve()

    @contextmanager
    def in_order(self, counts: NDArray[np.int64] | None = None) -> Iterator[None]:
        """Exclude other calls, and do on the device what is inside the block after all moves so far, and before all
        later ones. counts: as in `exclusive`."""
        with self.exclusive(counts):
            self.moves.wait(self.moves.moved)
            try:
                yield
            finally:  # what a call that fails has put on the stream uses rows, too
                self.moves.note_use()

    def perform(self, record: Callable[[], PendingWork]) -> None:
        """Record a change in the core, and do the work on the device that `record` returns.

        If the work fails, for example because memory runs out, the next call does it first, so that no row is used
        without it."""
        with Uninterrupted():
            self._pending.append(record())
        self._perform_pending()

    def _perform_pending(self) -> None:
        """Do the pending work."""
        while self._pending:
            with Uninterrupted():  # work is done once
                self._pending[:1] = self._pending[0]() or ()

    def require_same_process(self) -> None:
        """Raise ForkError in a fork of the process that created the engine."""
        self.core.version(0)

    def memory(self, table: int) -> RowMemory:
        """Return the memory of a table's rows."""
        return self.memories[self._pools[table]]

    # -- what the kernels need -----------------------------------------------------------------------------------------

    def _most_rows(self) -> list[int | None]:
        """Return how many rows of each table there can be here; None: there is no bound."""
        return capacities_of(self.tables, self._trainer)

    def _keep_reserve(self) -> None:
        """Allocate memory at home that a later call may need."""
        for memory in self.memories:
            if memory.home is not None:
                memory.home.keep_reserve()

    def _reserve(self, counts: NDArray[np.int64]) -> Callable[[], None] | None:
        """Make room for the rows that a call may insert. Return what allocates memory at home that is missing for that,
        without the lock. counts: of ids by table."""
        for pool, memory in enumerate(self.memories):
            rows, names = int(counts[memory.tables].sum()), [self.tables[t].name for t in memory.tables]
            used, free = self.core.frames_used(pool), self.core.frames_free(pool)
            if memory.home is None:
                memory.reserve(used + max(0, rows - free), names)
                continue
            frames = int(memory.most or 0)
            if len(memory.values) < frames:
                memory.reserve(frames, names)
                self.moves.share([memory.values, memory.state])
            slots = max(0, rows - (frames - used + free) - self.core.home_free(pool))
            addresses = memory.home.addresses
            if num_missing := memory.home.grow(self.core.home_used(pool) + slots):
                return partial(memory.home.allocate, num_missing, names)
            if memory.home.addresses is not addresses:
                self.moves.share([memory.home.addresses])
        return None

    def place_rows(self) -> None:
        """Carry out the moves that lookups have recorded, then write the initial values and states of the rows that
        they have inserted. Before that, do the pending work."""
        if self._pending:
            try:
                self._perform_pending()
            finally:  # it may be the step of rows that are moved next
                self.moves.note_use()
        if self._is_tiered:
            self.perform(lambda: partial(self._move, self.core.take_moves()))
        self.perform(lambda: partial(self._initialise, self.core.take_inserted()))

    def _move(self, moves: dict[str, NDArray[Any]]) -> Sequence[PendingWork]:
        """Return the moves of each pool. Moved twice, two rows that change places would be back where they were."""

        def exchange(pool: int) -> None:
            here = moves["pools"] == pool
            with self.moves.moving():
                self.memories[pool].exchange(*(moves[name][here] for name in ("frames", "slots", "directions")))

        return [partial(exchange, pool) for pool in np.unique(moves["pools"]).tolist()]

    def _initialise(self, inserted: dict[str, NDArray[Any]]) -> Sequence[PendingWork]:
        """Return the new rows of each table."""

        def initialise(table: int) -> None:
            rows = inserted["tables"] == table
            with self.moves.moving():
                self.initialise(table, self.memory(table), inserted["frames"][rows], inserted["ids"][rows])

        return [partial(initialise, table) for table in np.unique(inserted["tables"]).tolist()]

    def initialise(self, table: int, memory: RowMemory, places: NDArray[np.int32], ids: NDArray[np.uint64]) -> None:
        """Write the initial values and states of the ids' rows into their places."""
        memory.initialise(places, ids, self._initial[table])

    def _empty_rows(self, table: int, rows: int) -> Part:
        """Return memory for whole rows as they are stored, values of 16 bits as uint16."""
        columns, dtype = self._columns[table], self.tables[table].dtype
        values = np.empty((rows, columns.dim), np.float32 if dtype == "float32" else np.uint16)
        return values, np.empty((rows, columns.state_dim), np.float32)

    # -- rows divided by columns ---------------------------------------------------------------------------------------

    def read_columns(self, table: int, ids: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], Part]:
        """Return for each id whether it has a row, and the columns of its row that are here."""
        layout = self.memory(table).layout
        values, state = self._empty_rows(table, len(ids))
        values, state = values[:, : layout.dim], state[:, : layout.state_dim]
        with self.in_order():
            places = self.directory.read_frames(table, ids)
            present = places != -1
            values[present], state[present] = self.memory(table).read(places[present])
        return present, (values, state)

    def _whole(self, table: int, ids: NDArray[np.uint64], part: Part) -> tuple[NDArray[np.bool_], Part]:
        """Return for each id whether all trainers have its row, and the whole rows. part: the columns that are here.
        The caller does not hold the lock: another trainer may ask for columns meanwhile."""
        present, columns = np.ones(len(ids), np.bool_), self._columns[table]
        if columns.is_whole:
            return present, part
        whole = self._empty_rows(table, len(ids))
        if not len(ids):
            return present, whole
        columns.put(part, *whole)
        for rank, has_row, stored, state in self._trainer.read_others(table, ids):
            values = stored.view(whole[0].dtype).reshape(len(ids), -1)
            other = self._trainer.columns(self.tables[table], columns.state_dim, rank)
            other.put((values, state.reshape(len(ids), -1)), *whole)
            present &= has_row
        return present, whole

    def _export(self, table: int, export: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `export` does, with the values and states in place of the frames."""
        with self.in_order():
            columns = export()
            part = self.memory(table).read(columns.pop("frame"))
        present, (columns["values"], columns["state"]) = self._whole(table, columns["id"], part)
        if not present.all():
            raise SnapshotError(
                f"table {self.tables[table].name!r}: a row was removed while it was saved; save between two steps"
            )
        return columns

    # -- as RowAccess --------------------------------------------------------------------------------------------------

    def read(
        self,
        table: int,
        ids: NDArray[np.uint64],
        values: NDArray[np.float32],
        state: NDArray[np.float32],
        present: NDArray[np.bool_],
    ) -> None:
        with self.in_order():
            places = self.directory.read_frames(table, ids)
            present[:] = places != -1
            part = self.memory(table).read(places[present])
        if present.any():
            has_row, (whole, whole_state) = self._whole(table, ids[present], part)
            present[present] = has_row
            values[present], state[present] = self.memory(table).as_floats(whole)[has_row], whole_state[has_row]

    def lookup(
        self,
        ids: NDArray[np.uint64],
        offsets: NDArray[np.int64],
        step: int,
        oldest_open: int,
        train: bool,
        out: NDArray[np.float32],
        ticket: bool,
        first_epoch: bool = True,
    ) -> None:
        """Look up rows for evaluation. Training looks up through `DeviceRows`."""
        if train:
            raise InputError(
                f"the rows are on {self.device}, where only a stream of `Embeddings` trains them: pass train=False"
            )
        flat, at = np.asarray(out).reshape(-1), 0
        for number, table in enumerate(self.tables):
            of_table = ids[offsets[number] : offsets[number + 1]]
            values = np.zeros((len(of_table), table.dim), np.float32)
            present = np.empty(len(of_table), np.bool_)
            state = np.empty((len(of_table), self._columns[number].state_dim), np.float32)
            self.read(number, of_table, values, state, present)
            if table.absent == "initial":
                initial, initial_state = self._empty_rows(number, int((~present).sum()))
                self.core.initial_rows(number, of_table[~present], initial, initial_state)
                values[~present] = self.memory(number).as_floats(initial)
            flat[at : at + values.size] = values.reshape(-1)
            at += values.size

    def prepare(self, ids: NDArray[np.uint64], offsets: NDArray[np.int64]) -> Never:
        """Raise InputError: a table on a device has no update by flat gradients."""
        raise InputError(f"the rows are on {self.device}, where only a stream of `Embeddings` updates them")

    def export_rows(self, table: int, first: int, last: int, since: int) -> dict[str, NDArray[Any]]:
        return self._export(table, lambda: self.directory.export_rows(table, first, last, since))

    def export_cut(self, table: int, first: int, last: int, since: int) -> dict[str, Any]:
        """Return the rows as they are now. Rows on the device and at home are changed in place, so training waits for a
        save instead of copying rows as they were at the cut."""
        return self._export(table, lambda: self.directory.export_cut(table, first, last, since))

    def import_rows(
        self,
        table: int,
        ids: NDArray[np.uint64],
        steps: NDArray[np.uint32],
        values: NDArray[Any],
        state: NDArray[np.float32],
    ) -> None:
        counts = np.zeros(len(self.tables), np.int64)
        counts[table] = len(ids)
        with self.in_order(counts):
            part = self._columns[table].take(values, state)
            self.perform(lambda: partial(self._write, table, self.directory.import_frames(table, ids, steps), part))

    def _write(self, table: int, places: NDArray[np.int32], part: Part) -> None:
        self.memory(table).write(places, *part)

    def stats(self, table: int) -> dict[str, int]:
        """Return the counts of a table; its bytes include its rows on the device and at home. Of several trainers, each
        counts what it owns. If some are at home, on_device and at_home count them, and moved_in and moved_out those
        that were moved to the device and back."""
        counts = self.directory.stats(table)
        copies = self._trainer.world_size if kind_of(self.tables[table]) == "replicated" else 1
        counts["bytes"] += counts["rows"] * self._columns[table].whole_bytes(self.tables[table].dtype) * copies
        if "on_device" in counts:
            counts["at_home"] = counts["rows"] - counts["on_device"]
        return counts

    def check(self, table: int) -> None:
        self.core.check(table)
        with self.exclusive():
            self.core.check_frames()
            for pool, memory in enumerate(self.memories):
                assert self.core.frames_used(pool) <= len(memory.values), "a frame is beyond the memory"
                if memory.home is not None:
                    assert self.core.home_used(pool) <= len(memory.home), "a slot is beyond the memory at home"
