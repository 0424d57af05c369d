"""Ids that lie on the rows' device: they are checked, cut, sorted and made unique there, and only the unique ones are
copied to the CPU, in one copy, where the core finds their rows.

Padding, and what a sequence cuts off, is left out first, as the core does for ids in CPU memory. What the core would
refuse is left to it: then `DeviceIds.of` returns None, and the ids go to the CPU. Each call waits for the device
twice: for a few numbers about the batch, and for the ids.

A caller gives ids with their offsets and weights as tensors in an `Inputs`, or by feature (`inputs_of`). A batch of
which a part is elsewhere, or not as expected, is copied to the CPU, where the checks of ids in CPU memory accept it or
say what is wrong.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.features import Features
from satrap.data.inputs import Inputs, Position
from satrap.data.iterable import IterableSource, keeping
from satrap.device.exact import signed
from satrap.worker.worker import InputReader

_ANY_LENGTH = 2**62


SORTS_IDS = {"cuda": True, "cpu": False}
"""For each type of device, whether ids that lie on it are sorted there. The core sorts ids in CPU memory faster than
torch does; tests turn torch's sort on."""


def alignment_of(*places: int) -> int:
    """Return 8, 4 or 1: all places are multiples of it, so kernels may move so many numbers at a time."""
    divisor = math.gcd(8, *places)
    return divisor if divisor >= 4 else 1


def sorts_ids(device: torch.device) -> bool:
    """Return whether ids that lie on this device are sorted there."""
    return SORTS_IDS[device.type]


class IdLayout:
    """What is declared about the ids of each feature, as tensors on the device, [features]."""

    def __init__(self, features: Features, device: torch.device) -> None:
        each = list(features.values())

        def tensor(numbers: Any) -> Tensor:
            return torch.tensor(list(numbers), device=device)

        self.num_tables, self.total_dim = len(features.tables), features.total_dim
        self.tables = tensor(features.table_index)
        self.is_weighted = tensor(feature.weighted for feature in each)
        self.pooling = tensor(("none", "sum", "mean", "sqrtn").index(feature.pooling) for feature in each)
        self.max_length = tensor(feature.max_length or _ANY_LENGTH for feature in each)
        self.keeps_last = tensor(feature.keep == "last" for feature in each)
        self.has_padding = tensor(feature.padding_id is not None for feature in each)
        self.padding = tensor(signed(feature.padding_id or 0) for feature in each)
        self.dims = tensor(features.dims)
        self.any_padding = any(feature.padding_id is not None for feature in each)
        self.any_weighted = any(feature.weighted for feature in each)
        self.any_scaled = self.any_weighted or any(feature.pooling in ("mean", "sqrtn") for feature in each)
        self.columns = features.columns
        self.alignment = alignment_of(*features.dims)  # places of gradients are multiples of it
        self.sequences = [number for number, feature in enumerate(each) if feature.pooling == "none"]
        self.sorts = not any(feature.jagged or feature.aligned_with is not None for feature in each)
        self.sequence_floats = [(feature.max_length or 0) * feature.table.dim for feature in each]

    def sequence_floats_of(self, samples: int) -> list[int]:
        """Return how many floats the rows of each sequence have in a batch."""
        return [samples * self.sequence_floats[number] for number in self.sequences]


