"""Loads a table bit for bit: verifies a snapshot on disk whole, then fills a table from the mapped files.

`writer` wrote it, `arrow_files` defines its data files, `manifest` describes it; docs/format.md specifies all of it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from satrap._core import bucket_of, crc32c
from satrap.config.array_args import as_lr
from satrap.config.cores import thread_count
from satrap.config.tables import Table
from satrap.errors import ConfigError, InputError, SatrapError, SnapshotError
from satrap.table.engine import Slot, native_config
from satrap.table.snapshot.arrow_files import batches, in_threads, items, mapped_file, pyarrow_or_error, schema_of
from satrap.table.snapshot.directory import parts_of, read_manifest
from satrap.table.snapshot.manifest import DataFile, Kind, Manifest, Since
from satrap.table.snapshot.saved_table import require_each_bucket_once
from satrap.transfer import advance

_MOST_READS = 100  # of a folder into which other processes save


class History:
    """The snapshots that a store has saved, loaded or applied: the versions that changes can start at."""

    def __init__(self, version: int) -> None:
        """version: the table's when the store was created. An earlier process's saves to shared memory are unknown."""
        self._first = version
        self._ids: dict[int, str] = {}

    def add(self, manifest: Manifest) -> int:
        """Records a complete snapshot; returns its version."""
        self._ids[manifest.version] = manifest.id
        return manifest.version

    def id_of(self, version: int) -> str | None:
        """Returns the id of the snapshot of that version, if known."""
        return self._ids.get(version)

    def find(self, where: str, since: object) -> Since:
        """Returns the snapshot of version `since`; raises an error that lists the known versions if there is none."""
        if isinstance(since, int) and not isinstance(since, bool) and (since in self._ids or 2 <= since <= self._first):
            return Since(since, self.id_of(since))
        known = ", ".join(map(str, sorted(self._ids))) or "none yet"
        raise SnapshotError(
            f"{where}: since is {since!r}; expected the version of a snapshot that this store has saved, loaded or "
            f"applied ({known}), or save the whole table"
        )


class _Mapped(NamedTuple):
    """A verified data file, mapped into memory."""

    file: DataFile
    reader: Any
    """A pyarrow RecordBatchFileReader whose batches are views of the mapping."""


class Snapshot:
    """A verified snapshot on disk; `fill` puts it into a table."""

    def __init__(self, path: Path, manifest: Manifest, table: Table, num_threads: int) -> None:
        self.path = path
        self.manifest = manifest
        self.table = table
        self._arrow = pyarrow_or_error()
        self._state_dim = native_config(table).state_dim
        self._files = in_threads(num_threads, self._verify, manifest.files)

    @classmethod
    def open(cls, path: Path, kind: Kind, num_threads: int | None) -> Self:
        """Reads the manifest and verifies every byte of its files. If a save replaces the snapshot meanwhile, removing
        its files, reads the new one."""
        for _ in range(_MOST_READS):
            manifest = read_manifest(path)
            try:
                return cls._verified(path, manifest, kind, num_threads)
            except SnapshotError:
                if read_manifest(path).id == manifest.id:
                    raise
        raise SnapshotError(f"{path} was replaced {_MOST_READS} times while it was read: pause the saves into it")

    @classmethod
    def _verified(cls, path: Path, manifest: Manifest, kind: Kind, num_threads: int | None) -> Self:
        if manifest.kind != kind:
            raise SnapshotError(
                f"{path} holds the changes since version {manifest.since}; load the full snapshot, then apply_changes"
                if kind == "full"
                else f"{path} holds a full snapshot, no changes; load it with Store.load"
            )
        try:
            table = Table.from_dict(manifest.config)
        except ConfigError as error:
            raise SnapshotError(f"{path}: this Satrap does not accept the manifest's config: {error}") from error
        try:
            as_lr(f"{path}: the manifest's lr", manifest.lr, table.optimizer)
        except InputError as error:
            raise SnapshotError(str(error)) from None
        if table.resolved_num_buckets != manifest.num_buckets:
            raise SnapshotError(
                f"{path}: num_buckets is {manifest.num_buckets}, but its config gives {table.resolved_num_buckets}"
            )
        return cls(path, manifest, table, thread_count(num_threads))

    def require_same_table(self, slot: Slot) -> None:
        """Raises unless the snapshot is of a table configured alike."""
        differ = self.manifest.differences(slot.table.to_dict(), slot.seed)
        if differ:
            raise SnapshotError(f"table {slot.table.name!r}: {self.path} is of another table: {'; '.join(differ)}")

    def require_next(self, slot: Slot, history: History) -> None:
        """Raises unless these changes start at the table's version."""
        where = f"table {slot.table.name!r}"
        self.require_same_table(slot)
        version = slot.engine.version(slot.index)
        since, known = self.manifest.since, history.id_of(version)
        if version != since:
            raise SnapshotError(
                f"{where} is at version {version}, but {self.path} leads from version {since} to "
                f"{self.manifest.version}{self._way_on(version, history)}"
            )
        if None not in (known, self.manifest.since_id) and known != self.manifest.since_id:
            raise SnapshotError(
                f"{where} is at version {version} of the snapshot {known}, but {self.path} continues another one of "
                f"that version, {self.manifest.since_id}: they come from different runs; load a full snapshot"
            )
        if _changed_since(slot, version):
            raise SnapshotError(
                f"{where} was changed after version {version}, so the changes in {self.path} would not reproduce "
                "the table they were taken from; load a full snapshot"
            )

    def _way_on(self, version: int, history: History) -> str:
        """Returns the advice for changes that do not start at the table's version."""
        if history.id_of(self.manifest.version) == self.manifest.id:
            return ": these changes are already applied"
        if version == 1:
            return ": this table is of no snapshot yet; load the full one first, with Store.load"
        if version >= self.manifest.version:
            return f": they are older than the table; apply the changes since version {version}"
        return f"; apply the changes since version {version} first, or load a full snapshot"

    def fill(self, slot: Slot, owned: NDArray[np.bool_] | None = None) -> None:
        """Puts all rows into the table: an empty one, or the one that the changes start at, without sightings.

        owned: for each bucket whether to load it; None: all.
        """
        manifest, engine, index = self.manifest, slot.engine, slot.index
        rows_before = engine.num_rows(index)
        try:
            for kind in ("removed", "rows", "sightings"):  # removals first: no bucket may overflow on the way
                files = [each for each in self._files if each.file.kind == kind]
                in_threads(slot.engine.num_threads, lambda each: self._import(slot, each, owned), files)
        except (SatrapError, MemoryError) as error:
            if manifest.kind == "full":
                raise
            raise SnapshotError(
                f"table {self.table.name!r}: the changes in {self.path} could be applied in part only ({error}); "
                "the table is at no version now: load a full snapshot"
            ) from error
        found = engine.num_rows(index) - rows_before
        if manifest.kind == "full" and owned is None and found != manifest.rows:
            raise SnapshotError(f"{self.path} holds {manifest.rows} rows of {found} ids; expected one row for each id")
        engine.restore(index, manifest.version, manifest.latest_step, manifest.expire_before, manifest.lr)

    def _import(self, slot: Slot, mapped: _Mapped, owned: NDArray[np.bool_] | None) -> None:
        engine, index = slot.engine, slot.index
        for columns in batches(mapped.reader):
            if mapped.file.kind == "rows":
                slot.progress.restore.add(len(columns["id"]))
            num_lines = len(columns["id"])
            if owned is not None:
                is_owned = owned[np.asarray(bucket_of(columns["id"], self.manifest.num_buckets))]
                columns = {name: column[is_owned] for name, column in columns.items()}
            match mapped.file.kind:
                case "rows":
                    state = columns.get("state", np.empty((len(columns["id"]), 0), np.float32))
                    engine.import_rows(index, columns["id"], columns["step"], columns["values"], state)
                case "sightings":
                    engine.import_sightings(index, columns["id"], columns["step"], columns["count"], clear=False)
                case "removed":
                    engine.import_removed(index, columns["id"])
            advance(mapped.file.bytes * num_lines // max(1, mapped.file.rows))

    def _verify(self, file: DataFile) -> _Mapped:
        """Raises unless the file is byte for byte what was saved, and its lines fit the table."""
        path = self.path / file.name
        mapping = mapped_file(path, file)
        found = crc32c(np.frombuffer(mapping, np.uint8))
        advance(file.bytes)
        if found != file.crc32c:
            raise SnapshotError(f"{path} is damaged: its crc32c is {found}; expected {file.crc32c}")
        try:
            reader = self._arrow.ipc.open_file(self._arrow.py_buffer(mapping))
            self._verify_lines(path, file, reader)
        except (self._arrow.ArrowException, OSError) as error:
            raise SnapshotError(f"{path} cannot be read as an Arrow file: {error}") from error
        return _Mapped(file, reader)

    def _verify_lines(self, path: Path, file: DataFile, reader: Any) -> None:
        expected = schema_of(self._arrow, file.kind, self.manifest.kind, self.manifest.id, self.table, self._state_dim)
        if not reader.schema.equals(expected, check_metadata=True):
            raise SnapshotError(f"{path} has the schema\n{reader.schema}\nexpected\n{expected}")
        rows, ids = 0, [np.empty(0, np.uint64)]
        holds = self.manifest.holds()
        for i in range(reader.num_record_batches):
            batch = reader.get_batch(i)
            batch.validate()
            if any(column.null_count or items(self._arrow, column).null_count for column in batch.columns):
                raise SnapshotError(f"{path} has nulls in record batch {i}")
            rows += batch.num_rows
            if batch.num_rows > 0:
                ids.append(batch.column(0).to_numpy())
                self._verify_steps(path, batch)
                buckets = np.asarray(bucket_of(batch.column(0).to_numpy(), self.manifest.num_buckets))
                low, high = int(buckets.min()), int(buckets.max())
                if low < file.bucket_begin or high >= file.bucket_end:
                    wanted_buckets = f"{file.bucket_begin} to {file.bucket_end - 1}"
                    raise SnapshotError(f"{path} holds ids of the buckets {low} to {high}; expected {wanted_buckets}")
                if not holds[buckets].all():
                    raise SnapshotError(
                        f"{path} holds ids of bucket {buckets[~holds[buckets]][0]}, which its manifest does not name"
                    )
        if rows != file.rows:
            raise SnapshotError(f"{path} holds {rows} lines; expected {file.rows}")
        # `fill` counts the rows of a full snapshot at less cost: its table is new. Files share no bucket, so no id.
        if (self.manifest.kind, file.kind) != ("full", "rows") and len(np.unique(np.concatenate(ids))) < rows:
            raise SnapshotError(f"{path} holds an id twice in its {rows} lines; expected each at most once")

    def _verify_steps(self, path: Path, batch: Any) -> None:
        if "step" in batch.schema.names and int(batch.column("step").to_numpy().max()) > self.manifest.latest_step:
            raise SnapshotError(f"{path} has a step after the snapshot's latest_step, {self.manifest.latest_step}")


def open_chain(slot: Slot, paths: Sequence[Path]) -> list[Snapshot]:
    """Opens a full snapshot and the changes after it: verifies each, and that it continues the one before."""
    chain: list[Snapshot] = []
    for path in paths:
        saved = Snapshot.open(path, "changes" if chain else "full", slot.engine.num_threads)
        saved.require_same_table(slot)
        if chain:
            before, now = chain[-1].manifest, saved.manifest
            if (now.since, now.since_id) != (before.version, before.id):
                raise SnapshotError(
                    f"{path} continues version {now.since} of the snapshot {now.since_id}; {chain[-1].path} is version "
                    f"{before.version} of {before.id}"
                )
        chain.append(saved)
    return chain


def open_levels(slot: Slot, paths: Sequence[Path]) -> list[list[Snapshot]]:
    """Opens a chain of a table that was saved in parts: first the full snapshots of all parts, then their changes."""
    parts = [parts_of(path) for path in paths]
    if len({len(each) for each in parts}) != 1:
        raise SnapshotError(
            f"{paths[0]} and the changes after it have {', '.join(str(len(each)) for each in parts)} parts; expected "
            "a chain saved by one number of servers"
        )
    chains = [open_chain(slot, chain) for chain in zip(*parts, strict=True)]
    levels = [list(level) for level in zip(*chains, strict=True)]
    for path, level in zip(paths, levels, strict=True):
        require_each_bucket_once(path, [saved.manifest for saved in level])
    return levels


def fill_levels(slot: Slot, levels: Sequence[Sequence[Snapshot]], owned: NDArray[np.bool_] | None) -> None:
    """Puts the levels into a new table: for each bucket what its owner saved. Every level holds all sightings."""
    none = np.empty(0, np.uint32)
    with slot.progress.restore.running(sum(saved.manifest.rows for level in levels for saved in level)):
        for level in levels:
            slot.engine.import_sightings(slot.index, np.empty(0, np.uint64), none, none, clear=True)
            for saved in level:
                saved.fill(slot, owned)


def _changed_since(slot: Slot, version: int) -> bool:
    """Returns whether a row was changed or removed at this version; reads every row's mark if none was."""
    engine, index = slot.engine, slot.index
    return any(
        engine.export_rows(index, b, b + 1, version)["id"].size > 0  # first, because it removes what has expired
        or np.asarray(engine.export_removed(index, b, b + 1, version)).size > 0
        for b in range(engine.num_buckets(index))
    )
