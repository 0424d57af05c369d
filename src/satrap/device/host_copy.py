"""Copies between this process and a device, on the current stream of the calling thread."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.device.device_stream import current_stream


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device. The calling thread does not wait: a CUDA device copies it from pinned
    memory."""
    return current_stream(device).upload(array)


def to_host(tensor: Tensor) -> Tensor:
    """Return the tensor in this process. Waits for the device."""
    return current_stream(tensor.device).fetch(tensor)
