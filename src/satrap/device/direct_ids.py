"""The ids of a batch of tables with `num_rows`, on the device: the row of each id, and the runs of its update.

Nothing here waits for the device, and the host does no work for an id: ids are copied as they are, and a row is
computed from its id. What the core would refuse (an id that is out of range, offsets that fall, a weight that is not
finite) is found on the device too: then no id of the batch has a row, and a number says so. The update reads the number
where it waits for the gradients, and lets the core raise its error.

All rows of all tables are numbered, table after table. Ids are sorted by the number of their row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.tables import Table
from satrap.data.inputs import Inputs
from satrap.device.device_ids import IdEntries, IdLayout, KeptIds, bags_of
from satrap.device.device_stream import Mark, current_stream, to_device
from satrap.device.segments import TableGroups
from satrap.device.table_shards import Trainer, owned_buckets

MOST_ROWS = 2**31 - 2
"""Rows of all tables: they are numbered in int32."""
_IDS = (torch.int32, torch.int64, torch.uint64)
_NOT_HERE = -(2**62)
_AT_HOME = 2**31  # slot s at home is place s - 2**31


class Numbers(Protocol):
    """A numbering of the rows of some tables."""

    bounds: Tensor
    """int64: where the rows of each part begin, and where the last part ends. A part is a table, or some tables of one
    owner."""
    sizes: Tensor
    """The number of ids of each table, int64 [tables]."""

    def rows_of(self, tables: int | Tensor, ids: Tensor) -> Tensor:
        """Return the number of each id's row, int64; -1: the row is not here. tables: one table for all ids, or the
        table of each id."""


class RowNumbers(Numbers):
    """Numbers the rows of some tables that are in this process: table after table, in the order of their ids.

    A process with some buckets of a table has the ids with some remainders by the number of buckets. So the first ids
    of a table, often the hottest, are spread over all buckets and their owners, and have the first numbers at each
    owner."""

    def __init__(
        self,
        tables: Sequence[Table],
        memories: Sequence[Sequence[int]],
        device: torch.device,
        *,
        buckets: Sequence[NDArray[np.uint64]] | None = None,
        most_in_frames: Sequence[int | None] | None = None,
    ) -> None:
        """memories: for each memory, the tables whose rows it has.
        buckets: for each table, the buckets that are here; None: all of them.
        most_in_frames: for each table, how many rows have frames: the rows of its first ids. None: all rows
            have frames. The other rows are at home."""
        self._has_all = buckets is None
        divisors = [table.resolved_num_buckets for table in tables]
        self._remainders = [
            np.arange(divisor) if buckets is None else np.sort(remainders_of(buckets[number], divisor))
            for number, divisor in enumerate(divisors)
        ]
        counts = [num_with(table, here) for table, here in zip(tables, self._remainders, strict=True)]
        self.offsets = [0, *accumulate(counts)]
        """Where the rows of each table begin, and where the last end."""
        self.total = self.offsets[-1]
        first_remainders = [0, *accumulate(divisors)]
        self.by_remainder = np.stack([np.full(first_remainders[-1], _NOT_HERE), np.zeros(first_remainders[-1], int)])
        """int64 [2, remainders of all tables]: the number of the first row with a remainder (far below 0: no row with
        it is here), and the distance from each of its rows to the next."""
        for first, begin, here in zip(first_remainders, self.offsets, self._remainders, strict=False):
            self.by_remainder[:, first + here] = begin + np.arange(len(here)), np.full(len(here), len(here))
        limits = [None] * len(tables) if most_in_frames is None else most_in_frames
        self.in_frames = [
            count if most is None else min(most, count) for count, most in zip(counts, limits, strict=True)
        ]
        """How many rows of each table have frames."""
        self.first_frames, self._first_slots = [0] * len(tables), [0] * len(tables)
        pools = [0] * len(tables)
        for pool, numbers in enumerate(memories):
            frame = slot = 0
            for number in numbers:
                self.first_frames[number], self._first_slots[number], pools[number] = frame, slot, pool
                frame += self.in_frames[number]
                slot += self.num_at_home(number)
        self.bounds = torch.tensor(self.offsets, device=device)
        self._places = torch.tensor(
            [self.offsets[:-1], self.in_frames, self.first_frames, self._first_slots], device=device
        )
        self.pools = torch.tensor(pools, device=device)
        """The memory of each table, int64 [tables]."""
        self.has_home = any(map(self.num_at_home, range(len(tables))))
        """Whether some rows have no frame: they are at home."""
        self._are_frames = not self.has_home and self.first_frames == self.offsets[:-1]
        self.sizes = torch.tensor([table.num_rows or 0 for table in tables], device=device)
        self.by_table = torch.tensor([divisors, first_remainders[:-1]], device=device)
        """The number of buckets of each table, and where its part of `by_remainder` begins."""
        self._on_device = torch.from_numpy(self.by_remainder).to(device)
        lengths = [max(1, len(here)) for here in self._remainders]
        self._ids_by_table = torch.tensor([lengths, [0, *accumulate(map(len, self._remainders))][:-1]], device=device)
        self._all_remainders = torch.from_numpy(np.concatenate([*self._remainders, [0]])).to(device)

    def num_here(self, table: int) -> int:
        """Return how many rows of a table are here."""
        return self.offsets[table + 1] - self.offsets[table]

    def rows_of(self, tables: int | Tensor, ids: Tensor) -> Tensor:
        if self._has_all:
            return self.bounds[tables] + ids
        return rows_by_remainder(self.by_table, self._on_device, tables, ids)

    def tables_of(self, rows: Tensor) -> Tensor:
        """Return the table of each row. The number of all rows, which stands for no row, gets a table without
        meaning."""
        return torch.bucketize(rows, self.bounds[1:], right=True).clamp(max=len(self.sizes) - 1)

    def ids_of(self, rows: Tensor) -> Tensor:
        """Return the id of each row, int64. The number of all rows, which stands for no row, gets an id without
        meaning."""
        tables = self.tables_of(rows)
        numbers = rows - self.bounds[tables]
        if self._has_all:
            return numbers
        length, first = self._ids_by_table[:, tables].unbind()
        return numbers // length * self.by_table[0, tables] + self._all_remainders[first + numbers % length]

    def num_at_home(self, table: int) -> int:
        """Return how many rows of a table are at home."""
        return self.num_here(table) - self.in_frames[table]

    def places_of(self, tables: int | Tensor, rows: Tensor) -> Tensor:
        """Return the place of each row, int32: a frame, or a negative number for a slot at home. tables: one table
        for all rows, or the table of each row."""
        if self._are_frames:
            return rows.int()
        begin, in_frames, first_frame, first_slot = self._places[:, tables].unbind()
        number = rows - begin
        if not self.has_home:
            return (number + first_frame).int()
        at_home = number - in_frames + first_slot - _AT_HOME
        return torch.where(number < in_frames, number + first_frame, at_home).int()

    def places(self, rows: Tensor) -> Tensor:
        """Return the place of each row, as `places_of` does. Finds the tables of the rows itself, if it needs them."""
        return rows.int() if self._are_frames else self.places_of(self.tables_of(rows), rows)

    def shift(self, table: int) -> int:
        """Return how far the frame of a row is from its number: as far for all rows of a table that have frames."""
        return self.first_frames[table] - self.offsets[table]

    def of_bucket(self, table: int, remainder: int) -> slice:
        """Return the numbers of one bucket's rows, in the order of their ids; no numbers if the bucket is not here.
        remainder: the one that the ids of the bucket have by the number of buckets."""
        (begin, end), here = self.offsets[table : table + 2], self._remainders[table]
        at = int(np.searchsorted(here, remainder))
        is_here = at < len(here) and here[at] == remainder
        return slice(min(begin + at, end), end, len(here)) if is_here else slice(begin, begin, 1)


def rows_by_remainder(by_table: Tensor, by_remainder: Tensor, tables: int | Tensor, ids: Tensor) -> Tensor:
    """Return the number of each id's row, or -1. by_table: for each table its number of buckets, and where its
    remainders begin in `by_remainder`. by_remainder: for each remainder the number of its first row, and the distance
    from each of its rows to the next."""
    divisor, first = by_table[:, tables].unbind()
    begin, step = by_remainder[:, first + ids % divisor].unbind()
    return (begin + ids // divisor * step).clamp(min=-1)


def num_with(table: Table, remainders: NDArray[Any]) -> int:
    """Return how many of a table's ids have one of these remainders by its number of buckets."""
    each, left = divmod(table.num_rows or 0, table.resolved_num_buckets)
    return each * len(remainders) + int((remainders < left).sum())


