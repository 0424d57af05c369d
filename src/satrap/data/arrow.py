"""Arrow data as sources: IPC files (Feather files are IPC files) and streams, and tables in memory.

The blocks of a file are its record batches; adjacent short ones form one block, and long ones are read in chunks. Local
files are mapped into memory; from other filesystems, whole record batches are read. A stream can only be read from its
start, so it is one block. A table is split into ranges of rows, which are views of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.data.block import Block
from satrap.data.file_source import SIGNATURE_BYTES, File, find_files, refuse_other_format
from satrap.data.inputs import Position
from satrap.data.source import FileSource, RowBlockSource
from satrap.data.table_rows import TableDecoder, TableRows, file_blocks, table_blocks
from satrap.errors import SourceError

_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def open_ipc(opened: Any, name: str) -> tuple[Any, bool]:
    """Return the reader of an opened file of this name, and whether it is an IPC file; otherwise it is a stream."""
    ipc = pyarrow_for("reading Arrow data").ipc
    head = bytes(opened.read(SIGNATURE_BYTES))
    refuse_other_format(name, head, "Arrow")
    is_file = head.startswith(_FILE_MAGIC)
    opened.seek(0)
    return ipc.open_file(opened) if is_file else ipc.open_stream(opened), is_file


@dataclass(frozen=True, repr=False)
class Arrow(FileSource, RowBlockSource):
    """Arrow IPC files or streams, or folders, globs and URLs of them; or a pyarrow Table or RecordBatch."""

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        if self._has_files():
            return file_blocks(find_files(self.path, self.filesystem), columns, self._blocks_of)
        return table_blocks(self.path, columns, self.block_rows, self.max_bad_rows, "the table")

    def _has_files(self) -> bool:
        arrow = pyarrow_for("reading Arrow data")
        return not isinstance(self.path, arrow.Table | arrow.RecordBatch)

    def _blocks_of(
        self, file: File, partition: Mapping[str, Any], columns: Columns
    ) -> tuple[list[Block], TableDecoder]:
        with file.open(mapped=True, is_text=False) as opened:
            reader, is_file = open_ipc(opened, file.name)
            decoder = TableDecoder.for_schema(reader.schema, columns, file.name, self.max_bad_rows, partition)
            if not is_file:
                if bytes(opened.read_at(len(_STREAM_END), max(0, file.size - len(_STREAM_END)))) != _STREAM_END:
                    raise SourceError(
                        f"{file.name}: the stream has no end mark, so it is incomplete: write it again and close it"
                    )
                return [Block(read=partial(self._read_stream, file, decoder))], decoder
            count = reader.num_record_batches
            # The footer does not hold their lengths. Local files cost nothing to look at; others would have to be read.
            known_batches = range(count if file.is_local else min(count, 1))
            rows = [reader.get_batch(i).num_rows for i in known_batches]
        step = max(1, self.block_rows // max([1, *rows[:1]]))
        ranges = [range(count)[begin : begin + step] for begin in range(0, count, step)]
        return [self._batch_block(file, decoder, bounds, rows) for bounds in ranges], decoder

    def _batch_block(self, file: File, decoder: TableDecoder, batches: range, rows: list[int]) -> Block:
        """Return the block of adjacent record batches; rows: the number of rows of each, or only of the first one."""
        num_rows = sum(rows[batches.start : batches.stop]) if file.is_local else None
        return Block(
            read=partial(self._read_batches, file, decoder, batches),
            num_chunks=max(1, -(-(num_rows or rows[0]) // self.block_rows)),
            num_rows=num_rows,
        )

    def _read_batches(self, file: File, decoder: TableDecoder, batches: range) -> Iterator[TableRows]:
        part = f"record batch {batches[0]}" + ("" if len(batches) == 1 else f" to {batches[-1]}")
        with file.open(mapped=True, part=part) as opened:
            arrow, decoder = pyarrow_for("reading Arrow data"), replace(decoder, where=f"{file.name}, {part}")
            reader = arrow.ipc.open_file(opened)
            table = arrow.Table.from_batches(map(reader.get_batch, batches), reader.schema)
            yield from decoder.split(table.select(decoder.names), self.block_rows)

    def _read_stream(self, file: File, decoder: TableDecoder) -> Iterator[TableRows]:
        before = 0
        with file.open(mapped=True) as opened:
            for batch in pyarrow_for("reading Arrow data").ipc.open_stream(opened):
                yield from decoder.split(batch.select(decoder.names), self.block_rows, before)
                before += batch.num_rows
