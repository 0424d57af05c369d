"""Rows on servers: makes ids unique, splits them by owner, and calls each server once for a batch.

    lookup   Split.lookup -> ids of each server ──> server.lookup ──> rows -> Split.fill -> block, sequences
    update   gradients -> Split.sums -> sums of each server ──> server.update, with the lookup's ticket or with ids

The core's `Split` does what an engine does before and after its tables, with the same bits. A restarted server gets
another handshake and the call again (`satrap.worker.server_group`); one that lost a ticket gets the ids. After a
migration the same ids and sums are split again for the current owners and sent again.
"""

import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from satrap import _core
from satrap.config.cores import thread_count
from satrap.config.features import Features
from satrap.config.job import with_buckets_of
from satrap.errors import ConfigError, MovedError, TicketError
from satrap.interrupts import Uninterrupted
from satrap.server.protocol import Coded
from satrap.table.engine import native_config
from satrap.worker.rows import (
    BagRequest,
    Floats,
    Ids,
    Rows,
    Ticket,
    UpdateRequest,
    empty_by_table,
    id_features,
    id_request,
    native_features,
)
from satrap.worker.server_group import ServerGroup, Topology
from satrap.worker.sharded_tables import ShardedTables
from satrap.worker.worker import Worker

_NO_IDS = np.zeros(0, np.uint64)
_NO_OFFSETS = np.zeros(0, np.int64)
_NO_FLOATS = np.zeros(0, np.float32)
MOST_STALENESS = _core.WINDOW_STEPS - 1
"""A server remembers one step more than this for each trainer: core/table/applied_steps.hpp."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ShardedTicket:
    """Implements `satrap.worker.rows.Ticket`."""

    split: _core.SplitTicket
    number: int
    """The ticket's number at the servers; 0 if they have none."""
    owner: "ShardedRows"
    sums: tuple[_core.Sums, Topology] | None = None
    """Sums of a started update, and the topology they are split for: an interrupted update resumes with them."""
    num_skipped: list[int] = field(default_factory=list)
    """For each table, the number of gradients in the update that were not finite and were left out."""
    ids: Mapping[str, Ids] | None = None
    """By table, if the ticket is of ids that were looked up without one."""
    used: bool = False

    @property
    def batch_size(self) -> int:
        return self.split.batch_size


