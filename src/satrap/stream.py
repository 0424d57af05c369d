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

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.batch import Batch, Held, Sequence, gradient_array
from satrap.dense import DenseParameters
from satrap.errors import StreamError
from satrap.inputs import Inputs, Position
from satrap.pipeline import Pipeline, Seconds, Update
from satrap.report import Counters
from satrap.sync import Gate
from satrap.threads import torch_threads
from satrap.worker import Worker

_NO_LOADER = (
    "a stream cannot be read through a torch DataLoader: its batches are whole, and their gradients come back to this "
    "process; put the DataLoader inside, embeddings.stream(satrap.Iterable(loader)), and loop over the stream itself"
)
_WHY = {
    "zero_grad": "zero_grad() cleared its gradients before optimizer.step()",
    "overflow": "a GradScaler found an overflow and skipped its step",
}


class Lookup:
    """Looks a batch up and makes tensors of it, on the device if there is one.

    Copies go through pinned memory on a stream of their own: neither the dense network nor the tables wait for them.
    """

    def __init__(
        self,
        worker: Worker,
        device: torch.device,
        *,
        train: bool,
        overlap: bool,
        dense: DenseParameters | None = None,
    ) -> None:
        """dense: of a training stream whose dense parameters are on the servers."""
        self._worker, self._device, self._train, self._dense = worker, device, train, dense
        same = not overlap and worker.num_threads == torch.get_num_threads()
        self._threads: Callable[[], AbstractContextManager[None]] = torch_threads if same else nullcontext
        on_gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if on_gpu else None  # of batches on their way to the device
        self._home = torch.cuda.Stream(device) if on_gpu else None  # of gradients on their way back

    def __call__(self, inputs: Inputs, step: int, oldest_open: int, ahead: Held | None = None) -> Held:
        """ahead: what `read_ahead` made of these inputs, if it did."""
        with self._threads():
            if self._train:
                if self._dense is not None:
                    self._dense.look_up(step, oldest_open, self._place)
                found = self._worker.lookup(inputs, step=step, oldest_open=oldest_open, train=True)
            else:
                found = self._worker.lookup(inputs, step=None, oldest_open=None, train=False)
        held = self.read_ahead(inputs, step) if ahead is None else ahead
        held.ticket = found.ticket
        held.sequences = {
            name: Sequence(self._place(values), self._place(found.masks[name]))
            for name, values in found.sequences.items()
        }
        held.embeddings = self._place(found.block)  # last: it is there now
        return held

    def read_ahead(self, inputs: Inputs, step: int) -> Held:
        """A batch without its rows."""
        dense = np.empty((inputs.batch_size, 0), np.float32) if inputs.dense is None else inputs.dense
        label = None if inputs.label is None else self._place(inputs.label)
        return Held(inputs, step if self._train else 0, self._place(dense), label)

    def _place(self, array: NDArray[Any]) -> Tensor:
        host = torch.from_numpy(array)
        if self._side is None:
            return host
        with torch.cuda.stream(self._side):
            return host.pin_memory().to(self._device, non_blocking=True)

    def arrive(self, held: Held) -> None:
        """In the user's thread: the current stream awaits the copies of what is here."""
        if self._side is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._side)
            for tensor in held.tensors:
                tensor.record_stream(current)

    def hand_over(self, held: Held) -> None:
        """In the user's thread, as it begins to use the rows: the leaves begin to collect gradients."""
        for leaf in held.leaves:
            leaf.requires_grad_()
        if self._dense is not None:
            self._dense.hand_over(held.step)

    def forget(self, step: int) -> None:
        """No batch of the step will be used."""
        if self._dense is not None:
            self._dense.forget(step)

    def finish(self) -> None:
        """Every update is applied and no lookup will follow: the dense parameters are the latest."""
        if self._dense is not None:
            self._dense.refresh()
            self._dense.rest()

    def update_with(self, batches: list[Held], lrs: dict[str, float], scale: float) -> Callable[[], None]:
        """What applies the batches' gradients, in whatever thread."""
        dense = None if self._dense is None else self._dense.gradients(scale)  # now: the next backward pass is near
        ready = torch.cuda.current_stream(self._device).record_event() if self._home is not None else None

        def apply() -> None:
            if batches[0].ticket.used:  # an interrupt came right after it
                return
            blocks, sequences = self._bring_home(batches, ready)
            if self._dense is not None and dense is not None:
                with self._on_home():
                    values = dense.values.cpu().numpy()
                self._dense.update(dense, values, batches[-1].step)
            with self._threads():
                self._worker.update(
                    [batch.ticket for batch in batches],
                    blocks,
                    sequences,
                    step=batches[-1].step,
                    lrs=lrs,
                    scale=scale,
                )

        return apply

    def _bring_home(
        self, batches: list[Held], ready: torch.cuda.Event | None
    ) -> tuple[list[NDArray[np.float32] | None], list[dict[str, NDArray[np.float32] | None]]]:
        """The gradients in CPU memory; from a device on a stream of their own, which waits for `ready` alone."""
        if ready is not None:
            ready.synchronize()
        with self._on_home():
            blocks = [gradient_array(batch.embeddings) for batch in batches]
            return blocks, [{name: gradient_array(s.values) for name, s in b.sequences.items()} for b in batches]

    def _on_home(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._home is None else torch.cuda.stream(self._home)


class Stream(Iterator[Batch]):
    """See the file's docstring. Made by `Embeddings.stream`."""

    def __init__(
        self,
        inputs: Iterator[Inputs],
        worker: Worker,
        gate: Gate,
        *,
        train: bool,
        device: torch.device,
        overlap: bool,
        on_hold: Callable[[list[Tensor]], None],
        position: Position | None = None,
        all_have: Callable[[bool], bool] | None = None,
        dense: DenseParameters | None = None,
    ) -> None:
        """on_hold is told the leaves of the held batches whenever they change.

        all_have: of several trainers, whether each has another batch; told whether this one has.
        dense: the dense parameters, if they are on the servers.
        """
        self.dropped: Counter[str] = Counter()
        """Batches looked up and never updated, by cause."""
        self.position = position
        """Where the source stands after the last batch that was updated or dropped."""
        self.last_step = gate.next_step - 1
        """The last step that was updated or dropped."""
        self._inputs, self._train, self._worker = inputs, train, worker
        self._gate, self._on_hold, self._all_have = gate, on_hold, all_have
        self._held: list[Held] = []  # looked up, neither updated nor dropped
        self._ahead: deque[Held] = deque()  # behind them, handed over before their lookup
        self._handed: Counter[int] = Counter()  # batches handed over, by step
        self._stepped: set[int] = set()  # steps of which an update was handed on
        self._last_stepped = 0  # of them
        self._dense_at_servers = dense is not None
        self._ended = False
        self._left: str | None = None  # why there will be no other batch
        self._look_up = Lookup(worker, device, train=train, overlap=overlap, dense=dense)
        remote = train and worker.remote  # an evaluation has no updates
        self._pipeline: Pipeline[Held] = Pipeline(
            inputs, gate, self._look_up, read_ahead=self._look_up.read_ahead, overlap=overlap, remote=remote
        )

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
        rows = {"malformed": getattr(self._inputs, "skipped", 0), "no_label": getattr(self._inputs, "dropped", 0)}
        return Counters(
            staleness=self.staleness_seen,
            stages={"read": seconds.read, "lookup": seconds.lookup, "update": seconds.update, "wait": seconds.wait},
            inside=seconds.inside,
            lost={f"batches/{cause}": count for cause, count in self.dropped.items()}
            | failed
            | {f"rows/{cause}": count for cause, count in rows.items() if count},
        )

    def __iter__(self) -> Self:
        if torch.utils.data.get_worker_info() is not None:
            raise StreamError(_NO_LOADER)
        if self._ended:
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
            return len(self._inputs)  # type: ignore[arg-type]  # some have it
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
        held = self._pipeline.next()
        if self._all_have is not None:
            self._worker.settle()  # before anybody may wait here for us
            if not self._all_have(held is not None) and held is not None:
                self._give_back(held)
                held = None
        if held is None:
            self._end()
            raise StopIteration
        self._look_up.arrive(held)
        if not self._train:
            self._pipeline.drop(self._gate.oldest_open)
            return held.hand_over(None)
        self._handed[held.step] += 1
        self._ahead.append(held)
        self._collect()  # in order: what came before it may be there by now
        return held.hand_over(self._use, with_dense=self._dense_at_servers)

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
            if self._handed[step] < self._gate.accumulate and not self._ended and not self._pipeline.is_last():
                raise StreamError(
                    f"step {step}: optimizer.step() after {self._handed[step]} of {self._gate.accumulate} batches; "
                    f"step after every {self._gate.accumulate}th, or say how many with stream(accumulate=...)"
                )
        apply = self._look_up.update_with(taken, lrs, scale)
        self._stepped.update(batch.step for batch in taken)
        self._last_stepped = max(self._last_stepped, taken[-1].step)
        self._pipeline.submit(Update(steps=[batch.step for batch in taken], apply=apply))
        self._forget(taken)
        for batch in taken:
            batch.forbid_gradients(
                f"step {batch.step}: a loss reached its batch after optimizer.step() had taken it; add the losses up "
                "before the step, or look the batch up again"
            )
        if self._ended:
            self._pipeline.drain()
            self._close_if_done()
        return True

    def drop(self, cause: str) -> None:
        """The held batches that have gradients will not be updated."""
        self._drop([batch for batch in self._held if batch.has_gradient], cause)
        self._close_if_done()

    def drain(self) -> None:
        """Returns once every update handed to the tables is applied."""
        while not self._pipeline.drain():  # a batch that was passed over keeps others from being looked up, in order
            self._collect()
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
        first = self._left is None
        if first:
            self._left = why
            self._drop_all(why)
        try:
            self._pipeline.finish()
            if first:
                self._look_up.finish()
        finally:
            self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with nullcontext() if kind is None else suppress(Exception):  # not over the user's own error
            self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pipeline"):
            self._pipeline.close()

    def _use(self, held: Held) -> None:
        """The user begins to use the rows of a batch. It is looked up now, if it was handed over ahead of that."""
        if held.lost is not None:
            raise StreamError(held.lost)
        if self._ahead:  # perhaps with this one in it
            while not self._pipeline.bring(held.is_there):
                self._collect()
                self._make_room(held)
            self._collect()
            self._look_up.arrive(held)
        self._look_up.hand_over(held)
        held.used, held.trains = True, torch.is_grad_enabled()
        self._hold(self._held)

    def _collect(self) -> None:
        """What was handed over ahead and is looked up now is held as the others are."""
        while self._ahead and self._ahead[0].is_there():
            self._held.append(self._ahead.popleft())

    def _make_room(self, wanted: Held) -> None:
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
        self._pipeline.drain()
        self._collect()
        self._drop([held for held in self._held if held.is_passed_over], "unused", "it was let go of unused")
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._ended and not self._held and not self._ahead:
            if self._all_have is not None:
                self._worker.settle()  # others wait for the last step, and no lookup comes that would tell them
            self.close()

    def _drop_all(self, why: str) -> None:
        """The stream is closed."""
        self._collect()
        used = [held for held in self._held if held.used]
        self._drop(used, "closed", why)
        self._drop(self._held, "unused", why)
        while self._ahead:
            held = self._ahead.popleft()
            self.dropped["unused"] += 1
            held.lose(f"step {held.step}: its batch was dropped: {why}")

    def _drop(self, batches: list[Held], cause: str, why: str | None = None) -> None:
        """why: the cause, told to a backward pass that comes too late."""
        for batch in batches:
            if batch.ticket.used:  # an interrupt came right after its update
                self._stepped.add(batch.step)
            else:
                self.dropped[cause] += 1
                self._worker.drop(batch.ticket)
            self._pipeline.drop(batch.step)
            batch.lose(f"step {batch.step}: its batch was dropped: {why or _WHY[cause]}")
        self._forget(batches)
        for step in {batch.step for batch in batches} - self._stepped:
            whole = self._ended or self._handed[step] == self._gate.accumulate
            behind = any(batch.step == step for batch in [*self._held, *islice(self._ahead, 1)])
            if whole and not behind:
                self._look_up.forget(step)
                self._worker.skip(step)

    def _give_back(self, held: Held) -> None:
        """Another trainer is at its end, and a step takes all of them: this batch was never handed over."""
        self.dropped["uneven"] += 1
        if not self._pipeline.take_back(held):
            self._pipeline.bring(held.is_there)
            self._worker.drop(held.ticket)
            self._pipeline.drop(held.step)

    def _forget(self, batches: list[Held]) -> None:
        """These are updated or dropped."""
        if not batches:
            return
        known = [batch.inputs.position for batch in batches if batch.inputs.position is not None]
        self.position = max([*known, *([] if self.position is None else [self.position])], default=None)
        self.last_step = max(self.last_step, *(batch.step for batch in batches))
        self._hold([batch for batch in self._held if batch not in batches])

    def _hold(self, held: list[Held]) -> None:
        self._held = held
        if self._left is None:
            self._on_hold([leaf for each in held if each.used for leaf in each.leaves])
