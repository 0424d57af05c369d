"""The worker: looks up the bags of one batch, and brings the gradients of batches back to the rows.

`Inputs` come in; a block of pooled rows goes out, with padded sequences and a ticket. The ticket comes back with
gradients of the same shapes. The rows lie in the tables of a `Rows`: in this process (`satrap.worker.local_rows`) or on
servers (`satrap.worker.sharded_rows`); a worker checks what it is given, and does the same over either. What it costs
in Python does not grow with the number of features, sequences excepted. Calls may come from several threads at once. It
decides nothing about when: no gate, no queue, no thread of its own.

What an update does. The gradient of an id in a bag is that of its bag, times `scale`, times the id's weight, divided
by the number of ids for "mean" and by its root for "sqrtn". Those of one id are summed in order of appearance: ticket
after ticket, feature after feature, sample after sample. Then the table's optimizer steps the row, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap.config import array_args
from satrap.config.features import Features
from satrap.config.tables import Feature, Table
from satrap.data.inputs import Inputs
from satrap.errors import InputError, TicketError
from satrap.table.engine import given_step

_WHERE = "lookup of a batch"
_UPDATE = "update of a batch"
Gradients = Mapping[str, ArrayLike | None]
Floats = NDArray[np.float32]


class Ticket(Protocol):
    """What brings the gradients of a looked-up batch back, once."""

    @property
    def used(self) -> bool:
        """Whether it was brought back or dropped."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples of its batch."""
        ...


