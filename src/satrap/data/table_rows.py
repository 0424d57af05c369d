"""Rows of Arrow tables as chunks of a source: checks their types and their buffers, and decodes them when needed.

Parquet files, Arrow files and frames are read as Arrow tables or record batches; `decode` converts their columns. A
column that a file does not have may come from its path (`day=2024-01-01/`): all rows of the file have one value.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Self

import numpy as np

from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.data.block import Block, Chunk
from satrap.data.decode import concatenated, decode, is_list
from satrap.data.file_source import File, errors_naming
from satrap.data.hashing import is_text
from satrap.errors import SourceError

_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)  # fits into 64 bits
_ONE_TYPE = "the same value would become two ids: write the column in one type"
_ONE_WIDTH = "the rows of a batch have one width: write as many everywhere"


Kinds = Mapping[tuple[str, str], str]
"""What columns hold, by their names and the reason for which it has to be the same everywhere."""


@dataclass(frozen=True, slots=True)
class TableDecoder:
    """Decodes the rows of one file or frame."""

    where: str
    """The file or frame, in messages."""
    columns: Columns
    max_bad: int
    partition: Mapping[str, Any]
    """The required columns that come from the file's path: Arrow scalars."""
    kinds: "Kinds"
    """What each id column and dense column holds."""

    @classmethod
    def for_schema(
        cls, schema: Any, columns: Columns, where: str, max_bad: int, partition: Mapping[str, Any] | None = None
    ) -> Self:
        """Return the decoder of rows with this schema; raise if a column is missing or of a type that is not read."""
        required = columns.required()
        used = {name: value for name, value in (partition or {}).items() if name in required}
        own = {name: value for name, value in used.items() if name not in schema.names}
        for name, value in own.items():
            schema = schema.append(pyarrow_for("reading data").field(name, value.type))
        return cls(where, columns, max_bad, own, _check_types(schema, columns, where))

    @property
    def names(self) -> list[str]:
        """The names of the columns that are read from the file."""
        return [name for name in self.columns.required() if name not in self.partition]

    def split(self, table: Any, block_rows: int, before: int = 0) -> Iterator["TableRows"]:
        """Yield the rows of a table or record batch, `block_rows` at a time."""
        for begin in range(0, table.num_rows, block_rows):
            size = min(block_rows, table.num_rows - begin)  # a table without columns takes any size
            yield TableRows(self, table.slice(begin, size), before + begin)


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of an Arrow table or record batch that are not decoded yet."""

    decoder: TableDecoder
    table: Any
    before: int
    """How many rows precede them in the file or frame."""

    def count_rows(self) -> int:
        return int(self.table.num_rows)

    def slice(self, begin: int, end: int) -> "TableRows":
        return replace(self, table=self.table.slice(begin, end - begin), before=self.before + begin)

    def decode(self) -> Chunk:
        """Return the samples; raise if a buffer is damaged."""
        decoder, n, before = self.decoder, self.count_rows(), self.before
        rows = f"{decoder.where}, rows {before + 1} to {before + n}"
        with errors_naming(rows):
            arrays = _arrays_of(self.table)
        for name, array in arrays.items():
            with errors_naming(f"{rows}, column {name!r}"):
                _validate(array)
        with errors_naming(rows):
            arrays |= {name: pyarrow_for("reading data").repeat(value, n) for name, value in decoder.partition.items()}
            return decode(
                arrays,
                n,
                decoder.columns,
                where=decoder.where,
                row=lambda i: f"{decoder.where}, row {before + i + 1}",
                max_bad=decoder.max_bad,
            )


def table_blocks(table: Any, columns: Columns, block_rows: int, max_bad: int, where: str) -> list[Block]:
    """Return the blocks of an Arrow table in memory: ranges of its rows, which are views of it."""
    decoder = TableDecoder.for_schema(table.schema, columns, where, max_bad)
    return [
        Block(read=partial(iter, [rows]), is_exact=True, num_rows=rows.count_rows())
        for rows in decoder.split(table.select(decoder.names), block_rows)
    ]


def file_blocks(
    files: Sequence[File],
    columns: Columns,
    blocks_of: Callable[[File, Mapping[str, Any], Columns], tuple[list[Block], TableDecoder]],
    apply: Callable[..., Iterable[tuple[list[Block], TableDecoder]]] = map,
) -> list[Block]:
    """Return the blocks of files; blocks_of: finds those of one file, given the columns that its path holds."""
    results = list(apply(blocks_of, files, _typed_partitions(files, columns), repeat(columns)))
    same = SameKinds()
    for _, decoder in results:
        same.require(decoder.where, decoder.kinds)
    return [block for blocks, _ in results for block in blocks]


def _typed_partitions(files: Sequence[File], columns: Columns) -> list[dict[str, Any]]:
    """Return the partition of each file as Arrow scalars: integers if all files have integers there, otherwise strings.

    A column that is declared to hold strings holds strings: "07" is not 7.
    """
    arrow = pyarrow_for("reading data")
    partitions = [file.partition for file in files]
    is_text = {column.name for column in columns.ids if column.kind == "string"}
    is_text |= {label.name for label in columns.label if label.text_values is not None}
    for partition in partitions:
        is_text |= {name for name, value in partition.items() if value is not None and not _INTEGER.fullmatch(value)}

    def typed(name: str, value: str | None) -> Any:
        if name in is_text:
            return arrow.scalar(value, arrow.string())
        return arrow.scalar(None if value is None else int(value), arrow.int64())

    return [{name: typed(name, value) for name, value in partition.items()} for partition in partitions]


class SameKinds:
    """Raises if a column changes between the files, the items or the ranges of rows of one source."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], tuple[str, str]] = {}

    def require(self, where: str, kinds: Kinds) -> None:
        """Raise if one of the columns holds what it did not hold before."""
        for (column, reason), kind in kinds.items():
            before, first = self._first.setdefault((column, reason), (kind, where))
            if kind != before:
                raise SourceError(f"{where}: column {column!r} has {kind}, and {first} has {before}; {reason}")


