"""The tables of a job on servers, with the interface of `Store` and `Tables` as far as no row must move for it.

The servers save: each writes a snapshot of its buckets into a subfolder "k-of-n" of the table's folder. To restore,
each server reads all parts and keeps the buckets that it owns now. So all machines must share the folder.
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
    """One table of a job on servers, with the interface of `Store` as far as no row must move for it."""

    def __init__(self, servers: ServerGroup, number: int) -> None:
        self.table: Table = servers.job.tables[number]
        """The table's configuration."""
        self._servers, self._number = servers, number

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
        values, state, present = self._call_owners("read", ids, lambda part: (self._number, part))
        return StoredRows(values, state, present.reshape(-1))

    def lookup(self, ids: ArrayLike, *, train: Literal[False]) -> NDArray[np.float32]:
        """Return rows as `Store.lookup` does without training, never rounded. Training goes through a worker."""
        if train is not False:
            raise InputError(
                f"table {self.table.name!r}: train is {train!r}; rows on servers are trained by a stream only"
            )
        num_tables = len(self._servers.job.tables)

        def arguments(part: NDArray[np.uint64]) -> tuple[Any, ...]:
            offsets = np.zeros(num_tables + 1, np.int64)
            offsets[self._number + 1 :] = len(part)
            return part, offsets, 0, False, 0

        rows: NDArray[np.float32] = self._call_owners("lookup", ids, arguments)[0]
        return rows.reshape(-1, self.table.dim)

    def _call_owners(
        self, method: str, ids: ArrayLike, arguments: Callable[[NDArray[np.uint64]], tuple[Any, ...]]
    ) -> list[NDArray[Any]]:
        """Return what the ids' owners answer: arrays with one line for each id, in the order of the ids."""
        unsigned_ids = array_args.as_ids(f"table {self.table.name!r}", ids)
        while True:
            topology = self._servers.topology
            owners = np.array(topology.shard_map.bucket_map.owners[self._number], np.uint32)
            owner = owners[_core.bucket_of(unsigned_ids, self.table.resolved_num_buckets)]
            order = np.argsort(owner, kind="stable")
            parts = np.split(unsigned_ids[order], np.searchsorted(owner[order], np.arange(1, len(topology))))
            arguments_by_server = {server: arguments(part) for server, part in enumerate(parts)}
            try:
                found = self._servers.call_servers(method, 0, arguments_by_server, topology=topology)
                break
            except MovedError:
                continue
        lines = []
        for answers in zip(*(found[server] for server in arguments_by_server), strict=True):
            if answers[0] is None:  # a lookup's rows in the form that was not requested
                continue
            flat = np.concatenate(answers)
            lines_by_server = flat.reshape(len(unsigned_ids), len(flat) // max(1, len(unsigned_ids)))
            lines.append(np.empty_like(lines_by_server))
            lines[-1][order] = lines_by_server
        return lines

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
        folder = os.path.abspath(path)
        self._servers.begin_attempt()
        self._servers.require_reachable()  # all servers, before one of them writes
        versions = self._save_parts(folder, since)
        while len(set(versions)) != 1:
            versions = self._save_parts(folder, since)
        if len(parts_of(Path(folder))) != len(versions) or not (Path(folder) / part_name(0, len(versions))).is_dir():
            raise SnapshotError(
                f"table {self.table.name!r}: the servers wrote their parts to {folder} and this process does not see "
                "them: name a folder that all machines share"
            )
        return int(versions[0])

    def _save_parts(self, folder: str, since: int | None) -> list[int]:
        """Let each server save its part, and return their versions. If they are none or differ, the save must be
        repeated: buckets moved meanwhile, so that some were not saved, or a server answered with the version of an
        earlier save."""
        topology = self._servers.topology
        servers = range(len(topology))
        try:
            versions = self._servers.call_servers(
                "version", 0, dict.fromkeys(servers, (self._number,)), topology=topology
            )
            version = 1 + max(versions.values())  # servers that joined later have lower versions
            arguments_by_server = dict.fromkeys(servers, (self._number, folder, since, version))
            answers = self._servers.call_servers("save", 0, arguments_by_server, topology=topology, patient=True)
        except MovedError:
            if len(self._servers.topology) != len(topology):
                for server in servers:
                    shutil.rmtree(Path(folder) / part_name(server, len(topology)), ignore_errors=True)
            return []
        return [answers[server] for server in servers]


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
    def map_version(self) -> int:
        """The version of the bucket map, as in `Tables.layout`."""
        return self._servers.topology.shard_map.version

    def require_permitted(self, folder: str | os.PathLike[str]) -> None:
        """Raise ConfigError unless all servers may write checkpoints below the folder."""
        self._servers.call_all("require_permitted", os.path.abspath(folder))

    def restore(self, folders: Mapping[str, Sequence[str | os.PathLike[str]]]) -> bool:
        """Restore as `Tables.restore` does. The tables may have been used; their rows are discarded."""
        if folders.keys() != self._tables.keys():
            raise InputError(f"folders are of {sorted(folders)}; expected one list for each of {sorted(self._tables)}")
        chains = [[os.path.abspath(folder) for folder in folders[name]] for name in self._tables]
        checksums = [[checksum_of(Path(folder)) for folder in chain] for chain in chains]
        self._servers.begin_attempt()
        self._servers.require_reachable()
        self._servers.call_all("verify", chains, checksums, patient=True)  # on all servers, before one is changed
        return self._replace_rows(chains, checksums)

    def clear(self) -> None:
        """Replace all tables by empty ones."""
        self._servers.require_reachable()
        self._replace_rows([], [])

    def _replace_rows(self, chains: list[list[str]], checksums: list[list[int]]) -> bool:
        self._servers.begin_next_attempt()  # so that a duplicate of the restore is known as such
        may_follow = all(self._servers.call_all("restore", chains, checksums, patient=True))
        self._servers.latest_step = 0
        return may_follow
