"""The interface between the kinds of sources and the code they share: blocks that can be read on their own.

A block is where reading can start: a row group, a byte range of a text file, a record batch, or a whole file that can
only be read from its start. It is read in chunks of bounded size; most blocks are one chunk. The chunks of a block are
read in order, one at a time; they are decoded to samples in any order, in many threads at once.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from satrap._core import Samples
from satrap.data.inputs import Inputs


class RawChunk(Protocol):
    """Rows of a block that were read and are not decoded yet."""

    def count_rows(self) -> int:
        """Return the number of rows. Decoding may leave out some of them."""

    def slice(self, begin: int, end: int) -> Self:
        """Return the rows from `begin` to before `end`."""

    def decode(self) -> "Chunk":
        """Return the samples of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Decoded samples of a block, without malformed and dropped rows."""

    samples: Samples | Callable[[], Samples]
    """With a `ready_batch`, a function that converts it to samples if they are to be cut or permuted."""
    ready_batch: Inputs | None = None
    """All samples, as a batch of the data. It can be passed on unchanged, without a copy."""
    is_label_flat: bool = False
    """Whether the data has a label without a declared column whose shape is [n] and not [n, 1]."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Arrow arrays with one value for each sample."""
    num_bad: int = 0
    """The number of malformed rows: at most one more than the user allows."""
    describe_bad: Callable[[int], str] = str
    """Returns the file, the line and the fault of a malformed row, by its number among them. Finding the line may
    require reading the file up to it."""
    num_dropped: int = 0
    """Rows dropped because their label is missing."""
    begin: int = 0
    """The first of the samples that are used."""
    end: int | None = None
    """The sample after the last that is used; None: all are."""
    offset: Any = None
    """The data's own offset, from which reading continues after these samples."""
    rows: Callable[[], NDArray[np.integer[Any]]] | None = None
    """Returns the number of each sample among the rows that were decoded, from 0; None: no row was left out. Where the
    block `is_numbered`, what identifies each sample in the whole block."""

    @property
    def stop(self) -> int:
        """The sample after the last that is used."""
        if self.end is not None:
            return self.end
        return len(self.decoded()) if self.ready_batch is None else self.ready_batch.batch_size

    def __len__(self) -> int:
        return self.stop - self.begin

    def decoded(self) -> Samples:
        """Return the samples, converted from the ready batch if necessary."""
        return self.samples() if callable(self.samples) else self.samples

    # -- a chunk that is decoded as it is read is its own RawChunk -----------------------------------------------------

    def count_rows(self) -> int:
        return len(self)

    def slice(self, begin: int, end: int) -> Self:
        return replace(self, samples=self.decoded(), ready_batch=None, begin=begin, end=end)

    def decode(self) -> "Chunk":
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a source that can be read on its own."""

    read: Callable[[], Iterator[RawChunk]]
    """Yields the chunks. Opens the data when the first is requested."""
    num_chunks: int = 1
    """How many chunks to expect; an estimate, used only for reading ahead."""
    is_exact: bool = False
    """Whether `num_chunks` is exact, so that reading need not look for the end."""
    num_rows: int | None = None
    """The number of rows; None: unknown before the block is read."""
    is_numbered: bool = False
    """Whether chunks say what identifies their samples, since settings decide where a chunk ends."""
    num_items: int | None = None
    """The number of samples, or of batches if each chunk is one, where it is known but they cannot be read on their
    own; None: unknown before the block is read."""
