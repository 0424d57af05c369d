"""The rows that a trainer owns of tables that several trainers share: it looks up and updates them for all of them."""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap import _core
from satrap.config.features import Features
from satrap.device.device_blocks import Magnitude
from satrap.device.device_engine import DeviceEngine, PendingWork
from satrap.device.device_rows import LARGEST, DeviceRows
from satrap.device.device_stream import to_device, to_host
from satrap.device.runs import MOST_PLACES, Runs
from satrap.device.segments import JoinedIds, TableGroups
from satrap.device.table_shards import Trainer
from satrap.errors import InputError, NonFiniteError


@dataclass(frozen=True, slots=True)
class LookupTime:
    """The step of a lookup, the oldest step that is still open then, and whether it is in the first epoch."""

    step: int
    oldest_open: int
    first_epoch: bool


@dataclass(slots=True, eq=False)
class FoundIds:
    """The ids that all trainers sent, for an update."""

    joined: JoinedIds
    """The ids by table. The line of an id is also the line of its gradient."""
    owned: "Callable[[], OwnedRows | None]"
    """Returns the rows; None: other tables were restored."""
    ticket: _core.Ticket | None = None
    """The ticket of their lookup, if the update is ordered ahead."""
    runs: Runs | None = None
    """The runs of the update, once it is ordered."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the update is ordered."""


