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
from satrap.errors import CapacityError

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What the rows of a memory have in common."""

    dtype: str
    dim: int
    state_dim: int

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return self.dim * _DTYPES[self.dtype].itemsize + self.state_dim * 4


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
        self.values = torch.empty((0, self.layout.dim), dtype=_DTYPES[self.layout.dtype], device=self.device)
        self.state = torch.empty((0, self.layout.state_dim), device=self.device)

    def reserve(self, frames: int, names: Sequence[str]) -> None:
        """Make room for so many frames; names: of the tables, for the error."""
        if frames <= len(self.values):
            return
        wanted = max(frames, int(len(self.values) * _GROWTH))
        try:
            values, state = (
                torch.empty((wanted, each.shape[1]), dtype=each.dtype, device=self.device)
                for each in (self.values, self.state)
            )
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and so is what the CPU's allocator raises
            raise CapacityError(
                f"tables {', '.join(map(repr, names))}: {self.device} has no memory for {wanted} rows, "
                f"{wanted * self.layout.row_bytes:,} bytes; it holds {len(self.values)} of them now. Give the tables a "
                "capacity, or use a smaller dtype or dim"
            ) from error
        values[: len(self.values)], state[: len(self.state)] = self.values, self.state
        self.values, self.state = values, state

    def write(self, frames: NDArray[np.int32], values: NDArray[Any], state: NDArray[np.float32]) -> None:
        """Replace rows. values: of 16 bits as uint16."""
        at = torch.from_numpy(frames).to(self.device)
        self.values[at] = self._as_tensor(values).to(self.device)
        self.state[at] = torch.from_numpy(np.require(state, requirements="W")).to(self.device)

    def read(self, frames: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Return the values and states of rows as they are stored; of 16 bits as uint16."""
        at = torch.from_numpy(frames).to(self.device)
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
