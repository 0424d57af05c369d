"""Files of JSON lines as sources: an object in each line, whose keys are the columns. pyarrow parses them.

A file is split into ranges of bytes at its newlines, as a CSV is. JSON has no declared types: those of the first block
of the first file hold for all files, so that a value has the same id everywhere.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import check_integer, set_field
from satrap.data.block import Block
from satrap.data.delimited_file import TextChunk, TextFile, TextLayout
from satrap.data.file_source import File, find_files
from satrap.data.inputs import Position
from satrap.data.source import FileSource
from satrap.data.table_rows import TableDecoder, TableRows
from satrap.errors import SourceError


@dataclass(frozen=True)
class JSON(FileSource):
    """Files of JSON lines, or folders, globs and URLs of them; .gz, .bz2, .zst and .lz4 are decompressed. A missing key
    or null is a missing value; a line that is no JSON object is an error, whatever `max_bad_rows` says."""

    _: KW_ONLY
    block_bytes: int = 4 << 20
    """The number of bytes of text that are read at a time."""
    max_line_bytes: int = 16 << 20
    """The maximum length of a line, which is held in memory as a whole. A longer line is an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block_bytes", "max_line_bytes"):
            set_field(self, name, check_integer("JSON", name, getattr(self, name), 1, 1 << 31))

    def signature(self) -> dict[str, Any]:
        return super().signature() | {"block_bytes": self.block_bytes}

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        layout = TextLayout(block_bytes=self.block_bytes, max_line_bytes=self.max_line_bytes)
        texts = [TextFile(file, layout, None) for file in find_files(self.path, self.filesystem)]
        schema = _schema_of(texts, columns)
        return [block for text in texts for block in self._blocks_of(text, schema, columns)]

    def _blocks_of(self, text: TextFile, schema: Any, columns: Columns) -> list[Block]:
        ids = {name for column in columns.ids for name in (column.name, *column.crossed)} - set(columns.extra)

        def read(*byte_range: int) -> Iterator[TableRows]:
            for chunk in [text.chunk(*byte_range)] if byte_range else text.chunks():
                if (table := _parse(text.file, chunk, schema, ids)) is not None:
                    where = f"{text.file.name}, from {f'byte {byte_range[0]}' if byte_range else 'its start'}"
                    decoder = TableDecoder.for_schema(table.schema, columns, where, self.max_bad_rows)
                    yield TableRows(decoder, table, 0)

        if text.is_stream:
            return [Block(read=read)]
        return [Block(read=partial(read, *byte_range)) for byte_range in text.ranges()]


def _parse(file: File, chunk: TextChunk, schema: Any, ids: Collection[str] = ()) -> Any:
    """Return the rows of some lines as a table; None if there are none.

    schema: None: inferred. ids: columns whose integers may be beyond int64, even if the first block's are not.
    """
    arrow = pyarrow_for("reading JSON")
    from pyarrow import json

    if not bytes(chunk.text).strip():
        return None
    whole = json.ReadOptions(use_threads=False, block_size=len(chunk.text) + 1)

    def parse(text: Any, types: Any = schema) -> Any:
        others = "infer" if types is None else "ignore"
        options = json.ParseOptions(explicit_schema=types, unexpected_field_behavior=others)
        return json.read_json(arrow.BufferReader(arrow.py_buffer(text)), whole, options)

    try:
        return parse(chunk.text)
    except arrow.ArrowException as error:
        if ids:
            with suppress(arrow.ArrowException):
                return parse(chunk.text, _with_unsigned(arrow, schema, parse(chunk.text, None).schema, ids))
        for number, line in enumerate(bytes(chunk.text).splitlines()):
            try:
                if line.strip():
                    parse(line)
            except arrow.ArrowException as bad:
                raise SourceError(f"{file.name}, line {chunk.first_line() + number}: {bad}") from None
        raise SourceError(f"{file.name}: {error}: a key holds values of several types") from error


def _schema_of(texts: Sequence[TextFile], columns: Columns) -> Any:
    """Return the types of the required columns, from the first block that has rows; None: there is none."""
    arrow = pyarrow_for("reading JSON")
    for text in texts:
        for chunk in text.chunks() if text.is_stream else (text.chunk(*bounds) for bounds in text.ranges()):
            if (table := _parse(text.file, chunk, None)) is None:
                continue
            columns.check_present(text.file.name, table.schema.names)
            numbers = {column.name for column in columns.dense} | {label.name for label in columns.label}
            numbers |= {column.weights for column in columns.ids if column.weights}
            numbers |= {column.name for column in columns.ids if column.boundaries}
            numbers |= {name for column in columns.ids for name in column.numbers}
            times = {column.name for column in columns.ids if column.time} | {
                column.name for column in columns.dense if column.time
            }
            kinds = {column.name: column.kind for column in columns.ids}
            fields = []
            for name in columns.required():
                kind = table.schema.field(name).type
                kind = kind if name in times else _resolved(arrow, kind, name in numbers, kinds.get(name))
                if arrow.types.is_null(kind):
                    raise SourceError(
                        f"{text.file.name}: column {name!r} is null in the whole first block, so its type is unknown; "
                        "give a larger block_bytes, or declare IdColumn(kind=...)"
                    )
                fields.append((name, kind))
            return arrow.schema(fields)
    return None


def _with_unsigned(arrow: Any, schema: Any, seen: Any, names: Collection[str]) -> Any:
    """Return the schema with uint64 for the named columns that hold integers beyond int64.

    seen: the inferred types, where such a column is of floats."""
    unsigned = {arrow.int64(): arrow.uint64(), arrow.list_(arrow.int64()): arrow.list_(arrow.uint64())}
    wide = {
        name
        for name in names
        if name in seen.names and _resolved(arrow, seen.field(name).type, False, None) in unsigned.values()
    }
    return arrow.schema([(f.name, unsigned.get(f.type, f.type) if f.name in wide else f.type) for f in schema])


def _resolved(arrow: Any, kind: Any, is_number: bool, declared: str | None) -> Any:
    """Return the type that holds every value of a column of which some have this type."""
    types = arrow.types
    if types.is_list(kind):
        return arrow.list_(_resolved(arrow, kind.value_type, is_number, declared))
    if types.is_null(kind) and (is_number or declared):
        return arrow.float64() if is_number else arrow.string() if declared == "string" else arrow.int64()
    if types.is_integer(kind) and is_number:
        return arrow.float64()
    if types.is_floating(kind) and not is_number and declared is None:
        return arrow.uint64()  # what does not fit into int64; a fraction is refused
    return arrow.string() if types.is_timestamp(kind) else kind  # a text that looks like a time
