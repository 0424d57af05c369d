"""Checkpoints of a training run: tables, dense parameters, optimizer, random state, step and position, as one version.

    run/
      000004-step-3000/           one checkpoint; the number counts up, the highest is the newest
        tables/<n>/               a snapshot of each table (docs/format.md), full or a delta
        state.safetensors         dense parameters, optimizer, extra state, random state of each trainer
        checkpoint.json           the manifest, written last; names the parent if the tables are deltas

A checkpoint is a cut between two steps. 1. The stream is paused: submitted updates are applied, no lookup runs. 2. All
files are written into a hidden folder and flushed to disk. 3. One rename publishes the folder. 4. The stream continues,
and checkpoints beyond `keep` are removed, except the parents of those kept. A process killed at any moment leaves the
published checkpoints, and hidden folders that the next save removes.

A path with a protocol ("s3://...") is any fsspec file system: the same folder is first written locally and then copied,
checkpoint.json last, without which the checkpoint does not count.
"""

import copy
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from satrap.checkpoint.run_directory import (
    MANIFEST,
    STATE,
    TABLES,
    CheckpointManifest,
    RunDirectory,
    require_rows,
    table_folders,
    table_key,
)
from satrap.checkpoint.state_dict_file import read_state, require_model, save_state, state_bytes, state_of
from satrap.config.durable import checksum, put_on_disk, write_file
from satrap.config.validation import kind_of
from satrap.data.inputs import Position
from satrap.errors import ChangesError, CheckpointError, SatrapError, SnapshotError
from satrap.event_log import event
from satrap.monitor.samples import Sample, register
from satrap.run_context import current_context
from satrap.table.snapshot.saved_table import SavedTable
from satrap.table.snapshot.writer import row_bytes
from satrap.train.embeddings import Embeddings, session_of
from satrap.train.optimizer import HybridOptimizer
from satrap.train.process_group import unwrap
from satrap.transfer import Transfer

_LOG = logging.getLogger("satrap.checkpoint")
_ENDED = 0  # in place of every_steps: the trainer is at the end of its script


