"""Decides which samples of an epoch each rank trains on: pure functions of numbers, the same on every machine.

An epoch's blocks stand in one order (`order`). Every sample goes to exactly one rank, and ranks get equally many rows,
give or take one. There are two ways, by what is known before anything is read:

    rows known      (Parquet, Arrow files, frames) a block goes whole to the rank that has the fewest rows so far, and
                    the last blocks are cut so that all ranks end with as many. Each rank reads its own rows.
    rows not known  (text, streams, iterables) every rank reads each block and decodes its share of each piece. Rows
                    left over by the division go to the ranks in turn. Each rank reads everything and decodes its rows.

Another number of ranks. A position says where one rank stands in its part of an epoch. Where a run goes on with
another number of ranks, `plans` takes what the positions of all ranks leave: chains (see `batch_assembler`) that
were begun are read by every rank, which takes its share of what is left of them; everything else is dealt out anew.
This repeats if the number changes again.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from satrap.data.inputs import Position


class Part(NamedTuple):
    """Rows of a block that one rank reads."""

    block: int
    """The block's number in the source."""
    begin: int = 0
    """The first row, where the rows of all blocks are known."""
    end: int | None = None
    """The row behind the last; None: the block's end."""
    share: tuple[int, int] | None = None
    """(rank, number of ranks): the rank's share of each piece's rows. None: all of them."""
    rows: int | None = None
    """With a share: how many rows were dealt out before this part. None: as many as after the part before."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all rows of its block."""
        return self.begin == 0 and self.end is None and self.share is None


class Cut(NamedTuple):
    """A rank's share of a chain's samples, less those that it was given."""

    rank: int
    num_ranks: int
    given: int


class Chain(NamedTuple):
    """A chain that another number of ranks left unfinished."""

    parts: tuple[Part, ...]
    cuts: tuple[Cut, ...]
    """Applied one after the other."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank reads in one epoch, in this order. A position counts chains and parts through."""

    chains: list[Chain]
    parts: list[Part]

    def __len__(self) -> int:
        return len(self.chains) + len(self.parts)


class Dealer:
    """Says which rows of each piece a rank reads, piece after piece of its parts."""

    def __init__(self, rows: int = 0, *, whole: bool = False) -> None:
        """rows: how many were dealt out before the first part, if that does not say it. whole: a piece counts as one
        row, so that it goes to one rank."""
        self.rows = rows
        """How many rows were dealt out so far."""
        self._whole = whole
        self._part = Part(0)
        self._row = 0  # of the part's block

    def begin(self, part: Part) -> None:
        """Goes on to a part."""
        self._part, self._row = part, 0
        if part.rows is not None:
            self.rows = part.rows

    def wanted(self, num_rows: int) -> tuple[int, int]:
        """The rank's rows, first and end, of the part's next piece."""
        first, self._row = self._row, self._row + num_rows
        part = self._part
        if part.share is None:
            end = num_rows if part.end is None else min(num_rows, max(0, part.end - first))
            return min(end, max(0, part.begin - first)), end
        before, num_units = self.rows, 1 if self._whole else num_rows
        self.rows += num_units
        begin, end = share(num_units, before, *part.share)
        return (begin * num_rows, end * num_rows) if self._whole else (begin, end)

    @property
    def is_done(self) -> bool:
        """Whether the part wants no other piece."""
        return self._part.end is not None and self._row >= self._part.end


