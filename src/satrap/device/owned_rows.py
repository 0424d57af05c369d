"""The rows that a trainer owns of tables that several trainers share: it looks up and updates them for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.features import Features
from satrap.device.device_engine import DeviceEngine, Owed
from satrap.device.device_rows import LARGEST, DeviceRows
from satrap.device.host_copy import to_device
from satrap.device.row_layout import DTYPES
from satrap.device.segments import JoinedIds, TableGroups
from satrap.errors import InputError

_MOST_PLACES = 2**31 - 1  # counted in int32


@dataclass(frozen=True, slots=True)
class LookupTime:
    """When a lookup is."""

    step: int
    oldest_open: int
    first_epoch: bool


class OwnedRows(DeviceRows):
    """The rows of some buckets of each table, all of them on the device."""

    def __init__(self, features: Features, engine: DeviceEngine, groups: TableGroups) -> None:
        """engine: of the features' tables. groups: of these tables."""
        super().__init__(features, engine)
        self._groups = groups

    def look_up(self, received: NDArray[np.uint64], counts: NDArray[np.int64], at: LookupTime) -> list[Tensor]:
        """Return the rows of ids, in training: for each group its lines, as they are stored.

        counts: how many ids of each table each trainer sent, [trainers, tables]."""
        joined = JoinedIds.join(received, counts, self._groups)
        frames = np.empty(len(joined.ids), np.int32)
        with self._engine.exclusive():
            self._engine.reserve(np.diff(joined.offsets))
            try:
                found = self._engine.core.lookup_id_frames(
                    joined.ids, joined.offsets, at.step, at.oldest_open, True, frames, at.first_epoch
                )
            finally:  # a lookup that fails has inserted rows too
                self._engine.place_rows()
            return self._lines(joined, frames, found, counts)

    def _lines(
        self,
        joined: JoinedIds,
        frames: NDArray[np.int32],
        found: dict[str, Any],
        counts: NDArray[np.int64],
    ) -> list[Tensor]:
        """Copy the rows of the frames to the lines of their groups."""
        per_group = self._groups.counts(counts)
        lines = [
            torch.empty((sum(each), dim), dtype=DTYPES[dtype], device=self.device)
            for each, (dtype, dim) in zip(per_group, self._groups.layouts, strict=True)
        ]
        for memory in self._engine.memories:
            at = np.concatenate([np.arange(*joined.offsets[[t, t + 1]]) for t in memory.tables])
            if not len(at):
                continue
            chosen = frames[at]
            to = to_device(joined.lines[at], self.device)
            out = lines[self._groups.numbers[memory.tables[0]]]
            out[to] = memory.values[to_device(np.maximum(chosen, 0), self.device)] if len(memory.values) else 0
            if (without := chosen < 0).any():
                absent = torch.cat([torch.zeros((1, out.shape[1]), device=self.device), self._absent(found, memory)])
                rows = absent[to_device(-1 - chosen[without], self.device)]
                out[to[to_device(without, self.device)]] = rows.to(out.dtype)
        return lines

    def apply(
        self,
        received: NDArray[np.uint64],
        counts: NDArray[np.int64],
        sums: Sequence[Tensor],
        step: int,
        lrs: Sequence[float],
    ) -> None:
        """Add up the gradients of each id in the order of the ranks, and step its row once.

        sums: for each group the gradient of each line, in float32."""
        joined = JoinedIds.join(received, counts, self._groups)
        dims = np.array([table.dim for table in self._tables])
        places = joined.lines * dims[joined.tables()]
        if len(places) and int(places.max()) + int(dims.max()) > _MOST_PLACES:
            raise InputError(
                f"step {step}: the gradients for one trainer hold more than {_MOST_PLACES} floats, the most "
                "that fit on a device: make smaller batches"
            )
        with self._engine.exclusive():
            skips = self._check_sums(joined, sums, len(counts))
            groups = list(self._fused_tables(dict(enumerate(lrs)), skips=skips))
            flats = [sums[self._groups.numbers[tables.start]].reshape(-1) for tables, *_ in groups]

            def record() -> Owed:
                found = self._engine.core.update_id_frames(
                    joined.ids, joined.offsets, places.astype(np.int32), step, skips
                )
                return partial(self._steps, found, groups, flats, 1.0, step)

            self._engine.owe(record)

    def _check_sums(self, joined: JoinedIds, sums: Sequence[Tensor], num_trainers: int) -> bool:
        """Raise NonFiniteError if a table refuses a gradient; return whether gradients may have to be skipped."""
        largest = max((float(each.abs().max()) for each in sums if each.numel()), default=0.0)
        if largest * num_trainers < LARGEST:  # not true of a NaN
            return False
        on_cpu = [each.cpu().numpy() for each in sums]
        flat = [
            on_cpu[self._groups.numbers[t]][joined.lines[joined.offsets[t] : joined.offsets[t + 1]]].reshape(-1)
            for t in range(len(self._tables))
        ]
        return bool(self._engine.core.check_id_gradients(joined.ids, joined.offsets, np.concatenate(flat)))
