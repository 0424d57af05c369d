"""The folder of a snapshot: its manifest, its parts; and on a disk, which save may write into it, when the new snapshot
becomes visible, what is removed. (`object_directory` is the same for a URL.)

Knows files, locks and the manifest, but not the content of data files: `writer` writes them through `ChecksumFile`.
These rules hold whatever fails and whenever the process dies:
 1. one save at a time writes into a folder (an advisory lock on the folder, released by the kernel);
 2. one folder holds one snapshot of one table, replaced only by a later one: the same table, configured
    alike, and changes only if they start at the same snapshot; a folder that holds something else is refused;
 3. data files have names never used before, so no file of the valid snapshot is written to;
 4. each is on disk (fsync) before the manifest that names it is, and the manifest appears by one rename;
 5. only then the files of the earlier snapshot are removed; a save that fails removes its own instead.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from satrap._core import crc32c
from satrap.config.durable import checksum, put_on_disk, try_lock
from satrap.config.regular_file import MAX_JSON_BYTES
from satrap.config.validation import describe, is_path
from satrap.errors import InputError, SnapshotError
from satrap.storage.folder import Folder, Writer
from satrap.storage.local_folder import LocalFolder, LocalWriter
from satrap.storage.open_folder import open_folder
from satrap.table.snapshot.manifest import FILE_NAME, Manifest, Since, is_ours, object_name, temporary_name
from satrap.table.snapshot.parts_record import PARTS, read_record
from satrap.transfer import advance

_PART = re.compile(r"(0|[1-9]\d*)-of-([1-9]\d*)")
_CHUNK = 1 << 20  # bytes that are checksummed, then written while they are still in the processor's cache


def folder_path(where: str, path: str | os.PathLike[str]) -> Folder:
    """Return the folder that a caller passed as a path or URL."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or not is_path(text):
        raise InputError(f"{where}: path is {describe(path)}; expected the path of a snapshot's folder")
    return open_folder(path, f"{where}: path")


def folder_bytes(folder: Folder) -> int:
    """Return the size of the files in a folder and below it, as far as they can be read."""
    with suppress(OSError):
        return sum(folder.sizes().values())
    return 0


def part_name(part: int, num_parts: int) -> str:
    """Return the name of the folder of one server's part of a table, within the table's folder."""
    return f"{part}-of-{num_parts}"


def parts_in(folder: Folder) -> list[Folder]:
    """Return the folders within a folder whose names are those of parts."""
    try:
        return [folder / name for name in folder.names() if _PART.fullmatch(name)]
    except OSError as error:
        if folder.is_local:
            return []
        raise SnapshotError(f"{folder} cannot be listed: {error.strerror}") from error


def parts_of(folder: Folder) -> list[Folder]:
    """Return the folders of the parts that a table was saved in, each a snapshot: its own folder, unless servers saved
    it. The folder has no `parts_record`."""
    names = {part.name for part in parts_in(folder)}
    if not names:
        return [folder]  # if it cannot be read, reading its manifest raises the error
    num_parts = int(max(names).rpartition("-")[2])
    expected = [part_name(part, num_parts) for part in range(num_parts)]
    if names != set(expected):
        raise SnapshotError(
            f"{folder} holds the parts {', '.join(sorted(names))}; expected all of one save, {expected[0]} to "
            f"{expected[-1]}"
        )
    return [folder / name for name in expected]


