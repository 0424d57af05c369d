"""Several tables in one engine: one native call looks up, or updates, the ids of all of them.

A batch passes one array of ids and the offsets where each table's begin, so its cost in Python does not grow with the
number of tables. Rows are returned in one flat array, because tables differ in dim; `split` shows it table by table.
What concerns one table alone (reading, learning rate, statistics, saving) is on its `Store`, `tables["item"]`: every
table of the engine has one, and a Store that a user creates is the only one of its engine. So a Store and a TableGroup
share all code but that of the batch, and neither calls the other.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Never, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap._core import Ticket
from satrap.config import array_args
from satrap.config.tables import Table, require_frozen_ids
from satrap.config.validation import ByName, kind_of, known_arguments
from satrap.errors import ConfigError, InputError, SnapshotError
from satrap.hidden_names import internal
from satrap.storage.open_folder import open_folder
from satrap.table.engine import Slot, attach_engine, look_up, open_engine, update
from satrap.table.group_cut import GroupCut
from satrap.table.snapshot.cut import OLD_ROWS_BYTES
from satrap.table.snapshot.directory import folder_bytes, folder_path
from satrap.table.snapshot.held_bytes import HeldBytes
from satrap.table.snapshot.reader import Snapshot, open_levels
from satrap.table.store import Store, save_lock_of
from satrap.transfer import Transfer, Transfers

_LOG = logging.getLogger("satrap.table")
_NO_IDS = np.zeros(0, np.uint64)
_PathLike = str | os.PathLike[str]
Chains = dict[str, list[list[Snapshot]]]
"""For each table its levels: the full snapshots of all parts, then their changes."""


@internal("fill in_engine is_whole keeps_cuts map_version require_permitted restore take_cut verify")
class TableGroup(Mapping[str, Store]):
    """Tables by name, in one engine: they share memory, threads and the count of steps."""

    is_whole = True
    """False once a restore has failed after it had begun to change these tables."""

    @known_arguments()
    def __init__(
        self,
        tables: Sequence[Table],
        *,
        seed: int = 0,
        num_threads: int | None = None,
        simd: str = "auto",
        shared: _PathLike | None = None,
    ) -> None:
        """Create empty tables, in the order of their ids in every batch. The options are as in `Store`."""
        if not isinstance(tables, Sequence):
            raise ConfigError(f"tables is a {type(tables).__name__}; expected a list of satrap.Table")
        names = [table.name for table in tables if isinstance(table, Table)]
        if not tables or len(set(names)) != len(names):
            raise ConfigError(f"tables are called {names}; expected at least one table, each with its own name")
        self._begin(open_engine(tables, seed=seed, num_threads=num_threads, simd=simd, shared=shared))

    @classmethod
    def attach(cls, path: _PathLike, *, num_threads: int | None = None, simd: str = "auto") -> Self:
        """Attach the tables in the shared-memory file of a process that has exited or was killed."""
        return cls.in_engine(attach_engine(path, num_threads=num_threads, simd=simd))

    @classmethod
    def in_engine(cls, slots: list[Slot], renew: Callable[[], list[Slot]] | None = None) -> Self:
        """Return a group of all tables of an existing engine. renew: replaces the engine by an empty one; without it
        a restore refuses used tables."""
        tables = cls.__new__(cls)
        tables._begin(slots, renew)
        return tables

    def _begin(self, slots: list[Slot], renew: Callable[[], list[Slot]] | None = None) -> None:
        self._first, self._engine, self._renew = slots[0], slots[0].engine, renew
        self._slots = {slot.table.name: slot for slot in slots}
        self._stores = ByName("table", {slot.table.name: Store.in_engine(slot) for slot in slots})
        self._where = f"tables {', '.join(map(repr, self._stores))}" if len(slots) < 5 else f"{len(slots)} tables"

    def __getitem__(self, name: str) -> Store:
        return self._stores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stores)

    def __len__(self) -> int:
        return len(self._stores)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {len(store):,} rows' for name, store in self.items())})"

    def __reduce__(self) -> Never:
        raise TypeError(
            f"{self._where}: they can be neither copied nor pickled, because their rows live in the native core: save "
            "each and restore them, or attach their shared-memory file"
        )

    @property
    def map_version(self) -> int:
        """A number that changes when rows migrate to other servers: changes since a save before that cannot be saved.
        It is constant here, because the rows of this process do not migrate."""
        return 0

    @property
    def keeps_cuts(self) -> bool:
        """Whether training may continue while a cut is written. Rows on a device are changed in place, so training
        waits."""
        return self._first.keeps_cuts

    def require_permitted(self, folder: _PathLike) -> None:
        """Do nothing: this process may write anywhere. Servers restrict the folders that they write to."""

    def take_cut(
        self,
        since: Mapping[str, int] | None = None,
        *,
        names: Sequence[str] | None = None,
        owned: Sequence[NDArray[np.bool_]] | None = None,
        memory: int = OLD_ROWS_BYTES,
    ) -> GroupCut:
        """Take the cut of these tables at once, to be written or released. No other call may run meanwhile; those that
        come later change nothing of what will be saved. Waits for a save of one of the tables that is running.

        since: for each table the version at which changes would start; see `GroupCut.changes_known`.
        names: of the tables; None: all.
        owned: for each table and each of its buckets, whether it is saved; None: all.
        memory: most bytes of old rows; beyond it calls that change rows wait for the save.
        """
        stores = {name: self._stores[name] for name in names or self._stores}
        return GroupCut(self._where, stores, [self._slots[name] for name in stores], since, owned, memory)

    def restore(self, folders: Mapping[str, Sequence[_PathLike]]) -> bool:
        """Fill these tables, which must be new or of an `Embeddings`, bit for bit as they were saved; return whether
        `save_changes` since then is possible, which it is not if several servers saved them.

        folders: for every table the folder of its full snapshot, then those of the changes after it. All of them are
            verified before any table is modified. If what follows fails, the tables hold a part of the rows.
        """
        used = [name for name, store in self._stores.items() if store.latest_step > 0 or store.stats()["rows"] > 0]
        if used and self._renew is None:
            raise SnapshotError(
                f"{self._where}: {used[0]!r} was already used; restore into new tables, before any step"
            )
        chains = self.verify(folders)
        for store in self._stores.values():  # a save of these rows ends first
            with save_lock_of(store):
                pass
        is_new, self.is_whole = self.is_whole and not used, False
        if not is_new and self._renew is not None:
            slots = self._renew()
            self._first, self._engine = slots[0], slots[0].engine
            self._slots = {slot.table.name: slot for slot in slots}
            for slot in slots:  # in place: the caller may hold them
                self._stores[slot.table.name]._begin(slot)
        may_follow = self.fill(chains)
        self.is_whole = True
        return may_follow

    def verify(
        self,
        folders: Mapping[str, Sequence[_PathLike]],
        owned: Sequence[NDArray[np.bool_]] | None = None,
        checksums: Sequence[Sequence[int]] | None = None,
    ) -> Chains:
        """Open what `fill` reads; raise unless tables like these can be filled from it. Reads the files' bytes that
        the owned buckets need, each once: `fill` takes them from memory, where the system keeps what it has read.

        owned: for each table and each of its buckets, whether its rows are needed. None: all are.
        checksums: for each table and folder the `checksum_of` it that the caller sees.
        """
        if folders.keys() != self._stores.keys():
            raise InputError(f"{self._where}: folders are of {sorted(folders)}; expected one list for each table here")
        counts = [len(folders[name]) for name in self._stores]
        if checksums is not None and counts != [len(chain) for chain in checksums]:
            raise InputError(
                f"{self._where}: {counts} folders come with checksums of {[len(chain) for chain in checksums]}; "
                "expected one for each folder"
            )
        held = HeldBytes(is_new=not any(len(store) for store in self._stores.values()))
        total = _needed_bytes([folders[name] for name in self._stores], owned)
        with Transfer(
            _LOG, "verify", f"verification of the files of {self._where}", total=total, among=transfers_of(self)
        ):
            return {
                name: open_levels(
                    self._slots[name],
                    [folder_path(f"table {name!r}", folder) for folder in folders[name]],
                    held,
                    None if owned is None else owned[t],
                    None if checksums is None else checksums[t],
                )
                for t, name in enumerate(self._stores)
            }

    def fill(self, chains: Chains) -> bool:
        """Fill these tables, which must be new, from what `verify` returned; return what `restore` does."""
        total = sum(reader.bytes_read for levels in chains.values() for level in levels for reader in level)
        with Transfer(_LOG, "restore", f"restore of {self._where}", total=total, among=transfers_of(self)):
            self._engine.set_complete(False)  # a kill from here on leaves a shared-memory file that is refused
            for name, levels in chains.items():
                self._stores[name].fill(levels)
            self._engine.set_complete(True)
        return all(len(level) == 1 for levels in chains.values() for level in levels)

    @property
    def latest_step(self) -> int:
        """The largest step of any training lookup or update so far; 0 before the first."""
        return self._engine.latest_step

    def lookup(
        self,
        ids: ArrayLike,
        offsets: ArrayLike,
        *,
        train: bool = True,
        step: int | None = None,
        oldest_open: int | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Return the values of the ids' rows of all tables, table after table, in one flat float32 array.

        ids: as in `Store.lookup`; table t has ids[offsets[t]:offsets[t + 1]].
        offsets: int64 [tables + 1], rising from 0 to the number of ids.
        The other options are as in `Store.lookup`; `out` is flat, too.
        """
        return self._look_up(ids, offsets, train=train, step=step, oldest_open=oldest_open, out=out)[0]

    def lookup_by_table(self, ids: Mapping[str, NDArray[np.uint64]]) -> dict[str, NDArray[np.float32]]:
        """Return the values of rows by table, [ids, dim], without training, in one call."""
        given = [ids.get(name, _NO_IDS) for name in self]
        offsets = np.cumsum([0, *map(len, given)])
        rows = self.split(self.lookup(np.concatenate(given), offsets, train=False), offsets)
        return {name: of_table for name, of_table in zip(self, rows, strict=True) if name in ids}

    def lookup_for_update(
        self,
        ids: ArrayLike,
        offsets: ArrayLike,
        *,
        step: int | None = None,
        oldest_open: int | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.float32], Ticket]:
        """Return what `lookup` returns for training, and the batch's ticket for `update`."""
        return self._look_up(ids, offsets, train=True, step=step, oldest_open=oldest_open, out=out, with_ticket=True)

    def _look_up(self, ids: ArrayLike, offsets: ArrayLike, **options: Any) -> tuple[NDArray[np.float32], Any]:
        id_array, offset_array = array_args.as_ids(self._where, ids), self._offsets(offsets)
        shape = (self._engine.num_floats(offset_array, len(id_array)),)
        return look_up(self._where, self._first, id_array, offset_array, shape, **options)

    def prepare(self, ids: ArrayLike, offsets: ArrayLike) -> Ticket:
        """Return a ticket for an update of ids that were looked up without one."""
        id_array = array_args.as_ids(self._where, ids)
        return self._first.rows.prepare(id_array, self._offsets(offsets))

    def update(
        self, ticket: Ticket, gradients: ArrayLike, *, step: int | None = None, lrs: Mapping[str, float] | None = None
    ) -> None:
        """Apply each table's optimizer to the rows of a looked-up batch, once per id; see `Store.update`.

        gradients: flat float32, as long as what the lookup returned.
        lrs: learning rates of this update by table; tables not named use their own.
        """
        if not isinstance(ticket, Ticket):
            raise InputError(
                f"{self._where}: ticket is {kind_of(ticket)}; expected one from lookup_for_update or prepare"
            )
        for store in self._stores.values():
            require_frozen_ids(store.table)
        gradient_array = array_args.as_gradients(self._where, gradients, None)
        update(self._where, self._engine, ticket, gradient_array, step, self._lrs({} if lrs is None else lrs))

    def _offsets(self, offsets: ArrayLike) -> NDArray[np.int64]:
        return array_args.as_offsets(self._where, offsets, len(self) + 1, "one more than there are tables")

    def _lrs(self, lrs: Mapping[str, float]) -> list[float]:
        if not isinstance(lrs, Mapping):
            raise InputError(f"{self._where}: lrs is a {type(lrs).__name__}; expected a dict from a table's name to lr")
        unknown = lrs.keys() - self._stores.keys()
        if unknown:
            raise InputError(
                f"{self._where}: lrs names {sorted(map(str, unknown))}, which are not tables of this group"
            )
        return [
            array_args.as_lr(f"table {name!r}", lrs[name], store.table.optimizer) if name in lrs else store.lr
            for name, store in self._stores.items()
        ]

    def split(self, flat: NDArray[np.float32], offsets: ArrayLike) -> list[NDArray[np.float32]]:
        """Return each table's part of a lookup's result, or of gradients of that shape, as a view [n, dim]."""
        if not isinstance(flat, np.ndarray) or flat.ndim != 1:
            raise InputError(f"{self._where}: flat is a {type(flat).__name__}; expected an array of one dimension")
        offset_array = self._offsets(offsets)
        expected = self._engine.num_floats(offset_array, int(offset_array[-1]))
        if len(flat) != expected:
            raise InputError(
                f"{self._where}: flat holds {len(flat)} floats; expected the {expected} of a lookup with these offsets"
            )
        dims = [store.table.dim for store in self._stores.values()]
        parts = np.split(flat, np.cumsum(np.diff(offset_array) * dims)[:-1])
        return [part.reshape(-1, dim) for part, dim in zip(parts, dims, strict=True)]


def transfers_of(tables: TableGroup) -> Transfers:
    """Return saves, verifications and restores of these tables, for status and metrics."""
    return next(iter(tables._slots.values())).transfers


def _needed_bytes(chains: Sequence[Sequence[_PathLike]], owned: Sequence[NDArray[np.bool_]] | None) -> int:
    """Return about how many bytes of each table's snapshots the owned buckets need, 0 for a folder that is missing."""
    shares = [1.0] * len(chains) if owned is None else [float(mask.mean()) for mask in owned]
    paths = [
        [open_folder(location) for location in chain if isinstance(location, str | os.PathLike)] for chain in chains
    ]
    return sum(round(share * sum(map(folder_bytes, chain))) for share, chain in zip(shares, paths, strict=True))
