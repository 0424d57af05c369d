"""Writes a table at a cut: its rows leave the engine as columns, a range of whole buckets at a time, and become a
snapshot.

Each thread writes its own files. `cut` fixes the moment that is saved, `arrow_files` defines the content of the files,
`manifest` describes the snapshot, and `directory` makes it visible.

Versions. The engine marks every row with the table's version at its last change. A cut begins a new version v; then
the rows whose mark at the cut is at least `since` are written (of a full save: all). So whatever changes after the cut
is marked v or later, and the changes since v hold it. A save that fails has cleared no marks: the changes since an
older version are still all there.
"""

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from satrap._core import bucket_of
from satrap.config.cores import in_threads
from satrap.config.tables import Table
from satrap.errors import InputError, SnapshotError
from satrap.storage.folder import Folder
from satrap.storage.local_folder import LocalFolder
from satrap.table.engine import Slot, state_dim
from satrap.table.snapshot.arrow_files import Columns, as_batch, new_file, pyarrow_or_error, schema_of
from satrap.table.snapshot.cut import TableCut, require_changes, take_cuts
from satrap.table.snapshot.directory import ChecksumFile, SnapshotDirectory
from satrap.table.snapshot.manifest import DataFile, FileKind, Kind, Manifest, RecordBatch, Since
from satrap.table.snapshot.object_directory import ObjectDirectory
from satrap.transfer import Transfer

_LOG = logging.getLogger("satrap.table")
_EXPORT_BYTES = 16 << 20  # a thread exports so much at a time, unless one bucket is larger
_FILE_BYTES = 256 << 20  # rows files are small, so that more threads may load than saved
_MAX_FILES = 64
TARGET_BYTES = 16 << 10
"""Average size limit of a record batch that holds several buckets. Each batch adds about 400 bytes to the file, and
takes the writer and every reader about 50 us, however small it is."""


class BatchCut(NamedTuple):
    """The lines of one record batch."""

    bucket_begin: int
    bucket_end: int
    first: int
    """The first line."""
    last: int
    """The line after the last one."""


class SavedCut(NamedTuple):
    """What was written."""

    manifest: Manifest
    rows: int
    """Rows that the table had at the cut: more than the files hold, if they are changes."""


def save_table(slot: Slot, path: Folder, since: Since | None = None) -> Manifest:
    """Write the table as it is now, or what changed since a snapshot, into the folder."""
    changes = "" if since is None else f", changes since version {since.version},"
    # The size of changes is not known.
    total = slot.directory.num_rows(slot.index) * row_bytes(slot.table) if since is None else None
    what = f"save of table {slot.table.name!r}{changes} into {path}"
    with Transfer(_LOG, "save", what, total=total, among=slot.transfers, table=slot.table.name):
        threads = slot.engine.num_threads
        return _save(slot, path, since, _cut_now(slot), threads, is_part=False).manifest


def write_cut(cut: TableCut, path: Folder, since: Since | None, num_threads: int) -> SavedCut:
    """Write a table at a cut, or what had changed by then since a snapshot, into the folder."""
    return _save(cut.slot, path, since, nullcontext(cut), num_threads, is_part=cut.owned is not None)


@contextmanager
def _cut_now(slot: Slot) -> Iterator[TableCut]:
    (cut,) = take_cuts([slot])
    try:
        yield cut
    finally:
        cut.end()


def _save(
    slot: Slot,
    path: Folder,
    since: Since | None,
    cut: AbstractContextManager[TableCut],
    num_threads: int,
    *,
    is_part: bool,
) -> SavedCut:
    """cut: entered once the folder was found to be one that may be written into, so that a refusal changes nothing."""
    table, token = slot.table, secrets.token_hex(8)
    if since is not None:
        require_changes(slot, since)  # first: what a killed save left in the folder must not hide this error
    try:
        with _directory(slot, path, token, since, is_part=is_part) as folder, cut as taken:
            if since is not None:
                require_changes(slot, since)  # what is known at the cut is known until it was exported
            kind: Kind = "full" if since is None else "changes"
            saver = _Saver(cut=taken, folder=path, kind=kind, id=token, since=since, num_threads=num_threads)
            manifest = saver.run()
            folder.commit(manifest)
    except InputError as error:
        raise SnapshotError(f"saving into {path} failed: {error}; nothing was saved") from error
    except OSError as error:
        advice = "free some space, or give another folder" if path.is_local else "save again, or give another URL"
        raise SnapshotError(
            f"table {table.name!r}: saving into {path} failed at {error.filename or path}: {error.strerror}; "
            f"what the folder held is still valid, and no changes are forgotten: {advice}"
        ) from error
    return SavedCut(manifest, saver.rows)


