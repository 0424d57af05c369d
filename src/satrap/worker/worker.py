"""The worker: looks up the rows of one batch's ids, and applies the gradients of batches to the rows.

`Inputs` come in; a block of pooled rows, padded sequences and a ticket go out. The update takes the ticket and
gradients of the same shapes. The rows are in the tables of a `Rows`: in this process (`satrap.worker.local_rows`) or on
servers (`satrap.worker.sharded_rows`). The worker checks its arguments in the same way for both. Its cost in Python
does not grow with the number of features, except sequences. Thread-safe. It decides nothing about timing: it has no
gate, queue or thread.

The gradient of an id in a bag is that of the bag, times `scale`, times the id's weight, divided by the number of ids
for "mean" and by its square root for "sqrtn". The gradients of one id are summed in order of appearance: ticket after
ticket, feature after feature, sample after sample. Then the table's optimizer updates the row, once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap.config import array_args
from satrap.config.features import Features
from satrap.config.tables import Feature, Table
from satrap.config.validation import check_flag
from satrap.data.inputs import Inputs, Position, as_inputs
from satrap.data.iterable import IterableSource
from satrap.errors import InputError, TicketError
from satrap.table.engine import resolve_step

if TYPE_CHECKING:
    from satrap.worker.server_group import ServerGroup


class RowStream:
    """What rows that several trainers share must know of a stream; other rows need to know nothing.

    Each method may be called again, from another thread, and after another stream was opened, and then does nothing.
    """

    def end_lookups(self) -> None:
        """Note that the stream needs no further lookup; those that come return zeros."""

    def end_updates(self) -> None:
        """Note that the stream has no further update, and wait until the rows have all of them."""

    def release(self) -> None:
        """Let calls fail that wait for other trainers: the stream ends with an error."""


_WHERE = "lookup of a batch"
_UPDATE = "update of a batch"
Gradients = Mapping[str, ArrayLike | None]
Floats = NDArray[np.float32]
Block = Any
"""float32 [lines, floats]: a numpy array, or a tensor if the rows are on a device."""
TicketGradients = tuple[Block | None, list[Block | None]]
"""Gradients of one ticket's block and of each of its sequences; None leaves the ids unchanged."""


class Ticket(Protocol):
    """Names a lookup whose update is still to come; to be used once."""

    @property
    def used(self) -> bool:
        """Whether it was updated or dropped."""

    @property
    def batch_size(self) -> int:
        """Number of samples in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class BagRequest:
    """The lookup of one batch, with checked arguments."""

    values: Any
    """The ids of all bags, feature after feature and sample after sample: uint64, or `DeviceIds` if they lie on the
    device of the rows. Those have their offsets and weights."""
    offsets: NDArray[np.int64] | None
    """Where each bag begins in `values`, and where the last one ends; None: each bag has one id."""
    weights: Floats | None
    """The weight of each id, if a feature is weighted."""
    batch_size: int
    step: int | None = None
    """The step of a training lookup; None: the next one."""
    oldest_open: int | None = None
    train: bool = False
    first_epoch: bool = True
    """Whether to count sightings in tables that count only those of the first epoch."""
    resolved: Any = None
    """What `Worker.resolve` found ahead of the lookup."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdateRequest:
    """One optimizer step, with checked arguments."""

    tickets: Sequence[Any]
    gradients: list[TicketGradients]
    """For each ticket."""
    step: int
    lrs: list[tuple[int, float]]
    """Pairs of a table's number and its rate."""
    scale: float
    magnitude: Any = None
    """What `Worker.measure` returned for these gradients; None: they were not measured."""


