"""What the kernels of a device take: the runs of an update, and the features of a lookup.

The core makes the runs of ids in CPU memory. `SortedGradients` makes those of ids that a lookup sorted on the device:
an update of one whole batch uses that order again; one of several batches, or of parts of them, sorts their ids
together. The core then takes the unique ids only, and returns the frame of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.features import Feature, Features
from satrap.config.optimizers import Optimizer
from satrap.device.device_ids import GroupedIds, IdEntries, IdLayout, alignment_of, bags_of
from satrap.device.device_stream import to_device
from satrap.device.exact import sqrt
from satrap.errors import InputError
from satrap.worker.rows import TicketGradients, UpdateRequest

POOLINGS = ("sum", "mean", "sqrtn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """A run takes the gradients at places[begin : end], in this order, to the row in its frame."""

    frames: Tensor
    """int32 [runs]; -1: there is no row, or nothing for it."""
    begin: Tensor
    """int32 [runs]: positions in `places`."""
    end: Tensor
    """int32 [runs]."""
    places: Tensor
    """int32 [gradients]: where each gradient begins among the floats of all gradients."""
    factors: Tensor | None
    """float32 [gradients, 2]: the weight and the divisor of each gradient; None: all are 1."""
    keys: Tensor | None
    """int64 [runs]: keys of the random draws of each row; None: no table has 16-bit values."""
    tables: tuple[int, ...]
    """Where the runs of each table begin, and where the last end."""
    ids: NDArray[np.uint64] | None = None
    """[runs], in this process: the id of each run, if gradients may have to be skipped."""
    alignment: int = 1
    """Every place is a multiple of it: see `alignment_of`."""
    at_home: NDArray[np.int32] | None = None
    """[runs], in this process: the frames, if the row of one is at home: a frame below -1 is a slot there."""

    @classmethod
    def to_device(cls, arrays: dict[str, Any], device: torch.device) -> Self:
        """Copy what the core returned to the device."""
        names = ("frames", "begin", "end", "places", "factors", "keys")
        tensors: Any = {name: None if arrays[name] is None else to_device(arrays[name], device) for name in names}
        alignment = alignment_of(int(np.bitwise_or.reduce(arrays["places"])))
        here: Any = {"ids": arrays["ids"], "at_home": _at_home(arrays["frames"])}
        return cls(tables=tuple(arrays["tables"].tolist()), alignment=alignment, **tensors, **here)

    def in_frames(self, arrays: dict[str, Any]) -> Self:
        """Return the same runs with the frames and ids that the core returned."""
        frames = to_device(arrays["frames"], self.frames.device)
        return replace(self, frames=frames, ids=arrays["ids"], at_home=_at_home(arrays["frames"]))

    def of_tables(self, tables: range) -> Self:
        """Return the runs of some tables."""
        part = slice(self.tables[tables.start], self.tables[tables.stop])
        return self._some(part, part)

    def take(self, runs: NDArray[np.int64]) -> Self:
        """Return some runs, for rows in the frames 0, 1, ..."""
        frames = torch.arange(len(runs), dtype=torch.int32, device=self.frames.device)
        return replace(self._some(to_device(runs, self.frames.device), runs), frames=frames, at_home=None)

    def _some(self, at: Any, here: Any) -> Self:
        """Return some runs. at: which, for tensors. here: the same, for arrays."""
        which = {"frames": at, "begin": at, "end": at, "keys": at, "ids": here, "at_home": here}
        fields = ((name, getattr(self, name)) for name in which)
        parts: Any = {name: None if of_all is None else of_all[which[name]] for name, of_all in fields}
        return replace(self, **parts)


def _at_home(frames: NDArray[np.int32]) -> NDArray[np.int32] | None:
    return frames if (frames < -1).any() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUpdate:
    """What is done with the gradients of runs: their sums, and the step of the optimizer of each row."""

    optimizer: Optimizer
    lr: float
    scale: float = 1.0
    """The factor of each gradient."""
    step: int
    skip_nonfinite: bool = False
    """Whether to leave out a gradient that is not finite, and all of a run whose sum is not."""
    first: int = 0
    """The element of the whole row that the first value of these rows is."""


@dataclass(frozen=True, slots=True)
class PooledFeatures:
    """The pooled features of one memory, as tensors of int32 on the device."""

    numbers: Tensor
    """Their places in `Features`."""
    columns: Tensor
    """Where their columns begin in a block."""
    poolings: Tensor
    """The index in POOLINGS."""
    weighted: Tensor
    """Whether ids have weights."""
    alignment: int = 1
    """Every column is a multiple of it: see `alignment_of`."""

    @classmethod
    def of(cls, features: Features, tables: Sequence[int], device: torch.device) -> Self:
        """Return the pooled features of some tables."""
        lines = [
            (number, features.columns[number], POOLINGS.index(feature.pooling), feature.weighted)
            for number, feature in enumerate(features.values())
            if feature.pooling != "none" and features.table_index[number] in tables
        ]
        alignment = alignment_of(*(column for _, column, *_ in lines))
        numbers, columns, poolings, weighted = (
            torch.tensor(lines, dtype=torch.int32).view(-1, 4).T.contiguous().to(device)
        )
        return cls(numbers, columns, poolings, weighted, alignment)

    def lines(self) -> Iterator[tuple[int, int, str, bool]]:
        """Yield number, column, pooling and whether it is weighted of each."""
        for number, column, pooling, weighted in zip(
            *(array.tolist() for array in (self.numbers, self.columns, self.poolings, self.weighted)), strict=True
        ):
            yield number, column, POOLINGS[pooling], bool(weighted)


def sequence_bags(
    feature: Feature, number: int, offsets: Tensor | None, samples: int, rows: Tensor
) -> tuple[Tensor | None, int, Tensor]:
    """Return offsets, feature and out for `copy_sequence` to write the rows of a sequence, the feature with this
    number. The samples of a jagged one are adjacent, so they are copied as one bag."""
    if not feature.jagged:
        return offsets, number, rows.view(samples, feature.max_length or 0, feature.table.dim)
    bags = torch.arange(number, number + 2, device=rows.device) * samples
    return bags if offsets is None else offsets[bags], 0, rows[None]


def require_sizes(tickets: Sequence[Any], gradients: Sequence[TicketGradients]) -> None:
    """Raise InputError if gradients of sequences have other sizes than the rows of their lookup, as those of a jagged
    sequence may."""
    for ticket, (_, sequences) in zip(tickets, gradients, strict=True):
        if isinstance(ticket, DeviceTicket):  # has no jagged sequence, and the worker knows the shapes of others
            continue
        for gradient, size in zip(sequences, ticket.sequence_floats, strict=True):
            if gradient is not None and gradient.numel() != size:
                raise InputError(f"a sequence's gradients are {gradient.numel()} floats; expected {size}")


MOST_PLACES = 2**31 - 1  # counted in int32
Given = tuple[bool, list[bool]]
"""Whether the block of a ticket has a gradient, and each of its sequences."""


@dataclass(slots=True, eq=False)
class DeviceTicket:
    """Implements `satrap.worker.rows.Ticket`."""

    ids: Any
    """`DeviceIds` or `DirectIds`."""
    bags: Any
    """The core's description of the features, which the lookup used."""
    used: bool = False

    @property
    def batch_size(self) -> int:
        size: int = self.ids.batch_size
        return size

    @property
    def bound(self) -> float:
        """A factor: no sum of an id's gradients is larger than the largest gradient times the scale times this."""
        largest: float = self.ids.largest_weight
        return len(self.ids) * largest


