"""The batches of a trainer that steps together with others, and its calls that all trainers make together.

Whatever waits for another trainer is preceded by a comparison of what all of them are about to do, so a trainer that
does something else is found by all at once. Each takes one exchange of a few numbers: when a batch is taken, at its
first use (a forward pass may wait, for buffers), in its first backward pass and before its step.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from satrap.data.inputs import Inputs
from satrap.errors import StreamError
from satrap.interrupts import Uninterrupted
from satrap.train.batch import InFlightBatch
from satrap.train.joint_calls import BatchCalls, BatchShape, Call, JointCall, JointStep, Padding, describe, require_same


class Exchange(Protocol):
    """Exchanges numbers between all trainers: `ProcessGroup.exchange`."""

    def __call__(self, numbers: Sequence[int], *, patient: bool) -> Sequence[Sequence[int]]:
        """Return the numbers of all trainers. patient: allow a trainer to come much later than another."""


class JointBatches(Iterator[Inputs]):
    """Iterates over a trainer's batches, then over padding until it is stopped."""

    def __init__(
        self,
        batches: Iterator[Inputs],
        features: tuple[str, ...],
        exchange: Exchange,
        rank: int,
        weigh: Callable[[float], None],
    ) -> None:
        """exchange: all trainers call it together.
        rank: of this trainer.
        weigh: sets the weight of the batch whose backward pass comes next.
        """
        self.weigh = weigh
        self._batches, self._exchange, self._rank = batches, exchange, rank
        self._padding = Padding(names=features, values=np.empty(0, np.uint64), batch_size=0)
        self._requested = self._returned = self._stepped = 0  # the numbers of the last batches
        self._last_step = 0  # of the last batch returned
        self._error: str | None = None
        self._is_alone = False  # compares no more calls
        self.is_stopped = False
        """Whether no trainer has another batch."""
        self.is_last = False
        """Whether the last batch returned was the last one with samples of any trainer, if all of them know that."""

    def __next__(self) -> Inputs:
        if self.is_stopped:
            raise StopIteration
        return next(self._batches, self._padding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # not every iterator has a length

    # -- calls of all trainers -----------------------------------------------------------------------------------------

    @property
    def must_compare_request(self) -> bool:
        """Whether a batch was not stepped, so that another trainer may wait for its step."""
        return self._stepped < self._returned == self._requested and not self.is_stopped

    def request(self) -> None:
        """Compare the request of another batch, once: an interrupted request is retried."""
        with Uninterrupted():
            self._compare(Call.REQUEST, self._returned + 1, self._last_step)
            self._requested = self._returned + 1

    def take(self, batch: InFlightBatch, *, is_last: bool) -> JointStep | None:
        """Return the step that the batch makes with the other trainers' batches; None if none of them has samples:
        then there is no other batch.

        is_last: whether this trainer knows that it has no later batch with samples."""
        made = self._compare(Call.NEXT, self._returned + 1, batch.step, describe(batch.inputs, is_last=is_last))
        step = JointStep.from_batches([call.shape for call in made], self._rank)
        if not step.num_samples:
            self.is_stopped = True
            return None
        self._returned, self._last_step, self.is_last = self._returned + 1, batch.step, step.is_last
        self._requested = self._returned
        batch.calls = BatchCalls(self._returned, batch.step)
        return step

    def use(self, batch: InFlightBatch) -> None:
        """Compare the first use of a batch."""
        self._compare_first(Call.USE, batch.calls)

    def watch(self, batch: InFlightBatch) -> None:
        """Compare the first backward pass of the batch, inside it: before DistributedDataParallel waits for the other
        trainers' gradients."""
        own, calls = weakref.ref(self), batch.calls  # a hook must not keep alive what keeps its leaf alive

        def compare(_: Tensor) -> None:
            if (me := own()) is not None:
                me._compare_first(Call.BACKWARD, calls)

        for leaf in batch.leaves:
            leaf.register_post_accumulate_grad_hook(compare)

    def reach(self, calls: BatchCalls) -> None:
        """Compare the same of a backward pass to what modules have looked up."""
        self._compare_first(Call.BACKWARD, calls)

    def step(self, batch: InFlightBatch) -> None:
        """Compare the step, or the drop, of a batch and all before it."""
        self._compare_first(Call.STEP, batch.calls)
        self._stepped = max(self._stepped, batch.calls.number)

    def save(self) -> None:
        """Compare a save."""
        self._compare(Call.SAVE, self._returned, self._last_step)

    def evaluate(self) -> None:
        """Compare an evaluation by trainer 0, for which the others wait."""
        self._compare(Call.EVALUATE, self._returned, self._last_step)

    @property
    def may_be_awaited(self) -> bool:
        """Whether another trainer may still be in its loop."""
        return not self._is_alone and (self._returned > self._stepped or not self.is_stopped)

    def leave(self) -> None:
        """Compare the end of the loop. No call after this is compared."""
        with Uninterrupted():
            self._compare(Call.LEAVE, self._returned, self._last_step)
            self._is_alone = True

    def part(self) -> None:
        """Compare no other call: this trainer has had an error."""
        self._is_alone = True

    def _compare_first(self, call: Call, calls: BatchCalls) -> None:
        """Compare a call of a batch that was not made before."""
        if calls.last < call:
            with Uninterrupted():
                self._compare(call, calls.number, calls.step)
                calls.last = call

    def _compare(self, call: Call, number: int, step: int, shape: BatchShape = (0, 0, 0, 0)) -> list[JointCall]:
        """Return the calls of all trainers; raise StreamError if they differ, and in every call after an error."""
        if self._error is not None:
            raise StreamError(self._error)
        own = JointCall(call, number, step, shape)
        if self._is_alone:
            return [own]
        try:
            made = [JointCall.parse(line) for line in self._exchange(own.line(), patient=own.is_patient)]
            require_same(made)
        except Exception as error:
            self._error, self._is_alone = str(error), True
            raise
        return made
