"""A data file of a snapshot, or the part of it that some buckets need: verified, read in batches.

The manifest names the buckets, the bytes and the checksum of each record batch (`RecordBatch`). So a server that owns
some buckets reads the batches of these and the file's footer, each once, and no other byte. The lines of such a file
are in the order of their ids' hashes.

A file on a disk is mapped into memory. One under a URL is read in pieces of adjacent batches; a piece that is not kept
after its verification (`held_bytes`) is read and verified again when its batches are.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from satrap._core import bucket_of, crc32c, hash_order
from satrap.config.tables import Table
from satrap.errors import SnapshotError
from satrap.storage.folder import Folder
from satrap.table.snapshot.arrow_files import Columns, as_columns, items, open_file, pyarrow_or_error, read_errors
from satrap.table.snapshot.held_bytes import HeldBytes
from satrap.table.snapshot.manifest import DataFile, Manifest, RecordBatch
from satrap.transfer import advance

_PIECE_BYTES = 16 << 20  # a thread reads so much of a URL at a time, unless one batch is larger

_Flags = NDArray[np.bool_]


class OwnedBuckets:
    """Which lines of a snapshot a process needs. The table may have another number of buckets than the snapshot: both
    are powers of two, and a bucket is a range of hashes, so one bucket lies within another or holds several. If one
    alone is direct (`Table.num_rows`), each of its buckets has ids of all buckets of the other."""

    def __init__(self, owned: _Flags | None, num_buckets: int, direct: bool = False, was_direct: bool = False) -> None:
        """owned: for each bucket of the table, whether the process owns it; None: all. num_buckets: the snapshot's.
        direct, was_direct: whether the table is, and whether the snapshot's was."""
        self._owned, self._direct = owned, direct
        if owned is None:
            some = whole = np.full(num_buckets, True)
        elif direct != was_direct:
            some, whole = np.full(num_buckets, owned.any()), np.full(num_buckets, owned.all())
        else:
            some, whole = _folded(owned, num_buckets, np.logical_or), _folded(owned, num_buckets, np.logical_and)
        self.some: _Flags = some
        """For each bucket of the snapshot, whether the process owns some of it."""
        self._whole: _Flags = whole

    @property
    def are_all(self) -> bool:
        """Whether the process needs every line."""
        return self._owned is None

    def are_whole(self, begin: int, end: int) -> bool:
        """Return whether the process owns all of these buckets of the snapshot."""
        return bool(self._whole[begin:end].all())

    def hold(self, ids: NDArray[np.uint64]) -> _Flags:
        """Return for each id whether the process owns its bucket."""
        if self._owned is None:
            return np.full(len(ids), True)
        held: _Flags = self._owned[np.asarray(bucket_of(ids, len(self._owned), self._direct))]
        return held


class _Piece(NamedTuple):
    """Adjacent record batches that are read together: these numbers, these bytes."""

    first: int
    last: int
    begin: int
    end: int


