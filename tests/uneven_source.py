"""A generated source with blocks and chunks of very uneven sizes, to test the properties that every source has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np

from satrap import _core
from satrap.config.columns import Columns
from satrap.data.block import BadRow, Block, Chunk
from satrap.data.inputs import Inputs, Position
from satrap.data.source import Source


class NumberBlock(Block):
    """A block of chunks of consecutive ids.

    guess: the expected number of chunks, which may be wrong; None: it is exact.
    ready_batches: each chunk contains a batch that can be passed on.
    """

    def __init__(
        self,
        first: int,
        sizes: Sequence[int],
        guess: int | None,
        num_bad: int = 0,
        ready_batches: bool = False,
        rows_known: bool = False,
    ) -> None:
        self._first, self._sizes, self._num_bad, self._ready_batches = first, sizes, num_bad, ready_batches
        self.num_rows = sum(sizes) if rows_known else None
        self.is_exact = guess is None
        self.num_chunks = len(sizes) if guess is None else guess

    def read(self) -> Iterator[tuple[int, int]]:
        first = self._first
        for size in self._sizes:
            yield first, size
            first += size

    def count_rows(self, raw: tuple[int, int]) -> int:
        return raw[1]

    def slice(self, raw: tuple[int, int], begin: int, end: int) -> tuple[int, int]:
        return raw[0] + begin, end - begin

    def decode(self, raw: tuple[int, int]) -> Chunk:
        ids = np.arange(raw[0], sum(raw), dtype=np.uint64)
        bad_rows = tuple(BadRow(lambda: f"block {self._first}", "bad") for _ in range(self._num_bad))

        def samples() -> _core.Samples:
            return _core.Samples(len(ids), [(ids, None, None)], None, None)

        if self._ready_batches:
            return Chunk(
                samples=samples,
                ready_batch=Inputs(names=("a",), values=ids, batch_size=len(ids)),
                bad_rows=bad_rows,
            )
        return Chunk(samples=samples(), bad_rows=bad_rows)


@dataclass(frozen=True)
class UnevenSource(Source):
    """Blocks of chunks of the given sizes."""

    sizes: Sequence[Sequence[int]] = ()
    guess: int | None = None
    num_bad: int = 0
    ready_batches: bool = False
    rows_known: bool = False
    """Whether the number of rows of each block is known."""

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        blocks, first = [], 0
        for sizes in self.sizes:
            blocks.append(NumberBlock(first, sizes, self.guess, self.num_bad, self.ready_batches, self.rows_known))
            first += sum(sizes)
        return blocks

    @property
    def total(self) -> int:
        return sum(map(sum, self.sizes))


def ids(batches: Any) -> list[int]:
    return [i for inputs in batches for i in np.asarray(inputs.values).tolist()]


@st.composite
def uneven_sources(draw: st.DrawFn, /, **fixed: Any) -> UnevenSource:
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
        "ready_batches": draw(st.booleans()),
        "rows_known": draw(st.booleans()),
    }
    return UnevenSource(**options | fixed)


def at(inputs: Inputs) -> Position:
    assert inputs.position is not None
    return inputs.position