def _directory(
    slot: Slot, path: Folder, token: str, since: Since | None, *, is_part: bool
) -> SnapshotDirectory | ObjectDirectory:
    config, seed = slot.table.to_dict(), slot.seed
    if isinstance(path, LocalFolder):
        return SnapshotDirectory(path.path, token, config, seed, since)
    return ObjectDirectory(path, token, config, seed, since, is_part=is_part)


def row_bytes(table: Table) -> int:
    """Return the bytes of one row in a snapshot, with its id and its step."""
    return table.dim * (4 if table.dtype == "float32" else 2) + 4 * state_dim(table) + 12


@dataclass(kw_only=True)
class _Saver:
    """One save. Writes data files; the folder's owner removes them if the save fails."""

    cut: TableCut
    folder: Folder
    kind: Kind
    id: str
    since: Since | None
    num_threads: int
    slot: Slot = field(init=False)
    rows: int = 0
    """Rows at the cut, of the buckets exported so far."""
    removed: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    """The ids that had been removed by the cut, by the first bucket of the export that found them."""
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards rows and removed
    arrow: Any = field(default_factory=pyarrow_or_error)
    state_dim: int = field(init=False)
    line_bytes: dict[FileKind, int] = field(init=False)
    """Size of one line of each kind."""
    bucket_bytes: int = field(init=False)
    """Average size of the rows of one bucket."""
    ranges: tuple[tuple[int, int], ...] = field(init=False)
    """The saved buckets, as rising ranges."""

    def __post_init__(self) -> None:
        self.slot = slot = self.cut.slot
        engine, index, owned = slot.engine, slot.index, self.cut.owned
        self.state_dim = engine.state_dim(index)
        self.line_bytes = {"rows": row_bytes(slot.table), "sightings": 16, "removed": 8}
        self.ranges = ((0, engine.num_buckets(index)),) if owned is None else _ranges(owned)
        num_owned = sum(end - begin for begin, end in self.ranges)
        self.bucket_bytes = self.cut.rows * row_bytes(slot.table) // max(1, num_owned) + 1

    def run(self) -> Manifest:
        cut, slot = self.cut, self.slot
        buckets = slot.engine.num_buckets(slot.index)
        names = [(f"part-{self.id}-{i:05d}.arrow", *bounds) for i, bounds in enumerate(self._file_ranges())]
        # First: they are few, and until they are exported every change of them keeps a copy of theirs.
        sightings = self._write("sightings", f"sightings-{self.id}.arrow", 0, buckets)
        files = in_threads(self.num_threads, lambda file: self._write("rows", *file), names, "satrap-snapshot")
        files.append(sightings)
        if self.since is not None:
            files.append(self._write("removed", f"removed-{self.id}.arrow", 0, buckets))
        return Manifest(
            kind=self.kind,
            id=self.id,
            version=cut.version,
            since=None if self.since is None else self.since.version,
            since_id=None if self.since is None else self.since.id,
            config=slot.table.to_dict(),
            seed=slot.seed,
            expire_before=cut.expire_before,
            latest_step=cut.last_step(),
            lr=cut.lr,
            num_buckets=buckets,
            buckets=self.ranges,
            rows=_lines(files, "rows"),
            removed=_lines(files, "removed"),
            sightings=_lines(files, "sightings"),
            files=tuple(files),
        )

    def _file_ranges(self) -> list[tuple[int, int]]:
        """Return the buckets of each rows file: files of about equal size, as many for each thread; one for a small
        table."""
        buckets = self.slot.engine.num_buckets(self.slot.index)
        total = self.bucket_bytes * sum(end - begin for begin, end in self.ranges)
        expected = -(-total // _FILE_BYTES) if total > _EXPORT_BYTES else 1
        if total > _EXPORT_BYTES:
            expected = -(-expected // self.num_threads) * self.num_threads
        files = min(expected, max(_MAX_FILES, self.num_threads), buckets)
        return [(buckets * i // files, buckets * (i + 1) // files) for i in range(files)]

    def _write(self, kind: FileKind, name: str, begin: int, end: int) -> DataFile:
        arrow = self.arrow
        schema = schema_of(arrow, kind, self.kind, self.id, self.slot.table, self.state_dim)
        batches = []
        with (
            ChecksumFile(self.folder.create(name)) as file,
            new_file(arrow, arrow.PythonFile(file, mode="w"), schema) as writer,
        ):
            for bucket_begin, bucket_end, columns in self._batches(kind, begin, end):
                writer.write_batch(as_batch(arrow, columns, schema))
                batches.append(RecordBatch(bucket_begin, bucket_end, len(columns["id"]), file.bytes, file.crc32c))
        return DataFile(
            name=name,
            kind=kind,
            bytes=file.bytes,
            rows=sum(batch.rows for batch in batches),
            crc32c=file.crc32c,
            bucket_begin=begin,
            bucket_end=end,
            batches=tuple(batches),
        )

    def _batches(self, kind: FileKind, begin: int, end: int) -> Iterator[tuple[int, int, Columns]]:
        """Yield the record batches of one file, with their buckets."""
        num_buckets = self.slot.engine.num_buckets(self.slot.index)
        for first, last, columns in self._export(kind, begin, end):
            buckets = np.asarray(bucket_of(columns["id"], num_buckets, self.slot.table.is_direct))
            for cut in cut_batches(buckets, first, last, self.ranges, self.line_bytes[kind]):
                lines = {name: column[cut.first : cut.last] for name, column in columns.items()}
                yield cut.bucket_begin, cut.bucket_end, lines

    def _export(self, kind: FileKind, begin: int, end: int) -> Iterator[tuple[int, int, Columns]]:
        """Yield the lines of one file in the order of their ids' hashes, some buckets at a time, and these buckets."""
        engine, index = self.slot.engine, self.slot.index
        since = 0 if self.since is None else self.since.version
        step = max(1, _EXPORT_BYTES // self.bucket_bytes) if kind == "rows" else end - begin
        for first in range(begin, end, step):
            last = min(first + step, end)
            self.cut.require_not_cancelled()
            match kind:
                case "rows":
                    exported = self.slot.rows.export_cut(index, first, last, since)
                    with self.lock:
                        self.rows += exported.pop("alive")
                        self.removed[first] = exported.pop("removed")
                    columns: Columns = exported
                case "sightings":
                    columns = engine.export_cut_sightings(index, first, last)
                case "removed":
                    columns = {"id": np.concatenate([self.removed[bucket] for bucket in sorted(self.removed)])}
            yield first, last, columns


def _ranges(owned: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Return the ranges where it is true, as [begin, end)."""
    ends = np.flatnonzero(np.diff(np.concatenate([[False], owned, [False]]).astype(np.int8))).tolist()
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def _lines(files: Sequence[DataFile], kind: FileKind) -> int:
    return sum(file.rows for file in files if file.kind == kind)


def cut_batches(
    buckets: NDArray[np.uint32], begin: int, end: int, owned: Sequence[tuple[int, int]], line_bytes: int
) -> list[BatchCut]:
    """Return the record batches of lines whose buckets are `buckets`, rising, of the range begin to end: one bucket
    each, or an aligned group of small ones. Even maps of servers are aligned, too, so 2, 4, 8, ... servers share none.

    owned: the saver's buckets, as rising ranges. No batch spans buckets that are not among them.
    line_bytes: size of a line.
    """
    ranges = [(max(first, begin), min(last, end)) for first, last in owned if first < end and begin < last]
    num_owned = sum(last - first for first, last in ranges)
    group = 1
    while 2 * group * len(buckets) * line_bytes <= TARGET_BYTES * num_owned and group < end:
        group *= 2
    cuts = []
    for first, last in ranges:
        edges = [first, *range(first - first % group + group, last, group), last]
        lines = np.searchsorted(buckets, edges).tolist()
        steps = zip(edges[:-1], edges[1:], lines[:-1], lines[1:], strict=True)
        cuts += [BatchCut(*step) for step in steps if step[2] < step[3]]
    return cuts
