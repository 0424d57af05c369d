"""One delimited text file: where its rows begin, and how it is cut into blocks of whole rows.

A plain file is cut into byte ranges, each of which can be read on its own: the rows that begin in the range. A
compressed file, or one whose quoted values may hold newlines, can only be read from its start: it is one block, in
pieces. Lines are counted only where a message needs one. What the fields mean is not known here.
"""

import csv
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.optional_deps import pyarrow_for
from satrap.data.file_source import File
from satrap.errors import SourceError

_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_HEAD_BYTES = 4096  # read at a time where a header is looked for
_SLACK_BYTES = 1 << 16  # read beyond a range at once, so that its last row seldom takes another request
_BOM = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLayout:
    """How a text is written, apart from what its columns mean."""

    delimiter: str
    quote: str | None
    encoding: str
    newlines_in_values: bool
    skip_lines: int
    header: bool
    block_bytes: int
    max_line_bytes: int

    @property
    def quote_byte(self) -> int:
        return -1 if self.quote is None else ord(self.quote)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Whole rows of a file, as UTF-8."""

    text: NDArray[np.uint8]
    first_line: Callable[[], int]
    """The number of its first line, from 1. May read the file up to there."""


class TextFile:
    """A file of rows. Its start is looked at once, by whichever thread comes first."""

    def __init__(self, file: File, layout: TextLayout, columns: Sequence[str] | None) -> None:
        """columns: what a header must name, in this order; None: not known yet."""
        self.file, self.layout = file, layout
        self._columns = columns
        self._codec = next((codec for end, codec in _CODECS.items() if file.path.endswith(end)), None)
        self._lock = threading.Lock()
        self._start: int | None = None

    @property
    def is_stream(self) -> bool:
        """Whether it can only be read from its start."""
        return self._codec is not None or self.layout.newlines_in_values

    def header(self) -> list[str]:
        """The names of the columns, from the file's first line."""
        with self._opened() as stream:
            return self._parse_header(_Lines(stream, self.layout, self.file.name).head())

    def ranges(self) -> list[tuple[int, int]]:
        """The byte ranges that the file is cut into."""
        size, step = self.file.size, self.layout.block_bytes
        return [(begin, min(size, begin + step)) for begin in range(0, size, step)]

    def pieces(self) -> Iterator[TextPiece]:
        """The whole file, piece by piece."""
        with self._opened() as stream:
            lines = _Lines(stream, self.layout, self.file.name)
            self._check_header(lines.head())
            for before, text in lines.rows():
                yield TextPiece(self._decoded(text), lambda before=before: before + 1)  # type: ignore[misc]

    def piece(self, begin: int, end: int) -> TextPiece:
        """The rows that begin in a byte range."""
        start = self._begin()
        first = max(begin, start)
        if first >= end:
            return TextPiece(np.empty(0, np.uint8), lambda: 1)
        at = first if first == start else first - 1  # the byte before tells whether a row begins here
        with self.file.open() as opened:
            text = self._read(opened, at, end + _SLACK_BYTES)
            low = 0 if first == start else _behind_newline(text[: end - at], 0)
            if at + low >= end:
                return TextPiece(np.empty(0, np.uint8), lambda: 1)
            high = _behind_newline(text, end - 1 - at)
            while high > len(text) and at + len(text) < self.file.size:
                seen = len(text)
                if at + seen - end > self.layout.max_line_bytes:
                    _refuse_long_line(self.file.name, self._line(end), self.layout.max_line_bytes)
                text = np.concatenate([text, self._read(opened, at + seen, at + 2 * seen)])
                high = _behind_newline(text, seen)
        return TextPiece(self._decoded(text[low : min(high, len(text))]), lambda: self._line(at + low))

    def _begin(self) -> int:
        """The byte at which the first row begins."""
        with self._lock:
            if self._start is None:
                with self.file.open() as stream:
                    lines = _Lines(stream, self.layout, self.file.name)
                    self._check_header(lines.head())
                    self._start = lines.taken
            return self._start

    def _check_header(self, header: bytes) -> None:
        if not self.layout.header or self._columns is None:
            return
        found = self._parse_header(header)
        if found != list(self._columns):
            raise SourceError(
                f"{self.file.name}: its header names the columns {found}; the first file has {list(self._columns)}: "
                "the files of one source have the same columns in the same order"
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
                f"{self.file.name}: it is empty; wanted a header that names its columns, or give columns="
            )
        if layout.quote is None or len(layout.delimiter) > 1:
            names = text.split(layout.delimiter)
        else:
            names = next(csv.reader([text], delimiter=layout.delimiter, quotechar=layout.quote))
        return [name.strip() for name in names]

    def _opened(self) -> Any:
        return _Stream(self.file, self._codec)

    def _decoded(self, text: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self.layout.encoding == "utf-8":
            return text
        return np.frombuffer(text.tobytes().decode(self.layout.encoding).encode(), np.uint8)

    def _read(self, opened: Any, begin: int, end: int) -> NDArray[np.uint8]:
        """The bytes from begin to end, or to the end of the file."""
        end = min(end, self.file.size)
        text = np.frombuffer(opened.read_at(max(0, end - begin), begin), np.uint8)
        if begin + len(text) < end:
            raise SourceError(
                f"{self.file.name}: it ends at byte {begin + len(text)} and had {self.file.size} when it was found: it "
                "was changed while it was read"
            )
        return text

    def _line(self, byte: int) -> int:
        """The number of the line that begins at a byte: the newlines before it are counted, and one more."""
        number, at = 1, 0
        with self.file.open() as opened:
            while at < byte:
                text = self._read(opened, at, min(byte, at + self.layout.block_bytes))
                number, at = number + int(_core.count_lines(text)), at + len(text)
        return number


def _refuse_long_line(name: str, line: int, most: int) -> None:
    raise SourceError(f"{name}, line {line}: it is longer than max_line_bytes={most}; allow more, or mend the file")


class _Stream:
    """A file that is read from its start, decompressed. What goes wrong while it is open names the file."""

    def __init__(self, file: File, codec: str | None) -> None:
        self._opened = file.open()
        self._codec = codec

    def __enter__(self) -> Any:
        opened = self._opened.__enter__()
        return (
            opened if self._codec is None else pyarrow_for("reading files").CompressedInputStream(opened, self._codec)
        )

    def __exit__(self, *error: Any) -> Any:
        return self._opened.__exit__(*error)


class _Lines:
    """Cuts a stream behind newlines."""

    def __init__(self, stream: Any, layout: TextLayout, name: str) -> None:
        self._stream, self._layout, self._name = stream, layout, name
        self._rest = b""
        self.taken = 0
        """Bytes of the lines that were taken."""
        self._number = 0

    def head(self) -> bytes:
        """Takes the lines before the first row; returns the last of them, the header."""
        header = b""
        self._fill(len(_BOM))
        if self._rest.startswith(_BOM):
            self._rest, self.taken = self._rest[len(_BOM) :], len(_BOM)
        for _ in range(self._layout.skip_lines + int(self._layout.header)):
            header = self._line()
        return header

    def rows(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Everything after it in pieces of whole rows, with the number of lines before each."""
        layout, wanted = self._layout, self._layout.block_bytes
        over = False
        while not over:
            over = not self._fill(wanted)
            text = np.frombuffer(self._rest, np.uint8)
            quote = layout.quote_byte if layout.newlines_in_values else -1
            end = len(text) if over else int(_core.last_row_end(text, quote))
            if end == 0 and not over:
                if len(text) > layout.max_line_bytes:
                    _refuse_long_line(self._name, self._number + 1, layout.max_line_bytes)
                wanted = len(text) + layout.block_bytes
                continue
            wanted = layout.block_bytes
            self._rest = self._rest[end:]
            if end:
                yield self._number, text[:end]
            self._number += int(_core.count_lines(text[:end]))

    def _line(self) -> bytes:
        at, over = self._rest.find(b"\n"), False
        while at < 0 and not over:
            if len(self._rest) > self._layout.max_line_bytes:
                _refuse_long_line(self._name, self._number + 1, self._layout.max_line_bytes)
            over = not self._fill(len(self._rest) + _HEAD_BYTES)
            at = self._rest.find(b"\n")
        end = len(self._rest) if at < 0 else at + 1
        line, self._rest = self._rest[:end], self._rest[end:]
        self.taken += end
        self._number += 1
        return line

    def _fill(self, size: int) -> bool:
        """Holds that many bytes ready; False if the stream ends before."""
        while len(self._rest) < size:
            more = self._stream.read(size - len(self._rest))
            if not more:
                return False
            self._rest = self._rest + more if self._rest else more
        return True


def _behind_newline(text: NDArray[np.uint8], at: int) -> int:
    """Behind the first newline at or after `at`; one more than the text has bytes if there is none."""
    step = 4096
    for begin in range(max(at, 0), len(text), step):
        found = np.flatnonzero(text[begin : begin + step] == _NEWLINE)
        if len(found):
            return begin + int(found[0]) + 1
    return len(text) + 1
