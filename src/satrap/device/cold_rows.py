"""The rows at home that one lookup or update of tables with `num_rows` uses: copies of them on the device.

Which rows are at home never changes, so nothing is moved: a kernel reads these rows in the memory at home, and writes
them there after an update. How many they are only the device knows, so there is room for as many as there can be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from satrap.device.direct_ids import RowNumbers, RowRuns
from satrap.device.home_memory import IN, OUT
from satrap.device.row_memory import RowMemory
from satrap.device.torch_device import kernels_of


@dataclass(frozen=True, slots=True, eq=False)
class ColdRows:
    """The rows at home of one memory among some runs."""

    memory: RowMemory
    lines: Tensor
    """int32 [runs]: the line of each run's row among the copies; -1: the row is in a frame, or of another memory."""
    slots: Tensor
    """int32 [runs]: the slot of each run's row at home; 0 for a run without a line."""

    @classmethod
    def of(cls, memory: RowMemory, places: Tensor, are_among: Tensor) -> "ColdRows":
        """Choose the runs whose rows are at home. places: the place of each run's row, int32. are_among: whether the
        row is of this memory; if it is, a negative place is a slot at home."""
        is_cold = are_among & (places < 0)
        lines = torch.where(is_cold, is_cold.cumsum(0) - 1, -1)
        return cls(memory, lines.int(), torch.where(is_cold, places & 0x7FFFFFFF, 0))

    @classmethod
    def of_all(cls, memories: Sequence[RowMemory], rows: Tensor, numbers: RowNumbers) -> "dict[int, ColdRows]":
        """Return the rows at home for each memory that has some, by the number of the memory. rows: the number of each
        run's row."""
        if not numbers.has_home:
            return {}
        tables = numbers.tables_of(rows)
        places, pools = numbers.places_of(tables, rows), torch.where(rows < numbers.total, numbers.pools[tables], -1)
        return {
            pool: cls.of(memory, places, pools == pool)
            for pool, memory in enumerate(memories)
            if memory.home is not None
        }

    def read(self, *, with_state: bool) -> RowMemory:
        """Return copies of the rows on the device. with_state: whether to copy the optimizer states too; if not, the
        states of the copies have no meaning."""
        assert self.memory.home is not None
        copies = self.memory.staging(min(len(self.lines), len(self.memory.home)))
        self._exchange(copies.values, copies.state if with_state else copies.state[:, :0], IN)
        return copies

    def write(self, copies: RowMemory) -> None:
        """Write the copies that `read` returned to the slots at home."""
        self._exchange(copies.values, copies.state, OUT)

    def _exchange(self, values: Tensor, state: Tensor, direction: int) -> None:
        directions = torch.where(self.lines >= 0, direction, 0).int()
        kernels: Any = kernels_of(self.memory.device)
        kernels.exchange(values, state, self.memory.home, self.lines.clamp(min=0), self.slots, directions)


def places_read(places: Tensor, runs: RowRuns, cold: Sequence[ColdRows]) -> Tensor:
    """Return the places of ids in the form that kernels of a lookup take. A row at home has -2 - n, where n is its line
    among the copies."""
    lines = torch.stack([rows.lines for rows in cold]).amax(0)  # a run is of one memory
    return torch.where(places < -1, -2 - lines[runs.of_entries()], places)
