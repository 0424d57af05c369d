"""The trainer's side of a remote worker: batches without ids, tickets by number, gradients to send.

    RemoteBatches.next ──> read ─────> dense features, labels, position        the ids stay with the worker
    RemoteWorker.lookup ─> lookup ───> block, sequences, masks
    RemoteWorker.update ─> gradients ─> nothing                                the worker sums them and calls the
    servers

The trainer remembers the position of each batch in flight, so it survives the worker. A restarted worker gets all of it
in a new handshake (`WorkerConnection.handshake`), and every call continues where it was. Batches that carry their ids
are looked up from here, as by any `ShardedWorker`.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from satrap.config.features import Features
from satrap.data.inputs import Inputs, Position
from satrap.data.registry import source_to_dict
from satrap.data.skipped_rows import SkippedRows
from satrap.errors import NotReadyError, RpcError, SatrapError, SourceError, StreamError, TicketError
from satrap.interrupts import Uninterrupted
from satrap.rpc import Client, Keys
from satrap.worker.remote.batch_reader import ReadStart
from satrap.worker.remote.protocol import WorkerCalls, as_one, columns_from_bytes
from satrap.worker.remote.worker_spec import WorkerSpec
from satrap.worker.server_group import ServerGroup
from satrap.worker.sharded_rows import ShardedRows, ShardedWorker
from satrap.worker.worker import LookupResult, TicketGradients

DEADLINE_SECONDS = 150.0
"""Deadline of a call. The worker may wait for a server as long as a trainer would, once for skipped steps and once for
the call itself."""
_BEST_EFFORT_SECONDS = 2.0  # deadline of a call that only frees memory
_MAX_HANDSHAKES = 100  # handshakes in one call: if these do not help, more will not
_R = TypeVar("_R")


class WorkerConnection:
    """One trainer's connection to the worker's process."""

    def __init__(
        self,
        address: str,
        servers: ServerGroup,
        spec: WorkerSpec,
        keys: Keys | None,
        deadline: float,
        retry_seconds: float,
    ) -> None:
        """Make a handshake with the worker."""
        self.address, self.servers = address, servers
        self._spec = spec.to_dict()
        self._client = Client(WorkerCalls, address, keys, deadline=deadline, retry_seconds=retry_seconds)
        self.call = self._client.call
        self.best_effort = self._client.with_deadline(_BEST_EFFORT_SECONDS)
        self._streams: dict[int, RemoteBatches] = {}
        self._numbers = itertools.count(1)
        self._handshake_lock = threading.Lock()
        try:
            self.handshake()
        except BaseException:
            self._client.close()
            raise

    def call_with_retry(self, call: Callable[[], _R]) -> _R:
        """Return the call's result. Repeats the call after a handshake if the worker was restarted."""
        lost: NotReadyError | None = None
        for _ in range(_MAX_HANDSHAKES):
            try:
                if lost is not None:
                    self.handshake()
                with self._name_worker_in_errors():
                    return call()
            except NotReadyError as error:
                lost = error
        assert lost is not None
        raise lost

    def handshake(self) -> None:
        """Make a handshake and reopen all streams, which is all that the worker must know to continue."""
        with self._handshake_lock:
            self.call.hello(self.servers.origin(0), self._spec)
            with self._name_worker_in_errors():
                for stream, batches in list(self._streams.items()):
                    self._open(stream, batches)

    def open_stream(self, batches: "RemoteBatches") -> int:
        """Open a stream of these batches, and return its number."""
        stream = next(self._numbers)
        self._streams[stream] = batches
        try:
            self.call_with_retry(lambda: self._open(stream, batches))
        except BaseException:
            self.close_stream(stream)
            raise
        return stream

    def _open(self, stream: int, batches: "RemoteBatches") -> None:
        self.call.open(self.servers.origin(0), stream, batches.source, batches.start().to_dict())

    @contextmanager
    def _name_worker_in_errors(self) -> Iterator[None]:
        """Name the worker in errors about sources that it cannot read."""
        try:
            yield
        except SourceError as error:
            raise SourceError(f"the worker at {self.address} cannot read the source: {error}") from error

    def close_stream(self, stream: int) -> None:
        """Close a stream. A worker that cannot be reached forgets it with the attempt."""
        if self._streams.pop(stream, None) is not None:
            with suppress(SatrapError):
                self.best_effort.close_stream(self.servers.origin(0), stream)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteInputs(Inputs):
    """A batch whose ids stay with the worker."""

    values: NDArray[np.uint64] = field(init=False, repr=False)
    offsets: NDArray[np.int64] | None = field(init=False, repr=False)
    weights: NDArray[np.float32] | None = field(init=False, repr=False)
    batches: "RemoteBatches" = field(repr=False)
    number: int

    def __getattr__(self, name: str) -> Any:
        if name in ("values", "offsets", "weights"):
            raise StreamError(
                f"the batch has no {name} here: its ids stay with the worker at {self.batches.connection.address}; "
                "name their columns in the source's `extra` to see them, or train without workers"
            )
        raise AttributeError(name)