@dataclass(frozen=True, slots=True, eq=False)
class SortedGradients:
    """The gradients of one step, id by id."""

    grouped: GroupedIds
    places: Tensor
    """int32 [gradients], in the order of `grouped`: where each begins among the floats of all gradients."""
    factors: Tensor | None
    """float32 [gradients, 2], in the same order: weight and divisor; None: all are 1."""
    alignment: int
    """Every place is a multiple of it: see `Runs`."""

    @classmethod
    def of(cls, layout: IdLayout, tickets: Sequence[DeviceTicket], given: Sequence[Given]) -> Self | None:
        """Sort the gradients of some batches; return None if there are none."""
        feature, places, factors = gradient_entries(layout, tickets, given)
        is_whole = is_whole_batch(layout.total_dim, given)
        grouped = tickets[0].ids.grouped
        if not is_whole:
            has = (places >= 0).nonzero()[:, 0]
            if len(has) == 0:
                return None
            values = torch.cat([ticket.ids.values for ticket in tickets])[has]
            places, factors = places[has], None if factors is None else factors[has]
            grouped = GroupedIds.of(values, layout.tables[feature[has]], layout.num_tables)
        factors = None if factors is None else factors[grouped.order]
        return cls(grouped, places[grouped.order].int(), factors, layout.alignment)

    def runs(self, resolved: dict[str, Any], device: torch.device) -> Runs:
        """Return the runs of an update. resolved: what the core returned for an update whose places are the numbers of
        the unique ids."""
        at = to_device(resolved["places"][resolved["begin"]].astype(np.int64), device)
        runs = Runs.to_device({**resolved, "places": resolved["begin"], "factors": None}, device)
        begin, end = self.grouped.begin[at], self.grouped.end[at]
        return replace(runs, begin=begin, end=end, places=self.places, factors=self.factors, alignment=self.alignment)


