"""The stream of batches that a training loop iterates over: table work around the user's own torch step.

    for batch in embeddings.stream(data):        read, look up, return the batch
        loss = ...; loss.backward()              gradients collect in the batch's leaves
        optimizer.step()                         `update`: the gradients of batches with a loss go to the tables

A loop may request batches before it has stepped earlier ones. Batches within the staleness come with their rows; a
batch beyond comes without, and is looked up when its rows are first used or, in a thread, as soon as the gate allows.
Lookups keep the order of the batches, so a loop that reads ahead trains like one that does not.

A returned batch is held until it is updated or dropped. It is dropped, and counted by cause, if its gradients are
cleared without a step ("zero_grad"), if an overflow skips its step ("overflow"), if a later batch needs its place in
the gate and the user never used it or released it before a loss ("unused"), or if the stream is closed ("closed";
"unused" if its rows were never used). Once the stream has ended, a batch whose gradients no step has taken counts as
"unstepped", until a step takes them. A dropped batch is never lost silently: using its rows, or a backward pass to
them, raises an error with the reason. So does using a batch while an earlier batch that the user still works on closes
the gate.

Where no core is spare (the dense network and the tables share the cores), table work runs inside next() and step(), on
all threads; with a device, or with staleness and cores that torch leaves free, it runs concurrently with the dense
network.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import islice
from typing import NoReturn, Self

import torch
from torch import Tensor

from satrap.collected import close_when_collected
from satrap.data.inputs import Inputs, Position
from satrap.data.skipped_rows import SkippedRows
from satrap.errors import StreamError
from satrap.interrupts import Uninterrupted
from satrap.monitor.report import Counters
from satrap.train import drop_reasons
from satrap.train.batch import Batch, InFlightBatch
from satrap.train.batch_lookup import BatchLookup
from satrap.train.dense_strategy import DenseStrategy
from satrap.train.joint_batches import JointBatches
from satrap.train.joint_step import Padding
from satrap.train.pipeline_stages import Update
from satrap.train.prefetch_pipeline import PrefetchPipeline
from satrap.train.staleness_gate import StalenessGate
from satrap.worker.rows import RowStream, Ticket
from satrap.worker.worker import Worker

_LOG = logging.getLogger("satrap.train")
_EVALUATION_AHEAD = 2  # batches looked up ahead of the dense network if the two overlap


class Stream(Iterator[Batch]):
    """An iterator over batches with their rows looked up; created by `Embeddings.stream`.

    A batch beyond the staleness is looked up when its rows are first used. A batch that is never stepped is dropped and
    counted by cause; using its rows later raises an error.
    """

    def __init__(
        self,
        inputs: Iterator[Inputs],
        worker: Worker,
        gate: StalenessGate,
        *,
        train: bool,
        device: torch.device,
        overlap: bool,
        on_hold: Callable[[list[Tensor]], None],
        position: Position | None = None,
        dense: DenseStrategy | None = None,
    ) -> None:
        """inputs: those of a trainer that steps together with others are `JointBatches`.
        on_hold: called with the leaves of the held batches whenever they change.
        dense: that of the optimizer, if there is one.
        """
        self.dropped: Counter[str] = Counter()
        """Number of batches that were looked up and never updated, by cause."""
        self.position = position
        """Position of the source after the last batch that was updated or dropped."""
        self.last_step = gate.next_step - 1
        """The last step that was updated or dropped."""
        self._inputs, self._train, self._worker = inputs, train, worker
        self._gate, self._on_hold, self._dense = gate, on_hold, dense or DenseStrategy()
        self.joint = inputs if isinstance(inputs, JointBatches) else None  # if several trainers step together
        self._held: list[InFlightBatch] = []  # looked up, neither updated nor dropped
        self._ahead: deque[InFlightBatch] = deque()  # later batches, returned before their lookup
        self._next_batch: InFlightBatch | None = None  # taken from the pipeline, not returned yet
        self._length: int | None = None  # of len(), if it was called
        self._joined = False  # whether the joint step of that batch is known
        self._dropped_tickets: deque[Ticket] = deque()  # of dropped batches, to be dropped at the worker
        self._num_returned: Counter[int] = Counter()  # batches returned, by step
        self._stepped: set[int] = set()  # steps with a submitted update
        self._last_stepped = 0  # the last of those steps
        self._ended = self._finished = False
        self._ended_because: str | None = None  # why no other batch will come
        self._look_up = BatchLookup(worker, device, train=train, overlap=overlap, dense=self._dense)
        remote = train and worker.servers is not None  # an evaluation has no updates
        self._row_stream = worker.open_stream(gate.next_step) if train else RowStream()
        with Uninterrupted():
            self._pipeline: PrefetchPipeline[InFlightBatch] = PrefetchPipeline(
                inputs,
                gate,
                self._look_up,
                read_ahead=self._look_up.read_ahead,
                resolve=self._look_up.resolve,
                has_rows=lambda inputs: not isinstance(inputs, Padding),
                overlap=overlap,
                remote=remote,
            )
            close_when_collected(self, self._pipeline.close)
            close_when_collected(self, self._row_stream.release)  # before the pipeline is closed

    @classmethod
    def evaluation(cls, inputs: Iterator[Inputs], worker: Worker, device: torch.device, *, overlap: bool) -> "Stream":
        """Create a stream that looks up rows and changes none."""
        gate = StalenessGate(_EVALUATION_AHEAD if overlap else 0)
        return cls(inputs, worker, gate, train=False, device=device, overlap=overlap, on_hold=lambda _: None)

    @property
    def staleness_seen(self) -> dict[int, int]:
        """Number of batches that were looked up while n earlier steps of this stream were not yet applied."""
        return dict(sorted(self._gate.seen.items()))

    def counters(self) -> Counters:
        """Return the counters of this stream so far."""
        seconds = self._pipeline.seconds
        dropped = self.dropped + Counter(failed=self._pipeline.num_failed, unstepped=len(self._unstepped()))
        return Counters(
            staleness=self.staleness_seen,
            stages={"read": seconds.read, "lookup": seconds.lookup, "update": seconds.update, "wait": seconds.wait},
            inside=seconds.inside,
            lost={f"batches/{cause}": count for cause, count in dropped.items()}
            | {f"rows/{cause}": count for cause, count in asdict(self._skipped_rows()).items() if count},
        )

    def __iter__(self) -> Self:
        if torch.utils.data.get_worker_info() is not None:
            raise StreamError(drop_reasons.NO_LOADER)
        num_returned = sum(self._num_returned.values())
        if self._ended or 0 < num_returned == self._length:  # a loop that knows the length does not request the end
            raise StreamError(drop_reasons.ENDED)
        return self

    def __getitem__(self, _: object) -> NoReturn:
        """Refuse torch's DataLoader, which takes any object with this method for a dataset of samples."""
        raise StreamError(drop_reasons.NO_LOADER)

    def __len__(self) -> int:
        """Return the total number of batches of this stream; TypeError if the source does not know it."""
        try:
            self._length = len(self._inputs)  # type: ignore[arg-type]  # not every iterator has a length
            return self._length
        except TypeError as error:
            raise TypeError(drop_reasons.why_no_length(error)) from None

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        if self._ended_because is not None:
            raise StreamError(self._ended_because)
        if self._next_batch is None and self.joint is not None and self.joint.must_compare_request:
            self._worker.settle()  # before another trainer may wait for this one
            self.joint.request()
        if self._train and (self._held or self._ahead):
            self._drop_released()
        if self._next_batch is None:  # else an interrupt came before the batch was returned
            self._pipeline.next(self._set_next)
        held = self._next_batch
        if held is None or not self._joins_step(held):
            self._end()
            raise StopIteration
        self._look_up.wait_for_copies(held)
        with Uninterrupted():
            self._next_batch, self._joined = None, False
            if not self._train:
                self._pipeline.drop(self._gate.oldest_open)
                return held.hand_over()
            self._num_returned[held.step] += 1
            held.number_in_step = self._num_returned[held.step]
            if self.joint is not None:
                self.joint.hand_over(held.inputs)
            self._ahead.append(held)
            self._collect()  # earlier batches may be looked up by now, and come first
            return held.hand_over(self, with_dense=bool(self._dense.tables))

    def _set_next(self, held: InFlightBatch) -> None:
        self._next_batch = held

    def update(self, lrs: dict[str, float], scale: float) -> bool:
        """Submit one optimizer step: the gradients of all held batches that have any. Return False if none has."""
        stepped = self._waiting_batches()
        if not stepped:
            return False
        if repeated := self._stepped.intersection(batch.step for batch in stepped):
            raise StreamError(drop_reasons.why_twice(min(repeated)))
        for step in {batch.step for batch in stepped}:
            num_returned, accumulate = self._num_returned[step], self._gate.accumulate
            if num_returned < accumulate and not self._ended and not self._has_no_other():
                raise StreamError(drop_reasons.why_too_early(step, num_returned, accumulate))
        apply = self._look_up.update_with(stepped, lrs, scale)
        update = Update(steps=[batch.step for batch in stepped], apply=apply)
        self._pipeline.submit(update, lambda: self._mark_submitted(stepped))
        if self._ended:
            self._pipeline.drain()
            self._close_if_done()
        return True

    def _measure(self) -> None:
        """Start to compute the largest gradient of the next update."""
        self._look_up.measure(self._waiting_batches())

    def completes_step(self, held: InFlightBatch) -> bool:
        """Return whether the batch is the last one of its step. A step with few batches reads ahead to find out."""
        if held.number_in_step < self._num_returned[held.step]:
            return False
        return held.number_in_step == self._gate.accumulate or self._ended or self._has_no_other()

    def _has_no_other(self) -> bool:
        """Return whether no batch will come after those returned."""
        return self._pipeline.is_last() if self.joint is None else self.joint.is_last

    def _is_last_with_samples(self, held: InFlightBatch) -> bool:
        """Return whether this trainer has no batch with samples after one that it is about to take."""
        assert self.joint is not None
        self._pipeline.is_last()  # reads one batch ahead, which may be padding
        return self.joint.num_left == (not held.is_padding)

    def _mark_submitted(self, batches: list[InFlightBatch]) -> None:
        """Record that the pipeline has taken over the update of these batches."""
        self._stepped.update(batch.step for batch in batches)
        self._last_stepped = max(self._last_stepped, batches[-1].step)
        self._forget(batches)
        for batch in batches:
            batch.forbid_gradients(
                f"step {batch.step}: a loss reached its batch after optimizer.step() had taken it; add up the losses "
                "before the step, or look up the batch again"
            )

    def _waiting_batches(self) -> list[InFlightBatch]:
        """Return the held batches that have gradients."""
        return [batch for batch in self._held if batch.has_gradient]

    def _unstepped(self) -> list[InFlightBatch]:
        """Return the batches that still wait for their step after the stream has ended. A loop may step them then."""
        return [batch for batch in self._waiting_batches() if not batch.is_padding] if self._ended else []

    def drop(self, cause: str) -> None:
        """Drop the held batches that have gradients."""
        self._drop(self._waiting_batches(), cause)
        self._close_if_done()

    def drain(self) -> None:
        """Wait until every submitted update is applied."""
        while not self._pipeline.drain():  # a skipped batch keeps later ones from being looked up in order
            self._collect()
            if self._next_batch is not None and self._next_batch.is_looked_up():
                with Uninterrupted():
                    self._settle([self._next_batch], "unused", "next() was interrupted before a checkpoint")
                    self._next_batch = None
                self._release_tickets()
                continue
            passed = [batch for batch in self._held if not batch.has_gradient and batch.step < self._last_stepped]
            if not passed:
                raise StreamError(
                    f"an update waits for lookups that wait for step {self._held[0].step}: call optimizer.step(), or "
                    "drop the batch by zero_grad(), before a checkpoint"
                )
            self._drop(passed[:1], "unused", f"step {self._last_stepped} was stepped before it")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Apply every submitted update, then keep table work from running inside the context."""
        self.drain()
        with self._pipeline.pause():
            self._worker.pause()
            yield

    def close(self, why: str = "this stream was closed") -> None:
        """End the stream: submitted updates are applied, batches still held are dropped.

        why: the error message for a later request of a batch.
        """
        try:
            if self.joint is not None and self.joint.may_be_awaited:
                self._worker.settle()  # as above
                self.joint.leave()
        finally:
            self._close(why)

    def _close(self, why: str = "this stream was closed") -> None:
        if self._ended_because is None:
            with Uninterrupted():
                self._ended_because = why
                self._drop_all(why)
        try:
            self._row_stream.end_lookups()
            self._release_tickets()
            self._pipeline.finish()
            self._row_stream.end_updates()
            if not self._finished:
                with Uninterrupted() as held:
                    try:
                        with held.allow():
                            self._dense.finish()
                    finally:
                        self._finished = not held.was_interrupted  # an error is raised once
        finally:
            self._pipeline.close()
            self._look_up.drop_resolved()

    def __enter__(self) -> Self:
        return self

    def release(self) -> None:
        """Let calls fail that wait for other trainers: this stream is closed after an error."""
        if self.joint is not None:
            self.joint.part()
        self._row_stream.release()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.release()
        with nullcontext() if kind is None else suppress(Exception):  # keeps the user's own error
            self.close()

    def use(self, held: InFlightBatch) -> None:
        """Prepare the rows of a batch for their first use; look them up now if that was not done."""
        if held.drop_reason is not None:
            raise StreamError(held.drop_reason)
        if self.joint is not None:
            self.joint.use(held)
        if self._ahead:  # which may contain this batch
            while not self._pipeline.wait_for_lookup(held.is_looked_up):
                self._collect()
                self._make_room(held)
            self._collect()
        self._look_up.wait_for_copies(held)  # on the stream of this use
        with Uninterrupted():
            self._weigh(held)
            self._look_up.hand_over(held)
            if self.joint is not None:
                self.joint.watch(held)
            held.is_used, held.is_training = True, torch.is_grad_enabled()
            self._hold(self._held)

    def _weigh(self, held: InFlightBatch) -> None:
        """Set the weight for the next backward pass, which must be this batch's."""
        if self.joint is None:
            return
        other = self._awaiting_backward()
        if other is not None and other is not held and other.weight != held.weight:
            raise StreamError(
                f"step {held.step}: its batch has {held.inputs.batch_size} samples, and that of step {other.step}, "
                f"which waits for its backward pass, has {other.inputs.batch_size}; several trainers weigh each batch "
                "by its samples: call backward() for a batch before using the next one"
            )
        self.joint.weigh(held.weight)

    def _awaiting_backward(self) -> InFlightBatch | None:
        """Return the first batch that is used and that no backward pass has reached."""
        return next((each for each in self._held if each.is_used and not each.has_gradient), None)

    def _collect(self) -> None:
        """Hold the batches that were returned before their lookup and are looked up by now."""
        if self._ahead:
            with Uninterrupted():
                while self._ahead and self._ahead[0].is_looked_up():
                    self._held.append(self._ahead.popleft())

    def _make_room(self, next_used: InFlightBatch) -> None:
        """Drop the oldest step, which closes the gate for a batch in use, if the user has skipped it; else raise
        StreamError."""
        step, staleness = self._held[0].step, self._gate.staleness
        oldest = [batch for batch in self._held if batch.step == step]
        if any(batch.may_get_gradient for batch in oldest):
            has_gradient = any(batch.has_gradient for batch in oldest)
            raise StreamError(drop_reasons.why_not_yet(next_used.step, step, staleness, has_gradient=has_gradient))
        self._drop(oldest, "unused", drop_reasons.why_passed(next_used.step, step, staleness))

    def _drop_released(self) -> None:
        """Settle batches that the user released unused, so that the stream holds no more than the user does."""
        while self._held or self._ahead:
            self._collect()
            first = self._held[0] if self._held else self._ahead[0]
            if not first.is_released_unused:
                return
            if not self._held:
                if not self._pipeline.wait_for_lookup(first.is_looked_up):
                    return
            elif self._pipeline.needs_user():
                self._drop([first], "unused", "it was released unused")
            else:
                return

    def _end(self) -> None:
        """End the iteration; batches that were returned may still be stepped."""
        self._ended = True
        skipped_rows = self._skipped_rows()
        if self._train and skipped_rows.total > skipped_rows.short:  # short batches are left out by request
            _LOG.warning("%s samples of the source were not trained on: %s", f"{skipped_rows.total:,}", skipped_rows)
        self._pipeline.drain()
        self._collect()
        self._drop([held for held in self._held if held.is_released_unused], "unused", "it was released unused")
        unstepped = self._unstepped()
        if unstepped and len(unstepped) == len(self._held) and not self._ahead:  # no later batch completes the step
            _LOG.warning(drop_reasons.UNSTEPPED, len(unstepped), self._gate.accumulate)
        self._close_if_done()

    def _skipped_rows(self) -> SkippedRows:
        """Return what the source has left out so far, if it counts that."""
        return getattr(self._inputs, "skipped_rows", SkippedRows())

    def _close_if_done(self) -> None:
        if self._ended and not self._held and not self._ahead:
            self._worker.settle()  # other trainers may wait for the last step, and no lookup follows to report it
            self._close()

    def _drop_all(self, why: str) -> None:
        """Drop all batches when the stream is closed."""
        self._collect()
        self._settle(self._unstepped(), "unstepped", "the stream was closed before optimizer.step() took it")
        self._settle([held for held in self._held if held.is_used], "closed", why)
        self._settle(self._held, "unused", why)
        while self._ahead:
            held = self._ahead.popleft()
            self.dropped["unused"] += not held.is_padding
            held.drop(f"step {held.step}: its batch was dropped: {why}")

    def _drop(self, batches: list[InFlightBatch], cause: str, why: str | None = None) -> None:
        """Drop batches. why: the reason, for the error of a later backward pass."""
        with Uninterrupted():
            self._settle(batches, cause, why)
        self._release_tickets()

    def _settle(self, batches: list[InFlightBatch], cause: str, why: str | None) -> None:
        """Settle batches that will not be updated; `_release_tickets` then informs the worker."""
        for batch in batches:
            if not batch.is_padding:
                self.dropped[cause] += 1
                self._dropped_tickets.append(batch.ticket)
            self._pipeline.drop(batch.step)
            batch.drop(f"step {batch.step}: its batch was dropped: {why or drop_reasons.DROP_REASONS[cause]}")
        self._forget(batches)
        for step in {batch.step for batch in batches} - self._stepped:
            whole = self._ended or self._num_returned[step] == self._gate.accumulate
            behind = any(batch.step == step for batch in [*self._held, *islice(self._ahead, 1)])
            if whole and not behind:
                self._dense.forget(step)
                self._worker.skip(step)

    def _release_tickets(self) -> None:
        """Drop the tickets of dropped batches at the worker; the next call retries what an interrupt cut short."""
        while self._dropped_tickets:
            if not self._dropped_tickets[0].used:
                self._worker.drop(self._dropped_tickets[0])
            self._dropped_tickets.popleft()

    def _joins_step(self, held: InFlightBatch) -> bool:
        """Return whether any trainer has samples for the next step, which includes this batch."""
        if self.joint is None or self._joined:
            return True
        if not self.joint.is_stopped:  # else this is a retry after an interrupt
            is_last = self._num_returned[held.step] + 1 < self._gate.accumulate and self._is_last_with_samples(held)
            self._worker.settle()  # before another trainer may wait for this one
            with Uninterrupted():
                if (step := self.joint.take(held, is_last=is_last)) is not None:
                    self._look_up.join(held, step)
                    self._joined = True
                    return True
                self._row_stream.end_lookups()
        while self._next_batch is not None:  # this batch and what was read after it are all padding
            if not self._pipeline.return_item(self._next_batch):
                self._pipeline.drop(self._next_batch.step)
            self._next_batch = None
            self._pipeline.next(self._set_next)
        return False

    def _forget(self, batches: list[InFlightBatch]) -> None:
        """Stop holding batches that are updated or dropped."""
        if not batches:
            return
        known = [batch.inputs.position for batch in batches if batch.inputs.position is not None]
        self.position = max([*known, *([] if self.position is None else [self.position])], default=None)
        self.last_step = max(self.last_step, *(batch.step for batch in batches))
        self._hold([batch for batch in self._held if batch not in batches])
        if self.joint is not None:
            awaited = self._awaiting_backward()
            self.joint.weigh(1.0 if awaited is None else awaited.weight)

    def _hold(self, held: list[InFlightBatch]) -> None:
        self._held = held
        if self._ended_because is None:
            self._on_hold([leaf for each in held if each.is_used for leaf in each.leaves])
