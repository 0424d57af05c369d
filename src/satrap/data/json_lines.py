"""Files of JSON lines as sources: an object in each line, whose keys are the columns. pyarrow parses them.

A file is split into ranges of bytes at its newlines, as a CSV is. JSON has no declared types: those of the first block
of the first file hold for all files, so that a value has the same id everywhere.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from satrap.data.table_rows import TableDecoder, TableRows, value_kind
from satrap.errors import SourceError

_IDS = ("id", "string", "integer")


@dataclass(frozen=True)
class JSON(FileSource):
    """Files of JSON lines, or folders, globs and URLs of them; .gz, .bz2, .zst and .lz4 are decompressed. A missing key
    or null is a missing value; a line that is no JSON object is an error, whatever `max_bad_rows` says.

    block_bytes: the number of bytes of text that are read at a time.
    max_line_bytes: the maximum length of a line, which is held in memory as a whole. A longer line is an error.
    """

    _: KW_ONLY
    block_bytes: int = 4 << 20
    max_line_bytes: int = 16 << 20

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
        roles = _roles(columns)

        def read(*byte_range: int) -> Iterator[TableRows]:
            for chunk in [text.chunk(*byte_range)] if byte_range else text.chunks():
                if (table := _parse(text.file, chunk, schema, roles)) is not None:
                    where = f"{text.file.name}, from {f'byte {byte_range[0]}' if byte_range else 'its start'}"
                    decoder = TableDecoder.for_schema(table.schema, columns, where, self.max_bad_rows)
                    yield TableRows(decoder, table, 0)

        if text.is_stream:
            return [Block(read=read)]
        return [Block(read=partial(read, *byte_range)) for byte_range in text.ranges()]


def _roles(columns: Columns) -> dict[str, str]:
    """Return for each required column what its values are: the kind of an id ("id": of any kind), a "number", a "number
    or time", a "time", or "any" of a column that is only passed on or selects samples."""
    roles = dict.fromkeys(columns.extra, "any")
    for column in columns.ids:
        roles |= dict.fromkeys(column.crossed, "id") | {column.name: column.kind or "id"}
    for column in columns.ids:
        roles |= dict.fromkeys(column.numbers, "number or time")
        roles |= {column.weights: "number"} if column.weights else {}
        roles |= {column.name: "number"} if column.boundaries else {}
    roles |= {label.name: "number" for label in columns.label}
    roles |= {dense.name: "time" if dense.time else "number" for dense in columns.dense}
    return roles | {column.name: "time" for column in columns.ids if column.time}


def _parse(file: File, chunk: TextChunk, schema: Any, roles: Mapping[str, str]) -> Any:
    """Return the rows of some lines as a table; None if there are none.

    schema: None: inferred. roles: of the columns. If the lines do not fit the schema, ids may be beyond int64,
    and a column of "any" values has the type that these lines hold.
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
        if schema is not None:
            with suppress(arrow.ArrowException):
                seen = parse(chunk.text, None).schema
                with suppress(arrow.ArrowException):
                    return parse(chunk.text, _refitted(arrow, schema, seen, roles, "any"))
                return parse(chunk.text, _refitted(arrow, schema, seen, roles, "seen"))
        for number, line in enumerate(bytes(chunk.text).splitlines()):
            try:
                if line.strip():
                    parse(line)
            except arrow.ArrowException as bad:
                is_object = line.lstrip().startswith(b"{")
                hint = "" if is_object else "; expected an object {...} in each line: use satrap.CSV for delimited text"
                raise SourceError(f"{file.name}, line {chunk.first_line() + number}: {bad}{hint}") from None
        raise SourceError(f"{file.name}: {error}: a key holds values of several types") from error


def _schema_of(texts: Sequence[TextFile], columns: Columns) -> Any:
    """Return the types of the required columns, from the first block that has rows; None: there is none."""
    arrow, roles = pyarrow_for("reading JSON"), _roles(columns)
    for text in texts:
        for chunk in text.chunks() if text.is_stream else (text.chunk(*bounds) for bounds in text.ranges()):
            if (table := _parse(text.file, chunk, None, roles)) is None:
                continue
            columns.check_present(text.file.name, table.schema.names)
            fields = []
            for name in columns.required():
                kind = _resolved(arrow, table.schema.field(name).type, roles[name])
                if roles[name] != "any" and value_kind(arrow, kind) is None:
                    raise SourceError(
                        f"{text.file.name}: column {name!r} is null in the whole first block, so its type is unknown; "
                        "give a larger block_bytes, or declare IdColumn(kind=...)"
                    )
                fields.append((name, kind))
            return _parse(text.file, chunk, arrow.schema(fields), roles).schema
    return None


def _refitted(arrow: Any, schema: Any, seen: Any, roles: Mapping[str, str], role: str) -> Any:
    """Return the schema for lines that do not fit it: with uint64 for ids beyond int64, and with the types that the
    lines have in columns of "any" values.

    seen: the inferred types of the lines, where integers beyond int64 are floats. role: "any" to read those as uint64
    in the columns of "any" values, too, and "seen" to read them as floats."""
    unsigned = {arrow.int64(): arrow.uint64(), arrow.list_(arrow.int64()): arrow.list_(arrow.uint64())}

    def refitted(field: Any) -> Any:
        if field.name not in seen.names:
            return field.type
        if roles[field.name] == "any":
            return _resolved(arrow, seen.field(field.name).type, role)
        is_wide = _resolved(arrow, seen.field(field.name).type, "id") in unsigned.values()
        return unsigned.get(field.type, field.type) if is_wide and roles[field.name] in _IDS else field.type

    return arrow.schema([(field.name, refitted(field)) for field in schema])


def _resolved(arrow: Any, kind: Any, role: str) -> Any:
    """Return the type that holds every value of a column of which some have this type."""
    types = arrow.types
    if types.is_list(kind):
        return arrow.list_(_resolved(arrow, kind.value_type, role))
    if role.startswith("number") and (types.is_null(kind) or types.is_integer(kind)):
        return arrow.float64()
    if types.is_null(kind):
        return {"string": arrow.string(), "integer": arrow.int64()}.get(role, kind)
    if types.is_floating(kind) and role in ("id", "any"):
        return arrow.uint64()  # what does not fit into int64; a fraction does not fit this type
    is_time = types.is_timestamp(kind) and not role.endswith("time")
    return arrow.string() if is_time else kind  # a text that looks like a time
