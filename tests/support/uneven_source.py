"""A generated source with blocks and chunks of very uneven sizes, to test the properties that every source has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import hypothesis.strategies as st
import numpy as np

from satrap import _core
from satrap.config.columns import Columns
from satrap.data.block import Block, Chunk
from satrap.data.inputs import Inputs, Position
from satrap.data.source import Source


@dataclass(frozen=True)
class Numbers:
    """Consecutive ids, not decoded yet."""

    first: int
    size: int
    num_bad: int = 0
    is_ready_batch: bool = False
    """Whether the chunk contains a batch that can be passed on."""

    def count_rows(self) -> int:
        return self.size

    def slice(self, begin: int, end: int) -> "Numbers":
        return replace(self, first=self.first + begin, size=end - begin)

    def decode(self) -> Chunk:
        ids = np.arange(self.first, self.first + self.size, dtype=np.uint64)

        def samples() -> _core.Samples:
            return _core.Samples(len(ids), [(ids, None, None)], None, None)

        bad: dict[str, Any] = {"num_bad": self.num_bad, "describe_bad": lambda _: f"block {self.first}: bad"}
        if self.is_ready_batch:
            return Chunk(samples=samples, ready_batch=Inputs(names=("a",), values=ids, batch_size=len(ids)), **bad)
        return Chunk(samples=samples(), **bad)


def number_block(chunks: Sequence[Numbers], guess: int | None = None, *, rows_known: bool = False) -> Block:
    """Return a block of chunks. guess: the expected number of chunks, which may be wrong; None: it is exact."""
    return Block(
        read=lambda: iter(chunks),
        num_chunks=len(chunks) if guess is None else guess,
        is_exact=guess is None,
        num_rows=sum(each.size for each in chunks) if rows_known else None,
    )


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
            begins = [first, *(first + end for end in accumulate(sizes))]
            pairs = zip(begins[:-1], sizes, strict=True)
            chunks = [Numbers(*each, self.num_bad, self.ready_batches) for each in pairs]
            blocks.append(number_block(chunks, self.guess, rows_known=self.rows_known))
            first = begins[-1]
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
