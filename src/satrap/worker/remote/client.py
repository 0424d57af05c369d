"""The trainer's side of a remote worker: batches without ids, tickets by number, gradients to send.

    RemoteBatches.next ─> read ─────> dense features, labels, position        the ids stay with the worker
    RemoteRows.lookup ──> lookup ───> block, sequences, masks
    RemoteRows.update ──> gradients ─> nothing                                the worker sums them and calls the servers

The trainer remembers the position of each batch in flight, so it survives the worker. A restarted worker gets all of it
in a new handshake (`WorkerConnection.handshake`), and every call continues where it was. Batches that carry their ids
are looked up from here, as by any `ShardedRows`.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from satrap.config.features import Features
from satrap.data.inputs import Inputs, Position
from satrap.data.registry import is_portable, source_to_dict
from satrap.data.skipped_rows import SkippedRows
from satrap.errors import NotReadyError, RpcError, SatrapError, SourceError, StreamError, TicketError
from satrap.interrupts import Uninterrupted
from satrap.rpc import Client, Keys, Origin
from satrap.rpc.release import require_same_release
from satrap.worker.remote.batch_reader import ReadStart
from satrap.worker.remote.protocol import (
    Bytes,
    Flags,
    Floats,
    Ids,
    Jagged,
    PooledCodec,
    WorkerCalls,
    as_one,
    columns_from_bytes,
    split_one,
)
from satrap.worker.remote.worker_spec import WorkerSpec
from satrap.worker.rows import BagRequest, Ticket, UpdateRequest, id_request
from satrap.worker.server_group import ServerGroup
from satrap.worker.sharded_rows import ShardedRows, require_tables
from satrap.worker.sharded_tables import ShardedTables
from satrap.worker.worker import InputReader, Worker

DEADLINE_SECONDS = 150.0
"""Deadline of a call. The worker may wait for a server as long as a trainer would, once for skipped steps and once for
the call itself."""
_BEST_EFFORT_SECONDS = 2.0  # deadline of a call that only frees memory
_MAX_HANDSHAKES = 100  # handshakes in one call: if these do not help, more will not
_P = ParamSpec("_P")
_R = TypeVar("_R")


def require_same_releases(addresses: Sequence[str], keys: Keys | None) -> None:
    """Raise ConfigError unless all workers have this process's release. Starts nothing there."""
    for address in addresses:
        with Client(WorkerCalls, address, keys, deadline=DEADLINE_SECONDS) as client:
            answer = client.call.status(Origin())
        require_same_release(answer.get("release"), f"the worker at {address}")


