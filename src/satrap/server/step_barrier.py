"""The updates of several trainers that make one step: each waits here until the last one came, then all are one.

Pure: parts in, the whole out. The order of the trainers' ranks, not that of arrival, is the order that the gradients of
an id are summed in, so a step's bits do not depend on who was late. A part that comes again takes the place of the
first, and waits with it, also while the step is being applied: it stays here until that is done.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from satrap.errors import InputError


@dataclass(frozen=True, slots=True)
class TrainerPart:
    """What one trainer gives to a step."""

    ids: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    gradients: NDArray[np.float32]


@dataclass(slots=True)
class _Step:
    together: int
    parts: dict[int, TrainerPart] = field(default_factory=dict)
    waiting: list["Future[None]"] = field(default_factory=list)
    is_whole: bool = False
    """All parts were there: they are being applied."""


class StepBarrier:
    """The steps that are not applied yet."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}

    def arrive(
        self, step: int, trainer: int, part: TrainerPart, together: int
    ) -> tuple["Future[None]", list[TrainerPart] | None]:
        """What the trainer waits for; the last one gets all parts by rank: it applies them, then calls `leave`."""
        known = self._steps.setdefault(step, _Step(together))
        if known.together != together or not 0 <= trainer < together:
            raise InputError(
                f"step {step}: trainer {trainer} of {together}; wanted one of {known.together}: start them alike"
            )
        own: Future[None] = Future()
        known.waiting.append(own)
        if known.is_whole:
            return own, None
        known.parts[trainer] = part
        if len(known.parts) < together:
            return own, None
        known.is_whole = True
        return own, [known.parts[rank] for rank in range(together)]

    def leave(self, step: int) -> list["Future[None]"]:
        """The step was applied, or cannot be: returns all who wait for it."""
        return self._steps.pop(step).waiting

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Ends the waiting for parts that will not come: each call fails with an error of its own."""
        for number, step in list(self._steps.items()):
            if not step.is_whole:
                for waiting in self.leave(number):
                    waiting.set_exception(error())


def joined(parts: list[TrainerPart], dims: list[int]) -> TrainerPart:
    """The parts as one: of each table the ids of one part after the other."""
    num_tables = len(dims)
    ids, gradients, counts = [], [], [0]
    starts = [np.concatenate([[0], np.cumsum(np.diff(part.offsets) * dims)]) for part in parts]
    for t in range(num_tables):
        for part, at in zip(parts, starts, strict=True):
            ids.append(part.ids[part.offsets[t] : part.offsets[t + 1]])
            gradients.append(part.gradients[at[t] : at[t + 1]])
        counts.append(sum(map(len, ids)))
    return TrainerPart(np.concatenate(ids), np.array(counts, np.int64), np.concatenate(gradients))
