"""Which part of a table's rows one of several trainers has on its device. Pure.

By rows or as a whole table, each row is at one trainer, the owner of its bucket. Replicated, each trainer has all rows;
by columns, each has some columns of all rows. Then the trainers' directories are alike: all of them look up and update
the ids of all, in one order. The owner of a bucket saves its rows, and answers the calls that are no part of a step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from satrap.config.tables import Table
from satrap.device.device_memory import rows_of
from satrap.device.home_memory import RowLayout
from satrap.errors import ConfigError
from satrap.sharding.bucket_map import BucketMap

Kind = Literal["rows", "replicated", "columns"]
Part = tuple[NDArray[Any], NDArray[np.float32]]
"""Values, of 16 bits as uint16, and states of rows, or of some columns of them."""
ReadPart = tuple[int, NDArray[np.bool_], NDArray[np.uint8], NDArray[np.float32]]
"""A trainer's rank, whether each of some ids has a row there, and its columns: the values as bytes, and the states."""
ReadColumns = Callable[[int, NDArray[np.uint64]], Iterable[ReadPart]]
"""Reads what the other trainers have of the rows of a table's ids."""


def kind_of(table: Table) -> Kind:
    """Return how devices divide the rows of a table. A table that is whole at one of them counts as divided by rows."""
    return "rows" if table.shard == "table" else table.shard


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table's rows that a trainer has, and the state that belongs to them."""

    begin: int
    end: int
    dim: int
    """The dim of whole rows."""
    state_dim: int
    """The number of state values in whole rows."""

    @classmethod
    def of(cls, table: Table, state_dim: int, rank: int, world_size: int) -> "Columns":
        """Return the columns of trainer `rank`. state_dim: of a whole row."""
        if kind_of(table) != "columns" or world_size == 1:
            return cls(0, table.dim, table.dim, state_dim)
        if table.dim < world_size:
            raise ConfigError(
                f"table {table.name!r} has shard='columns', dim {table.dim} and {world_size} trainers; expected at "
                "least one column for each: use shard='rows'"
            )
        begin, end = (table.dim * position // world_size for position in (rank, rank + 1))
        return cls(begin, end, table.dim, state_dim)

    @property
    def is_whole(self) -> bool:
        """Whether these are all columns."""
        return self.end - self.begin == self.dim

    def layout(self, dtype: str) -> RowLayout:
        """Return the layout of this part of a row."""
        return RowLayout(dtype, self.end - self.begin, len(self._of_state()), self.begin)

    def whole_bytes(self, dtype: str) -> int:
        """Return the size of a whole row."""
        return RowLayout(dtype, self.dim, self.state_dim).row_bytes

    def take(self, values: NDArray[Any], state: NDArray[np.float32]) -> Part:
        """Return these columns of whole rows."""
        if self.is_whole:
            return values, state
        return np.ascontiguousarray(values[:, self.begin : self.end]), state[:, self._of_state()]

    def put(self, part: Part, values: NDArray[Any], state: NDArray[np.float32]) -> None:
        """Copy these columns into whole rows."""
        values[:, self.begin : self.end], state[:, self._of_state()] = part

    def _of_state(self) -> NDArray[np.intp]:
        """Return the columns of the state: those of each value, then what a row has once."""
        if self.is_whole:
            return np.arange(self.state_dim)
        per_value = self.state_dim // self.dim  # at least 2 values, so one number more for the row changes nothing
        parts = [np.arange(k * self.dim + self.begin, k * self.dim + self.end) for k in range(per_value)]
        return np.concatenate([*parts, np.arange(per_value * self.dim, self.state_dim)])


def _read_none(table: int, ids: NDArray[np.uint64]) -> Iterable[ReadPart]:
    return ()


@dataclass(frozen=True, slots=True)
class Trainer:
    """One of the trainers that divide tables over their devices."""

    rank: int
    world_size: int
    read_others: ReadColumns = _read_none

    def columns(self, table: Table, state_dim: int, rank: int | None = None) -> Columns:
        """Return the columns of a table that a trainer has, by default this one. state_dim: of a whole row."""
        return Columns.of(table, state_dim, self.rank if rank is None else rank, self.world_size)


ALONE = Trainer(0, 1)


def owned_buckets(tables: Sequence[Table], trainer: Trainer) -> list[NDArray[np.uint64]]:
    """Return the buckets of each table that a trainer owns."""
    whole = [number for number, table in enumerate(tables) if table.shard == "table"]
    owners = BucketMap.even([table.resolved_num_buckets for table in tables], trainer.world_size, whole).owners
    return [np.flatnonzero(np.array(of_table) == trainer.rank).astype(np.uint64) for of_table in owners]


def capacities_of(tables: Sequence[Table], trainer: Trainer) -> list[int | None]:
    """Return how many rows of each table a trainer can have; None: there is no bound."""
    owned = owned_buckets(tables, trainer)
    return [_capacity_of(table, len(buckets)) for table, buckets in zip(tables, owned, strict=True)]


def _capacity_of(table: Table, owned: int) -> int | None:
    buckets = table.resolved_num_buckets
    here = owned if kind_of(table) == "rows" else buckets
    if here == 0:
        return 0
    bound = rows_of(table)
    return None if bound is None else min(bound, -(-bound // buckets) * here)