class WorkerConnection:
    """One trainer's connection to the worker's process."""

    def __init__(
        self,
        address: str,
        servers: ServerGroup,
        spec: WorkerSpec,
        codec: PooledCodec,
        *,
        keys: Keys | None,
        deadline: float,
        retry_seconds: float,
    ) -> None:
        """Make a handshake with the worker."""
        self.address, self.servers, self.codec = address, servers, codec
        self._spec = spec.to_dict(), as_one(spec.frozen_ids, np.uint64)
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

    def call_with_retry(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return the call's result. Repeats the call after a handshake if the worker was restarted."""
        lost: NotReadyError | None = None
        for _ in range(_MAX_HANDSHAKES):
            try:
                if lost is not None:
                    self.handshake()
                with self._name_worker_in_errors():
                    return call(*args, **kwargs)
            except NotReadyError as error:
                lost = error
        assert lost is not None
        raise lost

    def handshake(self) -> None:
        """Make a handshake and reopen all streams, which is all that the worker must know to continue."""
        with self._handshake_lock:
            self.call.hello(self.servers.origin(0), *self._spec)
            with self._name_worker_in_errors():
                for stream, batches in list(self._streams.items()):
                    self._open(stream, batches)

    def open_stream(self, batches: "RemoteBatches") -> int:
        """Open a stream of these batches, and return its number."""
        stream = next(self._numbers)
        self._streams[stream] = batches
        try:
            self.call_with_retry(self._open, stream, batches)
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
        self._client.close()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteInputs(Inputs):
    """A batch whose ids stay with the worker."""

    values: NDArray[np.uint64] = field(init=False, repr=False)
    offsets: NDArray[np.int64] | None = field(init=False, repr=False)
    weights: NDArray[np.float32] | None = field(init=False, repr=False)
    batches: "RemoteBatches" = field(repr=False)
    number: int
    jagged: Jagged

    def __getattr__(self, name: str) -> Any:
        if name in ("values", "offsets", "weights"):
            raise StreamError(
                f"the batch has no {name} here: its ids stay with the worker at {self.batches.connection.address}; "
                "name their columns in the source's `extra` to see them, or train without workers"
            )
        raise AttributeError(name)


@dataclass(slots=True, eq=False, weakref_slot=True)
class RemoteTicket:
    """Implements `satrap.worker.rows.Ticket` for a batch that the worker's process looked up."""

    owner: "RemoteBatches"
    number: int
    batch_size: int
    jagged: Jagged
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
        self, connection: WorkerConnection, features: Features, source: Any, position: Position | None, **share: int
    ):
        """share: the trainer's `rank` and the `world_size`, of several."""
        self.connection, self.servers, self.source = connection, connection.servers, source_to_dict(source)
        self._features, self._position, self._share = features, position, share
        self._last = 0  # the number of the last batch that arrived
        self._read: dict[int, _ReadBatch] = {}  # batches from which reading may have to restart
        self._open: set[int] = set()  # batches neither updated nor dropped
        self._tickets: set[int] = set()  # open batches that have a ticket
        self.skipped_rows = SkippedRows()
        """What was left out so far, as in `Batches.skipped_rows`."""
        self._ended = False
        self._lock = threading.Lock()
        self.stream = connection.open_stream(self)
        """The number by which the worker knows this stream."""

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
        length = self._length()
        if "batches" not in length:
            raise TypeError(length["why"])
        return int(length["batches"])

    def about_length(self) -> int:
        """Return the number of batches, or an estimate; TypeError if there is none."""
        length = self._length()
        if "about" in length:
            return int(length["about"])
        return len(self)

    def _length(self) -> dict[str, Any]:
        connection = self.connection
        return connection.call_with_retry(connection.call.length, self.servers.origin(0), self.stream)

    def __next__(self) -> RemoteInputs:
        if self._ended:
            raise StopIteration
        number, connection = self._last + 1, self.connection
        description: dict[str, Any] = {"found": "nothing"}
        while description["found"] == "nothing":
            description, dense, label, extra = connection.call_with_retry(
                connection.call.read, self.servers.origin(0), self.stream, number, self.settled
            )
        skipped_rows = SkippedRows.from_list(description["skipped_rows"])
        if description["found"] == "end":
            self.skipped_rows, self._ended = skipped_rows, True
            raise StopIteration
        position, size = Position.from_dict(description["position"]), description["size"]
        inputs = RemoteInputs(
            names=self._features.names,
            batch_size=size,
            dense=None if dense is None else dense.reshape(size, -1).copy(),
            label=None if label is None else label.reshape(size, *description["labels"]).copy(),
            position=position,
            extra=columns_from_bytes(extra),
            batches=self,
            number=number,
            jagged={name: np.append(0, np.cumsum(lengths)) for name, lengths in description["jagged"].items()},
        )
        with Uninterrupted(), self._lock:
            self.skipped_rows = skipped_rows
            self._read[number] = _ReadBatch(position, skipped_rows)
            self._open.add(number)
            self._last = number
        return inputs

    def _settle(self, number: int) -> None:
        """Note that this batch was updated or dropped."""
        with Uninterrupted(), self._lock:
            self._open.discard(number)
            self._tickets.discard(number)
            oldest = min(self._open, default=self._last + 1)
            for settled in [number for number in self._read if number < oldest - 2]:
                del self._read[settled]

    def lookup(
        self, number: int, step: int, oldest_open: int, train: bool
    ) -> tuple[Floats | None, Floats | None, Bytes | None, Flags, list[int]]:
        """Look up a batch, and return what `WorkerCalls.lookup` does. Without training the batch is settled."""
        connection = self.connection
        at = self.servers.origin(step), self.stream, number, self.settled
        reply = connection.call_with_retry(connection.call.lookup, *at, oldest_open, train)
        if train:
            self._tickets.add(number)
        elif number not in self._tickets:
            self._settle(number)
        return reply

    def update(self, request: UpdateRequest, of_ids: tuple[Ids, list[int], Floats] | None = None) -> None:
        """Implements `satrap.worker.rows.Rows.update` for the tickets of this stream. of_ids: ids beside them, how many
        there are of each table, and their gradients."""
        servers, call = self.servers, self.connection.call
        tickets: Sequence[RemoteTicket] = request.tickets
        servers.claim(request.step, tickets[0])
        origin, tables = servers.origin(request.step), self._features.tables  # the first ones of the servers' job
        rates = {table.name: lr for table, lr in zip(tables, servers.lrs, strict=False)}
        rates |= {tables[table].name: lr for table, lr in request.lrs}
        parts = [[block, *sequences] for block, sequences in request.gradients]
        flat = [as_one(of_batch, np.float32) for of_batch in parts]
        present = [[part is not None for part in of_batch] for of_batch in parts]
        numbers = [ticket.number for ticket in tickets]
        encode = self.connection.codec.encode
        sent = [
            encode(numbers, ticket.batch_size, are_present, ticket.jagged)
            for numbers, ticket, are_present in zip(flat, tickets, present, strict=True)
        ]

        def send() -> list[int]:
            for i in range(len(tickets) - 1):
                call.send_gradients(origin, self.stream, numbers[i], present[i], *sent[i])
            gradients, coded = sent[-1]
            last = present[-1], gradients, rates, request.scale, coded
            return call.update(origin, self.stream, numbers, *last, *(of_ids or ()))

        skipped = self.connection.call_with_retry(send)
        with Uninterrupted():
            servers.add_skipped(skipped)
            for ticket in tickets:
                ticket.used = True
                self._settle(ticket.number)

    def drop(self, ticket: RemoteTicket) -> None:
        if ticket.used:
            raise TicketError("drop of a batch: this ticket was used already; a batch is updated or dropped once")
        with Uninterrupted():
            ticket.used = True
            self._settle(ticket.number)
        with suppress(NotReadyError, RpcError):  # it has lost the batch, or learns of the drop with the next one
            self.connection.best_effort.drop(self.servers.origin(0), self.stream, ticket.number)

    def close(self) -> None:
        """Stop reading."""
        self._ended = True
        self.connection.close_stream(self.stream)