class Rows(Protocol):
    """Where the rows of a worker's features are. Its calls trust what they are given."""

    num_threads: int
    """Of a call's work in this process."""
    remote: bool
    """Whether they are in other processes, so that a call waits for a network."""

    @property
    def latest_step(self) -> int:
        """The largest step of any training lookup or update so far; 0 before the first."""
        ...

    @property
    def truncated(self) -> list[int]:
        """Of each sequence: ids beyond its max_length so far."""
        ...

    def empty(self, lines: int, floats: int) -> Floats:
        """Aligned memory that is used again once the array is gone."""
        ...

    def lookup(
        self,
        values: NDArray[np.uint64],
        offsets: NDArray[np.int64] | None,
        weights: Floats | None,
        batch_size: int,
        step: int | None,
        oldest_open: int | None,
        train: bool,
        first_epoch: bool,
        block: Floats,
        sequences: list[Floats],
    ) -> Ticket | None:
        """Fills block and sequences; a ticket if it trains. first_epoch: whether sightings count in tables that count
        those of the first epoch only."""
        ...

    def made(self, ticket: object) -> bool:
        """Whether the ticket is of a lookup here."""
        ...

    def update(
        self,
        tickets: Sequence[Any],
        gradients: list[tuple[Floats | None, list[Floats | None]]],
        step: int,
        lrs: list[tuple[int, float]],
        scale: float,
    ) -> None:
        """One optimizer step. gradients: of each ticket its block's and sequences'. lrs: by number of their table."""
        ...

    def drop(self, ticket: Any) -> None:
        """Gives a ticket up."""
        ...

    def skip(self, step: int) -> None:
        """There is no update of this step: whoever waits for it is to hear so, at the next `settle` or lookup."""
        ...

    def settle(self) -> None:
        """Returns once they have heard."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LookedUp:
    """What became of one batch."""

    block: NDArray[np.float32]
    """[batch_size, total_dim]: pooled rows, feature after feature; see `Features`."""
    sequences: dict[str, NDArray[np.float32]]
    """[batch_size, max_length, dim] of each sequence; 0 where there is no id."""
    masks: dict[str, NDArray[np.bool_]]
    """[batch_size, max_length] of each sequence: where there is an id."""
    truncated: list[int]
    """Of each sequence: ids beyond its max_length, which were not looked up."""
    ticket: Ticket | None
    """Brings the gradients back; None without training."""


class Worker:
    """The features of a model over rows that lie somewhere."""

    def __init__(self, features: Features, rows: Rows) -> None:
        """rows: of the tables of these features."""
        self.features = features
        self._rows = rows
        self._weighted = [name for name, feature in features.items() if feature.weighted]
        self._sequences = [
            _Sequence(name, index, feature)
            for index, (name, feature) in enumerate(features.items())
            if feature.pooling == "none"
        ]
        self._numbers = {table.name: (i, table.optimizer) for i, table in enumerate(features.tables)}

    @property
    def num_threads(self) -> int:
        """Of the tables' own."""
        return self._rows.num_threads

    @property
    def remote(self) -> bool:
        """Whether the rows are in other processes."""
        return self._rows.remote

    @property
    def truncated(self) -> dict[str, int]:
        """Of each sequence: ids beyond its max_length so far. They were not looked up."""
        return dict(zip((sequence.name for sequence in self._sequences), self._rows.truncated, strict=True))

    def lookup(
        self,
        inputs: Inputs,
        *,
        step: int | None = None,
        oldest_open: int | None = None,
        train: bool = True,
        block: NDArray[np.float32] | None = None,
    ) -> LookedUp:
        """The rows of the batch's ids. `step`, `oldest_open` and `train` are those of `Store.lookup`. The batch is of
        the first epoch if its position says so, or if it has none.

        block: memory to write pooled rows into, float32 [batch_size, total_dim], best aligned to 64 bytes. None: a new
            array, aligned, of memory that is used again once the array is gone.
        """
        values, offsets, weights = self._checked(inputs)
        if not isinstance(train, bool):
            raise InputError(f"{_WHERE}: train is {train!r} ({type(train).__name__}); wanted True or False")
        batch_size = inputs.batch_size
        shape = (batch_size, self.features.total_dim)
        if block is None:
            block = self._rows.empty(*shape)
        memory = array_args.as_out(_WHERE, block, shape, "block")
        sequences = [self._rows.empty(batch_size, each.floats) for each in self._sequences]
        at, since = given_step(_WHERE, self._rows, train=train, step=step, oldest_open=oldest_open)
        first_epoch = inputs.position is None or inputs.position.epoch == 0
        ticket = self._rows.lookup(
            values, offsets, weights, batch_size, at, since, train, first_epoch, memory, sequences
        )
        lengths = [each.lengths(values, offsets, batch_size) for each in self._sequences]
        return LookedUp(
            block=block,
            sequences={
                each.name: rows.reshape(each.shape(batch_size))
                for each, rows in zip(self._sequences, sequences, strict=True)
            },
            masks={each.name: each.mask(its) for each, its in zip(self._sequences, lengths, strict=True)},
            truncated=[each.beyond(its) for each, its in zip(self._sequences, lengths, strict=True)],
            ticket=ticket,
        )

    def update(
        self,
        tickets: Sequence[Ticket],
        block_gradients: Sequence[ArrayLike | None],
        sequence_gradients: Sequence[Gradients] | None = None,
        *,
        step: int | None = None,
        lrs: Mapping[str, float] | None = None,
        scale: float = 1.0,
    ) -> None:
        """One optimizer step for the ids of one batch, or of several that were accumulated.

        tickets: those of the lookups, each used once; all of them or, after an error, none.
        block_gradients: of each ticket, float32 [batch_size, total_dim]. None: there is none, and the pooled ids of
            this ticket are left alone, which is not the same as a gradient of 0.
        sequence_gradients: of each ticket, by name, float32 [batch_size, max_length, dim]; None or left out: likewise.
        step: the job's batch number; None: the latest. Rows are stamped with it.
        lrs: learning rates of this update by table; tables not named use their own.
        scale: what each gradient is multiplied by first: 1 / loss scale, or 1 / trainers.
        """
        for ticket in _listed("tickets", tickets):
            if self._own(_UPDATE, ticket).used:
                raise TicketError(f"{_UPDATE}: this ticket was used already; a batch is updated once, look it up again")
        if sequence_gradients is None:
            sequence_gradients = [{}] * len(tickets)
        for name, given in (("block_gradients", block_gradients), ("sequence_gradients", sequence_gradients)):
            if len(_listed(name, given)) != len(tickets) or not tickets:
                raise InputError(
                    f"{_UPDATE}: {len(tickets)} tickets and {len(given)} {name}; wanted at least one ticket, "
                    "and gradients for each"
                )
        gradients = [
            self._gradients(ticket, block, sequences)
            for ticket, block, sequences in zip(tickets, block_gradients, sequence_gradients, strict=True)
        ]
        at = max(1, self._rows.latest_step) if step is None else array_args.as_step(_UPDATE, "step", step)
        rates = [] if lrs is None else self._rates(lrs)
        self._rows.update(list(tickets), gradients, at, rates, array_args.as_scale(_UPDATE, scale))

    def drop(self, ticket: Ticket) -> None:
        """Gives up a looked-up batch that will not be updated. Its rows stay as the lookup left them."""
        self._rows.drop(self._own("drop of a batch", ticket))

    def skip(self, step: int) -> None:
        """There will be no update of this step; `settle` tells those who wait for it."""
        self._rows.skip(step)

    def settle(self) -> None:
        """Returns once everybody knows of the steps that were skipped."""
        self._rows.settle()

    def _own(self, where: str, ticket: Any) -> Ticket:
        if not hasattr(ticket, "used"):
            raise InputError(f"{where}: a ticket is a {type(ticket).__name__}; wanted those that lookup gave")
        if not self._rows.made(ticket):
            raise TicketError(f"{where}: a ticket came from another store; bring it back to the one that gave it")
        own: Ticket = ticket
        return own

    def _checked(
        self, inputs: Inputs
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64] | None, NDArray[np.float32] | None]:
        if not isinstance(inputs, Inputs):
            raise InputError(f"{_WHERE}: inputs is a {type(inputs).__name__}; wanted a satrap.data.inputs.Inputs")
        if inputs.names != self.features.names:
            raise InputError(f"{_WHERE}: {_name_differences(inputs.names, self.features.names)}")
        batch_size = array_args.as_step(_WHERE, "batch_size", inputs.batch_size, low=0, high=2**30 - 1)
        num_bags = len(self.features) * batch_size
        values = array_args.as_ids(_WHERE, inputs.values)
        offsets = None if inputs.offsets is None else array_args.as_bag_offsets(_WHERE, inputs.offsets, num_bags)
        if offsets is None and len(values) != num_bags:
            raise InputError(
                f"{_WHERE}: {len(values)} ids without offsets; wanted {num_bags}, one for each of {len(self.features)} "
                f"features and {batch_size} samples, or offsets"
            )
        if offsets is not None and (offsets[0] != 0 or offsets[-1] != len(values)):
            raise InputError(
                f"{_WHERE}: offsets run from {offsets[0]} to {offsets[-1]}; "
                f"wanted 0 to the number of ids, {len(values)}"
            )
        if inputs.weights is None and self._weighted:
            raise InputError(f"{_WHERE}: feature {self._weighted[0]!r} is weighted and there are no weights")
        if inputs.weights is not None and not self._weighted:
            raise InputError(
                f"{_WHERE}: there are weights and no feature is weighted: declare one, table.bag(..., weighted=True), "
                "or leave the weights out"
            )
        weights = None if inputs.weights is None else array_args.as_weights(_WHERE, inputs.weights, len(values))
        return values, offsets, weights

    def _gradients(
        self, ticket: Ticket, block: ArrayLike | None, sequences: Gradients
    ) -> tuple[NDArray[np.float32] | None, list[NDArray[np.float32] | None]]:
        if not isinstance(sequences, Mapping):
            raise InputError(
                f"{_UPDATE}: sequence gradients are a {type(sequences).__name__}; wanted a dict by feature"
            )
        unknown = sequences.keys() - {each.name for each in self._sequences}
        if unknown:
            raise InputError(f"{_UPDATE}: sequence gradients name {sorted(unknown)}, which are no sequences here")
        shape = (ticket.batch_size, self.features.total_dim)
        of_block = None if block is None else array_args.as_gradients(_UPDATE, block, shape)
        of_sequences: list[NDArray[np.float32] | None] = []
        for each in self._sequences:
            given = sequences.get(each.name)
            where = f"{_UPDATE}, feature {each.name!r}"
            of_sequences.append(
                None if given is None else array_args.as_gradients(where, given, each.shape(ticket.batch_size))
            )
        return of_block, of_sequences

    def _rates(self, lrs: Mapping[str, float]) -> list[tuple[int, float]]:
        if not isinstance(lrs, Mapping):
            raise InputError(f"{_UPDATE}: lrs is a {type(lrs).__name__}; wanted a dict from tables' names to numbers")
        unknown = lrs.keys() - self._numbers.keys()
        if unknown:
            raise InputError(f"{_UPDATE}: lrs names {sorted(unknown)}, which are no tables here")
        rates = []
        for name, lr in lrs.items():
            number, optimizer = self._numbers[name]
            rates.append((number, array_args.as_lr(f"table {name!r}", lr, optimizer)))
        return rates