class VerifiedFile:
    """A data file whose needed bytes are what was saved. Its batches are views of the file's memory."""

    def __init__(
        self,
        folder: Folder,
        file: DataFile,
        manifest: Manifest,
        schema: Any,
        owned: OwnedBuckets,
        held: HeldBytes,
        table: Table,
    ) -> None:
        """Raise unless the file is byte for byte what was saved, and its lines fit the table.

        schema: what the file must have.
        owned: which lines are needed.
        table: the one that the lines are for.
        """
        self.path, self.file, self.bytes_read = f"{folder}/{file.name}", file, 0
        self._folder, self._manifest, self._owned, self._arrow = folder, manifest, owned, pyarrow_or_error()
        self._table = table
        self._opened = opened = open_file(folder, file)
        self._memory = np.frombuffer(opened.memory, np.uint8)[: file.bytes]
        limit = file.bytes if opened.is_local else _PIECE_BYTES
        self._pieces = list(_pieces(_needed(file.batches, owned), file.batches, limit))
        self._is_held = [True for _ in self._pieces]
        self._verify_footer()
        try:
            self._reader = self._arrow.ipc.open_file(self._arrow.py_buffer(opened.memory)[: file.bytes])
            if not self._reader.schema.equals(schema, check_metadata=True):
                raise SnapshotError(f"{self.path} has the schema\n{self._reader.schema}\nexpected\n{schema}")
            self._verify_batches(held)
        except (self._arrow.ArrowException, OSError) as error:
            raise SnapshotError(f"{self.path} cannot be read as an Arrow file: {error}") from error

    @staticmethod
    def is_needed(file: DataFile, manifest: Manifest, owned: OwnedBuckets) -> bool:
        """Return whether the owner of these buckets reads the file. One without lines is read by the owner of the
        snapshot's first bucket, so that some server verifies every file."""
        if owned.are_all:
            return True
        if file.rows == 0:
            return bool(owned.some[np.argmax(manifest.holds())])
        return bool(_needed(file.batches, owned))

    def batches(self) -> Iterator[Columns]:
        """Yield the lines of the needed buckets, one record batch at a time. The caller must be done with a batch
        before it asks for the next: its memory is released then."""
        count, done = sum(piece.last - piece.first + 1 for piece in self._pieces), 0
        for n, piece in enumerate(self._pieces):
            if not self._is_held[n]:
                self._load(piece)
                self._is_held[n] = True
            for i in range(piece.first, piece.last + 1):
                columns = as_columns(self._reader.get_batch(i))
                batch = self.file.batches[i]
                if not self._owned.are_whole(batch.bucket_begin, batch.bucket_end):
                    is_owned = self._owned.hold(columns["id"])
                    columns = {name: column[is_owned] for name, column in columns.items()}
                yield columns
                done += 1
                advance(self.bytes_read * done // count - self.bytes_read * (done - 1) // count)
            self._release(n)

    def _verify_footer(self) -> None:
        """Verify the bytes after the last record batch: the whole file if it has no lines."""
        known = self.file.batches
        at, before = (known[-1].end, known[-1].crc32c) if known else (0, 0)
        with read_errors(self._folder, self.file):
            self._opened.load(at, self.file.bytes)
        self._count(self.file.bytes - at)
        if (computed := crc32c(self._memory[at:], before)) != self.file.crc32c:
            for piece in self._pieces:  # to name the first record batch that is damaged, if one is
                self._load(piece)
            raise SnapshotError(
                f"{self.path} is damaged in its footer (bytes {at} to {self.file.bytes}): its crc32c is {computed}; "
                f"expected {self.file.crc32c}"
            )

    def _load(self, piece: _Piece) -> int:
        """Read adjacent record batches and verify them together; return the number of their bytes. A checksum
        continues the one before."""
        known = self.file.batches
        with read_errors(self._folder, self.file):
            self._opened.load(piece.begin, piece.end)
        before = 0 if piece.first == 0 else known[piece.first - 1].crc32c
        if crc32c(self._memory[piece.begin : piece.end], before) != known[piece.last].crc32c:
            self._raise_damaged(piece)
        return piece.end - piece.begin

    def _release(self, n: int) -> None:
        self._opened.release(self._pieces[n].begin, self._pieces[n].end)
        self._is_held[n] = self._opened.is_local

    def _count(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes
        advance(num_bytes)

    def _raise_damaged(self, piece: _Piece) -> None:
        known = self.file.batches
        for i in range(piece.first, piece.last + 1):
            begin, before = (0, 0) if i == 0 else (known[i - 1].end, known[i - 1].crc32c)
            computed = crc32c(self._memory[begin : known[i].end], before)
            if computed != known[i].crc32c:
                raise SnapshotError(
                    f"{self.path} is damaged in record batch {i} (bytes {begin} to {known[i].end}): its crc32c is "
                    f"{computed}; expected {known[i].crc32c}"
                )

    def _verify_batches(self, held: HeldBytes) -> None:
        num_batches, expected = self._reader.num_record_batches, len(self.file.batches)
        if num_batches != expected:
            raise SnapshotError(f"{self.path} has {num_batches} record batches; expected {expected}")
        for n, piece in enumerate(self._pieces):
            num_bytes = self._load(piece)
            self._count(num_bytes)
            for i in range(piece.first, piece.last + 1):
                self._verify_lines(i)
            if not self._opened.is_local and not held.take(num_bytes, is_full=self._manifest.kind == "full"):
                self._release(n)

    def _verify_lines(self, i: int) -> None:
        known = self.file.batches
        batch, begin, address = self._verified_batch(i), 0 if i == 0 else known[i - 1].end, self._memory.ctypes.data
        where, expected = f"{self.path}: record batch {i}", known[i]
        if batch.num_rows != expected.rows:
            raise SnapshotError(f"{where} holds {batch.num_rows} lines; expected {expected.rows}")
        for buffer in (buffer for column in batch.columns for buffer in column.buffers() if buffer is not None):
            if not begin <= buffer.address - address <= expected.end - buffer.size:
                raise SnapshotError(f"{where} has data outside of its bytes, {begin} to {expected.end}")
        ids = batch.column(0).to_numpy()
        if (ordered := hash_order(ids, self._manifest.is_direct)) < len(ids):
            raise SnapshotError(
                f"{where} holds an id twice or out of order at line {ordered}; expected ids in the order of their "
                "hashes, each at most once"
            )
        low, high = self._buckets(ids[[0, -1]]).tolist()
        if not expected.bucket_begin <= low <= high < expected.bucket_end:
            expected_buckets = f"{expected.bucket_begin} to {expected.bucket_end - 1}"
            raise SnapshotError(f"{where} holds ids of the buckets {low} to {high}; expected {expected_buckets}")

    def _buckets(self, ids: NDArray[np.uint64]) -> NDArray[np.uint32]:
        return np.asarray(bucket_of(ids, self._manifest.num_buckets, self._manifest.is_direct))

    def _verified_batch(self, i: int) -> Any:
        """Return a record batch; raise if it has nulls, steps after the snapshot's, or ids out of the table's range."""
        batch = self._reader.get_batch(i)
        batch.validate()
        if any(column.null_count or items(self._arrow, column).null_count for column in batch.columns):
            raise SnapshotError(f"{self.path} has nulls in record batch {i}")
        has_steps = batch.num_rows > 0 and "step" in batch.schema.names
        if has_steps and int(batch.column("step").to_numpy().max()) > self._manifest.latest_step:
            raise SnapshotError(
                f"{self.path} has a step after the snapshot's latest_step, {self._manifest.latest_step}"
            )
        num_rows = self._table.num_rows
        if num_rows is not None and self.file.kind == "rows" and batch.num_rows > 0:
            largest = int(batch.column(0).to_numpy().max())
            if largest >= num_rows:
                raise SnapshotError(
                    f"table {self._table.name!r}: {self.path} has a row of id {largest}, which is not below "
                    f"num_rows={num_rows}: open the table with num_rows={largest + 1} or more, or without num_rows"
                )
        return batch


def _needed(batches: tuple[RecordBatch, ...], owned: OwnedBuckets) -> list[int]:
    """Return the numbers of the record batches that hold owned buckets."""
    if owned.are_all:
        return list(range(len(batches)))
    count = np.concatenate([[0], np.cumsum(owned.some)]).tolist()
    return [i for i, batch in enumerate(batches) if count[batch.bucket_end] > count[batch.bucket_begin]]


def _pieces(numbers: list[int], batches: tuple[RecordBatch, ...], limit: int) -> Iterator[_Piece]:
    """Yield the pieces of these record batches: adjacent ones, of at most `limit` bytes together unless it is one."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        start = 0 if numbers[begin] == 0 else batches[numbers[begin] - 1].end
        is_last = i == len(numbers) or numbers[i] != numbers[i - 1] + 1
        if is_last or batches[numbers[i]].end - start > limit:
            yield _Piece(numbers[begin], numbers[i - 1], start, batches[numbers[i - 1]].end)
            begin = i


def _folded(owned: _Flags, num_buckets: int, fold: np.ufunc) -> _Flags:
    if len(owned) <= num_buckets:
        return np.repeat(owned, num_buckets // len(owned))
    folded: _Flags = fold.reduce(owned.reshape(num_buckets, -1), axis=1)
    return folded
