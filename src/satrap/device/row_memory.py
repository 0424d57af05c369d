"""The values and optimizer states of rows on a device: two tensors, with a line for each frame.

Tables whose rows have the same layout share a memory, so that one kernel serves them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.tables import Table
from satrap.device.host_copy import to_device
from satrap.errors import CapacityError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_GROWTH = 1.5
_MOST_FRAMES = 2**31 - 1  # of the core


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What the rows of a memory have in common."""

    dtype: str
    dim: int
    state_dim: int

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return self.dim * DTYPES[self.dtype].itemsize + self.state_dim * 4


def memories_of(tables: Sequence[Table], state_dims: Sequence[int], device: torch.device) -> list["RowMemory"]:
    """Return a memory for each layout, with the numbers of its tables."""
    by_layout: dict[RowLayout, RowMemory] = {}
    for number, (table, state_dim) in enumerate(zip(tables, state_dims, strict=True)):
        layout = RowLayout(table.dtype, table.dim, state_dim)
        by_layout.setdefault(layout, RowMemory(layout, device)).tables.append(number)
    return list(by_layout.values())


@dataclass(slots=True, eq=False)
class RowMemory:
    """The rows of some tables, by frame."""

    layout: RowLayout
    device: torch.device
    tables: list[int] = field(default_factory=list)
    """The numbers of the tables whose rows are here."""
    values: Tensor = field(init=False)
    """[frames, dim]"""
    state: Tensor = field(init=False)
    """float32 [frames, state_dim]"""

    def __post_init__(self) -> None:
        self.values, self.state = self._empty(0)

    def reserve(self, frames: int, names: Sequence[str]) -> None:
        """Make room for so many frames; names: of the tables, for the error."""
        if frames <= len(self.values):
            return
        grown = max(frames, min(int(len(self.values) * _GROWTH), _MOST_FRAMES))
        try:
            larger = self._empty(grown)
        except RuntimeError:  # torch.OutOfMemoryError is one, and so is what the CPU's allocator raises
            try:
                larger = self._empty(frames)
            except RuntimeError as error:
                raise CapacityError(
                    f"tables {', '.join(map(repr, names))}: {self.device} has no memory for {frames} rows, "
                    f"{frames * self.layout.row_bytes:,} bytes, beside the {len(self.values)} that it holds now, which "
                    "are copied. Give the tables a capacity, or use a smaller dtype or dim"
                ) from error
        for old, new in zip((self.values, self.state), larger, strict=True):
            new[: len(old)] = old
        self.values, self.state = larger

    @torch.inference_mode(False)  # a tensor of inference could never be updated
    def _empty(self, frames: int) -> tuple[Tensor, Tensor]:
        """Return memory for so many frames."""
        values = torch.empty((frames, self.layout.dim), dtype=DTYPES[self.layout.dtype], device=self.device)
        return values, torch.empty((frames, self.layout.state_dim), dtype=torch.float32, device=self.device)

    def write(self, frames: NDArray[np.int32], values: NDArray[Any], state: NDArray[np.float32]) -> None:
        """Replace rows. values: of 16 bits as uint16."""
        at = to_device(frames, self.device)
        self.values[at] = self._as_tensor(values).to(self.device)
        self.state[at] = to_device(np.require(state, requirements="W"), self.device)

    def read(self, frames: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Return the values and states of rows as they are stored; of 16 bits as uint16."""
        at = to_device(frames, self.device)
        values = self.values[at].cpu()
        as_stored = (
            values.numpy() if values.dtype == torch.float32 else values.view(torch.int16).numpy().view(np.uint16)
        )
        return as_stored, self.state[at].cpu().numpy()

    def read_floats(self, frames: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the values as float32, and the states."""
        values, state = self.read(frames)
        return self.as_floats(values), state

    def as_floats(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Return stored values as float32."""
        return self._as_tensor(values).float().numpy()

    def _as_tensor(self, values: NDArray[Any]) -> Tensor:
        values = np.require(values, requirements="W")  # a file's columns are views that torch warns of
        if values.dtype == np.float32:
            return torch.from_numpy(values)
        return torch.from_numpy(values.view(np.int16)).view(self.values.dtype)
