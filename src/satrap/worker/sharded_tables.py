"""The tables of a job on servers, with the interface of `Store` and `TableGroup` as far as no row must move for it.

The servers save: each writes a snapshot of its buckets into a subfolder "k-of-n" of the table's folder. To restore,
each server reads what its buckets need of all parts. So all machines must share the folder, or it is a URL.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap.config import array_args
from satrap.config.tables import Table
from satrap.config.validation import ByName
from satrap.errors import ChangesError, InputError, SatrapError
from satrap.hidden_names import internal
from satrap.sharding.owner_split import OwnedIds
from satrap.storage.open_folder import absolute, open_folder
from satrap.table.engine import state_dim
from satrap.table.snapshot.cut import OLD_ROWS_BYTES
from satrap.table.snapshot.directory import folder_bytes
from satrap.table.snapshot.saved_table import checksum_of
from satrap.table.store import StoredRows, parts_of
from satrap.table.written_rows import WrittenRows, as_rows, is_bounded, require_room
from satrap.transfer import Transfer, advance
from satrap.worker.server_group import ServerGroup, Topology
from satrap.worker.sharded_cut import ShardedCut

_LOG = logging.getLogger("satrap.worker")
_NO_IDS = np.zeros(0, np.uint64)
_WRITE_BYTES = 16 << 20  # values in one message


class ShardedTable:
    """One table of a job on servers, with the interface of `Store` as far as no row must move for it."""

    def __init__(self, servers: ServerGroup, number: int) -> None:
        self.table: Table = servers.job.tables[number]
        """The table's configuration."""
        self._servers, self._number = servers, number
        self._state_dim = state_dim(self.table)

    def __repr__(self) -> str:
        return f"ShardedTable({self.table.name!r}, dim={self.table.dim})"  # the number of rows takes calls

    def __len__(self) -> int:
        return self.stats()["rows"]

    def stats(self) -> dict[str, int]:
        """Return `Store.stats` summed over the servers; "skipped" counts this process's, which no server knows."""
        total: Counter[str] = Counter(skipped=self._servers.num_skipped[self._number])
        for stats in self._servers.call_all("stats", self._number):
            total.update(stats)
        return dict(total)

    def read(self, ids: ArrayLike) -> StoredRows:
        """Return what `Store.read` does."""
        unsigned_ids = array_args.as_ids(f"table {self.table.name!r}", ids)
        n = len(unsigned_ids)
        rows = StoredRows(
            np.empty((n, self.table.dim), np.float32), np.empty((n, self._state_dim), np.float32), np.empty(n, np.bool_)
        )
        parts = self._servers.call_owners(
            "read", 0, unsigned_ids, self._offsets(n), lambda part: (self._number, part.ids)
        )
        for part, (values, state, present) in parts:
            rows.values[part.positions] = values.reshape(-1, self.table.dim)
            rows.state[part.positions] = state.reshape(len(part.ids), self._state_dim)
            rows.present[part.positions] = present
        return rows

    def write(self, ids: ArrayLike, values: ArrayLike, state: ArrayLike | None = None) -> None:
        """Insert or replace rows as `Store.write` does; several trainers may each write a part. Each server writes a
        row once, however often messages are lost or repeated. If a server fails, a part may be written: call it again.
        A checkpoint that is saved after the call has the rows."""
        rows = as_rows(self.table, self._state_dim, ids, values, state)
        self._servers.begin_attempt()
        if self._servers.latest_step:
            raise InputError(
                f"table {self.table.name!r}: the servers hold rows of an earlier run, trained up to step "
                f"{self._servers.latest_step}: resume its checkpoint, or remove them with embeddings.tables.clear(), "
                "before you write"
            )
        if is_bounded(self.table):
            self._require_room(rows.ids)
        step = max(1, _WRITE_BYTES // (4 * self.table.dim))
        for begin in range(0, len(rows.ids), step):
            self._write(rows, slice(begin, begin + step))

    def _require_room(self, ids: NDArray[np.uint64]) -> None:
        """Raise CapacityError if the servers have no room for all the rows, before one of them writes some."""
        parts = self._servers.call_owners(
            "rows_with", 0, ids, self._offsets(len(ids)), lambda part: (self._number, part.ids)
        )
        require_room(self.table, np.sum([counts for _, counts in parts], axis=0))

    def _write(self, rows: WrittenRows, chosen: slice) -> None:
        """Send some of the rows."""
        ids, state = rows.ids[chosen], np.zeros((0, 0), np.float32) if rows.state is None else rows.state[chosen]

        def arguments(part: OwnedIds) -> tuple[Any, ...]:
            values = rows.values[chosen][part.positions].reshape(-1)
            of_part = state if rows.state is None else state[part.positions]
            return self._number, part.ids, values, of_part.reshape(-1), rows.state is not None

        with self._servers.next_write() as number:
            self._servers.call_owners("write", number, ids, self._offsets(len(ids)), arguments)

    def ids(self) -> NDArray[np.uint64]:
        """Return the ids of all rows, as `Store.ids` does."""
        return np.concatenate([self._bucket_ids(bucket) for bucket in range(self.table.resolved_num_buckets)])

    def rows(self) -> Iterator[tuple[NDArray[np.uint64], StoredRows]]:
        """Yield all rows, as `Store.rows` does."""
        for bucket in range(self.table.resolved_num_buckets):
            yield from parts_of(self.read, self.table.dim, self._bucket_ids(bucket))

    def _bucket_ids(self, bucket: int) -> NDArray[np.uint64]:
        before = sum(table.resolved_num_buckets for table in self._servers.job.tables[: self._number])

        def call(topology: Topology) -> NDArray[np.uint64]:
            calls = {int(topology.owners[before + bucket]): (self._number, bucket)}
            (ids,) = self._servers.call_servers("bucket_ids", 0, calls, topology=topology).values()
            return ids  # type: ignore[no-any-return]

        return self._servers.follow(call)

    def lookup(self, ids: ArrayLike, *, train: Literal[False]) -> NDArray[np.float32]:
        """Return rows as `Store.lookup` does without training, never rounded. Training goes through a worker."""
        if train is not False:
            raise InputError(
                f"table {self.table.name!r}: train is {train!r}; rows on servers are trained by a stream or a module"
            )
        unsigned_ids = array_args.as_ids(f"table {self.table.name!r}", ids)
        return _look_up(self._servers, {self._number: unsigned_ids})[self._number]

    def _offsets(self, n: int) -> NDArray[np.int64]:
        offsets = np.zeros(len(self._servers.job.tables) + 1, np.int64)
        offsets[self._number + 1 :] = n
        return offsets

    @property
    def lr(self) -> float:
        """The table's learning rate, as in `Store.lr`."""
        return self._servers.lrs[self._number]

    def set_lr(self, lr: float) -> None:
        """Set the table's learning rate, as `Store.set_lr` does."""
        rate = array_args.as_lr(f"table {self.table.name!r}", lr, self.table.optimizer)
        self._servers.begin_attempt()
        self._servers.call_all("set_lr", self._number, rate)
        self._servers.lrs[self._number] = rate

    def check(self) -> None:
        """Check the table's invariants on all servers, as `Store.check` does."""
        self._servers.call_all("check", self._number, patient=True)

    @property
    def version(self) -> int:
        """The version of the last save, as in `Store.version`; servers save together."""
        return int(max(self._servers.call_all("version", self._number)))

    def save(self, path: str | os.PathLike[str]) -> int:
        """Save as `Store.save` does: each server writes its part into the folder, which all machines must share."""
        return self._save(path, None)

    def save_changes(self, path: str | os.PathLike[str], *, since: int) -> int:
        """Save the changes as `Store.save_changes` does."""
        return self._save(path, since)

    def _save(self, path: str | os.PathLike[str], since: int | None) -> int:
        name = self.table.name
        self._servers.begin_attempt()
        self._servers.require_reachable()  # all servers, before one of them writes
        while True:
            cut = ShardedCut(self._servers, [self._number], None if since is None else {name: since}, OLD_ROWS_BYTES)
            if since is not None and not cut.changes_known:
                cut.release()
                raise ChangesError(
                    f"table {name!r}: the servers do not know all changes since version {since}: give the version of a "
                    "save after the last change of the servers, or save the whole table"
                )
            try:
                cut.write({name: path}, is_full=since is None, is_beside=False)
                return cut.versions[name]
            except SatrapError as error:
                cut.release()  # so that the next save does not wait for it
                if since is not None or not isinstance(error, ChangesError):
                    raise  # else a server was restarted, or buckets have migrated


def _look_up(servers: ServerGroup, ids: Mapping[int, NDArray[np.uint64]]) -> dict[int, NDArray[np.float32]]:
    """Return rows, [ids, dim], by the number of their table, without training, in one call to each server."""
    tables = servers.job.tables
    given = [ids.get(number, _NO_IDS) for number in range(len(tables))]
    offsets = np.cumsum([0, *map(len, given)])
    rows = {number: np.empty((len(of_table), tables[number].dim), np.float32) for number, of_table in ids.items()}
    parts = servers.call_owners(
        "lookup", 0, np.concatenate(given), offsets, lambda part: (part.ids, part.offsets, 0, False, 0)
    )
    for part, (flat, _) in parts:
        end = 0
        for number in sorted(ids):
            lines = part.positions[slice(*part.offsets[number : number + 2])] - offsets[number]
            begin, end = end, end + len(lines) * tables[number].dim
            rows[number][lines] = flat[begin:end].reshape(-1, tables[number].dim)
    return rows


@internal("is_whole keeps_cuts map_version require_permitted restore take_cut")
class ShardedTables(Mapping[str, ShardedTable]):
    """The tables of a job on servers, by name."""

    is_whole = True
    """False once a restore has failed after it had begun to change these tables."""

    def __init__(self, servers: ServerGroup) -> None:
        self._servers = servers
        tables = {table.name: ShardedTable(servers, t) for t, table in enumerate(servers.job.tables)}
        self._tables = ByName("table", tables)

    def __getitem__(self, name: str) -> ShardedTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return f"ShardedTables({', '.join(self._tables)})"

    def lookup_by_table(self, ids: Mapping[str, NDArray[np.uint64]]) -> dict[str, NDArray[np.float32]]:
        """Return rows of several tables as `ShardedTable.lookup` does of one, in one call to each server."""
        numbers = {number: ids[name] for number, name in enumerate(self._tables) if name in ids}
        names = list(self._tables)
        return {names[number]: rows for number, rows in _look_up(self._servers, numbers).items()}

    @property
    def map_version(self) -> int:
        """The version of the bucket map, as `TableGroup.map_version` is for rows of one process."""
        return self._servers.topology.shard_map.version

    keeps_cuts = True
    """Whether training may continue while a cut is written."""

    def take_cut(self, since: Mapping[str, int] | None = None, *, memory: int = OLD_ROWS_BYTES) -> ShardedCut:
        """Take the cut of all tables on all servers, as `TableGroup.take_cut` does. No trainer may train meanwhile."""
        return ShardedCut(self._servers, range(len(self._tables)), since, memory)

    def require_permitted(self, folder: str | os.PathLike[str]) -> None:
        """Raise ConfigError unless all servers may write checkpoints below the folder."""
        self._servers.call_all("require_permitted", absolute(folder))

    def restore(self, folders: Mapping[str, Sequence[str | os.PathLike[str]]]) -> bool:
        """Restore as `TableGroup.restore` does. The tables may have been used; their rows are discarded."""
        if folders.keys() != self._tables.keys():
            raise InputError(f"folders are of {sorted(folders)}; expected one list for each of {sorted(self._tables)}")
        chains = [[absolute(folder) for folder in folders[name]] for name in self._tables]
        checksums = [[checksum_of(folder) for folder in chain] for chain in chains]
        self._servers.begin_attempt()
        self._servers.require_reachable()
        num_bytes = sum(folder_bytes(open_folder(folder)) for chain in chains for folder in chain)
        with Transfer(_LOG, "verify", "verification of the files by the servers"):  # by all, before one is changed
            self._servers.call_all("verify", chains, checksums, patient=True)
        with Transfer(_LOG, "restore", "restore of rows by the servers"):
            may_follow = self._replace_rows(chains, checksums)
            advance(num_bytes)
        return may_follow

    def clear(self) -> None:
        """Replace all tables by empty ones."""
        self._servers.require_reachable()
        self._replace_rows([], [])

    def _replace_rows(self, chains: list[list[str]], checksums: list[list[int]]) -> bool:
        self._servers.begin_next_attempt()  # so that a duplicate of the restore is known as such
        self.is_whole = False
        may_follow = all(self._servers.call_all("restore", chains, checksums, patient=True))
        self.is_whole, self._servers.latest_step = True, 0
        return may_follow
