"""The stream of batches that a training loop runs over: the pipeline's table work around the user's own torch step.

    for batch in embeddings.stream(data):        read, look up, hand over
        loss = ...; loss.backward()              gradients collect in the batch's leaves
        optimizer.step()                         `update`: the batches that were reached go back to the tables

A loop may ask for batches before it has stepped the earlier ones. Those that the staleness allows come with their rows;
a batch beyond comes without, and is looked up when its rows are first used or, in a thread, as soon as the gate allows.
Lookups keep the order of the batches, so a loop that reads ahead trains as one that does not.

A batch handed over is held until it is updated or dropped. It is dropped, and counted by cause, if its gradients are
cleared without a step ("zero_grad"), if an overflow skips its step ("overflow"), if a later batch needs its place in
the gate and the user never used it, or let go of it before a loss came ("unused"), or if the stream is closed
("closed"; "unused" if its rows never were). Nothing of a dropped batch is lost silently: to use its rows, or a backward
pass to them, is an error that says why. So is the use of a batch while an earlier one that the user is at closes the
gate.

Where there is no core to spare (dense network and tables on the same cores), table work is done inside next() and
step(), by all threads; with a device, or with staleness and cores that torch leaves free, it runs beside the dense
network.
"""

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import NoReturn, Self

import torch
from torch import Tensor

from satrap.collected import close_when_collected
from satrap.data.inputs import Inputs, Position
from satrap.data.left_out import LeftOut
from satrap.errors import StreamError
from satrap.interrupts import Uninterrupted
from satrap.monitor.report import Counters
from satrap.train.async_dense import DenseParameters
from satrap.train.batch import Batch, InFlightBatch
from satrap.train.batch_lookup import BatchLookup
from satrap.train.joint_step import JointStep, Padded, described
from satrap.train.pipeline_stages import Seconds, Update
from satrap.train.prefetch_pipeline import PrefetchPipeline
from satrap.train.staleness_gate import StalenessGate
from satrap.worker.worker import Ticket, Worker

_NO_LOADER = (
    "a stream cannot be read through a torch DataLoader: its batches are whole, and their gradients come back to this "
    "process; put the DataLoader inside, embeddings.stream(satrap.Iterable(loader)), and loop over the stream itself"
)
_EVALUATION_AHEAD = 2  # batches looked up ahead of the dense network where that overlaps
_WHY = {
    "zero_grad": "zero_grad() cleared its gradients before optimizer.step()",
    "overflow": "a GradScaler found an overflow and skipped its step",
}


@dataclass(frozen=True, slots=True)
class JointStream:
    """What a stream of one of several trainers that step together asks of the others, and tells its optimizer."""

    step: Callable[[tuple[int, int, int]], JointStep]
    """The step that a batch, as `described`, makes with the others'. All trainers call it, for each batch."""
    weigh: Callable[[float], None]
    """The batch whose backward pass comes next has this weight."""


