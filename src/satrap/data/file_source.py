"""Files of a source on any filesystem: resolves paths, globs, folders and URLs to a list of files to open.

A path without a filesystem is local, or a URL, which `satrap.storage` opens as it opens those of checkpoints. A folder
stands for every file in it, at any depth, except names that begin with "." or "_", which other tools use for files
without data. The files of a folder or glob are in the order of their paths. pyarrow reads local files, and those of a
filesystem of pyarrow.fs, which it does without the GIL.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from satrap.config.location import GLOB_CHARACTER, Location
from satrap.config.optional_deps import pyarrow_for
from satrap.config.path_allowlist import PathAllowlist
from satrap.config.validation import describe
from satrap.errors import ConfigError, SatrapError, SourceError
from satrap.storage.object_folder import ObjectFile, ObjectFolder, ObjectStore
from satrap.storage.open_folder import open_store

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_TEXT_NAME = re.compile(r"\.(?:([ct]sv)|jsonl?|ndjson)(?:\.(?:gz|bz2|zst|lz4))?$", re.IGNORECASE)
_SIGNATURES = {b"PAR1\x15": "Parquet", b"ARROW1\0\0": "Arrow"}  # with bytes that no text has
SIGNATURE_BYTES = max(map(len, _SIGNATURES))


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source."""

    storage: "Storage"
    path: str
    """The path in its storage."""
    size: int

    @property
    def name(self) -> str:
        """The file's name in messages."""
        return self.storage.prefix + self.path

    @property
    def partition(self) -> dict[str, str | None]:
        """The Hive partition in the path: {"day": "2024-01-01"} for "clicks/day=2024-01-01/0.parquet"."""
        pairs = [folder.split("=", 1) for folder in self.path.split("/")[:-1] if "=" in folder]
        return {unquote(name): None if value == _NULL_PARTITION else unquote(value) for name, value in pairs}

    @property
    def is_local(self) -> bool:
        """Whether the file can be mapped into memory."""
        return self.size > 0 and self.storage.is_local

    @contextmanager
    def open(self, *, mapped: bool = False, part: str = "", is_text: bool = True) -> Iterator[Any]:
        """Open the file as a pyarrow file with random access; `mapped` maps it into memory if it is local.

        Errors while it is open name the file and the part that is read; without `is_text`, also the source that reads
        text files of this name.
        """
        where = f"{self.name}, {part}" if part else self.name
        text = None if is_text else _TEXT_NAME.search(self.name)
        remedy = f"use satrap.{'CSV' if text[1] else 'JSON'}" if text else "write it again"
        with errors_naming(where, remedy), self.storage.open(self.path, self.size, mapped) as opened:
            if (now := opened.size()) != self.size:
                raise SourceError(
                    f"{self.name} has {now} bytes and had {self.size} when reading began; it must not change meanwhile"
                )
            yield opened