@dataclass(slots=True, eq=False, weakref_slot=True)
class RemoteTicket:
    """Implements `satrap.worker.worker.Ticket` for a batch that the worker's process looked up."""

    batches: "RemoteBatches"
    number: int
    batch_size: int
    used: bool = False


@dataclass(frozen=True, slots=True)
class _ReadBatch:
    """What is known about a batch that was read."""

    position: Position
    """The position after it."""
    skipped_rows: SkippedRows


class RemoteBatches(Iterator[RemoteInputs]):
    """The batches of a source that a remote worker reads."""

    def __init__(
        self, connection: WorkerConnection, names: tuple[str, ...], source: Any, position: Position | None, **share: int
    ):
        """share: the trainer's `rank`, and the `world_size` size."""
        self.connection, self.source = connection, source_to_dict(source)
        self._names, self._position, self._share = names, position, share
        self._last = 0  # the number of the last batch that arrived
        self._read: dict[int, _ReadBatch] = {}  # batches from which reading may have to restart
        self._open: set[int] = set()  # batches neither updated nor dropped
        self._tickets: set[int] = set()  # open batches that have a ticket
        self._skipped_rows = SkippedRows()
        self._ended = False
        self._lock = threading.Lock()
        self.stream = connection.open_stream(self)
        """The number by which the worker knows this stream."""

    @property
    def skipped_rows(self) -> SkippedRows:
        """What was left out so far, as in `Batches.skipped_rows`."""
        return self._skipped_rows

    @property
    def settled(self) -> int:
        """The number below which all batches were updated or dropped."""
        with self._lock:
            return min(self._open, default=self._last + 1)

    def start(self) -> ReadStart:
        """Return where the worker must start to read to have every batch in flight. That is one batch earlier, if there
        is one: what was skipped up to its end is known, so that nothing is counted twice."""
        with self._lock:
            first = max(1, min(self._open, default=self._last + 1) - 1)
            position = self._position if first == 1 else self._read[first - 1].position
            skipped_rows = self._read[first].skipped_rows if first in self._read else None
            return ReadStart(number=first, position=position, skipped_rows=skipped_rows, **self._share)

    def __len__(self) -> int:
        found = self.connection.call_with_retry(
            lambda: self.connection.call.length(self.connection.servers.origin(0), self.stream)
        )
        if "batches" not in found:
            raise TypeError(found["why"])
        return int(found["batches"])

    def __next__(self) -> RemoteInputs:
        if self._ended:
            raise StopIteration
        number = self._last + 1
        description: dict[str, Any] = {"found": "nothing"}
        while description["found"] == "nothing":
            description, dense, label, extra = self.connection.call_with_retry(
                lambda: self.connection.call.read(self.connection.servers.origin(0), self.stream, number, self.settled)
            )
        skipped_rows = SkippedRows.from_list(description["skipped_rows"])
        if description["found"] == "end":
            self._skipped_rows, self._ended = skipped_rows, True
            raise StopIteration
        position, size = Position.from_dict(description["position"]), description["size"]
        inputs = RemoteInputs(
            names=self._names,
            batch_size=size,
            dense=None if dense is None else dense.reshape(size, -1).copy(),
            label=None if label is None else label.reshape(size, *description["labels"]).copy(),
            position=position,
            extra=columns_from_bytes(extra),
            batches=self,
            number=number,
        )
        with Uninterrupted(), self._lock:
            self._skipped_rows = skipped_rows
            self._read[number] = _ReadBatch(position, skipped_rows)
            self._open.add(number)
            self._last = number
        return inputs

    def looked_up(self, number: int, train: bool) -> None:
        """Settle a batch after a lookup without training: it has no update."""
        if train:
            self._tickets.add(number)
        elif number not in self._tickets:
            self.settle(number)

    def settle(self, number: int) -> None:
        """Note that this batch was updated or dropped."""
        with Uninterrupted(), self._lock:
            self._open.discard(number)
            self._tickets.discard(number)
            oldest = min(self._open, default=self._last + 1)
            for each in [each for each in self._read if each < oldest - 2]:
                del self._read[each]

    def close(self) -> None:
        """Stop reading."""
        self._ended = True
        self.connection.close_stream(self.stream)


