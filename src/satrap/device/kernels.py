"""Which kernels rows on a device use: Triton's on a CUDA device, the reference in torch on any other."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from satrap.config.tables import Table
from satrap.device import initial_values, reference
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
    return _imported(device)[0] if device.type == "cuda" else reference


def initialise_of(device: torch.device) -> Callable[..., None]:
    """Return the kernel that writes the values and states that rows begin with."""
    module: Any = _imported(device)[1] if device.type == "cuda" else initial_values
    return module.initialise  # type: ignore[no-any-return]


def _imported(device: torch.device) -> tuple[ModuleType, ModuleType]:
    try:
        from satrap.device import triton_initial, triton_kernels
    except ImportError as error:
        raise NotReadyError(
            f"rows on {device} need Triton, which comes with torch's CUDA builds and cannot be imported here: {error}. "
            "Install it: pip install triton"
        ) from error
    return triton_kernels, triton_initial