class Rows(Protocol):
    """Where the rows of a worker's features are. Does not check its arguments."""

    num_threads: int
    """Threads of one call in this process."""

    @property
    def latest_step(self) -> int:
        """The largest step of any training lookup or update so far; 0 before the first."""

    @property
    def truncated(self) -> list[int]:
        """For each sequence, the number of ids beyond its max_length so far."""

    def empty(self, lines: int, floats: int) -> Block:
        """Return aligned memory, which is reused once the array is collected."""

    def lookup(self, request: BagRequest, block: Block, sequences: list[Block]) -> Ticket | None:
        """Fill `block` and `sequences`, and return a ticket if the request trains."""

    def owns_ticket(self, ticket: object) -> bool:
        """Return whether the ticket comes from a lookup of this object."""

    def update(self, request: UpdateRequest) -> None:
        """Apply one optimizer step."""

    def drop(self, ticket: Any) -> None:
        """Give up a ticket without an update."""

    def skip(self, step: int) -> None:
        """Note that this step has no update. The next `settle` or lookup tells processes that wait for it."""

    def settle(self) -> None:
        """Return once all processes that wait for a skipped step know that it has no update."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LookupResult:
    """The result of one lookup."""

    block: Block
    """[batch_size, total_dim]: pooled rows, feature after feature; see `Features`."""
    sequences: dict[str, Block]
    """For each sequence [batch_size, max_length, dim]; 0 where there is no id."""
    masks: dict[str, Any]
    """For each sequence, bool [batch_size, max_length]: where there is an id. Tensors, if the ids are."""
    truncated: list[int]
    """For each sequence, the number of ids beyond its max_length, which were not looked up."""
    ticket: Ticket | None
    """Names the batch in its update; None without training."""


class Worker:
    """Looks up and updates the features of a model, over rows here or on servers."""

    servers: "ServerGroup | None" = None
    """The servers of the rows; None if the rows are in this process."""
    device: Any = None
    """The torch device of the rows, of blocks and of gradients; None: they are numpy arrays in this process."""
    device_stream: Any = None
    """The stream of the device on which the rows are read and changed; None: they are not on a device."""
    launches: Any = None
    """The order in which the devices of several trainers are given collectives; None: they have no rows."""

    def __init__(self, features: Features, rows: Rows) -> None:
        """rows: of the tables of these features."""
        self.features = features
        self._rows = rows
        self.num_threads = rows.num_threads
        """Threads of one call on the tables."""
        self._sequences = [
            _Sequence(name, index, feature)
            for index, (name, feature) in enumerate(features.items())
            if feature.pooling == "none"
        ]
        self._numbers = {table.name: (i, table.optimizer) for i, table in enumerate(features.tables)}

    @property
    def truncated(self) -> dict[str, int]:
        """For each sequence, the number of ids beyond its max_length so far, which were not looked up."""
        return dict(zip((sequence.name for sequence in self._sequences), self._rows.truncated, strict=True))

    def can_read(self, source: Any) -> bool:
        """Return whether another process reads the source for this worker, so that its batches have no ids here."""
        return False

    def inputs_of(self, ids: Any) -> Inputs:
        """Return a batch of ids by feature; see `satrap.data.inputs.as_inputs`."""
        return as_inputs(self.features, ids)

    def batches(self, source: Any, position: Position | None = None, **share: int) -> Iterator[Inputs]:
        """Return the batches of a source, or of an iterable without columns, after the position.

        share: the trainer's `rank` and the `world_size`, of several."""
        declared = source if hasattr(source, "batches") else IterableSource(source)
        found: Iterator[Inputs] = declared.batches(self.features, position=position, **share)
        return found

    def signature(self, source: Any) -> Mapping[str, Any] | None:
        """Return `Source.signature`; None if the source has none."""
        found: Mapping[str, Any] | None = source.signature() if hasattr(source, "signature") else None
        return found

    def resolve(self, inputs: Inputs, *, step: int, oldest_open: int) -> BagRequest | None:
        """Do the part of a training lookup that needs no row's values, while earlier steps are in progress. Pass the
        result to `lookup_resolved`, in the same order; None: `lookup` does all of it."""
        return None

    def lookup(
        self,
        inputs: Inputs,
        *,
        step: int | None = None,
        oldest_open: int | None = None,
        train: bool = True,
        block: Block | None = None,
    ) -> LookupResult:
        """Look up the rows of the batch's ids. `step`, `oldest_open` and `train` are those of `Store.lookup`. The batch
        belongs to the first epoch if its position says so, or if it has no position.

        block: memory to write pooled rows into, float32 [batch_size, total_dim], best aligned to 64 bytes. None: a new
            aligned array, whose memory is reused once the array is collected.
        """
        return self._look_up(self._request(inputs, step, oldest_open, train), block)

    def lookup_resolved(self, request: BagRequest) -> LookupResult:
        """Look up the rows of a batch that was resolved."""
        return self._look_up(request, None)

    def _look_up(self, request: BagRequest, block: Block | None) -> LookupResult:
        batch_size = request.batch_size
        shape = (batch_size, self.features.total_dim)
        if block is None:
            block = self._rows.empty(*shape)
        memory = self._check_block(block, shape)
        sequences = [(each, self._rows.empty(batch_size, each.floats)) for each in self._sequences]
        ticket = self._rows.lookup(request, memory, [rows for _, rows in sequences])
        masks, truncated = self._masks(request)
        return LookupResult(
            block=block,
            sequences={each.name: rows.reshape(each.shape(batch_size)) for each, rows in sequences},
            masks=masks,
            truncated=truncated,
            ticket=ticket,
        )

    def _masks(self, request: BagRequest) -> tuple[dict[str, Any], list[int]]:
        """Return `masks` and `truncated` of a lookup's result."""
        lengths = [(each, each.lengths(request)) for each in self._sequences]
        return {each.name: each.mask(its) for each, its in lengths}, [
            each.count_truncated(its) for each, its in lengths
        ]

    def update(
        self,
        tickets: Sequence[Ticket],
        block_gradients: Sequence[ArrayLike | None],
        sequence_gradients: Sequence[Gradients] | None = None,
        *,
        step: int | None = None,
        lrs: Mapping[str, float] | None = None,
        scale: float = 1.0,
        magnitude: Any = None,
    ) -> None:
        """Apply one optimizer step to the ids of one batch, or of several batches whose gradients were accumulated.

        tickets: those of the lookups, each used once. After an error none of them is used.
        block_gradients: for each ticket, float32 [batch_size, total_dim]. None leaves the ticket's pooled ids
            unchanged, which differs from a gradient of 0.
        sequence_gradients: for each ticket, by name, float32 [batch_size, max_length, dim]; None or a missing name
            leaves the sequence's ids unchanged.
        step: the job's batch number; None: the latest. Rows are stamped with it.
        lrs: learning rates of this update by table; other tables use their own.
        scale: factor of each gradient: 1 / loss scale, or 1 / number of trainers.
        magnitude: what `measure` returned for these gradients, if it was called.
        """
        for ticket in _require_list("tickets", tickets):
            if self._require_ticket(_UPDATE, ticket).used:
                raise TicketError(f"{_UPDATE}: this ticket was used already; a batch is updated once, look it up again")
        if sequence_gradients is None:
            sequence_gradients = [{}] * len(tickets)
        for name, given in (("block_gradients", block_gradients), ("sequence_gradients", sequence_gradients)):
            if len(_require_list(name, given)) != len(tickets) or not tickets:
                raise InputError(
                    f"{_UPDATE}: {len(tickets)} tickets and {len(given)} {name}; expected at least one ticket, "
                    "and gradients for each"
                )
        gradients = [
            self._gradients(ticket, block, sequences)
            for ticket, block, sequences in zip(tickets, block_gradients, sequence_gradients, strict=True)
        ]
        at = max(1, self._rows.latest_step) if step is None else array_args.as_step(_UPDATE, "step", step)
        rates = [] if lrs is None else self._learning_rates(lrs)
        factor = array_args.as_scale(_UPDATE, scale)
        self._rows.update(UpdateRequest(list(tickets), gradients, at, rates, factor, magnitude))

    def measure(self, gradients: Sequence[tuple[Any, float]]) -> Any:
        """Return the largest magnitude of tensors times their factors, for `update`; None if it needs none. Call this
        where the tensors are computed, without a wait for them."""
        return None

    def drop(self, ticket: Ticket) -> None:
        """Give up a batch that will not be updated. Its rows stay as the lookup left them."""
        self._rows.drop(self._require_ticket("drop of a batch", ticket))

    def open_stream(self, step: int) -> RowStream:
        """Prepare for the lookups and updates of a training stream that begins at this step."""
        return RowStream()

    def pad(self, step: int, oldest_open: int) -> None:
        """Take part in a step in which only other trainers look rows up."""

    def pause(self) -> None:
        """Return once the rows have all updates and skipped steps of this trainer, whose stream is paused."""

    def skip(self, step: int) -> None:
        """Note that this step will have no update; `settle` tells the processes that wait for it."""
        self._rows.skip(step)

    def settle(self) -> None:
        """Return once all processes that wait for skipped steps know of them."""
        self._rows.settle()

    def _require_ticket(self, where: str, ticket: Any) -> Ticket:
        if not hasattr(ticket, "used"):
            raise InputError(f"{where}: a ticket is a {type(ticket).__name__}; expected one that lookup returned")
        if not self._rows.owns_ticket(ticket):
            raise TicketError(f"{where}: a ticket comes from another store; pass it to the worker that returned it")
        own: Ticket = ticket
        return own

    def _request(
        self, inputs: Inputs, step: int | None = None, oldest_open: int | None = None, train: bool = False
    ) -> BagRequest:
        """Check the arguments of a lookup."""
        if not isinstance(inputs, Inputs):
            raise InputError(f"{_WHERE}: inputs is a {type(inputs).__name__}; expected a satrap.data.inputs.Inputs")
        if inputs.names != self.features.names:
            raise InputError(f"{_WHERE}: {_name_differences(inputs.names, self.features.names)}")
        batch_size = array_args.as_step(_WHERE, "batch_size", inputs.batch_size, low=0, high=2**30 - 1)
        values, offsets, weights = self._arrays(inputs, batch_size)
        check_flag(_WHERE, "train", train, InputError)
        latest = self._rows.latest_step
        step, oldest_open = resolve_step(_WHERE, latest, train=train, step=step, oldest_open=oldest_open)
        first_epoch = inputs.position is None or inputs.position.epoch == 0
        return BagRequest(values, offsets, weights, batch_size, step, oldest_open, train, first_epoch)

    def _arrays(self, inputs: Inputs, batch_size: int) -> tuple[Any, NDArray[np.int64] | None, Floats | None]:
        """Check the ids of a batch, their offsets and weights."""
        values = array_args.as_ids(_WHERE, inputs.values)
        meaning = "features * batch_size + 1, or None if every bag holds one id"
        offsets = inputs.offsets
        if offsets is not None:
            offsets = array_args.as_offsets(_WHERE, offsets, len(self.features) * batch_size + 1, meaning)
        return values, offsets, None if inputs.weights is None else array_args.as_weights(_WHERE, inputs.weights)

    def _gradients(self, ticket: Ticket, block: ArrayLike | None, sequences: Gradients) -> TicketGradients:
        if not isinstance(sequences, Mapping):
            raise InputError(
                f"{_UPDATE}: sequence gradients are a {type(sequences).__name__}; expected a dict by feature"
            )
        unknown = sequences.keys() - {each.name for each in self._sequences}
        if unknown:
            raise InputError(f"{_UPDATE}: sequence gradients name {sorted(unknown)}; expected names of sequences")
        shape = (ticket.batch_size, self.features.total_dim)
        of_block = None if block is None else self._check_gradient(_UPDATE, block, shape)
        of_sequences: list[Block | None] = []
        for each in self._sequences:
            given = sequences.get(each.name)
            where = f"{_UPDATE}, feature {each.name!r}"
            of_sequences.append(
                None if given is None else self._check_gradient(where, given, each.shape(ticket.batch_size))
            )
        return of_block, of_sequences

    def _check_block(self, block: Any, shape: tuple[int, ...]) -> Block:
        return array_args.as_out(_WHERE, block, shape, "block")

    def _check_gradient(self, where: str, gradient: Any, shape: tuple[int, ...]) -> Block:
        return array_args.as_gradients(where, gradient, shape)

    def _learning_rates(self, lrs: Mapping[str, float]) -> list[tuple[int, float]]:
        if not isinstance(lrs, Mapping):
            raise InputError(f"{_UPDATE}: lrs is a {type(lrs).__name__}; expected a dict from table names to numbers")
        unknown = lrs.keys() - self._numbers.keys()
        if unknown:
            raise InputError(f"{_UPDATE}: lrs names {sorted(unknown)}; expected names of tables")
        rates = []
        for name, lr in lrs.items():
            number, optimizer = self._numbers[name]
            rates.append((number, array_args.as_lr(f"table {name!r}", lr, optimizer)))
        return rates


