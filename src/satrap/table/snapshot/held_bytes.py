"""How much of a snapshot under a URL a verification may keep in memory until the tables are filled from it.

A file on a disk is mapped: the system keeps what it has read as long as there is room. What was read from a URL has no
such place. So a verification keeps up to `HELD_BYTES`, and the rest is read, and verified, a second time. Tables
without rows keep their full snapshots: they have no rows beside which the memory would be needed, and each part is
released once its rows are inserted.
"""

import threading

HELD_BYTES = 256 << 20


class HeldBytes:
    """The bytes that may be kept; thread-safe."""

    def __init__(self, *, is_new: bool = False) -> None:
        """is_new: whether the tables have no rows."""
        self._is_new, self._left, self._lock = is_new, HELD_BYTES, threading.Lock()

    def take(self, num_bytes: int, *, is_full: bool) -> bool:
        """Count these bytes if they may be kept in memory; return whether they may.

        is_full: whether they are of a full snapshot.
        """
        if self._is_new and is_full:
            return True
        with self._lock:
            if num_bytes > self._left:
                return False
            self._left -= num_bytes
            return True
