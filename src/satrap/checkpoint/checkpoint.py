"""Checkpoints of a training run: tables, dense parameters, optimizer, random state, step and position, as one version.

    run/
      000004-step-3000/           one checkpoint; the number counts up, the highest is the newest
        tables/<n>/               a snapshot of each table (docs/format.md), full or changes
        state.safetensors         dense parameters, optimizer, further objects, random state of each trainer
        checkpoint.json           what it is, written last; names its parent if the tables are changes

A checkpoint is a cut between two steps. 1. The stream is paused: updates handed over are applied, no lookup runs.
2. Everything is written into a hidden folder and put on disk. 3. One rename makes it visible. 4. The stream goes on,
and checkpoints beyond `keep` go, but not the parents of those kept. A process killed at any moment leaves the
checkpoints that were visible, and hidden folders that the next save removes.

A path with a protocol ("s3://...") is any fsspec file system: the same folder is written beside the process first and
copied, checkpoint.json last; it counts only once that is there.
"""

import copy
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from satrap.config.durable import put_on_disk
from satrap.config.validation import kind_of
from satrap.data.inputs import Position
from satrap.errors import ChangesError, CheckpointError, SatrapError, SnapshotError
from satrap.run_context import current
from satrap.table.snapshot.manifest import checksum
from satrap.table.snapshot.saved_table import SavedTable
from satrap.train.embeddings import Embeddings
from satrap.train.optimizer import HybridOptimizer
from satrap.train.process_group import unwrapped

_ENDED = 0  # told instead of every_steps


