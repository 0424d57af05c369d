"""The batches of a trainer that steps together with others, and its calls that all trainers make together.

Whatever waits for another trainer is preceded by a comparison of what all of them are about to do, so a trainer that
does something else is found by all at once. Each takes one exchange of a few numbers: when a batch is taken, at its
first use (a forward pass may wait, for buffers), in its first backward pass and before its step.

A call in which nothing waits only sends its numbers; they are compared in the next call that waits. In a plain loop
with staleness that is the backward pass alone, beside which DDP sends the gradients: there trainers also exchange the
shapes of the batches that they take next, as far as these were read.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from zlib import crc32

import numpy as np
from torch import Tensor

from satrap.data.inputs import Inputs
from satrap.errors import StreamError
from satrap.interrupts import Uninterrupted
from satrap.train.batch import InFlightBatch
from satrap.train.joint_calls import (
    NO_BATCH,
    UNKNOWN,
    BatchCalls,
    BatchShape,
    Call,
    JointCall,
    JointStep,
    Padding,
    describe,
    require_same,
)  # fmt: skip

_LOG = logging.getLogger("satrap.train")
_NUM_REGROUPED = 2
"""The first batches, in whose forward passes and steps trainers wait for each other once: DDP regroups its gradients in
the second, and the gradients of the first step are compared."""


_NO_FIRST_BATCH = (
    "prefetch: the loaders of trainers {} have no batch, and those of others have: a trainer whose loader ends before "
    "another's repeats its last batch; expected at least one batch from each loader"
)
_SAME_IDS = (
    "prefetch: the first batches of trainers %s have the same ids: each trainer trains on all that its loader yields, "
    "so the loader has to divide the data, for example with torch's DistributedSampler"
)


class Exchange(Protocol):
    """Exchanges numbers between all trainers: `ProcessGroup.exchange`."""

    def __call__(self, numbers: Sequence[int], *, patient: bool) -> Callable[[], Sequence[Sequence[int]]]:
        """Send the numbers to all trainers; return a function that waits for those of all trainers and returns them.

        patient: allow a trainer to come much later than another."""


class JointBatches(Iterator[Inputs]):
    """Iterates over a trainer's batches, then over padding until it is stopped."""

    def __init__(
        self,
        batches: Iterator[Inputs],
        features: tuple[str, ...],
        exchange: Exchange,
        rank: int,
        set_weight: Callable[[float], None],
        unawaited: Collection[Call] = (),
        padding: Callable[[], Padding] | None = None,
    ) -> None:
        """exchange: shares numbers with the other trainers; all of them call it together.
        rank: the rank of this trainer.
        set_weight: sets the weight of the batch whose backward pass comes next.
        unawaited: the calls in which no trainer waits for another. NEXT is one only if the shapes of the batches are
            known before they are requested.
        padding: returns a batch of padding, if the batches come from a loader. None: padding is a batch without ids.
        """
        self.set_weight = set_weight
        self._unawaited = unawaited
        self._batches, self._exchange, self._rank = batches, exchange, rank
        nothing = partial(Padding, names=features, values=np.empty(0, np.uint64), batch_size=0)
        self._has_loader, self._padding = padding is not None, padding or nothing
        self._requested = self._returned = self._stepped = 0  # the numbers of the last batches
        self._last_step = 0  # the step of the last batch returned
        self._sent: deque[Callable[[], Sequence[Sequence[int]]]] = deque()  # calls that are not compared yet
        self._read: deque[BatchShape] = deque()  # shapes of the batches that were read and not taken
        self._next_shapes: tuple[int, list[BatchShape]] = (0, [])  # a number, and the shape in each trainer
        self._error: str | None = None
        self._is_alone = False  # compares no more calls
        self._has_announced = False  # that the script has ended
        self.is_stopped = False
        """Whether no trainer has another batch."""
        self.is_last = False
        """Whether the last batch returned was the last one with samples of any trainer, if all of them know that."""

    def __next__(self) -> Inputs:
        if self.is_stopped:
            raise StopIteration
        inputs = next(self._batches, None) or self._padding()
        self._read.append(describe(inputs))
        return inputs

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
        number, shape = self._returned + 1, describe(batch.inputs, is_last=is_last)
        known, shapes = self._next_shapes
        if known == number and any(samples for samples, *_ in shapes):
            self._send(Call.NEXT, number, batch.step, shape)
        else:
            shapes = [call.shape for call in self._compare(Call.NEXT, number, batch.step, shape)]
        if self._read:
            self._read.popleft()
        step = JointStep.from_batches(shapes, self._rank)
        if not step.num_samples:
            self.is_stopped = True
            return None
        if without := [rank for rank, shape in enumerate(shapes) if shape[1] == NO_BATCH]:
            self._error, self._is_alone = _NO_FIRST_BATCH.format(without), True
            raise StreamError(self._error)
        if self._has_loader and number == batch.step == 1:
            self._compare_ids(batch.inputs)
        self._returned, self._last_step, self.is_last = number, batch.step, step.is_last
        self._requested = self._returned
        batch.calls = BatchCalls(self._returned, batch.step)
        return step

    def _compare_ids(self, inputs: Inputs) -> None:
        """Warn if other trainers have the same ids in their first batches: a loader does not divide its data."""
        checksums = self._exchange([crc32(inputs.values.tobytes())], patient=False)()
        same = [rank for rank, checksum in enumerate(checksums) if checksum == checksums[self._rank]]
        if len(same) > 1 and self._rank == same[0] and len(inputs.values):
            _LOG.warning(_SAME_IDS, same)

    def use(self, batch: InFlightBatch) -> None:
        """Compare the first use of a batch."""
        self._compare_first(Call.USE, batch.calls)

    def watch(self, batch: InFlightBatch) -> None:
        """Compare the first backward pass of the batch, inside it: before DistributedDataParallel waits for the other
        trainers' gradients."""
        own, calls = weakref.ref(self), batch.calls  # a hook must not keep alive what keeps its leaf alive

        def compare(_: Tensor) -> None:
            if (me := own()) is not None:
                me._compare_backward(calls)

        for leaf in batch.leaves:
            leaf.register_post_accumulate_grad_hook(compare)

    def reach(self, calls: BatchCalls) -> None:
        """Compare a backward pass that has reached what modules have looked up."""
        self._compare_backward(calls)

    def step(self, batch: InFlightBatch, *, waits: bool) -> None:
        """Compare the step, or the drop, of a batch and all before it. waits: whether it waits for other trainers."""
        self._compare_first(Call.STEP, batch.calls, waits=waits)
        self._stepped = max(self._stepped, batch.calls.number)

    def save(self) -> None:
        """Compare a save."""
        self._compare(Call.SAVE, self._returned, self._last_step)

    def evaluate(self) -> None:
        """Compare an evaluation by trainer 0, for which the others wait."""
        self._compare(Call.EVALUATE, self._returned, self._last_step)

    def resume(self) -> None:
        """Compare a resume, if another trainer may still be in its loop."""
        if self.may_be_awaited:
            self._compare(Call.RESUME, self._returned, self._last_step)

    @property
    def may_be_awaited(self) -> bool:
        """Whether another trainer may still be in its loop."""
        return not self._is_alone and (self._returned > self._stepped or not self.is_stopped)

    def leave(self) -> None:
        """Compare the end of the loop. No call after this is compared."""
        with Uninterrupted():
            self._compare(Call.LEAVE, self._returned, self._last_step)
            self._is_alone = True

    def announce_end(self) -> None:
        """Send the end of the script to trainers that may still be in their loops, which raise, and wait for none. No
        call after this is compared. A second call, once another trainer has failed, raises the same StreamError."""
        with Uninterrupted():
            if self.may_be_awaited:
                self._send(Call.LEAVE, self._returned, self._last_step)
                self._is_alone = self._has_announced = True
            elif self._has_announced:
                self._compare(Call.LEAVE, self._returned, self._last_step)

    def part(self) -> None:
        """Compare no other call: this trainer has had an error."""
        self._is_alone = True

    def _compare_backward(self, calls: BatchCalls) -> None:
        """Compare the first backward pass of a batch, and exchange the shapes of the batches that are taken next."""
        following = self._read[0] if self._read and Call.NEXT in self._unawaited else UNKNOWN
        made = self._compare_first(Call.BACKWARD, calls, shape=following)
        if made and UNKNOWN not in (shapes := [call.shape for call in made]):
            self._next_shapes = (self._returned + 1, shapes)

    def _compare_first(
        self, call: Call, calls: BatchCalls, *, shape: BatchShape = (0, 0, 0, 0), waits: bool = False
    ) -> list[JointCall]:
        """Compare a call of a batch that was not made before; return the calls of all trainers if it waits for them."""
        made: list[JointCall] = []
        if calls.last < call:
            with Uninterrupted():
                if call in self._unawaited and calls.number > _NUM_REGROUPED and not waits:
                    self._send(call, calls.number, calls.step)
                else:
                    made = self._compare(call, calls.number, calls.step, shape)
                calls.last = call
        return made

    def _send(self, call: Call, number: int, step: int, shape: BatchShape = (0, 0, 0, 0)) -> None:
        """Send a call to all trainers, which the next comparison compares."""
        if self._error is not None:
            raise StreamError(self._error)
        if not self._is_alone:
            own = JointCall(call, number, step, shape)
            self._sent.append(self._exchange(own.line(), patient=own.is_patient))

    def _compare(self, call: Call, number: int, step: int, shape: BatchShape = (0, 0, 0, 0)) -> list[JointCall]:
        """Return the calls of all trainers; raise StreamError if these or earlier ones differ, and in every call after
        an error."""
        made = [JointCall(call, number, step, shape)]
        try:
            self._send(call, number, step, shape)
            while self._sent:
                made = [JointCall.parse(line) for line in self._sent.popleft()()]
                require_same(made)
        except Exception as error:
            self._error, self._is_alone = str(error), True
            self._sent.clear()
            raise
        return made