def kinds_of(types: Mapping[str, Any], columns: Columns) -> Kinds:
    """Return what the columns of these Arrow types hold; ids that are all null, or of a declared kind, are left out."""
    arrow = pyarrow_for("reading data")
    kinds = {}
    for column in columns.ids:
        if not (column.time or column.kind):
            for name in (column.name, *column.crossed):
                if (kind := value_kind(arrow, types[name])) is not None:
                    kinds[name, _ONE_TYPE] = kind
    for dense in columns.dense:
        held = types[dense.name]
        width = held.list_size if arrow.types.is_fixed_size_list(held) else dense.width or 1
        kinds[dense.name, _ONE_WIDTH] = f"{width} number{'' if width == 1 else 's'} in each row"
    return kinds


def _check_types(schema: Any, columns: Columns, where: str) -> Kinds:
    """Return `TableDecoder.kinds`; raise if a column is missing or of a type that cannot be read."""
    columns.check_present(where, schema.names)
    arrow = pyarrow_for("reading data")
    empty = {}
    for name in columns.required():
        kind = schema.field(name).type
        kind = kind.storage_type if isinstance(kind, arrow.BaseExtensionType) else kind
        try:
            empty[name] = arrow.array([], _without_views(arrow, kind))
        except (arrow.ArrowException, LookupError, TypeError) as error:  # a union
            raise SourceError(
                f"{where}: column {name!r} is of type {kind}, which cannot be read; leave the column out, or write it "
                "as another type"
            ) from error
    decode(empty, 0, columns, where=where, row=str, max_bad=0)
    return kinds_of({name: array.type for name, array in empty.items()}, columns)


def _validate(array: Any) -> None:
    """Raise if an offset, a dictionary index, a type id or a string's UTF-8 is damaged; their use does not check them.

    Of a list, only the items of these rows are checked, since a file may hold the items of all rows in one array.
    """
    arrow = pyarrow_for("reading data")
    types = arrow.types
    array.validate()  # the buffers exist and are long enough
    if not (types.is_list(array.type) or types.is_large_list(array.type)):
        array.validate(full=True)
        return
    offsets = array.offsets.to_numpy(zero_copy_only=False)
    if offsets[0] < 0 or np.any(np.diff(offsets) < 0) or offsets[-1] > len(array.values):
        raise ValueError(f"its offsets decrease, or exceed its {len(array.values)} items")
    _validate(array.values.slice(offsets[0], offsets[-1] - offsets[0]))


def _arrays_of(table: Any) -> dict[str, Any]:
    """Return the columns of an Arrow table or record batch, each as one array."""
    arrow = pyarrow_for("reading data")
    out = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if isinstance(column, arrow.ChunkedArray):
            chunks = column.chunks
            column = concatenated(chunks) if chunks else arrow.array([], column.type)
        column = column.storage if isinstance(column, arrow.ExtensionArray) else column
        kind = _without_views(arrow, column.type)
        out[name] = column if kind == column.type else column.cast(kind)
    return out


def _without_views(arrow: Any, kind: Any) -> Any:
    """Return the type with strings in place of views, which polars exports and of which Arrow selects no rows."""
    types = arrow.types
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return arrow.large_string() if types.is_string_view(kind) else arrow.large_binary()
    if types.is_dictionary(kind):
        return arrow.dictionary(kind.index_type, _without_views(arrow, kind.value_type), kind.ordered)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        items = kind.value_field.with_type(_without_views(arrow, kind.value_type))
        if types.is_fixed_size_list(kind):
            return arrow.list_(items, kind.list_size)
        return arrow.list_(items) if types.is_list(kind) else arrow.large_list(items)
    return kind


def value_kind(arrow: Any, kind: Any) -> str | None:
    """Return whether a column of ids, or of lists of them, has "strings" or "integers"; None: all are null."""
    types = arrow.types
    if types.is_integer(kind):  # first, since most are, and each item of an iterable is checked
        return "integers"
    if types.is_dictionary(kind) or is_list(arrow, kind):
        return value_kind(arrow, kind.value_type)
    return None if types.is_null(kind) else "strings" if is_text(arrow, kind) else "integers"
