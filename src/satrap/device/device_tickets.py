"""Updates of batches whose ids lie on the rows' device: where the gradients of each id are, without the core's help.

A `DeviceTicket` keeps the ids that a lookup has sorted. An update of one whole batch uses that order again; one of
several batches, or of parts of them, sorts their ids together. The core then takes the unique ids only, and returns
the frame of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from satrap.device.device_ids import DeviceIds, GroupedIds, IdLayout, bags_of
from satrap.device.exact import sqrt
from satrap.device.host_copy import to_device
from satrap.device.runs import Runs
from satrap.errors import InputError

MOST_PLACES = 2**31 - 1  # counted in int32
Given = tuple[bool, list[bool]]
"""Whether the block of a ticket has a gradient, and each of its sequences."""


@dataclass(slots=True, eq=False)
class DeviceTicket:
    """Implements `satrap.worker.worker.Ticket`."""

    ids: DeviceIds
    bags: Any
    """The core's description of the features, which the lookup used."""
    used: bool = False

    @property
    def batch_size(self) -> int:
        return self.ids.batch_size

    @property
    def bound(self) -> float:
        """A sum of gradients is at most this many times the largest one times the scale."""
        return len(self.ids) * self.ids.largest_weight


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
        parts, end = [], 0
        for ticket, each in zip(tickets, given, strict=True):
            begins, end = _part_begins(layout, ticket.batch_size, each, end)
            parts.append(_entries(layout, ticket.ids, begins))
        if end > MOST_PLACES:
            raise InputError(
                f"the gradients of one step hold {end} floats; at most 2^31-1 fit on a device: make smaller batches"
            )
        feature, places, factors = (torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True))
        is_whole = len(tickets) == 1 and all((given[0][0] or not layout.total_dim, *given[0][1]))
        grouped = tickets[0].ids.grouped
        if not is_whole:
            has = (places >= 0).nonzero()[:, 0]
            if len(has) == 0:
                return None
            values = torch.cat([ticket.ids.values for ticket in tickets])[has]
            places, factors = places[has], factors[has]
            grouped = GroupedIds.of(values, layout.tables[feature[has]], layout.num_tables)
        factors = factors[grouped.order] if layout.any_scaled else None
        return cls(grouped, places[grouped.order].int(), factors, layout.alignment)

    def runs(self, found: dict[str, Any], device: torch.device) -> Runs:
        """Return the runs of an update. found: what the core returned for an update whose places are the numbers of
        the unique ids."""
        at = to_device(found["places"][found["begin"]].astype(np.int64), device)
        runs = Runs.to_device({**found, "places": found["begin"], "factors": None}, device)
        begin, end = self.grouped.begin[at], self.grouped.end[at]
        return replace(runs, begin=begin, end=end, places=self.places, factors=self.factors, alignment=self.alignment)


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


def _entries(layout: IdLayout, ids: DeviceIds, begins: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the feature of each id, the place of its gradient, or a negative number, and its factors."""
    samples, device = ids.batch_size, ids.values.device
    bounds = ids.bounds(len(begins) * samples)
    bag = bags_of(bounds, len(ids))
    feature, sample = bag // samples, bag % samples
    begin = to_device(np.array(begins, np.int64), device)[feature]
    floats = to_device(np.array([each or layout.total_dim for each in layout.sequence_floats], np.int64), device)
    step = torch.where(layout.pooling == 0, layout.dims, 0)
    in_bag = torch.arange(len(ids), device=device) - bounds[bag]
    places = torch.where(begin < 0, -1, begin + sample * floats[feature] + in_bag * step[feature])
    lengths = (bounds[1:] - bounds[:-1])[bag].clamp(min=1).double()
    pooling = layout.pooling[feature]
    divisor = torch.where(pooling == 2, lengths, torch.where(pooling == 3, sqrt(lengths), 1.0)).float()
    weight = torch.ones_like(divisor)
    if ids.weights is not None:
        weight = torch.where(layout.is_weighted[feature], ids.weights, weight)
    return feature, places, torch.stack([weight, divisor], 1)