@dataclass(slots=True, eq=False)
class RemoteIds:
    """Implements `satrap.worker.rows.PlacedIds` for a batch that the worker's process read."""

    inputs: RemoteInputs
    masked: tuple[Flags, list[int]] | None = None
    """The masks of padded sequences, flat, and for each sequence the number of ids beyond its max_length, after the
    lookup."""

    @property
    def jagged(self) -> Jagged:
        return self.inputs.jagged

    def masks(self, features: Features) -> tuple[dict[str, Any], list[int]]:
        assert self.masked is not None
        flat, truncated = self.masked
        lengths = {name: length for name, feature in features.items() if (length := feature.padded_length) is not None}
        each_mask = split_one(flat, [(self.inputs.batch_size, length) for length in lengths.values()])
        return {name: mask.copy() for name, mask in zip(lengths, each_mask, strict=True)}, truncated


class RemoteRows(ShardedRows):
    """`ShardedRows` of which a worker's process looks up the batches that it read, and takes their tickets."""

    connection: WorkerConnection

    def __init__(self, features: Features, servers: ServerGroup, *, num_threads: int | None) -> None:
        super().__init__(features, servers, num_threads=num_threads)
        self._num_truncated = [0] * len(super().truncated)  # in batches that the worker read

    @property
    def truncated(self) -> list[int]:
        return [sum(counts) for counts in zip(super().truncated, self._num_truncated, strict=True)]

    def place_ids(self, inputs: Inputs, *, train: bool) -> Inputs | RemoteIds:
        return RemoteIds(inputs) if isinstance(inputs, RemoteInputs) else inputs

    def lookup(self, request: BagRequest, block: Floats, sequences: list[Floats]) -> Ticket | None:
        ids = request.values
        if not isinstance(ids, RemoteIds):
            return super().lookup(request, block, sequences)
        self.settle()
        batches, number, n, step = ids.inputs.batches, ids.inputs.number, request.batch_size, request.step or 0
        rows, flat, coded, masks, truncated = batches.lookup(number, step, request.oldest_open or step, request.train)
        with self._lock:
            self._num_truncated = [sum(counts) for counts in zip(self._num_truncated, truncated, strict=True)]
        ids.masked = masks, truncated
        if coded is None:
            assert rows is not None and flat is not None
            received = [rows.reshape(block.shape), *split_one(flat, [rows.shape for rows in sequences])]
        else:
            flat = self.connection.codec.decode(None, coded, n, [True] * (1 + len(sequences)), ids.jagged)
            received = split_one(flat, [part.shape for part in (block, *sequences)])
        for mine, theirs in zip([block, *sequences], received, strict=True):  # the received arrays are read-only
            np.copyto(mine, theirs)
        return RemoteTicket(batches, number, n, ids.jagged) if request.train else None

    def owns_ticket(self, ticket: object) -> bool:
        owner = getattr(ticket, "owner", None)
        return owner is self or getattr(owner, "servers", None) is self.servers

    def update(self, request: UpdateRequest) -> None:
        owner = request.tickets[0].owner
        *tickets, last = request.tickets
        is_beside = owner is not self and last.owner is self and last.ids is not None
        if any(ticket.owner is not owner for ticket in (tickets if is_beside else request.tickets)):
            raise TicketError("update of a batch: the tickets belong to several streams; update those of each alone")
        if owner is self:
            super().update(request)
        elif not is_beside:
            owner.update(request)
        else:
            values, offsets, *_ = id_request(self._id_features, last.ids, None, None).native
            assert offsets is not None
            gradients = as_one(request.gradients[-1][1], np.float32)
            beside = values, np.diff(offsets).tolist(), gradients
            owner.update(replace(request, tickets=tickets, gradients=request.gradients[:-1]), beside)
            self.split.drop(last.split)
            last.used = True

    def drop(self, ticket: Any) -> None:
        drop = super().drop if ticket.owner is self else ticket.owner.drop
        drop(ticket)

    def close(self) -> None:
        self.connection.close()
        super().close()


