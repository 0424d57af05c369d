"""Arrow: IPC files and streams (Feather files are such), and tables in memory.

A file's record batches are the blocks; short ones that lie side by side make one, and long ones come in pieces. Local
files are mapped into memory; elsewhere a record batch is the least that can be read. A stream can only be read from its
start: it is one block. A table is cut into ranges of rows, which are views of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import check_integer, set_field
from satrap.data.block import Block, Piece
from satrap.data.decode import check_kinds, check_types, decode_table
from satrap.data.file_source import File, files_signature, find_files
from satrap.data.inputs import Position
from satrap.data.source import Source
from satrap.errors import SourceError

_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class Arrow(Source):
    """Arrow IPC files or streams, or folders, globs and URLs of them; or an Arrow table."""

    path: Any
    """A file, folder, glob or URL, or a list of those; or a pyarrow Table or RecordBatch."""
    _: KW_ONLY
    filesystem: Any = None
    """Where the path lies: a filesystem of pyarrow.fs or fsspec. None: as the path says."""
    block_rows: int = 32768
    """About how many rows are read at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "block_rows", check_integer("Arrow", "block_rows", self.block_rows, 1, 1 << 30))

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        arrow = pyarrow_for("reading Arrow data")
        if isinstance(self.path, arrow.Table | arrow.RecordBatch):
            return table_blocks(self.path, columns, self.block_rows, self.max_bad_rows, "the table")
        files = find_files(self.path, self.filesystem)
        found = [self._blocks_of(file, columns) for file in files]
        check_kinds((file.name, kinds) for file, (_, kinds) in zip(files, found, strict=True))
        return [block for blocks, _ in found for block in blocks]

    def signature(self) -> dict[str, Any]:
        arrow = pyarrow_for("reading Arrow data")
        in_memory = isinstance(self.path, arrow.Table | arrow.RecordBatch)
        return super().signature() | ({} if in_memory else files_signature(self.path, self.filesystem))

    def _blocks_of(self, file: File, columns: Columns) -> tuple[list[Block], dict[str, str]]:
        with file.open(mapped=True) as opened:
            ipc = _ipc()
            is_file = bytes(opened.read(len(_FILE_MAGIC))) == _FILE_MAGIC
            opened.seek(0)
            reader = ipc.open_file(opened) if is_file else ipc.open_stream(opened)
            kinds = check_types(reader.schema, columns, file.name)
            if not is_file:
                if bytes(opened.read_at(len(_STREAM_END), max(0, file.size - len(_STREAM_END)))) != _STREAM_END:
                    raise SourceError(f"{file.name}: the stream has no end mark: it was cut, or its writer not closed")
                return [_Stream(self, columns, file)], kinds
            count = reader.num_record_batches
            # The footer does not say how long they are. In memory that costs nothing; elsewhere it means to read them.
            known = range(count if file.is_local else min(count, 1))
            rows = [reader.get_batch(i).num_rows for i in known]
        together = max(1, self.block_rows // max([1, *rows[:1]]))
        blocks: list[Block] = [
            _RecordBatches(self, columns, file, first, min(count, first + together), rows)
            for first in range(0, count, together)
        ]
        return blocks, kinds


class _RecordBatches(Block):
    """Some record batches of a file, side by side."""

    def __init__(self, source: Arrow, columns: Columns, file: File, first: int, end: int, rows: list[int]) -> None:
        """rows: the number in each record batch of the file, or in the first one only."""
        self._source, self._columns, self._file = source, columns, file
        self._first, self._end = first, end
        if file.is_local:
            self.num_rows = sum(rows[first:end])
        self.num_pieces = max(1, -(-(self.num_rows or rows[0]) // source.block_rows))

    def read(self) -> Iterator[tuple[str, int, Any]]:
        arrow = pyarrow_for("reading Arrow data")
        part = f"record batch {self._first}" + ("" if self._end - self._first == 1 else f" to {self._end - 1}")
        with self._file.open(mapped=True, part=part) as opened:
            reader = _ipc().open_file(opened)
            batches = [reader.get_batch(i) for i in range(self._first, self._end)]
            table = arrow.Table.from_batches(batches, reader.schema).select(list(self._columns.needed()))
            for row in range(0, table.num_rows, self._source.block_rows):
                yield part, row, table.slice(row, self._source.block_rows)

    def num_rows_of(self, raw: tuple[str, int, Any]) -> int:
        return int(raw[2].num_rows)

    def cut(self, raw: tuple[str, int, Any], begin: int, end: int) -> tuple[str, int, Any]:
        batch, before, table = raw
        return batch, before + begin, table.slice(begin, end - begin)

    def decode(self, raw: tuple[str, int, Any]) -> Piece:
        batch, before, table = raw
        return decode_table(table, self._columns, f"{self._file.name}, {batch}", before, self._source.max_bad_rows)


class _Stream(Block):
    """A stream of record batches."""

    def __init__(self, source: Arrow, columns: Columns, file: File) -> None:
        self._source, self._columns, self._file = source, columns, file

    def read(self) -> Iterator[tuple[int, Any]]:
        before = 0
        with self._file.open(mapped=True) as opened:
            for batch in _ipc().open_stream(opened):
                chosen = batch.select(list(self._columns.needed()))
                for row in range(0, batch.num_rows, self._source.block_rows):
                    yield before + row, chosen.slice(row, self._source.block_rows)
                before += batch.num_rows

    def num_rows_of(self, raw: tuple[int, Any]) -> int:
        return int(raw[1].num_rows)

    def cut(self, raw: tuple[int, Any], begin: int, end: int) -> tuple[int, Any]:
        before, batch = raw
        return before + begin, batch.slice(begin, end - begin)

    def decode(self, raw: tuple[int, Any]) -> Piece:
        before, batch = raw
        return decode_table(batch, self._columns, self._file.name, before, self._source.max_bad_rows)


class _Rows(Block):
    """A range of rows of a table in memory."""

    exact = True

    def __init__(self, table: Any, columns: Columns, begin: int, most_bad: int, where: str) -> None:
        self._table, self._columns, self._begin, self._most_bad, self._where = table, columns, begin, most_bad, where
        self.num_rows = table.num_rows

    def read(self) -> Iterator[tuple[int, Any]]:
        yield self._begin, self._table

    def num_rows_of(self, raw: tuple[int, Any]) -> int:
        return int(raw[1].num_rows)

    def cut(self, raw: tuple[int, Any], begin: int, end: int) -> tuple[int, Any]:
        before, table = raw
        return before + begin, table.slice(begin, end - begin)

    def decode(self, raw: tuple[int, Any]) -> Piece:
        before, table = raw
        return decode_table(table, self._columns, self._where, before, self._most_bad)


def table_blocks(table: Any, columns: Columns, block_rows: int, most_bad: int, where: str) -> list[Block]:
    """Blocks of an Arrow table: ranges of its rows."""
    check_types(table.schema, columns, where)
    chosen = table.select(list(columns.needed()))
    return [
        _Rows(chosen.slice(begin, block_rows), columns, begin, most_bad, where)
        for begin in range(0, table.num_rows, block_rows)
    ]


def _ipc() -> Any:
    pyarrow_for("reading Arrow data")
    import pyarrow.ipc

    return pyarrow.ipc
