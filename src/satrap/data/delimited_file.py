"""A delimited text file: finds its rows, and splits it into blocks of whole rows.

A plain file is split into byte ranges, each of which can be read on its own: it has the rows that begin in the range. A
compressed file, or one whose quoted values may hold newlines, can only be read from its start: it is one block of
several chunks. Lines are counted only where a message needs a line number. This module does not know the meaning of
fields.
"""

import csv
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.optional_deps import pyarrow_for
from satrap.data.file_source import SIGNATURE_BYTES, File, refuse_other_format
from satrap.errors import SourceError

_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_HEAD_BYTES = 4096  # read at a time to find the header
_SLACK_BYTES = 1 << 16  # read beyond a range, so that its last row rarely needs another request
_BOM = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLayout:
    """The format of a text file, apart from the meaning of its columns."""

    delimiter: str = ","
    quote: str | None = None
    encoding: str = "utf-8"
    newlines_in_values: bool = False
    skip_lines: int = 0
    header: bool = False
    block_bytes: int
    max_line_bytes: int

    @property
    def newline_quote(self) -> int:
        """The quote that may enclose a newline which does not end a row; -1: none."""
        return -1 if self.quote is None or not self.newlines_in_values else ord(self.quote)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Whole rows of a file, as UTF-8."""

    text: NDArray[np.uint8]
    first_line: Callable[[], int]
    """Returns the number of the first line, from 1. It may read the file up to there."""


class TextFile:
    """A text file of rows. Its start is read once, by the first thread that needs it."""

    def __init__(self, file: File, layout: TextLayout, columns: Sequence[str] | None) -> None:
        """columns: the names that a header must have, in this order; None: not known yet."""
        self.file, self.layout = file, layout
        self._columns = columns
        self._codec = next((codec for end, codec in _CODECS.items() if file.path.endswith(end)), None)
        self._lock = threading.Lock()
        self._start: int | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the file can only be read from its start."""
        return self._codec is not None or self.layout.newlines_in_values

    def header(self) -> list[str]:
        """Return the names of the columns, from the file's first line."""
        with self._opened() as stream:
            return self._parse_header(_LineSplitter(stream, self.layout, self.file.name).head())

    def ranges(self) -> list[tuple[int, int]]:
        """Return the byte ranges into which the file is split."""
        size, step = self.file.size, self.layout.block_bytes
        return [(begin, min(size, begin + step)) for begin in range(0, size, step)]

    def chunks(self) -> Iterator[TextChunk]:
        """Yield the whole file in chunks."""
        with self._opened() as stream:
            lines = _LineSplitter(stream, self.layout, self.file.name)
            self._check_header(lines.head())
            for before, text in lines.rows():
                yield TextChunk(self._decoded(text), lambda before=before: before + 1)  # type: ignore[misc]

    def chunk(self, begin: int, end: int) -> TextChunk:
        """Return the rows that begin in a byte range."""
        start = self._first_row()
        first = max(begin, start)
        if first >= end:
            return TextChunk(np.empty(0, np.uint8), lambda: 1)
        at = first if first == start else first - 1  # if the byte before is a newline, a row begins at `first`
        with self.file.open() as opened:
            text = self._read(opened, at, end + _SLACK_BYTES)
            low = 0 if first == start else _behind_newline(text[: end - at], 0)
            if at + low >= end:
                return TextChunk(np.empty(0, np.uint8), lambda: 1)
            high = _behind_newline(text, end - 1 - at)
            while high > len(text) and at + len(text) < self.file.size:
                seen = len(text)
                if at + seen - end > self.layout.max_line_bytes:
                    _refuse_long_line(self.file.name, self._line(end), self.layout.max_line_bytes)
                text = np.concatenate([text, self._read(opened, at + seen, at + 2 * seen)])
                high = _behind_newline(text, seen)
        return TextChunk(self._decoded(text[low : min(high, len(text))]), lambda: self._line(at + low))

    def row_begins(self, text: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return where the rows of a piece of text begin, as the core counts rows."""
        is_end = text == _NEWLINE
        if self.layout.newline_quote >= 0:
            is_end &= np.cumsum(text == self.layout.newline_quote) % 2 == 0
        ends = np.flatnonzero(is_end) + 1
        return np.append(0, ends[ends < len(text)]) if len(text) else ends

    def _first_row(self) -> int:
        """Return the byte at which the first row begins."""
        with self._lock:
            if self._start is None:
                with self.file.open() as stream:
                    lines = _LineSplitter(stream, self.layout, self.file.name)
                    self._check_header(lines.head())
                    self._start = lines.taken
            return self._start

    def _check_header(self, header: bytes) -> None:
        if not self.layout.header or self._columns is None:
            return
        names = self._parse_header(header)
        if names != list(self._columns):
            raise SourceError(
                f"{self.file.name}: its header names the columns {names}; the first file has {list(self._columns)}; "
                "give all files of a source the same columns in the same order"
            )

    def _parse_header(self, header: bytes) -> list[str]:
        layout = self.layout
        try:
            text = header.decode(layout.encoding).rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{self.file.name}: its header is not {layout.encoding} ({error}); give columns="
            ) from error
        if not text:
            raise SourceError(
                f"{self.file.name}: it is empty; expected a header that names its columns, or give columns="
            )
        if layout.quote is None or len(layout.delimiter) > 1:
            names = text.split(layout.delimiter)
        else:
            try:
                names = next(csv.reader([text], delimiter=layout.delimiter, quotechar=layout.quote))
            except csv.Error as error:  # a lone carriage return
                raise SourceError(
                    f"{self.file.name}: its header cannot be read ({error}); expected lines that end with LF or CR LF: "
                    "convert the file, or give columns="
                ) from error
        return [name.strip() for name in names]

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the file to read it from its start, decompressed. Errors while it is open name the file."""
        with self.file.open() as opened:
            if self._codec is None:
                yield opened
            else:
                yield pyarrow_for("reading files").CompressedInputStream(opened, self._codec)

    def _decoded(self, text: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self.layout.encoding == "utf-8":
            return text
        return np.frombuffer(text.tobytes().decode(self.layout.encoding).encode(), np.uint8)

    def _read(self, opened: Any, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the bytes from begin to end, or to the end of the file."""
        end = min(end, self.file.size)
        text = np.frombuffer(opened.read_at(max(0, end - begin), begin), np.uint8)
        if begin + len(text) < end:
            raise SourceError(
                f"{self.file.name}: it ends at byte {begin + len(text)} and had {self.file.size} bytes when reading "
                "began; it must not change meanwhile"
            )
        return text

    def _line(self, byte: int) -> int:
        """Return the number of the line that begins at a byte: one more than the newlines before it."""
        number, at = 1, 0
        with self.file.open() as opened:
            while at < byte:
                text = self._read(opened, at, min(byte, at + self.layout.block_bytes))
                number, at = number + int(_core.count_lines(text)), at + len(text)
        return number


def _refuse_long_line(name: str, line: int, most: int) -> None:
    raise SourceError(f"{name}, line {line}: it is longer than max_line_bytes={most}; allow more, or fix the file")


class _LineSplitter:
    """Splits a stream after newlines."""

    def __init__(self, stream: Any, layout: TextLayout, name: str) -> None:
        self._stream, self._layout, self._name = stream, layout, name
        self._buffer = b""
        self.taken = 0
        """The number of bytes of the lines that were taken."""
        self._number = 0

    def head(self) -> bytes:
        """Take the lines before the first row; return the last of them, the header."""
        header = b""
        self._fill(SIGNATURE_BYTES)
        refuse_other_format(self._name, self._buffer)
        if self._buffer.startswith(_BOM):
            self._buffer, self.taken = self._buffer[len(_BOM) :], len(_BOM)
        for _ in range(self._layout.skip_lines + int(self._layout.header)):
            header = self._line()
        return header

    def rows(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield the rest in chunks of whole rows, each with the number of lines before it."""
        layout, num_bytes = self._layout, self._layout.block_bytes
        at_end = False
        while not at_end:
            at_end = not self._fill(num_bytes)
            text = np.frombuffer(self._buffer, np.uint8)
            end = len(text) if at_end else int(_core.last_row_end(text, layout.newline_quote))
            if end == 0 and not at_end:
                if len(text) > layout.max_line_bytes:
                    _refuse_long_line(self._name, self._number + 1, layout.max_line_bytes)
                num_bytes = len(text) + layout.block_bytes
                continue
            num_bytes = layout.block_bytes
            self._buffer = self._buffer[end:]
            if end:
                yield self._number, text[:end]
            self._number += int(_core.count_lines(text[:end]))

    def _line(self) -> bytes:
        at, at_end = self._buffer.find(b"\n"), False
        while at < 0 and not at_end:
            if len(self._buffer) > self._layout.max_line_bytes:
                _refuse_long_line(self._name, self._number + 1, self._layout.max_line_bytes)
            at_end = not self._fill(len(self._buffer) + _HEAD_BYTES)
            at = self._buffer.find(b"\n")
        end = len(self._buffer) if at < 0 else at + 1
        line, self._buffer = self._buffer[:end], self._buffer[end:]
        self.taken += end
        self._number += 1
        return line

    def _fill(self, size: int) -> bool:
        """Buffer that many bytes; return False if the stream ends before."""
        while len(self._buffer) < size:
            read = self._stream.read(size - len(self._buffer))
            if not read:
                return False
            self._buffer += read
        return True


def _behind_newline(text: NDArray[np.uint8], at: int) -> int:
    """Return the index after the first newline at or after `at`; without one, the text's length plus one."""
    step = 4096
    for begin in range(max(at, 0), len(text), step):
        newlines = np.flatnonzero(text[begin : begin + step] == _NEWLINE)
        if len(newlines):
            return begin + int(newlines[0]) + 1
    return len(text) + 1
