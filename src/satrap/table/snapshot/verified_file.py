"""A data file of a snapshot, or the part of it that some buckets need: verified, mapped into memory, read in batches.

The manifest names the buckets, the bytes and the checksum of each record batch (`RecordBatch`). So a server that owns
some buckets reads the batches of these and the file's footer, each once, and no other byte. The lines of such a file
are in the order of their mixed ids; a file of an earlier Satrap names no batches, and is read whole.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap._core import bucket_of, crc32c, mixed_order
from satrap.errors import SnapshotError
from satrap.table.snapshot.arrow_files import Columns, as_columns, items, mapped_file, pyarrow_or_error
from satrap.table.snapshot.manifest import DataFile, Manifest, RecordBatch
from satrap.transfer import advance


class VerifiedFile:
    """A data file whose needed bytes are what was saved. Its batches are views of the mapping."""

    def __init__(
        self, path: Path, file: DataFile, manifest: Manifest, schema: Any, owned: NDArray[np.bool_] | None
    ) -> None:
        """Raises unless the file is byte for byte what was saved, and its lines fit the table.

        schema: what the file must have.
        owned: for each bucket whether its lines are needed; None: all.
        """
        self.path, self.file, self.bytes_read = path, file, 0
        self._manifest, self._owned, self._arrow = manifest, owned, pyarrow_or_error()
        self._needed = _needed(file.batches or (), owned)
        mapping = mapped_file(path, file)
        self._verify_bytes(mapping)
        try:
            self._reader = self._arrow.ipc.open_file(self._arrow.py_buffer(mapping))
            if not self._reader.schema.equals(schema, check_metadata=True):
                raise SnapshotError(f"{path} has the schema\n{self._reader.schema}\nexpected\n{schema}")
            if file.batches is None:
                self._verify_unsorted()
            else:
                self._verify_sorted(file.batches, np.frombuffer(mapping, np.uint8).ctypes.data)
        except (self._arrow.ArrowException, OSError) as error:
            raise SnapshotError(f"{path} cannot be read as an Arrow file: {error}") from error

    @staticmethod
    def is_needed(file: DataFile, manifest: Manifest, owned: NDArray[np.bool_] | None) -> bool:
        """Returns whether the owner of these buckets reads the file. One without lines is read by the owner of the
        snapshot's first bucket, so that some server verifies every file."""
        if owned is None:
            return True
        holds = manifest.holds()
        if file.rows == 0:
            return bool(owned[np.argmax(holds)])
        if file.batches is None:
            return bool((owned & holds)[file.bucket_begin : file.bucket_end].any())
        return bool(_needed(file.batches, owned))

    def batches(self) -> Iterator[Columns]:
        """Yields the lines of the needed buckets; each batch then counts as moved."""
        numbers = range(self._reader.num_record_batches) if self.file.batches is None else self._needed
        for done, i in enumerate(numbers):
            columns = as_columns(self._reader.get_batch(i))
            if self._owned is not None and not self._is_owned_whole(i):
                is_owned = self._owned[np.asarray(bucket_of(columns["id"], self._manifest.num_buckets))]
                columns = {name: column[is_owned] for name, column in columns.items()}
            yield columns
            advance(self.bytes_read * (done + 1) // len(numbers) - self.bytes_read * done // len(numbers))

    def _is_owned_whole(self, i: int) -> bool:
        assert self._owned is not None
        if self.file.batches is None:
            return False
        batch = self.file.batches[i]
        return bool(self._owned[batch.bucket_begin : batch.bucket_end].all())

    def _verify_bytes(self, mapping: mmap.mmap) -> None:
        """Verifies adjacent record batches together, then the footer. A checksum continues the one before."""
        data, known = np.frombuffer(mapping, np.uint8), self.file.batches or ()
        at, ends = 0, {0: 0} | {batch.end: batch.crc32c for batch in known}
        for first, last in _runs(self._needed):
            begin = 0 if first == 0 else known[first - 1].end
            if self._checksum(data, begin, known[last].end, ends[begin]) != known[last].crc32c:
                self._raise_damaged(data, known, first, last)
        at = known[-1].end if known else 0
        found = self._checksum(data, at, len(data), ends[at])
        if found != self.file.crc32c:
            where = "" if self.file.batches is None else f" in its footer (bytes {at} to {len(data)})"
            raise SnapshotError(f"{self.path} is damaged{where}: its crc32c is {found}; expected {self.file.crc32c}")

    def _checksum(self, data: NDArray[np.uint8], begin: int, end: int, before: int) -> int:
        self.bytes_read += end - begin
        advance(end - begin)
        return crc32c(data[begin:end], before)

    def _raise_damaged(self, data: NDArray[np.uint8], known: tuple[RecordBatch, ...], first: int, last: int) -> None:
        for i in range(first, last + 1):
            begin, before = (0, 0) if i == 0 else (known[i - 1].end, known[i - 1].crc32c)
            found = crc32c(data[begin : known[i].end], before)
            if found != known[i].crc32c:
                raise SnapshotError(
                    f"{self.path} is damaged in record batch {i} (bytes {begin} to {known[i].end}): its crc32c is "
                    f"{found}; expected {known[i].crc32c}"
                )

    def _verify_sorted(self, known: tuple[RecordBatch, ...], address: int) -> None:
        if self._reader.num_record_batches != len(known):
            raise SnapshotError(
                f"{self.path} has {self._reader.num_record_batches} record batches; expected {len(known)}"
            )
        for i in self._needed:
            batch, begin = self._verified_batch(i), 0 if i == 0 else known[i - 1].end
            where, expected = f"{self.path}: record batch {i}", known[i]
            if batch.num_rows != expected.rows:
                raise SnapshotError(f"{where} holds {batch.num_rows} lines; expected {expected.rows}")
            for buffer in (each for column in batch.columns for each in column.buffers() if each is not None):
                if not begin <= buffer.address - address <= expected.end - buffer.size:
                    raise SnapshotError(f"{where} has data outside of its bytes, {begin} to {expected.end}")
            ids = batch.column(0).to_numpy()
            if (ordered := mixed_order(ids)) < len(ids):
                raise SnapshotError(
                    f"{where} holds an id twice or out of order at line {ordered}; expected ids in the order of their "
                    "hashes, each at most once"
                )
            low, high = np.asarray(bucket_of(ids[[0, -1]], self._manifest.num_buckets)).tolist()
            if not expected.bucket_begin <= low <= high < expected.bucket_end:
                wanted_buckets = f"{expected.bucket_begin} to {expected.bucket_end - 1}"
                raise SnapshotError(f"{where} holds ids of the buckets {low} to {high}; expected {wanted_buckets}")

    def _verify_unsorted(self) -> None:
        rows, ids = 0, [np.empty(0, np.uint64)]
        file, holds = self.file, self._manifest.holds()
        for i in range(self._reader.num_record_batches):
            batch = self._verified_batch(i)
            rows += batch.num_rows
            if batch.num_rows > 0:
                ids.append(batch.column(0).to_numpy())
                buckets = np.asarray(bucket_of(ids[-1], self._manifest.num_buckets))
                low, high = int(buckets.min()), int(buckets.max())
                if low < file.bucket_begin or high >= file.bucket_end:
                    wanted_buckets = f"{file.bucket_begin} to {file.bucket_end - 1}"
                    raise SnapshotError(
                        f"{self.path} holds ids of the buckets {low} to {high}; expected {wanted_buckets}"
                    )
                if not holds[buckets].all():
                    raise SnapshotError(
                        f"{self.path} holds ids of bucket {buckets[~holds[buckets]][0]}, which its manifest does not "
                        "name"
                    )
        if rows != file.rows:
            raise SnapshotError(f"{self.path} holds {rows} lines; expected {file.rows}")
        # `Snapshot.fill` counts the rows of a full one at less cost: its table is new. Files share no bucket, so no id.
        if (self._manifest.kind, file.kind) != ("full", "rows") and len(np.unique(np.concatenate(ids))) < rows:
            raise SnapshotError(f"{self.path} holds an id twice in its {rows} lines; expected each at most once")

    def _verified_batch(self, i: int) -> Any:
        """Returns a record batch; raises if it has nulls, or steps after the snapshot's."""
        batch = self._reader.get_batch(i)
        batch.validate()
        if any(column.null_count or items(self._arrow, column).null_count for column in batch.columns):
            raise SnapshotError(f"{self.path} has nulls in record batch {i}")
        has_steps = batch.num_rows > 0 and "step" in batch.schema.names
        if has_steps and int(batch.column("step").to_numpy().max()) > self._manifest.latest_step:
            raise SnapshotError(
                f"{self.path} has a step after the snapshot's latest_step, {self._manifest.latest_step}"
            )
        return batch


def _needed(batches: tuple[RecordBatch, ...], owned: NDArray[np.bool_] | None) -> list[int]:
    """Returns the numbers of the record batches that hold owned buckets."""
    if owned is None:
        return list(range(len(batches)))
    count = np.concatenate([[0], np.cumsum(owned)]).tolist()
    return [i for i, each in enumerate(batches) if count[each.bucket_end] > count[each.bucket_begin]]


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last of adjacent numbers."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[begin], numbers[i - 1]
            begin = i
