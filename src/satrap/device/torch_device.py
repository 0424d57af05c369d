"""Which torch devices can hold rows, and with which kernels: Triton's on a CUDA device, the reference in torch on any
other."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from satrap.config.tables import Table
from satrap.device import initial_values, reference
from satrap.errors import ConfigError, NotReadyError

_EXPECTED = "expected 'cuda', a GPU by its number such as 'cuda:1', or 'cpu', where the same code runs without a GPU"


def resolve_device(device: torch.device | str) -> torch.device:
    """Return the device with its number, so that equal devices compare equal; raise ConfigError if it cannot hold
    rows."""
    resolved = torch_device(device)
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {str(device)!r}, for which there are no kernels; {_EXPECTED}")
    return resolved


def torch_device(device: torch.device | str) -> torch.device:
    """Return the device with its number; raise ConfigError if torch does not have it."""
    if not isinstance(device, torch.device | str):
        raise ConfigError(f"device is {device!r} ({type(device).__name__}); {_EXPECTED}")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device is {device!r}, which torch does not know; {_EXPECTED}") from None
    if resolved.type == "cpu":
        if resolved.index:
            raise ConfigError(f"device is {str(device)!r}, and torch has one CPU, whatever its cores; expected 'cpu'")
        return torch.device("cpu")
    if resolved.type != "cuda":
        return resolved
    count = torch.cuda.device_count()
    if count == 0:
        built = "torch finds none" if torch.version.cuda or torch.version.hip else "this torch was built without CUDA"
        raise ConfigError(
            f"device is {str(device)!r} and there is no GPU: {built}. `satrap doctor` shows what is installed; without "
            "a GPU leave device out, or use device='cpu' to run the same code"
        )
    number = torch.cuda.current_device() if resolved.index is None else resolved.index
    if number >= count:
        raise ConfigError(f"device is {str(device)!r} and this process sees {count} GPUs, cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", number)


_MOST_DIM = 4096  # one program of a GPU holds a row


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
