"""How many rows fit a device and a machine together: the size of the largest model. Pure but for `memory_found`."""

from dataclasses import dataclass

import torch

from benchmarks.harness.clock import available_bytes
from benchmarks.workload import NUM_FEATURES
from satrap.cgroups import memory_groups

DIRECTORY_BYTES = 40
"""On the CPU, of each row: some 31 (docs/gpu.md), and growth."""
FRAME_BYTES = 20
"""On the CPU, of each frame of a memory that does not hold all rows."""
WORKING_BYTES = 160_000
"""On the device, of each sample of a batch: rows and gradients of 26 features of dim 128, and the dense network."""
HOST_RESERVE = 6 << 30
"""For everything on the CPU that is neither a row nor a batch."""
SHARE = 0.92
"""The share of the remaining memory that rows may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The rows of a model, and how many of them are on the device; the others are at home."""

    rows: int
    on_device: int

    def device_memory(self, row_bytes: int) -> int | None:
        """Return the bytes of the rows on the device, None if all are there."""
        return None if self.on_device >= self.rows else self.on_device * row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that rows may take."""

    device: int
    host: int


def largest(wanted: int, memory: Memory, row_bytes: int) -> Sizes:
    """Return the largest model of at most so many rows that fits: as many rows on the device as it holds, the others at
    home, and the directory of all of them on the CPU."""
    frames = max(0, min(wanted, memory.device // row_bytes))
    in_both = (memory.host - frames * FRAME_BYTES + frames * row_bytes) // (row_bytes + DIRECTORY_BYTES)
    rows = min(wanted, in_both) if in_both > frames else min(frames, memory.host // DIRECTORY_BYTES)
    rows -= rows % NUM_FEATURES
    if rows <= 0:
        raise MemoryError(f"no row of {row_bytes} bytes fits {memory}")
    return Sizes(rows=rows, on_device=min(rows, frames))


def memory_found(device: torch.device, samples: int, num_steps: int, wanted_bytes: int) -> Memory:
    """Return what this machine has for rows beside batches of so many samples. The CPU as a device has room for a
    quarter of the rows that are wanted, so that there are two tiers."""
    batch_bytes = samples * num_steps * (NUM_FEATURES * 8 * 3 + 64)
    limits = [group.limit_bytes - group.used_bytes for group in memory_groups()]
    available = min([available_bytes(), *limits]) - batch_bytes
    if device.type != "cuda":
        return Memory(device=wanted_bytes // 4, host=int(SHARE * available))
    free, _ = torch.cuda.mem_get_info(device)
    return Memory(device=int(SHARE * (free - samples * WORKING_BYTES)), host=int(SHARE * (available - HOST_RESERVE)))
