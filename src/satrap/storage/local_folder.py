"""A folder on a disk, or on a file system that is mounted."""

import mmap
import os
import shutil
from pathlib import Path

from satrap.config.durable import replace_file
from satrap.config.regular_file import open_regular, read_regular


class LocalFolder:
    """A folder on a disk."""

    is_local = True

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"LocalFolder({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalFolder) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __truediv__(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    def names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            return []

    def sizes(self) -> dict[str, int]:
        sizes = {}
        for parent, _, names in os.walk(self.path):
            for path in (Path(parent) / name for name in names):
                sizes[path.relative_to(self.path).as_posix()] = path.stat().st_size
        return sizes

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        return read_regular(self.path / key, max_bytes)

    def open(self, key: str) -> "LocalReadable":
        return LocalReadable(self.path / key)

    def write(self, key: str, data: bytes) -> None:
        replace_file(self.path / key, data)

    def create(self, key: str) -> "LocalWriter":
        return LocalWriter(self.path / key)

    def delete(self, key: str) -> None:
        (self.path / key).unlink(missing_ok=True)

    def delete_all(self, first: str | None = None) -> None:
        if first is not None:
            self.delete(first)
        shutil.rmtree(self.path, ignore_errors=True)


class LocalReadable:
    """A file that is mapped into memory: the system reads what is accessed, and keeps it as long as it has room."""

    is_local = True

    def __init__(self, path: Path) -> None:
        with open_regular(path) as file:
            self.size = os.fstat(file.fileno()).st_size
            self.memory = (
                mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ) if self.size else mmap.mmap(-1, 1)
            )

    def load(self, begin: int, end: int) -> None:
        """Do nothing: the file is mapped."""

    def release(self, begin: int, end: int) -> None:
        """Do nothing: the system does it."""


class LocalWriter:
    """A new file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, piece: memoryview) -> None:
        try:
            while len(piece) > 0:
                piece = piece[os.write(self._fd, piece) :]
        except OSError as error:
            raise self._named(error) from None

    def complete(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._named(error) from None
        finally:
            self._close()

    def abort(self) -> None:
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))  # a call by file descriptor reports no file name
