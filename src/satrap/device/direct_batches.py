"""Batches of tables with `num_rows`: their ids on the device, sorted for their update, and the gradients of an update.

What an update needs depends on ids alone, so it is made when they are resolved, in the thread that reads ahead: the
update of one whole batch uses it as it is. The numbers of the rows are those of this process, or of all trainers.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satrap.config.features import Features
from satrap.data.inputs import Inputs
from satrap.device.device_ids import IdEntries, IdLayout, copied_to_cpu
from satrap.device.direct_ids import DirectIds, Numbers, RowRuns
from satrap.device.runs import DeviceTicket, Given, gradient_entries, is_whole_batch, num_floats
from satrap.errors import InputError
from satrap.worker.rows import BagRequest, UpdateRequest, id_features

Check = Callable[[Any, Any, Any, int], object]
"""A function that takes the ids, offsets and weights of a batch and its number of samples, and raises the core's error
if the core refuses them."""


@dataclass(slots=True, eq=False, kw_only=True)
class DirectTicket(DeviceTicket):
    """The ticket of a lookup, with the part of its update that depends on ids alone."""

    layout: IdLayout
    """What is declared about the ids."""
    runs: RowRuns
    places: Tensor
    """int32 [ids], in the order of the runs: where each gradient of the whole batch begins."""
    factors: Tensor | None
    """float32 [ids, 2], in the same order: weight and divisor; None: all are 1."""


class DirectBatches:
    """Places the ids of batches, and sorts them."""

    def __init__(self, features: Features, layout: IdLayout, numbers: Numbers, device: torch.device) -> None:
        """layout: what is declared about the ids of the features. numbers: the numbers of the tables' rows."""
        self._features, self._layout, self._numbers, self._device = features, layout, numbers, device
        self._id_features = id_features(features)
        self._id_layout = IdLayout(self._id_features, device)
        self._last_flat: tuple[Tensor, Tensor | None] | None = None
        self._num_cut = torch.zeros(len(layout.sequences), dtype=torch.int64, device=device)

    @property
    def num_cut(self) -> list[int]:
        """For each sequence, the number of ids beyond its max_length so far. Waits for the device."""
        counts: list[int] = self._num_cut.tolist()
        return counts

    def count_cut(self, ids: DirectIds) -> None:
        """Count what the sequences of a batch cut off."""
        if len(ids.cut) and ids.offsets is not None:
            self._num_cut = self._num_cut + ids.cut

    def place(self, inputs: Inputs) -> Inputs | IdEntries:
        """Return the ids of a batch on the device. If a part has an unexpected dtype or size, return the batch in CPU
        memory, where the core checks it."""
        ids = DirectIds.of(self._layout, self._numbers, inputs, self._device)
        return copied_to_cpu(inputs) if ids is None else ids

    def place_arrays(self, request: BagRequest, check: Check) -> DirectIds:
        """Place ids by table, or a batch that `place` left in CPU memory, which the core checks first."""
        if not request.of_tables:
            check(request.values, request.offsets, request.weights, request.batch_size)
        inputs = Inputs(
            names=(self._id_features if request.of_tables else self._features).names,
            values=request.values,
            offsets=request.offsets,
            weights=request.weights,
            batch_size=request.batch_size,
        )
        ids = DirectIds.of(self.layout_of(request), self._numbers, inputs, self._device)
        assert ids is not None, "the core accepted what the device does not"
        return ids

    def layout_of(self, request: BagRequest) -> IdLayout:
        """Return what is declared about the ids of a lookup."""
        if not request.of_tables:
            return self._layout
        assert request.offsets is not None
        layout, sizes = copy(self._id_layout), np.diff(request.offsets).tolist()
        dims = [feature.table.dim for feature in self._id_features.values()]
        layout.sequence_floats = [size * dim for size, dim in zip(sizes, dims, strict=True)]
        return layout

    def ticket(self, ids: DirectIds, bags: Any, layout: IdLayout) -> DirectTicket:
        """Return the ticket of a lookup. Sorts the ids already, and orders the gradients for an update of the whole
        batch, so that the update need not. layout: what is declared about the ids."""
        runs = RowRuns.of(ids.rows, self._numbers)
        ticket = DirectTicket(ids, bags, layout=layout, runs=runs, places=runs.order, factors=None)
        places, factors = self._whole_batch(ticket)
        ticket.places, ticket.factors = places[runs.order].int(), None if factors is None else factors[runs.order]
        return ticket

    def _whole_batch(self, ticket: DirectTicket) -> tuple[Tensor, Tensor | None]:
        """Return the place of each gradient of a whole batch, and its factors. If each bag has one id, they depend on
        the batch size alone."""
        is_flat = ticket.ids.offsets is None and ticket.ids.weights is None
        if is_flat and self._last_flat is not None and len(self._last_flat[0]) == len(ticket.ids):
            return self._last_flat
        whole: Given = (True, [True] * len(ticket.layout.sequences))
        _, places, factors = gradient_entries(ticket.layout, [ticket], [whole])
        self._last_flat = (places, factors) if is_flat else self._last_flat
        return places, factors

    def gradients(self, tickets: Sequence[Any], given: Sequence[Given]) -> tuple[RowRuns, Tensor, Tensor | None]:
        """Return the runs of an update, and the places and factors of its gradients in the order of the runs."""
        if is_whole_batch(tickets[0].layout.total_dim, given):
            return tickets[0].runs, tickets[0].places, tickets[0].factors
        parts: list[Any] = []
        end = 0
        for ticket, has in zip(tickets, given, strict=True):
            _, *part = gradient_entries(ticket.layout, [ticket], [has], end)
            parts.append(part)
            end = num_floats(ticket.layout, ticket.batch_size, has, end)
        places = torch.cat([part[0] for part in parts])
        factors = None
        if any(part[1] is not None for part in parts):
            ones = (places.new_ones((len(part[0]), 2), dtype=torch.float32) for part in parts)
            factors = torch.cat([one if part[1] is None else part[1] for part, one in zip(parts, ones, strict=True)])
        rows = torch.where(places >= 0, torch.cat([ticket.ids.rows for ticket in tickets]), -1)
        runs = RowRuns.of(rows, self._numbers)
        return runs, places[runs.order].int(), None if factors is None else factors[runs.order]


def refusal(ids: DirectIds, check: Check) -> InputError:
    """Return the core's error about a batch that it refuses."""
    given = copied_to_cpu(ids.given)
    parts: Any = (given.values, given.offsets, given.weights)
    values, offsets, weights = (None if part is None else np.asarray(part) for part in parts)
    assert values is not None
    values = values if values.dtype == np.uint64 else values.astype(np.int64).view(np.uint64)
    try:
        check(values, offsets, weights, ids.batch_size)
    except InputError as error:
        return error
    return InputError(
        "the ids changed after their lookup: another batch was written to their array; pass each its own array"
    )


def require_direct_sizes(tickets: Sequence[DirectTicket], request: UpdateRequest) -> None:
    """Raise InputError if gradients of sequences have other sizes than the rows of their lookup."""
    for ticket, (_, sequences) in zip(tickets, request.gradients, strict=True):
        for gradient, size in zip(sequences, ticket.layout.sequence_floats_of(ticket.batch_size), strict=True):
            if gradient is not None and gradient.numel() != size:
                raise InputError(f"a sequence's gradients are {gradient.numel()} floats; expected {size}")
