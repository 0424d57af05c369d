"""The lookup of one batch: reads its rows, copies them to the device as tensors, and sends its gradients back.

The pipeline decides the order and the thread; methods that must run in the user's thread say so.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.features import Features
from satrap.config.tables import Feature
from satrap.data.inputs import Inputs
from satrap.data.item_numbers import numbers_of, padded_numbers
from satrap.device.device_stream import Mark, current_stream, new_stream
from satrap.device.home_memory import DTYPES
from satrap.errors import CapacityError
from satrap.train.ahead_rows import AheadRows, NamedInputs
from satrap.train.batch import InFlightBatch, gradient_array, gradient_of
from satrap.train.dense_strategy import DenseStrategy
from satrap.train.joint_calls import PADDING_ROWS, JointStep
from satrap.train.sequence import JaggedSequence, Sequence
from satrap.train.step_lookups import Lookup, TakenGradients, joined
from satrap.train.torch_threads import torch_threads
from satrap.worker.worker import LookupResult, Worker


class BatchLookup:
    """Looks up batches as tensors, on the device if there is one.

    Copies of batches and gradients have streams of their own, so neither the dense network nor the tables wait for
    them. If the rows are on the device, its work on them runs on a further one, `Worker.device_stream`.
    """

    def __init__(
        self, worker: Worker, device: torch.device, *, train: bool, overlap: bool, dense: DenseStrategy | None = None
    ) -> None:
        """dense: what trains the dense parameters, in a training stream."""
        self._worker, self._device, self._train, self._dense = worker, device, train, dense or DenseStrategy()
        self._dtype = DTYPES[worker.rows.output_dtype]
        same_threads = not overlap and worker.num_threads == torch.get_num_threads()
        self._threads: Callable[[], AbstractContextManager[None]] = torch_threads if same_threads else nullcontext
        self.resolves_ahead = train
        """Whether the part of a lookup that needs no row's values may be done ahead, as far as is known."""
        self._measured: tuple[list[InFlightBatch], Any] | None = None
        """Batches, and what `Worker.measure` returned for their gradients, or a bound of it."""
        self._numbers: dict[str, tuple[str, ...]] = {}
        """The columns of numbers beside the ids of each sequence, as in the last batch."""
        self._frozen = [name for name, feature in worker.features.items() if feature.table.frozen is True]
        self._frozen_columns = torch.tensor(_columns_of(self._frozen, worker.features), device=device)
        self._batch_copies = new_stream(device)  # copies batches to the device
        self._gradients = worker.device_stream or new_stream(device)  # copies gradients, or uses them

    def new(self, inputs: Inputs) -> InFlightBatch:
        """Return a batch without its rows and tensors."""
        return InFlightBatch(inputs, self._worker.features)

    def resolve(self, batch: InFlightBatch, step: int, oldest_open: int) -> None:
        """Do the part of a training lookup that needs no row's values. Runs in the thread that reads. A batch for
        which there is no room yet is resolved in its lookup."""
        if not batch.has_rows:
            return
        with suppress(CapacityError), self._beside_the_loop(batch.inputs):  # there may be room after the open steps
            batch.request = self._worker.resolve(batch.inputs, step=step, oldest_open=oldest_open)
            batch.is_resolved = self.resolves_ahead = batch.request is not None

    def drop_resolved(self, batches: Iterable[InFlightBatch]) -> None:
        """Give up what was resolved for batches that will not be looked up."""
        for batch in batches:
            if (ticket := batch.take_ticket()) is not None:
                self._worker.drop(ticket)

    def look_up(self, batch: InFlightBatch, oldest_open: int) -> None:
        """Look up the rows of a batch. oldest_open: the oldest step in progress."""
        if batch.is_looked_up():  # a retry after an interrupt that came right after the lookup
            return
        self.read_ahead(batch)
        if not batch.has_rows:
            self._worker.pad(batch.step, oldest_open)
            self._pad(batch)
            return
        with self._threads(), self._beside_the_loop(batch.inputs):
            if self._train:
                self._dense.look_up(batch.step, oldest_open, self._to_device)
            request, batch.request = batch.request, None
            if request is not None:
                rows = self._worker.lookup_resolved(request)
            elif self._train:
                rows = self._worker.lookup(batch.inputs, step=batch.step, oldest_open=oldest_open, train=True)
            else:
                rows = self._worker.lookup(batch.inputs, step=None, oldest_open=None, train=False)
        batch.ticket = rows.ticket
        if isinstance(batch.inputs, NamedInputs):
            values = {name: self._to_device(of_table) for name, of_table in rows.sequences.items()}
            batch.ahead = AheadRows(batch.inputs, values)
        else:
            batch.sequences = {name: self._sequence(rows, name, batch.inputs) for name in rows.sequences}
        block = self._rows_to_device(rows.block)
        of_rows = self._worker.device_stream
        batch.ready += [self._batch_copies.mark(), *([] if of_rows is None else [of_rows.mark()])]
        batch.embeddings = block  # last: marks the batch as looked up

    @contextmanager
    def _beside_the_loop(self, inputs: Inputs) -> Iterator[None]:
        """Put work on rows on their stream, without a wait for what the loop has on its own: only for ids that are on
        the device, which the calling thread's stream may still compute."""
        rows = self._worker.device_stream
        if rows is None:
            yield
            return
        given = [array for array in (inputs.values, inputs.offsets, inputs.weights) if isinstance(array, Tensor)]
        if given:
            rows.wait(current_stream(self._device).mark())
            rows.keep(given)
        with rows.running():
            yield

    def read_ahead(self, batch: InFlightBatch) -> None:
        """Make the tensors of a batch that need no lookup, once."""
        if batch.ready:
            return
        inputs = batch.inputs
        dense = np.empty((inputs.batch_size, 0), np.float32) if inputs.dense is None else inputs.dense
        batch.label = None if inputs.label is None else self._to_device(inputs.label)
        batch.dense = self._to_device(dense)
        ready = [self._batch_copies.mark()]
        if isinstance(dense, Tensor) or isinstance(inputs.label, Tensor):  # the calling thread may have computed them
            ready.append(current_stream(self._device).mark())
        batch.ready = ready

    def _pad(self, batch: InFlightBatch) -> None:
        """Set the rows of a padding batch to zeros."""
        features = self._worker.features
        batch.sequences = {
            name: self._padding(name, feature) for name, feature in features.items() if feature.pooling == "none"
        }
        block = self._rows_to_device(np.zeros((PADDING_ROWS, features.total_dim), np.float32))
        batch.ready.append(self._batch_copies.mark())
        batch.embeddings = block

    def _padding(self, name: str, feature: Feature) -> Sequence | JaggedSequence:
        """Return a sequence of zeros. A jagged one has a row in each sample, since not every model takes empty ones."""
        if feature.jagged:
            rows = np.zeros((PADDING_ROWS, feature.table.dim), np.float32)
            return self._jagged(rows, np.arange(PADDING_ROWS + 1), self._no_numbers(name, PADDING_ROWS))
        shape = (PADDING_ROWS, feature.padded_length or 0, feature.table.dim)
        mask, values = np.zeros(shape[:2], np.bool_), np.zeros(shape, np.float32)
        return Sequence(self._rows_to_device(values), self._to_device(mask), self._no_numbers(name, *shape[:2]))

    def _no_numbers(self, name: str, *shape: int) -> dict[str, Tensor]:
        return {column: self._to_device(np.zeros(shape)) for column in self._numbers.get(name, ())}

    def _sequence(self, rows: LookupResult, name: str, inputs: Inputs) -> Sequence | JaggedSequence:
        values, numbers = rows.sequences[name], numbers_of(name, inputs.extra)
        self._numbers[name] = tuple(numbers)
        if name in rows.offsets:
            flat = {column: self._to_device(np.array(lists.flatten())) for column, lists in numbers.items()}
            return self._jagged(values, rows.offsets[name], flat)
        mask = rows.masks[name]
        padded = {column: self._to_device(padded_numbers(lists, mask.shape[1])) for column, lists in numbers.items()}
        return Sequence(self._rows_to_device(values), self._to_device(mask), padded)

    def _jagged(
        self, values: NDArray[np.float32], offsets: NDArray[np.int64], numbers: dict[str, Tensor]
    ) -> JaggedSequence:
        return JaggedSequence(self._rows_to_device(values), self._to_device(offsets), offsets, numbers)

    def join(self, batch: InFlightBatch, step: JointStep) -> None:
        """Add the batch to a step that several trainers take together."""
        batch.weight = step.weight
        if not batch.has_rows:
            dense, label = step.padding()
            batch.dense, batch.label = self._to_device(dense), None if label is None else self._to_device(label)
            batch.ready.append(self._batch_copies.mark())

    def _to_device(self, array: NDArray[Any] | Tensor) -> Tensor:
        if isinstance(array, Tensor):  # it is there
            return array
        with self._batch_copies.running():
            return self._batch_copies.upload(array)

    def _rows_to_device(self, rows: Any) -> Tensor:
        """Return rows on the device in the output dtype: tensors have it already, arrays are cast."""
        there = self._to_device(rows)
        with self._batch_copies.running():
            return there.to(self._dtype)

    def wait_for_copies(self, batch: InFlightBatch) -> None:
        """Let the calling thread's stream wait for the batch, and keep its memory until that stream has used it."""
        current = current_stream(self._device)
        current.wait(*batch.ready)
        current.keep(batch.tensors)

    def hand_over(self, batch: InFlightBatch) -> None:
        """Make the leaves collect gradients, as the user starts to use the rows. Runs in the user's thread."""
        for leaf in batch.leaves:
            leaf.requires_grad_()
        if len(self._frozen_columns):  # zeros, so that a norm of all gradients is that of what trains
            batch.embeddings.register_hook(partial(torch.index_fill, dim=1, index=self._frozen_columns, value=0.0))
        for name in batch.sequences.keys() & self._frozen:
            batch.sequences[name].values.register_hook(torch.zeros_like)
        self._dense.hand_over(batch.step)

    def measure(self, batches: list[InFlightBatch], *, are_checked: bool = False) -> None:
        """Start to compute the largest gradient of the batches, for their update.

        are_checked: whether a GradScaler skips the update if a gradient is not finite. Then the largest number of
            float16 bounds gradients in float16, and nothing is computed."""
        leaves = [
            (leaf.grad, batch.weight)
            for batch in batches
            if batch.has_rows
            for leaf in (*batch.leaves, *batch.lookups.leaves)
        ]
        given = [(gradient, weight) for gradient, weight in leaves if gradient is not None]
        if are_checked and given and all(gradient.dtype == torch.float16 for gradient, _ in given):
            self._measured = batches, torch.finfo(torch.float16).max * max(abs(weight) for _, weight in given)
        else:
            self._measured = batches, self._worker.measure(given)

    def update_with(self, batches: list[InFlightBatch], lrs: dict[str, float], scale: float) -> Callable[[], None]:
        """Return a function that applies the gradients of the batches; any thread may call it."""
        update_dense = self._dense.update_with(scale)
        if self._measured is None or self._measured[0] != batches:
            self.measure(batches)
        assert self._measured is not None
        (_, magnitude), self._measured = self._measured, None
        ready = current_stream(self._device).mark()
        step = batches[-1].step
        batches = [batch for batch in batches if batch.has_rows]
        whole: list[dict[str, tuple[Tensor, float]]] = []
        by_id: list[tuple[Lookup, float]] = []
        for batch in batches:
            reached = batch.lookups.reached()
            tables = {} if batch.ahead is None else batch.ahead.whole_tables(reached)
            whole.append({name: (lookup.gradient(), batch.weight) for name, lookup in tables.items()})
            by_id += [(lookup, batch.weight) for lookup in reached if lookup.table not in tables]
        taken = TakenGradients.of(self._worker, by_id)

        def apply() -> None:
            if not batches:
                self._worker.skip(step)
                self._worker.settle()
                return
            if batches[0].ticket.used:  # a retry after an interrupt that came right after the update
                return
            with self._gradients.running():
                blocks, sequences = self._take_gradients(batches, ready)
                for of_batch, tables in zip(sequences, whole, strict=True):
                    of_batch |= {name: joined(self._worker, [part]) for name, part in tables.items()}
                update_dense(step)
                with self._threads():
                    self._worker.update(
                        [batch.ticket for batch in batches],
                        blocks,
                        sequences,
                        of_ids=None if taken is None else taken.for_update(self._worker),
                        step=step,
                        lrs=lrs,
                        scale=scale,
                        magnitude=magnitude,
                    )

        return apply

    def _take_gradients(self, batches: list[InFlightBatch], ready: Mark) -> tuple[list[Any], list[dict[str, Any]]]:
        """Return the gradients times their weights, which the loop's stream has computed by `ready`: in CPU memory, or
        on the device if the rows are there."""
        take: Callable[[Tensor, float], Any] = gradient_array
        if self._worker.device_stream is None:
            ready.synchronize()
        else:
            take = gradient_of
            self._gradients.wait(ready)
            self._gradients.keep(leaf.grad for batch in batches for leaf in batch.leaves if leaf.grad is not None)
        blocks = [take(batch.embeddings, batch.weight) for batch in batches]
        return blocks, [
            {name: take(sequence.values, batch.weight) for name, sequence in batch.sequences.items()}
            for batch in batches
        ]


def _columns_of(names: Iterable[str], features: Features) -> list[int]:
    """Return the columns of a block that the pooled ones of these features have."""
    begins = dict(zip(features.names, features.columns, strict=True))
    return [begins[name] + i for name in names if name in features.pooled for i in range(features.pooled[name])]