def share(num_rows: int, before: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """A rank's rows, first and end, of a piece that has `before` rows of the epoch before it.

    Whatever the pieces, after each of them no rank has been given more than one row more than another.
    """
    each, left = divmod(num_rows, num_ranks)
    first = before % num_ranks  # the ranks first, first + 1, ... get a row more
    behind = first + left - num_ranks  # and these go on at 0

    def extra(ranks: int) -> int:
        """How many of the first ranks get one."""
        return max(0, min(ranks, first + left) - first) + max(0, min(ranks, behind))

    return rank * each + extra(rank), (rank + 1) * each + extra(rank + 1)


def deal(parts: Sequence[Part], rows: Sequence[int | None], num_ranks: int) -> list[list[Part]]:
    """Deals parts out to the ranks. rows: the number of rows of each block of the source, None where not known."""
    if num_ranks == 1:
        return [list(parts)]
    sizes = [rows[part.block] for part in parts]
    if any(size is None for size in sizes):
        return [
            [Part(part.block, share=(rank, num_ranks), rows=None if i else 0) for i, part in enumerate(parts)]
            for rank in range(num_ranks)
        ]
    ends = [rows[part.block] if part.end is None else part.end for part in parts]
    total = sum((end or 0) - part.begin for part, end in zip(parts, ends, strict=True))
    quotas = [total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks)]
    found: list[list[Part]] = [[] for _ in range(num_ranks)]
    fewest = [(0, rank) for rank in range(num_ranks)]
    for part, size in zip(parts, ends, strict=True):
        begin, end = part.begin, size or 0
        while begin < end:
            given, rank = fewest[0]
            taken = min(end - begin, quotas[rank] - given)
            if taken == 0:
                heapq.heappop(fewest)  # this rank has all of its rows
                continue
            cut_at_end = None if begin + taken == rows[part.block] else begin + taken
            found[rank].append(Part(part.block, begin, cut_at_end))
            heapq.heapreplace(fewest, (given + taken, rank))
            begin += taken
    return found


def plans(
    order: Sequence[int],
    rows: Sequence[int | None],
    num_ranks: int,
    epoch: int = 0,
    before: Sequence[Sequence[Position]] = (),
) -> list[Plan]:
    """What each rank reads in an epoch.

    order: the source's blocks, in the order of the epoch.
    before: where earlier numbers of ranks stopped, each with the positions of all its ranks, oldest first.
    """
    places = {block: place for place, block in enumerate(order)}
    chains: list[Chain] = []
    rest = [Part(block) for block in order]
    for positions in before:
        left = _left(_dealt(chains, rest, rows, len(positions)), positions, epoch)
        chains, rest = left[0], sorted(left[1], key=lambda part: (places[part.block], part.begin))
    return _dealt(chains, rest, rows, num_ranks)


def _dealt(chains: list[Chain], rest: list[Part], rows: Sequence[int | None], num_ranks: int) -> list[Plan]:
    dealt = deal(rest, rows, num_ranks)
    return [
        Plan([Chain(parts, (*cuts, Cut(rank, num_ranks, 0))) for parts, cuts in chains], dealt[rank])
        for rank in range(num_ranks)
    ]


def _left(made: list[Plan], positions: Sequence[Position], epoch: int) -> tuple[list[Chain], list[Part]]:
    """What ranks with these plans leave at these positions: chains to be finished, and parts to be dealt out."""
    stops = [_Stop.of(plan, position, epoch) for plan, position in zip(made, positions, strict=True)]
    shared = any(part.share for plan in made for part in plan.parts)
    # Every rank goes through the same blocks then. Those that any rank has begun are finished by their shares.
    furthest = max(stop.part for stop in stops)
    chains: list[Chain] = []
    rest: list[Part] = []
    for plan, stop in zip(made, stops, strict=True):
        chains += [*stop.begun, *plan.chains[stop.chain :]]
        if shared:
            chains += [Chain((part,), (Cut(0, 1, 0),)) for part in plan.parts[stop.part : furthest]]
        else:
            rest += plan.parts[stop.part :]
    return chains, [Part(part.block) for part in made[0].parts[furthest:]] if shared else rest


class _Stop(NamedTuple):
    """Where a rank stopped in its plan."""

    begun: list[Chain]
    """What it had begun: one chain or none."""
    chain: int
    """The first chain that it had not begun."""
    part: int
    """The first part that it had not begun."""

    @classmethod
    def of(cls, plan: Plan, position: Position, epoch: int) -> "_Stop":
        if position.epoch < epoch:
            return cls([], 0, 0)
        first = len(plan.chains)
        if position.epoch > epoch:
            return cls([], first, len(plan.parts))
        at, given, end = position.block, position.sample, position.end
        if not given:
            return cls([], min(at, first), max(0, at - first))
        if at >= first:
            parts, cuts = tuple(plan.parts[at - first : end - first]), [Cut(0, 1, given)]
        else:
            parts, earlier = plan.chains[at]
            cuts = [*earlier[:-1], earlier[-1]._replace(given=given)]
        begun = Chain((parts[0]._replace(rows=position.rows), *parts[1:]), tuple(cuts))
        return cls([begun], min(at + 1, first), max(0, end - first) if at >= first else 0)
