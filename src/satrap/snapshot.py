"""A table to Arrow files and back, bit for bit: the only file that imports pyarrow, and only when something is saved.

Rows leave the engine as columns, a range of whole buckets at a time, and are written without another copy; they come
back straight from the mapped files. Each thread works on files of its own. `manifest` says what a snapshot is, `folder`
how it becomes visible; docs/format.md specifies the result.

Versions. The engine marks every row with the table's version at its last change. A save first begins a new version v,
then writes the rows whose mark is at least `since` (a full one: all). So whatever changes during or after the save is
marked v or later, and the changes since v hold it; a row changed during the save may be in both, which does no harm.
All rows are taken before the ids that went, so that applying both never overfills a bucket. A save that fails has
cleared no marks: the changes since an older version are still all there.
"""

import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from satrap._core import bucket_of, crc32c
from satrap.config import Table
from satrap.engine import Place, state_dim, thread_count
from satrap.errors import ConfigError, SatrapError, SnapshotError
from satrap.folder import ChecksumFile, SnapshotFolder, read_manifest
from satrap.manifest import FORMAT, FORMAT_VERSION, DataFile, FileKind, Kind, Manifest

_BATCH_BYTES = 16 << 20  # of a record batch, unless one bucket alone is larger: what a thread holds in memory
_FILE_BYTES = 256 << 20  # of a rows file, so that loading has work for more threads than saving had
_MAX_FILES = 64

_T = TypeVar("_T")
_R = TypeVar("_R")
_Columns = dict[str, NDArray[Any]]


class Origin(NamedTuple):
    """The snapshot that changes start at."""

    version: int
    id: str | None


class History:
    """Which snapshots a store has saved, loaded or applied: the versions that changes can start at."""

    def __init__(self, version: int) -> None:
        """version: the table's when the store was made. What an earlier process saved in shared memory is not known."""
        self._first = version
        self._ids: dict[int, str] = {}

    def add(self, manifest: Manifest) -> int:
        """Remembers a snapshot that is complete; returns its version."""
        self._ids[manifest.version] = manifest.id
        return manifest.version

    def id_of(self, version: int) -> str | None:
        """The id of the snapshot of that version, if known."""
        return self._ids.get(version)

    def find(self, where: str, since: object) -> Origin:
        """The snapshot of version `since`, or an error that names those there are."""
        if isinstance(since, int) and not isinstance(since, bool) and (since in self._ids or 2 <= since <= self._first):
            return Origin(since, self.id_of(since))
        known = ", ".join(map(str, sorted(self._ids))) or "none yet"
        raise SnapshotError(
            f"{where}: since is {since!r}; wanted the version of a snapshot that this store has saved, loaded or "
            f"applied ({known}), or save the whole table"
        )


# -- saving ----------------------------------------------------------------------------------------------------------


def save(place: Place, path: Path, since: Origin | None = None) -> Manifest:
    """Writes the table, or what changed since a snapshot, into the folder."""
    table = place.table
    token = secrets.token_hex(8)
    kind: Kind = "full" if since is None else "changes"
    try:
        with SnapshotFolder(path, kind, table.name, token) as folder:
            manifest = _Saver(place=place, folder=path, kind=kind, id=token, since=since).run()
            folder.commit(manifest)
    except OSError as error:
        raise SnapshotError(
            f"table {table.name!r}: saving into {path} failed at {error.filename or path}: {error.strerror}; "
            "what the folder held is still valid, and no changes are forgotten: give it room, or another folder"
        ) from error
    return manifest


