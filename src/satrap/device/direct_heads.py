"""What the core keeps of each row besides its numbers, for tables with `num_rows` whose rows are on a device: which ids
have a row, when each was last used, and the counters. It is on the device, so a step needs no work of the host for an
id, and none of its calls in a step waits.

Every id has its frame from the start, with the initial values of its row. A row that no lookup has used is not saved,
and `absent` decides what it reads as. A method that has the name of a method of the core's engine does what that one
does. The caller excludes other calls, and runs on the stream of the rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap import _core
from satrap.config.tables import Table
from satrap.device.device_stream import to_device, to_host
from satrap.device.direct_ids import RowNumbers, RowRuns, remainders_of, reversed_bits
from satrap.device.row_memory import what_is_free
from satrap.errors import CapacityError, InputError

_COUNTERS = ("lookups", "hits", "inserted", "updated", "skipped")
_BYTES = 8  # a row, for its stamp and version
_LARGEST_SIGNED = 2**31 - 1


class DirectHeads:
    """The stamp and version of each row; both are 0 if no lookup has used it."""

    def __init__(self, tables: Sequence[Table], core: _core.Engine, numbers: RowNumbers, device: torch.device) -> None:
        """core: knows the steps and versions; it has no rows."""
        self._tables, self._core, self._numbers, self._device = tables, core, numbers, device
        self._has_zeros = torch.tensor([table.absent == "zeros" for table in tables], device=device)
        self._reads_zeros = any(table.absent == "zeros" for table in tables)
        self._versions: tuple[list[int], Tensor] = ([], self._has_zeros)
        self.open(self._empty(0))

    def _empty(self, rows: int) -> tuple[Tensor, Tensor]:
        stamps, changed = (torch.zeros(rows + 1, dtype=torch.int32, device=self._device) for _ in range(2))
        return stamps, changed  # the last place takes what belongs to no row

    def open(self, memory: tuple[Tensor, Tensor]) -> None:
        """Use the memory that `allocate` returned, for rows that no lookup has used."""
        self._stamps, self._changed = memory
        self._counters = torch.zeros((len(_COUNTERS), len(self._tables)), dtype=torch.int64, device=self._device)

    @property
    def is_open(self) -> bool:
        """Whether there is memory for the rows."""
        return len(self._stamps) > 1

    def allocate(self, advice: str) -> tuple[Tensor, Tensor]:
        """Return memory for all rows; raise CapacityError if the device has none. advice: the end of the error."""
        rows = self._numbers.total
        try:
            return self._empty(rows)
        except RuntimeError as error:
            raise CapacityError(
                f"tables {', '.join(repr(table.name) for table in self._tables)}: {self._device} has no memory for the "
                f"stamps and versions of {rows} rows: expected {_BYTES * rows:,} bytes{what_is_free(self._device)}. "
                f"{advice}"
            ) from error

    # -- in a step -----------------------------------------------------------------------------------------------------

    def note_lookup(self, runs: RowRuns, step: int) -> None:
        """Stamp, mark and count the rows of a training lookup."""
        num_unique, num_new = runs.bounds.diff(), _by_table(runs, self._changed[runs.rows] == 0)
        counts = torch.stack([num_unique, num_unique - num_new, num_new])
        self._touch(runs.rows, runs.rows, step)
        self._counters[:3] += counts

    def note_update(self, runs: RowRuns, tables: range, step: int, num_summed: Tensor | None) -> None:
        """Stamp, mark and count the updated rows of some tables. num_summed: how many gradients of each run were not
        skipped; None: all."""
        begin, end = self._numbers.offsets[tables.start], self._numbers.offsets[tables.stop]
        is_updated = (runs.rows >= begin) & (runs.rows < end)
        if num_summed is not None:
            left_out = torch.where(is_updated, runs.end - runs.begin - num_summed, 0)
            self._counters[4] += _by_table(runs, left_out)
            is_updated &= num_summed > 0
        self._touch(torch.where(is_updated, runs.rows, self._numbers.total), runs.rows, step)
        self._counters[3] += _by_table(runs, is_updated)

    def places(self, places: Tensor, rows: Tensor) -> Tensor:
        """Return the places that a lookup without training reads: -1 for a row that no lookup has used, if `absent` of
        its table is "zeros". places, rows: the place and the number of each id's row, int32."""
        if not self._reads_zeros:
            return places
        at = torch.where(rows >= 0, rows.long(), self._numbers.total)
        reads_zeros = (rows >= 0) & self._has_zeros[self._numbers.tables_of(at)] & (self._changed[at] == 0)
        return torch.where(reads_zeros, -1, places)

    def _touch(self, at: Tensor, rows: Tensor, step: int) -> None:
        """Stamp rows, and mark them as changed. rows: the number of each run's row. at: the same, with the number of
        all rows in place of a row that stays as it is."""
        stamps = self._stamps[at]
        if self._core.latest_step <= _LARGEST_SIGNED:
            self._stamps[at] = stamps.clamp(min=step)
        else:
            numbers = _as_numbers(stamps).clamp(min=step)
            self._stamps[at] = torch.where(numbers > _LARGEST_SIGNED, numbers - (1 << 32), numbers).int()
        versions, on_device = self._current_versions()
        self._changed[at] = on_device[0] if len(set(versions)) == 1 else on_device[self._numbers.tables_of(rows)]

    def _current_versions(self) -> tuple[list[int], Tensor]:
        """Return the version of each table, here and as int32 bits on the device."""
        versions = [self._core.version(number) for number in range(len(self._tables))]
        if versions != self._versions[0]:
            self._versions = versions, to_device(np.array(versions, np.uint32).view(np.int32), self._device)
        return self._versions

    # -- as the core's engine ------------------------------------------------------------------------------------------

    def num_rows(self, table: int) -> int:
        """Return how many rows lookups have used. Waits for the device."""
        return int(torch.count_nonzero(self._of_table(self._changed, table)))

    def read_frames(self, table: int, ids: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return the frame of each id's row; -1: no lookup has used it."""
        self.require(table, ids)
        if not self.is_open:
            return np.full(len(ids), -1, np.int32)
        rows = self._rows(table, ids)
        is_used = (rows >= 0) & (self._changed[rows] != 0)
        return to_host(torch.where(is_used, self._numbers.places_of(table, rows), -1)).numpy()

    def export_rows(self, table: int, first: int, last: int, since: int) -> dict[str, NDArray[Any]]:
        """Return id, step and frame of the rows in some buckets that changed at this version or later, in the order of
        their hashes."""
        num_buckets = self._tables[table].resolved_num_buckets
        ids, steps, frames = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)], [np.empty(0, np.int32)]
        for remainder, rows in self._buckets(table, first, last):
            place = (_as_numbers(self._changed[rows]) >= max(1, since)).nonzero()[:, 0]
            frame = self._numbers.places_of(table, place * rows.step + rows.start)
            changed = to_host(torch.stack([place, _as_numbers(self._stamps[rows][place]), frame])).numpy()
            of_bucket = changed[0] * num_buckets + remainder
            order = np.argsort(reversed_bits(of_bucket.astype(np.uint64)))
            ids.append(of_bucket[order].astype(np.uint64))
            steps.append(changed[1][order].astype(np.uint32))
            frames.append(changed[2][order].astype(np.int32))
        return {"id": np.concatenate(ids), "step": np.concatenate(steps), "frame": np.concatenate(frames)}

    def export_cut(self, table: int, first: int, last: int, since: int) -> dict[str, Any]:
        """Return what `export_rows` does, with what the core adds for a cut: how many rows lookups have used, and the
        removed ids, of which there are none."""
        columns: dict[str, Any] = self._core.export_cut(table, first, last, since)
        used = [torch.count_nonzero(self._changed[rows]) for _, rows in self._buckets(table, first, last)]
        alive = int(torch.stack(used).sum()) if used else 0
        return columns | self.export_rows(table, first, last, since) | {"alive": alive}

    def _buckets(self, table: int, first: int, last: int) -> Iterator[tuple[int, slice]]:
        """Yield for each bucket, from `first` to before `last`, the remainder that its ids have by the number of
        buckets, and the numbers of its rows."""
        num_buckets = self._tables[table].resolved_num_buckets
        for remainder in remainders_of(np.arange(first, last, dtype=np.uint64), num_buckets).tolist():
            if self.is_open:
                yield remainder, self._numbers.of_bucket(table, remainder)

    def import_frames(self, table: int, ids: NDArray[np.uint64], steps: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Insert or replace rows of a snapshot; return their frames."""
        self.require(table, ids)
        rows = self._rows(table, ids)
        frames = to_host(torch.where(rows < 0, -1, self._numbers.places_of(table, rows))).numpy()
        assert (frames != -1).all(), "a row of a bucket that is not here"
        self._stamps[rows] = to_device(steps.view(np.int32).copy(), self._device)
        self._changed[rows] = self._current_versions()[1][table]
        return frames

    def stats(self, table: int) -> dict[str, int]:
        """Return the counts of a table, with the bytes of all its rows' heads."""
        counts: dict[str, int] = self._core.stats(table)
        counts |= dict(zip(_COUNTERS, self._counters[:, table].tolist(), strict=True))
        counts["rows"] = self.num_rows(table)
        counts["bytes"] += _BYTES * len(self._of_table(self._stamps, table))
        if "on_device" in counts:
            in_frames = self._of_table(self._changed, table)[: self._numbers.in_frames[table]]
            counts["on_device"] = int(torch.count_nonzero(in_frames))
        return counts

    def check(self, table: int) -> None:
        """Raise AssertionError if an invariant does not hold."""
        stamps, changed = (_as_numbers(self._of_table(each, table)) for each in (self._stamps, self._changed))
        assert bool((stamps[changed == 0] == 0).all()), "a row that no lookup has used has a stamp"
        assert bool((stamps <= self._core.latest_step).all()), "a row is stamped after the latest step"
        assert bool((changed <= self._core.version(table)).all()), "a row changed at a version that has not started"

    def _of_table(self, of_rows: Tensor, table: int) -> Tensor:
        return of_rows[self._numbers.offsets[table] : self._numbers.offsets[table + 1]] if self.is_open else of_rows[:0]

    def _rows(self, table: int, ids: NDArray[np.uint64]) -> Tensor:
        return self._numbers.rows_of(table, to_device(ids.astype(np.int64), self._device))

    def require(self, table: int, ids: NDArray[np.uint64]) -> None:
        """Raise InputError unless the table can have rows of these ids."""
        num_rows = self._tables[table].num_rows or 0
        if (outside := ids[ids >= num_rows]).size:
            raise InputError(
                f"table {self._tables[table].name!r}: id {outside[0]} is not below num_rows={num_rows}; expected ids "
                f"from 0 to {num_rows - 1}: raise num_rows, or leave it out if ids may be any 64-bit numbers"
            )


def _by_table(runs: RowRuns, amounts: Tensor) -> Tensor:
    """Return for each table the sum of the amounts of its runs."""
    sums = torch.cat([runs.bounds.new_zeros(1), amounts.cumsum(0)])[runs.bounds]
    return sums[1:] - sums[:-1]


def _as_numbers(bits: Tensor) -> Tensor:
    """Return unsigned numbers, which are stored as int32, as int64."""
    return bits.long() & 0xFFFFFFFF