class OwnedRows(DeviceRows):
    """The rows that this trainer has of each table."""

    def __init__(self, features: Features, engine: DeviceEngine, groups: TableGroups, trainer: Trainer) -> None:
        """engine: of the features' tables. groups: of these tables. trainer: this one."""
        super().__init__(features, engine)
        self._groups, self._rank, self._num_trainers = groups, trainer.rank, trainer.world_size
        self._replicated, self._divided = groups.of_kinds("replicated"), groups.of_kinds("columns")

    def joined(self, received: NDArray[np.uint64], counts: NDArray[np.int64]) -> FoundIds:
        """Join ids for an update. counts: how many of each table each trainer sent, [trainers, tables]."""
        return FoundIds(JoinedIds.join(received, counts, self._groups), weakref.ref(self))

    def look_up_received(
        self, received: NDArray[np.uint64], counts: NDArray[np.int64], at: LookupTime, *, may_order: bool
    ) -> tuple[list[Tensor], FoundIds]:
        """Look up ids in training. Return for each group the values of its lines, in the dtype of its tables, and the
        ids for their update. Ids of replicated tables are answered to this trainer only: the others have the rows, too.

        counts: as in `joined`. may_order: whether `order` may be called."""
        asked = counts.copy()
        asked[np.ix_(np.arange(len(counts)) != self._rank, self._replicated)] = 0
        joined = JoinedIds.join(received, counts, self._groups, asked)
        frames = np.empty(len(joined.ids), np.int32)
        with self._engine.exclusive(np.diff(joined.offsets)):
            try:
                resolved = self._engine.core.lookup_id_frames(
                    joined.ids, joined.offsets, at.step, at.oldest_open, True, frames, at.first_epoch, may_order
                )
            finally:  # a lookup that fails has inserted rows too
                self._engine.place_rows()
            self._engine.moves.wait(self._engine.moves.moved)
            lines = self._lines(joined, frames, resolved, asked)
            self._engine.moves.note_use()
        ids = self.joined(received, counts) if self._replicated else FoundIds(joined, weakref.ref(self))
        ids.ticket = resolved["ticket"]
        return lines, ids

    def order(self, ids: FoundIds) -> Runs | None:
        """Order the gradients of an update, once; return None if the update is not ordered ahead."""
        with ids.lock:
            if ids.runs is None and ids.ticket is not None:
                arrays = self._engine.core.order_id_frames(ids.ticket, self._places(ids.joined))
                ids.runs = Runs.to_device(arrays, self.device)
            return ids.runs

    def _lines(
        self, joined: JoinedIds, frames: NDArray[np.int32], resolved: dict[str, Any], counts: NDArray[np.int64]
    ) -> list[Tensor]:
        """Copy the rows of the frames to the lines of their groups."""
        lines = self._empty_lines(counts)
        for memory in self._engine.memories:
            at = joined.of_tables(memory.tables)
            at = at[joined.lines[at] >= 0]
            if not len(at):
                continue
            chosen = frames[at]
            to = to_device(joined.lines[at], self.device)
            out = lines[self._groups.numbers[memory.tables[0]]]
            out[to] = memory.values[to_device(np.maximum(chosen, 0), self.device)] if len(memory.values) else 0
            if len(without := np.flatnonzero(chosen < 0)):
                absent = torch.cat([torch.zeros((1, out.shape[1]), device=self.device), self._absent(resolved, memory)])
                rows = absent[to_device(-1 - chosen[without], self.device)]
                out[to[to_device(without, self.device)]] = rows.to(out.dtype)
        return lines

    def _empty_lines(self, counts: NDArray[np.int64]) -> list[Tensor]:
        """Return memory for the lines of each group. counts: ids that have a line, [trainers, tables]."""
        layouts = [self._engine.memory(tables[0]).layout for tables in self._groups.tables]
        return [
            torch.empty((sum(num_lines), layout.dim), dtype=layout.torch_dtype, device=self.device)
            for num_lines, layout in zip(self._groups.counts(counts), layouts, strict=True)
        ]

    def apply(self, ids: FoundIds, sums: Sequence[Tensor], step: int, lrs: Sequence[float], bound: float) -> None:
        """Add up the gradients of each id in the order of the ranks, and step its row once.

        sums: for each group the gradient of each line, in float32.
        bound: no sum of an id's gradients is larger, as far as the trainers that sent them know."""
        ordered = self.order(ids) if ids.owned() is self else None
        places = self._places(ids.joined) if ordered is None else None
        with self._engine.in_order():
            skips = not bound < LARGEST and self._check_sums(ids.joined, sums)  # it may be a NaN
            groups = list(self._fused_tables(dict(enumerate(lrs)), 1.0, step, skips=skips))
            flats = [sums[self._groups.numbers[tables.start]].reshape(-1) for tables, _ in groups]

            def record() -> PendingWork:
                core, joined = self._engine.core, ids.joined
                resolved: dict[str, Any] | None
                if places is not None:
                    resolved = core.update_id_frames(joined.ids, joined.offsets, places, step, skips)
                else:
                    assert ids.ticket is not None, "it was ordered"
                    resolved = core.update_ordered_frames(ids.ticket, step, skips)
                return partial(self._steps, resolved, groups, flats, None, ordered)

            self._engine.perform(record)

    def _places(self, joined: JoinedIds) -> NDArray[np.int32]:
        """Return where the gradient of each id begins among the floats of its group."""
        dims = np.array([self._engine.memory(table).layout.dim for table in range(len(self._tables))])
        places: NDArray[np.int64] = joined.lines * dims[joined.tables()]
        if len(places) and int(places.max()) + int(dims.max()) > MOST_PLACES:
            raise InputError(
                f"the gradients of one step for one trainer hold more than {MOST_PLACES} floats, the most that fit on "
                "a device: make smaller batches"
            )
        return places.astype(np.int32)

    def _check_sums(self, joined: JoinedIds, sums: Sequence[Tensor]) -> bool:
        """Raise NonFiniteError if a table refuses a gradient; return whether gradients may have to be skipped."""
        largest = float(Magnitude((tensor, 1.0) for tensor in sums))
        if largest * self._num_trainers < LARGEST:  # not true of a NaN
            return False
        on_cpu = [to_host(tensor).numpy() for tensor in sums]
        flat = []
        for table in range(len(self._tables)):
            part = slice(*joined.offsets[table : table + 2])
            gradients = on_cpu[self._groups.numbers[table]][joined.lines[part]]
            if table in self._divided:  # another trainer may find another sum to be infinite
                self._require_finite_sums(table, joined.ids[part], gradients)
                gradients = np.zeros((len(gradients), self._tables[table].dim), np.float32)
            flat.append(gradients.reshape(-1))
        return bool(self._engine.core.check_id_gradients(joined.ids, joined.offsets, np.concatenate(flat)))

    def _require_finite_sums(self, table: int, ids: NDArray[np.uint64], gradients: NDArray[np.float32]) -> None:
        """Raise NonFiniteError if a sum over all trainers is not finite."""
        unique, at = np.unique(ids, return_inverse=True)
        sums = np.zeros((len(unique), gradients.shape[1]), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add.at(sums, at, gradients)
        if len(wrong := np.flatnonzero(~np.isfinite(sums).all(1))):
            raise NonFiniteError(
                f"table {self._tables[table].name!r}: the gradients of all trainers for id {unique[wrong[0]]} have a "
                "sum that is not finite, and with shard='columns' no trainer has the whole row to leave it out: clip "
                "the gradients, or use another shard"
            )
