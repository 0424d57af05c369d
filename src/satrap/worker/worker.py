"""The worker: looks up the rows of one batch's ids, and applies the gradients of batches to the rows.

`Inputs` come in; a block of pooled rows, sequences and a ticket go out. The update takes the ticket and
gradients of the same shapes. The rows are where a `Rows` has them, and blocks are arrays or tensors; the worker checks
its arguments in the same way for all. `local_worker`, `sharded_worker`, `remote_worker`, `device_worker` and
`collective_worker` build one. Its cost in Python does not grow with the number of features, except sequences.
Thread-safe. It decides nothing about timing: it has no gate, queue or thread.

The gradient of an id in a bag is that of the bag, times `scale`, times the id's weight, divided by the number of ids
for "mean" and by its square root for "sqrtn". The gradients of one id are summed in order of appearance: ticket after
ticket, feature after feature, sample after sample. Then the table's optimizer updates the row, once.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap.config import array_args
from satrap.config.features import Features
from satrap.config.tables import Feature
from satrap.config.validation import check_flag
from satrap.data.inputs import Inputs, Position, as_inputs
from satrap.data.iterable import IterableSource
from satrap.errors import ConfigError, InputError, TicketError
from satrap.table.engine import resolve_step
from satrap.worker.rows import BagRequest, Block, Floats, Rows, Ticket, TicketGradients, UpdateRequest, id_features

if TYPE_CHECKING:
    from satrap.table.table_group import TableGroup
    from satrap.worker.sharded_tables import ShardedTables


_WHERE = "lookup of a batch"
_UPDATE = "update of a batch"
Gradients = Mapping[str, ArrayLike | None]


def require_features(features: object) -> None:
    """Raise ConfigError unless these are `Features`, for a worker whose tables are created from them."""
    if not isinstance(features, Features):
        raise ConfigError(f"features is a {type(features).__name__}; expected a satrap.config.features.Features of it")


class ArrayBlocks:
    """The kind of block of rows in CPU memory: numpy arrays."""

    device: Any = None
    """The torch device of blocks and gradients; None: they are arrays."""

    def check_block(self, block: Any, shape: tuple[int, ...]) -> Block:
        """Return a block of this shape into which pooled rows are written; InputError if the block is none."""
        return array_args.as_out(_WHERE, block, shape, "block")

    def check_gradient(self, where: str, gradient: Any, shape: tuple[int, ...]) -> Block:
        """Return a gradient of this shape; InputError if it has another one."""
        return array_args.as_gradients(where, gradient, shape)

    def measure(self, gradients: Sequence[tuple[Any, float]]) -> Any:
        """Return what `Worker.measure` does."""
        return None


class InputReader:
    """Makes the batches of a worker, in this process."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def can_read(self, source: Any) -> bool:
        """Return whether another process reads the source for this worker, so that its batches have no ids here."""
        return False

    def inputs_of(self, ids: Any) -> Inputs:
        """Return a batch of ids by feature; see `satrap.data.inputs.as_inputs`."""
        return as_inputs(self._features, ids)

    def batches(self, source: Any, position: Position | None = None, **share: int) -> Iterator[Inputs]:
        """Return the batches of a source, or of an iterable without columns, after the position.

        share: the trainer's `rank` and the `world_size`, of several."""
        declared = source if hasattr(source, "batches") else IterableSource(source)
        batches: Iterator[Inputs] = declared.batches(self._features, position=position, **share)
        return batches

    def signature(self, source: Any) -> Mapping[str, Any] | None:
        """Return `Source.signature`; None if the source has none."""
        signature: Mapping[str, Any] | None = source.signature() if hasattr(source, "signature") else None
        return signature


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LookupResult:
    """The result of one lookup."""

    block: Block
    """[batch_size, total_dim]: pooled rows, feature after feature; see `Features`."""
    sequences: dict[str, Block]
    """For each sequence [batch_size, max_length, dim], with 0 where there is no id; jagged: [rows, dim]."""
    masks: dict[str, Any]
    """For each padded sequence, bool [batch_size, max_length]: where there is an id. Tensors, if the ids are."""
    offsets: Mapping[str, NDArray[np.int64]]
    """For each jagged sequence [batch_size + 1]: sample s has rows offsets[s] to offsets[s + 1] - 1."""
    truncated: list[int]
    """For each sequence, the number of ids beyond its max_length, which were not looked up."""
    ticket: Ticket | None
    """Names the batch in its update; None without training."""


