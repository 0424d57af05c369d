"""A folder in which objects are written and read by their keys: paths within it, with "/" between their parts.

This is all that snapshots and checkpoints know of where they are stored. `local_folder` is one on a disk, and
`object_folder` one under a URL. Every folder guarantees the following, and callers rely on nothing else:
 1. `read` and `open` of a key return what was last written under it, immediately;
 2. `write` and `Writer.complete` write all of an object or raise; after an error, or a kill, part of it may exist;
 3. names and sizes may lag: they may miss an object just written, or still name one just removed.

On a disk, `write` also ends with one rename of a flushed file, so that no object is ever seen in part. Paths are never
treated as patterns, whatever characters they contain. Every error is an OSError: its filename is the path or URL of the
object, its strerror what the system said.
"""

import mmap
from typing import Protocol


class Writer(Protocol):
    """A new object, written from start to end. It may be seen once `complete` has returned."""

    def write(self, piece: memoryview) -> None:
        """Append bytes, which the caller may change afterwards."""

    def complete(self) -> None:
        """Wait until all bytes are stored where they survive a crash of this machine."""

    def abort(self) -> None:
        """Give the object up, and remove what was written of it as far as possible. Does not raise an Exception."""


class Readable(Protocol):
    """An object that is read in parts."""

    size: int
    """Its bytes."""
    is_local: bool
    """Whether all of it can be read at any time from `memory`, without `load`."""
    memory: mmap.mmap
    """Its bytes; elsewhere than on a disk, those that were loaded."""

    def load(self, begin: int, end: int) -> None:
        """Read these bytes into `memory`."""

    def release(self, begin: int, end: int) -> None:
        """Release the memory of these bytes."""


class Folder(Protocol):
    """A folder; it need not exist yet."""

    is_local: bool
    """Whether it is on a disk."""

    @property
    def name(self) -> str:
        """The last part of its path."""

    def __fspath__(self) -> str:
        """Return its path or URL."""

    def __truediv__(self, name: str) -> "Folder":
        """Return a folder within it."""

    def names(self) -> list[str]:
        """Return the names of the objects and folders directly in this folder; none if it does not exist."""

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every object below this folder, by key."""

    def read(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return an object; raise FileNotFoundError if there is none, OSError if it has more than `max_bytes`."""

    def open(self, key: str) -> Readable:
        """Return an object that is not empty; raise FileNotFoundError if there is none."""

    def write(self, key: str, data: bytes) -> None:
        """Write a small object, replacing any with the same key."""

    def create(self, key: str) -> Writer:
        """Begin an object whose key was never used before."""

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""

    def delete_all(self, first: str | None = None) -> None:
        """Delete all objects below it, the one with the key `first` before all others, and its folders."""
