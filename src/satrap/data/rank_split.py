"""Decides which samples of an epoch each rank trains on: pure functions of numbers, the same on every machine.

`order` puts the blocks of an epoch in one order. Every sample is assigned to exactly one rank, and the ranks' numbers
of rows differ by at most one. There are two ways to split, depending on what is known before anything is read:

    rows known    (Parquet, Arrow files, frames) each block is assigned whole to the rank that has the fewest rows so
                  far; the last blocks are cut so that the ranks' totals are even. Each rank reads only its own rows.
    rows unknown  (text, streams, iterables) every rank reads every block and decodes its share of each chunk. The rows
                  that remain after the division go to the ranks in rotation.

A change of the number of ranks. A position says how far one rank read its plan of an epoch. When a run continues with
another number of ranks, `plan_epoch` takes the positions of all ranks and finds what they left: every new rank reads
the window groups (see `batch_assembler`) that were started and takes its share of their remaining samples; everything
else is assigned again. The number of ranks may change several times in an epoch.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from satrap.data.inputs import Position


class RowRange(NamedTuple):
    """Rows of a block that one rank reads."""

    block: int
    """The block's number in the source."""
    begin: int = 0
    """The first row, where the rows of all blocks are known."""
    end: int | None = None
    """The row after the last; None: the block's end."""
    share: tuple[int, int] | None = None
    """(rank, number of ranks): the rank reads its share of each chunk's rows. None: it reads all of them."""
    rows_before: int | None = None
    """With a share: how many rows of the epoch were assigned before this range. None: as many as after the range
    before."""

    @property
    def is_whole_block(self) -> bool:
        """Whether the range has all rows of its block."""
        return self.begin == 0 and self.end is None and self.share is None


class GroupShare(NamedTuple):
    """A rank's share of the samples of a window group, without those that it has already consumed."""

    rank: int
    num_ranks: int
    num_consumed: int


class UnfinishedGroup(NamedTuple):
    """A window group that another number of ranks left unfinished."""

    row_ranges: tuple[RowRange, ...]
    shares: tuple[GroupShare, ...]
    """Shares of shares: each is taken of what the one before it left."""


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What one rank reads in one epoch, in this order. A position numbers the groups and then the row ranges."""

    groups: list[UnfinishedGroup]
    row_ranges: list[RowRange]

    def __len__(self) -> int:
        return len(self.groups) + len(self.row_ranges)


class RowAssigner:
    """Decides which rows of each chunk a rank reads, chunk after chunk of its row ranges."""

    def __init__(self, rows: int = 0, *, whole_chunks: bool = False) -> None:
        """Start an epoch in which `rows` rows are already assigned; a range's own number takes precedence.

        whole_chunks: count each chunk as one row, so that one rank gets all of it.
        """
        self.num_assigned = rows
        """How many rows have been assigned so far."""
        self._whole_chunks = whole_chunks
        self._range = RowRange(0)
        self._row = 0  # counts from the start of the range's block

    def start_range(self, row_range: RowRange) -> None:
        """Continue with the first chunk of a row range."""
        self._range, self._row = row_range, 0
        if row_range.rows_before is not None:
            self.num_assigned = row_range.rows_before

    def assign_next(self, num_rows: int) -> tuple[int, int]:
        """Return the rank's rows (begin, end) of the range's next chunk, which has `num_rows` rows."""
        first, self._row = self._row, self._row + num_rows
        row_range = self._range
        if row_range.share is None:
            end = num_rows if row_range.end is None else min(num_rows, max(0, row_range.end - first))
            return min(end, max(0, row_range.begin - first)), end
        before, num_units = self.num_assigned, 1 if self._whole_chunks else num_rows
        self.num_assigned += num_units
        begin, end = rank_share(num_units, before, *row_range.share)
        return (begin * num_rows, end * num_rows) if self._whole_chunks else (begin, end)

    @property
    def is_done(self) -> bool:
        """Whether the range needs no further chunk."""
        return self._range.end is not None and self._row >= self._range.end


def rank_share(num_rows: int, before: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return a rank's rows (begin, end) of a chunk that follows `before` rows of the epoch.

    However the rows are divided into chunks, after each chunk the ranks' totals differ by at most one row.
    """
    quotient, remainder = divmod(num_rows, num_ranks)
    first = before % num_ranks  # the ranks first, first + 1, ... get one row more
    wrapped = first + remainder - num_ranks  # and the rotation continues at rank 0

    def extra(ranks: int) -> int:
        """Return how many of the first `ranks` ranks get one row more."""
        return max(0, min(ranks, first + remainder) - first) + max(0, min(ranks, wrapped))

    return rank * quotient + extra(rank), (rank + 1) * quotient + extra(rank + 1)