@dataclass(frozen=True, slots=True, eq=False)
class IdGradients:
    """Gradients of ids that have no ticket of a lookup, in one update."""

    ticket: Ticket
    """What `Worker.id_ticket` returned."""
    by_table: Mapping[str, Block]
    """For each table that has ids, [ids, dim]."""


@final
class Worker:
    """Looks up and updates the features of a model."""

    stop_own_server: Callable[[], None] | None = None
    """Stops the server in this process, where trainers serve each other their rows."""

    def __init__(
        self,
        features: Features,
        rows: Rows,
        tables: "TableGroup | ShardedTables",
        *,
        blocks: ArrayBlocks | None = None,
        reader: InputReader | None = None,
        of_tables: bool = False,
    ) -> None:
        """rows: the rows of the features' tables. blocks: what the rows fill; None: arrays. reader: reads batches;
        None: in this process. of_tables: whether the features are `id_features` of the features that the rows have."""
        self.features, self.rows, self.tables = features, rows, tables
        self._blocks, reader = blocks or ArrayBlocks(), reader or InputReader(features)
        self._of_tables = of_tables
        self.can_read, self.inputs_of = reader.can_read, reader.inputs_of
        self.batches, self.signature = reader.batches, reader.signature
        self.device = self._blocks.device
        """The torch device of the rows, of blocks and of gradients; None: they are numpy arrays in this process."""
        self.servers, self.num_threads = rows.servers, rows.num_threads
        self.device_stream, self.launches = rows.device_stream, rows.launches
        self.open_stream, self.pad, self.pause = rows.open_stream, rows.pad, rows.pause
        self.skip, self.settle = rows.skip, rows.settle
        self.look_up_ids, self.id_ticket = rows.look_up, rows.id_ticket
        self._sequences = [
            _Sequence(name, index, feature)
            for index, (name, feature) in enumerate(features.items())
            if feature.pooling == "none"
        ]
        self._numbers = {table.name: (i, table.optimizer) for i, table in enumerate(features.tables)}

    @property
    def truncated(self) -> dict[str, int]:
        """For each sequence, the number of ids beyond its max_length so far, which were not looked up."""
        return dict(zip((sequence.name for sequence in self._sequences), self.rows.truncated, strict=True))

    def resolve(self, inputs: Inputs, *, step: int, oldest_open: int) -> BagRequest | None:
        """Do the part of a training lookup that needs no row's values, while earlier steps are in progress. Pass the
        result to `lookup_resolved`, in the same order; None: `lookup` does all of it."""
        if not self.rows.resolves:
            return None
        return self.rows.resolve(self.request(inputs, step, oldest_open, train=True))

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
        return self._look_up(self.request(inputs, step, oldest_open, train), block)

    def lookup_resolved(self, request: BagRequest) -> LookupResult:
        """Look up the rows of a batch that was resolved."""
        return self._look_up(request, None)

    def _look_up(self, request: BagRequest, block: Block | None) -> LookupResult:
        batch_size = request.batch_size
        shape = (batch_size, self.features.total_dim)
        memory = self.rows.empty(*shape) if block is None else self._blocks.check_block(block, shape)
        if block is None:
            block = memory
        if self._of_tables:
            return self._look_up_by_table(request, memory)
        lengths = self._lengths(request)
        offsets = request.values.jagged if lengths is None else self._offsets(lengths)
        shapes = [sequence.shape(batch_size, offsets) for sequence in self._sequences]
        sequences = [self.rows.empty(shape[0], math.prod(shape[1:])) for shape in shapes]
        ticket = self.rows.lookup(request, memory, sequences)
        masks, truncated = request.values.masks(self.features) if lengths is None else self._masks(lengths)
        return LookupResult(
            block=block,
            sequences={
                sequence.name: rows.reshape(shape)
                for sequence, rows, shape in zip(self._sequences, sequences, shapes, strict=True)
            },
            masks=masks,
            offsets=offsets,
            truncated=truncated,
            ticket=ticket,
        )

    def _look_up_by_table(self, request: BagRequest, block: Block) -> LookupResult:
        """Look up ids by table. Their result has no offsets: there is one sample."""
        assert request.offsets is not None
        counts = np.diff(request.offsets).tolist()
        tables = self.features.tables
        rows = {table.name: self.rows.empty_of_ids(n, table.dim) for n, table in zip(counts, tables, strict=True)}
        ticket = self.rows.lookup(request, block, list(rows.values()))
        return LookupResult(block=block, sequences=rows, masks={}, offsets={}, truncated=[0] * len(rows), ticket=ticket)

    def jagged_offsets(self, inputs: Inputs) -> Mapping[str, NDArray[np.int64]]:
        """Return `LookupResult.offsets` of a batch of arrays before its lookup."""
        if not any(sequence.is_jagged for sequence in self._sequences):
            return {}
        lengths = self._lengths(self.request(inputs))
        assert lengths is not None
        return self._offsets(lengths)

    def _lengths(self, request: BagRequest) -> dict[str, NDArray[np.int64]] | None:
        """Return how many ids the samples of each sequence have, without padding; None if the ids are elsewhere."""
        if not isinstance(request.values, np.ndarray):
            return None
        lengths = {sequence.name: sequence.lengths(request) for sequence in self._sequences}
        for name, its in lengths.items():
            other = self.features[name].aligned_with
            if other is not None and (differs := its != lengths[other]).any():
                sample = int(differs.argmax())
                raise InputError(
                    f"{_WHERE}: sample {sample} has {its[sample]} ids of {name!r} and {lengths[other][sample]} of "
                    f"{other!r}, with which it is aligned; expected one id for each position in both"
                )
        return lengths

    def _offsets(self, lengths: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """Return `LookupResult.offsets`."""
        return {
            sequence.name: sequence.offsets(lengths[sequence.name])
            for sequence in self._sequences
            if sequence.is_jagged
        }

    def _masks(self, lengths: dict[str, NDArray[np.int64]]) -> tuple[dict[str, Any], list[int]]:
        """Return `masks` and `truncated` of a lookup's result."""
        truncated = [sequence.count_truncated(lengths[sequence.name]) for sequence in self._sequences]
        return {
            sequence.name: sequence.mask(lengths[sequence.name])
            for sequence in self._sequences
            if not sequence.is_jagged
        }, truncated

    def update(
        self,
        tickets: Sequence[Ticket],
        block_gradients: Sequence[ArrayLike | None],
        sequence_gradients: Sequence[Gradients] | None = None,
        *,
        of_ids: IdGradients | None = None,
        step: int | None = None,
        lrs: Mapping[str, float] | None = None,
        scale: float = 1.0,
        magnitude: Any = None,
    ) -> None:
        """Apply one optimizer step to the ids of one batch, or of several batches whose gradients were accumulated.

        tickets: those of the lookups, each used once. After an error none of them is used.
        block_gradients: for each ticket, float32 [batch_size, total_dim]. None leaves the ticket's pooled ids
            unchanged, which differs from a gradient of 0.
        sequence_gradients: for each ticket, by name, float32 of the shape of its rows; None or a missing name leaves
            the sequence's ids unchanged.
        of_ids: gradients of ids that were looked up without a ticket; there may be no tickets beside them.
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
            if len(_require_list(name, given)) != len(tickets) or not (tickets or of_ids):
                raise InputError(
                    f"{_UPDATE}: {len(tickets)} tickets and {len(given)} {name}; expected at least one ticket, "
                    "and gradients for each"
                )
        gradients = [
            self._gradients(ticket, block, sequences)
            for ticket, block, sequences in zip(tickets, block_gradients, sequence_gradients, strict=True)
        ]
        at = max(1, self.rows.latest_step) if step is None else array_args.as_step(_UPDATE, "step", step)
        rates = [] if lrs is None else self._learning_rates(lrs)
        factor = array_args.as_scale(_UPDATE, scale)
        given_tickets = list(tickets)
        if of_ids is not None:
            given_tickets.append(of_ids.ticket)
            none = self.rows.empty(0, 1)
            gradients.append((None, [of_ids.by_table.get(table.name, none) for table in self.features.tables]))
        self.rows.update(UpdateRequest(given_tickets, gradients, at, rates, factor, magnitude))

    def on_device(self) -> AbstractContextManager[None]:
        """Put work on rows on their device's stream, between earlier and later work of the caller's."""
        return nullcontext() if self.device_stream is None else self.device_stream.joined()

    def by_table(self) -> "Worker":
        """Return a worker over the same rows whose features are `id_features`: batches of one sample, of ids by
        table."""
        features = id_features(self.features)
        return Worker(features, self.rows, self.tables, blocks=self._blocks, of_tables=True)

    def measure(self, gradients: Sequence[tuple[Any, float]]) -> Any:
        """Return the largest magnitude of the tensors, each times its factor, for `update` to use; None if `update`
        does not use it. Call this where the tensors are computed: it does not wait for them."""
        return None if self.rows.checks_in_update else self._blocks.measure(gradients)

    def drop(self, ticket: Ticket) -> None:
        """Give up a batch that will not be updated. Its rows stay as the lookup left them."""
        self.rows.drop(self._require_ticket("drop of a batch", ticket))

    def close(self) -> None:
        """Close the connections of the rows. Rows in this process are freed with the last reference to them."""
        self.rows.close()
        if self.stop_own_server is not None:
            self.stop_own_server()

    def _require_ticket(self, where: str, ticket: Any) -> Ticket:
        if not hasattr(ticket, "used"):
            raise InputError(f"{where}: a ticket is a {type(ticket).__name__}; expected one that lookup returned")
        if not self.rows.owns_ticket(ticket):
            raise TicketError(f"{where}: a ticket comes from another store; pass it to the worker that returned it")
        own: Ticket = ticket
        return own

    def request(
        self, inputs: Inputs, step: int | None = None, oldest_open: int | None = None, train: bool = False
    ) -> BagRequest:
        """Return the lookup of a batch, with checked arguments."""
        if not isinstance(inputs, Inputs):
            raise InputError(f"{_WHERE}: inputs is a {type(inputs).__name__}; expected a satrap.data.inputs.Inputs")
        if inputs.names != self.features.names:
            raise InputError(f"{_WHERE}: {_name_differences(inputs.names, self.features.names)}")
        batch_size = array_args.as_step(_WHERE, "batch_size", inputs.batch_size, low=0, high=2**30 - 1)
        placed = inputs if self._of_tables else self.rows.place_ids(inputs, train=train)
        values, offsets, weights = self._arrays(placed) if isinstance(placed, Inputs) else (placed, None, None)
        check_flag(_WHERE, "train", train, InputError)
        latest = self.rows.latest_step
        step, oldest_open = resolve_step(_WHERE, latest, train=train, step=step, oldest_open=oldest_open)
        first_epoch = inputs.position is None or inputs.position.epoch == 0
        given = values, offsets, weights, batch_size, step, oldest_open, train, first_epoch
        return BagRequest(*given, of_tables=self._of_tables)

    def _arrays(self, inputs: Inputs) -> tuple[NDArray[np.uint64], NDArray[np.int64] | None, Floats | None]:
        """Check the ids of a batch, their offsets and weights."""
        values = array_args.as_ids(_WHERE, inputs.values)
        meaning = "features * batch_size + 1, or None if every bag holds one id"
        offsets = inputs.offsets
        if offsets is not None:
            offsets = array_args.as_offsets(_WHERE, offsets, len(self.features) * inputs.batch_size + 1, meaning)
        return values, offsets, None if inputs.weights is None else array_args.as_weights(_WHERE, inputs.weights)

    def _gradients(self, ticket: Ticket, block: ArrayLike | None, sequences: Gradients) -> TicketGradients:
        if not isinstance(sequences, Mapping):
            raise InputError(
                f"{_UPDATE}: sequence gradients are a {type(sequences).__name__}; expected a dict by feature"
            )
        unknown = sequences.keys() - {sequence.name for sequence in self._sequences}
        if unknown:
            raise InputError(f"{_UPDATE}: sequence gradients name {sorted(unknown)}; expected names of sequences")
        shape = (ticket.batch_size, self.features.total_dim)
        of_block = None if block is None else self._blocks.check_gradient(_UPDATE, block, shape)
        of_sequences: list[Block | None] = []
        for sequence in self._sequences:
            given = sequences.get(sequence.name)
            where = f"{_UPDATE}, feature {sequence.name!r}"
            sizes: tuple[int, ...] = getattr(given, "shape", ())
            expected = sequence.shape(ticket.batch_size, {sequence.name: sizes[:1]})  # rows check the number of jagged
            if sequence.is_jagged and len(sizes) == 3 and self.rows.takes_interleaved:
                expected = expected[0], sizes[1], expected[1]
            of_sequences.append(None if given is None else self._blocks.check_gradient(where, given, expected))
        return of_block, of_sequences

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
        self.name, self.is_jagged = name, feature.jagged
        self._index = index
        self._max_length = feature.max_length
        self._dim, self._padding_id = feature.table.dim, feature.padding_id

    def shape(self, batch_size: int, offsets: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of the rows. offsets: of jagged sequences; the last one is the number of rows."""
        if not self.is_jagged:
            return batch_size, self._max_length or 0, self._dim
        bounds = offsets[self.name]
        return int(bounds[-1]) if len(bounds) else 0, self._dim

    def lengths(self, request: BagRequest) -> NDArray[np.int64]:
        """Return how many ids each sample has, without padding."""
        first, end = self._index * request.batch_size, (self._index + 1) * request.batch_size + 1
        if request.offsets is None:
            bounds = np.arange(first, end)
        else:
            bounds = request.offsets[first:end]
            if bounds[0] < 0 or bounds[-1] > len(request.values) or (bounds[1:] < bounds[:-1]).any():
                # The rows refuse offsets that fall or leave the ids; until then they must do no harm.
                bounds = np.maximum.accumulate(np.clip(bounds, 0, len(request.values)))
        if self._padding_id is not None:
            ids = request.values[bounds[0] : bounds[-1]] != self._padding_id
            bounds = np.append(0, np.cumsum(ids))[bounds - bounds[0]]
        lengths: NDArray[np.int64] = bounds[1:] - bounds[:-1]
        return lengths

    def offsets(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the rows of each sample begin, and where the last ones end."""
        bounds = np.zeros(len(lengths) + 1, np.int64)
        kept = lengths if self._max_length is None else np.minimum(lengths, self._max_length)
        kept.cumsum(out=bounds[1:])
        return bounds

    def mask(self, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.arange(self._max_length or 0) < lengths[:, None]

    def count_truncated(self, lengths: NDArray[np.int64]) -> int:
        """Return how many ids are beyond the sequence's length."""
        return 0 if self._max_length is None else int(np.maximum(lengths - self._max_length, 0).sum())


def _name_differences(names: object, expected: tuple[str, ...]) -> str:
    if not isinstance(names, tuple):
        return f"names is a {type(names).__name__}; expected the tuple of features.names"
    missing, extra = [name for name in expected if name not in names], [name for name in names if name not in expected]
    if missing or extra:
        return f"the features {missing} are missing and {extra} are unknown; expected features.names, in its order"
    return f"the features are {list(names)}; expected them in the order of features.names, {list(expected)}"


def _require_list(name: str, value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{_UPDATE}: {name} is a {type(value).__name__}; expected a list, one of each batch")
    return value
