"""Checkpoints of a training run: tables, dense parameters, optimizer, random state, step and position, as one version.

    run/
      000004-step-3000/           one checkpoint; the number counts up, the highest is the newest
        tables/<n>/               a snapshot of each table (docs/format.md), full or a delta
        state.safetensors         dense parameters, optimizer, extra state, random state of each trainer
        checkpoint.json           the manifest, written last; names the parent if the tables are deltas

A checkpoint is a cut between two steps. 1. The stream is paused: submitted updates are applied, no lookup runs. 2. The
cut of all tables is taken, and the rest of the state is copied; with `wait=False` the stream continues now, and a
thread does what follows. 3. All files are written into a hidden folder and flushed to disk. 4. One rename publishes the
folder. 5. Checkpoints beyond `keep` are removed, except the parents of those kept. A process killed at any moment
leaves the published checkpoints, and hidden folders that the next save removes.

Under a URL ("s3://...") the folder is not hidden: it does not count until checkpoint.json is there, which is written
last. Every process reads and writes its part of it under that URL itself.
"""

import copy
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from satrap.checkpoint.checkpoint_writer import CheckpointWriter, Draft, in_background
from satrap.checkpoint.run_directory import STATE, CheckpointManifest, RunDirectory, require_rows, table_folders
from satrap.checkpoint.state_dict_file import FrozenState, read_state, require_model
from satrap.checkpoint.trainer_state import divided, gathered_states, random_state, set_random_state
from satrap.config.validation import kind_of, known_arguments
from satrap.data.inputs import Position
from satrap.errors import CheckpointError, SatrapError
from satrap.event_log import event
from satrap.monitor.samples import Sample, register
from satrap.run_context import current_context, is_trial
from satrap.table.snapshot.cut import OLD_ROWS_BYTES
from satrap.table.snapshot.directory import holds_snapshot
from satrap.train.embeddings import Embeddings, session_of
from satrap.train.optimizer import HybridOptimizer
from satrap.train.prefetched_batches import LoaderState, PrefetchedBatches
from satrap.train.process_group import unwrap
from satrap.train.stream import Stream
from satrap.transfer import Transfer

_LOG = logging.getLogger("satrap.checkpoint")
_ABSENT_IF_OFF = frozenset({"share", "before", "since", "offsets"})  # the settings that only then a signature lacks
_ENDED = 0  # in place of every_steps: the trainer is at the end of its script


