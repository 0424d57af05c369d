"""Parquet files: their row groups are the blocks, read by pyarrow; only the needed columns are.

Short row groups that lie side by side in a file make one block, so that blocks hold about `block_rows` rows. A row
group that is longer comes in pieces of `block_rows`; one that is very long is read through a small buffer, so that
memory stays bounded however a file was written.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any

from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import check_integer, set_field
from satrap.data.block import Block, Piece
from satrap.data.decode import check_kinds, check_types, decode_table
from satrap.data.file_source import File, files_signature, find_files
from satrap.data.hashing import is_text
from satrap.data.inputs import Position
from satrap.data.source import Source
from satrap.errors import SourceError

_FOOTER_THREADS = 16  # footers are small: their reading is waiting
_MAX_GROUP_BYTES = 32 << 20  # of a row group that is read at once
_BUFFER_BYTES = 8 << 20  # of all columns together, where the row group is larger
_LEAST_BUFFER_BYTES = 64 << 10  # of one


@dataclass(frozen=True)
class Parquet(Source):
    """Parquet files, or folders, globs and URLs of them."""

    path: Any
    """A file, folder, glob or URL, or a list of those."""
    _: KW_ONLY
    filesystem: Any = None
    """Where the path lies: a filesystem of pyarrow.fs or fsspec. None: as the path says."""
    block_rows: int = 32768
    """About how many rows are read at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "block_rows", check_integer("Parquet", "block_rows", self.block_rows, 1, 1 << 30))

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        files = find_files(self.path, self.filesystem)
        with ThreadPoolExecutor(min(_FOOTER_THREADS, len(files)), thread_name_prefix="satrap-footer") as pool:
            found = list(pool.map(lambda file: self._blocks_of(file, columns), files))
        check_kinds((file.name, kinds) for file, (_, kinds) in zip(files, found, strict=True))
        return [block for blocks, _ in found for block in blocks]

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
                    f"{file.name}: its footer counts {metadata.num_rows} rows and {sum(rows)} in its row groups: it is "
                    "damaged, write it again"
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
                blocks.append(_RowGroups(self, columns, file, groups, texts, before, count, large))
                first, before, count = end, before + count, 0
        return blocks, kinds


class _RowGroups(Block):
    """Some row groups of a file, side by side."""

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
        """texts: columns that are hashed, once for each different text; before: rows of the file above the block."""
        self._source, self._columns, self._file, self._groups = source, columns, file, groups
        self._texts, self._before, self._large = texts, before, large
        self._rows = rows
        self.num_pieces = max(1, -(-rows // source.block_rows))
        self.num_rows = rows

    def read(self) -> Iterator[tuple[int, Any]]:
        first, last = self._groups[0], self._groups[-1]
        part = f"row group {first}" if first == last else f"row groups {first} to {last}"
        with self._file.open(part=part) as opened:
            from pyarrow.parquet import ParquetFile

            needed = list(self._columns.needed())
            parquet = ParquetFile(
                opened,
                read_dictionary=self._texts,
                page_checksum_verification=True,  # of pages that have one
                pre_buffer=not self._large,
                buffer_size=max(_LEAST_BUFFER_BYTES, _BUFFER_BYTES // len(needed)) if self._large else 0,
            )
            before = self._before
            for batch in parquet.iter_batches(self._source.block_rows, self._groups, needed, use_threads=False):
                yield before, batch
                before += batch.num_rows
            if before != self._before + self._rows:
                raise SourceError(
                    f"{self._file.name}, {part}: {before - self._before} rows were found and its footer counts "
                    f"{self._rows}: it is damaged, write it again"
                )

    def num_rows_of(self, raw: tuple[int, Any]) -> int:
        return int(raw[1].num_rows)

    def cut(self, raw: tuple[int, Any], begin: int, end: int) -> tuple[int, Any]:
        before, batch = raw
        return before + begin, batch.slice(begin, end - begin)

    def decode(self, raw: tuple[int, Any]) -> Piece:
        before, batch = raw
        return decode_table(batch, self._columns, self._file.name, before, self._source.max_bad_rows)
