"""One batch of a stream: as tensors for the user, and as the stream tracks it.

`InFlightBatch` is what the stream keeps: the inputs of the batch, its rows once they are looked up, and the ticket with
which its gradients are sent back. `Batch` is the user's view of it, and may be returned before its rows are looked up:
the first use of `embeddings` or of a feature requests them from the stream. `embeddings` is a leaf tensor, [batch, sum
of dims]: autograd collects its gradient as it does a parameter's, so losses add up, and the combined optimizer finds
the gradient there. `batch[name]` is a view of the leaf's columns of one feature; a feature without pooling is a
`Sequence` or a `JaggedSequence` with a separate leaf.
"""

import weakref
from collections.abc import Callable, Iterator, KeysView, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.features import Feature, Features
from satrap.config.validation import suggest
from satrap.data.inputs import Inputs, Position
from satrap.data.item_numbers import kept_ids
from satrap.device.device_stream import Mark
from satrap.errors import InputError, StreamError
from satrap.train.ahead_rows import AheadRows
from satrap.train.joint_calls import PADDING_ROWS, BatchCalls, Padding
from satrap.train.ledger import BatchRecord
from satrap.train.sequence import JaggedSequence, Sequence
from satrap.train.step_lookups import StepLookups, scaled
from satrap.worker.rows import BagRequest

_NOT_LOOKED_UP = torch.empty(0)


class InFlightBatch(BatchRecord):
    """A batch as its stream tracks it, until it is updated or dropped, with its tensors once they exist."""

    dense: Tensor
    label: Tensor | None

    def __init__(self, inputs: Inputs, features: Features) -> None:
        super().__init__(position=inputs.position, has_rows=not isinstance(inputs, Padding))
        self.inputs, self.features = inputs, features
        self.embeddings = _NOT_LOOKED_UP
        self.sequences: Mapping[str, Sequence | JaggedSequence] = {}
        self.request: BagRequest | None = None
        """Its lookup, if the part that needs no row's values was done ahead."""
        self.ticket: Any = None
        """Identifies the lookup in the update; None in evaluation, for padding, and before the lookup."""
        self.weight = 1.0
        """Factor of its gradients relative to the other trainers'; see `satrap.train.joint_calls`."""
        self.ready: list[Mark] = []
        """After the work of the device that makes the batch's tensors; empty before they exist."""
        self.calls = BatchCalls()
        """Which calls were compared with the other trainers'."""
        self.is_training = False
        """Whether autograd was recording when the rows were returned."""
        self.lookups = StepLookups(0)
        """The lookups of modules in the step of this batch."""
        self.ahead: AheadRows | None = None
        """The rows that were looked up ahead for these, once they are."""
        self.drop_reason: str | None = None
        """Why the rows cannot be used any more; None if they can."""
        self._batch: Callable[[], object] = _never_released

    def take_ticket(self) -> Any:
        """Return what to drop at the worker if the batch has no update; None if nothing was looked up or resolved."""
        request, self.request = self.request, None
        return self.ticket if request is None else request.resolved["ticket"]

    def hand_over(self, training: "TrainingCalls | None" = None, *, with_dense: bool = False) -> "Batch":
        """Return the user's view; called once. `training` and `with_dense` are those of `Batch`."""
        batch = Batch(self, training, with_dense=with_dense)
        self._batch = weakref.ref(batch)
        return batch

    def is_looked_up(self) -> bool:
        """Return whether the rows are looked up."""
        return self.embeddings is not _NOT_LOOKED_UP

    @property
    def is_released_unused(self) -> bool:
        return not self.is_used and self._batch() is None

    @property
    def may_get_gradient(self) -> bool:
        return self.has_gradient or (self.is_training and self._batch() is not None)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that collect gradients."""
        return [self.embeddings, *(sequence.values for sequence in self.sequences.values())]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch that exist so far."""
        labels = [] if self.label is None else [self.label]
        if not self.is_looked_up():
            return [self.dense, *labels]
        of_sequences = [tensor for sequence in self.sequences.values() for tensor in sequence.tensors]
        return [self.dense, *labels, self.embeddings, *of_sequences]

    @property
    def has_gradient(self) -> bool:
        return self.is_used and (self.lookups.has_gradient or any(leaf.grad is not None for leaf in self.leaves))

    @property
    def is_released(self) -> bool:
        """Whether the user has the batch no more."""
        return self._batch() is None

    def forbid_gradients(self, why: str) -> None:
        """Make a later backward pass raise `why`: after the update or drop of a batch its gradient would be lost."""

        def refuse(_: Tensor) -> None:  # must not refer to the batch: leaf and batch would keep each other alive
            raise StreamError(why)

        for leaf in self.leaves:
            leaf.register_hook(refuse)

    def drop(self, why: str) -> None:
        """Mark the batch as dropped: using its rows, or a backward pass to them, raises `why`."""
        self.drop_reason = why
        if self.is_used:
            self.forbid_gradients(why)
        self.lookups.end("its batch was dropped")