@contextmanager
def errors_naming(where: str, remedy: str = "write it again") -> Iterator[None]:
    """Turn the errors that pyarrow, NumPy and Python raise for damaged data into a SourceError that names the data."""
    arrow = pyarrow_for("reading files")
    try:
        yield
    except SatrapError:
        raise
    except (arrow.ArrowException, OSError, EOFError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        is_stored = getattr(error, "filename", None) is not None  # the error is that of an object store
        damage = "" if is_stored else f"; it is incomplete, damaged, or of another format: {remedy}"
        raise SourceError(f"{where}: cannot be read ({cause}){damage}") from error


def refuse_other_format(name: str, head: bytes, source: str = "") -> None:
    """Raise SourceError if the first bytes of a file show that another source than this one reads it."""
    for signature, other in _SIGNATURES.items():
        if head.startswith(signature) and other != source:
            raise SourceError(f"{name}: it is of the format {other}: use satrap.{other}")


class Storage(ABC):
    """A filesystem that holds files."""

    prefix: str
    """The text before a path in messages."""
    is_local = False
    """Whether files can be mapped into memory."""

    @abstractmethod
    def stat(self, path: str) -> int | None:
        """Return the file's size; -1 for a folder; None if the path does not exist."""

    @abstractmethod
    def find(self, folder: str) -> list[tuple[str, int]]:
        """Return every file below the folder, with its size; none if there is no such folder."""

    @abstractmethod
    def open(self, path: str, size: int, mapped: bool) -> Any:
        """Open the file as a pyarrow file with random access."""


@dataclass(frozen=True, slots=True)
class PermittedFiles:
    """A filesystem for a source: the files that its paths and URLs name, as far as they are permitted."""

    permitted: PathAllowlist


class _ArrowStorage(Storage):
    prefix = ""

    def __init__(self, filesystem: Any, permitted: PathAllowlist | None = None) -> None:
        self._filesystem, self._permitted = filesystem, permitted
        self.is_local = isinstance(filesystem, pyarrow_for("reading files").fs.LocalFileSystem)

    def stat(self, path: str) -> int | None:
        from pyarrow.fs import FileType

        info = self._filesystem.get_file_info(path)
        if info.type == FileType.NotFound:
            return None
        if info.type == FileType.Unknown:
            raise SourceError(f"{self.prefix}{path} is a FIFO, a socket or a device; expected a file or a folder")
        return int(info.size) if info.type == FileType.File else -1

    def find(self, folder: str) -> list[tuple[str, int]]:
        from pyarrow.fs import FileSelector, FileType

        infos = self._filesystem.get_file_info(FileSelector(folder, allow_not_found=True, recursive=True))
        return [(info.path, int(info.size)) for info in infos if info.type == FileType.File]

    def open(self, path: str, size: int, mapped: bool) -> Any:
        if self._permitted is not None:  # checked again, since a file of a folder or glob may link to elsewhere
            self._permitted.require(path)
        arrow = pyarrow_for("reading files")
        if mapped and size > 0 and self.is_local:
            return arrow.memory_map(path)
        return self._filesystem.open_input_file(path)


class _ObjectStorage(Storage):
    """An object store, or any file system of fsspec."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._root = ObjectFolder(store, "", prefix.rstrip("/"))
        self.prefix = prefix

    def stat(self, path: str) -> int | None:
        try:
            return self._root.size(path) if path else -1
        except IsADirectoryError:
            return -1
        except (FileNotFoundError, PermissionError) as error:
            names = (self._root / path).names()  # a refusal of this, unlike that of a size, comes with a text
            if isinstance(error, PermissionError):
                raise
            return -1 if names else None

    def find(self, folder: str) -> list[tuple[str, int]]:
        below = f"{folder}/" if folder.strip("/") else folder
        sizes = (self._root / folder).sizes()
        # An empty object "a/", by which some tools mark a folder, is listed as "a", and is none when it is opened.
        folders = {"", *(str(parent) for key in sizes for parent in PurePosixPath(key).parents)}
        return [
            (below + key, size)
            for key, size in sizes.items()
            if size or (key not in folders and self.stat(below + key) == 0)
        ]

    def open(self, path: str, size: int, mapped: bool) -> ObjectFile:
        return ObjectFile(self._root, path, size)


def files_signature(path: Any, filesystem: Any) -> dict[str, Any]:
    """Return the files' names (without folders, since data may be moved) and sizes, for a source's signature."""
    return {"files": [[PurePosixPath(file.path).name, file.size] for file in find_files(path, filesystem)]}


def make_absolute(path: Any) -> Any:
    """Return the same paths for a process with another working directory."""
    if isinstance(path, list | tuple):
        return [make_absolute(entry) for entry in path]
    return str(Location.parse(path).absolute())


def find_files(path: Any, filesystem: Any = None) -> list[File]:
    """Return the files that a path, a glob, a folder or a list of those stands for; at least one."""
    paths = list(path) if isinstance(path, Sequence) and not isinstance(path, str | bytes) else [path]
    if not paths:
        raise ConfigError("path is an empty list; expected at least one path")
    files: list[File] = []
    for pattern in paths:
        if not isinstance(pattern, str | os.PathLike) or not os.fspath(pattern):
            raise ConfigError(
                f"path is {describe(pattern)}; expected a file, a folder, a glob or a URL, or a list of those"
            )
        try:
            files += _expand(os.fsdecode(pattern), filesystem)
        except OSError as error:
            raise SourceError(f"{pattern}: it cannot be reached ({error.strerror or error})") from error
    return files


def _expand(path: str, filesystem: Any) -> list[File]:
    storage, inner = _resolve(path, filesystem)
    size = storage.stat(inner)  # before globs: the name of a file may hold a glob's characters
    if size is not None and size >= 0:
        return [File(storage, inner, size)]
    glob = GLOB_CHARACTER.search(inner)
    if size is None and glob is None:
        where = "" if str(path) == inner else f" ({inner})"
        raise SourceError(f"{path}: there is no such file or folder{where}")
    base = inner if size is not None or glob is None else inner[: glob.start()].rpartition("/")[0]
    matcher = re.compile("" if size is not None else _pattern(inner[len(base) :]) + r"\Z")
    files = []
    for file, size in sorted(storage.find(base or ("/" if inner.startswith("/") else ""))):
        below = file[len(base.rstrip("/")) :]
        if matcher.match(file[len(base) :]) and (not _names_hidden(below) or _names_hidden(inner[len(base) :])):
            files.append(File(storage, file, size))
    if not files:
        raise SourceError(
            f"{path}: {'the folder holds' if glob is None else 'the glob matches'} no file; expected at least one "
            "whose name begins with neither '.' nor '_'"
        )
    return files


def _names_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _pattern(glob: str) -> str:
    """Return a glob as a regular expression: * and ? match within a folder, ** matches across folders."""
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
            chars = re.sub(r"[\\[]", r"\\\g<0>", glob[at:end])
            out += f"[{'^' + chars[1:] if chars.startswith('!') else chars}]"
            at = end + 1
        else:
            out += re.escape(char)
    return out


def _resolve(path: str, filesystem: Any) -> tuple[Storage, str]:
    """Return the storage that holds the path, and the path within it."""
    arrow = pyarrow_for("reading files")
    location = Location.parse(path)
    permitted: PathAllowlist | None = None
    if isinstance(filesystem, PermittedFiles):
        filesystem, permitted = None, filesystem.permitted
        permitted.require_below(path)
    if isinstance(filesystem, arrow.fs.FileSystem):
        return _ArrowStorage(filesystem), location.path if "://" in path else path
    if hasattr(filesystem, "cat_file") and hasattr(filesystem, "find"):
        from satrap.storage.fsspec_store import FsspecStore

        return _ObjectStorage(FsspecStore(filesystem), ""), filesystem._strip_protocol(path)
    if filesystem is not None:
        raise ConfigError(f"filesystem is {describe(filesystem)}; expected one of pyarrow.fs or fsspec")
    if not location.is_url:
        return _ArrowStorage(arrow.fs.LocalFileSystem(), permitted), location.absolute().path
    store, inner = open_store(location)
    url = str(location)
    # A chain, such as zip://a::s3://b/c, ends with another URL.
    prefix = url.removesuffix(inner) if url.endswith(inner) else f"{location.scheme}://"
    return _ObjectStorage(store, prefix if inner else f"{url}/"), inner
