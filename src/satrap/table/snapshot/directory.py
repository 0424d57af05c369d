"""The folder of a snapshot on disk: which save may write into it, when the new snapshot becomes visible, what is
removed.

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
from satrap.config.validation import describe, is_path
from satrap.errors import InputError, SnapshotError
from satrap.table.snapshot.manifest import FILE_NAME, Manifest, Since, is_ours, temporary_name
from satrap.transfer import advance

_PART = re.compile(r"(0|[1-9]\d*)-of-([1-9]\d*)")
_CHUNK = 1 << 20  # bytes that are checksummed, then written while they are still in the processor's cache


def folder_path(where: str, path: object) -> Path:
    """Returns the folder that a caller passed as a path."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or not is_path(text):
        raise InputError(f"{where}: path is {describe(path)}; expected the path of a snapshot's folder")
    return Path(text)


def folder_bytes(folder: Path) -> int:
    """Returns the size of the files in a folder and below it, as far as they can be read."""
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found += os.stat(os.path.join(parent, name)).st_size
    return found


def part_name(part: int, num_parts: int) -> str:
    """Returns the name of the folder of one server's part of a table, within the table's folder."""
    return f"{part}-of-{num_parts}"


def parts_in(folder: Path) -> list[Path]:
    """Returns the folders in it whose names are those of parts."""
    try:
        return [each for each in folder.iterdir() if _PART.fullmatch(each.name)]
    except OSError:
        return []


def parts_of(folder: Path) -> list[Path]:
    """Returns the folders of the parts that a table was saved in, each a snapshot: its own folder, unless servers saved
    it."""
    names = {each.name for each in parts_in(folder)}
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


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of the snapshot in the folder."""
    return read_manifest_with_checksum(folder)[0]


def read_manifest_with_checksum(folder: Path) -> tuple[Manifest, int]:
    """Reads the manifest of the snapshot in the folder, once; returns it with the CRC-32C of all its bytes."""
    path = folder / FILE_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if not folder.exists():
            raise SnapshotError(f"{folder} does not exist; expected the folder of a snapshot") from None
        raise SnapshotError(
            f"{folder} has no {FILE_NAME}: it is no snapshot, or its save did not finish (the manifest is written last)"
        ) from None
    except NotADirectoryError:
        raise SnapshotError(f"{folder} is a file; expected the folder of a snapshot") from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    return Manifest.from_json(text, str(path)), checksum(text)


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
            file = next((each for each in above if os.path.lexists(each) and not each.is_dir()), self.path)
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
        """Makes this snapshot the one that the folder holds. Its data files are on disk already."""
        temporary = self.path / temporary_name(self._token)
        with ChecksumFile(temporary) as file:
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
        """Returns whether the manifest names this snapshot. The file decides: an interrupt may come right after the
        rename, before `commit` has noted it. If it cannot be read, nothing is removed: that costs only space."""
        try:
            return read_manifest(self.path).id == self._token
        except SnapshotError:
            return os.path.lexists(self.path / FILE_NAME)

    def _require_same_table(self) -> None:
        """Applies rule 2. A folder without a manifest may be used: it is new, or a save was killed in it."""
        if not (self.path / FILE_NAME).exists():
            return
        try:
            held = read_manifest(self.path)
        except SnapshotError as error:
            raise SnapshotError(f"{error}; it is not overwritten: remove it, or give another folder") from error
        name, expected = held.config.get("name"), self._config["name"]
        kind = "full" if self._since is None else "changes"
        if name != expected:
            raise SnapshotError(f"{self.path} holds the table {name!r}, not {expected!r}; give another folder")
        if held.kind != kind:
            words = {"full": "a full snapshot", "changes": "the changes of a save_changes"}
            raise SnapshotError(
                f"{self.path} holds {words[held.kind]} of the table {name!r}, not {words[kind]}: "
                "one folder holds one snapshot, give another"
            )
        differ = held.differences(self._config, self._seed)
        if differ:
            raise SnapshotError(
                f"{self.path} holds another table called {name!r}: {'; '.join(differ)}; it is not replaced: "
                "remove it, or give another folder"
            )
        if self._since is not None and self._since != (held.since, held.since_id):
            raise SnapshotError(
                f"{self.path} holds the changes since version {held.since} of the snapshot {held.since_id}, not since "
                f"version {self._since.version} of {self._since.id}: give each link of a chain another folder"
            )

    def _sweep(self, unwanted: Callable[[str], bool]) -> None:
        """Removes files that saves have left. The next save retries what cannot be removed: it costs only space."""
        with suppress(OSError):
            for name in os.listdir(self.path):
                if is_ours(name) and unwanted(name):
                    with suppress(OSError):
                        os.unlink(self.path / name)


class ChecksumFile:
    """A new file, written from start to end and checksummed on the way; closing it flushes it to disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.crc32c = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def write(self, data: object) -> int:
        """Writes any object with a buffer. Large data is not copied; the GIL is released meanwhile."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        for start in range(0, len(view), _CHUNK):
            piece = view[start : start + _CHUNK]
            self.crc32c = crc32c(np.frombuffer(piece, np.uint8), self.crc32c)
            while len(piece) > 0:
                piece = piece[self._call(os.write, piece) :]
        self.bytes += len(view)
        advance(len(view))
        return len(view)

    def flush(self) -> None:
        """Does nothing: no data is buffered."""

    def close(self) -> None:
        if not self.closed:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._call(os.fsync)
        finally:
            self.close()

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return function(self._fd, *arguments)
        except OSError as error:  # a call by file descriptor reports no file name
            raise OSError(error.errno, error.strerror, str(self.path)) from None
