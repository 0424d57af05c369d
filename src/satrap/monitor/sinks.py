"""Sinks of reports: a bar on a terminal, a line elsewhere, JSON lines, TensorBoard."""

import json
import math
import os
import sys
import threading
from typing import Any, Protocol, TextIO

from satrap.config.location import Location, local_path
from satrap.config.validation import known_arguments
from satrap.errors import ConfigError
from satrap.monitor.report import Report, bar, line
from satrap.monitor.status_line import columns_of, draws_in_place, marks_of, write_out

BAR_SECONDS, LINE_SECONDS = 1.0, 10.0


class Sink(Protocol):
    """A destination of reports."""

    def write(self, report: Report) -> None:
        """Write one report."""

    def close(self) -> None:
        """Close the sink at the end of the run."""


class Screen:
    """Draws a bar on a terminal or in a notebook, or prints one line per report elsewhere."""

    @known_arguments()
    def __init__(self, stream: TextIO | None = None, *, as_bar: bool | None = None) -> None:
        """stream: standard error if None. as_bar: None draws a bar if the stream is a terminal or a notebook's."""
        # None in a process without standard error.
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        is_notebook = type(self._stream).__module__.startswith("ipykernel.")
        self._as_bar = draws_in_place(self._stream) or is_notebook if as_bar is None else as_bar
        self._is_erased = not is_notebook  # a notebook returns to the first column, and cannot erase
        self.every_seconds = BAR_SECONDS if self._as_bar else LINE_SECONDS
        self._marks = marks_of(self._stream)
        self._lock = threading.RLock()  # notes come from other threads
        self._note: str | None = None
        self._report: Report | None = None  # the last one
        self._open = False  # whether the line of a bar is unfinished
        self._width = 0  # characters of that line

    def __repr__(self) -> str:
        return f"Screen({'a bar' if self._as_bar else 'lines'}, every_seconds={self.every_seconds:g})"

    def write(self, report: Report) -> None:
        """Draw the bar, or print the line, also of an evaluation on a terminal. A closed terminal does not stop
        training."""
        with self._lock:
            self._report = report
            self._draw(report)

    def note(self, text: str | None) -> None:
        """Show a note in the bar from now on, from any thread; None: no more."""
        with self._lock:
            self._note = text
            if self._open and self._report is not None:
                self._draw(self._report)

    def _draw(self, report: Report) -> None:
        notes = [self._note] if self._note else []
        if self._as_bar and not report.validation:
            self._put(bar(report, columns_of(self._stream) - 1, self._marks, notes), is_bar=True)
        else:
            self._put(line(report), is_bar=False)

    def _put(self, text: str, *, is_bar: bool) -> None:
        """Write a bar, whose line stays open, or a line, over the bar if there is one."""
        was_open, self._open = self._open, is_bar
        first = "\r" if was_open or self._open else ""
        # What remains of a longer earlier bar is erased, or covered by spaces.
        last = ("\x1b[K" if self._is_erased else " " * (self._width - len(text))) if first else ""
        self._width = len(text) if self._open else 0
        write_out(self._stream, f"{first}{text}{last}" + ("" if self._open else "\n"))

    def close(self) -> None:
        """Replace the last bar by its line, of which the terminal may be too narrow for a part."""
        if self._open and self._report is not None:
            self._put(line(self._report), is_bar=False)


class JsonLines:
    """Appends one JSON object per line to a file, with null for numbers that are not finite."""

    @known_arguments()
    def __init__(self, path: str | os.PathLike[str]) -> None:
        """path: the file; created now, so that a path that cannot be written raises early."""
        self._path = local_path(path, "JsonLines: path")
        self._path.touch()

    def write(self, report: Report) -> None:
        """Append a line."""
        numbers = {name: value if math.isfinite(value) else None for name, value in report.scalars().items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(numbers) + "\n")

    def close(self) -> None:
        """Do nothing: the file is open only while a line is written."""


class TensorBoard:
    """Writes scalars to event files, by step; needs the packages torch and tensorboard."""

    @known_arguments()
    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """folder: the folder of this run, or its URL; TensorBoard shows each folder as a curve."""
        location = Location.parse(folder, "TensorBoard: folder")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"TensorBoard: {error}: pip install 'satrap[tensorboard]', or omit this sink") from error
        writer: Any = SummaryWriter
        self._writer = writer(str(location))

    def write(self, report: Report) -> None:
        """Add the numbers at the report's step."""
        for name, value in report.scalars().items():
            if name != "step":
                self._writer.add_scalar(name, value, report.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
