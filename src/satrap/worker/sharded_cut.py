"""Tables of a job on servers at a cut: what `satrap.table.group_cut.GroupCut` is for tables of one engine.

All servers take the cut and write it at the same time, each its buckets. For a checkpoint it is the cut of all tables,
taken while no trainer trains; a table that is saved alone has a cut for itself.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from satrap.errors import ChangesError, MovedError, SatrapError, SnapshotError
from satrap.storage.folder import Folder
from satrap.storage.open_folder import absolute, open_folder
from satrap.table.snapshot.directory import folder_bytes, part_name, parts_in, parts_of
from satrap.table.snapshot.object_directory import name_parts
from satrap.transfer import advance
from satrap.worker.server_group import ServerGroup, Topology


class ShardedCut:
    """Tables on servers as they were at one moment, until they are written or released."""

    def __init__(
        self, servers: ServerGroup, tables: Sequence[int], since: Mapping[str, int] | None, memory: int
    ) -> None:
        """tables: their numbers in the job. memory: most bytes of old rows on each server."""
        self._servers, self._tables = servers, list(tables)
        self._names = [servers.job.tables[table].name for table in tables]
        self._since = None if since is None else [since[name] for name in self._names]
        self._memory = memory
        servers.begin_attempt()
        while not servers.follow(self._take):
            pass

    def _take(self, topology: Topology) -> bool:
        """Take the cut of all servers under one bucket map. Return False if one of them has learned of a later version
        of a table since it named its own."""
        self._number, self._topology = 1 + secrets.randbits(62), topology
        call = partial(self._servers.call_servers, step=0, topology=topology)
        everywhere = range(len(topology))
        known = call("versions", arguments=dict.fromkeys(everywhere, ()))
        newest = [max(of_table) for of_table in zip(*known.values(), strict=True)]  # servers that joined are behind
        self._versions = [1 + newest[table] for table in self._tables]
        arguments = (self._number, self._tables, self._versions, self._since, self._memory)
        try:
            answers = call("take_cut", arguments=dict.fromkeys(everywhere, arguments), patient=True)
        except (MovedError, ChangesError) as error:
            self.release()  # on the servers that have taken it
            if isinstance(error, ChangesError):
                return False
            raise
        self.changes_known: bool = self._since is not None and all(answers.values())
        """Whether the changes since the versions that the cut was given can be written."""
        return True

    @property
    def versions(self) -> dict[str, int]:
        """Each table's version in this cut."""
        return dict(zip(self._names, self._versions, strict=True))

    @property
    def map_version(self) -> int:
        """The version of the bucket map at the cut."""
        return self._topology.shard_map.version

    def write(
        self, folders: Mapping[str, str | os.PathLike[str]], *, is_full: bool, is_beside: bool = True
    ) -> dict[str, int]:
        """Let each server write its part of each table; return how many rows each table had. ChangesError if a server
        no longer has the cut: take another one, and write it in full."""
        paths = [absolute(folders[name]) for name in self._names]
        calls = dict.fromkeys(range(len(self._topology)), (self._number, paths, is_full, is_beside))
        try:
            answers = self._servers.call_servers("write_cut", 0, calls, topology=self._topology, patient=True)
        except MovedError as error:
            raise ChangesError(f"buckets have migrated since the cut was taken ({error}); save again") from error
        by_server = zip(*(answers[server] for server in calls), strict=True)
        rows, ids = (list(zip(*records, strict=True)) for records in by_server)  # by table
        for t, name in enumerate(self._names):
            folder = open_folder(paths[t])
            for part in parts_in(folder) if folder.is_local else ():
                if not part.name.endswith(f"-of-{len(ids[t])}"):  # an earlier try wrote it, under another map
                    part.delete_all()
            _count_parts(name, folder, ids[t])
        return {name: sum(of_table) for name, of_table in zip(self._names, rows, strict=True)}

    def release(self) -> None:
        """Give the cut up, unless it was written. A server that cannot be reached gives it up after some time."""
        arguments = dict.fromkeys(range(len(self._topology)), (self._number,))
        with suppress(SatrapError):
            self._servers.call_servers("release_cut", 0, arguments, topology=self._topology)


def _count_parts(table: str, folder: Folder, ids: Sequence[str]) -> None:
    """Count the bytes of the parts that the servers wrote of a table, and under a URL record which these are. Raise
    SnapshotError unless this process sees them. ids: of the snapshots, by server."""
    if not folder.is_local:
        advance(name_parts(folder, ids))
        return
    if len(parts_of(folder)) != len(ids) or not os.path.isdir(folder / part_name(0, len(ids))):
        raise SnapshotError(
            f"table {table!r}: the servers wrote their parts to {folder} and this process does not see them: name a "
            "folder that all machines share"
        )
    advance(folder_bytes(folder))