class RemoteRows:
    """Implements `satrap.worker.worker.Rows`. Tickets of batches that the worker read go to it, others to servers."""

    remote = True

    def __init__(self, features: Features, sharded: ShardedRows, connection: WorkerConnection) -> None:
        self.num_threads = sharded.num_threads
        self.lookup, self.empty, self.skip, self.settle = sharded.lookup, sharded.empty, sharded.skip, sharded.settle
        self.num_truncated = [0 for feature in features.values() if feature.max_length is not None]
        """For each sequence, the number of ids beyond its length in batches that the worker read."""
        self._names = [table.name for table in features.tables]
        self._sharded, self._connection = sharded, connection
        self._lock = threading.Lock()

    @property
    def latest_step(self) -> int:
        return self._sharded.latest_step

    @property
    def truncated(self) -> list[int]:
        return [sharded + far for sharded, far in zip(self._sharded.truncated, self.num_truncated, strict=True)]

    def add_truncated(self, cut: list[int]) -> None:
        """Add to the numbers of ids beyond the sequences' lengths."""
        with self._lock:
            self.num_truncated = [before + more for before, more in zip(self.num_truncated, cut, strict=True)]

    def owns_ticket(self, ticket: object) -> bool:
        return (
            ticket.batches.connection is self._connection
            if isinstance(ticket, RemoteTicket)
            else self._sharded.owns_ticket(ticket)
        )

    def update(
        self,
        tickets: Sequence[Any],
        gradients: list[TicketGradients],
        step: int,
        lrs: list[tuple[int, float]],
        scale: float,
    ) -> None:
        far = [isinstance(ticket, RemoteTicket) for ticket in tickets]
        if not any(far):
            self._sharded.update(tickets, gradients, step, lrs, scale)
            return
        if not all(far) or len({ticket.batches.stream for ticket in tickets}) > 1:
            raise TicketError("update of a batch: the tickets belong to several streams; update those of each alone")
        servers, batches = self._connection.servers, tickets[0].batches
        servers.claim(step, tickets[0])
        origin, stream = servers.origin(step), batches.stream
        rates = dict(zip(self._names, servers.lrs, strict=True)) | {self._names[table]: lr for table, lr in lrs}
        parts = [[block, *sequences] for block, sequences in gradients]
        flat = [as_one(each, np.float32) for each in parts]
        present = [[part is not None for part in each] for each in parts]
        numbers = [ticket.number for ticket in tickets]

        def call() -> list[int]:
            for i in range(len(tickets) - 1):
                self._connection.call.send_gradients(origin, stream, numbers[i], present[i], flat[i])
            return self._connection.call.update(origin, stream, numbers, present[-1], flat[-1], rates, scale)

        skipped = self._connection.call_with_retry(call)
        with Uninterrupted(), self._lock:
            for table, count in enumerate(skipped):
                servers.num_skipped[table] += count
            for ticket in tickets:
                ticket.used = True
                batches.settle(ticket.number)

    def drop(self, ticket: Any) -> None:
        if not isinstance(ticket, RemoteTicket):
            self._sharded.drop(ticket)
            return
        if ticket.used:
            raise TicketError("drop of a batch: this ticket was used already")
        with Uninterrupted():
            ticket.used = True
            ticket.batches.settle(ticket.number)
        with suppress(NotReadyError, RpcError):  # it has lost the batch, or learns of the drop with the next one
            self._connection.best_effort.drop(self._connection.servers.origin(0), ticket.batches.stream, ticket.number)


