"""What every kind of source gives to the road of a batch: blocks that can be read on their own, piece by piece.

A block is what reading can begin at: a row group, a byte range of a text file, a record batch, a file that can only be
read from its start. It comes in pieces of bounded size, most blocks in one. Reading a piece from its block is done in
order, one piece at a time; decoding pieces to samples is done in any order, in many threads at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from satrap._core import Samples
from satrap.data.inputs import Inputs


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is refused."""

    where: Callable[[], str]
    """Says the file and the line. Finding the line may mean to read the file up to it."""
    why: str
    """What was found and what was wanted."""

    def __str__(self) -> str:
        return f"{self.where()}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Decoded samples of a block. Refused and dropped rows are not among them."""

    samples: Samples | Callable[[], Samples]
    """A function, where `whole` is given: it makes them of that, for whoever cuts or permutes them."""
    whole: Inputs | None = None
    """All of them as the batch that they came as. It can be handed on as it is, which costs no copy."""
    flat_label: bool = False
    """One label that no column declares, but the samples brought, came as [n] and not as [n, 1]."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Arrow arrays, as long as the samples."""
    bad: tuple[BadRow, ...] = ()
    """Rows that were refused: at most one more than the user allows."""
    dropped: int = 0
    """Rows without a label, where the user said to drop them."""
    begin: int = 0
    """The first of the samples that is wanted."""
    end: int | None = None
    """The sample behind the last that is wanted; None: all are."""
    offset: Any = None
    """What the data gave to go on from behind these samples."""

    @property
    def stop(self) -> int:
        """The sample behind the last that is wanted."""
        if self.end is not None:
            return self.end
        return len(self.decoded()) if self.whole is None else self.whole.batch_size

    def __len__(self) -> int:
        return self.stop - self.begin

    def decoded(self) -> Samples:
        """The samples, made now if they were not."""
        return self.samples() if callable(self.samples) else self.samples


class Block(ABC):
    """A part of a source that can be read on its own."""

    num_pieces = 1
    """How many pieces to expect; a guess, only for reading ahead."""
    exact = False
    """That is exactly how many there are, so that the end need not be looked for."""
    num_rows: int | None = None
    """How many rows it has; None: not known before it is read."""
    num_items: int | None = None
    """How many samples it has, or batches if each of its pieces is one, where that is known but they cannot be read on
    their own; None: not known before it is read."""

    @abstractmethod
    def read(self) -> Iterator[Any]:
        """The pieces, not decoded yet. Opens what it reads when the first is asked for."""

    @abstractmethod
    def num_rows_of(self, raw: Any) -> int:
        """How many rows a piece has that `read` gave. A row may turn out to be no sample when it is decoded."""

    @abstractmethod
    def cut(self, raw: Any, begin: int, end: int) -> Any:
        """Some rows of a piece that `read` gave, as such a piece."""

    @abstractmethod
    def decode(self, raw: Any) -> Piece:
        """The samples of a piece that `read` gave."""
