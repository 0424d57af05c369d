"""Raises a signal at a chosen moment of the main thread, for tests of interrupts: Ctrl-C, or any other signal whose
handler raises an exception.

CPython checks for signals only at some instructions: at the start of a function, after a call, at a jump back.
`Interrupts` counts those in the frames of a block and raises a signal at the n-th, as the C handler of a real signal
does: the current handler runs at the next place where the interpreter checks, and only there.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import contextlib
import dis
import faulthandler
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, Self

import zmq

import satrap


def _files_of(module: ModuleType) -> str:
    """Returns what the path of each of a module's files begins with: its own path, or that of its package's folder."""
    assert module.__file__ is not None
    return str(Path(module.__file__).parent) + "/" if hasattr(module, "__path__") else module.__file__


# By the places of the modules: a checkout may have any name, and `satrap` is one that its other folders share.
_WATCHED = tuple(map(_files_of, (satrap, zmq, threading, contextlib, concurrent.futures, queue)))
_CHECKS_SIGNALS = {code for name, code in dis.opmap.items() if name.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))}


class _Number(int):
    """A signal number. Reading `trip` raises that signal, and no instruction of the reader checks for it."""

    trip = property(_thread.interrupt_main)


class Interrupts:
    """A context manager that raises a signal at the n-th moment at which the main thread can see one inside."""

    def __init__(self, at: int, number: int = signal.SIGINT) -> None:
        self.moments = 0
        """Number of moments so far."""
        self._at, self._signal = at, _Number(number)
        self._codes: dict[CodeType, bytes] = {}  # each read of co_code creates a new object

    @property
    def came(self) -> bool:
        """Whether there were n moments, so that the signal was raised."""
        return self.moments >= self._at

    def __enter__(self) -> Self:
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_WATCHED):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._codes.setdefault(frame.f_code, frame.f_code.co_code)
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and self._codes[frame.f_code][frame.f_lasti] in _CHECKS_SIGNALS:
            self.moments += 1
            if self.moments == self._at:
                self._signal.trip  # noqa: B018
        return self._instruction


@contextmanager
def raising(number: int, error: BaseException) -> Iterator[None]:
    """Handle the signal by raising the error, as a job's scheduler, a timeout or a test runner does."""

    def handle(_: int, frame: FrameType | None) -> None:
        raise error.with_traceback(None)

    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def no_hang(seconds: float) -> Iterator[None]:
    """Fail the block if it takes longer, wherever it waits, and print where."""

    def hangs(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(all_threads=True)
        raise AssertionError(f"did not finish within {seconds} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
