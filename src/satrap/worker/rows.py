"""The seam between a worker and its rows: what a lookup and an update are, and what the place of the rows does.

`satrap.worker.local_rows` has them in this process, `satrap.worker.sharded_rows` on servers, `satrap.device` on GPUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from satrap.config.features import Features
from satrap.config.tables import Table
from satrap.data.inputs import Inputs
from satrap.errors import ConfigError

if TYPE_CHECKING:
    from satrap.worker.server_group import ServerGroup

_NO_MODULES = (
    "modules look up {}, but the rows are on the devices of several trainers, which look up together: name all ids of "
    "a batch to embeddings.prefetch(...), or look these rows up with embeddings.stream(...), or leave device= out"
)
_NO_IDS = np.zeros(0, np.uint64)
Floats = NDArray[np.float32]
Block = Any
"""[lines, floats]: a float32 numpy array, or a tensor of `Rows.output_dtype` if the rows are on a device."""
Ids = NDArray[np.uint64]
TicketGradients = tuple[Block | None, list[Block | None]]
"""Gradients of one ticket's block and of each of its sequences; None leaves the ids unchanged."""


class RowStream:
    """What rows that several trainers share must know of a stream; other rows need to know nothing.

    Each method may be called again, from another thread, and after another stream was opened, and then does nothing.
    """

    def end_lookups(self) -> None:
        """Note that the stream needs no further lookup; later ones return zeros."""

    def end_updates(self) -> None:
        """Note that the stream has no further update, and wait until the rows have all of them."""

    def release(self) -> None:
        """Let calls fail that wait for other trainers: the stream ends with an error."""


class Ticket(Protocol):
    """Names a lookup whose update is still to come; to be used once."""

    @property
    def used(self) -> bool:
        """Whether it was updated or dropped."""

    @property
    def batch_size(self) -> int:
        """Number of samples in the batch."""


