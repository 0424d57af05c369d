"""The values and optimizer states of rows at home: this process's memory, pinned if the device is a GPU, which then
reads and writes it itself. Only the kernel `exchange` and its callers touch it, in the order of the device's queue."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from satrap.device.device_stream import to_device
from satrap.errors import CapacityError
from satrap.monitor.memory import memory

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The layout of a row on a device, and at home."""

    dtype: str
    dim: int
    state_dim: int
    first: int = 0
    """The element of a whole row that comes first: random draws are those of whole rows."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of values."""
        return DTYPES[self.dtype]

    @property
    def value_bytes(self) -> int:
        """Size of a row's values."""
        return self.dim * self.torch_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Size of a row's state."""
        return self.state_dim * 4

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return self.value_bytes + self.state_bytes


SEGMENT_BYTES = 1 << 26  # a power of two: what torch allocates as pinned memory is one
_ALIGNMENT = 16

IN, OUT = 1, 2
"""Directions of a row: from home into a frame, and back. Their sum exchanges two rows."""


@dataclass(slots=True, eq=False)
class HomeMemory:
    """The rows of some tables at home, by slot. It grows by segments, so no row is copied and no address changes."""

    layout: RowLayout
    device: torch.device
    segments: list[Tensor] = field(default_factory=list)
    """uint8: the values of `rows` rows, then from `state_at` on their states."""
    rows: int = field(init=False)
    """The number of rows in a segment."""
    addresses: Tensor = field(init=False)
    """int64 on the device: where each segment begins."""
    spare: list[Tensor] = field(default_factory=list)
    """Segments to grow by. They are allocated without the lock of the rows: pinning one takes the driver long."""
    _used: int = 0
    _earlier: list[Tensor] = field(default_factory=list)  # kernels that use them may still be in the queue

    def __post_init__(self) -> None:
        self.rows = max(1, (SEGMENT_BYTES - _ALIGNMENT) // self.layout.row_bytes)
        self.addresses = torch.empty(0, dtype=torch.int64, device=self.device)

    @property
    def state_at(self) -> int:
        """Where the states of a segment begin."""
        return -(-self.rows * self.layout.value_bytes // _ALIGNMENT) * _ALIGNMENT

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.segments) * self.rows

    def grow(self, slots: int) -> int:
        """Make room for so many slots with the segments in reserve; return how many more segments that takes. If some
        are missing, nothing changes."""
        num_missing = -(-slots // self.rows) - len(self.segments) - len(self.spare)
        if num_missing > 0:
            return num_missing
        self._used = slots
        if slots > len(self):
            while slots > len(self):
                self.segments.append(self.spare.pop())
            self._earlier.append(self.addresses)
            self.addresses = to_device(np.array([segment.data_ptr() for segment in self.segments]), self.device)
        return 0

    def allocate(
        self,
        num_segments: int,
        names: Sequence[str],
        advice: str = "Give the tables a capacity, or use a smaller dtype or dim",
    ) -> None:
        """Put so many segments in reserve; raise CapacityError if this process has no memory, before the machine ends
        it. names: of the tables. advice: the end of the error."""
        size, (used, allowed) = self._segment_bytes, memory()["machine"]
        if num_segments * size > allowed - used:
            raise self._no_memory(num_segments, names, f", of {max(0, allowed - used):,} free ones. {advice}")
        for number in range(num_segments):
            try:
                self.spare.append(self._allocate(size))
            except RuntimeError as error:  # also of pinned memory
                raise self._no_memory(num_segments - number, names, f". {advice}") from error

    def _no_memory(self, num_segments: int, names: Sequence[str], end: str) -> CapacityError:
        pinned = "pinned " if self.device.type == "cuda" else ""
        held, size = len(self.segments) + len(self.spare), self._segment_bytes
        return CapacityError(
            f"tables {', '.join(map(repr, names))}: this process has no {pinned}memory for "
            f"{(held + num_segments) * self.rows} rows at home: expected {num_segments * size:,} bytes beside the "
            f"{held * size:,} that it holds{end}"
        )

    def reserve(self, slots: int, names: Sequence[str]) -> None:
        """Make room for so many slots, with as many more segments as that takes. names: as in `allocate`."""
        self.allocate(self.grow(slots), names)
        self.grow(slots)

    def keep_reserve(self) -> None:
        """Put a segment in reserve if the last one is half full. Without memory for it, do nothing: the call that needs
        it tries again, and raises the error."""
        if not self.spare and self._used * 2 > len(self) * 2 - self.rows > 0:
            with suppress(RuntimeError):
                self.spare.append(self._allocate(self._segment_bytes))

    @property
    def _segment_bytes(self) -> int:
        return max(SEGMENT_BYTES, self.state_at + self.rows * self.layout.state_bytes)

    @torch.inference_mode(False)  # a tensor of inference could never be updated
    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")

    def parts(self, slots: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield for each segment with some of the slots: which of them, their lines in it, its values and states."""
        numbers = slots // self.rows
        for number in torch.unique(numbers).tolist():
            here = (numbers == number).nonzero()[:, 0]
            segment = self.segments[number]
            values = segment[: self.rows * self.layout.value_bytes].view(self.layout.torch_dtype)
            states = segment[self.state_at : self.state_at + self.rows * self.layout.state_bytes].view(torch.float32)
            yield (
                here,
                slots[here] % self.rows,
                values.view(self.rows, self.layout.dim),
                states.view(self.rows, self.layout.state_dim),
            )
