"""Storage of checkpoints: a local folder, or a folder of any file system that fsspec opens by a URL ("s3://...").

This is the only module that accesses the files of a run. It lists, reads, writes and removes objects by their keys
(paths within the folder with "/" between their parts); `catalog` and `run_directory` decide which checkpoints exist,
count and are removed.

Every storage guarantees the following, and callers rely on nothing else:
 1. `read` of a key returns what was last written under it, immediately;
 2. a write is complete or raises an error; after an error, or a kill, part of the object may exist;
 3. a list may lag: it may miss an object just written, or still name one just removed.

A local folder guarantees more: `write` and `publish` end with one rename of flushed files (`is_atomic`), and a lock
excludes other processes. Paths are never treated as patterns, whatever characters they contain.
"""

import errno
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from satrap.collected import close_when_collected
from satrap.config.durable import opened, put_on_disk, replace_file, try_lock
from satrap.config.path_allowlist import STAGING_PREFIX

_LOCAL = ("file://", "local://")


class Storage(Protocol):
    """A folder on some file system. Every error is an OSError whose filename is the URL of the object."""

    url: str
    """The folder's path or URL, for messages."""
    staging: Path
    """A local folder in which a tree is written before `publish`."""
    is_atomic: bool
    """Whether an object or a published tree is never visible in part."""

    def names(self) -> list[str]:
        """Return the names directly in the folder; may lag."""

    def keys(self, tree: str) -> list[str]:
        """Return the keys of the objects below a subfolder; may lag."""

    def read(self, key: str) -> bytes:
        """Return the content of an object; raise FileNotFoundError if there is none."""

    def write(self, key: str, data: bytes) -> None:
        """Write an object, replacing any with the same key."""

    def publish(self, staged: Path, tree: str, last: str, check: Callable[[], None]) -> None:
        """Write the files of a staged folder as the folder `tree`: first all but `last`, then, unless check() raises,
        the one called `last`."""

    def remove(self, tree: str, first: str) -> None:
        """Remove a folder, its object `first` before all others. Missing objects are ignored."""

    def local_copy(self, tree: str, keys: Iterable[str]) -> Path:
        """Return a local folder that holds these objects of a tree under their names."""

    def drop_copies(self) -> None:
        """Remove the copies that `local_copy` made."""

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Exclude other processes where the storage can; raise TimeoutError after waiting for `seconds`."""


def open_storage(path: str) -> Storage:
    """Return the storage of a path or URL, without accessing it yet."""
    scheme = next((each for each in _LOCAL if path.startswith(each)), "")
    if "://" in path and not scheme:
        return _Objects(path)
    return _Disk(Path(path.removeprefix(scheme)))


class _Disk:
    """A folder that is local or mounted."""

    is_atomic = True

    def __init__(self, path: Path) -> None:
        self._path = self.staging = path
        self.url = str(path)

    def names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def keys(self, tree: str) -> list[str]:
        top = self._path / tree
        return [each.relative_to(top).as_posix() for each in top.rglob("*") if each.is_file()]

    def read(self, key: str) -> bytes:
        return (self._path / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        replace_file(self._path / key, data)

    def publish(self, staged: Path, tree: str, last: str, check: Callable[[], None]) -> None:
        for each in (*(folder for folder in staged.iterdir() if folder.is_dir()), staged):
            put_on_disk(each)
        check()
        os.rename(staged, self._path / tree)
        put_on_disk(self._path)

    def remove(self, tree: str, first: str) -> None:
        hidden = self._path / f".{secrets.token_hex(4)}.{tree}"  # so that a partly removed folder is never visible
        with suppress(FileNotFoundError):
            os.rename(self._path / tree, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def local_copy(self, tree: str, keys: Iterable[str]) -> Path:
        return self._path / tree

    def drop_copies(self) -> None:
        pass

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        self._path.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + seconds
        with opened(self._path) as folder:
            # Some network file systems lock no folders: the owner file alone protects the run there.
            while not try_lock(folder, required=False):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock", self.url)
                time.sleep(0.02)
            yield


class _Objects:
    """A folder on any fsspec file system, accessed by reads and writes of whole objects: without rename or lock, and
    with subfolders only where the file system requires them."""

    is_atomic = False

    def __init__(self, url: str) -> None:
        import fsspec

        self._files, path = fsspec.core.url_to_fs(url)
        self._path = str(path).rstrip("/")
        self.url = url.rstrip("/")
        self.staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX))
        self._copies: set[Path] = set()
        close_when_collected(self, partial(shutil.rmtree, self.staging, ignore_errors=True))

    def names(self) -> list[str]:
        with self._os_errors(""):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        return [name for path in found if (name := self._within(path, self._path)) and "/" not in name]

    def keys(self, tree: str) -> list[str]:
        with self._os_errors(tree):
            self._files.invalidate_cache()
            found = self._files.find(f"{self._path}/{tree}")
        return [key for path in found if (key := self._within(path, f"{self._path}/{tree}"))]

    def read(self, key: str) -> bytes:
        with self._os_errors(key):
            return bytes(self._files.cat_file(f"{self._path}/{key}"))

    def write(self, key: str, data: bytes) -> None:
        with self._os_errors(key):
            self._write_in_folder(key, lambda path: self._files.pipe_file(path, data))

    def publish(self, staged: Path, tree: str, last: str, check: Callable[[], None]) -> None:
        names = sorted(each.relative_to(staged).as_posix() for each in staged.rglob("*") if each.is_file())
        for name in (*(each for each in names if each != last), last):
            if name == last:
                check()
            with self._os_errors(f"{tree}/{name}"):
                self._write_in_folder(f"{tree}/{name}", partial(self._files.put_file, str(staged / name)))

    def remove(self, tree: str, first: str) -> None:
        self._remove_object(f"{tree}/{first}")
        folders = {tree}
        for key in self.keys(tree):
            self._remove_object(f"{tree}/{key}")
            folders |= {f"{tree}/{parent}".removesuffix("/.") for parent in Path(key).parents}
        for folder in sorted(folders, key=len, reverse=True):  # on file systems that have folders
            with suppress(Exception):
                self._files.rmdir(f"{self._path}/{folder}")

    def local_copy(self, tree: str, keys: Iterable[str]) -> Path:
        local = self.staging / tree
        self._copies.add(local)
        for key in keys:
            (local / key).parent.mkdir(parents=True, exist_ok=True)
            with self._os_errors(f"{tree}/{key}"):
                self._files.get_file(f"{self._path}/{tree}/{key}", str(local / key))
        return local

    def drop_copies(self) -> None:
        for each in self._copies:
            shutil.rmtree(each, ignore_errors=True)
        self._copies.clear()

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        yield

    def _remove_object(self, key: str) -> None:
        with self._os_errors(key), suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{key}")

    def _write_in_folder(self, key: str, write: Callable[[str], object]) -> None:
        path = f"{self._path}/{key}"
        try:
            write(path)
        except FileNotFoundError:  # this file system requires the folder to exist
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            write(path)

    def _within(self, path: str, top: str) -> str:
        """Return the key below `top` of a listed path; "" if the path is not below it."""
        stripped, start = str(path).rstrip("/"), top.rstrip("/") + "/"
        for each in (stripped, "/" + stripped):  # some lists omit the first slash
            if each.startswith(start):
                return each[len(start) :]
        return ""

    @contextmanager
    def _os_errors(self, key: str) -> Iterator[None]:
        """Convert the exceptions of file systems to an OSError that names the object."""
        try:
            yield
        except Exception as error:
            usual = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
            code = getattr(error, "errno", None) or usual
            is_coded = isinstance(error, OSError) and error.errno
            text = os.strerror(code) if is_coded else f"{type(error).__name__}: {error}"
            raise OSError(code, text, f"{self.url}/{key}".rstrip("/")) from error
