"""Takes a caller's ids that lie on the rows' device, with their offsets and weights: tensors in an `Inputs`, or by
feature. A batch of which a part is elsewhere, or not as expected, is copied to the CPU, where the checks of ids in CPU
memory accept it or say what is wrong."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from satrap.config.features import Features
from satrap.data.inputs import Inputs, as_inputs
from satrap.device.device_ids import DeviceIds, IdLayout, sorts_ids

_IDS = (torch.int64, torch.uint64)


def lie_on(ids: object, device: torch.device) -> bool:
    """Return whether the ids lie on this device, which sorts ids."""
    return isinstance(ids, Tensor) and ids.device == device and sorts_ids(device)


def ids_of(inputs: Inputs, layout: IdLayout, device: torch.device) -> DeviceIds | Inputs:
    """Return the ids of a batch, sorted on the device; the batch itself if they do not lie there, or a copy of it on
    the CPU."""
    parts = values, offsets, weights = inputs.values, inputs.offsets, inputs.weights
    if not lie_on(values, device):
        return inputs
    if (
        _is_list(values, device, *_IDS)
        and (offsets is None or _is_list(offsets, device, torch.int64))
        and (weights is None or _is_list(weights, device, torch.float32))
    ):
        found = DeviceIds.of(layout, _bits(values), _bits(offsets), _bits(weights), inputs.batch_size)
        if found is not None:
            return found
    on_cpu = dict(zip(("values", "offsets", "weights"), map(_on_cpu, parts), strict=True))
    return replace(inputs, **on_cpu)


def inputs_of(features: Features, ids: Any, device: torch.device) -> Inputs:
    """Return a batch of ids by feature, on the device if all of them lie there; see `as_inputs`."""
    if not isinstance(ids, Mapping):
        return as_inputs(features, ids)
    pairs = {name: each if isinstance(each, tuple) else (each, None) for name, each in ids.items()}
    if not pairs or not all(len(pair) == 2 and lie_on(pair[0], device) for pair in pairs.values()):
        return as_inputs(features, ids)
    joined = _joined(features, pairs, device)
    on_cpu = {name: tuple(map(_on_cpu, pair)) for name, pair in pairs.items()} if joined is None else {}
    return joined or as_inputs(features, on_cpu)


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
    if len({len(each) for each in lengths}) != 1 or (are_valid and not bool(torch.stack(are_valid).all())):
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
    found = given.detach().contiguous()
    return found.view(torch.int64) if found.dtype == torch.uint64 else found


def _on_cpu(given: Any) -> Any:
    return given.detach().cpu() if isinstance(given, Tensor) else given