class _Sequence:
    """A feature whose rows are not pooled."""

    def __init__(self, name: str, index: int, feature: Feature) -> None:
        assert feature.max_length is not None
        self.name = name
        self._index = index
        self._max_length, self._dim = feature.max_length, feature.table.dim
        self._padding_id = feature.padding_id
        self.floats = self._max_length * self._dim

    def shape(self, batch_size: int) -> tuple[int, int, int]:
        return batch_size, self._max_length, self._dim

    def lengths(self, request: BagRequest) -> NDArray[np.int64]:
        """Return how many ids each sample has, without padding."""
        first, end = self._index * request.batch_size, (self._index + 1) * request.batch_size + 1
        bounds = np.arange(first, end) if request.offsets is None else request.offsets[first:end]
        if self._padding_id is not None:
            ids = request.values[bounds[0] : bounds[-1]] != self._padding_id
            bounds = np.append(0, np.cumsum(ids))[bounds - bounds[0]]
        return np.diff(bounds)

    def mask(self, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.arange(self._max_length) < lengths[:, None]

    def count_truncated(self, lengths: NDArray[np.int64]) -> int:
        return int(np.maximum(lengths - self._max_length, 0).sum())


def native_features(
    features: Features, tables: Sequence[Table]
) -> list[tuple[str, int, str, bool, int, bool, int | None]]:
    """Return the features in the form of the core. `tables` may hold more tables than the features', in any order."""
    numbers = {table.name: number for number, table in enumerate(tables)}
    return [
        (
            name,
            numbers[feature.table.name],
            feature.pooling,
            feature.weighted,
            feature.max_length or 0,
            feature.keep == "last",
            feature.padding_id,
        )
        for name, feature in features.items()
    ]


def _name_differences(found: object, expected: tuple[str, ...]) -> str:
    if not isinstance(found, tuple):
        return f"names is a {type(found).__name__}; expected the tuple of features.names"
    missing, extra = [name for name in expected if name not in found], [name for name in found if name not in expected]
    if missing or extra:
        return f"the features {missing} are missing and {extra} are unknown; expected features.names, in its order"
    return f"the features are {list(found)}; expected them in the order of features.names, {list(expected)}"


def _require_list(name: str, value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{_UPDATE}: {name} is a {type(value).__name__}; expected a list, one of each batch")
    return value
