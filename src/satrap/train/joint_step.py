"""Decides how much a trainer's batch counts in a step that several trainers take together.

A step's loss is the mean over the samples of all trainers. Each trainer's loss is the mean over its own batch, and the
trainers' gradients are averaged; so where the batches differ in size, as at the end of the data, each trainer's
gradients are first multiplied by its `weight`. A trainer whose data has ended before another's goes on with padding:
batches without rows or samples, of weight 0, which the dense network computes so that no trainer waits for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.data.inputs import Inputs

PADDING_ROWS = 2
"""Lines of zeros that the dense network is given for a batch of padding: enough for a BatchNorm."""
_NO_LABEL, _FLAT_LABEL = -1, 0


@dataclass(frozen=True, slots=True)
class JointStep:
    """The batches of all trainers that make one step."""

    num_samples: int
    """In all of them."""
    weight: float
    """What this trainer's gradients are multiplied by."""
    _dense_columns: int
    _label_columns: int

    @classmethod
    def of(cls, batches: Sequence[Sequence[int]], rank: int) -> "JointStep":
        """The step in which each trainer has a batch as `described`."""
        total = sum(each[0] for each in batches)
        weight = len(batches) * batches[rank][0] / total if total else 0.0
        largest = max(batches, key=lambda each: each[0])  # one that has samples, if any trainer has
        return cls(total, weight, largest[1], largest[2])

    def padding(self) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Dense numbers and labels for a batch of padding, as the other trainers' batches have them."""
        dense = np.zeros((PADDING_ROWS, self._dense_columns), np.float32)
        if self._label_columns == _NO_LABEL:
            return dense, None
        columns = () if self._label_columns == _FLAT_LABEL else (self._label_columns,)
        return dense, np.zeros((PADDING_ROWS, *columns), np.float32)


def described(inputs: Inputs | None) -> tuple[int, int, int]:
    """What the other trainers must know of a batch: its samples, and the columns of its dense numbers and labels."""
    if inputs is None or isinstance(inputs, Padding):
        return 0, 0, _NO_LABEL
    label = _NO_LABEL
    if inputs.label is not None:
        label = _FLAT_LABEL if inputs.label.ndim == 1 else inputs.label.shape[1]
    return inputs.batch_size, 0 if inputs.dense is None else inputs.dense.shape[1], label


class Padding(Inputs):
    """A batch without samples, of a trainer whose data has ended before another's."""


class Padded(Iterator[Inputs]):
    """A trainer's batches, and behind them padding until it is stopped."""

    def __init__(self, batches: Iterator[Inputs], features: tuple[str, ...]) -> None:
        self._batches = batches
        self._padding = Padding(names=features, values=np.empty(0, np.uint64), batch_size=0)
        self._read = self._handed_over = 0  # batches with samples
        self._has_ended = False
        self.is_stopped = False
        """No trainer has another batch."""

    def __next__(self) -> Inputs:
        if self.is_stopped:
            raise StopIteration
        inputs = next(self._batches, None)
        if inputs is None:
            self._has_ended = True
            return self._padding
        self._read += 1
        return inputs

    def hand_over(self, inputs: Inputs) -> None:
        """The training loop is given this batch."""
        self._handed_over += not isinstance(inputs, Padding)

    @property
    def num_left(self) -> int | None:
        """How many batches with samples are read and not handed over; None: more are still to be read."""
        return self._read - self._handed_over if self._has_ended else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # some have it

    def stop(self) -> None:
        """No trainer has another batch."""
        self.is_stopped = True