def remainders_of(buckets: NDArray[np.uint64], num_buckets: int) -> NDArray[np.int64]:
    """Return for each bucket the remainder of its ids by the number of buckets: the bits of the bucket in reverse."""
    return (reversed_bits(buckets) >> np.uint64(65 - num_buckets.bit_length())).astype(np.int64)


def reversed_bits(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return numbers with their 64 bits in reverse order: the hash of an id of a direct table."""
    by_byte = np.ascontiguousarray(_REVERSED[numbers.view(np.uint8).reshape(-1, 8)[:, ::-1]])
    return by_byte.view(np.uint64).reshape(-1)


_REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)[:, ::-1], axis=1)[:, 0]


class OwnerNumbers(Numbers):
    """Numbers the rows of all trainers, for tables that they divide by rows: trainer after trainer, and for each
    trainer in the order of its `RowNumbers`. The numbers travel between trainers in place of tables and ids. Ids that
    are sorted by them are sorted by owner, and for an owner by group, table and row."""

    def __init__(self, tables: Sequence[Table], groups: TableGroups, world_size: int, device: torch.device) -> None:
        """groups: groups of neighbouring tables. Each part of `bounds` is one group at one owner."""
        owners = [
            RowNumbers(tables, [], device, buckets=owned_buckets(tables, Trainer(rank, world_size)))
            for rank in range(world_size)
        ]
        self.begins = [0, *accumulate(owner.total for owner in owners)]
        """Where the rows of each trainer begin, and where the last end."""
        by_remainder = owners[0].by_remainder.copy()
        for owner, begin in zip(owners, self.begins, strict=False):
            is_here = owner.by_remainder[1] > 0
            by_remainder[:, is_here] = owner.by_remainder[:, is_here] + np.array([[begin], [0]])
        bounds = [
            begin + owner.offsets[of_group[0]]
            for owner, begin in zip(owners, self.begins, strict=False)
            for of_group in groups.tables
        ]
        self.bounds = torch.tensor([*bounds, self.begins[-1]], device=device)
        self.sizes, self._by_table = owners[0].sizes, owners[0].by_table
        self._by_remainder = torch.from_numpy(by_remainder).to(device)

    def rows_of(self, tables: int | Tensor, ids: Tensor) -> Tensor:
        return rows_by_remainder(self._by_table, self._by_remainder, tables, ids)


@dataclass(frozen=True, slots=True, eq=False)
class RowRuns:
    """The entries of a batch, sorted by row: a run is the entries of one row. There are as many runs as entries, since
    only the device knows how many are not empty; the empty ones come last."""

    rows: Tensor
    """int64 [entries]: the number of each run's row, rising; for an empty run the number of all rows."""
    begin: Tensor
    """int32 [entries]: where each run begins in `order`."""
    end: Tensor
    """int32 [entries]."""
    order: Tensor
    """int64 [entries]: first the entries without a row, then the others row by row, in order of appearance within a
    row."""
    bounds: Tensor
    """int64: where the runs of each part of `Numbers.bounds` begin, and where the last end."""

    @classmethod
    def of(cls, rows: Tensor, numbers: Numbers) -> Self:
        """Sort entries. rows: int32, the number of each entry's row; -1: it has none."""
        n = len(rows)
        in_order, order = torch.sort(rows, stable=True)
        is_first = in_order >= 0
        is_first[1:] &= in_order[1:] != in_order[:-1]
        run = torch.where(is_first, is_first.cumsum(0) - 1, n + 1)  # the last place takes what begins no run
        starts = torch.full((n + 2,), n, device=rows.device)
        starts.scatter_(0, run, torch.arange(n, device=rows.device))
        by_run = torch.cat([in_order.long(), numbers.bounds[-1:]])[starts[:n]]
        bounds = torch.searchsorted(by_run, numbers.bounds)
        return cls(by_run, starts[:n].int(), starts[1 : n + 1].int(), order, bounds)

    def of_entries(self) -> Tensor:
        """Return the run of each entry, int64. An entry without a row gets a run without meaning."""
        n = len(self.order)
        is_first = self.order.new_zeros(n + 1).scatter_(0, self.begin.long(), 1)  # the last place takes empty runs
        runs = (is_first[:n].cumsum(0) - 1).clamp(min=0)
        return torch.empty_like(runs).scatter_(0, self.order, runs)


@dataclass(frozen=True, slots=True, eq=False)
class DirectIds(IdEntries):
    """The ids of one batch, on a device. Padding, and the ids that sequences cut off, lie behind the last bag and have
    no row."""

    values: Tensor
    """int64, as bit patterns: feature after feature, and sample after sample."""
    offsets: Tensor | None
    """int64 [bags + 1]; None: each bag has one id."""
    weights: Tensor | None
    """float32, of each id."""
    batch_size: int
    rows: Tensor
    """int32 [ids]: the number of each id's row; -1: it has none."""
    tables: Tensor
    """int64 [ids]: the table of each id; without meaning for an id that has no row."""
    cut: Tensor
    """int64 [sequences]: the number of ids beyond the max_length of each."""
    verdict: tuple[Tensor, Mark]
    """float64 [2], valid at the mark: whether the core refuses the batch, and the largest magnitude of a weight, at
    least 1."""
    given: Inputs
    """The batch as it was given."""

    @classmethod
    def of(cls, layout: IdLayout, numbers: Numbers, inputs: Inputs, device: torch.device) -> Self | None:
        """Place the ids of a batch. Return None if a part has another dtype or size than expected."""
        parts = values, offsets, weights = [
            _on_device(part, device) for part in (inputs.values, inputs.offsets, inputs.weights)
        ]
        num_bags = len(layout.tables) * inputs.batch_size
        dtypes = (_IDS, (torch.int64,), (torch.float32,))
        if any(not _is_list(part, of) for part, of in zip(parts, dtypes, strict=True)) or values is None:
            return None
        has_size = (len(values) if offsets is None else len(offsets) - 1) == num_bags
        if not has_size or (weights is None) == layout.any_weighted:
            return None
        if weights is not None and len(weights) != len(values):
            return None
        return cls._placed(layout, numbers, inputs, values, offsets, weights)

    @classmethod
    def _placed(
        cls,
        layout: IdLayout,
        numbers: Numbers,
        inputs: Inputs,
        values: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
    ) -> Self:
        n, batch_size, device = len(values), inputs.batch_size, values.device
        values = values.view(torch.int64) if values.dtype == torch.uint64 else values
        values = values.to(torch.int64, copy=True)  # the caller may use the memory of its ids again
        at = torch.arange(n, device=device)
        bounds = torch.arange(n + 1, device=device) if offsets is None else offsets
        bag = at if offsets is None else bags_of(bounds, n)
        feature, is_id = bag // max(1, batch_size), None
        cut = torch.zeros(len(layout.sequences), dtype=torch.int64)
        is_refused = torch.zeros((), dtype=torch.bool, device=device)
        if offsets is not None:
            is_refused = (bounds[0] != 0) | (bounds[-1] != n) | (bounds[1:] < bounds[:-1]).any()
        if layout.any_padding or (offsets is not None and layout.sequences):
            kept = KeptIds.of(layout, values, bounds, feature, batch_size)
            cut, stays, offsets = kept.beyond(layout)[layout.sequences], kept.stays(bag), kept.offsets()
            place, is_id = torch.where(stays, stays.cumsum(0) - 1, n), at < offsets[-1]
            values, feature = (_moved(part, place) for part in (values, feature))
            weights = None if weights is None else _moved(weights, place)
        table = layout.tables[feature]
        is_outside = (values < 0) | (values >= numbers.sizes[table])
        is_refused = is_refused | (is_outside if is_id is None else is_outside & is_id).any()
        largest = torch.ones((), dtype=torch.float64, device=device)
        if layout.any_weighted and weights is not None:
            counted = torch.where(layout.is_weighted[feature], weights.abs(), 1.0)
            largest = torch.cat([counted, counted.new_ones(1)]).max().double()
            is_refused = is_refused | ~largest.isfinite()
            weights = torch.where(is_refused, 0.0, weights)
        has_row = ~(is_outside | is_refused) if is_id is None else is_id & ~(is_outside | is_refused)
        rows = torch.where(has_row, numbers.rows_of(table, values), -1).int()
        offsets = None if offsets is None else torch.where(is_refused, 0, offsets)
        verdict = current_stream(device).download(torch.stack([is_refused.double(), largest]))
        return cls(values, offsets, weights, batch_size, rows, table, cut, verdict, inputs)

    @property
    def is_refused(self) -> bool:
        """Whether the core refuses the batch. Waits until the device has placed the ids."""
        self.verdict[1].synchronize()
        return bool(self.verdict[0][0])

    @property
    def largest_weight(self) -> float:
        """The largest magnitude of a weight, at least 1. Waits as `is_refused`."""
        self.verdict[1].synchronize()
        return float(self.verdict[0][1])

    def on_cpu(self) -> tuple[NDArray[np.uint64], NDArray[np.int64] | None, NDArray[np.float32] | None]:
        values, offsets, weights = super(DirectIds, self).on_cpu()
        end = len(values) if offsets is None else int(offsets[-1])
        return values[:end], offsets, None if weights is None else weights[:end]

    def cut_counts(self) -> list[int]:
        return self.cut.tolist() if len(self.cut) else []  # waits for the device, if it counts them


def _moved(entries: Tensor, place: Tensor) -> Tensor:
    """Return the entries at their places, with zeros elsewhere. place: of each entry; the number of entries if the
    entry is left out."""
    return entries.new_zeros(len(entries) + 1).scatter_(0, place, entries)[:-1]


def _on_device(part: Any, device: torch.device) -> Tensor | None:
    """Return a part of a batch on the device. The calling thread does not wait for a copy."""
    if isinstance(part, np.ndarray) and part.dtype.kind in "iuf":
        part = np.require(part, requirements=("C", "A", "W"))
        is_wide = part.dtype.kind in "iu" and part.itemsize == 8
        part = to_device(part.view(np.int64) if is_wide else part, device)  # torch refuses NumPy's ulonglong
    return part.detach().contiguous() if isinstance(part, Tensor) and part.device == device else part


def _is_list(part: object, dtypes: Sequence[torch.dtype]) -> bool:
    return part is None or (isinstance(part, Tensor) and part.ndim == 1 and part.dtype in dtypes)