@dataclass(frozen=True, slots=True, eq=False)
class GroupedIds:
    """The unique ids of some entries, and where each one's entries are."""

    ids: NDArray[np.uint64]
    """In this process: table by table, within a table in order of first appearance."""
    offsets: NDArray[np.int64]
    """Where the unique ids of each table begin, and where the last end."""
    inverse: Tensor
    """int64 [entries]: which unique id each entry has."""
    order: Tensor
    """int64 [entries]: the entries, grouped by id; the entries of one id are in order of appearance."""
    begin: Tensor
    """int32 [unique ids]: where the entries of each begin in `order`."""
    end: Tensor
    """int32 [unique ids]"""

    @classmethod
    def of(cls, values: Tensor, tables: Tensor, num_tables: int) -> Self:
        """Group ids, of which there is at least one. tables: the table of each id. Waits for the device, since the
        number of unique ids decides the sizes."""
        order = torch.sort(values, stable=True).indices
        if num_tables > 1:
            order = order[torch.sort(tables[order], stable=True).indices]
        ids, of_table = values[order], tables[order]
        is_new = torch.ones_like(ids, dtype=torch.bool)
        is_new[1:] = (ids[1:] != ids[:-1]) | (of_table[1:] != of_table[:-1])
        begin = is_new.nonzero()[:, 0]  # waits for the device
        end = torch.cat([begin[1:], begin.new_full((1,), len(ids))])
        table = of_table[begin]
        by_appearance = torch.sort(order[begin]).indices
        if num_tables > 1:
            by_appearance = by_appearance[torch.sort(table[by_appearance], stable=True).indices]
        rank = torch.empty_like(by_appearance)
        rank[by_appearance] = torch.arange(len(rank), device=rank.device)
        inverse = torch.empty_like(order)
        inverse[order] = rank[is_new.cumsum(0) - 1]
        offsets = torch.searchsorted(table, torch.arange(num_tables + 1, device=table.device))
        on_cpu = torch.cat([offsets, ids[begin][by_appearance]]).cpu().numpy()
        return cls(
            ids=on_cpu[num_tables + 1 :].view(np.uint64),
            offsets=on_cpu[: num_tables + 1],
            inverse=inverse,
            order=order,
            begin=begin[by_appearance].int(),
            end=end[by_appearance].int(),
        )


class IdEntries(ABC):
    """The ids of one batch, on a device. Implements `satrap.worker.rows.PlacedIds`."""

    values: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    batch_size: int

    def __len__(self) -> int:
        return len(self.values)

    @abstractmethod
    def cut_counts(self) -> list[int]:
        """Return for each sequence the number of ids beyond its max_length."""

    def bounds(self, num_bags: int) -> Tensor:
        """Return where each bag begins, and where the last ends."""
        return torch.arange(num_bags + 1, device=self.values.device) if self.offsets is None else self.offsets

    @property
    def jagged(self) -> Mapping[str, NDArray[np.int64]]:
        return {}

    def masks(self, features: Features) -> tuple[dict[str, Tensor], list[int]]:
        if all(feature.max_length is None for feature in features.values()):
            return {}, self.cut_counts()
        lengths = self.bounds(len(features) * self.batch_size).diff().view(len(features), self.batch_size, 1)
        return {
            name: torch.arange(feature.max_length, device=lengths.device) < lengths[number]
            for number, (name, feature) in enumerate(features.items())
            if feature.max_length is not None
        }, self.cut_counts()

    def on_cpu(self) -> tuple[NDArray[np.uint64], NDArray[np.int64] | None, NDArray[np.float32] | None]:
        """Copy the ids, offsets and weights to the CPU."""
        offsets, weights = (None if tensor is None else tensor.cpu().numpy() for tensor in (self.offsets, self.weights))
        return self.values.cpu().numpy().view(np.uint64), offsets, weights


