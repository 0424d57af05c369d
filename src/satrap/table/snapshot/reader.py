"""Loads a table bit for bit: verifies a snapshot on disk, then fills a table from the mapped files.

A process that owns some buckets verifies and reads the parts of the files that hold them (`verified_file`), and nothing
else. `writer` wrote the snapshot, `manifest` describes it; docs/format.md specifies all of it.
"""

import logging
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from satrap.config.array_args import as_lr
from satrap.config.cores import in_threads, thread_count
from satrap.config.tables import Table
from satrap.errors import ConfigError, InputError, SatrapError, SnapshotError
from satrap.storage.folder import Folder
from satrap.table.engine import Slot, state_dim
from satrap.table.snapshot.arrow_files import pyarrow_or_error, schema_of
from satrap.table.snapshot.directory import read_manifest
from satrap.table.snapshot.held_bytes import HeldBytes
from satrap.table.snapshot.manifest import DataFile, FileKind, Kind, Manifest, Since
from satrap.table.snapshot.saved_table import FoundPart, find_parts, require_each_bucket_once, require_same_snapshots
from satrap.table.snapshot.verified_file import OwnedBuckets, VerifiedFile
from satrap.transfer import Transfer

_LOG = logging.getLogger("satrap.table")

_MOST_READS = 100  # other processes may save into the folder meanwhile


class History:
    """The snapshots that a store has saved, loaded or applied: the versions that changes can start at."""

    def __init__(self, version: int) -> None:
        """version: the table's when the store was created. An earlier process's saves to shared memory are unknown."""
        self._first = version
        self._ids: dict[int, str] = {}

    def add(self, manifest: Manifest) -> int:
        """Record a complete snapshot; return its version."""
        self._ids[manifest.version] = manifest.id
        return manifest.version

    def id_of(self, version: int) -> str | None:
        """Return the id of the snapshot of that version, if known."""
        return self._ids.get(version)

    def find(self, where: str, since: object) -> Since:
        """Return the snapshot of version `since`; raise an error that lists the known versions if there is none."""
        if isinstance(since, int) and not isinstance(since, bool) and (since in self._ids or 2 <= since <= self._first):
            return Since(since, self.id_of(since))
        known = ", ".join(map(str, sorted(self._ids))) or "none yet"
        raise SnapshotError(
            f"{where}: since is {since!r}; expected the version of a snapshot that this store has saved, loaded or "
            f"applied ({known}), or save the whole table"
        )


class Snapshot:
    """A verified snapshot on disk, or the part of it that some buckets need; `fill` puts it into a table."""

    def __init__(
        self,
        path: Folder,
        manifest: Manifest,
        table: Table,
        num_threads: int,
        owned: NDArray[np.bool_] | None,
        held: HeldBytes,
        opened: Table,
    ) -> None:
        """table: as it was saved. owned: for each bucket of `opened`, the table to fill, whether it is needed; None:
        all."""
        self.path = path
        self.manifest = manifest
        self.table = table
        self._opened = opened
        self._owned = OwnedBuckets(owned, manifest.num_buckets, opened.is_direct, manifest.is_direct)
        self._held = held
        needed = [file for file in manifest.files if VerifiedFile.is_needed(file, manifest, self._owned)]
        self._files = in_threads(num_threads, self._verify, needed, "satrap-verify")

    @classmethod
    def open(
        cls,
        path: Folder,
        kind: Kind,
        num_threads: int | None,
        owned: NDArray[np.bool_] | None = None,
        manifest: Manifest | None = None,
        held: HeldBytes | None = None,
        opened: Table | None = None,
    ) -> Self:
        """Verify every byte of the files that the buckets need. If a save replaces the snapshot meanwhile and removes
        its files, read the new one.

        manifest: the folder's manifest, if the caller has read it already.
        held: limits the bytes that stay in memory; None: as for a table without rows.
        opened: the table to fill; None: one that is configured as it was saved."""
        is_fixed = manifest is not None and not path.is_local  # under a URL it has a name that is never used again
        held = HeldBytes(is_new=True) if held is None else held
        for _ in range(_MOST_READS):
            manifest = read_manifest(path) if manifest is None else manifest
            try:
                return cls._verified(path, manifest, kind, num_threads, owned, held, opened)
            except SnapshotError:
                if is_fixed or read_manifest(path).id == manifest.id:
                    raise
            manifest = None
        raise SnapshotError(f"{path} was replaced {_MOST_READS} times while it was read: pause the saves into it")

    @property
    def bytes_read(self) -> int:
        """The bytes of its data files that were verified: those that `fill` reads."""
        return sum(file.bytes_read for file in self._files)

    @classmethod
    def _verified(
        cls,
        path: Folder,
        manifest: Manifest,
        kind: Kind,
        num_threads: int | None,
        owned: NDArray[np.bool_] | None,
        held: HeldBytes,
        opened: Table | None,
    ) -> Self:
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
        return cls(path, manifest, table, thread_count(num_threads), owned, held, opened or table)

    def require_same_table(self, slot: Slot) -> None:
        """Raise unless the snapshot is of a table configured alike."""
        differ = self.manifest.differences(slot.table.to_dict(), slot.seed)
        if differ:
            has_other_rate = any(difference.startswith("optimizer.lr is") for difference in differ)
            advice = "; to continue with another rate, set it in optimizer.param_groups after resume()"
            raise SnapshotError(
                f"table {slot.table.name!r}: {self.path} is of another table: {'; '.join(differ)}; declare the table "
                f"as it was saved, or train from the beginning into another folder{advice if has_other_rate else ''}"
            )

    def require_next(self, slot: Slot, history: History) -> None:
        """Raise unless these changes start at the table's version."""
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
        """Return the advice for changes that do not start at the table's version."""
        if history.id_of(self.manifest.version) == self.manifest.id:
            return ": these changes are already applied"
        if version == 1:
            return ": this table is of no snapshot yet; load the full one first, with Store.load"
        if version >= self.manifest.version:
            return f": they are older than the table; apply the changes since version {version}"
        return f"; apply the changes since version {version} first, or load a full snapshot"

    def fill(self, slot: Slot) -> None:
        """Put the rows of its buckets into the table: an empty one, or the one that the changes start at, without
        sightings."""
        manifest, engine, index = self.manifest, slot.engine, slot.index
        kinds: tuple[FileKind, ...] = ("removed", "rows", "sightings")  # removals first: no bucket may overflow
        try:
            for kind in kinds:
                files = [file for file in self._files if file.file.kind == kind]
                in_threads(slot.engine.num_threads, lambda file: self._import(slot, file), files, "satrap-load")
        except (SatrapError, MemoryError) as error:
            if manifest.kind == "full":
                raise
            raise SnapshotError(
                f"table {self.table.name!r}: the changes in {self.path} could be applied in part only ({error}); "
                "the table is at no version now: load a full snapshot"
            ) from error
        engine.restore(index, manifest.version, manifest.latest_step, manifest.expire_before, manifest.lr)

    def _import(self, slot: Slot, verified: VerifiedFile) -> None:
        engine, index = slot.engine, slot.index
        for columns in verified.batches():
            match verified.file.kind:
                case "rows":
                    state = columns.get("state", np.empty((len(columns["id"]), 0), np.float32))
                    slot.rows.import_rows(index, columns["id"], columns["step"], columns["values"], state)
                case "sightings":
                    engine.import_sightings(index, columns["id"], columns["step"], columns["count"], clear=False)
                case "removed":
                    engine.import_removed(index, columns["id"])

    def _verify(self, file: DataFile) -> VerifiedFile:
        manifest, arrow = self.manifest, pyarrow_or_error()
        schema = schema_of(arrow, file.kind, manifest.kind, manifest.id, self.table, state_dim(self.table))
        return VerifiedFile(self.path, file, manifest, schema, self._owned, self._held, self._opened)