class RemoteWorker(ShardedWorker):
    """A `ShardedWorker` whose batches from declared sources are read and looked up by a worker's process."""

    def __init__(
        self,
        features: Features,
        servers: ServerGroup,
        address: str,
        *,
        keys: Keys | None = None,
        num_threads: int | None = None,
        deadline: float = DEADLINE_SECONDS,
        retry_seconds: float = 2.0,
    ) -> None:
        """Make a handshake with the worker at `address`. `ServerGroup` and `ShardedWorker` have the other options."""
        super().__init__(features, servers, num_threads=num_threads)
        spec = WorkerSpec(
            features=features,
            seed=servers.job.seed,
            servers=servers.addresses,
            wire=servers.wire,
            barrier_size=servers.barrier_size,
            extra_tables=servers.job.tables[len(features.tables) :],
        )
        self.connection = WorkerConnection(address, servers, spec, keys, deadline, retry_seconds)
        self._remote_rows = RemoteRows(features, self._sharded_rows, self.connection)
        self._rows = self._remote_rows

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()
        super().close()

    def batches(
        self, source: Any, position: Position | None = None, *, rank: int = 0, world_size: int = 1
    ) -> RemoteBatches:
        """Return the batches of a declared source, read by the worker."""
        return RemoteBatches(self.connection, self.features.names, source, position, rank=rank, world_size=world_size)

    def signature(self, source: Any) -> dict[str, Any]:
        """Return `Source.signature` of a declared source: the worker sees its files, this machine may not."""
        description = source_to_dict(source)
        return self.connection.call_with_retry(
            lambda: self.connection.call.signature(self.servers.origin(0), description)
        )

    def lookup(
        self,
        inputs: Inputs,
        *,
        step: int | None = None,
        oldest_open: int | None = None,
        train: bool = True,
        block: NDArray[np.float32] | None = None,
    ) -> LookupResult:
        """Look up a batch at the worker if the worker read it, as `Worker.lookup` does."""
        if not isinstance(inputs, RemoteInputs):
            return super().lookup(inputs, step=step, oldest_open=oldest_open, train=train, block=block)
        self.settle()
        origin, batches, number = self.servers.origin(step or 0), inputs.batches, inputs.number
        since = oldest_open or step or 0
        rows, sequences, masks, cut = self.connection.call_with_retry(
            lambda: self.connection.call.lookup(origin, batches.stream, number, batches.settled, since, train)
        )
        self._remote_rows.add_truncated(cut)
        batches.looked_up(number, train)
        n = inputs.batch_size
        if block is None:
            block = self._remote_rows.empty(n, self.features.total_dim)
        np.copyto(block, rows.reshape(block.shape))  # the received array is read-only
        sequences_by_name, masks_by_name, at, line = {}, {}, 0, 0
        for each in self._sequences:
            shape = each.shape(n)
            own = self._remote_rows.empty(n, each.floats)
            np.copyto(own, sequences[at : at + n * each.floats].reshape(own.shape))
            sequences_by_name[each.name] = own.reshape(shape)
            masks_by_name[each.name] = masks[line : line + n * shape[1]].reshape(shape[:2]).copy()
            at, line = at + n * each.floats, line + n * shape[1]
        ticket = RemoteTicket(batches, number, n) if train else None
        return LookupResult(block=block, sequences=sequences_by_name, masks=masks_by_name, truncated=cut, ticket=ticket)
