"""The device of a run: what it is, what its data sheet says, and the bandwidths that a run measures on it."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

COPY_BYTES, SMALL_COPY_BYTES = 1 << 30, 1 << 24
NUM_COPIES = 10


@dataclass(frozen=True, slots=True)
class DataSheet:
    """What the maker of a device says about it. Nothing here was measured."""

    memory_bytes_per_s: float
    bus_bytes_per_s: float
    """In one direction."""
    flops: float
    """The rate of dense products in half precision, without sparsity."""
    tf32_flops: float


SHEETS = {
    "B200": DataSheet(8.0e12, 64e9, 2250e12, 1125e12),
    "H200": DataSheet(4.8e12, 64e9, 989e12, 494e12),
    "H100 80GB HBM3": DataSheet(3.35e12, 64e9, 989e12, 494e12),
    "A100-SXM4-80GB": DataSheet(2.04e12, 32e9, 312e12, 156e12),
}
"""By a part of the name that torch reports."""
CLASS = "H200"


def device() -> torch.device:
    """Return the device that this machine measures on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe_device() -> str:
    """Return the name of the device."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def sheet_of(name: str) -> DataSheet | None:
    """Return the data sheet of a device by its name, None for one that is not known here."""
    return next((sheet for part, sheet in SHEETS.items() if re.search(rf"\b{re.escape(part)}\b", name)), None)


def incomparable(name: str) -> str | None:
    """Return why the targets of a device say nothing about this one, None if they do: they are those of a GPU whose
    memory is at least as fast as that of the class."""
    sheet = sheet_of(name)
    if sheet is not None and sheet.memory_bytes_per_s >= SHEETS[CLASS].memory_bytes_per_s:
        return None
    return f"the device is {name}, and the targets are those of a GPU of the {CLASS} class"


def finish(device: torch.device) -> None:
    """Wait until the device has done what is on its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, num_warmup: int, num_steps: int) -> float:
    """Return the seconds of a call, with a queue of calls on the device."""
    for _ in range(num_warmup):
        call()
    finish(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        call()
    finish(device)
    return (time.perf_counter() - start) / num_steps


def bandwidths(device: torch.device) -> dict[str, float]:
    """Return the GB/s of a copy on the device, which reads and writes, and of a copy to it from pinned memory."""
    is_gpu = device.type == "cuda"
    size = COPY_BYTES if is_gpu else SMALL_COPY_BYTES
    one, other = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu)
    copied = seconds_of(lambda: other.copy_(one), device, 1, NUM_COPIES)
    sent = seconds_of(lambda: one.copy_(host, non_blocking=True), device, 1, NUM_COPIES)
    return {"copy_gb_per_s": round(2 * size / copied / 1e9, 3), "bus_gb_per_s": round(size / sent / 1e9, 3)}
