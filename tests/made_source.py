"""A made-up source whose blocks and pieces are as uneven as can be, for the properties that every source has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np

from satrap import _core
from satrap.config.columns import Columns
from satrap.data.block import BadRow, Block, Piece
from satrap.data.inputs import Inputs, Position
from satrap.data.source import Source


class Numbers(Block):
    """Pieces of consecutive ids. `exact` or not, and with a guess that may be wrong; whole or not."""

    def __init__(
        self,
        first: int,
        sizes: Sequence[int],
        guess: int | None,
        bad: int = 0,
        whole: bool = False,
        counted: bool = False,
    ) -> None:
        self._first, self._sizes, self._bad, self._whole = first, sizes, bad, whole
        self.num_rows = sum(sizes) if counted else None
        self.exact = guess is None
        self.num_pieces = len(sizes) if guess is None else guess

    def read(self) -> Iterator[tuple[int, int]]:
        first = self._first
        for size in self._sizes:
            yield first, size
            first += size

    def num_rows_of(self, raw: tuple[int, int]) -> int:
        return raw[1]

    def cut(self, raw: tuple[int, int], begin: int, end: int) -> tuple[int, int]:
        return raw[0] + begin, end - begin

    def decode(self, raw: tuple[int, int]) -> Piece:
        ids = np.arange(raw[0], sum(raw), dtype=np.uint64)
        bad = tuple(BadRow(lambda: f"block {self._first}", "bad") for _ in range(self._bad))

        def samples() -> _core.Samples:
            return _core.Samples(len(ids), [(ids, None, None)], None, None)

        if self._whole:
            return Piece(samples=samples, whole=Inputs(names=("a",), values=ids, batch_size=len(ids)), bad=bad)
        return Piece(samples=samples(), bad=bad)


@dataclass(frozen=True)
class Made(Source):
    """Blocks of pieces of the given sizes."""

    sizes: Sequence[Sequence[int]] = ()
    guess: int | None = None
    bad: int = 0
    whole: bool = False
    counted: bool = False
    """The number of rows of each block is known."""

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        blocks, first = [], 0
        for sizes in self.sizes:
            blocks.append(Numbers(first, sizes, self.guess, self.bad, self.whole, self.counted))
            first += sum(sizes)
        return blocks

    @property
    def total(self) -> int:
        return sum(map(sum, self.sizes))


def ids(batches: Any) -> list[int]:
    return [i for inputs in batches for i in np.asarray(inputs.values).tolist()]


@st.composite
def made(draw: st.DrawFn, /, **fixed: Any) -> Made:
    sizes = draw(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8))
    options = {
        "sizes": sizes,
        "guess": draw(st.sampled_from([None, 1, 3])) if all(sizes) else draw(st.sampled_from([1, 3])),
        "batch_size": draw(st.integers(1, 20)),
        "num_threads": draw(st.sampled_from([0, 1, 3])),
        "shuffle": draw(st.booleans()),
        "shuffle_blocks": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "epochs": draw(st.integers(1, 2)),
        "whole": draw(st.booleans()),
        "counted": draw(st.booleans()),
    }
    return Made(**options | fixed)


def at(inputs: Inputs) -> Position:
    assert inputs.position is not None
    return inputs.position
