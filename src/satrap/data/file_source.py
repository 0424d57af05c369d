"""Files of a source, wherever they lie: paths, globs, folders and URLs become a list of files that can be opened.

A path without a filesystem is local, or a URL: pyarrow opens those of its own filesystems (s3, gs, hdfs, abfs), fsspec
all others. A folder stands for every file in it, at any depth, but for names that begin with "." or "_", which other
tools use for what is no data. Files of a folder or glob come in the order of their paths. pyarrow releases the GIL
while its own filesystems read; an fsspec one is asked for ranges of bytes, which needs no cursor that threads share.
"""

import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from satrap.config.optional_deps import pyarrow_for
from satrap.config.path_allowlist import GLOB_CHARACTER, URL, PathAllowlist, is_url
from satrap.config.validation import describe
from satrap.errors import ConfigError, SatrapError, SourceError

_OWN_SCHEMES = {"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"}


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source."""

    storage: "Storage"
    path: str
    """As its storage names it."""
    size: int

    @property
    def name(self) -> str:
        """As messages name it."""
        return self.storage.prefix + self.path

    @property
    def is_local(self) -> bool:
        """Whether it is mapped into memory where that is asked for."""
        return self.size > 0 and self.storage.is_local

    @contextmanager
    def open(self, *, mapped: bool = False, part: str = "") -> Iterator[Any]:
        """The file as a pyarrow file with random access, mapped into memory if asked for and local. What goes wrong
        while it is open names it, and the part that is read."""
        where = f"{self.name}, {part}" if part else self.name
        with naming(where), self.storage.open(self.path, self.size, mapped) as opened:
            if (now := opened.size()) != self.size:
                raise SourceError(
                    f"{self.name} has {now} bytes and had {self.size} when reading began: it was changed meanwhile"
                )
            yield opened


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Damaged data raises a SourceError that names it, whatever pyarrow, NumPy or Python makes of the damage."""
    arrow = pyarrow_for("reading files")
    try:
        yield
    except SatrapError:
        raise
    except (arrow.ArrowException, OSError, EOFError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        found = str(error) or type(error).__name__
        raise SourceError(f"{where}: cannot be read ({found}): it is torn, damaged, or of another format") from error


class Storage(ABC):
    """Where files lie."""

    prefix: str
    """What stands before a path in messages."""
    is_local = False
    """Whether files can be mapped into memory."""

    @abstractmethod
    def stat(self, path: str) -> int | None:
        """The file's size; -1 for a folder; None if nothing is there."""

    @abstractmethod
    def find(self, folder: str) -> list[tuple[str, int]]:
        """Every file below the folder, with its size; none if there is no such folder."""

    @abstractmethod
    def open(self, path: str, size: int, mapped: bool) -> Any:
        """The file as a pyarrow file with random access."""


class _ArrowStorage(Storage):
    def __init__(self, filesystem: Any, prefix: str) -> None:
        self._filesystem = filesystem
        self.prefix = prefix
        self.is_local = isinstance(filesystem, pyarrow_for("reading files").fs.LocalFileSystem)

    def stat(self, path: str) -> int | None:
        from pyarrow.fs import FileType

        info = self._filesystem.get_file_info(path)
        if info.type == FileType.NotFound:
            return None
        return int(info.size) if info.type == FileType.File else -1

    def find(self, folder: str) -> list[tuple[str, int]]:
        from pyarrow.fs import FileSelector, FileType

        infos = self._filesystem.get_file_info(FileSelector(folder, allow_not_found=True, recursive=True))
        return [(info.path, int(info.size)) for info in infos if info.type == FileType.File]

    def open(self, path: str, size: int, mapped: bool) -> Any:
        arrow = pyarrow_for("reading files")
        if mapped and size > 0 and self.is_local:
            return arrow.memory_map(path)
        return self._filesystem.open_input_file(path)


class _FsspecStorage(Storage):
    def __init__(self, filesystem: Any, prefix: str) -> None:
        self._filesystem = filesystem
        self.prefix = prefix

    def stat(self, path: str) -> int | None:
        if not self._filesystem.exists(path):
            return None
        info = self._filesystem.info(path)
        return int(info["size"]) if info["type"] == "file" else -1

    def find(self, folder: str) -> list[tuple[str, int]]:
        if not self._filesystem.exists(folder):
            return []
        found = self._filesystem.find(folder, detail=True)
        return [(path, int(info["size"])) for path, info in found.items()]

    def open(self, path: str, size: int, mapped: bool) -> Any:
        arrow = pyarrow_for("reading files")
        return arrow.PythonFile(_Ranges(self._filesystem, path, size), mode="r")


class _Ranges(io.RawIOBase):
    """A file of an fsspec filesystem with a cursor of its own; some filesystems hand the same file to everybody."""

    def __init__(self, filesystem: Any, path: str, size: int) -> None:
        self._filesystem, self._path, self._size, self._at = filesystem, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def read(self, size: int | None = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._size, self._at + size)
        if end <= self._at:
            return b""
        data = bytes(self._filesystem.cat_file(self._path, start=self._at, end=end))
        self._at += len(data)
        return data


@dataclass(frozen=True, slots=True)
class PermittedFiles:
    """Given as a source's filesystem: the files that its paths and URLs name, as far as they are permitted."""

    permitted: PathAllowlist


class _PermittedStorage(Storage):
    """What a folder or glob came to is asked about once more when it is opened: it may be a link that leads out."""

    def __init__(self, storage: Storage, permitted: PathAllowlist) -> None:
        self._storage, self._permitted = storage, permitted
        self.prefix = storage.prefix

    def stat(self, path: str) -> int | None:
        return self._storage.stat(path)

    def find(self, folder: str) -> list[tuple[str, int]]:
        return self._storage.find(folder)

    def open(self, path: str, size: int, mapped: bool) -> Any:
        self._permitted.require(path)
        return self._storage.open(path, size, mapped)


def files_signature(path: Any, filesystem: Any) -> dict[str, Any]:
    """Which files a position is in: their names without folders, since data may be moved, and sizes."""
    return {"files": [[PurePosixPath(file.path).name, file.size] for file in find_files(path, filesystem)]}


def absolute(path: Any) -> Any:
    """The same paths for a process with another current folder."""
    if isinstance(path, list | tuple):
        return [absolute(each) for each in path]
    text = os.fsdecode(path)
    return text if URL.match(text) else os.path.abspath(os.path.expanduser(text))


def find_files(path: Any, filesystem: Any = None) -> list[File]:
    """The files that a path, a glob, a folder or a list of those stands for; at least one."""
    given = list(path) if isinstance(path, Sequence) and not isinstance(path, str | bytes) else [path]
    if not given:
        raise ConfigError("path is an empty list; wanted at least one path")
    files: list[File] = []
    for each in given:
        if not isinstance(each, str | os.PathLike) or not os.fspath(each):
            raise ConfigError(f"path is {describe(each)}; wanted a file, a folder, a glob or a URL, or a list of those")
        files += _expand(os.fsdecode(each), filesystem)
    return files


def _expand(path: str, filesystem: Any) -> list[File]:
    storage, inside = _storage(path, filesystem)
    size = storage.stat(inside)  # first: a file may have a glob's characters in its name
    if size is not None and size >= 0:
        return [File(storage, inside, size)]
    magic = GLOB_CHARACTER.search(inside)
    if size is None and magic is None:
        where = "" if str(path) == inside else f" ({inside})"
        raise SourceError(f"{path}: there is no such file or folder{where}")
    base = inside if size is not None or magic is None else inside[: magic.start()].rpartition("/")[0]
    wanted = re.compile("" if size is not None else _pattern(inside[len(base) :]) + r"\Z")
    found = []
    for each, size in sorted(storage.find(base or ("/" if inside.startswith("/") else ""))):
        below = each[len(base.rstrip("/")) :]
        hidden = any(part.startswith((".", "_")) for part in below.split("/"))
        if wanted.match(each[len(base) :]) and not (hidden and not _names_hidden(inside[len(base) :])):
            found.append(File(storage, each, size))
    if not found:
        raise SourceError(f"{path}: {'the folder holds' if magic is None else 'the glob matches'} no file")
    return found


def _names_hidden(pattern: str) -> bool:
    return any(part.startswith((".", "_")) for part in pattern.split("/"))


def _pattern(glob: str) -> str:
    """A glob as a regular expression: * and ? stay within a folder, ** crosses folders."""
    out, at = "", 0
    while at < len(glob):
        char = glob[at]
        at += 1
        if glob.startswith("**/", at - 1):
            out, at = out + "(?:.*/)?", at + 2
        elif glob.startswith("**", at - 1):
            out, at = out + ".*", at + 1
        elif char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[" and "]" in glob[at + 1 :]:
            end = glob.index("]", at + 1)
            chars = glob[at:end].replace("\\", "\\\\")
            out += f"[{'^' + chars[1:] if chars.startswith('!') else chars}]"
            at = end + 1
        else:
            out += re.escape(char)
    return out


def _storage(path: str, filesystem: Any) -> tuple[Storage, str]:
    """Where the path lies, and what it is called there."""
    arrow = pyarrow_for("reading files")
    url = URL.match(path)
    if isinstance(filesystem, PermittedFiles):
        filesystem.permitted.require_below(path)
        storage, inside = _storage(path, None)
        return storage if is_url(path) else _PermittedStorage(storage, filesystem.permitted), inside
    if filesystem is not None:
        if isinstance(filesystem, arrow.fs.FileSystem):
            return _ArrowStorage(filesystem, ""), path[url.end() :] if url else path
        if hasattr(filesystem, "cat_file") and hasattr(filesystem, "find"):
            return _FsspecStorage(filesystem, ""), filesystem._strip_protocol(path)
        raise ConfigError(f"filesystem is {describe(filesystem)}; wanted one of pyarrow.fs or fsspec")
    if url is None or url[1] == "file":
        local = os.path.abspath(os.path.expanduser(path[url.end() :] if url else path))
        return _ArrowStorage(arrow.fs.LocalFileSystem(), ""), local
    if url[1] in _OWN_SCHEMES:
        magic = GLOB_CHARACTER.search(path)
        base = path if magic is None else path[: magic.start()].rpartition("/")[0]
        try:
            own, inside = arrow.fs.FileSystem.from_uri(base)
            prefix = "" if url[1] in ("hdfs", "viewfs") else url[0]
            return _ArrowStorage(own, prefix), inside + path[len(base) :]
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise SourceError(f"{path}: its filesystem cannot be reached ({error})") from error
    try:
        import fsspec
    except ImportError as error:
        raise SourceError(f"{path}: {url[0]} needs fsspec ({error}): pip install fsspec") from error
    try:
        foreign, inside = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError, OSError) as error:
        raise SourceError(f"{path}: its filesystem cannot be reached ({error})") from error
    return _FsspecStorage(foreign, url[0]), inside