class PlacedIds(Protocol):
    """The ids of a batch that are not in this process's memory: on the device of the rows, or at a worker process. The
    rows that placed them look them up."""

    @property
    def jagged(self) -> Mapping[str, NDArray[np.int64]]:
        """The offsets of each jagged sequence; see `LookupResult`."""

    def masks(self, features: Features) -> tuple[dict[str, Any], list[int]]:
        """Return `masks` and `truncated` of `LookupResult`, after the lookup."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class BagRequest:
    """The lookup of one batch, with checked arguments."""

    values: Any
    """The ids of all bags, feature after feature and sample after sample: uint64; or `PlacedIds`, which have their
    offsets and weights."""
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
    of_tables: bool = False
    """Whether the bags are those of `id_features` in place of the worker's features."""
    resolved: Any = None
    """What `Worker.resolve` found ahead of the lookup."""

    @property
    def native(self) -> tuple[Any, NDArray[np.int64] | None, Floats | None, int, int, int, bool]:
        """The first fields in the form of the core, which numbers a lookup whose step is 0."""
        return (
            self.values,
            self.offsets,
            self.weights,
            self.batch_size,
            self.step or 0,
            self.oldest_open or 0,
            self.train,
        )


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
    servers: "ServerGroup | None" = None
    """The servers of the rows; None if the rows are in this process."""
    device_stream: Any = None
    """The stream of the device on which the rows are read and changed; None: they are not on a device."""
    launches: Any = None
    """The order in which several trainers give collectives to their devices; None: no rows are on devices of
    several."""
    resolves: bool = False
    """Whether `resolve` does a part of a lookup."""
    takes_interleaved: bool = False
    """Whether the gradient of a jagged sequence may be [n, k, dim], with k groups of n rows interleaved."""
    checks_in_update: bool = False
    """Whether an update finds by itself which gradients are not finite, so that `Worker.measure` measures none."""
    output_dtype: str = "float32"
    """The dtype of the rows in batches, and of their gradients. Arrays are float32, and are cast where they become
    tensors."""

    @property
    def latest_step(self) -> int:
        """The largest step of any training lookup or update so far; 0 before the first."""

    @property
    def truncated(self) -> list[int]:
        """For each sequence, the number of ids beyond its max_length so far."""

    def empty(self, lines: int, floats: int) -> Block:
        """Return aligned memory, which is reused once the array is collected."""

    def empty_of_ids(self, lines: int, floats: int) -> Block:
        """Return memory for rows that modules look up: float32, whatever `output_dtype` is."""
        return self.empty(lines, floats)

    def place_ids(self, inputs: Inputs, *, train: bool) -> "Inputs | PlacedIds":
        """Return the ids of a batch where these rows look them up: in arrays, or as `PlacedIds`. train: whether the
        lookup trains."""
        return inputs

    def resolve(self, request: BagRequest) -> BagRequest:
        """Do the part of a training lookup that needs no row's values. Return the request with which `lookup` does the
        rest."""
        return request

    def lookup(self, request: BagRequest, block: Block, sequences: list[Block]) -> Ticket | None:
        """Fill `block` and `sequences`, and return a ticket if the request trains."""

    def owns_ticket(self, ticket: object) -> bool:
        """Return whether the ticket comes from a lookup of this object."""

    def update(self, request: UpdateRequest) -> None:
        """Apply one optimizer step."""

    def drop(self, ticket: Any) -> None:
        """Give up a ticket without an update."""

    def look_up(self, ids: Mapping[str, Ids], step: int, oldest_open: int) -> dict[str, Block]:
        """Return the rows of the ids of some tables, [ids, dim], for training in this step; ids without a row are
        admitted and inserted. No ticket is kept: the update brings the ids, with a ticket of `id_ticket`."""
        raise _no_modules(ids)

    def id_ticket(self, ids: Mapping[str, Ids]) -> Ticket:
        """Return a ticket for ids of tables that other calls have looked up. An update may have it beside the tickets
        of batches. It takes no gradient of a block, and one sequence of gradients for each table of the features."""
        raise _no_modules(ids)

    def skip(self, step: int) -> None:
        """Note that this step has no update. The next `settle` or lookup tells processes that wait for it."""
        return

    def settle(self) -> None:
        """Return once all processes that wait for a skipped step know that it has no update."""
        return

    def open_stream(self, step: int) -> RowStream:
        """Prepare for the lookups and updates of a training stream that begins at this step."""
        return RowStream()

    def pad(self, step: int, oldest_open: int) -> None:
        """Take part in a step in which only other trainers look rows up."""
        return

    def pause(self) -> None:
        """Return once the rows have all updates and skipped steps of this trainer, whose stream is paused."""
        return

    def close(self) -> None:
        """Stop what serves lookups and updates. Rows in this process are freed with their last reference."""
        return


def _no_modules(ids: Mapping[str, Ids]) -> ConfigError:
    requested = ", ".join(f"{len(of_table)} ids of table {name!r}" for name, of_table in ids.items())
    return ConfigError(_NO_MODULES.format(requested))


def id_features(features: Features) -> Features:
    """Return the features of lookups by table: for each table of `features` a jagged sequence with the table's name."""
    return Features({table.name: table.sequence() for table in features.tables})


def id_request(features: Features, ids: Mapping[str, Ids], step: int | None, oldest_open: int | None) -> BagRequest:
    """Return the lookup of ids by table, as one sample. features: what `id_features` returned."""
    given = [ids.get(name, _NO_IDS) for name in features]
    offsets = np.cumsum([0, *map(len, given)], dtype=np.int64)
    return BagRequest(np.concatenate(given), offsets, None, 1, step, oldest_open, train=True, of_tables=True)


def empty_by_table(rows: Rows, ids: Mapping[str, Ids], features: Features) -> dict[str, Block]:
    """Return memory for the rows of ids, by table, for every table. features: what `id_features` returned."""
    return {name: rows.empty_of_ids(len(ids.get(name, ())), feature.table.dim) for name, feature in features.items()}


def native_features(
    features: Features, tables: Sequence[Table]
) -> list[tuple[str, int, str, bool, int, bool, int | None, bool]]:
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
            feature.jagged,
        )
        for name, feature in features.items()
    ]
