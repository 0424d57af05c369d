"""The numbers of the rows of all trainers, which travel between them in place of tables and ids: for tables with
`num_rows` that they divide by rows."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from satrap.config.tables import Table
from satrap.device.direct_ids import Numbers, RowNumbers, rows_by_remainder
from satrap.device.segments import TableGroups
from satrap.device.table_shards import Trainer, owned_buckets


class OwnerNumbers(Numbers):
    """Trainer after trainer, and at each in the order of its `RowNumbers`. So ids that are sorted by these numbers are
    sorted by owner, and for an owner by group, table and row."""

    def __init__(self, tables: Sequence[Table], groups: TableGroups, world_size: int, device: torch.device) -> None:
        """groups: of neighbours. A part of `bounds` is a group at an owner."""
        owners = [
            RowNumbers(tables, [], device, buckets=owned_buckets(tables, Trainer(rank, world_size)))
            for rank in range(world_size)
        ]
        self.begins = [0, *accumulate(owner.total for owner in owners)]
        """Where the rows of each trainer begin, and where the last end."""
        by_remainder = owners[0].by_remainder.copy()
        for owner, begin in zip(owners, self.begins, strict=False):
            is_here = owner.by_remainder[1] > 0
            by_remainder[:, is_here] = owner.by_remainder[:, is_here] + np.array([[begin], [0]])
        bounds = [
            begin + owner.offsets[of_group[0]]
            for owner, begin in zip(owners, self.begins, strict=False)
            for of_group in groups.tables
        ]
        self.bounds = torch.tensor([*bounds, self.begins[-1]], device=device)
        self.sizes, self._by_table = owners[0].sizes, owners[0].by_table
        self._by_remainder = torch.from_numpy(by_remainder).to(device)

    def rows_of(self, tables: int | Tensor, ids: Tensor) -> Tensor:
        return rows_by_remainder(self._by_table, self._by_remainder, tables, ids)
