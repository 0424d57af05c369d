"""Publishes and removes the checkpoints of a run, on a disk and under a URL: each becomes visible, and disappears, at
once.

A folder on a disk has more than `satrap.storage.folder` guarantees: a checkpoint is written into a hidden folder that
one rename publishes, and a lock excludes other processes. Under a URL a checkpoint is written where it will be, by
every process that has a part of it, and counts once its last object is there. `catalog` and `run_directory` decide
which checkpoints exist, count and are removed.
"""

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from satrap.config.durable import opened, put_on_disk, try_lock, write_file
from satrap.storage.folder import Folder
from satrap.storage.local_folder import LocalFolder
from satrap.storage.open_folder import open_folder

_FILES_OF_RUN = "run.json", "status.json"  # a live `satrap run` has both


class Publisher(Protocol):
    """Publishes and removes the checkpoints in the folder of a run.

    Every error is an OSError whose filename is the path or URL of the object."""

    folder: Folder

    def begin(self, name: str) -> Folder:
        """Return a folder in which a checkpoint of this name is written."""

    def publish(self, written: Folder, name: str, last: str, data: bytes, check: Callable[[], None]) -> None:
        """Make what was written visible as the checkpoint `name`, by writing its last object. If check() raises,
        nothing becomes visible."""

    def discard(self, written: Folder) -> None:
        """Remove what was written into a folder of `begin` that was not published, as far as possible."""

    def remove(self, name: str, first: str) -> None:
        """Remove a folder, its object `first` before all others. Missing objects are ignored."""

    def remove_hidden(self, is_left: Callable[[str], bool]) -> None:
        """Remove what killed processes have left of `begin`: the folders for whose name `is_left` returns True."""

    def is_locked_by_run(self) -> bool:
        """Return whether the folder is the `--folder` of a live `satrap run`, which locks it until its end."""

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Exclude other processes where the file system can; raise TimeoutError after waiting for `seconds`."""


def open_publisher(path: str | os.PathLike[str]) -> Publisher:
    """Return the publisher of a path or URL, without accessing it yet."""
    folder = open_folder(path, "Checkpoint: path")
    return _Disk(folder) if isinstance(folder, LocalFolder) else _Objects(folder)


class _Disk:
    """A folder that is local or mounted."""

    def __init__(self, folder: LocalFolder) -> None:
        self.folder: Folder = folder
        self._path = folder.path

    def begin(self, name: str) -> Folder:
        written = self._path / f".{secrets.token_hex(4)}.{name}"
        written.mkdir()
        return LocalFolder(written)

    def publish(self, written: Folder, name: str, last: str, data: bytes, check: Callable[[], None]) -> None:
        path = self._path / written.name
        write_file(path / last, data)
        for level in (*(folder for folder in path.iterdir() if folder.is_dir()), path):
            put_on_disk(level)
        check()
        os.rename(path, self._path / name)
        put_on_disk(self._path)

    def discard(self, written: Folder) -> None:
        written.delete_all()

    def remove(self, name: str, first: str) -> None:
        hidden = self._path / f".{secrets.token_hex(4)}.{name}"  # so that a partly removed folder is never visible
        with suppress(FileNotFoundError):
            os.rename(self._path / name, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def remove_hidden(self, is_left: Callable[[str], bool]) -> None:
        for entry in self._path.iterdir():
            if is_left(entry.name):
                shutil.rmtree(entry, ignore_errors=True)

    def is_locked_by_run(self) -> bool:
        if not all((self._path / name).is_file() for name in _FILES_OF_RUN):
            return False
        with opened(self._path) as folder:
            return not try_lock(folder, shared=True, required=False)

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        self._path.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + seconds
        with opened(self._path) as folder:
            # Some network file systems lock no folders: the owner file alone protects the run there.
            while not try_lock(folder, required=False):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock", str(self._path))
                time.sleep(0.02)
            yield


class _Objects:
    """A folder under a URL, without rename or lock."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def begin(self, name: str) -> Folder:
        return self.folder / name

    def publish(self, written: Folder, name: str, last: str, data: bytes, check: Callable[[], None]) -> None:
        check()
        written.write(last, data)

    def discard(self, written: Folder) -> None:
        with suppress(OSError):  # what this cannot remove is removed after a newer save
            written.delete_all()

    def remove(self, name: str, first: str) -> None:
        (self.folder / name).delete_all(first)

    def remove_hidden(self, is_left: Callable[[str], bool]) -> None:
        """Do nothing: there are no hidden folders."""

    def is_locked_by_run(self) -> bool:
        return False

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        yield