class Checkpoint:
    """Saves and resumes the whole state of a training run as one version: tables, dense parameters, optimizer, random
    state, step and position in the data."""

    @known_arguments()
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
        save_memory: int = OLD_ROWS_BYTES,
    ) -> None:
        """keep: number of checkpoints to keep, not counting parents that they need.

        data: the source that the training stream reads, or an equal one, or the loader of `Embeddings.prefetch`; its
            position is saved and restored.
        full_every: save the tables in full every so many saves, and in between as deltas to the last save, unless a
            table no longer tracks all changes since.
        extra_state: other objects with state_dict and load_state_dict, by name: schedulers, a GradScaler.
        save_memory: most bytes of memory, here or on each server, that a save with wait=False may take for rows that
            change before they are written; beyond it, training waits for the save.
        """
        _require_parts(optimizer, embeddings, data)
        extra = _checked_objects({} if extra_state is None else extra_state)
        for name, value in (("keep", keep), ("full_every", full_every), ("save_memory", save_memory)):
            _require_count(name, value)
        self._directory, context = RunDirectory(path), current_context()
        folder = self._directory.folder
        if context is not None and context.is_copy and folder.is_local and not os.path.isabs(folder):
            raise CheckpointError(
                f"path is {os.fspath(folder)!r}, but this script runs in a temporary copy of its folder, which is "
                "removed with the run: use an absolute path that all machines share"
            )
        self._objects = {"model": unwrap(model), "optimizer": optimizer, **extra}
        self._session, self._data = session_of(embeddings), data.loader if isinstance(data, PrefetchedBatches) else data
        if not folder.is_local and not is_trial():
            self._require_usable()
        self._writer = CheckpointWriter(self._directory, keep=keep, full_every=full_every, save_memory=save_memory)
        self._session.track_position(self._data)
        self._saved_step = -1
        self._running: Future[None] | None = None  # trainer 0 has it
        self._has_running = False  # whether trainer 0 may have one that not all trainers know to be complete
        self._figures = _SaveFigures()
        self._source: Mapping[str, Any] | None = None
        register(self._figures)
        if not self._session.dense.is_joint:
            self._session.run_before_close(self._join_saves_until_end)
        self._session.wait_before_close(self._wait_for_running)

    def __repr__(self) -> str:
        saved = "nothing saved or resumed yet" if self._saved_step < 0 else f"step {self._saved_step} saved or resumed"
        return f"Checkpoint({os.fspath(self._directory.folder)!r}, {saved})"

    @property
    def best(self) -> str | None:
        """Name of the checkpoint that was last saved as the best, or None if there is none."""
        self._wait_for_running()
        return self._directory.best_name()

    @known_arguments()
    def save(self, *, every_steps: int | None = None, best: bool = False, wait: bool = True) -> bool:
        """Write a checkpoint; return whether one is written.

        every_steps: write only if the step is a multiple, and once for each step.
        best: whether this is the best checkpoint so far. It is kept beyond `keep` until another one is saved as the
            best.
        wait: whether training waits until the checkpoint is complete. False: it waits only until the state of this step
            is fixed; a thread writes it while training continues. The next save waits for it. If it fails, the next
            call of `save`, `resume` or `Embeddings.close` raises the error; with several trainers, their next save
            that is due. With rows on a device, training waits always.

        Several trainers all call this at the same step, and trainer 0 writes. With dense="async" trainers may call it
        at different steps; a trainer that calls it without every_steps joins the other trainers' saves until all
        trainers do so.
        """
        if every_steps is not None:
            _require_count("every_steps", every_steps)
        if not isinstance(wait, bool):
            raise CheckpointError(f"wait is {wait!r}; expected True or False")
        if is_trial():
            return False
        step = self._session.step
        if every_steps is not None and (step == 0 or step % every_steps != 0 or step == self._saved_step):
            if self._saved_step < 0 and self._session.trainers.rank == 0:
                self._directory.require_mine(None)  # fails early, before there is work that cannot be saved
                self._session.worker.tables.require_permitted(self._directory.folder)
            self._saved_step = max(0, self._saved_step)
            if self._session.trainers.world_size == 1 and self._running is not None and self._running.done():
                self._settle()
            return False
        self._session.note_save(self._data)
        if (joint := self._session.joint) is not None:
            joint.save()
        while not self._save_together(every_steps, best, wait):
            pass
        self._saved_step = step
        return True

    def _require_usable(self) -> None:
        """Raise CheckpointError, within seconds, unless this process and the servers can use the URL."""
        self._directory.require_usable()
        if self._session.trainers.rank == 0:
            self._session.worker.tables.require_permitted(self._directory.folder)

    def _join_saves_until_end(self) -> None:
        """Join the other trainers' saves until all trainers are at the end of their scripts."""
        while not self._save_together(_ENDED, wait=None):
            pass

    def _save_together(self, every_steps: int | None, best: bool = False, wait: bool | None = True) -> bool:
        """Make one save of all trainers; return whether it completes this trainer's request. wait: None: as the others
        request."""
        trainers = self._session.trainers
        started_at = time.monotonic()
        self._settle()
        paused_at = time.monotonic()
        with self._session.pause():
            position, loader = divided(self._session.position_of(self._data))
            request = [self._directory.name, self._session.step, every_steps, position and position.to_dict(), best]
            # Once this returns, all trainers are paused.
            gathered = trainers.gather(json.dumps([*request, wait]).encode(), patient=True)
            directories, steps, intervals, positions, bests, waits = zip(*map(json.loads, gathered), strict=True)
            if set(intervals) == {_ENDED}:
                return True
            requests, differ = set(intervals), len(set(directories)) > 1 or len(set(waits) - {None}) > 1
            if self._session.dense.is_joint:
                differ |= len(set(steps)) > 1
            else:  # those that join the others' saves
                requests -= {None, _ENDED}
            if differ or len(requests) > 1:
                raise CheckpointError(
                    f"the trainers save into {list(directories)} at steps {list(steps)} with every_steps "
                    f"{list(intervals)} and wait {list(waits)}; expected the same values on all trainers"
                )
            self._session.dense.refresh()
            states = gathered_states(trainers, loader)
            is_waiting = False not in waits or not self._session.worker.tables.keeps_cuts

            def begin() -> None:
                self._session.require_whole_rows()
                state = self._state(states)
                draft = self._writer.draft(
                    self._session.worker.tables,
                    step=max(steps),
                    positions=tuple(None if saved is None else Position.from_dict(saved) for saved in positions),
                    state=FrozenState.of(state),
                    source=self._signature(),
                    is_best=any(bests),
                    may_repeat=is_waiting,
                )
                if is_waiting:
                    self._writer.write(draft)
                    return
                self._running = in_background(partial(self._write_beside, draft, started_at))

            try:
                trainers.run_first(begin, CheckpointError)
                self._has_running = not is_waiting
            except Exception as error:
                self._figures.failed += 1
                if every_steps != _ENDED:
                    raise
                # The trainer that requested the save raises, and may continue.
                _LOG.error("no checkpoint was saved: %s", error)
        self._figures.pause_seconds = time.monotonic() - paused_at
        if is_waiting or trainers.rank > 0:
            self._figures.record(max(steps), started_at)
        return every_steps in requests or (every_steps is None and not requests)

    def _wait_for_running(self) -> None:
        """Wait until the save that this trainer writes beside training is complete; raise its error."""
        if self._running is not None:
            self._running.exception()  # waits
            save, self._running = self._running, None
            save.result()

    def _settle(self) -> None:
        """Wait until the save that trainer 0 writes beside training is complete. If it failed, all trainers raise."""
        if not self._has_running:
            return
        try:
            self._session.trainers.run_first(self._wait_for_running, CheckpointError, patient=True)
        except Exception:
            self._has_running = False
            self._figures.failed += 1
            raise
        self._has_running = False

    def _write_beside(self, draft: Draft, started_at: float) -> None:
        """Complete a save while training continues."""
        self._writer.write(draft)
        self._figures.record(draft.step, started_at)

    @known_arguments()
    def resume(self, name: str | None = None) -> bool:
        """Restore everything from a checkpoint; return False if there is none yet. In the middle of a run, its streams
        end, and the run continues as a new process that resumes would. Several trainers all call this.

        name: "best" for the one that was last saved as the best, or the name of its folder, such as "000004-step-3000";
            None: the newest. Later saves follow the newest one's number.

        A checkpoint that is torn, or has another model, other tables, another seed or a source read in another order,
        is refused with the differences, and everything is left unchanged. If rows cannot be read after that, the tables
        hold a part of them, and the embeddings refuse to train, evaluate or save until a resume succeeds.
        """
        if is_trial():
            return False
        trainers = self._session.trainers
        if (joint := self._session.joint) is not None:
            joint.resume()
        self._settle()
        with self._directory.chain_of(name) as chain:
            if not trainers.all(bool(chain)):
                if not trainers.all(not chain):
                    latest = chain[-1].where if chain else "no checkpoint"
                    raise CheckpointError(
                        f"some trainers find a checkpoint and others none; this one finds {latest}: use a folder that "
                        "all machines share"
                    )
                self._require_run_folder()
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
            position, loaders = self._position_for_this_trainer(newest), state.get("loaders", [])
            if position is not None and loaders and loaders[trainers.rank] is not None:
                position = replace(position, offset=LoaderState(loaders[trainers.rank]))
            verb = "returns to" if self._session.step > newest.step else "continues after"
            self._session.resume_at(newest.step, self._data, position)
            self._saved_step = self._figures.step = newest.step
            self._figures.at = time.time()
        if trainers.rank == 0:
            context = current_context()
            launch = f"launch {context.launch} " if context is not None and context.launch else ""
            resumed = event("resumed", checkpoint=newest.where, resumed_step=newest.step)
            _LOG.info("%s%s step %s, from %s", launch, verb, f"{newest.step:,}", newest.where, extra=resumed)
        return True

    def _require_run_folder(self) -> None:
        """Raise CheckpointError if the folder is a snapshot, or one checkpoint, which a resume cannot find."""
        folder = self._directory.folder
        if holds_snapshot(folder):
            raise CheckpointError(
                f"{folder} is the snapshot of a table, and no folder of checkpoints: name "
                "another folder, and start from its rows with `for ids, rows in satrap.Reader(SNAPSHOT)"
                ".tables[NAME].rows(): embeddings.tables[NAME].write(ids, rows.values)`"
            )
        if (one := RunDirectory.of_checkpoint(folder)) is not None:
            raise CheckpointError(
                f"{folder} is one checkpoint, and no folder of a run; expected the folder that "
                f"has it: Checkpoint({os.fspath(one[0].folder)!r}, ...).resume({one[1]!r})"
            )

    def _checked_state(self, entry: CheckpointManifest) -> Any:
        """Return the state of a checkpoint; raise CheckpointError if it is of another job."""
        path, names = f"{entry.folder}/{STATE}", list(self._session.worker.tables)
        state = read_state(entry.folder, STATE, entry.state_crc32c)
        if self._objects.keys() != state["objects"].keys():
            raise CheckpointError(
                f"{path} has the state of {sorted(state['objects'])}; this job has {sorted(self._objects)}: pass "
                "Checkpoint the same extra_state as when it was saved, or another folder if this is another run"
            )
        require_model(path, state["objects"]["model"], self._objects["model"].state_dict())
        if sorted(entry.tables) != sorted(names):
            raise CheckpointError(
                f"{entry.where} has tables {sorted(entry.tables)}; this job has {sorted(names)}: declare the same "
                "tables, or use another folder"
            )
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
        known = [position or Position(0, 0, 0) for position in positions]
        if any(place.offset is not None for place in known):
            raise CheckpointError(
                f"{entry.where} was saved by {len(known)} trainers and this job has {trainers.world_size}: its "
                f"positions are offsets in the data: resume it with {len(known)} trainers"
            )
        return Position.after(known)

    def _restore_tables(self, chain: list[CheckpointManifest]) -> None:
        newest, tables = chain[-1], self._session.worker.tables
        folders = table_folders(chain)
        map_version = tables.map_version
        with Transfer(_LOG, "restore", f"restore of step {newest.step:,} from {newest.where}", step=newest.step):
            changes_may_follow = tables.restore(folders)
        tables.is_whole = False
        require_rows(newest, {name: len(table) for name, table in tables.items()})
        tables.is_whole = True
        versions = {name: tables[name].version for name in tables}
        self._writer.follow(newest.folder.name, versions, map_version, len(chain) if changes_may_follow else None)

    @contextmanager
    def _restored(self, where: str, state: Mapping[str, Any]) -> Iterator[None]:
        """Load every object and the random state from the checkpoint; restore their previous state if one, or the body,
        fails."""
        before = copy.deepcopy(self._state([{"random": random_state(), "loader": None}]))
        try:
            for saved in state["random"][self._session.trainers.rank :][:1]:  # empty if fewer trainers saved it
                set_random_state(saved)
            for name, target in self._objects.items():
                try:
                    target.load_state_dict(state["objects"][name])
                except (ValueError, RuntimeError, KeyError, TypeError, SatrapError) as error:
                    raise CheckpointError(f"{where}: {name} cannot load its state: {error}") from error
            yield
        except BaseException:
            for name, target in self._objects.items():
                target.load_state_dict(before["objects"][name])
            set_random_state(before["random"][0])
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
        known = (entry.source.keys() | now.keys()) - not_compared
        differ = {name for name in known if entry.source.get(name) != now.get(name)}
        # A setting that only one of them has, such as the seed of a shuffle, follows from another one that differs.
        shown = sorted(differ & ((entry.source.keys() & now.keys()) | _ABSENT_IF_OFF) or differ)
        lines = [f"{name} is {entry.source.get(name)!r} in the checkpoint and {now.get(name)!r} here" for name in shown]
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
                "declare the source as before, leave it out of Checkpoint(...) to start from its beginning, or use "
                "another folder if this is another run"
            )

    def _state(self, trainers: list[Any]) -> dict[str, Any]:
        """trainers: the random state of each, and the state of its loader, if that has one."""
        objects = {name: target.state_dict() for name, target in self._objects.items()}
        del objects["optimizer"]["rows"]  # the checkpoint has the rows, and restores them after the optimizer
        loaders = [trainer["loader"] for trainer in trainers]
        of_loaders = {} if loaders.count(None) == len(loaders) else {"loaders": loaders}
        return {"objects": objects, "random": [trainer["random"] for trainer in trainers], **of_loaders}


