"""Closes the resources of objects that Python has garbage-collected.

Python collects in any thread, at any moment, whatever locks that thread holds. So a destructor that takes a lock, or
waits for a thread, may deadlock; and an exception from Ctrl-C inside a destructor is swallowed. Here the collection of
an object only puts a note into a queue, in C, and a separate thread does the closing:

    close_when_collected(self, self._pipeline.close)

At the end of the process the main thread closes everything that was not closed by then, the newest first.
"""

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_END_SECONDS = 20.0  # how long an exiting process waits for a close in progress


class _Watch(weakref.ref[Any]):
    """A weak reference to an owner, with the function to call once the owner is collected."""

    __slots__ = ("close",)
    close: Callable[[], None]


class _Closer:
    """The watches of one process, and the thread that closes."""

    def __init__(self) -> None:
        self._watches: dict[int, _Watch] = {}
        self._collected: SimpleQueue[_Watch | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, owner: object, close: Callable[[], None]) -> None:
        watch = _Watch(owner, self._collected.put)
        watch.close = close
        self._watches[id(watch)] = watch
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="satrap-collected", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Close everything that is watched, and stop the thread."""
        if self._thread is not None:
            self._collected.put(None)
            self._thread.join(_END_SECONDS)
        while self._watches:
            _close(self._watches.popitem()[1])

    def _run(self) -> None:
        while (watch := self._collected.get()) is not None:
            _close(watch)
            self._watches.pop(id(watch), None)
            del watch


def _close(watch: _Watch) -> None:
    try:
        watch.close()
    except BaseException:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def close_when_collected(owner: object, close: Callable[[], None]) -> None:
    """Call `close` after the owner was collected, or at the end of the process, whichever comes first.

    It must not refer to the owner. It may be called twice, from two threads, and after the owner closed itself, and
    must then do nothing. A fork calls nothing that was watched before it.
    """
    _closer.watch(owner, close)


def _create_closer() -> None:
    global _closer
    _closer = _Closer()


_closer = _Closer()
os.register_at_fork(after_in_child=_create_closer)
atexit.register(lambda: _closer.end())
