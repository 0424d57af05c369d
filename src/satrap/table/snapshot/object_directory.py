"""The folder of a snapshot under a URL, while a save writes into it: `SnapshotDirectory` without rename and lock.

No name is used twice: the data files and the manifest of a snapshot have its id, so that another save into the same
folder, also by a process that was replaced and does not know it, touches no object of this one. A snapshot counts once
`parts.json` names it. A save of a whole table writes that itself; a server writes only its part, and the trainer that
requested the save names the parts of all servers. What no record names is removed by the next save of the table, by
the trainer, or with the checkpoint.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from satrap.config.durable import checksum
from satrap.errors import SnapshotError
from satrap.storage.folder import Folder
from satrap.table.snapshot.directory import part_name, read_manifest, require_same_table
from satrap.table.snapshot.manifest import Manifest, Since, is_of_other, is_ours, object_name
from satrap.table.snapshot.parts_record import read_record, write_record
from satrap.table.snapshot.saved_table import SavedPart, read_parts


class ObjectDirectory:
    """A folder under a URL while a save writes into it. Leaving the `with` block before `commit` removes what was
    written."""

    def __init__(
        self, folder: Folder, token: str, config: dict[str, Any], seed: int, since: Since | None, *, is_part: bool
    ) -> None:
        """token: the new snapshot's id. config, seed: of its table. since: the snapshot that its changes start at.
        is_part: whether it is one of several parts."""
        self._folder, self._token = folder, token
        self._config, self._seed, self._since = config, seed, since
        self._is_part = is_part
        self._replaces = self._may_be_committed = False

    def __enter__(self) -> Self:
        if not self._is_part and (record := read_record(self._folder)) is not None:
            self._replaces = True
            if [part["folder"] for part in record] != [""]:
                raise SnapshotError(f"{self._folder} holds parts that servers saved; give another folder")
            require_same_table(read_manifest(self._folder), self._folder, self._config, self._seed, self._since)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a kill nothing can be removed, so nothing depends on it.
        if not self._may_be_committed and (kind is None or issubclass(kind, Exception)):
            self._sweep(lambda name: self._token in name)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, whose data files were uploaded already; then names it, unless it is a part."""
        data = manifest.to_json()
        self._folder.write(object_name(self._token), data)
        self._may_be_committed = True
        if not self._is_part:
            write_record(self._folder, [SavedPart.of("", manifest, checksum(data)).to_dict()])
            if self._replaces:
                self._sweep(lambda name: is_of_other(name, [self._token]))

    def _sweep(self, unwanted: Callable[[str], bool]) -> None:
        with suppress(OSError):  # what is left costs space only
            for name in self._folder.names():
                if is_ours(name) and unwanted(name):
                    self._folder.delete(name)


def name_parts(folder: Folder, ids: Sequence[str]) -> int:
    """Make the snapshots with these ids the parts that the folder holds, in the order of their servers; deletes what
    other saves have left in it. Returns the bytes of the parts' files."""
    places = [(folder / part_name(i, len(ids)), part_id) for i, part_id in enumerate(ids)]
    parts = read_parts(folder, [(path, object_name(part_id)) for path, part_id in places])
    write_record(folder, [part.record.to_dict() for part in parts])
    with suppress(OSError):  # what is left costs space only
        for key in folder.sizes():
            if is_of_other(key.rpartition("/")[2], ids):
                folder.delete(key)
    return sum(file.bytes for part in parts for file in part.manifest.files)