@dataclass(slots=True, eq=False, weakref_slot=True)
class _SaveFigures:
    """Figures of a trainer's checkpoints, for metrics."""

    number: int = 0
    """Number of checkpoints saved by this process."""
    failed: int = 0
    """Number of saves that failed."""
    step: int = 0
    """Step of the last one that was saved or resumed."""
    at: float = 0.0
    """Unix time at which it was."""
    seconds: float = 0.0
    """Duration of the last save."""
    pause_seconds: float = 0.0
    """For how long training waited for it."""

    def record(self, step: int, started_at: float) -> None:
        """Count a checkpoint that is complete. started_at: when its save began, by the monotonic clock."""
        self.number, self.step, self.at = self.number + 1, step, time.time()
        self.seconds = time.monotonic() - started_at

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of a scrape, which another thread makes."""
        yield Sample("satrap_checkpoints", self.number)
        yield Sample("satrap_checkpoints_failed", self.failed)
        yield Sample("satrap_last_checkpoint_step", self.step)
        yield Sample("satrap_last_checkpoint_seconds", self.seconds)
        yield Sample("satrap_last_checkpoint_pause_seconds", self.pause_seconds)
        yield Sample("satrap_last_checkpoint_timestamp_seconds", self.at)


def _require_parts(optimizer: object, embeddings: object, data: object) -> None:
    if not isinstance(optimizer, HybridOptimizer):
        raise CheckpointError(f"optimizer is {kind_of(optimizer)}; expected that of embeddings.optimizer(...)")
    if not isinstance(embeddings, Embeddings):
        raise CheckpointError(
            f"embeddings is {kind_of(embeddings)}; expected the satrap.Embeddings: "
            "Checkpoint(path, model, optimizer, embeddings, data)"
        )
    if isinstance(data, str | os.PathLike | Stream):
        expected = "the source that embeddings.stream(...) reads, or the loader of embeddings.prefetch(...)"
        raise CheckpointError(f"data is {kind_of(data)}; expected {expected}")


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{name} is {value!r}; expected an integer, 1 or more")


def _checked_objects(extra_state: object) -> Mapping[str, Any]:
    """Return the further objects by name; raise CheckpointError if a save could not write one of them."""
    if not isinstance(extra_state, Mapping):
        raise CheckpointError(f"extra_state is {kind_of(extra_state)}; expected a dict of objects by name")
    for name, target in extra_state.items():
        if not (hasattr(target, "state_dict") and hasattr(target, "load_state_dict")):
            raise CheckpointError(
                f"extra_state[{name!r}] is {kind_of(target)}; expected an object with state_dict and load_state_dict: "
                "keep the value in one, such as in a buffer of an nn.Module"
            )
    if taken := {"model", "optimizer"} & set(extra_state):
        raise CheckpointError(f"extra_state has the reserved names {sorted(taken)}: use other names")
    return extra_state
