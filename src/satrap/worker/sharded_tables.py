"""The tables of a job on servers: what `Store` and `Tables` are for tables here, as far as no row must be moved for it.

Saving is the servers' own: each writes the buckets that it owns, as a snapshot in a folder "k-of-n" within the table's,
and reads of anybody's what it owns now. So the folder must be one that all machines share.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap import _core
from satrap.config import array_args
from satrap.config.tables import Table
from satrap.errors import InputError, MovedError, SnapshotError
from satrap.table.snapshot.directory import part_name, parts_of
from satrap.table.snapshot.saved_table import checksum_of
from satrap.table.store import StoredRows
from satrap.worker.server_group import ServerGroup


class ShardedTable:
    """One table of a job on servers: what `Store` is for a table here, as far as no row must be moved for it."""

    def __init__(self, servers: ServerGroup, number: int) -> None:
        self.table: Table = servers.job.tables[number]
        """Its configuration."""
        self._servers, self._number = servers, number

    def __len__(self) -> int:
        return self.stats()["rows"]

    def stats(self) -> dict[str, int]:
        """As `Store.stats`, of all servers together; skipped are those of this process, which alone knows of them."""
        total: Counter[str] = Counter(skipped=self._servers.skipped[self._number])
        for stats in self._servers.all("stats", self._number):
            total.update(stats)
        return dict(total)

    def read(self, ids: ArrayLike) -> StoredRows:
        """As `Store.read`."""
        values, state, present = self._asked("read", ids, lambda part: (self._number, part))
        return StoredRows(values, state, present.reshape(-1))

    def lookup(self, ids: ArrayLike, *, train: Literal[False]) -> NDArray[np.float32]:
        """As `Store.lookup` without training, which is the `RemoteWorker`'s. Like `read` never rounded."""
        if train is not False:
            raise InputError(f"table {self.table.name!r}: train is {train!r}; rows on servers are trained by a stream")
        num_tables = len(self._servers.job.tables)

        def arguments(part: NDArray[np.uint64]) -> tuple[Any, ...]:
            offsets = np.zeros(num_tables + 1, np.int64)
            offsets[self._number + 1 :] = len(part)
            return part, offsets, 0, False, 0

        rows: NDArray[np.float32] = self._asked("lookup", ids, arguments)[0]
        return rows.reshape(-1, self.table.dim)

    def _asked(
        self, method: str, ids: ArrayLike, arguments: Callable[[NDArray[np.uint64]], tuple[Any, ...]]
    ) -> list[NDArray[Any]]:
        """What the ids' owners answer: of each array a line for each id, in the order of the ids."""
        wanted = array_args.as_ids(f"table {self.table.name!r}", ids)
        while True:
            view = self._servers.view
            owners = np.array(view.members.bucket_map.owners[self._number], np.uint32)
            owner = owners[_core.bucket_of(wanted, self.table.resolved_num_buckets)]
            order = np.argsort(owner, kind="stable")
            parts = np.split(wanted[order], np.searchsorted(owner[order], np.arange(1, len(view))))
            asked = {server: arguments(part) for server, part in enumerate(parts)}
            try:
                found = self._servers.each(method, 0, asked, view=view)
                break
            except MovedError:
                continue
        lines = []
        for of_servers in zip(*(found[server] for server in asked), strict=True):
            if of_servers[0] is None:  # of a lookup: rows in the form that was not asked for
                continue
            flat = np.concatenate(of_servers)
            of_servers_in_turn = flat.reshape(len(wanted), len(flat) // max(1, len(wanted)))
            lines.append(np.empty_like(of_servers_in_turn))
            lines[-1][order] = of_servers_in_turn
        return lines

    @property
    def lr(self) -> float:
        """As `Store.lr`."""
        return self._servers.lrs[self._number]

    def set_lr(self, lr: float) -> None:
        """As `Store.set_lr`."""
        rate = array_args.as_lr(f"table {self.table.name!r}", lr, self.table.optimizer)
        self._servers.begin()
        self._servers.all("set_lr", self._number, rate)
        self._servers.lrs[self._number] = rate

    def check(self) -> None:
        """As `Store.check`."""
        self._servers.all("check", self._number, patient=True)

    @property
    def version(self) -> int:
        """As `Store.version`: the servers save together."""
        return int(max(self._servers.all("version", self._number)))

    def save(self, path: str | os.PathLike[str]) -> int:
        """As `Store.save`: each server writes its part into the folder, which all machines must share."""
        return self._save(path, None)

    def save_changes(self, path: str | os.PathLike[str], *, since: int) -> int:
        """As `Store.save_changes`."""
        return self._save(path, since)

    def _save(self, path: str | os.PathLike[str], since: int | None) -> int:
        folder = os.path.abspath(path)
        self._servers.begin()
        self._servers.reach()  # before one of them writes
        versions = self._parts_saved(folder, since)
        while len(set(versions)) != 1:
            versions = self._parts_saved(folder, since)
        if len(parts_of(Path(folder))) != len(versions) or not (Path(folder) / part_name(0, len(versions))).is_dir():
            raise SnapshotError(
                f"table {self.table.name!r}: the servers wrote their parts to {folder} and this process does not see "
                "them: give a folder that all machines share"
            )
        return int(versions[0])

    def _parts_saved(self, folder: str, since: int | None) -> list[int]:
        """The version that each server has made. None at all, or different ones: buckets moved meanwhile, so that not
        all of them are saved, or a server was told of a version by one that had made it before."""
        view = self._servers.view
        every = range(len(view))
        try:
            made = self._servers.each("version", 0, dict.fromkeys(every, (self._number,)), view=view)
            version = 1 + max(made.values())  # servers that came later have made fewer
            asked = dict.fromkeys(every, (self._number, folder, since, version))
            found = self._servers.each("save", 0, asked, view=view, patient=True)
        except MovedError:
            if len(self._servers.view) != len(view):
                for server in every:
                    shutil.rmtree(Path(folder) / part_name(server, len(view)), ignore_errors=True)
            return []
        return [found[server] for server in every]


class ShardedTables(Mapping[str, ShardedTable]):
    """The tables of a job on servers, by name."""

    def __init__(self, servers: ServerGroup) -> None:
        self._servers = servers
        self._tables = {table.name: ShardedTable(servers, t) for t, table in enumerate(servers.job.tables)}

    def __getitem__(self, name: str) -> ShardedTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def layout(self) -> int:
        """As `Tables.layout`."""
        return self._servers.view.members.version

    def require_permitted(self, folder: str | os.PathLike[str]) -> None:
        """Raises ConfigError unless all servers may write checkpoints below the folder."""
        self._servers.all("require_permitted", os.path.abspath(folder))

    def restore(self, folders: Mapping[str, Sequence[str | os.PathLike[str]]]) -> bool:
        """As `Tables.restore`, but the tables may have been used: what they held goes."""
        if folders.keys() != self._tables.keys():
            raise InputError(f"folders are of {sorted(folders)}; wanted one list for each of {sorted(self._tables)}")
        chains = [[os.path.abspath(folder) for folder in folders[name]] for name in self._tables]
        checksums = [[checksum_of(Path(folder)) for folder in chain] for chain in chains]
        self._servers.begin()
        self._servers.reach()
        self._servers.all("verify", chains, checksums, patient=True)  # all of them, before one is changed
        return self._begin_anew(chains, checksums)

    def clear(self) -> None:
        """Makes all tables new: what they held goes."""
        self._servers.reach()
        self._begin_anew([], [])

    def _begin_anew(self, chains: list[list[str]], checksums: list[list[int]]) -> bool:
        self._servers.begin_next()  # so that a restore that comes twice is done once
        may_follow = all(self._servers.all("restore", chains, checksums, patient=True))
        self._servers.latest_step = 0
        return may_follow
