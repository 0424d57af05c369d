"""What a stream does with one batch: looks it up, makes tensors of it, and brings its gradients home.

It runs in whatever thread the pipeline has for it, but for what says that it is the user's. Knows no order: that is the
pipeline's.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.data.inputs import Inputs
from satrap.train.async_dense import DenseParameters
from satrap.train.batch import InFlightBatch, Sequence, gradient_array
from satrap.train.joint_step import PADDING_ROWS, JointStep, Padding
from satrap.train.torch_threads import torch_threads
from satrap.worker.worker import Worker


class BatchLookup:
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

    def __call__(
        self, inputs: Inputs, step: int, oldest_open: int, ahead: InFlightBatch | None = None
    ) -> InFlightBatch:
        """ahead: what `read_ahead` made of these inputs, if it did."""
        if ahead is not None and ahead.is_there():  # an interrupt came right after it
            return ahead
        if isinstance(inputs, Padding):
            return self._pad(self.read_ahead(inputs, step) if ahead is None else ahead)
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

    def read_ahead(self, inputs: Inputs, step: int) -> InFlightBatch:
        """A batch without its rows."""
        dense = np.empty((inputs.batch_size, 0), np.float32) if inputs.dense is None else inputs.dense
        label = None if inputs.label is None else self._place(inputs.label)
        return InFlightBatch(inputs, step if self._train else 0, self._place(dense), label)

    def _pad(self, held: InFlightBatch) -> InFlightBatch:
        """Zeros in place of the rows of a batch of padding."""
        features = self._worker.features
        for name, feature in features.items():
            if feature.max_length is not None:
                shape = (PADDING_ROWS, feature.max_length, feature.table.dim)
                mask = self._place(np.zeros(shape[:2], np.bool_))
                held.sequences = {**held.sequences, name: Sequence(self._place(np.zeros(shape, np.float32)), mask)}
        held.embeddings = self._place(np.zeros((PADDING_ROWS, features.total_dim), np.float32))
        return held

    def join(self, held: InFlightBatch, step: JointStep) -> None:
        """The batch takes part in a step of several trainers."""
        held.weight = step.weight
        if held.is_padding:
            dense, label = step.padding()
            held.dense, held.label = self._place(dense), None if label is None else self._place(label)

    def _place(self, array: NDArray[Any]) -> Tensor:
        host = torch.from_numpy(array)
        if self._side is None:
            return host
        with torch.cuda.stream(self._side):
            return host.pin_memory().to(self._device, non_blocking=True)

    def arrive(self, held: InFlightBatch) -> None:
        """In the user's thread: the current stream awaits the copies of what is here."""
        if self._side is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._side)
            for tensor in held.tensors:
                tensor.record_stream(current)

    def hand_over(self, held: InFlightBatch) -> None:
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

    def update_with(self, batches: list[InFlightBatch], lrs: dict[str, float], scale: float) -> Callable[[], None]:
        """What applies the batches' gradients, in whatever thread."""
        dense = None if self._dense is None else self._dense.gradients(scale)  # now: the next backward pass is near
        ready = torch.cuda.current_stream(self._device).record_event() if self._home is not None else None
        step = batches[-1].step
        batches = [batch for batch in batches if not batch.is_padding]

        def apply() -> None:
            if not batches:
                self._worker.skip(step)
                self._worker.settle()
                return
            if batches[0].ticket.used:  # an interrupt came right after it
                return
            blocks, sequences = self._bring_home(batches, ready)
            if self._dense is not None and dense is not None:
                with self._on_home():
                    values = dense.values.cpu().numpy()
                self._dense.update(dense, values, step)
            with self._threads():
                self._worker.update(
                    [batch.ticket for batch in batches],
                    blocks,
                    sequences,
                    step=step,
                    lrs=lrs,
                    scale=scale,
                )

        return apply

    def _bring_home(
        self, batches: list[InFlightBatch], ready: torch.cuda.Event | None
    ) -> tuple[list[NDArray[np.float32] | None], list[dict[str, NDArray[np.float32] | None]]]:
        """The gradients in CPU memory; from a device on a stream of their own, which waits for `ready` alone."""
        if ready is not None:
            ready.synchronize()
        with self._on_home():
            blocks = [gradient_array(each.embeddings, each.weight) for each in batches]
            return blocks, [
                {name: gradient_array(sequence.values, each.weight) for name, sequence in each.sequences.items()}
                for each in batches
            ]

    def _on_home(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._home is None else torch.cuda.stream(self._home)