def given_parts(request: UpdateRequest) -> list[Given]:
    """Return what has a gradient in an update."""
    return [
        (block is not None, [sequence is not None for sequence in sequences]) for block, sequences in request.gradients
    ]


def tensors_of(request: UpdateRequest) -> list[Tensor]:
    """Return the gradients of an update in the order of their places."""
    return [part for block, sequences in request.gradients for part in (block, *sequences) if part is not None]


def flat_gradients(request: UpdateRequest, nothing: Tensor) -> Tensor:
    """Return all gradients as one tensor in the order of their places: float32, if some are. nothing: without any."""
    parts = [part.reshape(-1) for part in tensors_of(request)]
    return parts[0] if len(parts) == 1 else torch.cat(parts or [nothing.view(-1)])


def is_whole_batch(total_dim: int, given: Sequence[Given]) -> bool:
    """Return whether there is one batch, all ids of which have a gradient. total_dim: the columns of its block."""
    return len(given) == 1 and all((given[0][0] or not total_dim, *given[0][1]))


def num_floats(layout: IdLayout, samples: int, given: Given, begin: int) -> int:
    """Return where the gradients of a batch end among all floats."""
    return _part_begins(layout, samples, given, begin)[1]


def gradient_entries(
    layout: IdLayout, tickets: Sequence["DeviceTicket"], given: Sequence[Given], end: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the feature of each id of some batches, the place of its gradient, or a negative number, and its factors;
    None: they are 1. end: of the gradients of earlier batches."""
    parts = []
    for ticket, gradient in zip(tickets, given, strict=True):
        begins, end = _part_begins(layout, ticket.batch_size, gradient, end)
        parts.append(_entries(layout, ticket.ids, begins))
    if end > MOST_PLACES:
        raise InputError(
            f"the gradients of one step hold {end} floats; at most 2^31-1 fit on a device: make smaller batches"
        )
    features, places, factors = zip(*parts, strict=True)
    return torch.cat(features), torch.cat(places), torch.cat(factors) if layout.any_scaled else None


def _part_begins(layout: IdLayout, samples: int, given: Given, begin: int) -> tuple[list[int], int]:
    """Return for each feature where its gradients begin among all floats, -1 if it has none; and where they end."""
    block, sequences = given
    sizes = [
        samples * layout.sequence_floats[number] * has for number, has in zip(layout.sequences, sequences, strict=True)
    ]
    first = begin + samples * layout.total_dim * block
    *starts, end = accumulate(sizes, initial=first)
    begins = [begin + column if block else -1 for column in layout.columns]
    for number, has, start in zip(layout.sequences, sequences, starts, strict=True):
        begins[number] = start if has else -1
    return begins, end


def _entries(layout: IdLayout, ids: IdEntries, begins: list[int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the feature of each id, the place of its gradient, or a negative number, and its factors; None: they are
    1."""
    samples, n, device = ids.batch_size, len(ids), ids.values.device
    bounds = ids.bounds(len(begins) * samples)
    bag = torch.arange(n, device=device) if ids.offsets is None else bags_of(bounds, n)
    feature, sample = bag // samples, bag % samples
    begin = to_device(np.array(begins, np.int64), device)[feature]
    floats = to_device(np.array([start or layout.total_dim for start in layout.sequence_floats], np.int64), device)
    step = torch.where(layout.pooling == 0, layout.dims, 0)
    in_bag = torch.arange(n, device=device) - bounds[bag]
    places = torch.where(begin < 0, -1, begin + sample * floats[feature] + in_bag * step[feature])
    if not layout.any_scaled:
        return feature, places, None
    lengths = (bounds[1:] - bounds[:-1])[bag].clamp(min=1).double()
    pooling = layout.pooling[feature]
    divisor = torch.where(pooling == 2, lengths, torch.where(pooling == 3, sqrt(lengths), 1.0)).float()
    weight = torch.ones_like(divisor)
    if ids.weights is not None:
        weight = torch.where(layout.is_weighted[feature], ids.weights, weight)
    return feature, places, torch.stack([weight, divisor], 1)
