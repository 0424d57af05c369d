"""Blocks and gradients of a worker whose rows are on a device: tensors there."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from satrap.device.device_stream import current_stream
from satrap.device.home_memory import DTYPES
from satrap.errors import InputError
from satrap.worker.worker import ArrayBlocks


class Magnitude:
    """The largest magnitude among gradients, a NaN if there is one: it decides whether a sum of them could overflow.

    The device computes it behind the backward pass, and copies it to this process. The update waits for it: the one
    wait of a step."""

    def __init__(self, weighted: Iterable[tuple[Tensor, float]]) -> None:
        """weighted: gradients with the factor by which each is multiplied later. Called on the stream on which they are
        computed."""
        parts = [_largest(gradient) * abs(weight) for gradient, weight in weighted if gradient.numel()]
        number = torch.stack(parts).max() if parts else torch.zeros((), device="cpu")
        self._number, self._ready = current_stream(number.device).download(number)

    def __float__(self) -> float:
        """Return the number. Waits for the device, unless it has computed the gradients."""
        self._ready.synchronize()
        return float(self._number)


def _largest(gradient: Tensor) -> Tensor:
    low, high = torch.aminmax(gradient.detach())  # one pass, and a NaN is both
    return torch.maximum(-low, high).float()


class TensorBlocks(ArrayBlocks):
    """The kind of block of rows on a device: tensors there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check_block(self, block: Any, shape: tuple[int, ...]) -> Any:
        tensor = _tensor_of("block", block, shape, self.device)
        if not tensor.is_contiguous():
            raise InputError(f"block has the strides {tensor.stride()}; expected a contiguous tensor")
        return tensor

    def check_gradient(self, where: str, gradient: Any, shape: tuple[int, ...]) -> Any:
        return _tensor_of(f"{where}: the gradient", gradient, shape, self.device).contiguous()

    def measure(self, gradients: Sequence[tuple[Tensor, float]]) -> Magnitude:
        return Magnitude(gradients)


def _tensor_of(where: str, given: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if not isinstance(given, Tensor):
        raise InputError(f"{where} is a {type(given).__name__}; expected a tensor on {device}, where the rows are")
    if tuple(given.shape) != shape or given.dtype not in DTYPES.values() or given.device != device:
        raise InputError(
            f"{where} is {given.dtype} of shape {tuple(given.shape)} on {given.device}; expected float32 or 16 bits, "
            f"of shape {shape} on {device}, where the rows are"
        )
    return given
