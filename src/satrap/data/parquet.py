"""Parquet files as sources: their row groups are the blocks. pyarrow reads them, and only the required columns.

Adjacent short row groups of a file form one block, so that blocks have about `block_rows` rows. A longer row group is
read in chunks of `block_rows`; a very long one is read through a small buffer, so that memory stays bounded however a
file was written.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.data.block import Block
from satrap.data.decode import is_list
from satrap.data.file_source import File, find_files
from satrap.data.hashing import is_text
from satrap.data.inputs import Position
from satrap.data.source import FileSource, RowBlockSource
from satrap.data.table_rows import TableDecoder, TableRows, file_blocks
from satrap.errors import SourceError

_FOOTER_THREADS = 16  # footers are small, so reading them is mostly waiting
_MAX_GROUP_BYTES = 32 << 20  # larger row groups are read through a small buffer
_BUFFER_BYTES = 8 << 20  # all columns share them
_LEAST_BUFFER_BYTES = 64 << 10  # one column has them


@dataclass(frozen=True, repr=False)
class Parquet(FileSource, RowBlockSource):
    """Parquet files, or folders, globs and URLs of them."""

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        files = find_files(self.path, self.filesystem)
        with ThreadPoolExecutor(min(_FOOTER_THREADS, len(files)), thread_name_prefix="satrap-footer") as pool:
            return file_blocks(files, columns, self._blocks_of, pool.map)

    def _blocks_of(
        self, file: File, partition: Mapping[str, Any], columns: Columns
    ) -> tuple[list[Block], TableDecoder]:
        with file.open(is_text=False) as opened:
            from pyarrow.parquet import ParquetFile

            footer = ParquetFile(opened)
            schema, metadata = footer.schema_arrow, footer.metadata
            decoder = TableDecoder.for_schema(schema, columns, file.name, self.max_bad_rows, partition)
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            if sum(rows) != metadata.num_rows:
                raise SourceError(
                    f"{file.name}: its footer counts {metadata.num_rows} rows, and {sum(rows)} in its row groups; the "
                    "file is damaged: write it again"
                )
            sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        arrow = pyarrow_for("reading Parquet")
        texts = {column.name for column in columns.ids if column.separator is None}.intersection(decoder.names)
        hashed = [name for name in texts if is_text(arrow, schema.field(name).type)]
        blocks: list[Block] = []
        first = before = count = 0
        for end in range(1, len(rows) + 1):
            count += rows[end - 1]
            if end == len(rows) or count + rows[end] > self.block_rows:
                groups = _RowGroups(
                    file, decoder, hashed, self.block_rows, first, end, before, count, max(sizes[first:end])
                )
                blocks.append(Block(read=groups.read, num_chunks=max(1, -(-count // self.block_rows)), num_rows=count))
                first, before, count = end, before + count, 0
        return blocks, decoder


@dataclass(frozen=True, slots=True)
class _RowGroups:
    """Adjacent row groups of a file."""

    file: File
    decoder: TableDecoder
    hashed: list[str]
    """Columns whose distinct strings are hashed once each."""
    block_rows: int
    first: int
    end: int
    before: int
    """How many rows of the file precede them."""
    num_rows: int
    """How many rows they have by the footer."""
    num_bytes: int
    """The size of the largest of them."""

    def read(self) -> Iterator[TableRows]:
        part = f"row group {self.first}" if self.end - self.first == 1 else f"row groups {self.first} to {self.end - 1}"
        with self.file.open(part=part) as opened:
            from pyarrow.parquet import ParquetFile

            names, is_large = self.decoder.names, self.num_bytes > _MAX_GROUP_BYTES
            parquet = ParquetFile(
                opened,
                read_dictionary=self.hashed,
                page_checksum_verification=True,  # pages without a checksum are read unverified
                pre_buffer=not is_large,
                buffer_size=max(_LEAST_BUFFER_BYTES, _BUFFER_BYTES // max(1, len(names))) if is_large else 0,
            )
            before, groups = self.before, range(self.first, self.end)
            # Arrow cannot join lists of categories of several row groups.
            together = [[group] for group in groups] if _lists_categories(parquet.schema_arrow, names) else [groups]
            for numbers in together:
                for batch in parquet.iter_batches(self.block_rows, numbers, names, use_threads=False):
                    yield TableRows(self.decoder, batch, before)
                    before += batch.num_rows
            if before != self.before + self.num_rows:
                raise SourceError(
                    f"{self.file.name}, {part}: {before - self.before} rows were found, and the footer counts "
                    f"{self.num_rows}; the file is damaged: write it again"
                )


def _lists_categories(schema: Any, names: Sequence[str]) -> bool:
    """Return whether one of the columns holds lists of dictionary-encoded values."""
    arrow = pyarrow_for("reading Parquet")
    kinds = [schema.field(name).type for name in names]
    return any(is_list(arrow, kind) and arrow.types.is_dictionary(kind.value_type) for kind in kinds)