class Checkpoint:
    """Saves and resumes one run. See the file's docstring."""

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
        further: Mapping[str, Any] | None = None,
    ) -> None:
        """keep: how many checkpoints stay, beside their parents.

        data: the source that the training stream reads; its position is saved and found again.
        full_every: every how many saves the tables are written whole; between them only what changed since the last,
            unless a table does not know all of it any more.
        further: by name, other objects with state_dict and load_state_dict: schedulers, a GradScaler.
        """
        if not isinstance(optimizer, HybridOptimizer):
            raise CheckpointError(f"optimizer is {kind_of(optimizer)}; wanted what embeddings.optimizer(...) returned")
        taken = {"model", "optimizer"} & set(further or {})
        if taken:
            raise CheckpointError(f"further holds {sorted(taken)}; these are saved anyway: take other names")
        for name, value in (("keep", keep), ("full_every", full_every)):
            _require_count(name, value)
        path, place = os.fspath(path), current()
        if place is not None and place.is_copy and "://" not in path and not os.path.isabs(path):
            raise CheckpointError(
                f"path is {path!r}, and this script runs in a copy of its folder, which goes away with the run: name "
                "an absolute path that all machines share"
            )
        self._home = RunDirectory(path)
        self._objects = {"model": unwrapped(model), "optimizer": optimizer, **(further or {})}
        self._embeddings, self._data = embeddings, data
        self._keep, self._full_every = keep, full_every
        embeddings.follow(data)
        self._last: tuple[str, dict[str, int]] | None = None  # the newest checkpoint and its tables' versions
        self._layout = 0  # of the tables, when that was
        self._since_full = 0
        self._saved_step = -1
        self._source: Mapping[str, Any] | None = None
        if embeddings.apart:
            embeddings.before_close(self._stay)

    def save(self, *, every_steps: int | None = None) -> bool:
        """Writes a checkpoint; returns whether it did. every_steps: only if the step is a multiple, once.

        Several trainers all call it, at the same step; the first one writes. Those with dense="async" may come at steps
        of their own, and one that calls it without every_steps takes part in what the others save until all do so.
        """
        if every_steps is not None:
            _require_count("every_steps", every_steps)
        step = self._embeddings.step
        if every_steps is not None and (step == 0 or step % every_steps != 0 or step == self._saved_step):
            if self._saved_step < 0 and self._embeddings.trainers.rank == 0:
                self._home.require_mine(None)  # now, not when much is done that could not be saved
                self._embeddings.tables.require_permitted(self._home.local)
            self._saved_step = max(0, self._saved_step)
            return False
        while not self._take_part(every_steps):
            pass
        self._saved_step = step
        return True

    def _stay(self) -> None:
        """Takes part in what the others save until all are at the end of their scripts."""
        while not self._take_part(_ENDED):
            pass

    def _take_part(self, every_steps: int | None) -> bool:
        """One save of all trainers; whether it is what this one came for."""
        trainers, together = self._embeddings.trainers, not self._embeddings.apart
        with self._embeddings.paused():
            position = self._embeddings.position_of(self._data)
            own = [self._home.name, self._embeddings.step, every_steps, position and position.to_dict()]
            told = trainers.gather(json.dumps(own).encode(), patient=True)  # so all are paused
            homes, steps, every, positions = zip(*map(json.loads, told), strict=True)
            if set(every) == {_ENDED}:
                return True
            going_on = set(every) if together else set(every) - {None, _ENDED}
            if len(set(homes)) > 1 or len(going_on) > 1 or (together and len(set(steps)) > 1):
                raise CheckpointError(
                    f"the trainers save into {list(homes)} at steps {list(steps)} with every_steps {list(every)}: save "
                    "alike"
                )
            self._embeddings.refresh()
            randoms = trainers.gather(state_bytes(_random_state()))
            try:
                trainers.first_does(lambda: self._write(max(steps), positions, randoms), CheckpointError)
            except Exception as error:
                if every_steps != _ENDED:
                    raise
                # Whoever wanted it raises it, and may go on.
                print(f"no checkpoint was saved: {error}", file=sys.stderr)
        return every_steps in going_on or (every_steps is None and not going_on)

    def _write(self, step: int, positions: Sequence[Any], randoms: list[bytes]) -> None:
        with self._home.new(step, None if self._last is None else self._last[0]) as folder:
            parent = self._last if self._last is not None and self._since_full < self._full_every else None
            tables, layout = self._embeddings.tables, self._embeddings.tables.layout
            parent_crc32c = None if parent is None else self._home.checksum_of(parent[0])
            if layout != self._layout or parent_crc32c is None:
                parent = None  # rows have moved, or somebody removed it
            try:
                versions = self._save_tables(folder, parent)
            except SnapshotError as error:
                unknown = isinstance(error, ChangesError) or tables.layout != layout
                if parent is None or not unknown:
                    raise
                # A server was started again, rows have moved, or more went than are remembered.
                shutil.rmtree(folder / TABLES, ignore_errors=True)
                parent, layout = None, tables.layout
                versions = self._save_tables(folder, None)
            save_state(folder / STATE, self._state([state_of(each) for each in randoms]))
            entry = CheckpointManifest(
                folder=folder,
                where=str(folder),
                name=self._home.name_of(folder),
                step=step,
                parent=None if parent is None else parent[0],
                parent_crc32c=None if parent is None else parent_crc32c,
                positions=tuple(None if each is None else Position.from_dict(each) for each in positions),
                source=self._signature(),
                tables=tuple(self._embeddings.tables),
                saved=self._saved_tables(folder, is_whole=parent is None),
                state_crc32c=checksum((folder / STATE).read_bytes()),
            )
            (folder / MANIFEST).write_bytes(entry.to_json())
            for file in (STATE, MANIFEST):
                put_on_disk(folder / file)
            name = self._home.publish(folder)
            self._last, self._layout = (name, versions), layout
            self._since_full = 1 if parent is None else self._since_full + 1
            self._home.forget_beyond(self._keep)

    def resume(self) -> bool:
        """Brings everything to the newest checkpoint; False if there is none yet.

        A checkpoint that is torn, or of another model, other tables, another seed or a source read in another order, is
        refused with what differs, and everything is as it was.
        """
        trainers = self._embeddings.trainers
        with self._home.newest() as chain:
            if not trainers.all(bool(chain)):
                if not trainers.all(not chain):
                    found = chain[-1].where if chain else "no checkpoint"
                    raise CheckpointError(
                        f"some trainers see a checkpoint and others see none; here is {found}: give a folder that all "
                        "machines share"
                    )
                return False
            newest, error = chain[-1], None
            try:
                state = self._fitting(newest)
            except SatrapError as caught:
                error = caught
            same = len(set(trainers.gather(newest.folder.name.encode()))) == 1
            if not trainers.all(error is None) or not same:
                raise error or CheckpointError("another trainer cannot resume here; its own error says why")
            with self._restored(newest.where, state):
                trainers.first_does(lambda: self._restore_tables(chain), CheckpointError)
            self._embeddings.join_attempt()
            self._embeddings.resume_at(newest.step, self._data, self._position_in(newest))
            self._saved_step = newest.step
        if (place := current()) is not None and place.rank == 0:  # of a run, which begins its launches by itself
            print(f"launch {place.launch} goes on after step {newest.step}, from {newest.where}", file=sys.stderr)
        return True

    def _fitting(self, entry: CheckpointManifest) -> Any:
        """Its state, if it is one of this job."""
        state, names = self._read_state(entry), list(self._embeddings.tables)
        if sorted(entry.tables) != sorted(names):
            raise CheckpointError(f"{entry.where} has tables {sorted(entry.tables)}; this job has {sorted(names)}")
        self._require_same_source(entry)
        self._position_in(entry)
        return state

    def _position_in(self, entry: CheckpointManifest) -> Position | None:
        """Where this trainer goes on in the data. Of another number of trainers than saved it, each goes on with its
        share of what those left."""
        trainers, positions = self._embeddings.trainers, entry.positions
        if len(positions) == trainers.world:
            return positions[trainers.rank]
        if not any(positions):
            return None
        known = [each or Position(0, 0, 0) for each in positions]
        older = any(each.is_of_older_release for each in known) and len(known) > 1
        if older or any(each.offset is not None for each in known):
            why = "its release dealt the data out in another way" if older else "each has an offset of the data's own"
            raise CheckpointError(
                f"{entry.where} is of {len(known)} trainers and here are {trainers.world}: {why}: resume it with "
                f"{len(known)}"
            )
        return Position.after(known)

    def _restore_tables(self, chain: list[CheckpointManifest]) -> None:
        newest, tables = chain[-1], self._embeddings.tables
        folders = table_folders(chain)
        self._layout = tables.layout
        changes_may_follow = tables.restore(folders)
        require_rows(chain, {name: len(table) for name, table in tables.items()})
        self._last = newest.folder.name, {name: tables[name].version for name in tables}
        self._since_full = len(chain) if changes_may_follow else self._full_every

    @contextmanager
    def _restored(self, where: str, state: Mapping[str, Any]) -> Iterator[None]:
        """Every object and the random state as in the checkpoint; as before if one, or what is done inside, fails."""
        before = copy.deepcopy(self._state([_random_state()]))
        try:
            for each in state["random"][self._embeddings.trainers.rank :][:1]:  # more trainers than saved it: none
                _set_random_state(each)
            for name, each in self._objects.items():
                try:
                    each.load_state_dict(state["objects"][name])
                except (ValueError, RuntimeError, KeyError, TypeError, SatrapError) as error:
                    raise CheckpointError(f"{where}: {name} does not take its state: {error}") from error
            yield
        except BaseException:
            for name, each in self._objects.items():
                each.load_state_dict(before["objects"][name])
            _set_random_state(before["random"][0])
            raise

    def _signature(self) -> Mapping[str, Any] | None:
        """Asked once: it lists the source's files."""
        if self._source is None:
            self._source = self._embeddings.signature_of(self._data)
        return self._source

    def _require_same_source(self, entry: CheckpointManifest) -> None:
        """A position means something only where the blocks come in the same order."""
        now = self._signature()
        if not any(entry.positions) or entry.source is None or now is None:
            return
        lines = [
            f"{name} is {entry.source.get(name)!r} in the checkpoint and {now.get(name)!r} here"
            for name in sorted((entry.source.keys() | now.keys()) - {"files"})
            if entry.source.get(name) != now.get(name)
        ]
        # Files may have come behind those that were there, if neither an order nor shares are of all of them.
        were, are = entry.source.get("files", ()), now.get("files", ())
        of_all = now.get("shuffle") or len(entry.positions) > 1 or self._embeddings.trainers.world > 1
        for i in range(max(len(were), len(are)) if of_all else len(were)):
            was, is_ = (list(files[i]) if i < len(files) else None for files in (were, are))
            if was != is_:
                lines.append(f"file {i} (name, bytes) is {was} in the checkpoint and {is_} here")
                break
        if lines:
            raise CheckpointError(
                f"{entry.where}: its position is of a source that is read otherwise: {'; '.join(lines)}; "
                "declare the source as it was, or leave it out of Checkpoint(...) to begin at its start"
            )

    def _save_tables(self, folder: Path, parent: tuple[str, dict[str, int]] | None) -> dict[str, int]:
        versions = {}
        tables = self._embeddings.tables
        for i, name in enumerate(tables):
            store, to = tables[name], folder / table_key(i)
            versions[name] = store.save(to) if parent is None else store.save_changes(to, since=parent[1][name])
        return versions

    def _saved_tables(self, folder: Path, *, is_whole: bool) -> tuple[SavedTable, ...]:
        """What the folder holds of each table; raises if a whole save has not all its rows."""
        found = []
        tables = self._embeddings.tables
        for i, name in enumerate(tables):
            path = folder / table_key(i)
            saved = SavedTable.of(path, len(tables[name]))
            rows = sum(part.rows for part in saved.parts)
            if is_whole and rows != saved.rows:
                raise SnapshotError(f"table {name!r} has {saved.rows} rows, and {path} holds {rows}: nothing was saved")
            found.append(saved)
        return tuple(found)

    def _state(self, randoms: list[dict[str, Any]]) -> dict[str, Any]:
        """randoms: each trainer's."""
        objects = {name: each.state_dict() for name, each in self._objects.items()}
        del objects["optimizer"]["rows"]  # they are in the checkpoint, and come after the optimizer
        return {"objects": objects, "random": randoms}

    def _read_state(self, entry: CheckpointManifest) -> Any:
        path = entry.folder / STATE
        state = read_state(path, entry.state_crc32c, entry.where)
        missing = self._objects.keys() ^ state["objects"].keys()
        if missing:
            raise CheckpointError(f"{path} has {sorted(state['objects'])}; this job has {sorted(self._objects)}")
        require_model(path, state["objects"]["model"], self._objects["model"].state_dict())
        return state


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{name} is {value!r}; wanted an integer, 1 or more")


def _random_state() -> dict[str, Any]:
    kind, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002  the user's global one
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
        for device, each in zip(
            range(torch.cuda.device_count()), state["cuda"], strict=False
        ):  # there may be fewer now
            torch.cuda.set_rng_state(each, device)
