"""Rows on a device of tables with `num_rows`: the frame of an id is computed from the id, so no directory is asked, and
a step does no work of the host for an id.

`DirectEngine` has the rows and their heads, and keeps an engine of the core that has no rows: it numbers steps and
versions, and raises the errors about batches. `DirectRows` looks up and updates. What a step does on the device depends
on nothing that the host would have to wait for, but the one number that the update waits for anyway: whether the
gradients are finite. Where all tables leave out those that are not (`on_nonfinite="skip"`), the kernels look at each
gradient as they add it, and nothing else reads the gradients. All rows have their initial values from the start.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.features import Features
from satrap.config.tables import Table
from satrap.data.inputs import Inputs
from satrap.device.cold_rows import ColdRows, places_read
from satrap.device.device_engine import DeviceEngine, PendingWork
from satrap.device.device_ids import IdEntries
from satrap.device.device_memory import DeviceMemory, shares_of
from satrap.device.device_rows import LARGEST, DeviceRows, UpdatedTables, claim, largest_of
from satrap.device.device_stream import to_device
from satrap.device.direct_batches import Check, DirectBatches, DirectTicket, refusal, require_direct_sizes
from satrap.device.direct_heads import DirectHeads
from satrap.device.direct_ids import MOST_ROWS, DirectIds, RowNumbers, RowRuns, num_with, remainders_of
from satrap.device.exact import mix_keys, signed
from satrap.device.row_memory import RowMemory
from satrap.device.runs import Runs, flat_gradients, given_parts
from satrap.device.table_shards import owned_buckets
from satrap.device.torch_device import initialise_of
from satrap.table.engine import Slot, slots_of
from satrap.worker.rows import BagRequest, Ids, UpdateRequest, empty_by_table, id_request

_NUMBERS_AT_ONCE = 1 << 22  # most floats that one call initialises: it bounds the memory of the call
_NO_IDS = np.empty(0, np.uint64)
_ADVICE = (
    "A table with num_rows has memory for all of its rows: give {} device_memory, or leave num_rows out if few of the "
    "ids are used, or use a smaller dtype or dim"
)


def are_numbered(tables: Sequence[Table]) -> bool:
    """Return whether `DirectEngine` can have the rows: all tables have `num_rows`."""
    sizes = [table.num_rows for table in tables]
    return None not in sizes and sum(size or 0 for size in sizes) <= MOST_ROWS


def are_direct(features: Features) -> bool:
    """Return whether `DirectRows` can have the rows: `DirectEngine` can, and no sequence is jagged, so that the sizes
    of a batch's rows are known here."""
    is_padded = not any(feature.jagged or feature.aligned_with is not None for feature in features.values())
    return is_padded and are_numbered(features.tables)


def _frozen_bounds(tables: Sequence[Table], first_ids: Sequence[int]) -> NDArray[np.int64]:
    """Return where each range of frozen ids begins and ends, in rising order: an id is frozen if an odd number of these
    bounds are not above it.

    first_ids: what is added to the ids of each table, so that the ids of all tables follow one another."""
    bounds = []
    for table, first in zip(tables, first_ids, strict=True):
        frozen, size = table.frozen_ids, table.num_rows or 0
        if isinstance(frozen, range):
            begins, ends = np.array([min(frozen.start, size)]), np.array([min(frozen.stop, size)])
        else:
            ids = frozen.ids.astype(np.int64)
            gaps = np.flatnonzero(np.diff(ids) != 1)
            begins, ends = ids[np.append(0, gaps + 1)], ids[np.append(gaps, -1)] + 1
        bounds.append(first + np.stack([begins, ends], 1).reshape(-1))
    return np.concatenate(bounds)


