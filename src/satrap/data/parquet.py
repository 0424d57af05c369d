"""Parquet files as sources: their row groups are the blocks. pyarrow reads them, and only the required columns.

Adjacent short row groups of a file form one block, so that blocks have about `block_rows` rows. A longer row group is
read in chunks of `block_rows`; a very long one is read through a small buffer, so that memory stays bounded however a
file was written.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any

from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import check_integer, set_field
from satrap.data.block import Block, Chunk
from satrap.data.decode import check_kinds, check_types, decode_table
from satrap.data.file_source import File, files_signature, find_files
from satrap.data.hashing import is_text
from satrap.data.inputs import Position
from satrap.data.source import Source
from satrap.errors import SourceError

_FOOTER_THREADS = 16  # footers are small, so reading them is mostly waiting
_MAX_GROUP_BYTES = 32 << 20  # larger row groups are read through a small buffer
_BUFFER_BYTES = 8 << 20  # of all columns together
_LEAST_BUFFER_BYTES = 64 << 10  # of one column


@dataclass(frozen=True)
class Parquet(Source):
    """Parquet files, or folders, globs and URLs of them."""

    path: Any
    """A file, folder, glob or URL, or a list of those."""
    _: KW_ONLY
    filesystem: Any = None
    """The filesystem of the path, from pyarrow.fs or fsspec. None: the path decides."""
    block_rows: int = 32768
    """The approximate number of rows that are read at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "block_rows", check_integer("Parquet", "block_rows", self.block_rows, 1, 1 << 30))

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        files = find_files(self.path, self.filesystem)
        with ThreadPoolExecutor(min(_FOOTER_THREADS, len(files)), thread_name_prefix="satrap-footer") as pool:
            results = list(pool.map(lambda file: self._blocks_of(file, columns), files))
        check_kinds((file.name, kinds) for file, (_, kinds) in zip(files, results, strict=True))
        return [block for blocks, _ in results for block in blocks]

    def signature(self) -> dict[str, Any]:
        return super().signature() | files_signature(self.path, self.filesystem)

    def _blocks_of(self, file: File, columns: Columns) -> tuple[list[Block], dict[str, str]]:
        with file.open() as opened:
            from pyarrow.parquet import ParquetFile

            footer = ParquetFile(opened)
            schema, metadata = footer.schema_arrow, footer.metadata
            kinds = check_types(schema, columns, file.name)
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            if sum(rows) != metadata.num_rows:
                raise SourceError(
                    f"{file.name}: its footer counts {metadata.num_rows} rows, and {sum(rows)} in its row groups; the "
                    "file is damaged: write it again"
                )
            sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        arrow = pyarrow_for("reading Parquet")
        texts = [c.name for c in columns.ids if is_text(arrow, schema.field(c.name).type) and c.separator is None]
        blocks: list[Block] = []
        first = before = count = 0
        for end in range(1, len(rows) + 1):
            count += rows[end - 1]
            if end == len(rows) or count + rows[end] > self.block_rows:
                groups = list(range(first, end))
                large = max(sizes[first:end]) > _MAX_GROUP_BYTES
                blocks.append(_RowGroupBlock(self, columns, file, groups, texts, before, count, large))
                first, before, count = end, before + count, 0
        return blocks, kinds


class _RowGroupBlock(Block):
    """Adjacent row groups of a file."""

    def __init__(
        self,
        source: Parquet,
        columns: Columns,
        file: File,
        groups: list[int],
        texts: list[str],
        before: int,
        rows: int,
        large: bool,
    ) -> None:
        """texts: columns whose distinct texts are hashed once each; before: the rows of the file before the block."""
        self._source, self._columns, self._file, self._groups = source, columns, file, groups
        self._texts, self._before, self._large = texts, before, large
        self._rows = rows
        self.num_chunks = max(1, -(-rows // source.block_rows))
        self.num_rows = rows

    def read(self) -> Iterator[tuple[int, Any]]:
        first, last = self._groups[0], self._groups[-1]
        part = f"row group {first}" if first == last else f"row groups {first} to {last}"
        with self._file.open(part=part) as opened:
            from pyarrow.parquet import ParquetFile

            required = list(self._columns.required())
            parquet = ParquetFile(
                opened,
                read_dictionary=self._texts,
                page_checksum_verification=True,  # of the pages that have a checksum
                pre_buffer=not self._large,
                buffer_size=max(_LEAST_BUFFER_BYTES, _BUFFER_BYTES // len(required)) if self._large else 0,
            )
            before = self._before
            for batch in parquet.iter_batches(self._source.block_rows, self._groups, required, use_threads=False):
                yield before, batch
                before += batch.num_rows
            if before != self._before + self._rows:
                raise SourceError(
                    f"{self._file.name}, {part}: {before - self._before} rows were found, and the footer counts "
                    f"{self._rows}; the file is damaged: write it again"
                )

    def count_rows(self, raw: tuple[int, Any]) -> int:
        return int(raw[1].num_rows)

    def slice(self, raw: tuple[int, Any], begin: int, end: int) -> tuple[int, Any]:
        before, batch = raw
        return before + begin, batch.slice(begin, end - begin)

    def decode(self, raw: tuple[int, Any]) -> Chunk:
        before, batch = raw
        return decode_table(batch, self._columns, self._file.name, before, self._source.max_bad_rows)