class TrainingCalls(Protocol):
    """What a batch asks of the stream that trains on it."""

    def use(self, batch: InFlightBatch) -> None:
        """Prepare the rows of a batch for their first use; look them up now if that was not done."""

    def completes_step(self, batch: InFlightBatch) -> bool:
        """Return whether the batch is the last one of its step."""


class Batch:
    """One batch of a stream: `batch[name]` has the rows of a feature, and iterating over it yields the features' names.
    `len(batch)` is the number of its samples."""

    __slots__ = ("__weakref__", "_dense", "_in_flight", "_pooled", "_stream", "_unused_in", "inputs", "step")

    def __init__(self, in_flight: InFlightBatch, training: TrainingCalls | None, *, with_dense: bool) -> None:
        """training: its `use` is called before the first use of rows; None in evaluation.
        with_dense: call `use` before the first use of `dense`, too.
        """
        self.inputs: Inputs = in_flight.inputs
        """The inputs as the loader read them: ids, numpy arrays, other columns. There are no ids if a worker in another
        process read the batch."""
        self.step: int = 0 if training is None else in_flight.step
        """The optimizer step that the batch belongs to; 0 in evaluation."""
        self._in_flight, self._unused_in = in_flight, training
        self._stream = None if training is None else weakref.ref(training)  # the batch may outlive it
        self._dense = None if with_dense else in_flight.dense
        self._pooled: dict[bool, dict[str, Tensor]] = {}
        """Each feature's columns of `embeddings`, as split with autograd (True) or without."""

    def __repr__(self) -> str:
        in_flight = self._in_flight
        label = "none" if in_flight.label is None else list(in_flight.label.shape)
        rows = list(in_flight.embeddings.shape) if in_flight.is_looked_up() else "not looked up yet"
        return (
            f"Batch(step={self.step}, dense={list(in_flight.dense.shape)}, embeddings={rows}, label={label}, "
            f"features={list(self)})"
        )

    def __len__(self) -> int:
        return self.inputs.batch_size

    def __getitem__(self, name: str) -> Any:
        """Return the rows of one feature: a view [batch, dim] of `embeddings`, or if it is not pooled, a `Sequence` or
        a `JaggedSequence`; looked up as `embeddings` are."""
        features = self._in_flight.features
        if self._feature(name).pooling == "none":
            return self._looked_up().sequences[name]
        recording = torch.is_grad_enabled()  # a view that is created without autograd never passes on a gradient
        if recording not in self._pooled:
            # One split of all: its gradient is one block, that of a slice for each feature as many blocks.
            parts = self.embeddings.split(list(features.pooled.values()), dim=1)
            self._pooled[recording] = dict(zip(features.pooled, parts, strict=True))
        return self._pooled[recording][name]

    def ids(self, name: str) -> Tensor:
        """Return the ids of one feature that are looked up, as int64 where `dense` is: all samples' one after another,
        [batch] if each has one, [rows] of a jagged sequence; of a padded one [batch, max_length], with zeros where its
        mask is False."""
        in_flight, inputs = self._in_flight, self.inputs
        feature, device = self._feature(name), in_flight.dense.device
        if not in_flight.has_rows:
            shape = (PADDING_ROWS, *(() if feature.padded_length is None else (feature.padded_length,)))
            return torch.zeros(shape, dtype=torch.int64, device=device)
        ids, offsets = map(_in_memory, inputs.bags(name))
        is_kept, offsets = kept_ids(feature, ids.view(np.uint64), offsets)
        ids = ids[is_kept].view(np.int64)
        if feature.padded_length is not None:
            mask = np.arange(feature.padded_length) < np.diff(offsets)[:, None]
            ids, flat = np.zeros(mask.shape, np.int64), ids
            ids[mask] = flat
        return torch.from_numpy(ids).to(device)

    def expand(self, items: str) -> tuple[Tensor, Tensor]:
        """Return dense features [rows, columns] and embeddings [rows, sum of dims] with one sample for each row of a
        jagged sequence: what a sample has once, such as its user, is repeated for each of its items, and its gradients
        are summed. A model for them is created with `embeddings.features.expanded(items)`."""
        features = self._in_flight.features
        expanded, aligned = features.expanded(items), features.aligned(items)
        samples = self[items].samples
        repeated = self.embeddings.index_select(0, samples).split(list(features.pooled.values()), dim=1)
        columns = dict(zip(features.pooled, repeated, strict=True)) | {name: self[name].values for name in aligned}
        return self.dense.index_select(0, samples), torch.cat([columns[name] for name in expanded.pooled], 1)

    def _feature(self, name: str) -> Feature:
        features = self._in_flight.features
        if name not in features:
            raise InputError(f"the batch has no feature {name!r}; {suggest(name, list(features))}")
        return features[name]

    def __contains__(self, name: object) -> bool:
        return name in self._in_flight.features

    def __iter__(self) -> Iterator[str]:
        return iter(self._in_flight.features)

    def keys(self) -> KeysView[str]:
        """Return the names of the features, in the order of `Embeddings.features`."""
        return self._in_flight.features.keys()

    @property
    def dense(self) -> Tensor:
        """Dense features, float32 [batch, columns]; no columns if the source has none."""
        if self._dense is None:
            self._dense = self._looked_up().dense
        return self._dense

    @property
    def label(self) -> Tensor:
        """Labels, float32 [batch] or [batch, labels]."""
        label_tensor = self._in_flight.label
        if label_tensor is None:
            raise InputError("the batch has no label: set label=... in the source to the name of its column")
        return label_tensor

    @property
    def embeddings(self) -> Tensor:
        """Pooled rows, [batch, sum of dims], with the features in the order of `Embeddings.features`, as float32 or the
        `output_dtype` of the embeddings. A batch that was returned before its lookup is looked up at the first use."""
        return self._looked_up().embeddings

    @property
    def completes_step(self) -> bool:
        """Whether to call `optimizer.step()` after the backward pass of this batch: it is the last one of its step, the
        Nth with `stream(accumulate=N)` or the last one of the stream. A step with fewer batches than N reads one batch
        ahead to find out, when this is first asked; with several trainers, when the batch is returned. False in
        evaluation."""
        if self._stream is None:
            return False
        stream = self._stream()
        return stream is None or stream.completes_step(self._in_flight)

    @property
    def position(self) -> Position | None:
        """The position of the source after this batch."""
        return self.inputs.position

    def _looked_up(self) -> InFlightBatch:
        if self._unused_in is not None:
            self._unused_in.use(self._in_flight)
            self._unused_in = None
        return self._in_flight