@dataclass(frozen=True, slots=True, eq=False)
class KeptIds:
    """Which ids of a batch are looked up: not padding, nor what sequences cut off."""

    is_kept: Tensor
    """bool [ids]: which ids are not padding."""
    num_before: Tensor
    """int64 [ids + 1]: how many ids that are not padding come before each id."""
    before: Tensor
    """int64 [bags + 1]: how many ids that are not padding come before each bag."""
    most: Tensor
    """int64 [bags]: how many ids of the bag are looked up, at most."""
    keeps_last: Tensor
    """bool [bags]: whether a bag with more ids keeps its last ones, not its first ones."""

    @classmethod
    def of(cls, layout: "IdLayout", values: Tensor, bounds: Tensor, feature: Tensor, batch_size: int) -> Self:
        """Count the ids that are not padding before each id and each bag.

        bounds: where each bag begins, and where the last one ends. Wrong bounds are clamped: the caller checks them
            later, together with other numbers, so that it waits for the device once.
        feature: the number of each id's feature."""
        is_kept = ~(layout.has_padding[feature] & (values == layout.padding[feature]))
        num_before = torch.cat([bounds.new_zeros(1), is_kept.cumsum(0)])
        most, keeps_last = (
            of_feature.repeat_interleave(batch_size, output_size=len(bounds) - 1)
            for of_feature in (layout.max_length, layout.keeps_last)
        )
        return cls(is_kept, num_before, num_before[bounds.clamp(0, len(values))], most, keeps_last)

    @property
    def lengths(self) -> Tensor:
        """How many ids of each bag are not padding."""
        return self.before[1:] - self.before[:-1]

    def beyond(self, layout: "IdLayout") -> Tensor:
        """Return for each feature how many ids are beyond its max_length."""
        num_features = len(layout.tables)
        return (self.lengths - self.most).clamp(min=0).view(num_features, len(self.most) // num_features).sum(1)

    def stays(self, bag: Tensor) -> Tensor:
        """Return for each id whether it is looked up: whether it is neither padding nor cut off. bag: the number of
        each id's bag."""
        first = torch.where(self.keeps_last, self.lengths - self.most, 0).clamp(min=0)
        at = self.num_before[:-1] - self.before[bag] - first[bag]  # its place among those that are not padding
        return self.is_kept & (at >= 0) & (at < self.most[bag])

    def offsets(self) -> Tensor:
        """Return where each bag begins among the ids that are looked up, and where the last ends."""
        return torch.cat([self.before.new_zeros(1), torch.minimum(self.lengths, self.most).cumsum(0)])


@dataclass(frozen=True, slots=True, eq=False)
class DeviceIds(IdEntries):
    """The ids of one batch, on a device, without padding and without what sequences cut off."""

    values: Tensor
    """int64, as bit patterns: feature after feature, and sample after sample."""
    offsets: Tensor | None
    """int64 [bags + 1]; None: each bag has one id."""
    weights: Tensor | None
    """float32, of each id."""
    batch_size: int
    largest_weight: float
    """The largest magnitude of a weight; at least 1."""
    num_cut: list[int]
    """For each sequence, the number of ids beyond its max_length."""
    grouped: GroupedIds

    def cut_counts(self) -> list[int]:
        return self.num_cut

    @classmethod
    def of(
        cls, layout: IdLayout, values: Tensor, offsets: Tensor | None, weights: Tensor | None, batch_size: int
    ) -> Self | None:
        """Return the ids of a batch; None if there are none, or if the core has to refuse them."""
        n, num_bags = len(values), len(layout.tables) * batch_size
        if n == 0 or num_bags == 0 or (n if offsets is None else len(offsets) - 1) != num_bags:
            return None
        if (weights is None) == layout.any_weighted or (weights is not None and len(weights) != n):
            return None
        bounds = torch.arange(num_bags + 1, device=values.device) if offsets is None else offsets
        feature = bags_of(bounds, n) // batch_size
        kept = KeptIds.of(layout, values, bounds, feature, batch_size)
        largest = torch.ones(1, dtype=torch.float64, device=values.device)
        if layout.any_weighted and weights is not None:
            largest = torch.where(layout.is_weighted[feature], weights.abs(), 1.0).max().double()[None]
        is_valid = (bounds[:1] == 0) & (bounds[-1:] == n) & (bounds[1:] >= bounds[:-1]).all()
        valid, drops, largest_weight, *cut = torch.cat(
            [is_valid.double(), (~kept.is_kept).any().double()[None], largest, kept.beyond(layout).double()]
        ).tolist()  # waits for the device
        if not valid or not math.isfinite(largest_weight):
            return None
        if drops or any(cut):
            stays = kept.stays(bags_of(bounds, n)).nonzero()[:, 0]
            if len(stays) == 0:
                return None
            values, weights = values[stays], None if weights is None else weights[stays]
            offsets, feature = kept.offsets(), feature[stays]
        else:  # the caller may use the memory of its batch again, before the update
            values, weights = values.clone(), None if weights is None else weights.clone()
            offsets = None if offsets is None else offsets.clone()
        grouped = GroupedIds.of(values, layout.tables[feature], layout.num_tables)
        num_cut = [int(cut[number]) for number in layout.sequences]
        return cls(values, offsets, weights, batch_size, max(1.0, largest_weight), num_cut, grouped)


def bags_of(bounds: Tensor, n: int) -> Tensor:
    """Return the bag of each of n ids. bounds: where each bag begins, and where the last ends."""
    at = torch.arange(n, device=bounds.device)
    return (torch.searchsorted(bounds, at, right=True) - 1).clamp(0, len(bounds) - 2)


_IDS = (torch.int64, torch.uint64)


def lie_on(ids: object, device: torch.device) -> bool:
    """Return whether the ids are on this device, which sorts them there."""
    return isinstance(ids, Tensor) and ids.device == device and sorts_ids(device)


def ids_of(inputs: Inputs, layout: IdLayout, device: torch.device) -> DeviceIds | Inputs:
    """Return the ids of a batch, sorted on the device. If they are not there, return the batch itself, or a copy of it
    on the CPU."""
    values, offsets, weights = inputs.values, inputs.offsets, inputs.weights
    if not lie_on(values, device):
        return inputs
    if (
        layout.sorts
        and _is_list(values, device, *_IDS)
        and (offsets is None or _is_list(offsets, device, torch.int64))
        and (weights is None or _is_list(weights, device, torch.float32))
    ):
        on_device = DeviceIds.of(layout, _bits(values), _bits(offsets), _bits(weights), inputs.batch_size)
        if on_device is not None:
            return on_device
    return copied_to_cpu(inputs)


def copied_to_cpu(inputs: Inputs) -> Inputs:
    """Return a batch whose ids, offsets and weights are in this process. Waits for the device, if it has them."""
    parts = {name: _on_cpu(getattr(inputs, name)) for name in ("values", "offsets", "weights")}
    return replace(inputs, **parts)


class DeviceReader(InputReader):
    """Makes batches whose ids stay on the device if they lie there."""

    def __init__(self, features: Features, device: torch.device) -> None:
        super().__init__(features)
        self._device = device

    def inputs_of(self, ids: Any) -> Inputs:
        if not isinstance(ids, Mapping):
            return super().inputs_of(ids)
        parts = {name: given if isinstance(given, tuple) else (given, None) for name, given in ids.items()}
        if not parts or not all(given and lie_on(given[0], self._device) for given in parts.values()):
            return super().inputs_of(ids)
        joined = (
            _joined(self._features, parts, self._device) if all(len(given) == 2 for given in parts.values()) else None
        )
        on_cpu = {name: tuple(map(_on_cpu, given)) for name, given in parts.items()} if joined is None else {}
        return joined or super().inputs_of(on_cpu)

    def batches(self, source: Any, position: Position | None = None, **share: int) -> Iterator[Inputs]:
        declared = source if hasattr(source, "batches") else IterableSource(source)
        if isinstance(declared, IterableSource) and sorts_ids(self._device):
            declared = keeping(declared, partial(lie_on, device=self._device))
        return super().batches(declared, position, **share)


def _joined(features: Features, pairs: Mapping[str, tuple[Any, Any]], device: torch.device) -> Inputs | None:
    """Return the ids of all features as one batch on the device; None if they are not as expected."""
    if set(pairs) != set(features):
        return None
    values, lengths, are_valid = [], [], []
    for name in features:
        ids, offsets = pairs[name]
        if not _is_list(ids, device, *_IDS):
            return None
        values.append(_bits(ids))
        if offsets is None:
            lengths.append(values[-1].new_ones(len(ids)))
            continue
        if not _is_list(offsets, device, torch.int64) or len(offsets) == 0:
            return None
        lengths.append(offsets.diff())
        are_valid.append((offsets[0] == 0) & (offsets[-1] == len(ids)) & (lengths[-1] >= 0).all())
    if len({len(column) for column in lengths}) != 1 or (are_valid and not bool(torch.stack(are_valid).all())):
        return None
    joined: Any = torch.cat(values)
    bounds: Any = None
    if are_valid:
        bounds = torch.cat([joined.new_zeros(1), torch.cat(lengths).cumsum(0)])
    return Inputs(names=features.names, values=joined, offsets=bounds, batch_size=len(lengths[0]))


def _is_list(given: object, device: torch.device, *dtypes: torch.dtype) -> bool:
    return isinstance(given, Tensor) and given.device == device and given.dtype in dtypes and given.ndim == 1


def _bits(given: Any) -> Any:
    """Return a tensor as the device's code takes it; ids as int64, by their bit patterns."""
    if given is None:
        return None
    values = given.detach().contiguous()
    return values.view(torch.int64) if values.dtype == torch.uint64 else values


def _on_cpu(given: Any) -> Any:
    return given.detach().cpu() if isinstance(given, Tensor) else given
