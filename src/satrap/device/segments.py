"""Where the ids of several trainers are in the arrays of one exchange. Pure: numbers in, numbers out.

What a trainer receives comes trainer by trainer, and within a trainer table by table. The core takes it joined: table
by table, and within a table in the order of the ranks. Rows and gradients travel in groups of tables that have the same
dtype and dim; a line of a group is a row, counted over what one exchange carries of the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from satrap.config.tables import Table


@dataclass(frozen=True, slots=True, eq=False)
class TableGroups:
    """The tables of a job, grouped by the dtype and dim of their rows."""

    numbers: NDArray[np.uint32]
    """The group of each table."""
    tables: tuple[tuple[int, ...], ...]
    """The tables of each group."""
    layouts: tuple[tuple[str, int], ...]
    """The dtype and dim of each group."""

    @classmethod
    def of(cls, tables: Sequence[Table]) -> "TableGroups":
        """Group the tables of a job."""
        found: dict[tuple[str, int], list[int]] = {}
        for number, table in enumerate(tables):
            found.setdefault((table.dtype, table.dim), []).append(number)
        numbers = np.empty(len(tables), np.uint32)
        for group, members in enumerate(found.values()):
            numbers[members] = group
        return cls(numbers, tuple(map(tuple, found.values())), tuple(found))

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
    """The line of each id in the group of its table."""

    @classmethod
    def join(cls, received: NDArray[np.uint64], counts: NDArray[np.int64], groups: TableGroups) -> "JoinedIds":
        """Join ids in the order of an exchange. counts: ids of each trainer and table, [trainers, tables]."""
        begin = _starts(counts.ravel()).reshape(counts.shape)
        first_line = np.empty_like(counts)
        for tables in groups.tables:
            of_group = counts[:, list(tables)]
            first_line[:, list(tables)] = _starts(of_group.ravel()).reshape(of_group.shape)
        lengths = counts.T.ravel()
        within = np.arange(len(received)) - np.repeat(_starts(lengths), lengths)
        offsets = np.concatenate([[0], counts.sum(0).cumsum()]).astype(np.int64)
        ids = received[np.repeat(begin.T.ravel(), lengths) + within]
        return cls(ids, offsets, np.repeat(first_line.T.ravel(), lengths) + within)

    def tables(self) -> NDArray[np.intp]:
        """Return the table of each id."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each of several parts begins, one after another."""
    found: NDArray[np.int64] = np.cumsum(lengths) - lengths
    return found