class _Sequence:
    """A feature whose rows stay apart."""

    def __init__(self, name: str, index: int, feature: Feature) -> None:
        assert feature.max_length is not None
        self.name = name
        self._index = index
        self._max_length, self._dim = feature.max_length, feature.table.dim
        self._padding_id = feature.padding_id
        self.floats = self._max_length * self._dim

    def shape(self, batch_size: int) -> tuple[int, int, int]:
        return batch_size, self._max_length, self._dim

    def lengths(
        self, values: NDArray[np.uint64], offsets: NDArray[np.int64] | None, batch_size: int
    ) -> NDArray[np.int64]:
        """How many ids each sample has, padding left out."""
        first = self._index * batch_size
        bounds = np.arange(first, first + batch_size + 1) if offsets is None else offsets[first:][: batch_size + 1]
        if self._padding_id is not None:
            ids = values[bounds[0] : bounds[-1]] != self._padding_id
            bounds = np.append(0, np.cumsum(ids))[bounds - bounds[0]]
        return np.diff(bounds)

    def mask(self, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.arange(self._max_length) < lengths[:, None]

    def beyond(self, lengths: NDArray[np.int64]) -> int:
        return int(np.maximum(lengths - self._max_length, 0).sum())


def named_features(
    features: Features, tables: Sequence[Table]
) -> list[tuple[str, int, str, bool, int, bool, int | None]]:
    """The features in the core's words, over these tables, which may be more and come in the order of the features'."""
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


def _name_differences(found: object, wanted: tuple[str, ...]) -> str:
    if not isinstance(found, tuple):
        return f"names is a {type(found).__name__}; wanted the tuple of features.names"
    missing, extra = [name for name in wanted if name not in found], [name for name in found if name not in wanted]
    if missing or extra:
        return (
            f"the features {missing} are missing and {extra} are unknown; wanted those of features.names, in its order"
        )
    return f"the features are {list(found)}; wanted them in the order of features.names, {list(wanted)}"


def _listed(name: str, value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{_UPDATE}: {name} is a {type(value).__name__}; wanted a list, one of each batch")
    return value
