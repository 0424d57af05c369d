"""The stream of batches that a training loop runs over: the pipeline's table work around the user's own torch step.

    for batch in embeddings.stream(data):        read, look up, hand over
        loss = ...; loss.backward()              gradients collect in the batch's leaves
        optimizer.step()                         `update`: the batches that were reached go back to the tables

A batch handed over is held until it is updated or dropped. It is dropped, and counted by cause, if its gradients are
cleared without a step ("zero_grad"), if an overflow skips its step ("overflow"), or if no loss reached it and the gate
needs its place ("unused"). A batch whose gradients wait for a step and close the gate is an error, not a wait for ever.

Where there is no core to spare (dense network and tables on the same cores), table work is done inside next() and
step(), by all threads; with a device, or with staleness and cores that torch leaves free, it runs beside the dense
network.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.batch import Batch, Sequence, gradient_array
from satrap.dense import DenseParameters
from satrap.errors import StreamError
from satrap.inputs import Inputs, Position
from satrap.pipeline import Pipeline, Seconds, Update
from satrap.report import Counters
from satrap.sync import Gate
from satrap.threads import torch_threads
from satrap.worker import Worker


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

    def __call__(self, inputs: Inputs, step: int, oldest_open: int) -> Batch:
        with self._threads():
            if self._train:
                if self._dense is not None:
                    self._dense.look_up(step, oldest_open, self._place)
                found = self._worker.lookup(inputs, step=step, oldest_open=oldest_open, train=True)
            else:
                found = self._worker.lookup(inputs, step=None, oldest_open=None, train=False)
        return Batch(
            inputs,
            step if self._train else 0,
            found.ticket,
            dense=self._place(np.empty((inputs.batch_size, 0), np.float32) if inputs.dense is None else inputs.dense),
            label=None if inputs.label is None else self._place(inputs.label),
            embeddings=self._place(found.block),
            sequences={
                name: Sequence(self._place(values), self._place(found.masks[name]))
                for name, values in found.sequences.items()
            },
        )

    def _place(self, array: NDArray[Any]) -> Tensor:
        host = torch.from_numpy(array)
        if self._side is None:
            return host
        with torch.cuda.stream(self._side):
            return host.pin_memory().to(self._device, non_blocking=True)

    def hand_over(self, batch: Batch) -> None:
        """In the user's thread: the copy is awaited by the current stream, and the leaves begin to collect."""
        if self._side is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._side)
            for tensor in batch.tensors:
                tensor.record_stream(current)
        if self._train:
            for leaf in batch.leaves:
                leaf.requires_grad_()
        if self._dense is not None:
            self._dense.hand_over(batch.step)

    def finish(self) -> None:
        """Every update is applied and no lookup will follow: the dense parameters are the latest."""
        if self._dense is not None:
            self._dense.refresh()
            self._dense.rest()

    def update_with(self, batches: list[Batch], lrs: dict[str, float], scale: float) -> Callable[[], None]:
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
        self, batches: list[Batch], ready: torch.cuda.Event | None
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
        self._held: list[Batch] = []
        self._newest: Batch | None = None  # what the user may be at
        self._handed: Counter[int] = Counter()  # batches handed over, by step
        self._stepped: set[int] = set()  # steps of which an update was handed on
        self._ended = False
        self._left: str | None = None  # why there will be no other batch
        self._look_up = Lookup(worker, device, train=train, overlap=overlap, dense=dense)
        remote = train and worker.remote  # an evaluation has no updates
        self._pipeline: Pipeline[Batch] = Pipeline(inputs, gate, self._look_up, overlap=overlap, remote=remote)

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

    def __next__(self) -> Batch:
        if self._left is not None and not self._ended:
            raise StreamError(self._left)
        while self._train and self._pipeline.needs_user():
            self._make_room()
        batch = self._pipeline.next()
        if self._all_have is not None:
            self._worker.settle()  # before anybody may wait here for us
            if not self._all_have(batch is not None) and batch is not None:
                self._give_back(batch)
                batch = None
        if batch is None:
            self._ended = True
            self._pipeline.drain()
            if not any(held.has_gradient for held in self._held):
                self.close()
            raise StopIteration
        self._look_up.hand_over(batch)
        if self._train:
            self._handed[batch.step] += 1
            self._newest = batch
            self._hold([*self._held, batch])
        else:
            self._pipeline.drop(self._gate.oldest_open)
        return batch

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
        if self._newest in taken:
            self._newest = None
        for step in {batch.step for batch in taken}:
            if self._handed[step] < self._gate.accumulate and not self._ended and not self._pipeline.is_last():
                raise StreamError(
                    f"step {step}: optimizer.step() after {self._handed[step]} of {self._gate.accumulate} batches; "
                    f"step after every {self._gate.accumulate}th, or say how many with stream(accumulate=...)"
                )
        apply = self._look_up.update_with(taken, lrs, scale)
        self._stepped.update(batch.step for batch in taken)
        self._pipeline.submit(Update(steps=[batch.step for batch in taken], apply=apply))
        self._forget(taken)
        for batch in taken:
            batch.forbid_gradients()
        if self._ended:
            self._pipeline.drain()
            self._look_up.finish()
        return True

    def drop(self, cause: str) -> None:
        """The held batches that have gradients will not be updated."""
        self._drop([batch for batch in self._held if batch.has_gradient], cause)

    def drain(self) -> None:
        """Returns once every update handed to the tables is applied."""
        while not self._pipeline.drain():  # a batch that was passed over keeps others from being looked up, in order
            passed = [batch for batch in self._held if not batch.has_gradient and batch is not self._newest]
            if not passed:
                raise StreamError(
                    f"an update waits for lookups that wait for step {self._held[0].step}: step it, or drop it by "
                    "zero_grad(), before a checkpoint"
                )
            self._drop(passed[:1], "unused")

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
            self._drop(self._held, "closed")
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

    def _make_room(self) -> None:
        oldest = self._held[0]
        if oldest.has_gradient:
            raise StreamError(
                f"step {oldest.step}: a loss reached its batch and optimizer.step() was not called, so with staleness "
                f"{self._gate.staleness} no other batch may be looked up; call step() of what embeddings.optimizer() "
                "returned, or its zero_grad() to drop the batch, or say stream(accumulate=N) to step once for N batches"
            )
        self._drop([batch for batch in self._held if batch.step == oldest.step and not batch.has_gradient], "unused")

    def _drop(self, batches: list[Batch], cause: str) -> None:
        for batch in batches:
            if batch.ticket.used:  # an interrupt came right after its update
                self._stepped.add(batch.step)
            else:
                self.dropped[cause] += 1
                self._worker.drop(batch.ticket)
            self._pipeline.drop(batch.step)
        self._forget(batches)
        for step in {batch.step for batch in batches} - self._stepped:
            whole = self._ended or self._handed[step] == self._gate.accumulate
            if whole and not any(batch.step == step for batch in self._held):
                self._worker.skip(step)

    def _give_back(self, batch: Batch) -> None:
        """Another trainer is at its end, and a step takes all of them: this batch was never handed over."""
        self.dropped["uneven"] += 1
        self._worker.drop(batch.ticket)
        self._pipeline.drop(batch.step)

    def _forget(self, batches: list[Batch]) -> None:
        """These are updated or dropped."""
        if not batches:
            return
        known = [batch.position for batch in batches if batch.position is not None]
        self.position = max([*known, *([] if self.position is None else [self.position])], default=None)
        self.last_step = max(self.last_step, *(batch.step for batch in batches))
        self._hold([batch for batch in self._held if batch not in batches])

    def _hold(self, batches: list[Batch]) -> None:
        self._held = batches
        if self._left is None:
            self._on_hold([leaf for batch in batches for leaf in batch.leaves])
