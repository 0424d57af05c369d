"""A checkpoint's record of a table: which snapshots it was saved as, in which folders, and how many rows it has.

A folder of another checkpoint, or of another server, is as whole as the one that belongs there, and of the same table:
only this record tells the two apart.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from satrap.config.cores import in_threads
from satrap.config.durable import checksum
from satrap.config.validation import Serializable
from satrap.errors import ConfigError, SnapshotError
from satrap.storage.folder import Folder
from satrap.storage.open_folder import open_folder
from satrap.table.snapshot.directory import part_name, parts_of, read_manifest_with_checksum
from satrap.table.snapshot.manifest import FILE_NAME, Manifest, object_name
from satrap.table.snapshot.parts_record import read_record

_READS_AT_A_TIME = 16
"""Manifests under a URL that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart(Serializable):
    """One snapshot: of the whole table, or of one server's buckets."""

    folder: str
    """"k-of-n" within the table's folder; "": the table's folder itself."""
    id: str
    """The snapshot's id."""
    version: int
    """The version of the table that it holds."""
    rows: int
    """Number of lines in its rows files."""
    crc32c: int
    """Checksum of all bytes of its manifest, which holds the checksums of the other files."""

    @classmethod
    def of(cls, folder: str, manifest: Manifest, crc32c: int) -> Self:
        """Return the record of the snapshot with this manifest, whose bytes have this checksum."""
        return cls(folder=folder, id=manifest.id, version=manifest.version, rows=manifest.rows, crc32c=crc32c)

    def __str__(self) -> str:
        return f"snapshot {self.id} of version {self.version} with {self.rows} rows, manifest of crc32c {self.crc32c}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTable(Serializable):
    """One table of a checkpoint."""

    rows: int
    """Rows that the table had: more than these files hold, if they are changes."""
    parts: tuple[SavedPart, ...]
    """The snapshots, in the order of their servers."""

    @classmethod
    def from_folder(cls, folder: Folder, rows: int) -> Self:
        """Return the record of the snapshots that a folder holds, for a table with that many rows."""
        record = None if folder.is_local else read_record(folder)  # whose writer has read the manifests
        return cls(rows=rows, parts=saved_parts(folder) if record is None else tuple(map(SavedPart.from_dict, record)))

    def require(self, folder: Folder, checkpoint: str) -> None:
        """Raise unless the folder holds exactly these snapshots."""
        expected = {part.folder: part for part in self.parts}
        saved = {part.folder: part for part in saved_parts(folder)}
        if expected.keys() != saved.keys():
            raise SnapshotError(
                f"{folder} holds the parts {', '.join(map(repr, saved))}; {checkpoint} was saved with "
                f"{', '.join(map(repr, expected))}: put those back, or remove {checkpoint} to use an older one"
            )
        for name, part in expected.items():
            if saved[name] != part:
                path = folder / name if name else folder
                raise SnapshotError(
                    f"{path} is not what {checkpoint} was saved with, but {saved[name]}; expected {part}: it "
                    f"comes from another checkpoint or was changed; put the right one back, or remove {checkpoint} to "
                    "use an older one"
                )

    def __post_init__(self) -> None:
        numbers = [self.rows, *(number for part in self.parts for number in (part.version, part.rows, part.crc32c))]
        if not self.parts or not all(type(number) is int and number >= 0 for number in numbers):
            raise ConfigError(
                f"a table has {len(self.parts)} parts and the numbers {numbers}; expected parts, and integers from 0"
            )
        folders = [part.folder for part in self.parts]
        if folders not in ([""], [part_name(i, len(folders)) for i in range(len(folders))]):
            raise ConfigError(f"a table has the parts {folders}; expected those of one save, in order")


class FoundPart(NamedTuple):
    """One snapshot of a table's folder, whose data files have not been opened yet."""

    path: Folder
    manifest: Manifest
    record: SavedPart


def find_parts(folder: Folder) -> list[FoundPart]:
    """Read the manifests of a table's folder, each once; raise unless all parts of one save are there."""
    record = read_record(folder)
    if record is None:
        manifests = [(path, FILE_NAME) for path in parts_of(folder)]
    else:
        manifests = [
            (folder / part["folder"] if part["folder"] else folder, object_name(part["id"])) for part in record
        ]

    return read_parts(folder, manifests)


def read_parts(folder: Folder, manifests: Sequence[tuple[Folder, str]]) -> list[FoundPart]:
    """Read the manifests of a table's parts: objects of these names in these folders, the table's own or within it."""

    def read(place: tuple[Folder, str]) -> FoundPart:
        path, name = place
        manifest, number = read_manifest_with_checksum(path, name)
        return FoundPart(path, manifest, SavedPart.of("" if path == folder else path.name, manifest, number))

    return in_threads(1 if folder.is_local else _READS_AT_A_TIME, read, manifests, "satrap-manifests")


def saved_parts(folder: Folder) -> tuple[SavedPart, ...]:
    """Read which snapshots a table's folder holds; raise unless all parts of one save are there."""
    return tuple(part.record for part in find_parts(folder))


def checksum_of(folder: str | os.PathLike[str]) -> int:
    """Return a checksum of what `saved_parts` returns. Two machines compare it to find out whether they see the same
    files."""
    return _checksum(saved_parts(open_folder(folder)))


def _checksum(parts: Iterable[SavedPart]) -> int:
    return checksum(repr([part.to_dict() for part in parts]).encode())


def require_same_snapshots(folder: Folder, parts: Sequence[FoundPart], expected: int) -> None:
    """Raise SnapshotError unless this machine sees the snapshots in the folder that another machine saw when it
    computed `checksum_of` the folder."""
    if _checksum(part.record for part in parts) != expected:
        raise SnapshotError(
            f"{folder} holds other snapshots on this machine than the trainer sees there: give a folder that all "
            "machines share"
        )


def require_each_bucket_once(folder: Folder, parts: Sequence[Manifest]) -> None:
    """Raise unless every bucket of the table is in exactly one part."""
    count = np.sum([part.holds() for part in parts], axis=0)
    wrong = np.flatnonzero(count != 1)
    if len(wrong):
        raise SnapshotError(
            f"{folder}: bucket {wrong[0]} is in {count[wrong[0]]} of its {len(parts)} parts (one of {len(wrong)} such "
            f"buckets of {len(count)}); expected each in one: a part is missing or was copied over another"
        )
