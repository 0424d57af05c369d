"""Delimited text files as sources: CSV, TSV and similar, plain or compressed, parsed by the core.

This module knows what the fields of a row mean; `delimited_file` finds the rows. Text has no types: the strings of an
id column are hashed unless it is declared otherwise. An empty field, or one of the strings in `missing`, is a missing
value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.columns import Columns, LabelColumn, as_names
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import check_choice, check_flag, check_integer, describe, set_field
from satrap.data.block import Block, Chunk
from satrap.data.delimited_file import TextChunk, TextFile, TextLayout
from satrap.data.file_source import File, find_files
from satrap.data.inputs import Position
from satrap.data.source import FileSource
from satrap.errors import ConfigError

_VALUE, _REFUSE, _DROP = 0, 1, 2  # the core's numbers for the handling of a missing label
_LABEL_KINDS = {"real": 0, "binary": 1, "count": 2}  # the core's numbers
_NEWLINE, _RETURN = b"\n\r"
_COMPRESSION = 5  # the assumed compression ratio; used only for reading ahead


@dataclass(frozen=True, repr=False)
class CSV(FileSource):
    """Delimited text files, or folders, globs and URLs of them; .gz, .bz2, .zst and .lz4 are decompressed.

    columns: the names of all columns of a file without a header. None: the first line of each file names them.
    delimiter: the separator of fields: 1 to 8 ASCII characters, e.g. "\\t" or "::".
    quote: the character that may enclose a field, and is doubled inside it; None: no character encloses fields.
    missing: strings that stand for a missing value, besides the empty string; e.g. "?" or "NA".
    strip: whether to remove the blanks around a field.
    skip_lines: the number of lines to skip at the start of each file, before the header.
    encoding: the encoding of the files: "utf-8" or "latin-1".
    newlines_in_values: whether a quoted field may hold newlines. Such a file can only be read from its start, also to
        resume.
    block_bytes: the number of bytes of text that are read at a time.
    max_line_bytes: the maximum length of a line, which is held in memory as a whole. A longer line is an error.
    """

    _: KW_ONLY
    columns: Sequence[str] | None = None
    delimiter: str = ","
    quote: str | None = '"'
    missing: str | Sequence[str] = ()
    strip: bool = False
    skip_lines: int = 0
    encoding: str = "utf-8"
    newlines_in_values: bool = False
    block_bytes: int = 4 << 20
    max_line_bytes: int = 16 << 20
    _format: ClassVar[str] = ""  # what has the columns, if that is no choice

    def __post_init__(self) -> None:
        super().__post_init__()
        where = type(self).__name__
        if self.columns is not None:
            set_field(self, "columns", as_names(where, "columns", self.columns))
        if not isinstance(self.delimiter, str) or not 1 <= len(self.delimiter) <= 8 or not self.delimiter.isascii():
            raise ConfigError(f"{where}: delimiter is {describe(self.delimiter)}; expected 1 to 8 ASCII characters")
        if self.quote is not None:
            if not isinstance(self.quote, str) or len(self.quote) != 1 or not self.quote.isascii():
                raise ConfigError(f"{where}: quote is {describe(self.quote)}; expected one ASCII character, or None")
            if self.quote in self.delimiter:
                raise ConfigError(
                    f"{where}: quote {self.quote!r} is part of delimiter {self.delimiter!r}; give another quote"
                )
        for column in self.dense:  # type: ignore[union-attr]  # normalised by Source
            if column.width is not None:  # type: ignore[union-attr]
                raise ConfigError(f"{where}: {column!r} has a width; expected none, since a field holds one number")
        derived = [name for name, column in self.ids.items() if column.is_derived]  # type: ignore[union-attr]
        derived += [column.name for column in self.dense if column.time]  # type: ignore[union-attr]
        if derived:
            raise ConfigError(
                f"{where}: {derived[0]!r} has boundaries, crossed or time, which text files do not take; write the "
                "data as Parquet, or compute the column"
            )
        set_field(self, "missing", as_names(where, "missing", self.missing))
        check_choice(where, "encoding", self.encoding, ("utf-8", "latin-1"))
        for name in ("strip", "newlines_in_values"):
            check_flag(where, name, getattr(self, name))
        for name, low in (("skip_lines", 0), ("block_bytes", 1), ("max_line_bytes", 1)):
            set_field(self, name, check_integer(where, name, getattr(self, name), low, 1 << 31))

    def signature(self) -> dict[str, Any]:
        names = ("block_bytes", "newlines_in_values", "skip_lines")
        return super().signature() | {name: getattr(self, name) for name in names}

    def header(self) -> list[str]:
        """Return the names of the columns, from the first line of the first file."""
        return TextFile(find_files(self.path, self.filesystem)[0], self._layout(), None).header()

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        for feature, column in zip(columns.features, columns.ids, strict=True):
            if column.numbers:
                raise ConfigError(
                    f"{type(self).__name__}: the ids of feature {feature!r} have numbers {list(column.numbers)} beside "
                    "them, and text has no lists of numbers: convert the files to Parquet or JSON lines"
                )
        files = find_files(self.path, self.filesystem)
        names = self.columns
        if names is None:
            names = self.header()
        return [block for file in files for block in self._blocks_of(file, columns, names)]

    def _blocks_of(self, file: File, columns: Columns, names: Sequence[str]) -> list[Block]:
        text = TextFile(file, self._layout(), names)
        partition = {name: value or "" for name, value in file.partition.items() if name not in names}
        header = "" if self.columns is not None else " (the first line; without a header, name columns=[...])"
        other = next((character for character in ",\t;|" if len(names) == 1 and character in names[0]), None)
        if header and other is not None:
            header = f" (the first line, which {self.delimiter!r} does not divide: give delimiter={other!r})"
        columns.check_present(file.name, [*names, *partition], header)
        parser = _RowParser(self, columns, names, partition)

        def read(*byte_range: int) -> Iterator[_TextRows]:
            chunks = [text.chunk(*byte_range)] if byte_range else text.chunks()
            yield from (_TextRows(text, parser, chunk) for chunk in chunks)

        if text.is_stream:
            return [Block(read=read, num_chunks=max(1, _COMPRESSION * file.size // self.block_bytes))]
        return [Block(read=partial(read, *byte_range), is_exact=True) for byte_range in text.ranges()]

    def _layout(self) -> TextLayout:
        return TextLayout(
            delimiter=self.delimiter,
            quote=self.quote,
            encoding=self.encoding,
            newlines_in_values=self.newlines_in_values,
            skip_lines=self.skip_lines,
            header=self.columns is None,
            block_bytes=self.block_bytes,
            max_line_bytes=self.max_line_bytes,
        )


class _RowParser:
    """Converts rows of text to samples."""

    def __init__(self, source: CSV, columns: Columns, names: Sequence[str], partition: Mapping[str, str]) -> None:
        """names: the columns of the text; partition: the columns that the file's path holds, which all rows have."""
        self._source, self._columns = source, columns
        self._names, self._partition = [*names, *partition], partition
        self._format = self._format_with(list(_uses(columns)))

    def _format_with(self, given: Sequence[tuple[str, _core.FieldUse]]) -> _core.TextFormat:
        """Return the format of the text with these uses of its columns."""
        source, columns, fmt = self._source, self._columns, _core.TextFormat()
        fmt.delimiter, fmt.strip, fmt.quoted_newlines = source.delimiter, source.strip, source.newlines_in_values
        fmt.quote = -1 if source.quote is None else ord(source.quote)
        fmt.missing = ["", *source.missing]
        fmt.num_dense, fmt.num_labels = len(columns.dense), len(columns.label)
        fmt.num_features, fmt.num_texts = len(columns.features), len(columns.extra)
        uses: dict[str, list[_core.FieldUse]] = {name: [] for name in self._names}
        for column, use in given:
            uses[column].append(use)
        fmt.columns, fmt.constants = [uses[name] for name in self._names], list(self._partition.values())
        return fmt

    def decode(self, file: TextFile, chunk: TextChunk) -> Chunk:
        samples, texts, bad_rows, num_dropped = _core.parse_text(self._format, chunk.text, self._source.max_bad_rows)
        extra = {name: _text_array(*text) for name, text in zip(self._columns.extra, texts, strict=True)}
        return Chunk(
            samples=samples,
            extra=extra,
            num_bad=len(bad_rows),
            describe_bad=lambda number: self._describe_bad(file, chunk, *bad_rows[number]),
            num_dropped=num_dropped,
            rows=lambda: self._rows(file, chunk.text, len(samples), [at for at, *_ in bad_rows], num_dropped),
        )

    def _rows(
        self, file: TextFile, text: NDArray[np.uint8], num_samples: int, bad: list[int], num_dropped: int
    ) -> NDArray[np.int64]:
        """Return `Chunk.rows`. bad: where malformed rows begin."""
        quote = file.layout.newline_quote
        rows = np.arange(int(_core.count_rows(text, quote)))
        if len(rows) == num_samples:
            return rows
        begins = file.row_begins(text)
        is_kept = np.ones(len(begins), np.bool_)
        is_kept[np.searchsorted(begins, bad, side="right") - 1] = False
        if len(self._names) - len(self._partition) > 1:  # a blank line is no row
            ended = np.concatenate([text, np.full(2, _NEWLINE, np.uint8)])
            first, second = ended[begins], ended[begins + 1]
            is_kept[(first == _NEWLINE) | ((first == _RETURN) & (second == _NEWLINE))] = False
        rows = np.flatnonzero(is_kept)
        has_label = self._has_label(text) if num_dropped else np.ones(len(rows), np.bool_)
        if len(has_label) != len(rows):  # quotes of malformed rows make rows of lines
            return np.arange(num_samples)
        rows = rows[has_label]
        return rows if len(rows) == num_samples else np.arange(num_samples)

    def _has_label(self, text: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Return which rows that are not malformed have the labels without which a row is dropped."""
        uses = list(_uses(self._columns))
        for _, use in uses:
            if use.absent == _DROP:
                use.absent, use.missing = _VALUE, np.nan
        samples, *_ = _core.parse_text(self._format_with(uses), text, self._source.max_bad_rows)
        *_, label = _core.gather([(samples, 0, len(samples))], np.arange(len(samples)))
        assert label is not None
        return np.asarray(~np.isnan(label).any(axis=1))

    def _describe_bad(
        self, file: TextFile, chunk: TextChunk, at: int, fault: str, column: int, begin: int, end: int, *counts: int
    ) -> str:
        line = chunk.first_line() + int(_core.count_lines(chunk.text[:at]))
        why = self._why(fault, column, bytes(chunk.text[begin : min(end, begin + 200)]), counts)
        if self._source._format:
            row = bytes(chunk.text[at:]).partition(b"\n")[0]
            count, expected = row.count(self._source.delimiter.encode()) + 1, len(self._names)
            if count != expected:
                why = f"it has {count} columns; expected {expected}, as in {self._source._format}: use CSV for others"
        return f"{file.file.name}, line {line}: {why}"

    def _why(self, fault: str, column: int, field: bytes, counts: Sequence[int]) -> str:
        count, expected = counts
        name = self._names[column]
        line = field.partition(b"\n")[0].decode(errors="backslashreplace").rstrip("\r")
        field_text = line.strip() if self._source.strip else line  # what `missing` is compared with
        text = repr(self._partition.get(name, field_text))
        text = text if len(text) <= 60 else text[:60] + "..."
        match fault:
            case "few_columns" | "many_columns":
                return f"it has {count} columns; expected {expected}"
            case "weights":
                feature, ids = self._columns.features[column], self._columns.ids[column]
                return f"column {ids.weights!r} has {count} weights for {expected} ids of feature {feature!r}"
            case "label":
                return f"the label, column {name!r}, is missing; add it, or declare LabelColumn(missing='drop')"
            case "label_text":
                texts = next(
                    label.text_values for label in self._columns.label if label.name == name and label.text_values
                )
                return f"column {name!r} holds {text}; expected one of {', '.join(map(repr, texts))}"
            case "label_kind":
                label = next(label for label in self._columns.label if label.name == name and label.above is None)
                return f"column {name!r} holds {text}; expected {label.expected}"
            case "number" | "integer" | "label_kind" if line != line.strip() and _is_number(line):
                return f"column {name!r} holds {text}; expected a number without blanks: give strip=True"
            case "number" if any(label.name == name for label in self._columns.label):
                return f"column {name!r} holds {text}; expected a number, or label_true=... for a column of strings"
            case "number" if any(dense.name == name for dense in self._columns.dense):
                return (
                    f"column {name!r} holds {text}; expected a number, or missing=({text},) if it means no value, or a "
                    f"feature {name!r} for strings"
                )
        return f"column {name!r} holds {text}; {_HINTS[fault]}"


_HINTS = {
    "number": "expected a number",
    "finite": "expected a finite number that float32 can hold",
    "integer": "expected a whole number of 64 bits, or declare kind='string'",
    "utf8": "expected UTF-8: if the file is Latin-1, give encoding='latin-1'",
    "quote": "the quoted field continues after its closing quote: double the quotes inside it, or give quote=None",
    "open_quote": "its quote is not closed in this line: close it, or give newlines_in_values=True, or quote=None",
    "empty_item": "it lists a missing id, and its ids have weights: remove both",
}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _uses(columns: Columns) -> Iterator[tuple[str, _core.FieldUse]]:
    """Yield each column that is used, with its use."""
    for i, dense in enumerate(columns.dense):
        use = _core.FieldUse("dense", i)
        use.missing, use.log1p = dense.missing, dense.log1p
        yield dense.name, use
    for i, label in enumerate(columns.label):
        yield label.name, _label_use(i, label)
    for i, ids in enumerate(columns.ids):
        use = _core.FieldUse("ids", i)
        use.integer, use.hash, use.missing_id = ids.kind == "integer", ids.hash, ids.missing
        use.separator = 0 if ids.separator is None else ord(ids.separator)
        yield ids.name, use
        if ids.weights is not None:
            weights = _core.FieldUse("weights", i)
            weights.separator = use.separator
            yield ids.weights, weights
    for i, extra in enumerate(columns.extra):
        yield extra, _core.FieldUse("text", i)


def _label_use(i: int, column: LabelColumn) -> _core.FieldUse:
    use = _core.FieldUse("label", i)
    if isinstance(column.missing, str):
        use.absent = _REFUSE if column.missing == "refuse" else _DROP
    else:
        use.absent, use.missing = _VALUE, column.missing
    use.label_kind = _LABEL_KINDS[column.kind]
    use.above, use.texts, use.other = column.above, list((column.text_values or {}).items()), column.other_value
    return use


@dataclass(frozen=True, slots=True)
class _TextRows:
    """Rows of a text file that are not parsed yet."""

    file: TextFile
    parser: _RowParser
    chunk: TextChunk

    def count_rows(self) -> int:
        return int(_core.count_rows(self.chunk.text, self.file.layout.newline_quote))

    def slice(self, begin: int, end: int) -> "_TextRows":
        text, first_line = self.chunk.text, self.chunk.first_line
        low, high = _core.rows_within(text, self.file.layout.newline_quote, begin, end)
        return replace(self, chunk=TextChunk(text[low:high], lambda: first_line() + int(_core.count_lines(text[:low]))))

    def decode(self) -> Chunk:
        return self.parser.decode(self.file, self.chunk)


def _text_array(offsets: Any, data: Any, present: Any) -> Any:
    """Return a column of strings as an Arrow array that shares the parser's memory."""
    arrow = pyarrow_for("reading text")
    valid = np.packbits(np.asarray(present), bitorder="little")
    buffers = [arrow.py_buffer(valid), arrow.py_buffer(np.asarray(offsets)), arrow.py_buffer(np.asarray(data))]
    return arrow.Array.from_buffers(arrow.large_string(), len(present), buffers)
