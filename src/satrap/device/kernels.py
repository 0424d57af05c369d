"""Which kernels rows on a device use: Triton's on a CUDA device, the reference in torch on any other."""

from types import ModuleType

import torch

from satrap.device import reference
from satrap.errors import NotReadyError


def kernels_of(device: torch.device) -> ModuleType:
    """Return the module of the kernels: pool, copy_sequence and update."""
    if device.type != "cuda":
        return reference
    try:
        from satrap.device import triton_kernels
    except ImportError as error:
        raise NotReadyError(
            f"rows on {device} need Triton, which comes with torch's CUDA builds and cannot be imported here: {error}. "
            "Install it: pip install triton"
        ) from error
    return triton_kernels
