"""What workers over rows on a device have in common: their blocks and gradients are tensors there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from satrap.device.magnitude import Magnitude
from satrap.errors import InputError
from satrap.worker.worker import Worker


class DeviceBlocks(Worker):
    """Checks tensors where another worker checks arrays."""

    def _check_block(self, block: Any, shape: tuple[int, ...]) -> Any:
        found = _tensor_of("block", block, shape, self.device)
        if not found.is_contiguous():
            raise InputError(f"block has the strides {found.stride()}; expected a contiguous tensor")
        return found

    def measure(self, gradients: Sequence[tuple[Tensor, float]]) -> Magnitude:
        return Magnitude(gradients)

    def _check_gradient(self, where: str, gradient: Any, shape: tuple[int, ...]) -> Any:
        return _tensor_of(f"{where}: the gradient", gradient, shape, self.device).contiguous()


def _tensor_of(where: str, given: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if not isinstance(given, Tensor):
        raise InputError(f"{where} is a {type(given).__name__}; expected a tensor on {device}, where the rows are")
    if tuple(given.shape) != shape or given.dtype != torch.float32 or given.device != device:
        raise InputError(
            f"{where} is {given.dtype} of shape {tuple(given.shape)} on {given.device}; expected float32 of shape "
            f"{shape} on {device}, where the rows are"
        )
    return given