def open_levels(
    slot: Slot,
    paths: Sequence[Folder],
    held: HeldBytes,
    owned: NDArray[np.bool_] | None = None,
    checksums: Sequence[int] | None = None,
) -> list[list[Snapshot]]:
    """Open a full snapshot and the changes after it, of a table that was saved in one part or in many; verify each
    part, and that it continues the one before. Returns first the full snapshots of all parts, then their changes.

    owned: for each bucket whether it is needed; None: all.
    checksums: `checksum_of` each path, where the caller sees it; None: any snapshots will do.
    """
    parts_of = [find_parts(path) for path in paths]
    if checksums is not None:
        for path, parts, expected in zip(paths, parts_of, checksums, strict=True):
            require_same_snapshots(path, parts, expected)
    if len({len(parts) for parts in parts_of}) != 1:
        raise SnapshotError(
            f"{paths[0]} and the changes after it have {', '.join(str(len(parts)) for parts in parts_of)} parts; "
            "expected a chain saved by one number of servers"
        )
    chains = [_open_chain(slot, chain, owned, held) for chain in zip(*parts_of, strict=True)]
    levels = [list(level) for level in zip(*chains, strict=True)]
    for path, parts, level in zip(paths, parts_of, levels, strict=True):
        if checksums is not None and any(a.manifest.id != b.manifest.id for a, b in zip(parts, level, strict=True)):
            raise SnapshotError(f"{path} was replaced while it was read: pause the saves into it")
        require_each_bucket_once(path, [saved.manifest for saved in level])
    return levels


def _open_chain(
    slot: Slot, parts: Sequence[FoundPart], owned: NDArray[np.bool_] | None, held: HeldBytes
) -> list[Snapshot]:
    chain: list[Snapshot] = []
    for part in parts:
        kind: Kind = "changes" if chain else "full"
        saved = Snapshot.open(part.path, kind, slot.engine.num_threads, owned, part.manifest, held, slot.table)
        saved.require_same_table(slot)
        if chain:
            before, now = chain[-1].manifest, saved.manifest
            if (now.since, now.since_id) != (before.version, before.id):
                raise SnapshotError(
                    f"{part.path} continues version {now.since} of the snapshot {now.since_id}; {chain[-1].path} is "
                    f"version {before.version} of {before.id}"
                )
        chain.append(saved)
    return chain


def fill_from(slot: Slot, saved: Snapshot) -> None:
    """Put one snapshot into a table that `Snapshot.fill` permits, and log that."""
    what = f"restore of table {slot.table.name!r} from {saved.path}"
    with Transfer(_LOG, "restore", what, total=saved.bytes_read, among=slot.transfers, table=slot.table.name):
        fill_levels(slot, [[saved]])


def fill_levels(slot: Slot, levels: Sequence[Sequence[Snapshot]]) -> None:
    """Put the levels into a new table: for each bucket what its owner saved. Every level holds all sightings."""
    none = np.empty(0, np.uint32)
    for level in levels:
        slot.engine.import_sightings(slot.index, np.empty(0, np.uint64), none, none, clear=True)
        for saved in level:
            saved.fill(slot)


def _changed_since(slot: Slot, version: int) -> bool:
    """Return whether a row was changed or removed at this version; read every row's mark if none was."""
    engine, index = slot.engine, slot.index
    return any(
        slot.rows.export_rows(index, b, b + 1, version)["id"].size > 0  # first, because it removes what has expired
        or np.asarray(engine.export_removed(index, b, b + 1, version)).size > 0
        for b in range(engine.num_buckets(index))
    )
