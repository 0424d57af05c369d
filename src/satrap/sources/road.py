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
from satrap.columns import Columns
from satrap.errors import SourceError
from satrap.inputs import Inputs, Position
from satrap.sources.ahead import Ahead
from satrap.sources.block import Block, Piece
from satrap.sources.decode import joined
from satrap.sources.order import Turn, permutation, share, turns


@dataclass(slots=True)
class Counts:
    """What happened to rows so far; the user reads it while batches come."""

    skipped: int = 0
    dropped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Road:
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

    def batches(self, counts: Counts) -> Generator[Inputs]:
        """The batches from the position on."""
        at = self.position
        while self.epochs is None or at.epoch < self.epochs:
            number = at.batch
            for inputs in _Epoch(self, at, counts).batches():
                number += 1
                yield inputs
            if number == 0 and self.epochs is None:
                raise SourceError(f"epoch {at.epoch} of rank {self.rank} has no batch, and epochs is None: no end")
            at = Position(at.epoch + 1, 0, 0)


_Part = tuple[Piece, int, int]
"""A rank's samples of a piece: the first and the end."""


@dataclass(frozen=True, slots=True)
class _Window:
    block: int
    """What its chain begins with, as a position counts blocks."""
    before: int
    """Samples of the chain in earlier windows."""
    parts: list[_Part]
    """Without their `extra`."""
    order: NDArray[np.int64]
    extra: dict[str, Any]
    whole: Inputs | None
    """The window is this batch."""

    def __len__(self) -> int:
        return len(self.order)


@dataclass(slots=True)
class _Segment:
    """Samples of a window that were not given yet: order[begin : end]."""

    window: _Window
    begin: int
    end: int


