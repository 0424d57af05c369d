"""The interface between the kinds of sources and the code they share: blocks that can be read on their own.

A block is where reading can start: a row group, a byte range of a text file, a record batch, or a whole file that can
only be read from its start. It is read in chunks of bounded size; most blocks are one chunk. The chunks of a block are
read in order, one at a time; they are decoded to samples in any order, in many threads at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from satrap._core import Samples
from satrap.data.inputs import Inputs


@dataclass(frozen=True, slots=True)
class BadRow:
    """A malformed row."""

    where: Callable[[], str]
    """Returns the file and the line. Finding the line may require reading the file up to it."""
    why: str
    """What was found and what was expected."""

    def __str__(self) -> str:
        return f"{self.where()}: {self.why}"


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
    bad_rows: tuple[BadRow, ...] = ()
    """Malformed rows: at most one more than the user allows."""
    num_dropped: int = 0
    """Rows dropped because their label is missing."""
    begin: int = 0
    """The first of the samples that are used."""
    end: int | None = None
    """The sample after the last that is used; None: all are."""
    offset: Any = None
    """The data's own offset, from which reading continues after these samples."""

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


class Block(ABC):
    """A part of a source that can be read on its own."""

    num_chunks = 1
    """How many chunks to expect; an estimate, used only for reading ahead."""
    is_exact = False
    """Whether `num_chunks` is exact, so that reading need not look for the end."""
    num_rows: int | None = None
    """The number of rows; None: unknown before the block is read."""
    num_items: int | None = None
    """The number of samples, or of batches if each chunk is one, where it is known but they cannot be read on their
    own; None: unknown before the block is read."""

    @abstractmethod
    def read(self) -> Iterator[Any]:
        """Yield the chunks, not decoded yet. Opens the data when the first is requested."""

    @abstractmethod
    def count_rows(self, raw: Any) -> int:
        """Return the number of rows of a chunk from `read`. Decoding may leave out some of them."""

    @abstractmethod
    def slice(self, raw: Any, begin: int, end: int) -> Any:
        """Return some rows of a chunk from `read`, in the same form."""

    @abstractmethod
    def decode(self, raw: Any) -> Chunk:
        """Return the samples of a chunk from `read`."""
