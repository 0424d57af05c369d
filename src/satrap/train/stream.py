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

Where no core is spare, table work runs inside next() and step(), on all threads; with a device, or with staleness and
cores that torch leaves free, it runs concurrently with the dense network.
"""

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from satrap.collected import close_when_collected
from satrap.data.inputs import Inputs, Position
from satrap.data.skipped_rows import SkippedRows
from satrap.errors import NotReadyError, StreamError
from satrap.hidden_names import internal
from satrap.interrupts import Uninterrupted
from satrap.monitor.report import Counters
from satrap.train.ahead_rows import rows_of
from satrap.train.batch import Batch, InFlightBatch, batch_in_use
from satrap.train.batch_lookup import BatchLookup
from satrap.train.dense_strategy import DenseStrategy
from satrap.train.joint_batches import JointBatches
from satrap.train.joint_calls import BatchCalls
from satrap.train.ledger import BatchLedger, DropTicket, Event, State, Update
from satrap.train.prefetch_pipeline import PrefetchPipeline
from satrap.train.step_lookups import StepLookups, read_rows, read_without_training
from satrap.train.training_watch import TrainingWatch
from satrap.worker.rows import Ids, RowStream, Ticket
from satrap.worker.worker import Worker

_LOG = logging.getLogger("satrap.train")
_EVALUATION_AHEAD = 2  # batches looked up ahead of the dense network if the two overlap
_NO_LOADER = (
    "a torch DataLoader cannot read a stream, whose batches are complete and get their gradients in this process: "
    "use embeddings.stream(satrap.IterableSource(loader)) and iterate over the stream itself"
)
_ENDED = (
    "this stream has ended, and a stream is one pass over its data: start another one with embeddings.stream(...), or "
    "set epochs=... in the source"
)
_UNSTEPPED = (
    "the stream has ended, and optimizer.step() has not taken its last batches (%d, of %d in a step): they are not "
    "trained on unless you call it now. A loop that calls it after each batch whose completes_step is True leaves none"
)
_CLEARED = "zero_grad() cleared its gradients before optimizer.step()"
_REASONS = {"zero_grad": _CLEARED, "overflow": "a GradScaler found an overflow and skipped its step"}


@internal("drop evaluation is_over joint pause release update")
class Stream(Iterator[Batch]):
    """An iterator over batches with their rows looked up; created by `Embeddings.stream`.

    A batch that is never stepped is dropped and counted by cause; using its rows later raises an error.
    """

    def __init__(
        self,
        inputs: Iterator[Inputs],
        worker: Worker,
        ledger: BatchLedger[InFlightBatch],
        *,
        train: bool,
        device: torch.device,
        overlap: bool,
        on_hold: Callable[[list[Tensor]], None],
        dense: DenseStrategy | None = None,
        watch: TrainingWatch | None = None,
    ) -> None:
        """inputs: those of a trainer that steps together with others are `JointBatches`.
        on_hold: called with the leaves of the held batches whenever they change."""
        self._inputs, self._train, self._worker = inputs, train, worker
        self._ledger, self._on_hold, self._dense, self._watch = ledger, on_hold, dense or DenseStrategy(), watch
        self.joint = inputs if isinstance(inputs, JointBatches) else None  # if several trainers step together
        self._length: int | None = None  # what len() returned, if it was called
        self._end_step: int | None = None  # as far as it is known
        self._joined: InFlightBatch | None = None  # the last batch whose joint step is known
        self._dropped_tickets: deque[Ticket] = deque()  # to be dropped at the worker
        self._num_ids: Counter[str] = Counter()  # that modules looked up
        self._is_finished = self._is_left = False
        self._ended_because: str | None = None  # why no other batch will come
        self._look_up = BatchLookup(worker, device, train=train, overlap=overlap, dense=self._dense)
        remote = train and worker.servers is not None  # an evaluation has no updates
        self._row_stream = worker.open_stream(ledger.next_step) if train else RowStream()
        with Uninterrupted():
            self._pipeline = PrefetchPipeline(inputs, ledger, self._look_up, overlap=overlap, remote=remote)
            close_when_collected(self, self._pipeline.close)
            close_when_collected(self, self._row_stream.release)  # before the pipeline is closed

    @classmethod
    def evaluation(cls, inputs: Iterator[Inputs], worker: Worker, device: torch.device, *, overlap: bool) -> "Stream":
        """Create a stream that looks up rows and changes none."""
        ledger: BatchLedger[InFlightBatch] = BatchLedger(_EVALUATION_AHEAD if overlap else 0)
        return cls(inputs, worker, ledger, train=False, device=device, overlap=overlap, on_hold=lambda _: None)

    def __repr__(self) -> str:
        return f"Stream({'trains' if self._train else 'evaluates'}, next step {self._ledger.next_step})"

    @property
    def dropped(self) -> Counter[str]:
        """Number of batches that were returned and never updated, by cause."""
        return self._ledger.dropped

    @property
    def position(self) -> Position | None:
        """Position of the source after the last batch that was updated or dropped."""
        return self._ledger.position  # type: ignore[no-any-return]

    @property
    def end_step(self) -> int | None:
        """The step of the last batch, until the end an estimate if a share of the samples is read; None: not known."""
        if self._end_step is None and not self._ledger.has_ended:
            with suppress(TypeError, NotReadyError):  # the second: of a worker, which has read everything
                inputs: Any = self._inputs  # not every iterator has a length
                length = inputs.about_length() if hasattr(inputs, "about_length") else len(inputs)
                self._end_step = self._ledger.step_of(length - 1)
        return self._end_step

    @property
    def last_step(self) -> int:
        """The last step that was updated or dropped."""
        return self._ledger.last_step

    @property
    def is_over(self) -> bool:
        """Whether the stream is closed, as it is once all batches are read and stepped, or its loop was left."""
        return self._ended_because is not None or self._is_left

    @property
    def staleness_seen(self) -> dict[int, int]:
        """Number of batches that were looked up while n earlier steps of this stream were not yet applied."""
        return dict(sorted(self._ledger.seen.items()))

    def counters(self) -> Counters:
        """Return the counters of this stream so far."""
        dropped = self.dropped + Counter(unstepped=len(self._ledger.unstepped()))
        skipped_rows: SkippedRows = getattr(self._inputs, "skipped_rows", SkippedRows())
        return Counters(
            staleness=self.staleness_seen,
            stages=dict(self._pipeline.seconds),
            inside=self._pipeline.seconds_inside,
            module_ids=dict(+self._num_ids),
            lost={f"batches/{cause}": count for cause, count in dropped.items()}
            | {f"rows/{cause}": count for cause, count in asdict(skipped_rows).items() if count},
        )

    def __iter__(self) -> Self:
        if torch.utils.data.get_worker_info() is not None:
            raise StreamError(_NO_LOADER)
        ledger = self._ledger
        if ledger.has_ended or 0 < ledger.num_returned == self._length:  # a loop that knows it does not request the end
            raise StreamError(_ENDED)
        return self

    def __getitem__(self, _: object) -> NoReturn:
        """Refuse torch's DataLoader, which takes any object with this method for a dataset of samples."""
        raise StreamError(_NO_LOADER)

    def __len__(self) -> int:
        """Return the total number of batches of this stream; TypeError if the source does not know it."""
        try:
            self._length = len(self._inputs)  # type: ignore[arg-type]
            return self._length
        except TypeError as error:
            raise TypeError(
                f"the length of this stream is not known: {error} (a torch DataLoader needs it, but cannot read a "
                "stream: use embeddings.stream(satrap.IterableSource(loader)))"
            ) from None

    def __next__(self) -> Batch:
        if self._ledger.has_ended:
            raise StopIteration
        if self._ended_because is not None:
            raise StreamError(self._ended_because)
        if self._ledger.offered is None and self.joint is not None and self.joint.must_compare_request:
            self._worker.settle()  # before another trainer may wait for this one
            self.joint.request()
        self._drop_released()
        batch = self._pipeline.next()
        if batch is None or not self._joins_step(batch):
            self._end()
            raise StopIteration
        self._look_up.wait_for_copies(batch)
        with Uninterrupted():
            self._pipeline.handle(Event.RETURNED, batch)
            if not self._train:
                self._pipeline.handle(Event.SETTLED, batch)
                return batch.hand_over()
            return batch.hand_over(self, with_dense=bool(self._dense.tables))

    def update(self, lrs: dict[str, float], scale: float) -> bool:
        """Submit one optimizer step: the gradients of all held batches that have any. Return False if none has."""
        stepped = self._ledger.waiting()
        if not stepped:
            return False
        self._ledger.require_whole_steps(stepped, self._has_no_other)
        update = Update(stepped, self._look_up.update_with(stepped, lrs, scale))
        self._pipeline.submit(update, lambda: self._mark_submitted(stepped))
        if self._ledger.has_ended:
            self._pipeline.drain()
            self._close_if_done()
        return True

    def _measure(self, *, are_checked: bool) -> None:
        """Start to compute the largest gradient of the next update. are_checked: as in `BatchLookup.measure`."""
        self._look_up.measure(self._ledger.waiting(), are_checked=are_checked)

    def completes_step(self, batch: InFlightBatch) -> bool:
        """Return whether the batch is the last one of its step. A step with few batches reads ahead to find out."""
        return self._ledger.completes_step(batch, self._has_no_other)

    def _has_no_other(self) -> bool:
        """Return whether no batch will come after those returned."""
        return self._ledger.offered is None and self._pipeline.is_last() if self.joint is None else self.joint.is_last

    def _mark_submitted(self, batches: list[InFlightBatch]) -> None:
        """Let later gradients of these batches fail, whose update the pipeline has taken over."""
        self._forget()
        for batch in batches:
            batch.forbid_gradients(
                f"step {batch.step}: a loss reached its batch after optimizer.step() had taken it; add up the losses "
                "before the step, or look up the batch again"
            )
            batch.lookups.end("optimizer.step() had taken its batch")

    def _waiting_batches(self) -> list[InFlightBatch]:
        """Return the held batches that have gradients."""
        return self._ledger.waiting()

    def drop(self, cause: str) -> None:
        """Drop the held batches that have gradients."""
        self._drop(self._ledger.waiting(), cause)
        self._close_if_done()

    def apply_submitted(self) -> None:
        """Wait until every submitted update is applied, except those that wait for the loop."""
        self._pipeline.drain()

    def drain(self) -> None:
        """Wait until every submitted update is applied."""
        while not self._pipeline.drain():  # a skipped batch keeps later ones from being looked up in order
            offered = self._ledger.offered
            if offered is not None and offered.state is State.LOOKED_UP:
                self._drop([offered], "unused", "next() was interrupted before a checkpoint")
            else:
                batches, why = self._ledger.passed()
                self._drop(batches, "unused", why)

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

    def _leave(self) -> None:
        """Close the stream, whose loop is left. Trainers that step together do so in their next common call."""
        self._is_left = True
        if self.joint is None:
            self.close()

    def _end_at(self, position: Position | None) -> None:
        """Set the position of the source, whose batches have ended."""
        self._ledger.position = position

    def _close(self, why: str = "this stream was closed") -> None:
        if self._ended_because is None:
            if self._watch is not None:
                is_empty = self._ledger.has_ended and not self._ledger.num_returned
                self._watch.note_end(getattr(self._inputs, "skipped_rows", SkippedRows()), is_empty=is_empty)
            with Uninterrupted():
                self._ended_because = why
                self._drop_all(why)
        try:
            self._row_stream.end_lookups()
            self._release_tickets()
            self._pipeline.finish()
            self._row_stream.end_updates()
            if not self._is_finished:
                with Uninterrupted() as held:
                    try:
                        with held.allow():
                            self._dense.finish()
                    finally:
                        self._is_finished = not held.was_interrupted  # an error is raised once
        finally:
            self._pipeline.close()
            self._look_up.drop_resolved(self._ledger.to_look_up)

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

    def use(self, batch: InFlightBatch) -> None:
        """Prepare the rows of a batch for their first use; look them up now if that was not done."""
        if batch.drop_reason is not None:
            raise StreamError(batch.drop_reason)
        if self.joint is not None:
            self.joint.use(batch)
        while batch.state is State.AHEAD and not self._pipeline.look_up(batch):
            passed, why = self._ledger.make_room(batch)
            self._drop(passed, "unused", why)
        self._look_up.wait_for_copies(batch)  # on the stream of this use
        with Uninterrupted():
            self._set_weight(batch)
            self._look_up.hand_over(batch)
            if self.joint is not None:
                self.joint.watch(batch)
            batch.is_training = torch.is_grad_enabled()
            self._pipeline.handle(Event.USED, batch)
            self._hold()

    def look_up(self, ids: Mapping[str, Ids], device: torch.device) -> dict[str, Tensor]:
        """Return the rows of ids by table for modules, in the step of the batch in use, as leaves on the device."""
        batch = batch_in_use(self._ledger.in_loop)
        if not batch.is_used:
            self.use(batch)
        if not batch.lookups.num_lookups:
            own, calls = weakref.ref(self), batch.calls
            batch.lookups = StepLookups(batch.step, lambda: None if (me := own()) is None else me._reach(calls))
        rows, num_now = rows_of(batch.ahead, batch.lookups, ids, device, partial(self._read, batch, device))
        self._num_ids["ahead"] += batch.has_rows * (sum(map(len, ids.values())) - num_now)
        self._num_ids["on the spot"] += batch.has_rows * num_now
        return rows

    def _read(self, batch: InFlightBatch, device: torch.device, ids: Mapping[str, Ids]) -> dict[str, Tensor]:
        """Look up rows for modules on the spot; those of a padding batch are not trained."""
        if not batch.has_rows:
            return read_without_training(self._worker, ids, device)
        if self._ledger.deterministic:
            self._pipeline.drain()  # so that the rows have the same updates in every run
        return read_rows(self._worker, ids, batch.step, self._pipeline.oldest_open(), device)

    def _reach(self, calls: BatchCalls) -> None:
        """Note that a backward pass has reached what modules have looked up in a batch."""
        if self.joint is not None:
            self.joint.reach(calls)
        self._hold()

    def _set_weight(self, batch: InFlightBatch) -> None:
        """Set the weight for the next backward pass, which must be this batch's."""
        if self.joint is None:
            return
        other = self._awaiting_backward()
        if other is not None and other is not batch and other.weight != batch.weight:
            raise StreamError(
                f"step {batch.step}: its batch has {batch.inputs.batch_size} samples, and that of step {other.step}, "
                f"which waits for its backward pass, has {other.inputs.batch_size}; several trainers weigh each batch "
                "by its samples: call backward() for a batch before using the next one"
            )
        self.joint.set_weight(batch.weight)

    def _awaiting_backward(self) -> InFlightBatch | None:
        """Return the first batch that is used and that no backward pass has reached."""
        return next((held for held in self._ledger.held() if held.is_used and not held.has_gradient), None)

    def _drop_released(self) -> None:
        """Settle batches that the user released unused, so that the stream holds no more than the user does."""
        while self._ledger.in_loop and (first := self._ledger.in_loop[0]).is_released_unused:
            if first.state is State.AHEAD:
                if not self._pipeline.look_up(first):
                    return
            elif self._pipeline.needs_user():
                self._drop([first], "unused", "it was released unused")
            else:
                return

    def _end(self) -> None:
        """End the iteration; batches that were returned may still be stepped."""
        ledger = self._ledger
        ledger.has_ended = True
        self._end_step = self._end_step and ledger.step_of(ledger.num_returned - 1)
        self._pipeline.drain()
        self._drop([batch for batch in ledger.held() if batch.is_released_unused], "unused", "it was released unused")
        unstepped = ledger.unstepped()
        if unstepped and len(unstepped) == len(ledger.in_loop):  # no later batch completes the step
            _LOG.warning(_UNSTEPPED, len(unstepped), ledger.accumulate)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._ledger.has_ended and not self._ledger.in_loop:
            self._worker.settle()  # other trainers may wait for the last step, and no lookup follows to report it
            self._close()

    def _drop_all(self, why: str) -> None:
        """Drop all batches when the stream is closed."""
        ledger = self._ledger
        self._settle(ledger.unstepped(), "unstepped", "the stream was closed before optimizer.step() took it")
        self._settle([batch for batch in ledger.held() if batch.is_used], "closed", why)
        self._settle(list(ledger.in_loop), "unused", why)

    def _drop(self, batches: list[InFlightBatch], cause: str, why: str | None = None) -> None:
        """Drop batches. why: the reason, for the error of a later backward pass."""
        with Uninterrupted():
            self._settle(batches, cause, why)
        self._release_tickets()

    def _settle(self, batches: list[InFlightBatch], cause: str, why: str | None) -> None:
        """Settle batches that will not be updated; `_release_tickets` then informs the worker."""
        if not batches:
            return
        for batch in batches:
            batch.drop(f"step {batch.step}: its batch was dropped: {why or _REASONS[cause]}")
        if self._watch is not None:
            self._watch.note_dropped(cause, batches)
        for action in self._pipeline.handle(Event.SETTLED, *batches, cause=cause):
            if isinstance(action, DropTicket):
                if (ticket := action.batch.take_ticket()) is not None:
                    self._dropped_tickets.append(ticket)
            else:
                self._dense.forget(action.step)
                self._worker.skip(action.step)
        self._forget()

    def _release_tickets(self) -> None:
        """Drop the tickets of dropped batches at the worker; the next call retries what an interrupt cut short."""
        while self._dropped_tickets:
            if not self._dropped_tickets[0].used:
                self._worker.drop(self._dropped_tickets[0])
            self._dropped_tickets.popleft()

    def _joins_step(self, batch: InFlightBatch) -> bool:
        """Return whether any trainer has samples for the next step, which includes this batch."""
        if self.joint is None or self._joined is batch:
            return True
        if not self.joint.is_stopped:  # else this is a retry after an interrupt
            is_last = self._ledger.number_in_step(batch) < self._ledger.accumulate and self._pipeline.is_last()
            self._worker.settle()  # before another trainer may wait for this one
            with Uninterrupted():
                if (step := self.joint.take(batch, is_last=is_last)) is not None:
                    self._look_up.join(batch, step)
                    self._joined = batch
                    return True
                self._row_stream.end_lookups()
        padding: InFlightBatch | None = batch
        while padding is not None:  # this batch and what was read after it are all padding
            self._pipeline.discard(padding)
            padding = self._pipeline.next()
        return False

    def _hold(self) -> None:
        """Tell the optimizer which leaves may have gradients."""
        if self._ended_because is None:
            held = [batch for batch in self._ledger.held() if batch.is_used]
            self._on_hold([leaf for batch in held for leaf in (*batch.leaves, *batch.lookups.leaves)])

    def _forget(self) -> None:
        """Stop holding batches that are updated or dropped."""
        self._hold()
        if self.joint is not None:
            awaited = self._awaiting_backward()
            self.joint.set_weight(1.0 if awaited is None else awaited.weight)
