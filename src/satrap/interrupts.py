"""Holds Ctrl-C back for a few lines that must be done whole.

Python raises KeyboardInterrupt in the main thread, after any call. Where two things have to change together there, they
change inside `with Uninterrupted():`. A SIGINT that comes meanwhile is noted, and its handler runs when the block ends.
A block is short and waits for nothing; one that has to wait does so in slices of `SLICE_SECONDS`, and calls `look`
between them, where everything is in order; work that takes long and may be interrupted at any point runs inside
`let_in`. Signals never reach other threads, so for these a block does nothing. It costs some microseconds.
"""

# What `signal` wraps: its own functions look each handler up in an enum, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import sys
import threading
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any, Self

SLICE_SECONDS = 0.1
"""The longest wait inside a block: so late an interrupt may be seen."""


class Uninterrupted:
    """See the file's docstring. It is the handler of SIGINT while its block runs, so there is no moment between."""

    __slots__ = ("_before", "_came")

    def __init__(self) -> None:
        self._before: Callable[[int, FrameType | None], Any] | None = None
        self._came = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(SIGINT)
            if callable(before):  # else SIGINT ends the process, or is ignored, or is handled outside of Python
                self._before = before
                _signal.signal(SIGINT, self)
        return self

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Notes a SIGINT."""
        self._came = True

    def look(self) -> None:
        """Handles a SIGINT that was held back. Within another block that one holds it back."""
        if self._came and self._before is not None:
            self._came = False
            self._before(SIGINT, sys._getframe())

    def let_in(self) -> "_LetIn":
        """A context manager: inside, a SIGINT is handled as before the block."""
        return _LetIn(self, self._before)

    def __exit__(self, *_: object) -> None:
        before = self._before
        if before is not None:
            _signal.signal(SIGINT, before)  # handles first, by this object, what came until now
            if self._came:
                before(SIGINT, sys._getframe())


class _LetIn:
    """No generator: one that an interrupt left behind would end later, and put the block's handler in place then."""

    __slots__ = ("_before", "_held")

    def __init__(self, held: Uninterrupted, before: Callable[[int, FrameType | None], Any] | None) -> None:
        self._held, self._before = held, before

    def __enter__(self) -> None:
        if self._before is not None:
            self._held.look()
            _signal.signal(SIGINT, self._before)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(SIGINT, self._held)
