"""Which kernels rows on a device use: Triton's on a CUDA device, the reference in torch on any other."""

from collections.abc import Sequence
from types import ModuleType

import torch

from satrap.config.tables import Table
from satrap.device import reference
from satrap.errors import ConfigError, NotReadyError

_MOST_DIM = 4096  # of a row that one program of a GPU holds


def require_possible(tables: Sequence[Table], device: torch.device) -> None:
    """Raise ConfigError if the kernels cannot have the rows of a table on the device."""
    for table in tables:
        if device.type == "cuda" and table.dim > _MOST_DIM:
            raise ConfigError(
                f"table {table.name!r} has dim {table.dim}; expected at most {_MOST_DIM}, for rows on {device}"
            )


def kernels_of(device: torch.device) -> ModuleType:
    """Return the module of the kernels: pool, copy_sequence, update and exchange."""
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
