"""The rows that a trainer owns of tables with `num_rows`, which several trainers divide by rows. The place of a row is
computed from its id, on the device; no directory is asked, and the CPU sees no id."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.features import Features
from satrap.device.cold_rows import ColdRows
from satrap.device.device_blocks import Magnitude
from satrap.device.device_engine import PendingWork
from satrap.device.device_ids import alignment_of
from satrap.device.device_rows import LARGEST, DeviceRows
from satrap.device.device_stream import to_host
from satrap.device.direct_ids import RowRuns
from satrap.device.direct_rows import DirectEngine, are_direct
from satrap.device.group_exchange import lines_of, of_group
from satrap.device.runs import MOST_PLACES
from satrap.device.segments import TableGroups
from satrap.device.table_shards import kind_of
from satrap.errors import InputError


def are_owned_direct(features: Features) -> bool:
    """Return whether `DirectOwnedRows` can have the rows: `DirectEngine` can, and each row is at one trainer. Where
    several trainers have a row, only its owner counts it, and only the core knows owners."""
    return are_direct(features) and all(kind_of(table) == "rows" for table in features.tables)


class DirectOwnedRows(DeviceRows):
    """The rows that this trainer has of each table with `num_rows`.

    Its methods take what all trainers sent.
    rows: the numbers of rows here, int64: trainer after trainer, and for each trainer group after group of tables.
    counts: how many numbers each trainer sent of each group, [trainers, groups]."""

    _engine: DirectEngine

    def __init__(self, features: Features, engine: DirectEngine) -> None:
        super().__init__(features, engine)
        self._groups = TableGroups.of_neighbours(self._tables)

    def runs(self, rows: Tensor) -> RowRuns:
        """Sort the rows. The order of the ranks is kept."""
        return RowRuns.of(rows.int(), self._engine.numbers)

    def look_up_rows(
        self, rows: Tensor, runs: RowRuns, counts: NDArray[np.int64], steps: Mapping[int, Sequence[int]], oldest: int
    ) -> list[Tensor]:
        """Look up rows in training. Return for each group the values of its lines, in the dtype of its tables. runs:
        the runs of all rows. steps: for each step the trainers that look rows up for it. oldest: the oldest open
        step."""
        with self._engine.exclusive(self._engine.no_counts):
            parts = rows.split(counts.sum(1).tolist())
            for step, ranks in sorted(steps.items()):
                self._engine.begin_lookup(step, min(step, oldest), train=True, first_epoch=True)
                of_step = runs if len(steps) == 1 else self.runs(torch.cat([parts[rank] for rank in ranks]))
                self._engine.perform(partial(self._noted, of_step, step))
            lines = self._lines(rows, runs, counts)
            self._engine.moves.note_use()
            return lines

    def _noted(self, runs: RowRuns, step: int) -> PendingWork:
        return partial(self._engine.heads.note_lookup, runs, step)

    def _lines(self, rows: Tensor, runs: RowRuns, counts: NDArray[np.int64]) -> list[Tensor]:
        numbers, memories = self._engine.numbers, self._engine.memories
        places, cold = numbers.places(rows), ColdRows.of_all(memories, runs.rows, numbers)
        copies, lines = {pool: of_memory.read(with_state=False).values for pool, of_memory in cold.items()}, []
        for group, of_tables in enumerate(self._groups.tables):
            at = of_group(places, group, counts)
            its_pools = sorted({memories.index(self._engine.memory(table)) for table in of_tables})
            if len(its_pools) == 1 and its_pools[0] not in cold:
                lines.append(memories[its_pools[0]].values[at])
                continue
            pool_of = of_group(numbers.pools[numbers.tables_of(rows)], group, counts)
            run_of = of_group(runs.of_entries(), group, counts)
            out = memories[its_pools[0]].values.new_zeros((len(at), self._groups.layouts[group][1]))
            for pool in its_pools:
                out = _chosen(memories[pool].values, torch.where(pool_of == pool, at, -1), out)
                if pool in cold:
                    out = _chosen(copies[pool], cold[pool].lines[run_of], out)
            lines.append(out)
        return lines

    def apply_rows(
        self,
        rows: Tensor,
        runs: RowRuns,
        counts: NDArray[np.int64],
        sums: Sequence[Tensor],
        step: int,
        lrs: Sequence[float],
        bound: float,
    ) -> None:
        """Add up the gradients of each row in the order of the ranks, and step it once.

        runs: of all rows. sums: for each group the gradient of each line, in float32. bound: no sum of gradients is
        larger, as far as the trainers that sent them know."""
        if any(gradients.numel() > MOST_PLACES for gradients in sums):
            raise InputError(
                f"step {step}: the gradients for one trainer hold more than {MOST_PLACES} floats, the most "
                "that fit on a device: make smaller batches"
            )
        with self._engine.in_order():
            lines = lines_of(runs.order, counts)
            skips = not bound < LARGEST and self._check_sums(rows[runs.order], lines, sums, len(counts))
            trained = self._engine.trained(runs)
            groups = list(self._fused_tables(dict(enumerate(lrs)), 1.0, step, skips=skips))
            flats = [sums[self._groups.numbers[tables.start]].reshape(-1) for tables, _ in groups]
            dims = [self._engine.memory(tables.start).layout.dim for tables, _ in groups]

            def record() -> PendingWork:
                self._engine.begin_update(step)
                of_dim = {
                    dim: self._engine.runs(trained, (lines * dim).int(), None, alignment_of(dim)) for dim in set(dims)
                }
                return lambda: [
                    partial(self._engine.step, self._kernels, trained, of_dim[dim], group, flat)
                    for group, flat, dim in zip(groups, flats, dims, strict=True)
                ]

            self._engine.perform(record)

    def _check_sums(self, rows: Tensor, lines: Tensor, sums: Sequence[Tensor], num_trainers: int) -> bool:
        """Raise NonFiniteError if a table refuses a gradient; return whether gradients may have to be skipped. rows,
        lines: in the order of the runs."""
        if float(Magnitude((tensor, 1.0) for tensor in sums)) * num_trainers < LARGEST:  # not true of a NaN
            return False
        numbers = self._engine.numbers
        offsets = to_host(torch.searchsorted(rows, numbers.bounds)).numpy()
        flat = []
        for table, group in enumerate(self._groups.numbers):
            of_table = lines[int(offsets[table]) : int(offsets[table + 1])]
            flat.append(to_host(sums[group][of_table]).numpy().reshape(-1))
        ids = to_host(numbers.ids_of(rows)).numpy().view(np.uint64)
        return bool(self._engine.core.check_id_gradients(ids, offsets, np.concatenate(flat)))


def _chosen(values: Tensor, lines: Tensor, others: Tensor) -> Tensor:
    """Return the values of these lines, with `others` where a line is negative."""
    return torch.where((lines >= 0)[:, None], values[lines.clamp(min=0)], others) if len(values) else others