class DirectEngine(DeviceEngine):
    """The rows of some tables with `num_rows`."""

    def __init__(self, tables: Sequence[Table], device: torch.device, **options: Any) -> None:
        super().__init__(tables, device, **options)
        with self.stream.joined():
            buckets = owned_buckets(tables, self._trainer) if self._trainer.world_size > 1 else None
            most = self._most_in_frames(options.get("device_memory"))
            memories = [memory.tables for memory in self.memories]
            self.numbers = RowNumbers(tables, memories, device, buckets=buckets, most_in_frames=most)
            self.directory = self.heads = DirectHeads(tables, self.core, self.numbers, device)
            self.row_keys = torch.tensor([initial.key for initial in self._initial], device=device)
            """The key of each table, from which its rows draw their random numbers."""
            first_ids = [0, *accumulate(table.num_rows or 0 for table in tables[:-1])]
            bounds = _frozen_bounds(tables, first_ids)
            self._frozen = torch.from_numpy(bounds).to(device) if (bounds[1::2] > bounds[::2]).any() else None
            self._first_ids = torch.tensor(first_ids, device=device)
        self.no_counts = np.zeros(len(tables), np.int64)
        """How many rows a call may insert into each table: none, since all rows exist from the start. A call passes
        these counts so that the engine allocates the rows before the first use."""

    def slots(self, seed: int) -> list[Slot]:
        return slots_of(self.core, self.tables, seed, self, _HeadsOfEngine(self))

    def _most_rows(self) -> list[int | None]:
        if self._trainer.world_size == 1:
            return [table.num_rows for table in self.tables]
        buckets = owned_buckets(self.tables, self._trainer)
        return [
            num_with(table, remainders_of(of_table, table.resolved_num_buckets))
            for table, of_table in zip(self.tables, buckets, strict=True)
        ]

    def _most_in_frames(self, device_memory: DeviceMemory) -> list[int | None]:
        """Return how many rows of each table have frames; None: all."""
        row_bytes = [self.memory(number).layout.row_bytes for number in range(len(self.tables))]
        shares = shares_of(self.tables, row_bytes, device_memory, self._most_rows())
        sizes = [share.size for share in shares]
        return [None if size is None else size // of_row for size, of_row in zip(sizes, row_bytes, strict=True)]

    def _keep_reserve(self) -> None:
        """Allocate nothing: all rows have memory."""

    def _reserve(self, counts: NDArray[np.int64]) -> Callable[[], None] | None:
        """Allocate the memory of all rows, and write their initial values, once."""
        if self.heads.is_open:
            return None
        advice = _ADVICE.format("(less)")
        for memory in self.memories:
            names = [self.tables[number].name for number in memory.tables]
            if memory.home is not None:
                slots = sum(map(self.numbers.num_at_home, memory.tables))
                if num_missing := memory.home.grow(slots):
                    return partial(memory.home.allocate, num_missing, names, _ADVICE.format("more"))
            memory.reserve(sum(self.numbers.in_frames[number] for number in memory.tables), names, advice)
        heads = self.heads.allocate(advice)
        self.perform(lambda: self._open(heads))
        return None

    def _open(self, heads: tuple[Tensor, Tensor]) -> PendingWork:
        self.heads.open(heads)
        return lambda: [
            partial(self.restart, table, *part) for table in range(len(self.tables)) for part in self._parts(table)
        ]

    def _parts(self, table: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of a table's rows, that are all in frames or all at home."""
        size = max(1, _NUMBERS_AT_ONCE // self.tables[table].dim)
        first, last = self.numbers.offsets[table : table + 2]
        middle = first + self.numbers.in_frames[table]
        for start, stop in ((first, middle), (middle, last)):
            yield from ((begin, min(begin + size, stop)) for begin in range(start, stop, size))

    def restart(self, table: int, begin: int, end: int) -> None:
        """Write the initial values and states of some rows. begin, end: the range of their numbers."""
        memory, rows = self.memory(table), torch.arange(begin, end, device=self.device)
        ids, initialise = self.numbers.ids_of(rows), initialise_of(self.device)
        if begin < self.numbers.offsets[table] + self.numbers.in_frames[table]:
            frames = self.numbers.places_of(table, rows)
            initialise(memory.values, memory.state, frames, ids, self._initial[table], memory.layout)
            return
        places = self.numbers.places_of(table, rows)
        cold = ColdRows.of(memory, places, torch.ones_like(rows, dtype=torch.bool))
        copies = memory.staging(end - begin)
        initialise(copies.values, copies.state, cold.lines, ids, self._initial[table], memory.layout)
        cold.write(copies)

    def begin_lookup(self, step: int, oldest_open: int, *, train: bool, first_epoch: bool) -> dict[str, Any]:
        """Let the core begin a lookup; return what it returns for a lookup without ids."""
        offsets, none = np.zeros(len(self.tables) + 1, np.int64), np.empty(0, np.int32)
        return self.core.lookup_id_frames(_NO_IDS, offsets, step, oldest_open, train, none, first_epoch)

    def begin_update(self, step: int) -> None:
        """Let the core begin an update."""
        offsets = np.zeros(len(self.tables) + 1, np.int64)
        self.core.update_id_frames(_NO_IDS, offsets, np.empty(0, np.int32), step, False)

    def runs(self, rows: RowRuns, places: Tensor, factors: Tensor | None, alignment: int) -> Runs:
        """Return what the kernel of an update takes, but with the number of each run's row in place of its frame.
        places, factors: in the order of the runs. alignment: every place is a multiple of it."""
        keys = None
        if any(table.dtype != "float32" for table in self.tables):
            row_keys = self.row_keys[self.numbers.tables_of(rows.rows)]
            keys = mix_keys(row_keys ^ mix_keys(self.numbers.ids_of(rows.rows) ^ signed(0x9E3779B97F4A7C15)))
        return Runs(
            frames=rows.rows,
            begin=rows.begin,
            end=rows.end,
            places=places,
            factors=factors,
            keys=keys,
            tables=(0, len(rows.rows)),
            alignment=alignment,
        )

    def trained(self, runs: RowRuns) -> RowRuns:
        """Return the runs of an update without those of frozen rows."""
        if self._frozen is None:
            return runs
        ids = self._first_ids[self.numbers.tables_of(runs.rows)] + self.numbers.ids_of(runs.rows)
        is_frozen = torch.searchsorted(self._frozen, ids, right=True) % 2 == 1
        return replace(runs, rows=torch.where(is_frozen, self.numbers.total, runs.rows))

    def step(
        self, kernels: Any, rows: RowRuns, runs: Runs, group: UpdatedTables, flat: Tensor
    ) -> Sequence[PendingWork]:
        """Sum the gradients of some tables' rows, and apply their optimizer. runs: what `runs` returned for `rows`."""
        (tables, how), numbers, memory = group, self.numbers, self.memory(group[0].start)
        begin, end = numbers.offsets[tables.start], numbers.offsets[tables.stop]
        has_all = end - begin == numbers.total and memory.home is None
        is_here = (rows.rows >= begin) & (rows.rows < end)
        places = rows.rows + numbers.shift(tables.start)
        if memory.home is not None:
            places = numbers.places(rows.rows)
        has_frame = is_here if memory.home is None else is_here & (places >= 0)
        ends = runs.end if has_all else torch.where(has_frame, runs.end, runs.begin)
        in_frames = replace(runs, frames=torch.where(has_frame, places, -1).int(), end=ends)
        cold = None if memory.home is None else ColdRows.of(memory, places, is_here)
        summed = kernels.update(memory.values, memory.state, in_frames, flat, how)
        if cold is None:
            return [partial(self.heads.note_update, rows, tables, how.step, summed)]
        return [partial(self._step_at_home, kernels, rows, runs, group, flat, cold, summed)]

    def _step_at_home(
        self,
        kernels: Any,
        rows: RowRuns,
        runs: Runs,
        group: UpdatedTables,
        flat: Tensor,
        cold: ColdRows,
        in_frames: Tensor | None,
    ) -> Sequence[PendingWork]:
        """Do what `step` does with the rows at home: update copies on the device, and write them back. in_frames: how
        many gradients of each run were summed for rows in frames; None: none may be skipped."""
        tables, how = group
        copies = cold.read(with_state=True)
        runs = replace(runs, frames=cold.lines, end=torch.where(cold.lines >= 0, runs.end, runs.begin))
        summed = kernels.update(copies.values, copies.state, runs, flat, how)
        cold.write(copies)
        summed = None if summed is None or in_frames is None else summed + in_frames
        return [partial(self.heads.note_update, rows, tables, how.step, summed)]

    def place_rows(self) -> None:
        """Do the pending work of a call that ended early. There are no rows to place."""
        self.perform(lambda: lambda: None)

    def stats(self, table: int) -> dict[str, int]:
        """Return the counts of a table. Its bytes include the rows that no lookup has used, since they have memory."""
        with self.exclusive():
            counts = super().stats(table)
            if self.heads.is_open:
                num_unused = self.numbers.num_here(table) - counts["rows"]
                counts["bytes"] += num_unused * self.memory(table).layout.row_bytes
        return counts

    def check(self, table: int) -> None:
        self.core.check(table)
        with self.exclusive():
            self.heads.check(table)


class _HeadsOfEngine:
    """The heads for calls between steps. Implements `satrap.table.engine.Directory`."""

    def __init__(self, engine: DirectEngine) -> None:
        self._engine = engine

    def num_rows(self, table: int) -> int:
        with self._engine.exclusive():
            return self._engine.heads.num_rows(table)

    def export_rows(self, table: int, first: int, last: int, since: int) -> dict[str, NDArray[Any]]:
        with self._engine.exclusive():
            return self._engine.heads.export_rows(table, first, last, since)


class DirectRows(DeviceRows):
    """Implements `satrap.worker.rows.Rows` for tables with `num_rows` on a device."""

    _engine: DirectEngine

    def use(self, engine: DeviceEngine) -> None:
        super().use(engine)
        self.checks_in_update = all(table.on_nonfinite == "skip" for table in self._tables)
        with engine.stream.joined():
            self._batches = DirectBatches(self._features, self.id_layout, self._engine.numbers, self.device)

    @property
    def truncated(self) -> list[int]:
        with self._engine.exclusive():
            return self._batches.num_cut

    def place_ids(self, inputs: Inputs, *, train: bool) -> Inputs | IdEntries:
        return self._batches.place(inputs)

    def lookup(self, request: BagRequest, block: Tensor, sequences: list[Tensor]) -> Any:
        ids, ticket = request.values, super().lookup(request, block, sequences)
        if not request.train and isinstance(ids, DirectIds) and ids.is_refused:
            raise refusal(ids, self._check_arrays(self._bags))
        return ticket

    def look_up(self, ids: Mapping[str, Ids], step: int, oldest_open: int) -> dict[str, Tensor]:
        in_order = [(number, ids[table.name]) for number, table in enumerate(self._tables) if table.name in ids]
        for number, of_table in in_order:
            self._engine.heads.require(number, of_table)
        by_table, numbers = empty_by_table(self, ids, self._id_features), self._engine.numbers
        request = id_request(self._id_features, ids, step, oldest_open)
        with self._engine.exclusive(self._engine.no_counts):
            resolved = self._engine.begin_lookup(step, oldest_open, train=True, first_epoch=True)
            rows, places = [], []
            for number, of_table in in_order:
                rows.append(numbers.rows_of(number, to_device(of_table.astype(np.int64), self.device)))
                places.append(numbers.places_of(number, rows[-1]))
            runs = RowRuns.of(torch.cat(rows).int(), numbers)
            self._engine.perform(lambda: partial(self._engine.heads.note_lookup, runs, step))
            resolved |= self._read_places(torch.cat(places), runs) | {"offsets": request.offsets, "weights": None}
            self._gather(request, resolved, self.empty(1, 0), list(by_table.values()))
            self._engine.moves.note_use()
        return {name: by_table[name] for name in ids}

    def id_ticket(self, ids: Mapping[str, Ids]) -> DirectTicket:
        request = id_request(self._id_features, ids, None, None)
        with self._engine.exclusive(self._engine.no_counts):
            placed = self._batches.place_arrays(request, self._check_arrays(self._id_bags))
            return self._batches.ticket(placed, self._id_bags, self._batches.layout_of(request))

    def update(self, request: UpdateRequest) -> None:
        given = given_parts(request)
        scale = float(np.float32(request.scale))
        require_direct_sizes(request.tickets, request)
        with self._engine.in_order():
            flat, tickets = flat_gradients(request, self.empty(0, 0)), claim(request.tickets)
            skips = self.checks_in_update
            # The one wait; what is read next was computed before.
            largest = 0.0 if skips else largest_of(request)
            for ticket in tickets:
                if ticket.ids.is_refused:
                    raise refusal(ticket.ids, self._check_arrays(ticket.bags))
            if not largest * abs(scale) * sum(ticket.bound for ticket in tickets) < LARGEST:
                as_core = [self._as_core(ticket) for ticket in tickets]
                skips = self._check(replace(request, tickets=as_core), scale)
            rows, places, factors = self._batches.gradients(tickets, given)
            rows = self._engine.trained(rows)
            groups = list(self._fused_tables(dict(request.lrs), scale, request.step, skips=skips))

            def record() -> PendingWork:
                self._engine.begin_update(request.step)
                for ticket in tickets:
                    ticket.used = True
                runs = self._engine.runs(rows, places, factors, self.id_layout.alignment)
                return lambda: [partial(self._engine.step, self._kernels, rows, runs, group, flat) for group in groups]

            self._engine.perform(record)

    # -- lookup --------------------------------------------------------------------------------------------------------

    def _counts(self, request: BagRequest) -> NDArray[np.int64]:
        return self._engine.no_counts

    def _find_frames(self, request: BagRequest) -> dict[str, Any]:
        """Return what a lookup needs. For training, also sort the ids and stamp their rows."""
        ids, (_, bags) = request.values, self._asked(request)
        if not isinstance(ids, DirectIds):
            ids = self._batches.place_arrays(request, self._check_arrays(bags))
        step, oldest = request.step or 0, request.oldest_open or 0
        resolved = self._engine.begin_lookup(step, oldest, train=request.train, first_epoch=request.first_epoch)
        if not request.of_tables:  # ids by table are not cut
            self._batches.count_cut(ids)
        needed = {**resolved, "offsets": ids.offsets, "weights": ids.weights, "moved": None, "ticket": None}
        places = torch.where(ids.rows >= 0, self._engine.numbers.places_of(ids.tables, ids.rows), -1)
        if not request.train:
            return needed | self._read_places(self._engine.heads.places(places, ids.rows), ids.rows)
        ticket = self._batches.ticket(ids, bags, self._batches.layout_of(request))
        at = step or self._engine.core.latest_step
        self._engine.perform(lambda: partial(self._engine.heads.note_lookup, ticket.runs, at))
        return needed | self._read_places(places, ticket.runs) | {"ticket": ticket}

    def _read_places(self, places: Tensor, rows: RowRuns | Tensor) -> dict[str, Any]:
        """Return the places of ids as `_gather` takes them. rows: the number of each id's row, or the runs of the
        ids."""
        engine = self._engine
        if not engine.numbers.has_home:
            return {"frames": places}
        runs = rows if isinstance(rows, RowRuns) else RowRuns.of(rows, engine.numbers)
        cold = ColdRows.of_all(engine.memories, runs.rows, engine.numbers)
        return {"frames": places_read(places, runs, list(cold.values())), "cold": cold}

    def _absent(self, resolved: dict[str, Any], memory: RowMemory) -> Tensor:
        if memory.home is None:
            return super()._absent(resolved, memory)
        cold: ColdRows = resolved["cold"][self._engine.memories.index(memory)]
        return cold.read(with_state=False).values.float()

    def _check_arrays(self, bags: Any) -> Check:
        return partial(self._engine.core.bag_ticket, bags)
