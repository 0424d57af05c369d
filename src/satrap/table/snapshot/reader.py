"""Loading a table, bit for bit: a snapshot on disk, verified whole, then put into a table from the mapped files.

`saving` wrote it, `datafiles` says what is in its files, `manifest` what it is; docs/format.md specifies all of it.
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

_MOST_READS = 100  # of a folder that others save into


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

    def find(self, where: str, since: object) -> Since:
        """The snapshot of version `since`, or an error that names those there are."""
        if isinstance(since, int) and not isinstance(since, bool) and (since in self._ids or 2 <= since <= self._first):
            return Since(since, self.id_of(since))
        known = ", ".join(map(str, sorted(self._ids))) or "none yet"
        raise SnapshotError(
            f"{where}: since is {since!r}; wanted the version of a snapshot that this store has saved, loaded or "
            f"applied ({known}), or save the whole table"
        )


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
        self._arrow = pyarrow_or_error()
        self._state_dim = native_config(table).state_dim
        self._files = in_threads(num_threads, self._verify, manifest.files)

    @classmethod
    def open(cls, path: Path, kind: Kind, num_threads: int | None) -> Self:
        """Reads the manifest and verifies every byte that it names. If a save replaces the snapshot meanwhile, its
        files go: then the new one is read."""
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
                else f"{path} holds a full snapshot, no changes; Store.load makes a table of it"
            )
        try:
            table = Table.from_dict(manifest.config)
        except ConfigError as error:
            raise SnapshotError(f"{path}: the manifest's config is not one of this Satrap: {error}") from error
        try:
            as_lr(f"{path}: the manifest's lr", manifest.lr, table.optimizer)
        except InputError as error:
            raise SnapshotError(str(error)) from None
        if table.resolved_num_buckets != manifest.num_buckets:
            raise SnapshotError(
                f"{path}: num_buckets is {manifest.num_buckets}, but the config makes {table.resolved_num_buckets}"
            )
        return cls(path, manifest, table, thread_count(num_threads))

    def require_same_table(self, slot: Slot) -> None:
        """Raises unless it is of a table configured alike."""
        differ = self.manifest.differences(slot.table.to_dict(), slot.seed)
        if differ:
            raise SnapshotError(f"table {slot.table.name!r}: {self.path} is of another table: {'; '.join(differ)}")

    def require_next(self, slot: Slot, history: History) -> None:
        """Raises unless these changes start where the table is."""
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
        """What to do with changes that do not start where the table is."""
        if history.id_of(self.manifest.version) == self.manifest.id:
            return ": these changes are applied already"
        if version == 1:
            return ": this table is of no snapshot yet; load the full one first, with Store.load"
        if version >= self.manifest.version:
            return f": they are older than the table; apply the changes since version {version}"
        return f"; apply the changes since version {version} first, or load a full snapshot"

    def fill(self, slot: Slot, owned: NDArray[np.bool_] | None = None) -> None:
        """Puts everything into the table: an empty one, or the one that the changes start at, with no sightings.

        owned: of each bucket whether it is wanted; None: all are.
        """
        manifest, engine, index = self.manifest, slot.engine, slot.index
        rows_before = engine.num_rows(index)
        try:
            for kind in ("removed", "rows", "sightings"):  # what went comes first: no bucket may overflow on the way
                files = [each for each in self._files if each.file.kind == kind]
                in_threads(slot.engine.num_threads, lambda each: self._import(slot, each, owned), files)
        except (SatrapError, MemoryError) as error:
            if manifest.kind == "full":
                raise
            raise SnapshotError(
                f"table {self.table.name!r}: the changes in {self.path} could be applied in part only ({error}); "
                "the table is of no version now: load a full snapshot"
            ) from error
        found = engine.num_rows(index) - rows_before
        if manifest.kind == "full" and owned is None and found != manifest.rows:
            raise SnapshotError(f"{self.path} holds {manifest.rows} rows of {found} ids; wanted one each")
        engine.restore(index, manifest.version, manifest.latest_step, manifest.expire_before, manifest.lr)

    def _import(self, slot: Slot, mapped: _Mapped, owned: NDArray[np.bool_] | None) -> None:
        engine, index = slot.engine, slot.index
        for columns in batches(mapped.reader):
            if owned is not None:
                wanted = owned[np.asarray(bucket_of(columns["id"], self.manifest.num_buckets))]
                columns = {name: column[wanted] for name, column in columns.items()}
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
        mapping = mapped_file(path, file)
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
        wanted = schema_of(self._arrow, file.kind, self.manifest.kind, self.manifest.id, self.table, self._state_dim)
        if not reader.schema.equals(wanted, check_metadata=True):
            raise SnapshotError(f"{path} has the schema\n{reader.schema}\nwanted\n{wanted}")
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
                    raise SnapshotError(f"{path} holds ids of the buckets {low} to {high}; wanted {wanted_buckets}")
                if not holds[buckets].all():
                    raise SnapshotError(
                        f"{path} holds ids of bucket {buckets[~holds[buckets]][0]}, which its manifest does not name"
                    )
        if rows != file.rows:
            raise SnapshotError(f"{path} holds {rows} lines; wanted {file.rows}")
        # Of a full snapshot `fill` counts the rows, at less cost: its table is new. Files share no bucket, so no id.
        if (self.manifest.kind, file.kind) != ("full", "rows") and len(np.unique(np.concatenate(ids))) < rows:
            raise SnapshotError(f"{path} holds an id twice in its {rows} lines; wanted each once at most")

    def _verify_steps(self, path: Path, batch: Any) -> None:
        if "step" in batch.schema.names and int(batch.column("step").to_numpy().max()) > self.manifest.latest_step:
            raise SnapshotError(f"{path} has a step after the snapshot's latest_step, {self.manifest.latest_step}")


def open_chain(slot: Slot, paths: Sequence[Path]) -> list[Snapshot]:
    """A full snapshot and the changes after it, in order: verified, and each the one that continues the one before."""
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
    """Such a chain of a table that was saved in parts: first the full snapshots of all parts, then their changes."""
    parts = [parts_of(path) for path in paths]
    if len({len(each) for each in parts}) != 1:
        raise SnapshotError(
            f"{paths[0]} and what changed after it are of {', '.join(str(len(each)) for each in parts)} parts; wanted "
            "a chain of one number of servers"
        )
    chains = [open_chain(slot, chain) for chain in zip(*parts, strict=True)]
    levels = [list(level) for level in zip(*chains, strict=True)]
    for path, level in zip(paths, levels, strict=True):
        require_each_bucket_once(path, [saved.manifest for saved in level])
    return levels


def fill_levels(slot: Slot, levels: Sequence[Sequence[Snapshot]], owned: NDArray[np.bool_] | None) -> None:
    """Puts them into a new table: of each bucket what its owner saved. Sightings are saved whole at every level."""
    none = np.empty(0, np.uint32)
    for level in levels:
        slot.engine.import_sightings(slot.index, np.empty(0, np.uint64), none, none, clear=True)
        for saved in level:
            saved.fill(slot, owned)


def _changed_since(slot: Slot, version: int) -> bool:
    """Whether a row changed or went at this version. Costs a look at every row's mark if not."""
    engine, index = slot.engine, slot.index
    return any(
        engine.export_rows(index, b, b + 1, version)["id"].size > 0  # first: it removes what has expired
        or np.asarray(engine.export_removed(index, b, b + 1, version)).size > 0
        for b in range(engine.num_buckets(index))
    )