def holds_snapshot(folder: Folder) -> bool:
    """Return whether the folder is that of a saved table; raise SnapshotError if it cannot be listed."""
    try:
        names = folder.names() if not folder.is_local or os.path.isdir(folder) else []
    except OSError as error:
        raise SnapshotError(f"{folder} cannot be listed: {error.strerror}") from error
    return FILE_NAME in names or PARTS in names or any(map(_PART.fullmatch, names))


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of the snapshot in the folder."""
    folder = open_folder(path)
    for part in read_record(folder) or []:
        if part["folder"] == "":
            return read_manifest_with_checksum(folder, object_name(part["id"]))[0]
    return read_manifest_with_checksum(folder)[0]


def read_manifest_with_checksum(folder: Folder, name: str = FILE_NAME) -> tuple[Manifest, int]:
    """Read the manifest of the snapshot in the folder, once; return it with the CRC-32C of all its bytes."""
    try:
        text = folder.read(name, MAX_JSON_BYTES)
    except FileNotFoundError:
        if folder.is_local and not os.path.exists(folder):
            raise SnapshotError(f"{folder} does not exist; expected the folder of a snapshot") from None
        raise SnapshotError(
            f"{folder} has no {name}: it is no snapshot, or its save did not finish (the manifest is written last)"
        ) from None
    except NotADirectoryError:
        raise SnapshotError(f"{folder} is a file; expected the folder of a snapshot") from None
    except OSError as error:
        raise SnapshotError(f"{folder}/{name} cannot be read: {error.strerror}") from error
    return Manifest.from_json(text, f"{folder}/{name}"), checksum(text)


def require_same_table(held: Manifest, where: Folder, config: dict[str, Any], seed: int, since: Since | None) -> None:
    """Raise SnapshotError unless the folder's snapshot is of this table and configuration, so that a new one may
    replace it."""
    name, expected = held.config.get("name"), config["name"]
    kind = "full" if since is None else "changes"
    if name != expected:
        raise SnapshotError(f"{where} holds the table {name!r}, not {expected!r}; give another folder")
    if held.kind != kind:
        words = {"full": "a full snapshot", "changes": "the changes of a save_changes"}
        raise SnapshotError(
            f"{where} holds {words[held.kind]} of the table {name!r}, not {words[kind]}: "
            "one folder holds one snapshot, give another"
        )
    differ = held.differences(config, seed)
    if differ:
        raise SnapshotError(
            f"{where} holds another table called {name!r}: {'; '.join(differ)}; it is not replaced: "
            "remove it, or give another folder"
        )
    if since is not None and since != (held.since, held.since_id):
        raise SnapshotError(
            f"{where} holds the changes since version {held.since} of the snapshot {held.since_id}, not since "
            f"version {since.version} of {since.id}: give each link of a chain another folder"
        )


class SnapshotDirectory:
    """A folder while a save writes into it. Leaving the `with` block before `commit` removes what was written."""

    def __init__(self, path: Path, token: str, config: dict[str, Any], seed: int, since: Since | None) -> None:
        """token: the new snapshot's id. config, seed: of its table. since: the snapshot that its changes start at."""
        self.path = path
        self._token = token
        self._config = config
        self._seed = seed
        self._since = since
        self._made = False
        self._committed = False
        self._fd = -1

    def __enter__(self) -> Self:
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            above = (self.path, *self.path.parents)
            file = next((folder for folder in above if os.path.lexists(folder) and not folder.is_dir()), self.path)
            raise SnapshotError(f"{file} is a file; expected a folder to save into") from None
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not try_lock(self._fd, required=False):  # without locks, keeping rule 1 is up to the user
                raise SnapshotError(f"{self.path}: another save is writing; wait for it, or give another folder")
            self._require_same_table()
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self._committed and not self._may_be_committed():
                self._sweep(lambda name: self._token in name)
                if self._made:
                    with suppress(OSError):  # not empty: it holds another program's file
                        self.path.rmdir()
        finally:
            os.close(self._fd)

    def commit(self, manifest: Manifest) -> None:
        """Make this snapshot the one that the folder holds. Its data files are on disk already."""
        temporary = self.path / temporary_name(self._token)
        with ChecksumFile(LocalWriter(temporary)) as file:
            file.write(manifest.to_json())
        os.replace(temporary, self.path / FILE_NAME)
        self._committed = True
        os.fsync(self._fd)
        if self._made:
            with suppress(OSError):  # a parent that this process may not open cannot be flushed
                put_on_disk(self.path.parent)
        named = {file.name for file in manifest.files}
        self._sweep(lambda name: name not in named)

    def _may_be_committed(self) -> bool:
        """Return whether the manifest names this snapshot. The file decides: an interrupt may come right after the
        rename, before `commit` has noted it. If it cannot be read, nothing is removed: that costs only space."""
        try:
            return read_manifest(LocalFolder(self.path)).id == self._token
        except SnapshotError:
            return os.path.lexists(self.path / FILE_NAME)

    def _require_same_table(self) -> None:
        """Apply rule 2. A folder without a manifest may be used: it is new, or a save was killed in it."""
        if (self.path / PARTS).exists():
            raise SnapshotError(f"{self.path} holds a copy of what was saved under a URL; give another folder")
        if not (self.path / FILE_NAME).exists():
            return
        try:
            held = read_manifest(LocalFolder(self.path))
        except SnapshotError as error:
            raise SnapshotError(f"{error}; it is not overwritten: remove it, or give another folder") from error
        require_same_table(held, LocalFolder(self.path), self._config, self._seed, self._since)

    def _sweep(self, unwanted: Callable[[str], bool]) -> None:
        """Remove files that saves have left. The next save retries what cannot be removed: it costs only space."""
        with suppress(OSError):
            for name in os.listdir(self.path):
                if is_ours(name) and unwanted(name):
                    with suppress(OSError):
                        os.unlink(self.path / name)


class ChecksumFile:
    """A new file, checksummed while it is written from start to end; leaving the `with` block completes it."""

    def __init__(self, writer: Writer) -> None:
        self.bytes = 0
        self.crc32c = 0
        self.closed = False
        self._writer = writer

    def write(self, data: object) -> int:
        """Write any object with a buffer. Large data is not copied; the GIL is released meanwhile."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        for start in range(0, len(view), _CHUNK):
            piece = view[start : start + _CHUNK]
            self.crc32c = crc32c(np.frombuffer(piece, np.uint8), self.crc32c)
            self._writer.write(piece)
        self.bytes += len(view)
        advance(len(view))
        return len(view)

    def flush(self) -> None:
        """Do nothing: no data is buffered here."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._writer.complete()
                self.closed = True
        finally:
            self.close()
