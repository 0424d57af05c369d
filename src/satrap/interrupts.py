"""Defers Ctrl-C during a few lines that must run as a unit.

Python raises KeyboardInterrupt in the main thread, after any call. Code in which two values have to change together
does so inside `with Uninterrupted():`. A SIGINT during the block is recorded, and its handler runs when the block ends.
A block is short and does not wait; a block that has to wait does so in slices of `SLICE_SECONDS`, and calls `check`
between them, where the state is consistent; long work that may be interrupted at any point runs inside `allow`.
Signals never reach other threads, so there a block does nothing. A block costs some microseconds.
"""

# The functions that `signal` wraps: its own look up each handler in an enum, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import sys
import threading
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any, Self

SLICE_SECONDS = 0.1
"""The longest wait inside a block, and so the longest delay of an interrupt."""


class Uninterrupted:
    """A context manager that defers SIGINT until its block ends. It is itself the signal handler during the block, so
    there is no moment without a handler. A block inside another one leaves all to that one."""

    __slots__ = ("_before", "_is_pending")

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._is_pending = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(SIGINT)
            # Otherwise SIGINT terminates the process, is ignored, is handled outside of Python, or is deferred already.
            if callable(before) and type(before) is not Uninterrupted:
                self._before = before
                _signal.signal(SIGINT, self)
        return self

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a SIGINT."""
        self._is_pending = True

    def check(self) -> None:
        """Handle a SIGINT that was deferred. Inside another block, that block defers it."""
        if self._is_pending and self._before is not None:
            self._is_pending = False
            self._before(SIGINT, sys._getframe())

    def allow(self) -> "_InterruptsAllowed":
        """Return a context manager inside which a SIGINT is handled as before the block."""
        return _InterruptsAllowed(self, self._before)

    def __exit__(self, *_: object) -> None:
        before = self._before
        if before is not None:
            _signal.signal(SIGINT, before)  # a SIGINT until now still calls this object
            if self._is_pending:
                before(SIGINT, sys._getframe())


class _InterruptsAllowed:
    """Handles SIGINT as before the block. A class and not a generator: an interrupted generator would be closed later,
    and install the block's handler at that time."""

    __slots__ = ("_before", "_held")

    def __init__(self, held: Uninterrupted, before: Callable[[int, FrameType | None], Any] | None) -> None:
        self._held, self._before = held, before

    def __enter__(self) -> None:
        if self._before is not None:
            self._held.check()
            _signal.signal(SIGINT, self._before)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(SIGINT, self._held)