def _in_memory(array: Any) -> NDArray[Any]:
    """Return an array, or a tensor on any device, as an array in CPU memory."""
    return np.asarray(array.cpu() if isinstance(array, Tensor) else array)


def _never_released() -> object:
    """Stand in for the weak reference of a batch that was not returned yet, which cannot have been released."""
    return _never_released


def batch_in_use(in_loop: list[InFlightBatch]) -> InFlightBatch:
    """Return the batch that a loop works on, of those that it received and did not step: of the ones that it still
    holds the one that it used last, or else the first one. StreamError if there is none."""
    if len(in_loop) == 1:
        return in_loop[0]
    held = [batch for batch in in_loop if not batch.is_released] or in_loop[-1:]
    if not held:
        raise StreamError(
            "a module looked up rows for training while a training stream is open and no batch of it is in use, so "
            "the lookup belongs to no step: take a batch from the stream first, or end the stream"
        )
    return next((batch for batch in reversed(held) if batch.is_used), held[0])


def gradient_of(leaf: Tensor, weight: float = 1.0) -> Tensor | None:
    """Return a leaf's gradient times a weight, or None if no loss used the leaf."""
    return None if leaf.grad is None else scaled(leaf.grad, weight)


def gradient_array(leaf: Tensor, weight: float = 1.0) -> NDArray[np.float32] | None:
    """Return `gradient_of` in CPU memory. Waits for a device."""
    gradient = gradient_of(leaf, weight)
    if gradient is None:
        return None
    array: NDArray[np.float32] = gradient.cpu().float().contiguous().numpy()
    return array
