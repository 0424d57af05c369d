"""Writes checkpoints. A draft is what a checkpoint will hold: the state of a step, which training no longer changes.
The writer makes a folder of it, in any thread (`in_background` starts one), and decides whether tables are written in
full or as changes to the checkpoint before.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from satrap.checkpoint.run_directory import STATE, TABLES, CheckpointManifest, RunDirectory, table_key
from satrap.checkpoint.state_dict_file import FrozenState
from satrap.data.inputs import Position
from satrap.errors import ChangesError, SnapshotError
from satrap.storage.folder import Folder
from satrap.table.snapshot.cut import TablesCut, TablesToCut
from satrap.table.snapshot.saved_table import SavedTable
from satrap.table.snapshot.writer import row_bytes
from satrap.transfer import Transfer, in_context

_LOG = logging.getLogger("satrap.checkpoint")


@dataclass(slots=True, kw_only=True)
class Draft:
    """What a checkpoint will hold."""

    step: int
    positions: tuple[Position | None, ...]
    state: FrozenState
    source: Mapping[str, Any] | None
    is_best: bool
    may_repeat: bool
    """Whether no trainer trains until the checkpoint is complete, so that another cut would hold the same rows."""
    tables: TablesToCut
    parent: tuple[str, dict[str, int]] | None
    """The checkpoint that it may continue, and its tables' versions."""
    cut: TablesCut


def in_background(work: Callable[[], None]) -> Future[None]:
    """Run a save in a thread, which keeps the process alive until it has ended, for the transfer of this thread."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="satrap-save")
    save = executor.submit(in_context(work))
    executor.shutdown(wait=False)  # the thread ends with the save
    return save


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time."""

    def __init__(self, directory: RunDirectory, *, keep: int, full_every: int, save_memory: int) -> None:
        """The options are those of `Checkpoint`."""
        self._directory = directory
        self._keep, self._full_every, self._save_memory = keep, full_every, save_memory
        self._last: tuple[str, dict[str, int]] | None = None  # the newest checkpoint and its tables' versions
        self._map_version = 0  # the version of the tables' bucket map at that time
        self._since_full = 0

    def follow(self, name: str, versions: dict[str, int], map_version: int, num_links: int | None) -> None:
        """Continue the chain of a checkpoint that was restored, so that the next save may write changes to it.

        num_links: the number of checkpoints in its chain; None: the next save must be full.
        """
        self._last, self._map_version = (name, versions), map_version
        self._since_full = self._full_every if num_links is None else num_links

    def draft(self, tables: TablesToCut, **parts: Any) -> Draft:
        """Take the cut of the tables, while no trainer trains. parts: the other fields of the draft."""
        parent = None
        if self._last is not None and self._since_full < self._full_every and tables.map_version == self._map_version:
            parent = self._last
        cut = tables.take_cut(None if parent is None else parent[1], memory=self._save_memory)
        return Draft(tables=tables, parent=parent, cut=cut, **parts)

    def write(self, draft: Draft) -> None:
        """Write and publish the checkpoint, then remove those that are no longer kept."""
        total = None
        if draft.parent is None and draft.may_repeat:  # else changes, of an unknown size, or rows that training counts
            total = sum(len(table) * row_bytes(table.table) for table in (draft.tables[name] for name in draft.tables))
        what = f"save of step {draft.step:,} into {self._directory.folder}"
        try:
            with Transfer(_LOG, "save", what, total=total or None, step=draft.step):
                self._write_folder(draft)
        finally:
            draft.cut.release()

    def _write_folder(self, draft: Draft) -> None:
        if self._last is not None and self._directory.checksum_of(self._last[0]) is None:
            text = "%s is gone from %s: it was removed, or its disk is lost; step %s is saved in whole tables"
            _LOG.warning(text, self._last[0], self._directory.folder, f"{draft.step:,}")
        with self._directory.new(draft.step, None if self._last is None else self._last[0]) as folder:
            parent, rows = self._write_tables(draft, folder)
            state_crc32c = draft.state.save(folder, STATE)
            names = tuple(draft.tables)
            entry = CheckpointManifest(
                folder=folder,
                name=self._directory.name_of(folder),
                step=draft.step,
                parent=None if parent is None else parent[0],
                parent_crc32c=None if parent is None else parent[1],
                positions=draft.positions,
                source=draft.source,
                tables=names,
                saved=tuple(
                    _saved_table(name, folder / table_key(i), rows[name], is_full=parent is None)
                    for i, name in enumerate(names)
                ),
                state_crc32c=state_crc32c,
                is_best=draft.is_best,
            )
            name = self._directory.publish(folder, entry.to_json())
            self._last, self._map_version = (name, draft.cut.versions), draft.cut.map_version
            self._since_full = 1 if parent is None else self._since_full + 1
            self._directory.remove_beyond(self._keep)

    def _write_tables(self, draft: Draft, folder: Folder) -> tuple[tuple[str, int] | None, dict[str, int]]:
        """Write the tables; return the parent that they are changes to, with its checksum, and the rows of each."""
        parent = None
        if draft.parent is not None and draft.cut.changes_known and draft.cut.map_version == self._map_version:
            crc32c = self._directory.checksum_of(draft.parent[0])
            parent = None if crc32c is None else (draft.parent[0], crc32c)  # None: it was removed
        folders = {name: folder / table_key(i) for i, name in enumerate(draft.tables)}
        while True:
            try:
                return parent, draft.cut.write(folders, is_full=parent is None, is_beside=not draft.may_repeat)
            except ChangesError:  # a server was restarted, or rows have migrated
                if not draft.may_repeat:
                    raise
                (folder / TABLES).delete_all()
                parent, draft.cut = None, draft.tables.take_cut(memory=self._save_memory)


def _saved_table(name: str, folder: Folder, rows: int, *, is_full: bool) -> SavedTable:
    """Return the record of a table that was saved in `folder`; raise SnapshotError if a full save lacks rows."""
    saved = SavedTable.from_folder(folder, rows)
    num_saved = sum(part.rows for part in saved.parts)
    if is_full and num_saved != rows:
        raise SnapshotError(f"table {name!r} has {rows} rows, and {folder} holds {num_saved}: nothing was saved")
    return saved
