"""The road from blocks to batches: windows of samples, shuffled or not, cut into batches, each with its position.

Takes decoded pieces from `ahead` in the order that `order` decides, and gives `Inputs`. Knows no file format.

Windows. A window is what is permuted together and held in memory: at most `num_pieces` pieces (1 without shuffling).
A window that begins with a block takes in block after block. If it is full before a block has ended, the rest of that
block follows in windows of its own. All windows from one that begins with a block up to the next such are a chain. A
position names the block that a chain begins with and how many of the chain's samples were given: going on there means
to read that chain from its start, and nothing before it. A batch may take its samples from several windows; one that
is just what came whole, in its order, is handed on without a copy.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.columns import Columns
from satrap.data.block import Block, Piece
from satrap.data.decode import joined
from satrap.data.inputs import Inputs, Position
from satrap.data.left_out import LeftOut
from satrap.data.rank_split import Cut, Dealer, Part, Plan, plans
from satrap.data.read_ahead import ReadAhead
from satrap.data.shuffle_order import Turn, permutation, share, turns
from satrap.errors import SourceError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAssembler:
    """One iteration over a source, settled."""

    blocks: Sequence[Block]
    columns: Columns
    batch_size: int | None
    """None: each piece is a batch, as it came."""
    shuffle: bool
    seed: int
    epochs: int | None
    drop_last: bool
    num_pieces: int
    num_threads: int
    max_bad_rows: int
    position: Position
    rank: int
    world: int

    def batches(self, left_out: LeftOut) -> Generator[Inputs]:
        """The batches from the position on."""
        at = self.position
        while self.epochs is None or at.epoch < self.epochs:
            number = at.batch
            for inputs in _Epoch(self, at, left_out).batches():
                number += 1
                yield inputs
            if number == 0 and self.epochs is None:
                if self.world > 1:  # the others may have some
                    return
                raise SourceError(f"epoch {at.epoch} has no batch, and epochs is None: no end")
            at = Position(at.epoch + 1, 0, 0, before=at.before)


@dataclass(frozen=True, slots=True)
class _Window:
    block: int
    """What its chain begins with, as a position counts blocks."""
    end: int
    """What follows its chain, likewise."""
    rows: int
    """How many rows were dealt out before its chain."""
    before: int
    """Samples of the chain in earlier windows."""
    number: int
    """How many windows of the chain come before it."""
    chain: int
    """The number of its chain, from 1 in this iteration."""
    offset: Any
    """What the data gave to go on from before its chain."""
    parts: list[Piece]
    """Without their `extra`."""
    order: NDArray[np.int64]
    extra: dict[str, Any]
    whole: Inputs | None
    """The window is this batch."""

    def __len__(self) -> int:
        return len(self.order)


@dataclass(slots=True)
class _Chain:
    """A chain whose windows are being made."""

    block: int
    """What it begins with, as a position counts blocks."""
    rows: int
    """How many rows were dealt out before it."""
    number: int
    """Its number, from 1 in this iteration."""
    offset: Any
    """What the data gave to go on from before it."""
    samples: int = 0
    """In its windows so far."""
    windows: int = 0


class _Cuts:
    """Takes a rank's share out of the windows of one chain that other ranks left."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self._cuts = cuts
        self._seen = [0] * len(cuts)  # of each share its samples in earlier windows

    def apply(self, window: _Window) -> _Window:
        """The rank's samples of the next window. Those that it was given itself are left in: see `_Epoch._cut`."""
        begin, end, before = 0, len(window), window.before
        for i, cut in enumerate(self._cuts):
            n, part = end - begin, (cut.rank + window.number) % cut.num_ranks
            begin, end = begin + n * part // cut.num_ranks, begin + n * (part + 1) // cut.num_ranks
            before, self._seen[i] = self._seen[i], self._seen[i] + end - begin
            if i + 1 < len(self._cuts):
                begin += min(max(0, cut.given - before), end - begin)
        return replace(window, before=before, order=window.order[begin:end], whole=None)


@dataclass(slots=True)
class _Segment:
    """Samples of a window that were not given yet: order[begin : end]."""

    window: _Window
    begin: int
    end: int


