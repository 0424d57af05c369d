"""Rows on the devices of several trainers.

    resolve  Split.lookup -> ids of each owner; which gradients the sum of each id has
    lookup   ids ──> OwnedRows.look_up_received ──> rows -> pool, copy_sequence -> block, sequences
    update   gradients -> sums of each id, on the device ──> OwnedRows.apply, which adds those of all trainers

Each trainer owns some buckets of every table, and all exchange ids, rows and gradients by `all_to_all_single`. Each
trainer also serves its rows by the calls of a server, which evaluation, reading and checkpoints use.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap import _core
from satrap.config.features import Features
from satrap.config.optimizers import SGD
from satrap.config.tables import Table
from satrap.device.asked_rounds import AskedRounds
from satrap.device.collective_lookups import CollectiveLookups, CollectiveStream, LookupPart, Sent
from satrap.device.collective_updates import CollectiveUpdates, UpdatePart
from satrap.device.device_rows import LARGEST, largest_of, on_cpu
from satrap.device.device_stream import DeviceStream, to_device
from satrap.device.exchange import Exchange, LaunchOrder, RoundThread
from satrap.device.home_memory import DTYPES
from satrap.device.owned_rows import LookupTime
from satrap.device.runs import (
    PooledFeatures,
    RowUpdate,
    Runs,
    flat_gradients,
    given_parts,
    is_whole_batch,
    require_sizes,
    sequence_bags,
)
from satrap.device.segments import TableGroups, send_to_all
from satrap.device.torch_device import kernels_of
from satrap.errors import InputError, StreamError, TicketError
from satrap.interrupts import Uninterrupted
from satrap.worker.rows import BagRequest, Ids, Rows, UpdateRequest, id_features, id_request
from satrap.worker.server_group import ServerGroup
from satrap.worker.sharded_rows import ShardedRows

_CLOSE_SECONDS = 0.5
_ABANDONED: list[Exchange] = []
"""The exchanges of rounds that were given up. The destructor of torch's process group waits for its rounds, so it must
not run: the garbage collector would hang."""


@dataclass(slots=True, eq=False)
class SplitBatch:
    """A batch whose ids are divided by owner in CPU memory."""

    split: _core.SplitTicket
    bound: float
    """A sum of its gradients is at most this many times the largest gradient times the scale."""
    counts: NDArray[np.int64]
    """How many ids of each table each trainer has, [trainers, tables]."""
    sent: Sent
    """What a lookup sends: ids of replicated tables, for one, go to all trainers."""
    total_dim: int
    """The columns of its block."""
    at: dict[str, Tensor | None] = field(default_factory=dict)
    """For a lookup, on the device: the "lines" of all ids among the rows of their group, their "offsets" and
    "weights"."""
    runs: Runs | None = None
    """The sums of an update of the whole batch, if it is ordered ahead."""
    lookup: int = -1
    """The number of its round; -1: it was not looked up."""

    @property
    def batch_size(self) -> int:
        return self.split.batch_size


@dataclass(slots=True, eq=False)
class CollectiveTicket:
    """Implements `satrap.worker.rows.Ticket`."""

    batch: Any
    """`SplitBatch` or `SharedBatch`."""
    owner: "CollectiveRows"
    pending: "Future[None] | None" = None
    """The round of an update that was interrupted while it waited for other trainers."""
    used: bool = False

    @property
    def batch_size(self) -> int:
        size: int = self.batch.batch_size
        return size


class CollectiveRows(Rows):
    """Implements `satrap.worker.rows.Rows` for tables on the devices of all trainers. Lookups without training call the
    servers."""

    resolves = True

    def __init__(
        self,
        features: Features,
        servers: ServerGroup,
        owned: Callable[[], Any],
        stream: DeviceStream,
        *,
        num_threads: int | None,
        staleness: int,
        explain: Callable[[Exception], Exception],
    ) -> None:
        """All trainers call this together.

        owned: returns the rows that this trainer owns, as `OwnTables.rows` does, on the device of the stream.
        explain: returns the error to raise for one of an exchange."""
        self._reader = ShardedRows(features, servers, num_threads=num_threads)
        self.servers: ServerGroup = servers
        self.num_threads, self._split = self._reader.num_threads, self._reader.split
        self.device, self.device_stream = stream.device, stream
        device = stream.device
        self._features, self._staleness = features, staleness
        self._tables = servers.job.tables
        self._groups, self._kernels = self._grouped(self._tables), kernels_of(device)
        self._rank, self._to_all = servers.trainer, self._groups.of_kinds("replicated", "columns")
        self._owners = self._owners_of(servers)
        self._pooled = [PooledFeatures.of(features, tables, device) for tables in self._groups.tables]
        self._id_features = id_features(features)
        self._updates_whole_batches = True  # as the last update did
        self._absent = [torch.empty((0, dim), device=device) for _, dim in self._groups.layouts]
        self.launches = LaunchOrder(device)
        """The order of all collectives between devices."""
        self._exchanges = lookups, updates = Exchange(self.launches), Exchange(self.launches)
        use_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else lambda: None
        self._update_thread = RoundThread("satrap-exchange-updates", explain, prepare=use_device, failed=self._failed)
        self._lookup_thread = RoundThread("satrap-exchange-lookups", explain, prepare=use_device, failed=self._failed)
        self._asked = asked = AskedRounds()
        self._updates = self._updates_by(updates, asked, owned, self._update_thread, self.device_stream)
        rounds = self._lookup_thread, self._updates, staleness, self.device_stream
        self._lookups = self._lookups_by(lookups, asked, owned, *rounds)
        self._stream = CollectiveStream(self._lookups, self._updates)
        self._stream.has_ended_lookups = True  # there is no stream yet
        self._unfinished: tuple[CollectiveTicket | None, Future[Any]] | None = None

    def _grouped(self, tables: Sequence[Table]) -> TableGroups:
        return TableGroups.of(tables)

    def _updates_by(self, exchange: Exchange, *given: Any) -> CollectiveUpdates:
        return CollectiveUpdates(exchange, self._groups, *given)

    def _lookups_by(self, exchange: Exchange, *given: Any) -> CollectiveLookups:
        return CollectiveLookups(exchange, self._groups, *given)

    def _failed(self, error: Exception) -> None:
        """Let the rounds of the other thread fail that wait for one of a thread that has failed."""
        self.launches.fail(error)
        self._asked.fail(error)
        self._updates.wake()

    def _owners_of(self, servers: ServerGroup) -> NDArray[np.uint32]:
        """Return whom to ask for each bucket: this trainer itself for tables of which each trainer has all ids."""
        buckets = [table.resolved_num_buckets for table in self._tables]
        is_own = np.repeat(np.isin(np.arange(len(buckets)), self._to_all), buckets)
        return np.where(is_own, np.uint32(self._rank), servers.topology.owners)

    # -- streams -------------------------------------------------------------------------------------------------------

    def open_stream(self, step: int) -> CollectiveStream:
        """Begin a training stream at this step. All trainers do."""
        self._stream, self._unfinished = CollectiveStream(self._lookups, self._updates), None
        self._lookup_thread.released = self._update_thread.released = self._stream.released
        self._updates.start(step)
        return self._stream

    def pause(self) -> None:
        """Return once the updates that this trainer joined are applied. Until all trainers are paused, answer their
        lookups."""
        if not self._stream.has_ended_lookups:
            self._lookups.idle()
        self._updates.settle()

    def close(self) -> None:
        self.end_rounds()
        self._reader.close()

    def end_rounds(self) -> None:
        """End the threads. Rounds that another trainer has not joined by then, after an error, are given up.
        Idempotent."""
        for thread in (self._lookup_thread, self._update_thread):
            thread.released.set()
            thread.close()
        for thread, exchange in zip((self._lookup_thread, self._update_thread), self._exchanges, strict=True):
            if not thread.join(_CLOSE_SECONDS):
                exchange.is_abandoned = True
                _ABANDONED.append(exchange)
                self.launches.fail(StreamError("the embeddings were closed before all trainers had joined a step"))
                thread.join(_CLOSE_SECONDS)

    # -- as Rows -------------------------------------------------------------------------------------------------------

    @property
    def latest_step(self) -> int:
        return self._reader.latest_step

    @property
    def truncated(self) -> list[int]:
        return self._reader.truncated

    def empty(self, lines: int, floats: int) -> Tensor:
        return torch.empty((lines, floats), dtype=DTYPES[self.output_dtype], device=self.device)

    def empty_of_ids(self, lines: int, floats: int) -> Tensor:
        return torch.empty((lines, floats), dtype=torch.float32, device=self.device)

    def lookup(self, request: BagRequest, block: Tensor, sequences: list[Tensor]) -> CollectiveTicket | None:
        if not request.train:
            self._read(request, block, sequences)
            return None
        at = self._reader.advance_step(request.step)
        with Uninterrupted():
            ticket, future = self._unfinished or self._start(request, at)
            self._unfinished = None if future is None else (ticket, future)  # an interrupted call waits for these again
        if future is None:
            for sequence in (block, *sequences):
                sequence.zero_()
            return ticket
        try:
            rows, number = self._rows_of(future)
        except Exception:
            if future.done():
                self._unfinished = None
            raise
        assert ticket is not None, "a batch that is refused has no ticket"
        ticket.batch.lookup = number
        with self.device_stream.joined():
            self._pool(rows, self._lines_of(ticket.batch), request, block, sequences)
        self._unfinished = None
        return ticket

    def _rows_of(self, future: "Future[Any]") -> Any:
        """Return the rows of a round; raise the error of a batch that a trainer refuses."""
        rows = self._lookup_thread.wait(future)
        if isinstance(rows, InputError):
            raise rows
        return rows

    def resolve(self, request: BagRequest) -> BagRequest:
        try:
            ticket, refused = self._ticket(request), None
        except InputError as error:  # every trainer raises it in the lookup
            ticket, refused = None, error
        return replace(request, resolved={"ticket": ticket, "refused": refused})

    def id_ticket(self, ids: Mapping[str, Ids]) -> CollectiveTicket:
        return self._ticket(id_request(self._id_features, ids, None, None), for_lookup=False)

    def pad(self, step: int, oldest_open: int) -> None:
        future = self._submit(LookupPart(LookupTime(step, oldest_open, True), None))
        if future is not None:
            self._rows_of(future)

    def owns_ticket(self, ticket: object) -> bool:
        return getattr(ticket, "owner", None) is self

    def update(self, request: UpdateRequest) -> None:
        tickets: Sequence[CollectiveTicket] = request.tickets
        self._require_sizes(request)
        pending = tickets[0].pending
        if pending is None:
            rates = list(self.servers.lrs)
            for table, lr in request.lrs:
                rates[table] = lr
            with Uninterrupted(), self.device_stream.joined():
                part = self._part(request, rates)
                pending = self._updates.submit(self._reader.advance_step(request.step), part)
                for ticket in tickets:
                    ticket.pending = pending
        self._update_thread.wait(pending)
        with Uninterrupted():
            for ticket in tickets:
                ticket.pending, ticket.used = None, True

    def drop(self, ticket: CollectiveTicket) -> None:
        if ticket.used:
            raise TicketError("drop of a batch: this ticket was used already; a batch is updated or dropped once")
        ticket.used = True
        self._drop(ticket)

    def skip(self, step: int) -> None:
        self._updates.skip(step)

    # -- lookup --------------------------------------------------------------------------------------------------------

    def _read(self, request: BagRequest, block: Tensor, sequences: list[Tensor]) -> None:
        """Look up without training."""
        memory = [np.asarray(self._split.empty(len(sequence), sequence.shape[1])) for sequence in (block, *sequences)]
        self._reader.lookup(request, memory[0], memory[1:])
        for to, rows in zip((block, *sequences), memory, strict=True):
            to.copy_(torch.from_numpy(rows))

    def _start(self, request: BagRequest, step: int) -> "tuple[CollectiveTicket | None, Future[Any] | None]":
        resolved = (request if request.resolved else self.resolve(request)).resolved
        ticket: CollectiveTicket | None = resolved["ticket"]
        sent = partial(_refuse, resolved["refused"]) if ticket is None else partial(self._sent, ticket.batch)
        at = LookupTime(step, request.oldest_open or step, request.first_epoch)
        return ticket, self._submit(LookupPart(at, sent))

    def _sent(self, batch: Any) -> Sent:
        """Return what a batch sends; raise InputError if it is refused."""
        sent: Sent = batch.sent
        return sent

    def _ticket(self, request: BagRequest, *, for_lookup: bool = True) -> CollectiveTicket:
        """Divide the ids of a batch by owner. For a lookup, find the line of each id, and order the gradients."""
        given = request.values, request.offsets, request.weights, request.batch_size
        split = self._split_arrays(*given, self._bags_of(request))
        weight = 1.0 if request.weights is None or not len(request.weights) else np.abs(request.weights).max()
        ids, counts = _ids_of(split)
        batch = SplitBatch(
            split=split,
            bound=len(request.values) * max(1.0, float(weight)),
            counts=counts,
            sent=send_to_all(self._to_all, self._rank, ids, counts),
            total_dim=0 if request.of_tables else self._features.total_dim,
        )
        if for_lookup:
            with self.device_stream.joined():
                if self._updates_whole_batches:
                    batch.runs = Runs.to_device(self._split.order(split, self._groups.numbers), self.device)
                for name, array in self._split.lines(split, self._groups.numbers).items():
                    batch.at[name] = None if array is None else to_device(array, self.device)
        return CollectiveTicket(batch, self)

    def _bags_of(self, request: BagRequest) -> Any:
        """Return the core's form of the features of ids by table; None: those of batches."""
        return self._reader.id_bags if request.of_tables else None

    def _split_arrays(
        self, values: Any, offsets: Any, weights: Any, batch_size: int, bags: Any = None
    ) -> _core.SplitTicket:
        """Do so for arrays. bags: see `_bags_of`."""
        owners, num_owners = self._owners, len(self.servers.topology)
        return self._split.lookup(values, offsets, weights, batch_size, owners, num_owners, True, bags)

    def _drop(self, ticket: CollectiveTicket) -> None:
        if not ticket.batch.split.used:
            self._split.drop(ticket.batch.split)

    def _require_sizes(self, request: UpdateRequest) -> None:
        require_sizes([ticket.batch.split for ticket in request.tickets], request.gradients)

    def _submit(self, part: LookupPart) -> "Future[Any] | None":
        """Start a round of the lookups; return None if they have ended."""
        with self._stream.lock:
            if self._stream.has_ended_lookups:
                return None
            self._updates.pass_through(part.at.step - self._staleness - 1)  # the gate has settled these steps
            return self._lookups.submit(part)

    def _lines_of(self, batch: Any) -> Mapping[str, Any]:
        """Return `SplitBatch.at`."""
        at: Mapping[str, Any] = batch.at
        return at

    def _pool(
        self, rows: list[Tensor], at: Mapping[str, Any], request: BagRequest, block: Tensor, sequences: list[Tensor]
    ) -> None:
        """Pool and copy the rows of all features. at: as in `SplitBatch`."""
        features, batch_size = self._id_features if request.of_tables else self._features, request.batch_size
        lines, offsets, weights = at["lines"], at["offsets"], at["weights"]
        for values, absent, pooled in zip(rows, self._absent, self._pooled, strict=True):
            if not request.of_tables:
                self._kernels.pool(values, absent, lines, offsets, weights, pooled, batch_size, block)
        left = iter(sequences)
        for number, feature in enumerate(features.values()):
            if feature.pooling == "none" and (sequence := next(left)).numel():
                group = self._groups.numbers[features.table_index[number]]
                bags = sequence_bags(feature, number, offsets, batch_size, sequence)
                self._kernels.copy_sequence(rows[group], self._absent[group], lines, *bags)

    # -- update --------------------------------------------------------------------------------------------------------

    def _part(self, request: UpdateRequest, rates: Sequence[float]) -> UpdatePart:
        """Return the sum of the gradients of each id."""
        scale = float(np.float32(request.scale))
        flat = flat_gradients(request, self.empty(0, 0))
        bound = largest_of(request) * scale * sum(ticket.batch.bound for ticket in request.tickets)
        if not bound < LARGEST:  # not true of a NaN either
            return self._checked_part(request, rates)
        # On values of -0.0, a step of rate -1 adds the gradient, without rounding.
        how = RowUpdate(optimizer=SGD(lr=1.0), lr=-1.0, scale=scale, step=1)
        return self._summed_part(request, rates, flat, how, bound)

    def _summed_part(
        self, request: UpdateRequest, rates: Sequence[float], flat: Tensor, how: RowUpdate, bound: float
    ) -> UpdatePart:
        """Return the same, summed on the device. flat: all gradients. how: adds them. bound: of each sum."""
        batches: list[SplitBatch] = [ticket.batch for ticket in request.tickets]
        first, given = batches[0], given_parts(request)
        self._updates_whole_batches = is_whole_batch(first.total_dim, given)
        if self._updates_whole_batches and first.runs is not None:
            self._split.drop(first.split)
            runs, counts, sent, lookup = first.runs, first.counts, first.sent, first.lookup
        else:
            splits, num_owners = [batch.split for batch in batches], len(self.servers.topology)
            laid_out, places = self._split.runs(splits, given, self._owners, num_owners, self._groups.numbers)
            ids, counts = _ids_of(laid_out)
            sent, lookup = send_to_all(self._to_all, self._rank, ids, counts), -1
            runs = Runs.to_device(places, self.device)
        sums = []
        for (_, dim), tables, lines in zip(
            self._groups.layouts, self._groups.tables, self._groups.counts(counts), strict=True
        ):
            values = torch.full((sum(lines), dim), -0.0, device=self.device)
            for table in tables:
                of_table = runs.of_tables(range(table, table + 1))
                self._kernels.update(values, values[:, :0], of_table, flat, how)
            sums.append(values)
        return UpdatePart(*sent, sums, rates, bound, lookup)

    def _checked_part(self, request: UpdateRequest, rates: Sequence[float]) -> UpdatePart:
        """Return the same, summed on the CPU: raise NonFiniteError if a table refuses a gradient, or leave it out."""
        ids, counts, sums, bound = self._checked_sums(request, [ticket.batch.split for ticket in request.tickets])
        return UpdatePart(*send_to_all(self._to_all, self._rank, ids, counts), sums, rates, bound)

    def _checked_sums(
        self, request: UpdateRequest, splits: Sequence[_core.SplitTicket]
    ) -> tuple[list[NDArray[np.uint64]], NDArray[np.int64], list[Tensor], float]:
        """Return the ids for each owner, how many there are of each table, for each group the sums owner by owner, and
        a bound of their numbers."""
        given, num_owners = on_cpu(request.gradients), len(self.servers.topology)
        summed = self._split.sums(splits, given, request.scale, self._owners, num_owners)
        self.servers.add_skipped(summed.skipped)
        ids, counts = _ids_of(summed)
        by_group: list[list[NDArray[np.float32]]] = [[] for _ in self._groups.tables]
        for server, line in enumerate(counts):
            at, gradients = 0, np.asarray(summed.gradients(server))
            for table, count in enumerate(line.tolist()):
                dim = self._tables[table].dim
                by_group[self._groups.numbers[table]].append(gradients[at : at + count * dim].reshape(count, dim))
                at += count * dim
        on_host = [np.concatenate(arrays) for arrays in by_group]
        bound = max((float(np.abs(array).max()) for array in on_host if array.size), default=0.0)
        return ids, counts, [to_device(array, self.device) for array in on_host], bound


def _refuse(error: InputError) -> Sent:
    raise error


def _ids_of(laid_out: Any) -> tuple[list[NDArray[np.uint64]], NDArray[np.int64]]:
    """Return the ids for each owner, and how many there are of each table."""
    servers = range(laid_out.num_servers)
    counts = np.stack([np.diff(laid_out.offsets(server)) for server in servers])
    return [laid_out.ids(server) for server in servers], counts
