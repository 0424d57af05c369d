"""A line on a terminal that says how far a command is, and what a terminal can show.

with StatusLine() as line:
    for number, batch in enumerate(batches):
        line.show("reading batches", number, 100)    # ████░░░░░░  40% | reading batches
"""

import curses
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Self, TextIO, TypeVar

from satrap.monitor.report import drawn_share, fit

T = TypeVar("T")
_MIN_SECONDS = 0.1  # between two drawings of the same work


class StatusLine:
    """Draws the line on standard error, and erases it at the end. Where that is no terminal, nothing is shown."""

    def __init__(self) -> None:
        self._stream = sys.stderr if draws_in_place(sys.stderr) else None
        self._what, self._due = "", 0.0

    @property
    def is_shown(self) -> bool:
        """Whether there is a terminal."""
        return self._stream is not None

    def show(self, what: str, done: int, total: int) -> None:
        """Show what is being done, and how much of it is done."""
        now = time.monotonic()
        if self._stream is None or (what == self._what and now < self._due):
            return
        self._what, self._due = what, now + _MIN_SECONDS
        columns, marks = columns_of(self._stream) - 1, marks_of(self._stream)
        shown = [drawn_share(done / max(1, total), columns, marks), what]
        write_out(self._stream, f"\r{fit(shown, columns)}\x1b[K")

    def track(self, items: Iterable[T], what: str, total: int) -> Iterator[T]:
        """Yield the items, and show how many were."""
        for number, item in enumerate(items):
            self.show(what, number, total)
            yield item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._what:
            self._what = ""
            write_out(self._stream, "\r\x1b[K")


def write_out(stream: TextIO | None, text: str) -> None:
    """Write to a terminal at once, if there is one. One that is closed stops nothing."""
    if stream is not None:
        with suppress(OSError):
            stream.write(text)
            stream.flush()


def draws_in_place(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal on which a line can be erased and drawn again."""
    if stream is None or stream.closed or not stream.isatty():
        return False
    with suppress(curses.error):  # the kind of terminal is not known, so it is taken for a common one
        curses.setupterm(fd=stream.fileno())
        return curses.tigetstr("el") is not None
    return True


def marks_of(stream: TextIO | None) -> str:
    """Return the characters of a full and of an empty part of a bar, which the stream can encode."""
    with suppress(UnicodeEncodeError, LookupError):
        "█░".encode(getattr(stream, "encoding", None) or "ascii")
        return "█░"
    return "#."


def columns_of(stream: TextIO | None) -> int:
    """Return the width of the terminal; 80 if it is not known."""
    try:
        return os.get_terminal_size(stream.fileno() if stream else -1).columns or 80
    except (OSError, ValueError, AttributeError):  # not a terminal
        return 80
