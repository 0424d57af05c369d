"""Where checkpoints lie: a folder of this machine, or of any file system that fsspec opens by a URL ("s3://...").

The one seam between Satrap and a place that keeps its checkpoints. It lists, reads, writes and removes objects by their
keys (paths within the folder, "/" between their parts), and decides nothing: which checkpoints there are, which count
and which go is for `catalog` and `runfolder`.

What every storage promises, and all that is relied on:
 1. `read` of a key gives what was written last under it, at once;
 2. a write is all there or an error is raised; after an error, or a kill, a part of the object may be there;
 3. a list may lag: an object just written may be missing from it, one just removed may still be named.

A local folder keeps more: `write` and `publish` end in one rename of what is on disk (`is_atomic`), and a lock keeps
other processes out. No path is ever taken for a pattern, whatever characters are in it.
"""

import errno
import fcntl
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
from satrap.config.durable import put_on_disk
from satrap.config.path_allowlist import STAGING_PREFIX

_LOCAL = ("file://", "local://")


class Storage(Protocol):
    """A folder somewhere. Every error is an OSError whose filename is the URL of the object."""

    url: str
    """Names the folder in messages."""
    staging: Path
    """A folder of this machine in which a tree is written before `publish`."""
    is_atomic: bool
    """Whether an object or a published tree is never seen in part."""

    def names(self) -> list[str]:
        """Lists what lies directly in the folder; may lag."""
        ...

    def keys(self, tree: str) -> list[str]:
        """Lists the objects below a folder of it; may lag."""
        ...

    def read(self, key: str) -> bytes:
        """Reads an object; FileNotFoundError if there is none."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Writes an object, in place of one of that key."""
        ...

    def publish(self, staged: Path, tree: str, last: str, check: Callable[[], None]) -> None:
        """Writes the files of a staged folder as the folder `tree`: all but one, then, if check() does not raise, the
        one called `last`."""
        ...

    def remove(self, tree: str, first: str) -> None:
        """Removes a folder, the object `first` in it before all others. What is gone already is no error."""
        ...

    def local_copy(self, tree: str, keys: Iterable[str]) -> Path:
        """Returns a folder of this machine that holds these objects of a tree under their names."""
        ...

    def drop_copies(self) -> None:
        """Removes what `local_copy` has copied."""
        ...

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        """Keeps other processes out, where the storage can; TimeoutError after so many seconds of waiting."""
        ...


def open_storage(path: str) -> Storage:
    """Opens the storage of a path or URL. Looks at nothing yet."""
    scheme = next((each for each in _LOCAL if path.startswith(each)), "")
    if "://" in path and not scheme:
        return _Objects(path)
    return _Disk(Path(path.removeprefix(scheme)))


class _Disk:
    """A folder of this machine, or one that is mounted here."""

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
        path = self._path / key
        temporary = path.with_name(f".{secrets.token_hex(4)}.{path.name}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        put_on_disk(path.parent)

    def publish(self, staged: Path, tree: str, last: str, check: Callable[[], None]) -> None:
        for each in (*(folder for folder in staged.iterdir() if folder.is_dir()), staged):
            put_on_disk(each)
        check()
        os.rename(staged, self._path / tree)
        put_on_disk(self._path)

    def remove(self, tree: str, first: str) -> None:
        hidden = self._path / f".{secrets.token_hex(4)}.{tree}"  # so that no half of it is ever seen
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
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        until = time.monotonic() + seconds
        try:
            while True:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TimeoutError(errno.ETIMEDOUT, "another process holds its lock", self.url) from None
                except OSError:  # some network file systems lock no folders; then the run's owner is all there is
                    break
                time.sleep(0.02)
            yield
        finally:
            os.close(folder)


class _Objects:
    """Any file system of fsspec, by reads and writes of whole objects: no rename, no lock, folders only if it wants
    them."""

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
        with self._failing(""):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        return [name for path in found if (name := self._within(path, self._path)) and "/" not in name]

    def keys(self, tree: str) -> list[str]:
        with self._failing(tree):
            self._files.invalidate_cache()
            found = self._files.find(f"{self._path}/{tree}")
        return [key for path in found if (key := self._within(path, f"{self._path}/{tree}"))]

    def read(self, key: str) -> bytes:
        with self._failing(key):
            return bytes(self._files.cat_file(f"{self._path}/{key}"))

    def write(self, key: str, data: bytes) -> None:
        with self._failing(key):
            self._in_folder(key, lambda path: self._files.pipe_file(path, data))

    def publish(self, staged: Path, tree: str, last: str, check: Callable[[], None]) -> None:
        names = sorted(each.relative_to(staged).as_posix() for each in staged.rglob("*") if each.is_file())
        for name in (*(each for each in names if each != last), last):
            if name == last:
                check()
            with self._failing(f"{tree}/{name}"):
                self._in_folder(f"{tree}/{name}", partial(self._files.put_file, str(staged / name)))

    def remove(self, tree: str, first: str) -> None:
        self._remove_object(f"{tree}/{first}")
        folders = {tree}
        for key in self.keys(tree):
            self._remove_object(f"{tree}/{key}")
            folders |= {f"{tree}/{parent}".removesuffix("/.") for parent in Path(key).parents}
        for folder in sorted(folders, key=len, reverse=True):  # where there are folders
            with suppress(Exception):
                self._files.rmdir(f"{self._path}/{folder}")

    def local_copy(self, tree: str, keys: Iterable[str]) -> Path:
        here = self.staging / tree
        self._copies.add(here)
        for key in keys:
            (here / key).parent.mkdir(parents=True, exist_ok=True)
            with self._failing(f"{tree}/{key}"):
                self._files.get_file(f"{self._path}/{tree}/{key}", str(here / key))
        return here

    def drop_copies(self) -> None:
        for each in self._copies:
            shutil.rmtree(each, ignore_errors=True)
        self._copies.clear()

    @contextmanager
    def locked(self, seconds: float) -> Iterator[None]:
        yield

    def _remove_object(self, key: str) -> None:
        with self._failing(key), suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{key}")

    def _in_folder(self, key: str, write: Callable[[str], object]) -> None:
        path = f"{self._path}/{key}"
        try:
            write(path)
        except FileNotFoundError:  # this one wants the folder to be there
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            write(path)

    def _within(self, path: str, top: str) -> str:
        """The key below `top` of what a list names; "" if it is not below it."""
        stripped, start = str(path).rstrip("/"), top.rstrip("/") + "/"
        for each in (stripped, "/" + stripped):  # some lists leave out the first slash
            if each.startswith(start):
                return each[len(start) :]
        return ""

    @contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        """File systems raise what their libraries do; here it is an OSError that names the object."""
        try:
            yield
        except Exception as error:
            code = getattr(error, "errno", None) or (
                errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
            )
            text = (
                os.strerror(code) if isinstance(error, OSError) and error.errno else f"{type(error).__name__}: {error}"
            )
            raise OSError(code, text, f"{self.url}/{key}".rstrip("/")) from error
