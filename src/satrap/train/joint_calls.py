"""The calls of a training loop that all trainers of a step make together, what is wrong if they differ, and the weight
of a trainer's batch in such a step. Decides only; `JointBatches` exchanges the calls.

Trainers that step together use the same batches in the same order: a backward pass waits for those of the others, and
so does a save. A trainer that leaves out a batch would leave the others waiting, or average the gradients of different
steps. So trainers compare what they are about to do, and all find the same difference.

The loss of a step is the mean over the samples of all trainers. Each trainer computes the mean over its own batch, and
DDP averages the trainers' gradients; so where batches differ in size, as at the end of the data, each trainer first
multiplies its gradients by the `weight` of its batch. A trainer whose data ends before another's continues with
padding: batches without rows or samples, of weight 0, which the dense network computes so that no trainer waits for
another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from satrap.data.inputs import Inputs
from satrap.errors import StreamError

PADDING_ROWS = 2
"""Rows of zeros that a padding batch feeds the dense network: enough for a BatchNorm."""
BatchShape = tuple[int, int, int, int]
"""What the other trainers need to know of a batch: its samples, its columns of dense features and of labels, and 1 if
it is known to be the last one of its trainer that has samples."""
UNKNOWN: BatchShape = (-1, 0, 0, 0)
"""In place of the shape of a batch that was not read yet."""
NO_BATCH = -1
"""In place of the columns of dense features: the trainer has no batch, and nothing to use for padding."""
_NO_LABEL, _FLAT_LABEL = -1, 0


class Call(IntEnum):
    """What a trainer is about to do. The calls for one batch have ascending numbers."""

    REQUEST = 0
    """Requests a batch while earlier ones are not stepped."""
    NEXT = 1
    """Takes a batch, whose shape it tells the others."""
    USE = 2
    BACKWARD = 3
    STEP = 4
    """Steps a batch, or drops it after its backward pass."""
    SAVE = 5
    EVALUATE = 6
    RESUME = 7
    LEAVE = 8


_PATIENT = (Call.SAVE, Call.EVALUATE, Call.RESUME, Call.LEAVE)
_CLAUSES = {
    Call.REQUEST: "requests its next batch",
    Call.NEXT: "requests its next batch",
    Call.USE: "uses the batch of step {step}",
    Call.BACKWARD: "makes a backward pass for step {step}",
    Call.STEP: "calls optimizer.step() or zero_grad() for step {step}",
    Call.SAVE: "saves a checkpoint",
    Call.EVALUATE: "evaluates",
    Call.RESUME: "resumes a checkpoint",
    Call.LEAVE: "ends its stream",
}


@dataclass(slots=True)
class BatchCalls:
    """Which calls a trainer has made for a batch."""

    number: int = 0
    step: int = 0
    last: Call = Call.NEXT


@dataclass(frozen=True, slots=True)
class JointCall:
    """A call of one trainer."""

    call: Call
    number: int
    """The number of the batch, from 1 in each stream; without a batch, how many the loop has received."""
    step: int
    """The step of the batch; without a batch, the step of the last batch that the loop has received."""
    shape: BatchShape = (0, 0, 0, 0)

    @classmethod
    def parse(cls, line: Sequence[int]) -> Self:
        """Return the call of which `line` returned this."""
        call, number, step, *shape = line
        return cls(Call(call), number, step, (shape[0], shape[1], shape[2], shape[3]))

    def line(self) -> list[int]:
        """Return the call as a list of integers, of a fixed length."""
        return [self.call, self.number, self.step, *self.shape]

    @property
    def is_patient(self) -> bool:
        """Whether a trainer may come to it much later than another."""
        return self.call in _PATIENT


def require_same(calls: Sequence[JointCall]) -> None:
    """Raise StreamError unless all trainers make the same call. calls: in the order of the ranks."""
    made: dict[tuple[int, Call], list[int]] = {}
    for rank, call in enumerate(calls):
        made.setdefault((call.number, call.call), []).append(rank)
    if len(made) == 1:
        return
    (_, ranks), *others = sorted(made.items())
    first = calls[ranks[0]]
    rest = ", and ".join(_clause(ranks, calls[ranks[0]]) for _, ranks in others)
    raise StreamError(
        f"step {first.step}: {_clause(ranks, first)}, but {rest}. In each of these calls trainers wait for each other: "
        "all of them must use and step the same batches, or leave out the same ones, and save, evaluate, resume and "
        "end their loops after the same step. Correct the loop, and start all trainers again, from the last checkpoint"
    )


def _clause(ranks: Sequence[int], call: JointCall) -> str:
    who = f"trainer {ranks[0]}" if len(ranks) == 1 else f"each of trainers {', '.join(map(str, ranks))}"
    return f"{who} {_CLAUSES[call.call].format(step=call.step)}"


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
        total = sum(shape[0] for shape in batches)
        weight = len(batches) * batches[rank][0] / total if total else 0.0
        largest = max(batches, key=lambda shape: shape[0])  # it has samples if any batch has
        return cls(total, weight, all(shape[3] for shape in batches), largest[1], largest[2])

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
        return 0, NO_BATCH if isinstance(inputs, NoBatch) else 0, _NO_LABEL, int(is_last)
    label = _NO_LABEL
    if inputs.label is not None:
        label = _FLAT_LABEL if inputs.label.ndim == 1 else inputs.label.shape[1]
    return inputs.batch_size, 0 if inputs.dense is None else inputs.dense.shape[1], label, int(is_last)


class Padding(Inputs):
    """A batch without samples, for a trainer whose data has ended before another's."""


class NoBatch(Padding):
    """In place of padding that a trainer would need and does not have."""