class _Epoch:
    """One epoch of a road, from a position in it."""

    def __init__(self, road: Road, start: Position, counts: Counts) -> None:
        self.road = road
        self.start = start
        self.counts = counts
        self.skipped = 0  # bad rows of this epoch
        self.turns = turns(
            len(road.blocks),
            shuffle=road.shuffle,
            seed=road.seed,
            epoch=start.epoch,
            rank=road.rank,
            world=road.world,
        )
        if start.block > len(self.turns):
            raise SourceError(
                f"position {start} is at block {start.block} and rank {road.rank} of {road.world} reads "
                f"{len(self.turns)} in an epoch: the source or its settings changed since the position was saved"
            )

    def batches(self) -> Iterator[Inputs]:
        with closing(self._windows()) as windows:
            yield from self._cut(windows)

    def _cut(self, windows: Iterator[_Window]) -> Iterator[Inputs]:
        size, pending, number = self.road.batch_size, deque[_Segment](), self.start.batch
        have = 0
        for window in windows:
            begin = 0
            if window.block == self.start.block:
                begin = min(max(0, self.start.sample - window.before), len(window))
            if begin == len(window):
                continue
            pending.append(_Segment(window, begin, len(window)))
            have += len(window) - begin
            while have >= (size or have) > 0:
                number += 1
                yield self._batch(pending, size or have, number)
                have -= size or have
        if have and not self.road.drop_last:
            yield self._batch(pending, have, number + 1)

    def _windows(self) -> Generator[_Window]:
        """The windows of the chains from the start on."""
        with closing(self._pieces()) as pieces:
            yield from self._gathered(pieces)

    def _gathered(self, pieces: Iterator[tuple[int, _Part | None]]) -> Iterator[_Window]:
        road = self.road
        parts: list[_Part] = []
        chain, before, windows = None, 0, 0  # the chain's first block, its samples and windows so far
        for index, piece in pieces:
            if chain is None:
                chain, before, windows = index, 0, 0
            if piece is not None:
                parts.append(piece)
            if len(parts) == road.num_pieces or (piece is None and windows and parts):
                yield self._window(chain, before, windows, parts)
                before += sum(end - begin for _, begin, end in parts)
                windows += 1
                parts = []
            if piece is None and windows:
                chain = None
        if chain is not None and parts:
            yield self._window(chain, before, windows, parts)

    def _pieces(self) -> Generator[tuple[int, _Part | None]]:
        """The rank's samples: (block, piece and range), and (block, None) where a block ends."""
        road = self.road
        todo = self.turns[self.start.block :]
        ahead = Ahead(
            (road.blocks[turn.block] for turn in todo),
            num_threads=road.num_threads,
            num_pieces=road.num_pieces + 2 * road.num_threads,
        )
        with ahead:
            index, number = self.start.block, 0
            for piece in ahead.pieces():
                if piece is None:
                    yield index, None
                    index, number = index + 1, 0
                    continue
                self._count(piece)
                begin, end = self._share(self.turns[index], number, len(piece))
                number += 1
                if begin < end:
                    yield index, (piece, begin, end)

    def _share(self, turn: Turn, number: int, n: int) -> tuple[int, int]:
        road = self.road
        if not turn.shared:
            return 0, n
        if road.batch_size is None:  # pieces stay whole
            return (0, n) if number % road.world == road.rank else (0, 0)
        return share(n, turn.block + number, road.rank, road.world)

    def _count(self, piece: Piece) -> None:
        self.counts.dropped += piece.dropped
        room = self.road.max_bad_rows - self.skipped
        if len(piece.bad) > room:
            allowed = self.road.max_bad_rows
            hint = f"{allowed} bad rows are allowed in an epoch and were skipped before" if allowed else "mend the row"
            raise SourceError(f"{piece.bad[room]}; {hint}, or allow more with max_bad_rows")
        self.skipped += len(piece.bad)
        self.counts.skipped += len(piece.bad)

    def _window(self, chain: int, before: int, number: int, parts: list[_Part]) -> _Window:
        n = sum(end - begin for _, begin, end in parts)
        if self.road.shuffle:
            order = permutation(n, self.road.seed, self.start.epoch, self.turns[chain].block, number)
        else:
            order = np.arange(n, dtype=np.int64)
        extra = {
            name: joined([piece.extra[name].slice(begin, end - begin) for piece, begin, end in parts])
            for name in self.road.columns.extra
        }
        whole = parts[0][0].whole
        if self.road.shuffle or len(parts) > 1 or n < len(parts[0][0]):
            whole = None
        bare = [(replace(piece, extra={}), begin, end) for piece, begin, end in parts]
        return _Window(chain, before, bare, order, extra, whole)

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
        position = Position(self.start.epoch, last.window.block, number, last.window.before + last.end)
        if last.window.whole is not None and last.begin == 0 and last.end == n == len(last.window):
            return replace(last.window.whole, position=position)
        return inputs_of(self.road.columns, [(s.window, s.window.order[s.begin : s.end]) for s in taken], position)


def inputs_of(columns: Columns, taken: list[tuple[_Window, NDArray[np.int64]]], position: Position) -> Inputs:
    """One batch of samples of some windows."""
    parts: list[_Part] = []
    orders, before = [], 0
    for window, order in taken:
        parts += window.parts
        orders.append(order + before)
        before += len(window)
    values, offsets, weights, dense, label = _core.gather(
        [(piece.decoded(), begin, end) for piece, begin, end in parts], np.concatenate(orders)
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


def _has_flat_label(columns: Columns, parts: list[_Part]) -> bool:
    """The one label comes as [n], because it is declared so or, where the samples brought it, came so."""
    if columns.label:
        return columns.one_label
    flat = {piece.flat_label for piece, _, _ in parts}
    if len(flat) > 1:
        raise SourceError("a batch takes samples of items with labels [n] and of items with labels [n, 1]; give one")
    return flat.pop()


class Batches(Iterator[Inputs]):
    """The batches of a source. Dropping it, or `close`, ends its threads."""

    def __init__(self, road: Road, length: Callable[[], int]) -> None:
        """length: how many they are; TypeError if that is not known."""
        self._length = length
        self._counts = Counts()
        self._batches = road.batches(self._counts)

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
    def skipped(self) -> int:
        """Bad rows that were left out so far, within `max_bad_rows`."""
        return self._counts.skipped

    @property
    def dropped(self) -> int:
        """Rows without a label that were left out so far, as the label column asks."""
        return self._counts.dropped