class ShardedRows(Rows):
    """Implements `satrap.worker.rows.Rows` on a group of servers."""

    takes_interleaved = True

    def __init__(self, features: Features, servers: ServerGroup, *, num_threads: int | None) -> None:
        tables = [native_config(table) for table in servers.job.tables]
        self.num_threads = thread_count(num_threads)
        self.split = _core.Split(tables, native_features(features, servers.job.tables), self.num_threads, "auto")
        self._id_features = id_features(features)
        self.id_bags = self.split.bags(native_features(self._id_features, servers.job.tables))
        self.servers: ServerGroup = servers
        self._rows_leave = any(table.expire_after or table.capacity for table in servers.job.tables)
        self._skipped_steps: list[int] = []  # steps for which the other trainers wait for this one's empty part
        # Starts at random: lookups of a killed predecessor may still be in flight under its numbers.
        self._numbers = itertools.count(1 + secrets.randbits(62))
        self._latest_step = servers.latest_step  # that this process or the servers have assigned
        self._lock = threading.Lock()

    @property
    def latest_step(self) -> int:
        return self._latest_step

    @property
    def truncated(self) -> list[int]:
        return self.split.truncated

    def empty(self, lines: int, floats: int) -> Floats:
        return np.asarray(self.split.empty(lines, floats))

    def lookup(self, request: BagRequest, block: Floats, sequences: list[Floats]) -> Ticket | None:
        number = next(self._numbers) if request.train else 0
        split = self._look_up(request, block, sequences, number=number)
        return ShardedTicket(split, number, self) if request.train else None

    def _look_up(
        self, request: BagRequest, block: Floats, sequences: list[Floats], *, number: int
    ) -> _core.SplitTicket:
        """Fill `block` and `sequences`; return the split batch, which is dropped already if `number` is 0.

        number: names the ticket that the servers keep; 0: they keep none, and a server is not called without ids."""
        self.settle()
        topology = self.servers.topology
        split = self._split_ids(request, topology)
        train = request.train
        at = self.advance_step(request.step) if train else 0
        rest = self.servers.wire, request.first_epoch

        def call(newest: Topology) -> dict[int, Any]:
            nonlocal topology
            if newest is not topology:
                self.split.reshard(split, newest.owners, len(newest))
                topology = newest
            calls = {}
            for server in range(len(newest)):
                has_ids = bool(split.num_floats(server))
                if has_ids or (number and self._rows_leave):  # which rows may leave depends on the step, too
                    ids = split.ids(server), split.offsets(server)
                    calls[server] = *ids, request.oldest_open or at, train, number if has_ids else 0, *rest
            return self.servers.call_servers("lookup", at, calls, topology=newest)

        answers = self.servers.follow(call)
        rows = [self._rows(split, server, *answers.get(server, (None, None))) for server in range(split.num_servers)]
        self.split.fill(split, rows, block, sequences)
        if not number:
            self.split.drop(split)
        return split

    def pad(self, step: int, oldest_open: int) -> None:
        """Let all servers know of a step in which this trainer looks nothing up, so that rows of its earlier steps may
        leave."""
        if self._rows_leave:
            offsets = np.zeros(len(self.servers.job.tables) + 1, np.int64)
            nothing = _NO_IDS, offsets, oldest_open, True, 0, self.servers.wire
            self.servers.call_all("lookup", *nothing, step=self.advance_step(step))

    def _split_ids(self, request: BagRequest, topology: Topology) -> _core.SplitTicket:
        bags = self.id_bags if request.of_tables else None
        given = request.values, request.offsets, request.weights, request.batch_size
        return self.split.lookup(*given, topology.owners, len(topology), bags=bags)

    def reissue(self, request: BagRequest) -> ShardedTicket:
        """Return a ticket for a batch that an earlier process looked up; its update sends the ids."""
        return ShardedTicket(self._split_ids(request, self.servers.topology), 0, self)

    def owns_ticket(self, ticket: object) -> bool:
        return getattr(ticket, "owner", None) is self

    def update(self, request: UpdateRequest) -> None:
        """Raise if a server cannot be reached; the others may have applied the step then."""
        tickets: Sequence[ShardedTicket] = request.tickets
        rates = list(self.servers.lrs)
        for table, lr in request.lrs:
            rates[table] = lr
        self.servers.claim(request.step, tickets[0])

        def send(topology: Topology) -> _core.Sums:
            with Uninterrupted():
                sums = self._sums(request, topology)
            number = tickets[0].number if sums.same_ids else 0  # new owners get ids
            self._send(sums, number, self.advance_step(request.step), rates, topology)
            return sums

        sums = self.servers.follow(send)
        with Uninterrupted():
            for ticket in tickets:
                ticket.sums, ticket.used = None, True
        if not sums.same_ids:
            self._drop_at_servers(tickets)

    def _sums(self, request: UpdateRequest, topology: Topology) -> _core.Sums:
        """Return the sums for the topology's servers, computed once: an update that was started resumes with them."""
        known: tuple[_core.Sums, Topology] | None = request.tickets[0].sums
        if known is None:
            splits = [ticket.split for ticket in request.tickets]
            sums = self.split.sums(splits, request.gradients, request.scale, topology.owners, len(topology))
            self.servers.add_skipped(sums.skipped)
        elif known[1] is topology:
            return known[0]
        else:
            sums = self.split.reshard_sums(known[0], topology.owners, len(topology))
        for ticket in request.tickets:
            ticket.sums, ticket.num_skipped = (sums, topology), list(sums.skipped)
        return sums

    def _send(self, sums: _core.Sums, number: int, step: int, rates: list[float], topology: Topology) -> None:
        """number: the ticket's, if the servers may have it; otherwise 0."""

        def arguments(server: int, number: int) -> tuple[Any, ...]:
            ids, offsets = (_NO_IDS, _NO_OFFSETS) if number else (sums.ids(server), sums.offsets(server))
            gradients, coded = self._gradients(sums, server)
            return number, ids, offsets, gradients, rates, self.servers.barrier_size, coded

        arguments_by_server = {
            server: arguments(server, number if sums.num_floats(server) else 0)
            for server in range(len(topology))
            if sums.num_floats(server) or self.servers.barrier_size
        }
        answers = self.servers.call_servers("update", step, arguments_by_server, topology=topology)
        lost = [server for server, answer in answers.items() if isinstance(answer, TicketError)]
        self.servers.call_servers("update", step, {server: arguments(server, 0) for server in lost}, topology=topology)

    def close(self) -> None:
        self.servers.close()

    def drop(self, ticket: ShardedTicket) -> None:
        if ticket.used:
            raise TicketError("drop of a batch: this ticket was used already; a batch is updated or dropped once")
        with Uninterrupted():
            if not ticket.split.used:
                self.split.drop(ticket.split)
            ticket.sums, ticket.used = None, True
        self._drop_at_servers([ticket])

    def look_up(self, ids: Mapping[str, Ids], step: int, oldest_open: int) -> dict[str, Floats]:
        rows = empty_by_table(self, ids, self._id_features)
        request = id_request(self._id_features, ids, step, oldest_open)
        self._look_up(request, self.empty(1, 0), list(rows.values()), number=0)
        return {name: rows[name] for name in ids}

    def id_ticket(self, ids: Mapping[str, Ids]) -> ShardedTicket:
        ticket = self.reissue(id_request(self._id_features, ids, None, None))
        ticket.ids = ids
        return ticket

    def skip(self, step: int) -> None:
        """Queue an empty part for the next lookup or `settle`. It is not sent now, because a stream that ends must not
        wait for other trainers."""
        if self.servers.barrier_size:
            with self._lock:
                self._skipped_steps.append(step)

    def settle(self) -> None:
        for step in list(self._skipped_steps):  # two threads may send the same part: servers ignore the duplicate
            offsets = np.zeros(len(self.servers.job.tables) + 1, np.int64)
            nothing = (0, _NO_IDS, offsets, _NO_FLOATS, self.servers.lrs, self.servers.barrier_size)
            self.servers.call_all("update", *nothing, step=step)
            with self._lock:
                if step in self._skipped_steps:
                    self._skipped_steps.remove(step)

    def _rows(self, split: _core.SplitTicket, server: int, rows: Floats | None, coded: Coded | None) -> Floats:
        """Return a server's rows as float32; none if the server has none of the ids and was not called."""
        if coded is not None:
            return np.asarray(self.split.decode_rows(split.offsets(server), coded))
        return _NO_FLOATS if rows is None else rows

    def _gradients(self, sums: _core.Sums, server: int) -> tuple[Floats | None, Coded | None]:
        """Return the gradients for a server in the form of the wire; the other form is None."""
        if self.servers.wire == "float32":
            return sums.gradients(server), None
        return None, np.asarray(self.split.encode_rows(sums.offsets(server), sums.gradients(server)))

    def _drop_at_servers(self, tickets: Sequence[ShardedTicket]) -> None:
        numbers = [ticket.number for ticket in tickets if ticket.number]
        topology = self.servers.topology
        owners = [
            server
            for server in range(len(topology))
            if any(server >= ticket.split.num_servers or ticket.split.num_floats(server) for ticket in tickets)
        ]
        if not numbers:
            return
        with suppress(MovedError):  # the servers forgot all tickets when the map changed
            self.servers.call_servers("drop", 0, dict.fromkeys(owners, (numbers,)), topology=topology)

    def advance_step(self, step: int | None) -> int:
        """Return the step of a lookup or an update, by default the next one, and note that it has begun."""
        with self._lock:
            at: int = self._latest_step + 1 if step is None else step
            self._latest_step = max(self._latest_step, at)
            return at


def sharded_worker(features: Features, servers: ServerGroup, *, num_threads: int | None = None) -> Worker:
    """Return a worker over tables on servers, of a job whose first tables are those of the features."""
    require_tables(features, servers)
    return Worker(features, ShardedRows(features, servers, num_threads=num_threads), ShardedTables(servers))


def require_tables(features: Features, servers: ServerGroup) -> None:
    """Raise ConfigError unless the first tables of the servers' job are those of the features."""
    there = servers.job.tables[: len(features.tables)]
    if with_buckets_of(features.tables, there) != there:
        raise ConfigError(
            "the servers' job has other tables than the features; expected features.tables first: create the job "
            "from them"
        )
