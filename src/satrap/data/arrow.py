"""Arrow data as sources: IPC files (Feather files are IPC files) and streams, and tables in memory.

The blocks of a file are its record batches; adjacent short ones form one block, and long ones are read in chunks. Local
files are mapped into memory; from other filesystems, whole record batches are read. A stream can only be read from its
start, so it is one block. A table is split into ranges of rows, which are views of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import check_integer, set_field
from satrap.data.block import Block, Chunk
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
    """The filesystem of the path, from pyarrow.fs or fsspec. None: the path decides."""
    block_rows: int = 32768
    """The approximate number of rows that are read at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "block_rows", check_integer("Arrow", "block_rows", self.block_rows, 1, 1 << 30))

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        arrow = pyarrow_for("reading Arrow data")
        if isinstance(self.path, arrow.Table | arrow.RecordBatch):
            return table_blocks(self.path, columns, self.block_rows, self.max_bad_rows, "the table")
        files = find_files(self.path, self.filesystem)
        results = [self._blocks_of(file, columns) for file in files]
        check_kinds((file.name, kinds) for file, (_, kinds) in zip(files, results, strict=True))
        return [block for blocks, _ in results for block in blocks]

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
                    raise SourceError(
                        f"{file.name}: the stream has no end mark, so it is incomplete: write it again and close it"
                    )
                return [_StreamBlock(self, columns, file)], kinds
            count = reader.num_record_batches
            # The footer does not hold their lengths. Local files cost nothing to look at; others would have to be read.
            known_batches = range(count if file.is_local else min(count, 1))
            rows = [reader.get_batch(i).num_rows for i in known_batches]
        batches_per_block = max(1, self.block_rows // max([1, *rows[:1]]))
        blocks: list[Block] = [
            _RecordBatchBlock(self, columns, file, first, min(count, first + batches_per_block), rows)
            for first in range(0, count, batches_per_block)
        ]
        return blocks, kinds


class _RecordBatchBlock(Block):
    """Adjacent record batches of a file."""

    def __init__(self, source: Arrow, columns: Columns, file: File, first: int, end: int, rows: list[int]) -> None:
        """rows: the number of rows of each record batch of the file, or only of the first one."""
        self._source, self._columns, self._file = source, columns, file
        self._first, self._end = first, end
        if file.is_local:
            self.num_rows = sum(rows[first:end])
        self.num_chunks = max(1, -(-(self.num_rows or rows[0]) // source.block_rows))

    def read(self) -> Iterator[tuple[str, int, Any]]:
        arrow = pyarrow_for("reading Arrow data")
        part = f"record batch {self._first}" + ("" if self._end - self._first == 1 else f" to {self._end - 1}")
        with self._file.open(mapped=True, part=part) as opened:
            reader = _ipc().open_file(opened)
            batches = [reader.get_batch(i) for i in range(self._first, self._end)]
            table = arrow.Table.from_batches(batches, reader.schema).select(list(self._columns.required()))
            for row in range(0, table.num_rows, self._source.block_rows):
                yield part, row, table.slice(row, self._source.block_rows)

    def count_rows(self, raw: tuple[str, int, Any]) -> int:
        return int(raw[2].num_rows)

    def slice(self, raw: tuple[str, int, Any], begin: int, end: int) -> tuple[str, int, Any]:
        batch, before, table = raw
        return batch, before + begin, table.slice(begin, end - begin)

    def decode(self, raw: tuple[str, int, Any]) -> Chunk:
        batch, before, table = raw
        return decode_table(table, self._columns, f"{self._file.name}, {batch}", before, self._source.max_bad_rows)


class _StreamBlock(Block):
    """All record batches of a stream."""

    def __init__(self, source: Arrow, columns: Columns, file: File) -> None:
        self._source, self._columns, self._file = source, columns, file

    def read(self) -> Iterator[tuple[int, Any]]:
        before = 0
        with self._file.open(mapped=True) as opened:
            for batch in _ipc().open_stream(opened):
                chosen = batch.select(list(self._columns.required()))
                for row in range(0, batch.num_rows, self._source.block_rows):
                    yield before + row, chosen.slice(row, self._source.block_rows)
                before += batch.num_rows

    def count_rows(self, raw: tuple[int, Any]) -> int:
        return int(raw[1].num_rows)

    def slice(self, raw: tuple[int, Any], begin: int, end: int) -> tuple[int, Any]:
        before, batch = raw
        return before + begin, batch.slice(begin, end - begin)

    def decode(self, raw: tuple[int, Any]) -> Chunk:
        before, batch = raw
        return decode_table(batch, self._columns, self._file.name, before, self._source.max_bad_rows)


class _TableBlock(Block):
    """A range of rows of a table in memory."""

    is_exact = True

    def __init__(self, table: Any, columns: Columns, begin: int, max_bad: int, where: str) -> None:
        self._table, self._columns, self._begin, self._max_bad, self._where = table, columns, begin, max_bad, where
        self.num_rows = table.num_rows

    def read(self) -> Iterator[tuple[int, Any]]:
        yield self._begin, self._table

    def count_rows(self, raw: tuple[int, Any]) -> int:
        return int(raw[1].num_rows)

    def slice(self, raw: tuple[int, Any], begin: int, end: int) -> tuple[int, Any]:
        before, table = raw
        return before + begin, table.slice(begin, end - begin)

    def decode(self, raw: tuple[int, Any]) -> Chunk:
        before, table = raw
        return decode_table(table, self._columns, self._where, before, self._max_bad)


def table_blocks(table: Any, columns: Columns, block_rows: int, max_bad: int, where: str) -> list[Block]:
    """Return the blocks of an Arrow table: ranges of its rows."""
    check_types(table.schema, columns, where)
    chosen = table.select(list(columns.required()))
    return [
        _TableBlock(chosen.slice(begin, block_rows), columns, begin, max_bad, where)
        for begin in range(0, table.num_rows, block_rows)
    ]


def _ipc() -> Any:
    pyarrow_for("reading Arrow data")
    import pyarrow.ipc

    return pyarrow.ipc
