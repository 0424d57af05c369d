"""Keeps which rows here the lookups of all trainers have asked for, until the updates of the same batches use them:
such an update neither sends its ids nor sorts them again."""

import threading
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

    An update finds its round on all trainers or on none, although each has a thread for lookups and one for updates: it
    waits until the lookup is kept, which may take longer at a trainer that only answers the others, and then only
    the updates before it decide."""

    def __init__(self) -> None:
        self.are_used = True
        """Whether the last update found what its lookup had asked for."""
        self._by_number: dict[int, AskedRows] = {}
        self._last_kept, self._last_updated = -1, 0
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def keep(self, number: int, asked: AskedRows | None) -> None:
        """Keep what the round with this number, larger than all before, has asked for. None: no update may use it."""
        with self._changed:
            if asked is not None:
                self._by_number[number] = asked
            self._last_kept = number
            self._changed.notify_all()

    def of(self, numbers: Sequence[int], ranks: tuple[int, ...]) -> AskedRows | None:
        """Return what the lookups of an update's batches have asked for; None unless they were one round, in which
        exactly these trainers had a batch. numbers: of the rounds, each once; -1: a trainer's ids were not looked up
        together."""
        number = numbers[0] if len(numbers) == 1 else -1
        with self._changed:
            self._changed.wait_for(lambda: self._last_kept >= number or self._error is not None)
            if self._last_kept < number:
                assert self._error is not None
                raise self._error
            asked = self._by_number.get(number)
            self.are_used = asked is not None and asked.ranks == ranks and asked.step > self._last_updated
            return asked if self.are_used else None

    def forget(self, step: int) -> None:
        """Forget the rounds of steps up to this one, the last that is updated."""
        with self._changed:
            self._last_updated = step
            self._by_number = {number: asked for number, asked in self._by_number.items() if asked.step > step}

    def fail(self, error: Exception) -> None:
        """Let updates that wait for a lookup raise its error: it has failed, so it is never kept."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
