"""Rows on a device, with tensors in place of arrays.

The core finds the frame of each id and keeps everything else that a row has but its numbers. Lookups and updates run on
the device in the order in which this object is called, which is what makes a frame safe to reuse: the row that a lookup
puts into it comes after every earlier use.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Union

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap import _core
from satrap.config.features import Features
from satrap.config.optimizers import Optimizer
from satrap.config.tables import Always
from satrap.data.inputs import Inputs
from satrap.device.device_blocks import Magnitude
from satrap.device.device_engine import DeviceEngine, PendingWork
from satrap.device.device_ids import DeviceIds, IdEntries, IdLayout, ids_of
from satrap.device.device_stream import to_device, to_host
from satrap.device.home_memory import DTYPES
from satrap.device.row_memory import RowMemory
from satrap.device.runs import (
    DeviceTicket,
    Given,
    PooledFeatures,
    RowUpdate,
    Runs,
    SortedGradients,
    flat_gradients,
    given_parts,
    is_whole_batch,
    require_sizes,
    sequence_bags,
    tensors_of,
)
from satrap.device.torch_device import kernels_of
from satrap.errors import TicketError
from satrap.worker.rows import (
    BagRequest,
    Ids,
    Rows,
    TicketGradients,
    UpdateRequest,
    empty_by_table,
    id_features,
    id_request,
    native_features,
)

LARGEST = float(np.finfo(np.float32).max)
UpdatedTables = tuple[range, RowUpdate]
"""Tables that one kernel updates, and how."""
AnyTicket = Union["OrderedTicket", _core.Ticket, DeviceTicket]


@dataclass(frozen=True, slots=True, eq=False)
class OrderedTicket:
    """A ticket of the core, and the runs of its update, which depend on ids alone. Implements
    `satrap.worker.rows.Ticket`."""

    native: _core.Ticket
    runs: Runs
    """The runs of the whole batch."""

    @property
    def used(self) -> bool:
        return self.native.used

    @property
    def batch_size(self) -> int:
        return self.native.batch_size

    @property
    def sequence_floats(self) -> list[int]:
        """How many floats the rows of each sequence have."""
        return list(self.native.sequence_floats)


class DeviceRows(Rows):
    """Implements `satrap.worker.rows.Rows` for tables on a device."""

    def __init__(self, features: Features, engine: DeviceEngine) -> None:
        """engine: of the features' tables."""
        self.num_threads = int(engine.core.num_threads)
        self.device, self.device_stream = engine.device, engine.stream
        self._kernels = kernels_of(engine.device)
        self._features, self._tables, self._id_features = features, features.tables, id_features(features)
        self.id_layout = IdLayout(features, engine.device)
        # If not every id is admitted, or if rows expire, a row depends on the order of this and earlier updates.
        self.resolves = all(
            isinstance(table.admission, Always) and table.expire_after is None for table in self._tables
        )
        self.use(engine)

    def use(self, engine: DeviceEngine) -> None:
        """Look up and update the rows of this engine from now on."""
        self._engine = engine
        self._bags = _core.Bags(engine.core, native_features(self._features, self._tables))
        self._id_bags = _core.Bags(engine.core, native_features(self._id_features, self._tables))
        self._pooled = [PooledFeatures.of(self._features, memory.tables, self.device) for memory in engine.memories]
        self._num_cut = [0] * len(self.id_layout.sequences)  # counts ids that were cut on the device
        self._updates_whole_batches = True  # as the last update did

    @property
    def latest_step(self) -> int:
        return self._engine.core.latest_step

    @property
    def truncated(self) -> list[int]:
        return [sum(counts) for counts in zip(self._bags.truncated, self._num_cut, strict=True)]

    def empty(self, lines: int, floats: int) -> Tensor:
        return torch.empty((lines, floats), dtype=DTYPES[self.output_dtype], device=self.device)

    def empty_of_ids(self, lines: int, floats: int) -> Tensor:
        return torch.empty((lines, floats), dtype=torch.float32, device=self.device)

    def lookup(self, request: BagRequest, block: Tensor, sequences: list[Tensor]) -> AnyTicket | None:
        with self._engine.exclusive(None if request.resolved else self._counts(request)):
            resolved: dict[str, Any] = request.resolved or self._find_frames(request)
            self._engine.moves.wait(resolved["moved"])
            self._gather(request, resolved, block, sequences)
            self._engine.moves.note_use()
        ticket: AnyTicket | None = resolved["ticket"]
        return ticket

    def place_ids(self, inputs: Inputs, *, train: bool) -> Inputs | IdEntries:
        return ids_of(inputs, self.id_layout, self.device)

    def resolve(self, request: BagRequest) -> BagRequest:
        """Find the frames of the ids' rows, insert the rows that are new, and order the gradients of the update. May
        take a frame from an evicted row: all calls that use that row are on the device's queue already."""
        with self._engine.exclusive(self._counts(request)):
            resolved = self._find_frames(request)
        if isinstance(ticket := resolved["ticket"], _core.Ticket) and self._updates_whole_batches:
            with self.device_stream.joined():
                runs = Runs.to_device(self._engine.core.order_frames(ticket), self.device)
            resolved["ticket"] = OrderedTicket(ticket, runs)
        return replace(request, resolved=resolved)

    def owns_ticket(self, ticket: object) -> bool:
        if isinstance(ticket, DeviceTicket):
            return ticket.bags in (self._bags, self._id_bags)
        native = ticket.native if isinstance(ticket, OrderedTicket) else ticket
        return isinstance(native, _core.Ticket) and (self._bags.made(native) or self._id_bags.made(native))

    def update(self, request: UpdateRequest) -> None:
        given = given_parts(request)
        scale = float(np.float32(request.scale))
        require_sizes(request.tickets, request.gradients)
        with self._engine.in_order():
            flat = flat_gradients(request, self.empty(0, 0))
            sorted_there = claim(request.tickets)
            sorted_runs = self._sorted(request, given, scale) if len(sorted_there) == len(request.tickets) else None
            ordered = self._ordered(request.tickets, given)
            if sorted_runs is None:
                request = replace(request, tickets=[self._as_core(ticket) for ticket in request.tickets])
            skips = sorted_runs is None and self._check(request, scale)
            groups = list(self._fused_tables(dict(request.lrs), scale, request.step, skips=skips))

            def record() -> PendingWork:
                core = self._engine.core
                runs: dict[str, Any] | None
                if ordered is not None:
                    runs = core.update_ordered_frames(request.tickets[0], request.step, skips)
                elif sorted_runs is None:
                    runs = core.update_frames(request.tickets, given, request.step, skips)
                else:
                    ids, numbers = sorted_runs.grouped.ids, np.arange(len(sorted_runs.grouped.ids), dtype=np.int32)
                    runs = core.update_id_frames(ids, sorted_runs.grouped.offsets, numbers, request.step, False)
                for ticket in sorted_there:
                    ticket.used = True
                return partial(self._steps, runs, groups, [flat] * len(groups), sorted_runs, ordered)

            self._engine.perform(record)

    def drop(self, ticket: AnyTicket) -> None:
        if isinstance(ticket, DeviceTicket):
            claim([ticket])[0].used = True
        else:
            self._engine.core.drop(ticket.native if isinstance(ticket, OrderedTicket) else ticket)

    # -- lookup --------------------------------------------------------------------------------------------------------

    def look_up(self, ids: Mapping[str, Ids], step: int, oldest_open: int) -> dict[str, Tensor]:
        rows = empty_by_table(self, ids, self._id_features)
        request = id_request(self._id_features, ids, step, oldest_open)
        ticket = self.lookup(request, self.empty(1, 0), list(rows.values()))
        assert ticket is not None  # the lookup trains
        self.drop(ticket)
        return {name: rows[name] for name in ids}

    def id_ticket(self, ids: Mapping[str, Ids]) -> _core.Ticket | DeviceTicket:
        values, offsets, *_ = id_request(self._id_features, ids, None, None).native
        return self._engine.core.bag_ticket(self._id_bags, values, offsets, None, 1)

    def _asked(self, request: BagRequest) -> tuple[Features, _core.Bags]:
        """Return the features of a lookup, and in the form of the core."""
        return (self._id_features, self._id_bags) if request.of_tables else (self._features, self._bags)

    def _find_frames(self, request: BagRequest) -> dict[str, Any]:
        """Return what `lookup_frames` of the core returns, and the frames."""
        if isinstance(request.values, DeviceIds):
            return self._find_sorted(request, request.values)
        frames, (_, bags) = np.empty(len(request.values), np.int32), self._asked(request)
        try:
            resolved = self._engine.core.lookup_frames(bags, *request.native, frames, request.first_epoch)
        finally:  # a lookup that fails has inserted rows too
            self._engine.place_rows()
        return {**resolved, "frames": frames[: resolved["num_ids"]], "moved": self._engine.moves.moved}

    def _find_sorted(self, request: BagRequest, ids: DeviceIds) -> dict[str, Any]:
        """Return what `_find_frames` does, for ids that were sorted on the device. The core finds the frames of the
        unique ids; arrays with an entry for each id (frames, offsets, weights) stay on the device."""
        core, grouped = self._engine.core, ids.grouped
        frames = np.empty(len(grouped.ids), np.int32)
        try:
            resolved = core.lookup_id_frames(
                grouped.ids,
                grouped.offsets,
                request.step or 0,
                request.oldest_open or 0,
                request.train,
                frames,
                request.first_epoch,
            )
        finally:  # a lookup that fails has inserted rows too
            self._engine.place_rows()
        self._num_cut = [sum(counts) for counts in zip(self._num_cut, ids.num_cut, strict=True)]
        return {
            **resolved,
            "frames": to_device(frames, self.device)[grouped.inverse],
            "offsets": ids.offsets,
            "weights": ids.weights,
            "ticket": DeviceTicket(ids, self._bags) if request.train else None,
            "moved": self._engine.moves.moved,
        }

    def _counts(self, request: BagRequest) -> NDArray[np.int64] | None:
        """Return how many rows of each table the lookup may insert, at most; None: it inserts none."""
        if not request.train:
            return None
        if isinstance(request.values, DeviceIds):
            return np.diff(request.values.grouped.offsets)
        features, _ = self._asked(request)
        bounds = np.arange(len(features) + 1) * request.batch_size
        if request.offsets is not None:  # which may be wrong: the core says so, and nothing may be allocated for them
            bounds = np.maximum.accumulate(request.offsets[bounds].clip(0, len(request.values)))
        counts = np.zeros(len(self._tables), np.int64)
        np.add.at(counts, list(features.table_index), np.diff(bounds))
        return counts

    def _absent(self, resolved: dict[str, Any], memory: RowMemory) -> Tensor:
        """Return the values of ids that have no frame: of an id's row at home or, if it has no row, the initial values
        that a row of this id would have."""
        rows = memory.staging(len(resolved["absent_ids"]))
        for number in np.intersect1d(resolved["absent_tables"], memory.tables).tolist():
            of_table, has_row = resolved["absent_tables"] == number, resolved["absent_places"] != -1
            at = np.flatnonzero(of_table & ~has_row).astype(np.int32)
            self._engine.initialise(number, rows, at, resolved["absent_ids"][at])
            if len(at := np.flatnonzero(of_table & has_row).astype(np.int32)):
                rows.fetch(at, resolved["absent_places"][at])
        return rows.values.float()

    def _gather(
        self, request: BagRequest, resolved: dict[str, Any], block: Tensor, sequences: Sequence[Tensor]
    ) -> None:
        """Pool and copy the rows of all features."""
        features, _ = self._asked(request)
        at, offsets, weights = (
            to_device(array, self.device) if isinstance(array, np.ndarray) else array
            for array in (resolved["frames"], resolved["offsets"], resolved["weights"])
        )
        assert at is not None
        absent = [self._absent(resolved, memory) for memory in self._engine.memories]
        for memory, rows, pooled in zip(self._engine.memories, absent, self._pooled, strict=True):
            if not request.of_tables:
                self._kernels.pool(memory.values, rows, at, offsets, weights, pooled, request.batch_size, block)
        left = iter(sequences)
        for number, feature in enumerate(features.values()):
            if feature.pooling != "none" or not (sequence := next(left)).numel():
                continue
            memory = self._engine.memory(features.table_index[number])
            rows = absent[self._engine.memories.index(memory)]
            bags = sequence_bags(feature, number, offsets, request.batch_size, sequence)
            self._kernels.copy_sequence(memory.values, rows, at, *bags)

    # -- update --------------------------------------------------------------------------------------------------------

    def _sorted(self, request: UpdateRequest, given: Sequence[Given], scale: float) -> SortedGradients | None:
        """Return the gradients of batches whose ids were sorted on the device, id by id; None if there are none, or if
        the core has to see which are finite."""
        tickets: Sequence[DeviceTicket] = request.tickets
        if not largest_of(request) * abs(scale) * sum(ticket.bound for ticket in tickets) < LARGEST:
            return None
        return SortedGradients.of(self.id_layout, tickets, given)

    def _ordered(self, tickets: Sequence[AnyTicket], given: Sequence[Given]) -> Runs | None:
        """Return the runs of an update that were ordered when its batch was resolved."""
        self._updates_whole_batches = is_whole_batch(self.id_layout.total_dim, given)
        ticket = tickets[0]
        return ticket.runs if self._updates_whole_batches and isinstance(ticket, OrderedTicket) else None

    def _as_core(self, ticket: AnyTicket) -> _core.Ticket:
        """Return the ticket that the core would have made of the same ids in CPU memory."""
        if isinstance(ticket, OrderedTicket):
            return ticket.native
        if not isinstance(ticket, DeviceTicket):
            return ticket
        values, offsets, weights = ticket.ids.on_cpu()
        return self._engine.core.bag_ticket(ticket.bags, values, offsets, weights, ticket.batch_size)

    def _check(self, request: UpdateRequest, scale: float) -> bool:
        """Raise NonFiniteError if a table refuses a gradient; return whether gradients may have to be skipped."""
        bound = abs(scale) * self._engine.core.sum_bound(request.tickets)
        if largest_of(request) * bound < LARGEST:  # not true of a NaN
            return False
        return self._engine.core.check_gradients(request.tickets, on_cpu(request.gradients), scale)

    def _fused_tables(self, lrs: dict[int, float], scale: float, step: int, *, skips: bool) -> Iterator[UpdatedTables]:
        """Yield tables that one kernel updates: neighbours with one memory, optimizer and rate."""

        def same(number: int) -> tuple[int, Optimizer, float, bool]:
            table, lr = self._tables[number], lrs.get(number, self._engine.core.lr(number))
            return id(self._engine.memory(number)), table.optimizer, lr, skips and table.on_nonfinite == "skip"

        for (_, optimizer, lr, skip), numbers in groupby(range(len(self._tables)), same):
            begin, *others = numbers
            first = self._engine.memory(begin).layout.first
            how = RowUpdate(optimizer=optimizer, lr=lr, scale=scale, step=step, skip_nonfinite=skip, first=first)
            yield range(begin, [begin, *others][-1] + 1), how

    def _steps(
        self,
        resolved: dict[str, Any] | None,
        groups: list[UpdatedTables],
        flats: Sequence[Tensor],
        gradients: SortedGradients | None = None,
        ordered: Runs | None = None,
    ) -> Sequence[PendingWork]:
        """Copy the runs of an update to the device; return the step of each group of tables. resolved: what the core
        returned; None: it found the frames ahead. flats: the gradients of each group. gradients: where they are, if
        they were sorted on the device. ordered: the runs, if they are there."""
        if resolved is None:
            assert ordered is not None
            runs = ordered
        elif ordered is not None:
            runs = ordered.in_frames(resolved)
        else:
            to_runs = Runs.to_device if gradients is None else gradients.runs
            runs = to_runs(resolved, self.device)
        work: list[PendingWork] = []
        for group, flat in zip(groups, flats, strict=True):
            work.append(partial(self._step, runs, group, flat))
            part = runs.of_tables(group[0])
            if part.at_home is not None and len(at_home := np.flatnonzero(part.at_home < -1)):
                work.append(partial(self._step_at_home, part.take(at_home), part.at_home[at_home], group, flat))
        return work

    def _step(self, runs: Runs, group: UpdatedTables, flat: Tensor) -> Sequence[PendingWork]:
        """Sum the gradients of some tables' rows, and apply their optimizer."""
        tables, how = group
        memory = self._engine.memory(tables.start)
        summed = self._kernels.update(memory.values, memory.state, runs.of_tables(tables), flat, how)
        return [] if summed is None else [partial(self._settle, runs, tables, summed, how.step)]

    def _step_at_home(self, runs: Runs, places: NDArray[np.int32], group: UpdatedTables, flat: Tensor) -> None:
        """Do a step of rows that are at home, by copies on the device."""
        tables, how = group
        memory = self._engine.memory(tables.start)
        rows = memory.staged(places)
        self._kernels.update(rows.values, rows.state, runs, flat, how)
        memory.send_home(rows, places)

    def _settle(self, runs: Runs, tables: range, summed: Tensor, step: int) -> Sequence[PendingWork]:
        """Return the stamps and counts of the rows of each table whose gradients were not all skipped."""
        part = runs.of_tables(tables)
        assert part.ids is not None
        left_out, num_summed = to_host(torch.stack([part.end - part.begin - summed, summed])).numpy()
        work: list[PendingWork] = []
        for number in tables:
            rows = slice(*(runs.tables[number + i] - runs.tables[tables.start] for i in (0, 1)))
            ids = part.ids[rows][num_summed[rows] > 0]
            work.append(partial(self._engine.core.settle_frames, number, ids, int(left_out[rows].sum()), step))
        return work


def on_cpu(gradients: Sequence[TicketGradients]) -> list[TicketGradients]:
    """Return gradients as arrays of float32. Waits for the device."""
    return [
        (
            None if block is None else to_host(block).float().numpy(),
            [None if sequence is None else to_host(sequence).float().numpy() for sequence in sequences],
        )
        for block, sequences in gradients
    ]


def largest_of(request: UpdateRequest) -> float:
    """Return the largest magnitude of an update's gradients; a NaN if there is one. Waits for the device, unless they
    were measured where they were computed."""
    if request.magnitude is not None:
        return float(request.magnitude)
    return float(Magnitude((part, 1.0) for part in tensors_of(request)))


def claim(tickets: Sequence[Any]) -> list[DeviceTicket]:
    """Return the tickets of ids that were sorted on the device; raise TicketError if one was used. The core claims the
    others."""
    claimed = [ticket for ticket in tickets if isinstance(ticket, DeviceTicket)]
    if any(ticket.used for ticket in claimed) or len(set(map(id, claimed))) != len(claimed):
        raise TicketError("this ticket was used already; a batch is updated once: look it up again for another step")
    return claimed
