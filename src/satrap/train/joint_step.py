"""The weight of a trainer's batch in a step that several trainers take together.

The loss of a step is the mean over the samples of all trainers. Each trainer computes the mean over its own batch, and
DDP averages the trainers' gradients; so where batches differ in size, as at the end of the data, each trainer first
multiplies its gradients by the `weight` of its batch. A trainer whose data ends before another's continues with
padding: batches without rows or samples, of weight 0, which the dense network computes so that no trainer waits for
another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from satrap.data.inputs import Inputs

PADDING_ROWS = 2
"""Rows of zeros that a padding batch feeds the dense network: enough for a BatchNorm."""
BatchShape = tuple[int, int, int, int]
"""What the other trainers need to know of a batch: its samples, its columns of dense features and of labels, and 1 if
it is known to be the last one of its trainer that has samples."""
_NO_LABEL, _FLAT_LABEL = -1, 0


@dataclass(frozen=True, slots=True)
class JointStep:
    """One step over a batch from each trainer."""

    num_samples: int
    """Samples in all batches together."""
    weight: float
    """Factor of this trainer's gradients."""
    is_last: bool
    """Whether no trainer has a later batch with samples, if all of them know that."""
    _dense_columns: int
    _label_columns: int

    @classmethod
    def from_batches(cls, batches: Sequence[BatchShape], rank: int) -> "JointStep":
        """Build the step from each trainer's batch, given as `describe` returns it."""
        total = sum(each[0] for each in batches)
        weight = len(batches) * batches[rank][0] / total if total else 0.0
        largest = max(batches, key=lambda each: each[0])  # it has samples if any batch has
        return cls(total, weight, all(each[3] for each in batches), largest[1], largest[2])

    def padding(self) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return dense features and labels of a padding batch, with the columns of the other trainers' batches."""
        dense = np.zeros((PADDING_ROWS, self._dense_columns), np.float32)
        if self._label_columns == _NO_LABEL:
            return dense, None
        columns = () if self._label_columns == _FLAT_LABEL else (self._label_columns,)
        return dense, np.zeros((PADDING_ROWS, *columns), np.float32)


def describe(inputs: Inputs | None, *, is_last: bool = False) -> BatchShape:
    """Return the shape of a batch."""
    if inputs is None or isinstance(inputs, Padding):
        return 0, 0, _NO_LABEL, int(is_last)
    label = _NO_LABEL
    if inputs.label is not None:
        label = _FLAT_LABEL if inputs.label.ndim == 1 else inputs.label.shape[1]
    return inputs.batch_size, 0 if inputs.dense is None else inputs.dense.shape[1], label, int(is_last)


class Padding(Inputs):
    """A batch without samples, for a trainer whose data has ended before another's."""
