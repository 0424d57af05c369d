"""Where the ids of several trainers are in the arrays of one exchange. Pure: numbers in, numbers out.

What a trainer receives comes trainer by trainer, and within a trainer table by table. The core takes it joined: table
by table, and within a table in the order of the ranks. Rows and gradients travel in groups of tables that are divided
over the trainers in the same way and have the same dtype and dim; a line of a group is a row, counted over what one
exchange carries of the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from satrap.config.tables import Table
from satrap.device.table_shards import Kind, kind_of


@dataclass(frozen=True, slots=True, eq=False)
class TableGroups:
    """The tables of a job, grouped by how they are divided over trainers, and the dtype and dim of their rows."""

    numbers: NDArray[np.uint32]
    """The group of each table."""
    tables: tuple[tuple[int, ...], ...]
    """The tables of each group."""
    kinds: tuple[Kind, ...]
    """How the tables of each group are divided."""
    layouts: tuple[tuple[str, int], ...]
    """The dtype and dim of each group."""
    num_counts: int
    """Into how many parts a trainer's ids are counted: by table, or by group if groups are of neighbours."""

    @classmethod
    def of(cls, tables: Sequence[Table]) -> "TableGroups":
        """Group the tables of a job."""
        groups: dict[tuple[Kind, str, int], list[int]] = {}
        for number, table in enumerate(tables):
            groups.setdefault((kind_of(table), table.dtype, table.dim), []).append(number)
        return cls._of(list(groups.items()), num_counts=len(tables))

    @classmethod
    def of_neighbours(cls, tables: Sequence[Table]) -> "TableGroups":
        """Group neighbours alone, so that the rows of a group are adjacent where rows are numbered table by table."""

        def layout(number: int) -> tuple[Kind, str, int]:
            return kind_of(tables[number]), tables[number].dtype, tables[number].dim

        groups = [(key, list(numbers)) for key, numbers in groupby(range(len(tables)), layout)]
        return cls._of(groups, num_counts=len(groups))

    @classmethod
    def _of(cls, groups: list[tuple[tuple[Kind, str, int], list[int]]], num_counts: int) -> "TableGroups":
        tables = tuple(tuple(of_group) for _, of_group in groups)
        numbers = np.empty(sum(map(len, tables)), np.uint32)
        for group, of_group in enumerate(tables):
            numbers[list(of_group)] = group
        return cls(numbers, tables, tuple(key[0] for key, _ in groups), tuple(key[1:] for key, _ in groups), num_counts)

    def of_kinds(self, *kinds: Kind) -> list[int]:
        """Return the tables, in order, that are divided in one of these ways."""
        return [table for table, group in enumerate(self.numbers) if self.kinds[group] in kinds]

    def counts(self, counts: NDArray[np.int64]) -> list[list[int]]:
        """Return for each group how many of its lines each trainer has. counts: ids, [trainers, tables]."""
        return [counts[:, list(tables)].sum(1).tolist() for tables in self.tables]


@dataclass(frozen=True, slots=True, eq=False)
class JoinedIds:
    """The ids that several trainers sent, joined."""

    ids: NDArray[np.uint64]
    """Table by table, within a table in the order of the ranks."""
    offsets: NDArray[np.int64]
    """Where each table's begin, and where the last one's end."""
    lines: NDArray[np.int64]
    """The line of each id in the group of its table; -1: there is none."""

    @classmethod
    def join(
        cls,
        received: NDArray[np.uint64],
        counts: NDArray[np.int64],
        groups: TableGroups,
        lines: NDArray[np.int64] | None = None,
    ) -> "JoinedIds":
        """Join ids in the order of an exchange. counts: ids of each trainer and table, [trainers, tables]. lines: how
        many of them have a line, all or none; without it, all have."""
        begin = _starts(counts.ravel()).reshape(counts.shape)
        lines = counts if lines is None else lines
        first_line = np.empty_like(counts)
        for tables in groups.tables:
            of_group = lines[:, list(tables)]
            first_line[:, list(tables)] = _starts(of_group.ravel()).reshape(of_group.shape)
        lengths = counts.T.ravel()
        within = np.arange(len(received)) - np.repeat(_starts(lengths), lengths)
        offsets = np.concatenate([[0], counts.sum(0).cumsum()]).astype(np.int64)
        ids = received[np.repeat(begin.T.ravel(), lengths) + within]
        origin = np.repeat(first_line.T.ravel(), lengths) + within
        origin[np.repeat((lines != counts).T.ravel(), lengths)] = -1
        return cls(ids, offsets, origin)

    def of_tables(self, tables: Sequence[int]) -> NDArray[np.int64]:
        """Return the positions of the ids of some tables."""
        return np.concatenate([np.arange(*self.offsets[[table, table + 1]]) for table in tables])

    def tables(self) -> NDArray[np.intp]:
        """Return the table of each id."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def send_to_all(
    tables: Sequence[int], rank: int, ids: Sequence[NDArray[np.uint64]], counts: NDArray[np.int64]
) -> tuple[list[NDArray[np.uint64]], NDArray[np.int64]]:
    """Return what trainer `rank` sends if it sends its ids of some tables, in order, to all trainers.

    ids, counts: what it sends to each trainer, and how many of each table; the ids of these tables to itself only."""
    if not tables:
        return list(ids), counts
    own = np.append(0, counts[rank].cumsum())
    sent, total = list(ids), counts.copy()
    total[:, tables] = counts[rank, tables]
    for other in range(len(ids)):
        if other == rank:
            continue
        bounds, parts, at = np.append(0, counts[other].cumsum()), [], 0
        for table in tables:
            parts += [ids[other][at : bounds[table]], ids[rank][own[table] : own[table + 1]]]
            at = bounds[table]
        sent[other] = np.concatenate([*parts, ids[other][at:]])
    return sent, total


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of several parts begins, one after another."""
    starts: NDArray[np.int64] = np.cumsum(lengths) - lengths
    return starts
