"""Rows on the devices of several trainers, of tables with `num_rows`: the CPU does no work for an id.

    resolve  ids -> numbers of rows, sorted: unique, by owner; places of their gradients
    lookup   how many for each owner, by gloo; then numbers ──> DirectOwnedRows ──> rows -> pool, copy_sequence
    update   gradients -> the sum of each row ──> DirectOwnedRows, which adds those of all trainers

A lookup waits for the device once, in the thread of the lookups: for the number of rows that it asks of each owner, and
whether the batch is refused. If it is, all trainers raise its error in place of the lookup.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.collected import close_when_collected
from satrap.config.features import Features
from satrap.config.tables import Table
from satrap.data.inputs import Inputs
from satrap.device.collective_lookups import CollectiveLookups, Sent
from satrap.device.collective_rows import CollectiveRows, CollectiveTicket
from satrap.device.collective_updates import CollectiveUpdates, UpdatePart
from satrap.device.device_blocks import TensorBlocks
from satrap.device.device_ids import IdLayout
from satrap.device.device_stream import Mark, current_stream, to_device, to_host
from satrap.device.direct_batches import DirectBatches, DirectTicket, refusal, require_direct_sizes
from satrap.device.direct_ids import DirectIds, OwnerNumbers
from satrap.device.direct_rounds import DirectLookups, DirectUpdates
from satrap.device.exchange import Exchange
from satrap.device.group_exchange import lines_of, of_group
from satrap.device.own_tables import OwnTables
from satrap.device.runs import RowUpdate, Runs, given_parts
from satrap.device.segments import TableGroups
from satrap.worker.rows import BagRequest, PlacedIds, UpdateRequest
from satrap.worker.server_group import ServerGroup
from satrap.worker.sharded_rows import require_tables
from satrap.worker.sharded_tables import ShardedTables
from satrap.worker.worker import Worker


@dataclass(slots=True, eq=False)
class SharedBatch:
    """A batch whose rows are sorted by owner, on the device."""

    ticket: DirectTicket
    downloaded: tuple[Tensor, Mark]
    """int64, valid at the mark: where the runs of each group at each owner begin, and where the last end."""
    lookup: int = -1
    """The number of its round; -1: it was not looked up."""

    @property
    def batch_size(self) -> int:
        return self.ticket.batch_size

    @property
    def bound(self) -> float:
        """See `DeviceTicket`."""
        return self.ticket.bound


class DirectCollectiveRows(CollectiveRows):
    """Implements `satrap.worker.rows.Rows` for tables with `num_rows` on the devices of all trainers."""

    def _grouped(self, tables: Sequence[Table]) -> TableGroups:
        groups, world_size = TableGroups.of_neighbours(tables), len(self.servers.topology)
        with self.device_stream.joined():
            self._numbers = OwnerNumbers(tables, groups, world_size, self.device)
            self._id_layout = IdLayout(self._features, self.device)
            self._batches = DirectBatches(self._features, self._id_layout, self._numbers, self.device)
        self._base = self._numbers.begins[self.servers.trainer]
        return groups

    def _updates_by(self, exchange: Exchange, *given: Any) -> CollectiveUpdates:
        return DirectUpdates(exchange, self._groups, self._base, *given)

    def _lookups_by(self, exchange: Exchange, *given: Any) -> CollectiveLookups:
        return DirectLookups(exchange, self._groups, self._base, *given)

    @property
    def truncated(self) -> list[int]:
        with self.device_stream.joined():
            return [sum(pair) for pair in zip(self._batches.num_cut, super().truncated, strict=True)]

    # -- lookup --------------------------------------------------------------------------------------------------------

    def place_ids(self, inputs: Inputs, *, train: bool) -> Inputs | PlacedIds:
        return self._batches.place(inputs) if train else super().place_ids(inputs, train=train)

    def _ticket(self, request: BagRequest, *, for_lookup: bool = True) -> CollectiveTicket:
        """Sort the ids of a batch."""
        with self.device_stream.joined():
            return CollectiveTicket(self._shared(request), self)

    def _shared(self, request: BagRequest) -> SharedBatch:
        ids = request.values
        if not isinstance(ids, DirectIds):
            ids = self._batches.place_arrays(request, self._check_arrays)  # the check counts what is cut
        else:
            self._batches.count_cut(ids)
        ticket = self._batches.ticket(ids, self._bags_of(request), self._batches.layout_of(request))
        return SharedBatch(ticket, current_stream(self.device).download(ticket.runs.bounds))

    def _sent(self, batch: Any) -> Sent:
        ids = batch.ticket.ids
        if ids.is_refused:
            raise refusal(ids, partial(self._check_arrays, bags=batch.ticket.bags))
        counts = self._counts(batch.downloaded)
        with self.device_stream.running():
            return batch.ticket.runs.rows[: counts.sum()].int(), counts

    def _counts(self, downloaded: tuple[Tensor, Mark]) -> NDArray[np.int64]:
        """Return how many rows a batch has of each group at each owner, [trainers, groups]. Waits until the device has
        sorted the ids."""
        bounds, mark = downloaded
        mark.synchronize()
        return np.diff(bounds.numpy()).reshape(-1, len(self._groups.tables))

    def _check_arrays(self, values: Any, offsets: Any, weights: Any, batch_size: int, bags: Any = None) -> None:
        self._split.drop(self._split_arrays(values, offsets, weights, batch_size, bags))

    def _lines_of(self, batch: Any) -> Mapping[str, Any]:
        ids, runs = batch.ticket.ids, batch.ticket.runs
        lines = lines_of(runs.of_entries(), self._counts(batch.downloaded)).int()
        return {"lines": lines, "offsets": ids.offsets, "weights": ids.weights}

    def _drop(self, ticket: CollectiveTicket) -> None:
        """Do nothing: no other process keeps anything of it."""

    # -- update --------------------------------------------------------------------------------------------------------

    def _require_sizes(self, request: UpdateRequest) -> None:
        require_direct_sizes([ticket.batch.ticket for ticket in request.tickets], request)

    def _summed_part(
        self, request: UpdateRequest, rates: Sequence[float], flat: Tensor, how: RowUpdate, bound: float
    ) -> UpdatePart:
        batches: list[SharedBatch] = [ticket.batch for ticket in request.tickets]
        tickets = [batch.ticket for batch in batches]
        rows, places, factors = self._batches.gradients(tickets, given_parts(request))
        is_whole = rows is batches[0].ticket.runs
        # What is sorted here is downloaded behind the gradients, for which this call has waited.
        downloaded = batches[0].downloaded if is_whole else current_stream(self.device).download(rows.bounds)
        counts, sums = self._counts(downloaded), []
        for group, (_, dim) in enumerate(self._groups.layouts):
            begin, end = (of_group(entries, group, counts) for entries in (rows.begin, rows.end))
            lines = torch.arange(len(begin), dtype=torch.int32, device=self.device)
            runs = Runs(
                frames=lines,
                begin=begin,
                end=end,
                places=places,
                factors=factors,
                keys=None,
                tables=(0, len(lines)),
                alignment=self._id_layout.alignment,
            )
            values = torch.full((len(lines), dim), -0.0, device=self.device)
            self._kernels.update(values, values[:, :0], runs, flat, how)
            sums.append(values)
        lookup = batches[0].lookup if is_whole else -1
        return UpdatePart(rows.rows[: counts.sum()].int(), counts, sums, rates, bound, lookup)

    def _checked_part(self, request: UpdateRequest, rates: Sequence[float]) -> UpdatePart:
        splits = [self._split_again(ticket.batch) for ticket in request.tickets]
        ids, counts, unsorted, bound = self._checked_sums(request, splits)
        tables = np.concatenate([np.repeat(np.arange(len(of_owner)), of_owner) for of_owner in counts])
        ids_there = to_device(np.concatenate(ids).view(np.int64), self.device)
        rows, groups = self._numbers.rows_of(to_device(tables, self.device), ids_there), self._groups.numbers[tables]
        sums = [
            of_rows[rows[to_device(np.flatnonzero(groups == group), self.device)].argsort()]
            for group, of_rows in enumerate(unsorted)
        ]
        in_order = rows.sort().values
        bounds = to_host(torch.searchsorted(in_order, self._numbers.bounds)).numpy()
        return UpdatePart(in_order.int(), np.diff(bounds).reshape(len(counts), -1), sums, rates, bound)

    def _split_again(self, batch: SharedBatch) -> Any:
        values, offsets, weights = batch.ticket.ids.on_cpu()
        return self._split_arrays(values, offsets, weights, batch.batch_size, batch.ticket.bags)


def collective_worker(
    features: Features,
    servers: ServerGroup,
    own: OwnTables,
    device: torch.device,
    *,
    num_threads: int | None,
    staleness: int,
    explain: Callable[[Exception], Exception],
) -> Worker:
    """Return a worker over tables on the devices of all trainers, which call this together.

    servers: the servers of all trainers. own: the tables of this trainer's server.
    explain: returns the error to raise in place of one that an exchange between trainers raised."""
    require_tables(features, servers)
    rows = (DirectCollectiveRows if own.are_direct else CollectiveRows)(
        features, servers, own.rows, own.stream, num_threads=num_threads, staleness=staleness, explain=explain
    )
    worker = Worker(features, rows, ShardedTables(servers), blocks=TensorBlocks(device))
    close_when_collected(worker, rows.end_rounds)
    return worker
