"""A folder under a URL: objects of a store, whose keys begin with the folder's path.

A store is whatever has the calls of `ObjectStore`: no rename, no lock, and folders only where the system behind it
requires them. `obstore_store` and `fsspec_store` implement it. This file adds errors that name the URL, and reading in
parts into memory that is used only where something was read.
"""

import errno
import io
import mmap
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np

from satrap.config.cores import in_threads
from satrap.storage.folder import Writer

_GET_BYTES = 4 << 20
"""Bytes of one request: large enough that its latency does not matter much."""
_GET_THREADS = 4
"""Requests at a time for one object: a connection alone is slower than the network."""
_PROBE = b"satrap: a test of whether objects can be written, read, listed and deleted here; delete it\n"


class ObjectStore(Protocol):
    """The calls of an object store, or of one bucket of it. Their exceptions are the store's own, which `explain`
    translates, or an OSError with an errno."""

    def explain(self, error: Exception) -> tuple[int, str]:
        """Return the errno and the text of an exception of the store. ENOENT: there is no such object or folder."""

    def get(self, key: str, max_bytes: int | None) -> bytes:
        """Return an object; raise OSError if it has more than `max_bytes`."""

    def get_range(self, key: str, begin: int, end: int) -> Any:
        """Return these bytes of an object, as any object with a buffer."""

    def size(self, key: str) -> int:
        """Return the bytes of an object."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing any."""

    def open_writer(self, key: str) -> Writer:
        """Begin an object, in parts of a bounded size."""

    def names(self, prefix: str) -> list[str]:
        """Return the names of the objects and folders directly in a folder."""

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the keys below a folder, without its prefix, with their bytes."""

    def delete(self, key: str) -> None:
        """Delete an object; a missing one may be an error."""

    def delete_folder(self, prefix: str) -> None:
        """Delete a folder without objects, where there are folders."""


class ObjectFolder:
    """A folder of an object store."""

    is_local = False

    def __init__(self, store: ObjectStore, prefix: str, url: str) -> None:
        """prefix: of all keys, without a slash at its end. url: the folder's, for messages."""
        self._store, self._prefix, self._url = store, prefix, url

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    def __fspath__(self) -> str:
        return self._url

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"ObjectFolder({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectFolder) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> "ObjectFolder":
        return ObjectFolder(self._store, self._key(name), f"{self._url}/{name}")

    def names(self) -> list[str]:
        with suppress(FileNotFoundError), self._errors(""):
            return self._store.names(self._prefix)
        return []

    def sizes(self) -> dict[str, int]:
        with suppress(FileNotFoundError), self._errors(""):
            return dict(self._store.sizes(self._prefix))
        return {}

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        with self._errors(key):
            return self._store.get(self._key(key), max_bytes)

    def open(self, key: str) -> "ObjectReadable":
        return ObjectReadable(self, key, self.size(key))

    def size(self, key: str) -> int:
        """Return the bytes of an object; raise IsADirectoryError for a folder of a system that has folders."""
        with self._errors(key):
            return self._store.size(self._key(key))

    def get_range(self, key: str, begin: int, end: int) -> Any:
        """Return these bytes of an object."""
        with self._errors(key):
            data = memoryview(self._store.get_range(self._key(key), begin, end))
            if len(data) != end - begin:
                raise OSError(errno.EIO, f"bytes {begin} to {end} were requested, and {len(data)} bytes came")
            return data

    def write(self, key: str, data: bytes) -> None:
        with self._errors(key):
            self._store.put(self._key(key), data)

    def create(self, key: str) -> "_NamedWriter":
        with self._errors(key):
            return _NamedWriter(self, key, self._store.open_writer(self._key(key)))

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError), self._errors(key):
            self._store.delete(self._key(key))

    def delete_all(self, first: str | None = None) -> None:
        if first is not None:
            self.delete(first)
        folders = {""}
        for key in self.sizes():
            self.delete(key)
            parts = key.split("/")[:-1]
            folders |= {"/".join(parts[: i + 1]) for i in range(len(parts))}
        for folder in sorted(folders, key=len, reverse=True):
            with suppress(Exception):
                self._store.delete_folder(self._key(folder) if folder else self._prefix)

    def probe(self) -> None:
        """Write, read, list and delete an object; raise the OSError of the first of these that fails."""
        name = f".probe-{secrets.token_hex(8)}"
        self.write(name, _PROBE)
        try:
            if (content := self.read(name)) != _PROBE:
                raise OSError(
                    errno.EIO, f"{len(_PROBE)} bytes were written and {len(content)} others read", self._at(name)
                )
            self.names()
        finally:
            self.delete(name)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _at(self, key: str) -> str:
        return f"{self._url}/{key}".rstrip("/")

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Convert the store's exceptions to an OSError that names the object."""
        try:
            yield
        except Exception as error:
            code, text = self._store.explain(error)
            if isinstance(error, OSError) and error.errno:
                code, text = error.errno, error.strerror or text
            raise OSError(code, text, self._at(key)) from error


class ObjectReadable:
    """An object whose parts are read into memory when they are needed."""

    is_local = False

    def __init__(self, folder: ObjectFolder, key: str, size: int) -> None:
        self._folder, self._key, self.size = folder, key, size
        # Pages that nothing was read into take no memory; the next line reserves addresses only.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self.memory = mmap.mmap(-1, max(1, size), flags=flags)

    def load(self, begin: int, end: int) -> None:
        into = np.frombuffer(self.memory, np.uint8)
        starts = range(begin, end, _GET_BYTES)

        def get(start: int) -> None:
            stop = min(start + _GET_BYTES, end)
            into[start:stop] = np.frombuffer(self._folder.get_range(self._key, start, stop), np.uint8)

        in_threads(_GET_THREADS, get, starts, "satrap-get")

    def release(self, begin: int, end: int) -> None:
        page = mmap.PAGESIZE
        first, last = -(-begin // page) * page, end // page * page  # pages that hold other bytes, too, stay
        if first < last:
            self.memory.madvise(mmap.MADV_DONTNEED, first, last - first)


class ObjectFile(io.RawIOBase):
    """An object as a file that pyarrow reads, with a cursor that no other thread uses. Each read is one request."""

    def __init__(self, folder: ObjectFolder, key: str, size: int) -> None:
        self._folder, self._key, self._size, self._cursor = folder, key, size, 0

    def size(self) -> int:
        """Return the bytes that the object has now."""
        return self._folder.size(self._key)

    def read_at(self, size: int, offset: int) -> memoryview:
        """Return these bytes, or fewer at the end of the file."""
        end = min(self._size, offset + size)
        return memoryview(b"" if end <= offset else self._folder.get_range(self._key, offset, end))

    def read(self, size: int | None = -1) -> Any:
        data = self.read_at(self._size if size is None or size < 0 else size, self._cursor)
        self._cursor += len(data)
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._cursor = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._cursor, io.SEEK_END: self._size}[whence]
        return self._cursor

    def tell(self) -> int:
        return self._cursor


class _NamedWriter:
    """A writer whose errors name the object."""

    def __init__(self, folder: ObjectFolder, key: str, writer: Writer) -> None:
        self._folder, self._key, self._writer = folder, key, writer

    def write(self, piece: memoryview) -> None:
        with self._folder._errors(self._key):
            self._writer.write(piece)

    def complete(self) -> None:
        with self._folder._errors(self._key):
            self._writer.complete()

    def abort(self) -> None:
        with suppress(Exception):
            self._writer.abort()
        with suppress(Exception):  # what was written of it may have become an object
            self._folder.delete(self._key)