def assign(row_ranges: Sequence[RowRange], rows: Sequence[int | None], num_ranks: int) -> list[list[RowRange]]:
    """Assign row ranges to the ranks. rows: the number of rows of each block of the source; None: unknown."""
    if num_ranks == 1:
        return [list(row_ranges)]
    sizes = [rows[row_range.block] for row_range in row_ranges]
    if any(size is None for size in sizes):
        return [
            [
                RowRange(row_range.block, share=(rank, num_ranks), rows_before=None if i else 0)
                for i, row_range in enumerate(row_ranges)
            ]
            for rank in range(num_ranks)
        ]
    ends = [rows[row_range.block] if row_range.end is None else row_range.end for row_range in row_ranges]
    total = sum((end or 0) - row_range.begin for row_range, end in zip(row_ranges, ends, strict=True))
    quotas = [total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks)]
    assigned: list[list[RowRange]] = [[] for _ in range(num_ranks)]
    fewest = [(0, rank) for rank in range(num_ranks)]
    for row_range, size in zip(row_ranges, ends, strict=True):
        begin, end = row_range.begin, size or 0
        while begin < end:
            num_assigned, rank = fewest[0]
            taken = min(end - begin, quotas[rank] - num_assigned)
            if taken == 0:
                heapq.heappop(fewest)  # this rank has all of its rows
                continue
            cut_at_end = None if begin + taken == rows[row_range.block] else begin + taken
            assigned[rank].append(RowRange(row_range.block, begin, cut_at_end))
            heapq.heapreplace(fewest, (num_assigned + taken, rank))
            begin += taken
    return assigned


def plan_epoch(
    order: Sequence[int],
    rows: Sequence[int | None],
    num_ranks: int,
    epoch: int = 0,
    before: Sequence[Sequence[Position]] = (),
) -> list[EpochPlan]:
    """Return the plan of each rank for an epoch.

    order: the source's blocks, in the order of the epoch.
    before: where runs with earlier numbers of ranks stopped: the positions of all ranks of each, oldest first.
    """
    places = {block: place for place, block in enumerate(order)}
    groups: list[UnfinishedGroup] = []
    remaining = [RowRange(block) for block in order]
    for positions in before:
        left = _left_by(_plan_ranks(groups, remaining, rows, len(positions)), positions, epoch)
        groups, remaining = left[0], sorted(left[1], key=lambda row_range: (places[row_range.block], row_range.begin))
    return _plan_ranks(groups, remaining, rows, num_ranks)


def _plan_ranks(
    groups: list[UnfinishedGroup], remaining: list[RowRange], rows: Sequence[int | None], num_ranks: int
) -> list[EpochPlan]:
    assigned = assign(remaining, rows, num_ranks)
    return [
        EpochPlan(
            [UnfinishedGroup(row_ranges, (*shares, GroupShare(rank, num_ranks, 0))) for row_ranges, shares in groups],
            assigned[rank],
        )
        for rank in range(num_ranks)
    ]


def _left_by(
    plans: list[EpochPlan], positions: Sequence[Position], epoch: int
) -> tuple[list[UnfinishedGroup], list[RowRange]]:
    """Return what ranks with these plans leave at these positions: unfinished groups, and rows to assign again."""
    stops = [_StopPoint.of(plan, position, epoch) for plan, position in zip(plans, positions, strict=True)]
    shared = any(row_range.share for plan in plans for row_range in plan.row_ranges)
    # With shares, all ranks read the same blocks. The new ranks share those that any rank has started.
    furthest = max(stop.next_range for stop in stops)
    groups: list[UnfinishedGroup] = []
    remaining: list[RowRange] = []
    for plan, stop in zip(plans, stops, strict=True):
        groups += [*stop.started, *plan.groups[stop.next_group :]]
        if shared:
            groups += [
                UnfinishedGroup((row_range,), (GroupShare(0, 1, 0),))
                for row_range in plan.row_ranges[stop.next_range : furthest]
            ]
        else:
            remaining += plan.row_ranges[stop.next_range :]
    return groups, [RowRange(row_range.block) for row_range in plans[0].row_ranges[furthest:]] if shared else remaining


class _StopPoint(NamedTuple):
    """Where a rank stopped in its plan."""

    started: list[UnfinishedGroup]
    """The group that the rank had started and not finished, if there is one."""
    next_group: int
    """The first group that the rank had not started."""
    next_range: int
    """The first row range that the rank had not started."""

    @classmethod
    def of(cls, plan: EpochPlan, position: Position, epoch: int) -> "_StopPoint":
        if position.epoch < epoch:
            return cls([], 0, 0)
        first = len(plan.groups)
        if position.epoch > epoch:
            return cls([], first, len(plan.row_ranges))
        at, num_consumed, end = position.block, position.sample, position.end
        if not num_consumed:
            return cls([], min(at, first), max(0, at - first))
        if at >= first:
            row_ranges, shares = tuple(plan.row_ranges[at - first : end - first]), [GroupShare(0, 1, num_consumed)]
        else:
            row_ranges, earlier = plan.groups[at]
            shares = [*earlier[:-1], earlier[-1]._replace(num_consumed=num_consumed)]
        started = UnfinishedGroup((row_ranges[0]._replace(rows_before=position.rows), *row_ranges[1:]), tuple(shares))
        return cls([started], min(at + 1, first), max(0, end - first) if at >= first else 0)