@dataclass(kw_only=True)
class _Saver:
    """One save. Writes data files; whoever made the folder removes them if it fails."""

    place: Place
    folder: Path
    kind: Kind
    id: str
    since: Origin | None
    arrow: Any = field(default_factory=lambda: _pyarrow())

    def run(self) -> Manifest:
        place, engine, index = self.place, self.place.engine, self.place.index
        self._require_removals()
        version = engine.begin_version(index)
        buckets = engine.num_buckets(index)
        ranges = self._file_ranges()
        names = [(f"part-{self.id}-{i:05d}.arrow", *each) for i, each in enumerate(ranges)]
        files = in_threads(place.num_threads, lambda each: self._write("rows", *each), names)
        files.append(self._write("sightings", f"sightings-{self.id}.arrow", 0, buckets))
        if self.since is not None:
            files.append(self._write("removed", f"removed-{self.id}.arrow", 0, buckets))
            self._require_removals()  # still, after all of them were read
        return Manifest(
            kind=self.kind,
            id=self.id,
            version=version,
            since=None if self.since is None else self.since.version,
            since_id=None if self.since is None else self.since.id,
            config=place.table.to_dict(),
            seed=place.seed,
            latest_step=engine.latest_step,  # read last: no stamp in the files is later
            expire_before=engine.expire_before(index),
            lr=engine.lr(index),
            num_buckets=buckets,
            rows=_lines(files, "rows"),
            removed=_lines(files, "removed"),
            sightings=_lines(files, "sightings"),
            files=tuple(files),
        )

    def _require_removals(self) -> None:
        """The ids of rows that went are remembered up to a bound; beyond it changes would be incomplete."""
        oldest = self.place.engine.removed_since(self.place.index)
        if self.since is not None and self.since.version < oldest:
            raise SnapshotError(
                f"table {self.place.table.name!r}: the changes since version {self.since.version} are not all known: "
                f"so many rows went that their ids are remembered since version {oldest} only; save the whole table"
            )

    def _bucket_bytes(self) -> int:
        engine, index = self.place.engine, self.place.index
        return engine.num_rows(index) * _row_bytes(self.place.table) // engine.num_buckets(index) + 1

    def _file_ranges(self) -> list[tuple[int, int]]:
        """Buckets of each rows file: of about equal size, as many for each thread, one file for a small table."""
        buckets = self.place.engine.num_buckets(self.place.index)
        total = self._bucket_bytes() * buckets
        wanted = -(-total // _FILE_BYTES) if total > _BATCH_BYTES else 1
        if total > _BATCH_BYTES:
            wanted = -(-wanted // self.place.num_threads) * self.place.num_threads
        files = min(wanted, max(_MAX_FILES, self.place.num_threads), buckets)
        return [(buckets * i // files, buckets * (i + 1) // files) for i in range(files)]

    def _write(self, kind: FileKind, name: str, begin: int, end: int) -> DataFile:
        arrow = self.arrow
        schema = _schema(arrow, kind, self.kind, self.id, self.place.table)
        rows = 0
        with (
            ChecksumFile(self.folder / name) as file,
            arrow.ipc.new_file(arrow.PythonFile(file, mode="w"), schema) as writer,
        ):
            for columns in self._export(kind, begin, end):
                writer.write_batch(_as_batch(arrow, columns, schema))
                rows += len(columns["id"])
        return DataFile(
            name=name, kind=kind, bytes=file.bytes, rows=rows, crc32c=file.crc32c, bucket_begin=begin, bucket_end=end
        )  # fmt: skip

    def _export(self, kind: FileKind, begin: int, end: int) -> Iterator[_Columns]:
        """The lines of one file, whole buckets at a time, nothing for buckets without any."""
        engine, index = self.place.engine, self.place.index
        since = 0 if self.since is None else self.since.version
        step = max(1, _BATCH_BYTES // self._bucket_bytes()) if kind == "rows" else end - begin
        for first in range(begin, end, step):
            last = min(first + step, end)
            match kind:
                case "rows":
                    columns: _Columns = engine.export_rows(index, first, last, since)
                case "sightings":
                    columns = engine.export_sightings(index, first, last)
                case "removed":
                    columns = {"id": np.asarray(engine.export_removed(index, first, last, since))}
            if len(columns["id"]) > 0:
                yield columns


# -- loading ---------------------------------------------------------------------------------------------------------


class _Mapped(NamedTuple):
    """A data file that has been verified, mapped into memory."""

    file: DataFile
    reader: Any
    """A pyarrow RecordBatchFileReader whose batches are views of the mapping."""


class Snapshot:
    """A snapshot on disk, all of it verified; `fill` puts it into a table."""

    def __init__(self, path: Path, manifest: Manifest, table: Table, num_threads: int) -> None:
        self.path = path
        self.manifest = manifest
        self.table = table
        self._arrow = _pyarrow()
        self._state_dim = state_dim(table)
        self._files = in_threads(num_threads, self._verify, manifest.files)

    @classmethod
    def open(cls, path: Path, kind: Kind, num_threads: int | None) -> Self:
        """Reads the manifest and verifies every byte that it names."""
        manifest = read_manifest(path)
        if manifest.kind != kind:
            raise SnapshotError(
                f"{path} holds the changes since version {manifest.since}; load the full snapshot, then apply_changes"
                if kind == "full"
                else f"{path} holds a full snapshot, no changes; Store.load makes a table of it"
            )
        try:
            table = Table.from_dict(manifest.config)
        except ConfigError as error:
            raise SnapshotError(f"{path}: the manifest's config is not one of this Satrap: {error}") from error
        if table.resolved_num_buckets != manifest.num_buckets:
            raise SnapshotError(
                f"{path}: num_buckets is {manifest.num_buckets}, but the config makes {table.resolved_num_buckets}"
            )
        return cls(path, manifest, table, thread_count(num_threads))

    def require_next(self, place: Place, history: History) -> None:
        """Raises unless these changes start where the table is."""
        where = f"table {place.table.name!r}"
        found = _flat(place.table.to_dict()) | {"seed": place.seed}
        wanted = _flat(self.manifest.config) | {"seed": self.manifest.seed}
        differ = [
            f"{name} is {found.get(name)!r} in the table and {wanted.get(name)!r} in the changes"
            for name in sorted(found.keys() | wanted.keys())
            if found.get(name) != wanted.get(name)
        ]
        if differ:
            raise SnapshotError(f"{where}: {self.path} is of another table: {'; '.join(differ)}")
        version = place.engine.version(place.index)
        since, known = self.manifest.since, history.id_of(version)
        if version != since:
            raise SnapshotError(
                f"{where} is at version {version}, but {self.path} leads from version {since} to "
                f"{self.manifest.version}; apply the changes since version {version} first, or load a full snapshot"
            )
        if None not in (known, self.manifest.since_id) and known != self.manifest.since_id:
            raise SnapshotError(
                f"{where} is at version {version} of the snapshot {known}, but {self.path} continues another one of "
                f"that version, {self.manifest.since_id}: they come from different runs; load a full snapshot"
            )
        if _changed_since(place, version):
            raise SnapshotError(
                f"{where} was changed after version {version}, so the changes in {self.path} would not reproduce "
                "the table they were taken from; load a full snapshot"
            )

    def fill(self, place: Place) -> None:
        """Puts everything into the table: an empty one, or the one that the changes start at."""
        manifest, engine, index = self.manifest, place.engine, place.index
        none = np.empty(0, np.uint32)
        try:
            engine.import_sightings(index, np.empty(0, np.uint64), none, none, clear=True)
            for kind in ("removed", "rows", "sightings"):  # what went comes first: no bucket may overflow on the way
                files = [each for each in self._files if each.file.kind == kind]
                in_threads(place.num_threads, lambda each: self._import(place, each), files)
        except (SatrapError, MemoryError) as error:
            if manifest.kind == "full":
                raise
            raise SnapshotError(
                f"table {self.table.name!r}: the changes in {self.path} could be applied in part only ({error}); "
                "the table is of no version now: load a full snapshot"
            ) from error
        if manifest.kind == "full" and engine.num_rows(index) != manifest.rows:
            raise SnapshotError(
                f"{self.path} holds {manifest.rows} rows of {engine.num_rows(index)} ids; wanted one each"
            )
        engine.restore(index, manifest.version, manifest.latest_step, manifest.expire_before, manifest.lr)

    def _import(self, place: Place, mapped: _Mapped) -> None:
        engine, index = place.engine, place.index
        for columns in _batches(mapped.reader):
            match mapped.file.kind:
                case "rows":
                    state = columns.get("state", np.empty((len(columns["id"]), 0), np.float32))
                    engine.import_rows(index, columns["id"], columns["step"], columns["values"], state)
                case "sightings":
                    engine.import_sightings(index, columns["id"], columns["step"], columns["count"], clear=False)
                case "removed":
                    engine.import_removed(index, columns["id"])

    def _verify(self, file: DataFile) -> _Mapped:
        """Refuses the file unless it is byte for byte what was saved, and what was saved fits the table."""
        path = self.path / file.name
        mapping = _map(path, file)
        found = crc32c(np.frombuffer(mapping, np.uint8))
        if found != file.crc32c:
            raise SnapshotError(f"{path} is damaged: its crc32c is {found}; wanted {file.crc32c}")
        try:
            reader = self._arrow.ipc.open_file(self._arrow.py_buffer(mapping))
            self._verify_lines(path, file, reader)
        except (self._arrow.ArrowException, OSError) as error:
            raise SnapshotError(f"{path} is no Arrow file that can be read: {error}") from error
        return _Mapped(file, reader)

    def _verify_lines(self, path: Path, file: DataFile, reader: Any) -> None:
        wanted = _schema(self._arrow, file.kind, self.manifest.kind, self.manifest.id, self.table, self._state_dim)
        if not reader.schema.equals(wanted, check_metadata=True):
            raise SnapshotError(f"{path} has the schema\n{reader.schema}\nwanted\n{wanted}")
        rows = 0
        for i in range(reader.num_record_batches):
            batch = reader.get_batch(i)
            batch.validate()
            if any(column.null_count for column in batch.columns):
                raise SnapshotError(f"{path} has nulls in record batch {i}")
            rows += batch.num_rows
            if batch.num_rows > 0:
                buckets = np.asarray(bucket_of(batch.column(0).to_numpy(), self.manifest.num_buckets))
                low, high = int(buckets.min()), int(buckets.max())
                if low < file.bucket_begin or high >= file.bucket_end:
                    wanted_buckets = f"{file.bucket_begin} to {file.bucket_end - 1}"
                    raise SnapshotError(f"{path} holds ids of the buckets {low} to {high}; wanted {wanted_buckets}")
        if rows != file.rows:
            raise SnapshotError(f"{path} holds {rows} lines; wanted {file.rows}")


def _lines(files: Sequence[DataFile], kind: FileKind) -> int:
    return sum(file.rows for file in files if file.kind == kind)


def _map(path: Path, file: DataFile) -> mmap.mmap:
    try:
        with path.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.bytes or size == 0:
                raise SnapshotError(f"{path} has {size} bytes; wanted {file.bytes}: it is not as it was saved")
            return mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise SnapshotError(f"{path} is missing; the manifest names it") from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error


def _changed_since(place: Place, version: int) -> bool:
    """Whether a row changed or went at this version. Costs a look at every row's mark if not."""
    engine, index = place.engine, place.index
    return any(
        np.asarray(engine.export_removed(index, b, b + 1, version)).size > 0
        or engine.export_rows(index, b, b + 1, version)["id"].size > 0
        for b in range(engine.num_buckets(index))
    )


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


# -- columns ---------------------------------------------------------------------------------------------------------


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise SnapshotError(f"saving and loading need pyarrow ({error}): pip install pyarrow") from error
    return pyarrow


def _row_bytes(table: Table) -> int:
    return table.dim * (4 if table.dtype == "float32" else 2) + 4 * state_dim(table) + 12


def _schema(arrow: Any, file: FileKind, kind: Kind, snapshot_id: str, table: Table, states: int | None = None) -> Any:
    """The columns of a file of this kind, and what names it."""
    states = state_dim(table) if states is None else states
    columns = [("id", arrow.uint64())]
    if file in ("rows", "sightings"):
        columns.append(("step", arrow.uint32()))
    if file == "sightings":
        columns.append(("count", arrow.uint32()))
    if file == "rows":
        number = arrow.float32() if table.dtype == "float32" else arrow.uint16()
        columns.append(("values", _list_type(arrow, number, table.dim)))
        if states > 0:
            columns.append(("state", _list_type(arrow, arrow.float32(), states)))
    metadata = {
        "satrap.format": FORMAT,
        "satrap.format_version": str(FORMAT_VERSION),
        "satrap.table": table.name,
        "satrap.dtype": table.dtype,
        "satrap.kind": kind,
        "satrap.file": file,
        "satrap.id": snapshot_id,
    }
    return arrow.schema([arrow.field(name, type_, nullable=False) for name, type_ in columns], metadata)


def _list_type(arrow: Any, number: Any, size: int) -> Any:
    return arrow.list_(arrow.field("item", number, nullable=False), size)


def _as_batch(arrow: Any, columns: _Columns, schema: Any) -> Any:
    """The columns as a record batch around their own memory."""
    arrays = []
    for each in schema:
        data = columns[each.name]
        if data.ndim == 1:
            arrays.append(arrow.Array.from_buffers(each.type, len(data), [None, arrow.py_buffer(data)]))
            continue
        items = arrow.Array.from_buffers(each.type.value_type, data.size, [None, arrow.py_buffer(data)])
        arrays.append(arrow.Array.from_buffers(each.type, len(data), [None], children=[items]))
    return arrow.RecordBatch.from_arrays(arrays, schema=schema)


def _batches(reader: Any) -> Iterator[_Columns]:
    """The record batches of a verified file as views of its mapping."""
    for i in range(reader.num_record_batches):
        batch = reader.get_batch(i)
        columns = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name in ("values", "state"):
                columns[name] = column.flatten().to_numpy().reshape(batch.num_rows, column.type.list_size)
            else:
                columns[name] = column.to_numpy()
        yield columns


def in_threads(num_threads: int, work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """work(item) of each item, in order. An error is raised when the calls that had begun have ended."""
    if num_threads == 1 or len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(num_threads, len(items)), thread_name_prefix="satrap-snapshot") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
