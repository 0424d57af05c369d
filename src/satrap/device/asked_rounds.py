"""What the lookups of several trainers asked for of the rows here, for the updates of the same batches: these need
neither ids nor an order again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class AskedRows:
    """The rows here that all trainers have asked for in one lookup."""

    rows: Any
    """`FoundIds`, or of tables with `num_rows` `FoundNumbers`."""
    step: int
    ranks: tuple[int, ...]
    """The trainers that have a batch."""


class AskedRounds:
    """What the lookups whose updates are still to come have asked for, by the number of their round.

    All trainers find the same, although the thread of each keeps rounds when it comes to them: what is found depends
    on the updates so far alone."""

    def __init__(self) -> None:
        self.are_used = True
        """Whether the last update found what its lookup had asked for."""
        self._by_number: dict[int, AskedRows] = {}
        self._updated = 0

    def keep(self, number: int, asked: AskedRows) -> None:
        """Keep what the round with this number has asked for, before any trainer gets its rows."""
        self._by_number[number] = asked

    def of(self, numbers: Sequence[int], ranks: tuple[int, ...]) -> AskedRows | None:
        """Return what the one round has asked for, if these trainers had a batch in it, and no other. numbers: of the
        rounds, each once."""
        asked = self._by_number.get(numbers[0]) if len(numbers) == 1 else None
        self.are_used = asked is not None and asked.ranks == ranks and asked.step > self._updated
        return asked if self.are_used else None

    def forget(self, step: int) -> None:
        """Forget the rounds of steps up to this one, the last that is updated."""
        self._updated = step
        for number, asked in list(self._by_number.items()):
            if asked.step <= step:
                self._by_number.pop(number, None)
