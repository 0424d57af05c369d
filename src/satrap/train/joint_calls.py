"""The calls of a training loop that all trainers of a step make together, and what is wrong if they differ. Pure.

Trainers that step together use the same batches in the same order: a backward pass waits for those of the others, and
so does a save. A trainer that leaves out a batch would leave the others waiting, or average the gradients of different
steps. So trainers compare what they are about to do, and all find the same difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from satrap.errors import StreamError
from satrap.train.joint_step import BatchShape


class Call(IntEnum):
    """What a trainer is about to do. Those of one batch ascend."""

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
    LEAVE = 7


_PATIENT = (Call.SAVE, Call.EVALUATE, Call.LEAVE)
_CLAUSES = {
    Call.REQUEST: "requests its next batch",
    Call.NEXT: "requests its next batch",
    Call.USE: "uses the batch of step {step}",
    Call.BACKWARD: "makes a backward pass for step {step}",
    Call.STEP: "calls optimizer.step() or zero_grad() for step {step}",
    Call.SAVE: "saves a checkpoint",
    Call.EVALUATE: "evaluates",
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
    """The batch's, from 1 in each stream; without one, the number of batches that the loop has received."""
    step: int
    """The batch's; without one, that of the last batch that the loop has received."""
    shape: BatchShape = (0, 0, 0, 0)

    @classmethod
    def parse(cls, line: Sequence[int]) -> Self:
        """Return the call of which `line` returned this."""
        call, number, step, *shape = line
        return cls(Call(call), number, step, (shape[0], shape[1], shape[2], shape[3]))

    def line(self) -> list[int]:
        """Return the call as numbers, always as many."""
        return [self.call, self.number, self.step, *self.shape]

    @property
    def is_patient(self) -> bool:
        """Whether a trainer may come to it much later than another."""
        return self.call in _PATIENT


def require_same(calls: Sequence[JointCall]) -> None:
    """Raise StreamError unless all trainers make the same call. calls: in the order of the ranks."""
    made: dict[tuple[int, Call], list[int]] = {}
    for rank, each in enumerate(calls):
        made.setdefault((each.number, each.call), []).append(rank)
    if len(made) == 1:
        return
    (_, ranks), *others = sorted(made.items())
    first = calls[ranks[0]]
    rest = ", and ".join(_clause(ranks, calls[ranks[0]]) for _, ranks in others)
    raise StreamError(
        f"step {first.step}: {_clause(ranks, first)}, but {rest}. In each of these calls trainers wait for each other: "
        "all of them must use and step the same batches, or leave out the same ones, and save, evaluate and end their "
        "loops after the same step. These calls have changed nothing: correct the loop, and start all trainers again, "
        "from the last checkpoint"
    )


def _clause(ranks: Sequence[int], call: JointCall) -> str:
    who = f"trainer {ranks[0]}" if len(ranks) == 1 else f"each of trainers {', '.join(map(str, ranks))}"
    return f"{who} {_CLAUSES[call.call].format(step=call.step)}"