class _Epoch:
    """One epoch of a road, from a position in it."""

    def __init__(self, road: BatchAssembler, start: Position, left_out: LeftOut) -> None:
        self.road = road
        self.left_out = left_out
        self.skipped = 0  # bad rows of this epoch
        self.num_chains = 0  # begun in this iteration
        self.offset = start.offset  # that the last piece brought
        self.before = tuple(each for each in start.before if max(p.epoch for p in each) >= start.epoch)
        self.start = replace(start, before=self.before)
        num_blocks = len(road.blocks)
        order = permutation(num_blocks, road.seed, start.epoch) if road.shuffle else np.arange(num_blocks)
        self.turns: list[Turn] = []
        if road.world > 1 and start.is_of_older_release:
            self.turns = turns(order.tolist(), rank=road.rank, world=road.world)
            self.plan = Plan([], [Part(turn.block) for turn in self.turns])
        else:
            rows = [block.num_rows for block in road.blocks]
            self.plan = plans(order.tolist(), rows, road.world, start.epoch, self.before)[road.rank]
        if start.block > len(self.plan):
            raise SourceError(
                f"position {start} is at block {start.block} and rank {road.rank} of {road.world} reads "
                f"{len(self.plan)} in an epoch: the source or its settings changed since the position was saved"
            )

    def batches(self) -> Iterator[Inputs]:
        with closing(self._windows()) as windows:
            yield from self._cut(windows)

    def _cut(self, windows: Iterator[_Window]) -> Iterator[Inputs]:
        size, pending, number = self.road.batch_size, deque[_Segment](), self.start.batch
        have = 0
        for window in windows:
            begin = 0
            if window.chain == 1:
                begin = min(max(0, self.start.sample - window.before), len(window))
            if begin == len(window):
                continue
            pending.append(_Segment(window, begin, len(window)))
            have += len(window) - begin
            while have >= (size or have) > 0:
                number += 1
                yield self._batch(pending, size or have, number)
                have -= size or have
        if have and self.road.drop_last:
            self.left_out.short += have
        elif have:
            yield self._batch(pending, have, number + 1)

    def _windows(self) -> Generator[_Window]:
        """The windows from the start on: of chains that other ranks left, then of the rank's own parts."""
        first = len(self.plan.chains)
        dealer = Dealer(self.start.rows, whole=self.road.batch_size is None)
        for index in range(self.start.block, first):
            chain = self.plan.chains[index]
            with closing(self._pieces(self._begun(index, chain.parts), index, dealer)) as pieces:
                cuts = _Cuts(chain.cuts)
                for window in self._gathered((index, rows, piece) for _, rows, piece in pieces):
                    yield cuts.apply(window)
        at = max(self.start.block, first)
        with closing(self._pieces(self._begun(at, self.plan.parts[at - first :]), at, dealer)) as pieces:
            yield from self._gathered(pieces)

    def _begun(self, index: int, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts from an index on; where reading begins, that many rows were dealt out as the position says."""
        if index != self.start.block or not self.start.sample or not parts:
            return parts
        return [parts[0]._replace(rows=self.start.rows), *parts[1:]]

    def _gathered(self, pieces: Iterator[tuple[int, int, Piece | None]]) -> Iterator[_Window]:
        parts: list[Piece] = []
        begun: _Chain | None = None
        for index, rows, piece in pieces:
            if begun is None:
                self.num_chains += 1
                begun = _Chain(index, rows, self.num_chains, self.offset)
            if piece is not None and len(piece):
                parts.append(piece)
            is_end = piece is None or piece.offset is not None  # of a block, or of what the data goes on behind
            if piece is not None and piece.offset is not None:
                self.offset = piece.offset
            if len(parts) == self.road.num_pieces or (is_end and begun.windows and parts):
                yield self._window(begun, index + 1, parts)
                parts = []
            if is_end and begun.windows:
                begun = None
        if begun is not None and parts:
            yield self._window(begun, index + 1, parts)

    def _pieces(self, parts: Sequence[Part], first: int, dealer: Dealer) -> Generator[tuple[int, int, Piece | None]]:
        """The rank's samples in these parts: (part, rows dealt out before it, piece), with None where a part ends."""
        road = self.road
        ahead = ReadAhead(
            ((road.blocks[part.block], part) for part in parts),
            dealer,
            num_threads=road.num_threads,
            num_pieces=road.num_pieces + 2 * road.num_threads,
        )
        with ahead:
            index, number = first, 0
            for rows_before, piece in ahead.pieces():
                if piece is None:
                    yield index, rows_before, None
                    index, number = index + 1, 0
                    continue
                self._count(piece)
                yield index, rows_before, self._share(piece, index, number)
                number += 1

    def _share(self, piece: Piece, index: int, number: int) -> Piece:
        """What a rank took of a piece in an epoch that an older release began."""
        road = self.road
        if not self.turns or not self.turns[index].shared:
            return piece
        if road.batch_size is None:  # pieces stay whole
            return piece if number % road.world == road.rank else replace(piece, end=0)
        begin, end = share(len(piece), self.turns[index].block + number, road.rank, road.world)
        return replace(piece, begin=begin, end=end, whole=None, samples=piece.decoded())

    def _count(self, piece: Piece) -> None:
        self.left_out.no_label += piece.dropped
        room = self.road.max_bad_rows - self.skipped
        if len(piece.bad) > room:
            allowed = self.road.max_bad_rows
            hint = f"{allowed} bad rows are allowed in an epoch and were skipped before" if allowed else "mend the row"
            raise SourceError(f"{piece.bad[room]}; {hint}, or allow more with max_bad_rows")
        self.skipped += len(piece.bad)
        self.left_out.malformed += len(piece.bad)

    def _window(self, begun: "_Chain", end: int, parts: list[Piece]) -> _Window:
        n = sum(map(len, parts))
        if self.road.shuffle:
            at = begun.block - len(self.plan.chains)
            block = (self.plan.parts[at] if at >= 0 else self.plan.chains[begun.block].parts[0]).block
            order = permutation(n, self.road.seed, self.start.epoch, block, begun.windows)
        else:
            order = np.arange(n, dtype=np.int64)
        extra = {
            name: joined([piece.extra[name].slice(piece.begin, len(piece)) for piece in parts])
            for name in self.road.columns.extra
        }
        whole = parts[0].whole if not self.road.shuffle and len(parts) == 1 else None
        bare = [replace(piece, extra={}) for piece in parts]
        window = _Window(
            block=begun.block,
            end=end,
            rows=begun.rows,
            before=begun.samples,
            number=begun.windows,
            chain=begun.number,
            offset=begun.offset,
            parts=bare,
            order=order,
            extra=extra,
            whole=whole,
        )
        begun.samples += n
        begun.windows += 1
        return window

    def _batch(self, pending: deque[_Segment], n: int, number: int) -> Inputs:
        """The next n samples of the pending segments, which hold as many."""
        taken: list[_Segment] = []
        wanted = n
        while wanted:
            segment = pending[0]
            end = min(segment.end, segment.begin + wanted)
            taken.append(_Segment(segment.window, segment.begin, end))
            wanted -= end - segment.begin
            segment.begin = end
            if segment.begin == segment.end:
                pending.popleft()
        last = taken[-1]
        position = Position(
            self.start.epoch,
            last.window.block,
            number,
            last.window.before + last.end,
            last.window.end,
            last.window.rows,
            self.before,
            last.window.offset,
        )
        if last.window.whole is not None and last.begin == 0 and last.end == n == len(last.window):
            return replace(last.window.whole, position=position)
        return inputs_of(self.road.columns, [(s.window, s.window.order[s.begin : s.end]) for s in taken], position)


def inputs_of(columns: Columns, taken: list[tuple[_Window, NDArray[np.int64]]], position: Position) -> Inputs:
    """One batch of samples of some windows."""
    parts: list[Piece] = []
    orders, before = [], 0
    for window, order in taken:
        parts += window.parts
        orders.append(order + before)
        before += sum(map(len, window.parts))
    values, offsets, weights, dense, label = _core.gather(
        [(piece.decoded(), piece.begin, piece.stop) for piece in parts], np.concatenate(orders)
    )
    extra = {name: joined([w.extra[name].take(order) for w, order in taken]) for name in columns.extra}
    flat = label is not None and _has_flat_label(columns, parts)
    return Inputs(
        names=columns.features,
        values=values,
        offsets=offsets,
        weights=weights,
        batch_size=sum(map(len, orders)),
        dense=dense,
        label=label[:, 0] if label is not None and flat else label,
        position=position,
        extra=extra,
    )


def _has_flat_label(columns: Columns, parts: list[Piece]) -> bool:
    """The one label comes as [n], because it is declared so or, where the samples brought it, came so."""
    if columns.label:
        return columns.one_label
    flat = {piece.flat_label for piece in parts}
    if len(flat) > 1:
        raise SourceError("a batch takes samples of items with labels [n] and of items with labels [n, 1]; give one")
    return flat.pop()


class Batches(Iterator[Inputs]):
    """The batches of a source. Dropping it, or `close`, ends its threads."""

    def __init__(self, road: BatchAssembler, length: Callable[[], int]) -> None:
        """length: how many they are; TypeError if that is not known."""
        self._length = length
        self._left_out = LeftOut()
        self._batches = road.batches(self._left_out)

    def __iter__(self) -> "Batches":
        return self

    def __len__(self) -> int:
        """How many they are, from the first one on; TypeError where that is not known before they are read."""
        return self._length()

    def __next__(self) -> Inputs:
        return next(self._batches)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iteration; returns when no thread of it runs any more."""
        self._batches.close()

    @property
    def left_out(self) -> LeftOut:
        """Samples that were left out so far."""
        return replace(self._left_out)
