"""Defers signals during a few lines that must run as a unit.

Python calls a signal's handler in the main thread, after any call, and the handler may raise: Ctrl-C raises
KeyboardInterrupt, and a timeout or a job's scheduler whatever its author chose. Code in which two values have to change
together does so inside `with Uninterrupted():`. A signal that comes during the block is recorded, and its handler runs
when the block ends. A block is short and does not wait; a block that has to wait does so in slices of `SLICE_SECONDS`,
and calls `check` between them, where the state is consistent; long work that may be interrupted at any point runs
inside `allow`. Signals never reach other threads, so there a block does nothing. A block costs some microseconds.
"""

# The functions that `signal` wraps: its own look up each handler in an enum, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import sys
import threading
from _thread import interrupt_main
from collections.abc import Callable
from itertools import compress
from signal import SIGINT, SIGKILL, SIGSTOP, valid_signals
from types import FrameType
from typing import Any, Self

SLICE_SECONDS = 0.1
"""The longest wait inside a block, and so the longest delay of a signal."""
_NUMBERS = (*sorted(int(number) for number in valid_signals() - {SIGINT, SIGKILL, SIGSTOP}), int(SIGINT))
"""The signals that can have a handler. SIGINT is the last: if it is deferred, all are."""


class Uninterrupted:
    """A context manager that defers the signals that have a handler in Python until its block ends. It is itself their
    handler during the block, so there is no moment without a handler. A block inside another one leaves all to that
    one."""

    __slots__ = ("_before", "_defers", "_pending", "was_interrupted")

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}  # the handlers of the deferred signals
        self._defers = True
        self._pending: set[Any] = set()  # numbers
        self.was_interrupted = False
        """Whether a handler has raised an exception, in this block or since its last `allow` began."""

    def __enter__(self) -> Self:
        if threading.get_ident() == threading.main_thread().ident and not _defers(_signal.getsignal(SIGINT)):
            handlers = list(map(_signal.getsignal, _NUMBERS))
            try:
                # Other signals terminate the process, are ignored, or are handled outside of Python.
                for number, handler in compress(zip(_NUMBERS, handlers, strict=True), map(callable, handlers)):
                    if not _defers(handler):
                        self._before[number] = handler
                        _signal.signal(number, self)
            except BaseException:  # from the handler of a signal that is not deferred yet
                self.__exit__()
                raise
        return self

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal, or handle it inside `allow`."""
        if self._defers:
            self._pending.add(number)
        else:
            self._handle(number, frame)

    def check(self) -> None:
        """Handle the signals that were deferred. Inside another block, that block defers them."""
        while self._pending:
            self._handle(self._pending.pop(), sys._getframe())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except BaseException:
            self.was_interrupted = True
            raise

    def allow(self) -> "_SignalsAllowed":
        """Return a context manager inside which signals are handled as before the block."""
        return _SignalsAllowed(self)

    def __exit__(self, *_: object) -> None:
        if self._before:
            self._defers = False
            try:
                self._restore()
            except BaseException:  # from a handler
                self._restore()
                raise
            finally:
                list(map(interrupt_main, self._pending))  # the interpreter calls their handlers next

    def _restore(self) -> None:
        for number, handler in reversed(self._before.items()):
            if _signal.getsignal(number) is self:  # no handler has installed another one
                _signal.signal(number, handler)


class _SignalsAllowed:
    """A class and not a generator: an interrupted generator would be closed later, and defer signals from then on."""

    __slots__ = ("_held",)

    def __init__(self, held: Uninterrupted) -> None:
        self._held = held

    def __enter__(self) -> None:
        self._held.was_interrupted = False
        self._held.check()
        self._held._defers = False

    def __exit__(self, *_: object) -> None:
        self._held._defers = True


def _defers(handler: object) -> bool:
    return type(handler) is Uninterrupted and handler._defers
