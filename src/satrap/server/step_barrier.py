"""Combines the updates that several trainers send for one step into a single update.

Pure: parts in, the combined part out. An id's gradients are summed in rank order, not in the order of arrival, so a
step's bits do not depend on which trainer was late. A duplicate of a part replaces it, and waits with it, also while
the step is being applied: the step stays here until that has finished.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from satrap.errors import InputError


@dataclass(frozen=True, slots=True)
class TrainerPart:
    """One trainer's ids and gradients of a step."""

    ids: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    gradients: NDArray[np.float32]
    lrs: list[float]
    """The rate of each table."""


@dataclass(slots=True)
class _Step:
    barrier_size: int
    parts: dict[int, TrainerPart] = field(default_factory=dict)
    waiting: list["Future[None]"] = field(default_factory=list)
    is_whole: bool = False
    """Whether all parts have arrived, so that the step is being applied."""


class StepBarrier:
    """The steps that have not been applied yet."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}

    def arrive(
        self, step: int, trainer: int, part: TrainerPart, barrier_size: int
    ) -> tuple["Future[None]", list[TrainerPart] | None]:
        """Add a trainer's part and return the future to answer it with. The call that completes the step also gets all
        parts in rank order; the caller applies them, then calls `leave`."""
        pending = self._steps.setdefault(step, _Step(barrier_size))
        if pending.barrier_size != barrier_size or not 0 <= trainer < barrier_size:
            raise InputError(
                f"step {step}: trainer {trainer} of {barrier_size}; expected one of {pending.barrier_size}: start all "
                "trainers with the same world size and staleness"
            )
        future: Future[None] = Future()
        pending.waiting.append(future)
        if pending.is_whole:
            return future, None
        pending.parts[trainer] = part
        if len(pending.parts) < barrier_size:
            return future, None
        pending.is_whole = True
        return future, [pending.parts[rank] for rank in range(barrier_size)]

    def leave(self, step: int) -> list["Future[None]"]:
        """Remove a step that was applied or has failed, and return the futures that wait for it."""
        return self._steps.pop(step).waiting

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Fail all calls that wait for missing parts, each with an error from `error`."""
        for number, step in list(self._steps.items()):
            if not step.is_whole:
                for waiting in self.leave(number):
                    waiting.set_exception(error())


def concatenate_parts(parts: list[TrainerPart], dims: list[int]) -> TrainerPart:
    """Return the parts of all trainers as one. Its learning rates are from the first trainer that has gradients: a
    trainer that skips the step does not know them."""
    ids, gradients, counts = [], [], [0]
    starts = [np.concatenate([[0], np.cumsum(np.diff(part.offsets) * dims)]) for part in parts]
    for t in range(len(dims)):
        for part, at in zip(parts, starts, strict=True):
            ids.append(part.ids[part.offsets[t] : part.offsets[t + 1]])
            gradients.append(part.gradients[at[t] : at[t + 1]])
        counts.append(sum(map(len, ids)))
    lrs = next((part.lrs for part in parts if len(part.ids)), parts[0].lrs)
    return TrainerPart(np.concatenate(ids), np.array(counts, np.int64), np.concatenate(gradients), lrs)
