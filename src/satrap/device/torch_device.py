"""Which torch devices can hold rows."""

import torch

from satrap.errors import ConfigError

_EXPECTED = "expected 'cuda', a GPU by its number such as 'cuda:1', or 'cpu', where the same code runs without a GPU"


def resolve_device(device: torch.device | str) -> torch.device:
    """Return the device with its number, so that equal devices compare equal; raise ConfigError if it cannot hold
    rows."""
    if not isinstance(device, torch.device | str):
        raise ConfigError(f"device is {device!r} ({type(device).__name__}); {_EXPECTED}")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device is {device!r}, which torch does not know; {_EXPECTED}") from None
    if found.type == "cpu":
        if found.index:
            raise ConfigError(f"device is {str(device)!r}, and torch has one CPU, whatever its cores; expected 'cpu'")
        return torch.device("cpu")
    if found.type != "cuda":
        raise ConfigError(f"device is {str(device)!r}, for which there are no kernels; {_EXPECTED}")
    count = torch.cuda.device_count()
    if count == 0:
        built = "torch finds none" if torch.version.cuda or torch.version.hip else "this torch was built without CUDA"
        raise ConfigError(
            f"device is {str(device)!r} and there is no GPU: {built}. `satrap doctor` shows what is installed; without "
            "a GPU leave device out, or use device='cpu' to run the same code"
        )
    number = torch.cuda.current_device() if found.index is None else found.index
    if number >= count:
        raise ConfigError(f"device is {str(device)!r} and this process sees {count} GPUs, cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", number)
