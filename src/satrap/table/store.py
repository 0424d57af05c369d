"""One table as its user sees it: arrays in, arrays out, over one table of a native engine.

A `Store` checks and converts its arguments (`array_args`), numbers the steps, allocates results, and passes everything
else to the core: `lookup` and `update` are one native call each, with the GIL released. `table.snapshot` saves; the
Store only remembers which versions it has saved or loaded. Calls may come from several threads at once. The many-table
interface of an engine is `satrap.table.table_group.TableGroup`, which consists of Stores.

Steps. Everything that changes a table carries a batch number, from 1 to 2**32 - 2. By default a store numbers its
training lookups 1, 2, 3, ... and an update takes the latest. A training job passes its own numbers.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Never, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap._core import Ticket
from satrap.config import array_args
from satrap.config.tables import Table, require_frozen_ids
from satrap.config.validation import known_arguments
from satrap.errors import SharedMemoryError, TicketError
from satrap.hidden_names import internal
from satrap.table.engine import Slot, attach_engine, look_up, open_engine, update
from satrap.table.snapshot.directory import folder_path
from satrap.table.snapshot.held_bytes import HeldBytes
from satrap.table.snapshot.reader import History, Snapshot, fill_from, fill_levels
from satrap.table.snapshot.writer import save_table
from satrap.table.written_rows import as_rows, put_rows

_PathLike = str | os.PathLike[str]
_PART_BYTES = 16 << 20


class StoredRows(NamedTuple):
    """The result of `Store.read`: one line for each requested id."""

    values: NDArray[np.float32]
    """float32 [n, dim]; 0 where there is no row."""
    state: NDArray[np.float32]
    """float32 [n, state_dim]; 0 where there is no row."""
    present: NDArray[np.bool_]
    """Whether the id has a row."""


@internal("fill forget_saves in_engine")
class Store:
    """A table: 64-bit ids to rows of values and optimizer state."""

    @known_arguments()
    def __init__(
        self,
        table: Table,
        *,
        seed: int = 0,
        num_threads: int | None = None,
        simd: str = "auto",
        shared: _PathLike | None = None,
    ) -> None:
        """Create an empty table.

        seed: initial values and random draws are functions of it, of the table's name and of the id.
        num_threads: threads of one call, the caller's among them; None: the cores of this process. Changes no result.
        simd: "auto", or one of `satrap._core.simd_paths()`. Changes no result.
        shared: path of a new shared-memory file (best on tmpfs) that holds the rows. They survive the death of this
            process; `Store.attach(path)` finds them again.
        """
        self._begin(open_engine([table], seed=seed, num_threads=num_threads, simd=simd, shared=shared)[0])

    @classmethod
    def attach(cls, path: _PathLike, *, num_threads: int | None = None, simd: str = "auto") -> Self:
        """Attach the table in the shared-memory file of a process that has exited or was killed. The file holds its
        configuration."""
        slots = attach_engine(path, num_threads=num_threads, simd=simd)
        if len(slots) != 1:
            names = ", ".join(repr(slot.table.name) for slot in slots)
            raise SharedMemoryError(
                f"shared-memory file {os.fspath(path)!r} holds {len(slots)} tables ({names}); "
                "expected one: attach it with satrap.table.table_group.TableGroup.attach"
            )
        return cls.in_engine(slots[0])

    @classmethod
    def in_engine(cls, slot: Slot) -> Self:
        """Return a store over one table of an existing engine."""
        store = cls.__new__(cls)
        store._begin(slot)
        return store

    def _begin(self, slot: Slot) -> None:
        self._slot = slot
        self._engine = slot.engine
        self._where = f"table {slot.table.name!r}"
        self._snapshots = History(slot.engine.version(slot.index))
        self._snapshot_lock = threading.Lock()  # one save, or one apply, at a time

    def __repr__(self) -> str:
        return f"Store({self.table.name!r}, dim={self.table.dim}, rows={len(self)}, latest_step={self.latest_step})"

    # -- settings ----------------------------------------------------------------------------------------------------

    @property
    def table(self) -> Table:
        """The configuration that the table was created with; its `lr` is the initial one, see `lr`."""
        return self._slot.table

    @property
    def seed(self) -> int:
        """The seed that the table was created with."""
        return self._slot.seed

    @property
    def num_threads(self) -> int:
        """Number of threads of one call."""
        return self._engine.num_threads

    @property
    def simd(self) -> str:
        """The SIMD path in use: "avx512", "avx2" or "portable"."""
        return self._engine.simd

    @property
    def state_dim(self) -> int:
        """Floats of optimizer state in a row."""
        return self._engine.state_dim(self._slot.index)

    @property
    def latest_step(self) -> int:
        """The largest step of any training lookup or update so far; 0 before the first."""
        return self._engine.latest_step

    @property
    def version(self) -> int:
        """The table's version, which counts saves: 1 before the first, then the version of the last snapshot saved,
        loaded or applied. A failed save counts too, so the version may be higher than that of any snapshot."""
        return self._engine.version(self._slot.index)

    @property
    def lr(self) -> float:
        """The learning rate of an update that passes none."""
        return self._engine.lr(self._slot.index)

    def set_lr(self, lr: float) -> None:
        """Change the learning rate from the next update on. Saved with the table."""
        self._engine.set_lr(self._slot.index, array_args.as_lr(self._where, lr, self.table.optimizer))

    # -- lookup and update -------------------------------------------------------------------------------------------

    def lookup(
        self,
        ids: ArrayLike,
        *,
        train: bool = True,
        step: int | None = None,
        oldest_open: int | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Return the values of the ids' rows: float32 [n, dim].

        ids: uint64 [n], or int64 taken as its bit pattern; may repeat. An array that is not C-contiguous is copied.
        train: True stamps the rows as used at `step`, and admits and inserts ids that have none, with their initial
            values. False changes nothing, not even counters, and takes neither `step` nor `oldest_open`. An id without
            a row reads as `table.absent` says.
        step: the job's batch number; None: one after the latest. Two lookups of one batch are then two steps, and count
            twice for `MinCount` and `expire_after`: give both the same step if they are one. A new row of a step so
            late that its rows would have expired is stamped with the oldest step that has not.
        oldest_open: the oldest step whose update is still to come; rows used since then are neither evicted nor
            expired. None: this step.
        out: memory to write into, float32 [n, dim], C-contiguous; it is also returned. None: a new array.

        A full table that may not evict any row raises CapacityError; rows that the call inserted before stay.
        """
        return self._look_up(ids, train=train, step=step, oldest_open=oldest_open, out=out)[0]

    def lookup_for_update(
        self,
        ids: ArrayLike,
        *,
        step: int | None = None,
        oldest_open: int | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.float32], Ticket]:
        """Return what `lookup` returns for training, and a ticket, with which `update` need not de-duplicate or search
        again. The options are as in `lookup`."""
        return self._look_up(ids, train=True, step=step, oldest_open=oldest_open, out=out, with_ticket=True)

    def update(
        self, ids: ArrayLike | Ticket, gradients: ArrayLike, *, step: int | None = None, lr: float | None = None
    ) -> None:
        """Apply the optimizer to the ids' rows, once per id.

        ids: the ids of the gradients, or the ticket of `lookup_for_update`. Gradients of one id are summed first, in
            order of appearance. An id without a row is counted in `stats()["not_applied_absent"]` and nothing else.
        gradients: float32 [n, dim]. `table.on_nonfinite` decides about one that is not finite.
        step: the job's batch number; None: the latest, or 1 if there is none. Rows are stamped with it.
        lr: the learning rate of this update; None: the store's `lr`.
        """
        require_frozen_ids(self.table)
        ticket = ids if isinstance(ids, Ticket) else self._prepare(ids)
        if not ticket.only_of(self._slot.index):
            raise TicketError(
                f"{self._where}: this ticket is of another table, or of several; pass it to the store that created it"
            )
        gradient_array = array_args.as_gradients(self._where, gradients, (ticket.n, self.table.dim))
        rate = self.lr if lr is None else array_args.as_lr(self._where, lr, self.table.optimizer)
        # The other tables of the engine have no gradient in this call, so any rate will do for them.
        update(self._where, self._engine, ticket, gradient_array, step, [rate] * self._slot.num_tables)

    def read(self, ids: ArrayLike) -> StoredRows:
        """Return the rows as they are stored; changes nothing.

        Returns `values` float32 [n, dim], `state` float32 [n, state_dim] and `present` bool [n]. An id without a row
        is not present and reads as zeros, whatever `table.absent` says.
        """
        id_array = array_args.as_ids(self._where, ids)
        values = np.zeros((len(id_array), self.table.dim), np.float32)
        state = np.zeros((len(id_array), self.state_dim), np.float32)
        present = np.zeros(len(id_array), np.bool_)
        self._slot.rows.read(self._slot.index, id_array, values, state, present)
        return StoredRows(values, state, present)

    def write(self, ids: ArrayLike, values: ArrayLike, state: ArrayLike | None = None) -> None:
        """Insert or replace rows, such as pretrained ones, whatever `table.admission` says. Bad input changes nothing.

        ids: each once. values: finite float32 or float16 [n, dim], rounded to the nearest number that the table stores.
        state: optimizer state, float32 [n, state_dim], as `read` returns it. None: as in a new row.

        The rows count as used at the latest step. A gradient of a batch that was looked up before is applied to the
        written row. `save` makes the rows durable. A write evicts no row: if the new rows have no room in their
        buckets, each of which has a share of `capacity`, it raises CapacityError and changes nothing.
        """
        put_rows(self._slot, as_rows(self.table, self.state_dim, ids, values, state))

    # -- contents ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows in the table."""
        return self._slot.directory.num_rows(self._slot.index)

    def __reduce__(self) -> Never:
        raise TypeError(
            f"{self._where}: a store can be neither copied nor pickled, because its rows live in the native core: "
            "save it and Store.load it, or attach its shared-memory file"
        )

    def __bool__(self) -> bool:
        """Return True, for an empty store too."""
        return True

    def ids(self) -> NDArray[np.uint64]:
        """Return the ids of all rows, in the order of their buckets."""
        return np.concatenate([self.bucket_ids(bucket) for bucket in range(self.table.resolved_num_buckets)])

    def rows(self) -> Iterator[tuple[NDArray[np.uint64], StoredRows]]:
        """Yield all rows in parts of bounded size: their ids, and what `read` returns. A part holds the rows as they
        are when it is yielded; rows that are inserted or removed meanwhile may be missing."""
        for bucket in range(self.table.resolved_num_buckets):
            yield from parts_of(self.read, self.table.dim, self.bucket_ids(bucket))

    def bucket_ids(self, bucket: int) -> NDArray[np.uint64]:
        """Return the ids of the rows of one bucket."""
        exported: NDArray[np.uint64] = self._slot.directory.export_rows(self._slot.index, bucket, bucket + 1, 0)["id"]
        return exported

    def stats(self) -> dict[str, int]:
        """Return exact counts since the store was created, loaded or attached.

        rows, bytes, sightings: what it holds now; sightings are ids seen but not yet admitted.
        lookups: ids of training lookups, each once a call. hits: with a row. inserted, refused: without.
        evicted, expired: rows that were removed. updated: rows, once an update. not_applied_absent: ids with a gradient
        and no row. skipped: gradients that were not finite. repeated: ids of updates that a server had already applied.

        A lookup that raises CapacityError has stopped half way: after it `lookups` may be more than hits, inserted and
        refused together. Its step is taken nevertheless, as `latest_step` shows.
        """
        return self._slot.rows.stats(self._slot.index)

    def check(self) -> None:
        """Check every invariant of the whole table; raise AssertionError on a violation, which is a bug in Satrap."""
        self._slot.rows.check(self._slot.index)

    # -- saving and loading ------------------------------------------------------------------------------------------

    def save(self, path: _PathLike) -> int:
        """Write the whole table into the folder `path`, replacing a snapshot of it there; return its version.

        A snapshot of another table, configuration or seed is not replaced but refused. The folder is valid at every
        moment: it holds the old snapshot until the new one is complete and on disk. The snapshot holds the table as it
        is when the save starts, whatever other threads change meanwhile; a call that runs at that moment may be in some
        of its buckets only. Rows that change before they are written are copied, up to 1 GiB, beyond which lookups for
        training and updates wait for the save. A failed save raises SnapshotError and leaves nothing behind. Needs
        pyarrow. docs/format.md specifies the files.
        """
        folder = folder_path(self._where, path)
        with self._one_at_a_time():
            return self._snapshots.add(save_table(self._slot, folder))

    def save_changes(self, path: _PathLike, *, since: int) -> int:
        """Write what changed since the snapshot of version `since` into the folder `path`; return the new version.

        since: the version that a save, load or apply of this store returned or left in `version`. Snapshots saved
            before an `attach` do not count, because the ids of removed rows do not survive the process: save the whole
            table first.

        Writes rows that were inserted, updated or stamped since, and the ids of rows that were removed. If so many were
        removed that the table no longer knows them all, it raises SnapshotError: save the whole table. Each link of a
        chain needs its own folder; only changes since the same snapshot are replaced, because the new ones include the
        old ones.
        """
        folder = folder_path(self._where, path)
        with self._one_at_a_time():
            return self._snapshots.add(save_table(self._slot, folder, since=self._snapshots.find(self._where, since)))

    @classmethod
    def load(
        cls, path: _PathLike, *, num_threads: int | None = None, simd: str = "auto", shared: _PathLike | None = None
    ) -> Self:
        """Load the table that `save` wrote, bit for bit, and verify it first. The options are as in `Store`."""
        saved = Snapshot.open(folder_path("Store.load", path), "full", num_threads)
        seed = saved.manifest.seed
        slots = open_engine([saved.table], seed=seed, num_threads=num_threads, simd=simd, shared=shared, complete=False)
        store = cls.in_engine(slots[0])
        try:
            fill_from(store._slot, saved)
            store._engine.set_complete(True)
        except BaseException:
            if shared is not None:  # the file holds half a table, and this call created it
                with suppress(OSError):
                    os.unlink(shared)
            raise
        store._snapshots.add(saved.manifest)
        return store

    def apply_changes(self, path: _PathLike) -> None:
        """Bring the table from the version at which the changes in the folder `path` start to the one they end at.

        Everything is verified before the table is modified: the files, that the table is the same, that it is at that
        very version and was not changed since. A process that is killed meanwhile leaves a table in shared memory with
        some rows before and some after the changes, each of them whole, and maybe without its sightings: load a full
        snapshot then.
        """
        folder = folder_path(self._where, path)
        with self._one_at_a_time():
            saved = Snapshot.open(folder, "changes", self.num_threads, held=HeldBytes(), opened=self.table)
            saved.require_next(self._slot, self._snapshots)
            fill_from(self._slot, saved)
            self._snapshots.add(saved.manifest)

    def fill(self, levels: Sequence[Sequence[Snapshot]]) -> None:
        """Put a full snapshot and the changes after it, each maybe in parts, into this table, which must be new. The
        caller marks the engine incomplete meanwhile."""
        with self._one_at_a_time():
            fill_levels(self._slot, levels)
            for level in levels:
                if len(level) == 1:  # one of several parts is not the whole table
                    self._snapshots.add(level[0].manifest)

    def snapshot_id(self, version: int) -> str | None:
        """Return the id of the snapshot of that version, if this store has saved or loaded it."""
        return self._snapshots.id_of(version)

    def forget_saves(self) -> None:
        """Require the next save to be a full one, because the changes since an earlier one are no longer all known
        here."""
        self._snapshots = History(1)

    # -- internals ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Exclude other saves, loads and applies. In a fork the lock may be held forever: the engine checks first."""
        self._engine.version(self._slot.index)
        with self._snapshot_lock:
            yield

    def _look_up(self, ids: ArrayLike, **options: Any) -> tuple[NDArray[np.float32], Any]:
        id_array = array_args.as_ids(self._where, ids)
        shape = (len(id_array), self.table.dim)
        return look_up(self._where, self._slot, id_array, self._offsets(len(id_array)), shape, **options)

    def _prepare(self, ids: ArrayLike) -> Ticket:
        id_array = array_args.as_ids(self._where, ids)
        return self._slot.rows.prepare(id_array, self._offsets(len(id_array)))

    def _offsets(self, n: int) -> NDArray[np.int64]:
        offsets = np.zeros(self._slot.num_tables + 1, np.int64)
        offsets[self._slot.index + 1 :] = n
        return offsets


def parts_of(
    read: Callable[[NDArray[np.uint64]], StoredRows], dim: int, ids: NDArray[np.uint64]
) -> Iterator[tuple[NDArray[np.uint64], StoredRows]]:
    """Yield the rows of the ids in parts of about 16 MiB, as `read` returns them. Ids without a row are left out."""
    step = max(1, _PART_BYTES // (4 * dim))
    for begin in range(0, len(ids), step):
        part = ids[begin : begin + step]
        values, state, present = read(part)
        yield part[present], StoredRows(values[present], state[present], present[present])


def history_of(store: Store) -> History:
    """Return the versions of a store at which changes can start. The caller holds `save_lock_of` it."""
    return store._snapshots


def save_lock_of(store: Store) -> threading.Lock:
    """Return the lock that excludes other saves, loads and applies of a store; any thread may release it."""
    store._engine.version(store._slot.index)  # in a fork, where the lock may be held forever, the engine refuses
    return store._snapshot_lock
