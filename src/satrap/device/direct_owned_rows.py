"""The rows that a trainer owns of tables with `num_rows`, which several trainers divide by rows. The place of a row is
computed from its id, on the device; no directory is asked."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.tables import Table
from satrap.device.device_engine import Owed
from satrap.device.device_memory import DeviceMemory
from satrap.device.device_rows import UpdatedTables
from satrap.device.device_stream import to_device
from satrap.device.direct_ids import RowRuns
from satrap.device.direct_rows import DirectEngine, are_numbered
from satrap.device.owned_rows import LookupTime, OwnedRows
from satrap.device.segments import JoinedIds
from satrap.device.table_shards import kind_of


def are_owned_direct(tables: Sequence[Table], device_memory: DeviceMemory) -> bool:
    """Return whether `DirectOwnedRows` can have the rows: `DirectEngine` can, all are on the devices, and each has one
    owner. Trainers that have the same rows count those that they own, which the core does."""
    return device_memory is None and are_numbered(tables) and all(kind_of(table) == "rows" for table in tables)


class DirectOwnedRows(OwnedRows):
    """The rows that this trainer has of each table with `num_rows`."""

    _engine: DirectEngine

    def look_up_received(self, received: NDArray[np.uint64], counts: NDArray[np.int64], at: LookupTime) -> list[Tensor]:
        joined = JoinedIds.join(received, counts, self._groups)
        with self._engine.exclusive(self._engine.no_counts):
            self._engine.begin_lookup(at.step, at.oldest_open, train=True, first_epoch=at.first_epoch)
            rows = self._rows(joined)
            runs = RowRuns.of(rows.int(), self._engine.numbers)
            self._engine.owe(lambda: partial(self._engine.heads.note_lookup, runs, at.step))
            lines = self._empty_lines(counts)
            for memory in self._engine.memories:
                out = lines[self._groups.numbers[memory.tables[0]]]
                for table in memory.tables:
                    of_table = slice(*joined.offsets[[table, table + 1]].tolist())
                    frames = self._engine.numbers.places_of(table, rows[of_table])
                    out[to_device(joined.lines[of_table], self.device)] = memory.values[frames]
            self._engine.moves.note_use()
            return lines

    def _rows(self, joined: JoinedIds) -> Tensor:
        """Return the number of each id's row."""
        tables, ids = (to_device(of_ids.astype(np.int64), self.device) for of_ids in (joined.tables(), joined.ids))
        return self._engine.numbers.rows_of(tables, ids)

    def _record(
        self,
        joined: JoinedIds,
        places: NDArray[np.int32],
        step: int,
        skips: bool,
        groups: list[UpdatedTables],
        flats: list[Tensor],
    ) -> Owed:
        self._engine.begin_update(step)
        rows = RowRuns.of(self._rows(joined).int(), self._engine.numbers)
        in_order = to_device(places, self.device)[rows.order]
        runs = self._engine.runs(rows, in_order, None, self.id_layout.alignment)
        return lambda: [
            partial(self._engine.step, self._kernels, rows, runs, group, flat)
            for group, flat in zip(groups, flats, strict=True)
        ]