class Stream(Iterator[Batch]):
    """See the file's docstring. Made by `Embeddings.stream`."""

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
        joint: JointStream | None = None,
        dense: DenseParameters | None = None,
    ) -> None:
        """on_hold is told the leaves of the held batches whenever they change.

        joint: of several trainers that step together; then the inputs are `Padded`.
        dense: the dense parameters, if they are on the servers.
        """
        self.dropped: Counter[str] = Counter()
        """Batches looked up and never updated, by cause."""
        self.position = position
        """Where the source stands after the last batch that was updated or dropped."""
        self.last_step = gate.next_step - 1
        """The last step that was updated or dropped."""
        self._inputs, self._train, self._worker = inputs, train, worker
        self._gate, self._on_hold, self._joint = gate, on_hold, joint
        self._held: list[InFlightBatch] = []  # looked up, neither updated nor dropped
        self._ahead: deque[InFlightBatch] = deque()  # behind them, handed over before their lookup
        self._taken: InFlightBatch | None = None  # from the pipeline, and not handed over yet
        self._length: int | None = None  # if it was asked for
        self._joined = False  # the other trainers know of it
        self._let_go: deque[Ticket] = deque()  # of dropped batches, to be given up
        self._handed: Counter[int] = Counter()  # batches handed over, by step
        self._stepped: set[int] = set()  # steps of which an update was handed on
        self._last_stepped = 0  # of them
        self._dense_at_servers = dense is not None
        self._ended = self._finished = False
        self._left: str | None = None  # why there will be no other batch
        self._look_up = BatchLookup(worker, device, train=train, overlap=overlap, dense=dense)
        remote = train and worker.remote  # an evaluation has no updates
        with Uninterrupted():
            self._pipeline: PrefetchPipeline[InFlightBatch] = PrefetchPipeline(
                inputs, gate, self._look_up, read_ahead=self._look_up.read_ahead, overlap=overlap, remote=remote
            )
            close_when_collected(self, self._pipeline.close)

    @classmethod
    def evaluation(cls, inputs: Iterator[Inputs], worker: Worker, device: torch.device, *, overlap: bool) -> "Stream":
        """A stream that looks rows up and changes none."""
        gate = StalenessGate(_EVALUATION_AHEAD if overlap else 0)
        return cls(inputs, worker, gate, train=False, device=device, overlap=overlap, on_hold=lambda _: None)

    @property
    def staleness_seen(self) -> dict[int, int]:
        """How many batches were looked up while n earlier steps were not yet applied."""
        return dict(sorted(self._gate.seen.items()))

    @property
    def seconds(self) -> Seconds:
        """Time spent per stage so far."""
        return self._pipeline.seconds

    def counters(self) -> Counters:
        """What this stream did so far."""
        seconds = self.seconds
        failed = {"batches/failed": self._pipeline.failed} if self._pipeline.failed else {}
        return Counters(
            staleness=self.staleness_seen,
            stages={"read": seconds.read, "lookup": seconds.lookup, "update": seconds.update, "wait": seconds.wait},
            inside=seconds.inside,
            lost={f"batches/{cause}": count for cause, count in self.dropped.items()}
            | failed
            | {f"rows/{cause}": count for cause, count in asdict(self._left_out()).items() if count},
        )

    def __iter__(self) -> Self:
        if torch.utils.data.get_worker_info() is not None:
            raise StreamError(_NO_LOADER)
        handed = sum(self._handed.values())
        if self._ended or 0 < handed == self._length:  # who knows the length stops by it, and does not ask for the end
            raise StreamError(
                "this stream has ended, and a stream is one pass over its data: begin another one with "
                "embeddings.stream(...), or say epochs=... in the source"
            )
        return self

    def __getitem__(self, _: object) -> NoReturn:
        """For torch's DataLoader, which takes whatever has no other sign for a dataset of samples."""
        raise StreamError(_NO_LOADER)

    def __len__(self) -> int:
        """The batches of this stream, from its first one on; TypeError where the source cannot say."""
        try:
            self._length = len(self._inputs)  # type: ignore[arg-type]  # some have it
            return self._length
        except TypeError as error:
            raise TypeError(
                f"the length of this stream is not known: {error} (was it asked for by a torch DataLoader? It cannot "
                "read a stream: put it inside, embeddings.stream(satrap.Iterable(loader)))"
            ) from None

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        if self._left is not None:
            raise StreamError(self._left)
        if self._train and (self._held or self._ahead):
            self._pass_over()
        if self._taken is None:  # else an interrupt came before it could be handed over
            self._pipeline.next(self._take)
        held = self._taken
        if held is None or not self._takes_part(held):
            self._end()
            raise StopIteration
        self._look_up.arrive(held)
        with Uninterrupted():
            self._taken, self._joined = None, False
            if not self._train:
                self._pipeline.drop(self._gate.oldest_open)
                return held.hand_over(None)
            self._handed[held.step] += 1
            if isinstance(self._inputs, Padded):
                self._inputs.hand_over(held.inputs)
            self._ahead.append(held)
            self._collect()  # in order: what came before it may be there by now
            return held.hand_over(self._use, with_dense=self._dense_at_servers)

    def _take(self, held: InFlightBatch) -> None:
        self._taken = held

    def update(self, lrs: dict[str, float], scale: float) -> bool:
        """One optimizer step: the gradients of all held batches that have some go to the tables. False if none has."""
        taken = [batch for batch in self._held if batch.has_gradient]
        if not taken:
            return False
        twice = self._stepped.intersection(batch.step for batch in taken)
        if twice:
            raise StreamError(
                f"step {min(twice)} was stepped already, with some of its batches; step once for all of them, after "
                "the backward pass of each"
            )
        for step in {batch.step for batch in taken}:
            if self._handed[step] < self._gate.accumulate and not self._ended and not self._is_last():
                raise StreamError(
                    f"step {step}: optimizer.step() after {self._handed[step]} of {self._gate.accumulate} batches; "
                    f"step after every {self._gate.accumulate}th, or say how many with stream(accumulate=...)"
                )
        apply = self._look_up.update_with(taken, lrs, scale)
        steps = [batch.step for batch in taken]
        self._pipeline.submit(Update(steps=steps, apply=apply), lambda: self._handed_on(taken))
        if self._ended:
            self._pipeline.drain()
            self._close_if_done()
        return True

    def _is_last(self) -> bool:
        """Whether this trainer has no other batch. Reads one ahead to know it."""
        if self._pipeline.is_last():
            return True
        return isinstance(self._inputs, Padded) and self._inputs.num_left == 0

    def _handed_on(self, batches: list[InFlightBatch]) -> None:
        """The pipeline has taken over the update of these."""
        self._stepped.update(batch.step for batch in batches)
        self._last_stepped = max(self._last_stepped, batches[-1].step)
        self._forget(batches)
        for batch in batches:
            batch.forbid_gradients(
                f"step {batch.step}: a loss reached its batch after optimizer.step() had taken it; add the losses up "
                "before the step, or look the batch up again"
            )

    def drop(self, cause: str) -> None:
        """The held batches that have gradients will not be updated."""
        self._drop([batch for batch in self._held if batch.has_gradient], cause)
        self._close_if_done()

    def drain(self) -> None:
        """Returns once every update handed to the tables is applied."""
        while not self._pipeline.drain():  # a batch that was passed over keeps others from being looked up, in order
            self._collect()
            if self._taken is not None and self._taken.is_there():
                with Uninterrupted():
                    self._settle([self._taken], "unused", "next() was interrupted, and a checkpoint needed its place")
                    self._taken = None
                self._give_up()
                continue
            passed = [batch for batch in self._held if not batch.has_gradient and batch.step < self._last_stepped]
            if not passed:
                raise StreamError(
                    f"an update waits for lookups that wait for step {self._held[0].step}: step it, or drop it by "
                    "zero_grad(), before a checkpoint"
                )
            self._drop(passed[:1], "unused", f"step {self._last_stepped} was stepped before it")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Every update handed to the tables is applied before, and no table work runs inside."""
        self.drain()
        with self._pipeline.paused():
            yield

    def close(self, why: str = "this stream was closed") -> None:
        """Ends the stream: updates handed over are applied, batches still held are dropped.

        why: what its next batch is refused with.
        """
        if self._left is None:
            with Uninterrupted():
                self._left = why
                self._drop_all(why)
        try:
            self._give_up()
            self._pipeline.finish()
            if not self._finished:
                try:
                    self._look_up.finish()
                except KeyboardInterrupt:
                    raise
                except BaseException:
                    self._finished = True  # the user knows
                    raise
                self._finished = True
        finally:
            self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with nullcontext() if kind is None else suppress(Exception):  # not over the user's own error
            self.close()

    def _use(self, held: InFlightBatch) -> None:
        """The user begins to use the rows of a batch. It is looked up now, if it was handed over ahead of that."""
        if held.lost is not None:
            raise StreamError(held.lost)
        if self._ahead:  # perhaps with this one in it
            while not self._pipeline.bring(held.is_there):
                self._collect()
                self._make_room(held)
            self._collect()
            self._look_up.arrive(held)
        with Uninterrupted():
            self._weigh(held)
            self._look_up.hand_over(held)
            held.used, held.trains = True, torch.is_grad_enabled()
            self._hold(self._held)

    def _weigh(self, held: InFlightBatch) -> None:
        """The next backward pass is of this batch."""
        if self._joint is None:
            return
        other = self._awaited()
        if other is not None and other is not held and other.weight != held.weight:
            raise StreamError(
                f"step {held.step}: its batch has {held.inputs.batch_size} samples, and that of step {other.step}, "
                f"which waits for its backward pass, has {other.inputs.batch_size}; several trainers weigh each batch "
                "by its samples: call backward() for a batch before the next one is used"
            )
        self._joint.weigh(held.weight)

    def _awaited(self) -> InFlightBatch | None:
        """The first batch that is used and that no backward pass has reached."""
        return next((each for each in self._held if each.used and not each.has_gradient), None)

    def _collect(self) -> None:
        """What was handed over ahead and is looked up now is held as the others are."""
        if self._ahead:
            with Uninterrupted():
                while self._ahead and self._ahead[0].is_there():
                    self._held.append(self._ahead.popleft())

    def _make_room(self, wanted: InFlightBatch) -> None:
        """The oldest step closes the gate for a batch that is used: it is dropped if the user skipped it."""
        step, staleness = self._held[0].step, self._gate.staleness
        oldest = [batch for batch in self._held if batch.step == step]
        if any(batch.may_get_gradient for batch in oldest):
            reached = any(batch.has_gradient for batch in oldest)
            what, drop = ("a loss reached", "zero_grad()") if reached else ("the loop used", "`del` of the batch")
            raise StreamError(
                f"step {wanted.step}: its batch cannot be used yet: {what} the batch of step {step} and "
                f"optimizer.step() was not called, and the staleness is {staleness}; call step() of what "
                f"embeddings.optimizer() returned before the next batch is used, or drop the earlier one by {drop}, or "
                f"say Embeddings(staleness={wanted.step - step}), or stream(accumulate=N) to step once for N batches"
            )
        self._drop(
            oldest,
            "unused",
            f"the batch of step {wanted.step} was used before it was stepped, and the staleness is {staleness}: call "
            f"backward and optimizer.step() before the next batch is used, or say Embeddings(staleness="
            f"{wanted.step - step})",
        )

    def _pass_over(self) -> None:
        """Settles batches that the user let go of unused, so that no more is held than he holds."""
        while self._held or self._ahead:
            self._collect()
            first = self._held[0] if self._held else self._ahead[0]
            if not first.is_passed_over:
                return
            if not self._held:
                if not self._pipeline.bring(first.is_there):
                    return
            elif self._pipeline.needs_user():
                self._drop([first], "unused", "it was let go of unused")
            else:
                return

    def _end(self) -> None:
        """There is no other batch; those that were handed over may still be stepped."""
        self._ended = True
        left_out = self._left_out()
        if self._train and left_out.total > left_out.short:  # of short batches there is one in an epoch, as asked
            warnings.warn(f"{left_out.total:,} samples of the source were not trained on: {left_out}", stacklevel=3)
        self._pipeline.drain()
        self._collect()
        self._drop([held for held in self._held if held.is_passed_over], "unused", "it was let go of unused")
        self._close_if_done()

    def _left_out(self) -> LeftOut:
        """What the source left out so far, if it counts that."""
        return getattr(self._inputs, "left_out", LeftOut())

    def _close_if_done(self) -> None:
        if self._ended and not self._held and not self._ahead:
            if self._joint is not None:
                self._worker.settle()  # others wait for the last step, and no lookup comes that would tell them
            self.close()

    def _drop_all(self, why: str) -> None:
        """The stream is closed."""
        self._collect()
        used = [held for held in self._held if held.used]
        self._settle(used, "closed", why)
        self._settle(self._held, "unused", why)
        while self._ahead:
            held = self._ahead.popleft()
            self.dropped["unused"] += not held.is_padding
            held.lose(f"step {held.step}: its batch was dropped: {why}")

    def _drop(self, batches: list[InFlightBatch], cause: str, why: str | None = None) -> None:
        """why: the cause, told to a backward pass that comes too late."""
        with Uninterrupted():
            self._settle(batches, cause, why)
        self._give_up()

    def _settle(self, batches: list[InFlightBatch], cause: str, why: str | None) -> None:
        """These will not be updated; what that means for their rows is left to `_give_up`."""
        for batch in batches:
            if not batch.is_padding:
                self.dropped[cause] += 1
                self._let_go.append(batch.ticket)
            self._pipeline.drop(batch.step)
            batch.lose(f"step {batch.step}: its batch was dropped: {why or _WHY[cause]}")
        self._forget(batches)
        for step in {batch.step for batch in batches} - self._stepped:
            whole = self._ended or self._handed[step] == self._gate.accumulate
            behind = any(batch.step == step for batch in [*self._held, *islice(self._ahead, 1)])
            if whole and not behind:
                self._look_up.forget(step)
                self._worker.skip(step)

    def _give_up(self) -> None:
        """Tells the worker of dropped batches; again, if that was interrupted."""
        while self._let_go:
            if not self._let_go[0].used:
                self._worker.drop(self._let_go[0])
            self._let_go.popleft()

    def _takes_part(self, held: InFlightBatch) -> bool:
        """Whether any trainer has samples for the step that this batch is the next of."""
        if self._joint is None or self._joined:
            return True
        assert isinstance(self._inputs, Padded)
        if not self._inputs.is_stopped:  # else an interrupt came while it ended
            self._worker.settle()  # before another trainer may wait here for this one
            with Uninterrupted():
                step = self._joint.step(described(held.inputs))
                if step.num_samples:
                    self._look_up.join(held, step)
                    self._joined = True
                    return True
                self._inputs.stop()
        while self._taken is not None:  # this batch, and what was read behind it: all of it is padding
            if not self._pipeline.take_back(self._taken):
                self._pipeline.drop(self._taken.step)
            self._taken = None
            self._pipeline.next(self._take)
        return False

    def _forget(self, batches: list[InFlightBatch]) -> None:
        """These are updated or dropped."""
        if not batches:
            return
        known = [batch.inputs.position for batch in batches if batch.inputs.position is not None]
        self.position = max([*known, *([] if self.position is None else [self.position])], default=None)
        self.last_step = max(self.last_step, *(batch.step for batch in batches))
        self._hold([batch for batch in self._held if batch not in batches])
        if self._joint is not None:
            awaited = self._awaited()
            self._joint.weigh(1.0 if awaited is None else awaited.weight)

    def _hold(self, held: list[InFlightBatch]) -> None:
        self._held = held
        if self._left is None:
            self._on_hold([leaf for each in held if each.used for leaf in each.leaves])