class RemoteReader(InputReader):
    """Makes batches of declared sources, which the worker's process reads, and of other data in this process."""

    def __init__(self, features: Features, connection: WorkerConnection) -> None:
        super().__init__(features)
        self._connection = connection

    def can_read(self, source: Any) -> bool:
        return is_portable(source)

    def batches(self, source: Any, position: Position | None = None, **share: int) -> Iterator[Inputs]:
        if not self.can_read(source):
            return super().batches(source, position, **share)
        return RemoteBatches(self._connection, self._features, source, position, **share)

    def signature(self, source: Any) -> Mapping[str, Any] | None:
        """Return `Source.signature`: the worker sees the files of a declared source, this machine may not."""
        if not self.can_read(source):
            return super().signature(source)
        connection = self._connection
        origin = connection.servers.origin(0)
        return connection.call_with_retry(connection.call.signature, origin, source_to_dict(source))


def remote_worker(
    features: Features,
    servers: ServerGroup,
    address: str,
    *,
    keys: Keys | None = None,
    num_threads: int | None = None,
    deadline: float = DEADLINE_SECONDS,
    retry_seconds: float = 2.0,
) -> Worker:
    """Make a handshake with the worker's process at `address`, and return a worker over tables on servers whose batches
    from declared sources that process reads and looks up. `ServerGroup` and `sharded_worker` have the other options."""
    require_tables(features, servers)
    rows = RemoteRows(features, servers, num_threads=num_threads)
    spec = WorkerSpec(
        features=features,
        seed=servers.job.seed,
        servers=servers.addresses,
        wire=servers.wire,
        barrier_size=servers.barrier_size,
        extra_tables=servers.job.tables[len(features.tables) :],
    )
    codec = PooledCodec(features, rows.split, servers.wire)
    rows.connection = WorkerConnection(
        address, servers, spec, codec, keys=keys, deadline=deadline, retry_seconds=retry_seconds
    )
    return Worker(features, rows, ShardedTables(servers), reader=RemoteReader(features, rows.connection))