class Checkpoint:
    """Saves and resumes the whole state of a training run as one version: tables, dense parameters, optimizer, random
    state, step and position in the data."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        embeddings: Embeddings,
        data: Any = None,
        *,
        keep: int = 3,
        full_every: int = 1,
        extra_state: Mapping[str, Any] | None = None,
    ) -> None:
        """keep: number of checkpoints to keep, not counting parents that they need.

        data: the source that the training stream reads; its position is saved and restored.
        full_every: save the tables in full every so many saves, and in between as deltas to the last save, unless a
            table no longer tracks all changes since.
        extra_state: other objects with state_dict and load_state_dict, by name: schedulers, a GradScaler.
        """
        if not isinstance(optimizer, HybridOptimizer):
            raise CheckpointError(
                f"optimizer is {kind_of(optimizer)}; expected the one that embeddings.optimizer(...) returned"
            )
        if not isinstance(embeddings, Embeddings):
            raise CheckpointError(
                f"embeddings is {kind_of(embeddings)}; expected the satrap.Embeddings: "
                "Checkpoint(path, model, optimizer, embeddings, data)"
            )
        taken = {"model", "optimizer"} & set(extra_state or {})
        if taken:
            raise CheckpointError(f"extra_state has the reserved names {sorted(taken)}: use other names")
        for name, value in (("keep", keep), ("full_every", full_every)):
            _require_count(name, value)
        path, context = os.fspath(path), current_context()
        if context is not None and context.is_copy and "://" not in path and not os.path.isabs(path):
            raise CheckpointError(
                f"path is {path!r}, but this script runs in a temporary copy of its folder, which is removed with the "
                "run: use an absolute path that all machines share"
            )
        self._directory = RunDirectory(path)
        self._objects = {"model": unwrap(model), "optimizer": optimizer, **(extra_state or {})}
        self._session, self._data = session_of(embeddings), data
        self._keep, self._full_every = keep, full_every
        self._session.track_position(data)
        self._last: tuple[str, dict[str, int]] | None = None  # the newest checkpoint and its tables' versions
        self._layout = 0  # the tables' layout at that time
        self._since_full = 0
        self._saved_step = -1
        self._figures = _SaveFigures()
        self._source: Mapping[str, Any] | None = None
        register(self._figures)
        if not self._session.dense.is_joint:
            self._session.run_before_close(self._join_saves_until_end)

    @property
    def best(self) -> str | None:
        """Name of the checkpoint that was last saved as the best, or None if there is none."""
        return self._directory.best_name()

    def save(self, *, every_steps: int | None = None, best: bool = False) -> bool:
        """Write a checkpoint; return whether one was written. every_steps: write only if the step is a multiple, once.
        best: it is the best of the run so far, and kept beyond `keep` until another one is saved as the best.

        Several trainers all call this at the same step, and trainer 0 writes. With dense="async" trainers may call it
        at different steps; a trainer that calls it without every_steps joins the other trainers' saves until all
        trainers do so.
        """
        if every_steps is not None:
            _require_count("every_steps", every_steps)
        step = self._session.step
        if every_steps is not None and (step == 0 or step % every_steps != 0 or step == self._saved_step):
            if self._saved_step < 0 and self._session.trainers.rank == 0:
                self._directory.require_mine(None)  # fails early, before there is work that cannot be saved
                self._session.worker.tables.require_permitted(self._directory.local)
            self._saved_step = max(0, self._saved_step)
            return False
        started_at = time.monotonic()
        while not self._save_together(every_steps, best):
            pass
        self._saved_step = step
        figures = self._figures
        figures.number, figures.step, figures.at = figures.number + 1, step, time.time()
        figures.seconds = time.monotonic() - started_at
        return True

    def _join_saves_until_end(self) -> None:
        """Join the other trainers' saves until all trainers are at the end of their scripts."""
        while not self._save_together(_ENDED):
            pass

    def _save_together(self, every_steps: int | None, best: bool = False) -> bool:
        """Make one save of all trainers; return whether it completes this trainer's request."""
        trainers, is_joint = self._session.trainers, self._session.dense.is_joint
        with self._session.pause():
            position = self._session.position_of(self._data)
            request = [self._directory.name, self._session.step, every_steps, position and position.to_dict(), best]
            # Once this returns, all trainers are paused.
            gathered = trainers.gather(json.dumps(request).encode(), patient=True)
            directories, steps, intervals, positions, bests = zip(*map(json.loads, gathered), strict=True)
            if set(intervals) == {_ENDED}:
                return True
            requests = set(intervals) if is_joint else set(intervals) - {None, _ENDED}
            if len(set(directories)) > 1 or len(requests) > 1 or (is_joint and len(set(steps)) > 1):
                raise CheckpointError(
                    f"the trainers save into {list(directories)} at steps {list(steps)} with every_steps "
                    f"{list(intervals)}; expected the same values on all trainers"
                )
            self._session.dense.refresh()
            randoms = trainers.gather(state_bytes(_random_state()))
            try:
                trainers.run_first(lambda: self._write(max(steps), positions, randoms, any(bests)), CheckpointError)
            except Exception as error:
                if every_steps != _ENDED:
                    raise
                # The trainer that requested the save raises, and may continue.
                _LOG.error("no checkpoint was saved: %s", error)
        return every_steps in requests or (every_steps is None and not requests)

    def _write(self, step: int, positions: Sequence[Any], randoms: list[bytes], is_best: bool) -> None:
        total = None
        if self._last is None or self._since_full >= self._full_every:  # else deltas, of an unknown size
            total = sum(len(table) * row_bytes(table.table) for table in self._session.worker.tables.values())
        what = f"save of step {step} into {self._directory.name}"
        with Transfer(_LOG, "save", what, total=total or None, step=step):
            self._write_folder(step, positions, randoms, is_best)

    def _write_folder(self, step: int, positions: Sequence[Any], randoms: list[bytes], is_best: bool) -> None:
        with self._directory.new(step, None if self._last is None else self._last[0]) as folder:
            parent = self._last if self._last is not None and self._since_full < self._full_every else None
            tables, layout = self._session.worker.tables, self._session.worker.tables.map_version
            parent_crc32c = None if parent is None else self._directory.checksum_of(parent[0])
            if layout != self._layout or parent_crc32c is None:
                parent = None  # rows have migrated, or the parent was removed
            try:
                versions = self._save_tables(folder, parent)
            except SnapshotError as error:
                unknown = isinstance(error, ChangesError) or tables.map_version != layout
                if parent is None or not unknown:
                    raise
                # A server restarted, rows have migrated, or more rows were removed than the tables remember.
                shutil.rmtree(folder / TABLES, ignore_errors=True)
                parent, layout = None, tables.map_version
                versions = self._save_tables(folder, None)
            save_state(folder / STATE, self._state([state_of(each) for each in randoms]))
            entry = CheckpointManifest(
                folder=folder,
                where=str(folder),
                name=self._directory.name_of(folder),
                step=step,
                parent=None if parent is None else parent[0],
                parent_crc32c=None if parent is None else parent_crc32c,
                positions=tuple(None if each is None else Position.from_dict(each) for each in positions),
                source=self._signature(),
                tables=tuple(self._session.worker.tables),
                saved=self._saved_tables(folder, is_full=parent is None),
                state_crc32c=checksum((folder / STATE).read_bytes()),
                is_best=is_best,
            )
            write_file(folder / MANIFEST, entry.to_json())
            put_on_disk(folder / STATE)
            name = self._directory.publish(folder)
            self._last, self._layout = (name, versions), layout
            self._since_full = 1 if parent is None else self._since_full + 1
            self._directory.remove_beyond(self._keep)

    def resume(self, name: str | None = None) -> bool:
        """Restore everything from a checkpoint; return False if there is none yet. In the middle of a run, its streams
        end, and the run continues as a new process that resumes would. Several trainers all call this.

        name: such as `best`; None: the newest. Later saves follow the newest one's number.

        A checkpoint that is torn, or has another model, other tables, another seed or a source read in another order,
        is refused with the differences, and everything is left unchanged.
        """
        trainers = self._session.trainers
        with self._directory.chain_of(name) as chain:
            if not trainers.all(bool(chain)):
                if not trainers.all(not chain):
                    found = chain[-1].where if chain else "no checkpoint"
                    raise CheckpointError(
                        f"some trainers find a checkpoint and others none; this one finds {found}: use a folder that "
                        "all machines share"
                    )
                return False
            newest, error = chain[-1], None
            try:
                state = self._checked_state(newest)
            except SatrapError as caught:
                error = caught
            same = len(set(trainers.gather(newest.folder.name.encode()))) == 1
            if not trainers.all(error is None) or not same:
                raise error or CheckpointError("another trainer cannot resume; its own error says why")
            self._session.end_streams()
            with self._restored(newest.where, state):
                trainers.run_first(lambda: self._restore_tables(chain), CheckpointError)
            self._session.join_attempt()
            self._objects["optimizer"].zero_grad()  # a new process has no gradients either
            self._session.resume_at(newest.step, self._data, self._position_for_this_trainer(newest))
            self._saved_step = self._figures.step = newest.step
            self._figures.at = time.time()
        if trainers.rank == 0:
            launch = "" if (context := current_context()) is None else f"launch {context.launch} "
            resumed = event("resumed", checkpoint=newest.where, resumed_step=newest.step)
            _LOG.info("%scontinues after step %d, from %s", launch, newest.step, newest.where, extra=resumed)
        return True

    def _checked_state(self, entry: CheckpointManifest) -> Any:
        """Return the state of a checkpoint; raise CheckpointError if it is of another job."""
        path, names = entry.folder / STATE, list(self._session.worker.tables)
        state = read_state(path, entry.state_crc32c, entry.where)
        if self._objects.keys() != state["objects"].keys():
            raise CheckpointError(f"{path} has {sorted(state['objects'])}; this job has {sorted(self._objects)}")
        require_model(path, state["objects"]["model"], self._objects["model"].state_dict())
        if sorted(entry.tables) != sorted(names):
            raise CheckpointError(f"{entry.where} has tables {sorted(entry.tables)}; this job has {sorted(names)}")
        self._require_same_source(entry)
        self._position_for_this_trainer(entry)
        return state

    def _position_for_this_trainer(self, entry: CheckpointManifest) -> Position | None:
        """Return where this trainer continues in the data. If another number of trainers saved the checkpoint, each
        trainer continues with its shard of the data that those have left."""
        trainers, positions = self._session.trainers, entry.positions
        if len(positions) == trainers.world_size:
            return positions[trainers.rank]
        if not any(positions):
            return None
        known = [each or Position(0, 0, 0) for each in positions]
        older = any(each.is_of_older_release for each in known) and len(known) > 1
        if older or any(each.offset is not None for each in known):
            why = "its release sharded the data differently" if older else "its positions are offsets in the data"
            raise CheckpointError(
                f"{entry.where} was saved by {len(known)} trainers and this job has {trainers.world_size}: {why}: "
                f"resume it with {len(known)} trainers"
            )
        return Position.after(known)

    def _restore_tables(self, chain: list[CheckpointManifest]) -> None:
        newest, tables = chain[-1], self._session.worker.tables
        folders = table_folders(chain)
        self._layout = tables.map_version
        with Transfer(_LOG, "restore", f"restore of step {newest.step} from {newest.where}", step=newest.step):
            changes_may_follow = tables.restore(folders)
        require_rows(chain, {name: len(table) for name, table in tables.items()})
        self._last = newest.folder.name, {name: tables[name].version for name in tables}
        self._since_full = len(chain) if changes_may_follow else self._full_every

    @contextmanager
    def _restored(self, where: str, state: Mapping[str, Any]) -> Iterator[None]:
        """Load every object and the random state from the checkpoint; restore their previous state if one, or the body,
        fails."""
        before = copy.deepcopy(self._state([_random_state()]))
        try:
            for each in state["random"][self._session.trainers.rank :][:1]:  # empty if fewer trainers saved it
                _set_random_state(each)
            for name, each in self._objects.items():
                try:
                    each.load_state_dict(state["objects"][name])
                except (ValueError, RuntimeError, KeyError, TypeError, SatrapError) as error:
                    raise CheckpointError(f"{where}: {name} cannot load its state: {error}") from error
            yield
        except BaseException:
            for name, each in self._objects.items():
                each.load_state_dict(before["objects"][name])
            _set_random_state(before["random"][0])
            raise

    def _signature(self) -> Mapping[str, Any] | None:
        """Return the source's signature; computed once, since it lists the source's files."""
        if self._source is None:
            self._source = self._session.signature_of(self._data)
        return self._source

    def _require_same_source(self, entry: CheckpointManifest) -> None:
        """Raise CheckpointError if the blocks come in another order, which makes a position meaningless."""
        now = self._signature()
        if not any(entry.positions) or entry.source is None or now is None:
            return
        are_several = len(entry.positions) > 1 or self._session.trainers.world_size > 1
        not_compared = {"files"} if are_several else {"files", "batch_size"}  # which decides who gets which samples
        lines = [
            f"{name} is {entry.source.get(name)!r} in the checkpoint and {now.get(name)!r} here"
            for name in sorted((entry.source.keys() | now.keys()) - not_compared)
            if entry.source.get(name) != now.get(name)
        ]
        # New files may follow the old ones, unless the order or the shards depend on all files.
        were, are = entry.source.get("files", ()), now.get("files", ())
        of_all = now.get("shuffle") or are_several
        for i in range(max(len(were), len(are)) if of_all else len(were)):
            was, is_ = (list(files[i]) if i < len(files) else None for files in (were, are))
            if was != is_:
                lines.append(f"file {i} (name, bytes) is {was} in the checkpoint and {is_} here")
                break
        if lines:
            raise CheckpointError(
                f"{entry.where}: its position is of a source that is read differently: {'; '.join(lines)}; "
                "declare the source as before, or leave it out of Checkpoint(...) to start from its beginning"
            )

    def _save_tables(self, folder: Path, parent: tuple[str, dict[str, int]] | None) -> dict[str, int]:
        versions = {}
        tables = self._session.worker.tables
        for i, name in enumerate(tables):
            store, to = tables[name], folder / table_key(i)
            versions[name] = store.save(to) if parent is None else store.save_changes(to, since=parent[1][name])
        return versions

    def _saved_tables(self, folder: Path, *, is_full: bool) -> tuple[SavedTable, ...]:
        """Return what the folder holds of each table; raise SnapshotError if a full save lacks some rows."""
        found = []
        tables = self._session.worker.tables
        for i, name in enumerate(tables):
            path = folder / table_key(i)
            saved = SavedTable.from_folder(path, len(tables[name]))
            rows = sum(part.rows for part in saved.parts)
            if is_full and rows != saved.rows:
                raise SnapshotError(f"table {name!r} has {saved.rows} rows, and {path} holds {rows}: nothing was saved")
            found.append(saved)
        return tuple(found)

    def _state(self, randoms: list[dict[str, Any]]) -> dict[str, Any]:
        """randoms: the random state of each trainer."""
        objects = {name: each.state_dict() for name, each in self._objects.items()}
        del objects["optimizer"]["rows"]  # the checkpoint has the rows, and restores them after the optimizer
        return {"objects": objects, "random": randoms}


@dataclass(slots=True, eq=False, weakref_slot=True)
class _SaveFigures:
    """Figures of a trainer's checkpoints, for metrics."""

    number: int = 0
    """Number of checkpoints saved by this process."""
    step: int = 0
    """Step of the last one that was saved or resumed."""
    at: float = 0.0
    """Unix time at which it was."""
    seconds: float = 0.0
    """Duration of the last save."""

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of a scrape, which another thread makes."""
        yield Sample("satrap_checkpoints", self.number)
        yield Sample("satrap_last_checkpoint_step", self.step)
        yield Sample("satrap_last_checkpoint_seconds", self.seconds)
        yield Sample("satrap_last_checkpoint_timestamp_seconds", self.at)


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{name} is {value!r}; expected an integer, 1 or more")


def _random_state() -> dict[str, Any]:
    kind, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002  the user's global generator
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), at, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        # There may be fewer devices now.
        for device, each in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(each, device)
