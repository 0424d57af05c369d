"""What the user gets from a stream: one batch as tensors, and the gradients that came back for it.

`InFlightBatch` is the stream's own: the batch's inputs, its rows once they are looked up, and what brings gradients
home. `Batch` is the user's view of it. Its rows may come later than the batch: the first use of `embeddings` or
`sequences` asks the stream for them. `embeddings` is a leaf, [batch, sum of dims]: autograd collects its gradient as it
does a parameter's, so losses add up, and the combined optimizer finds it there. Bags that are not pooled come as
`sequences`, each a leaf of its own.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.data.inputs import Inputs, Position
from satrap.errors import InputError, StreamError
from satrap.train.joint_step import Padding

_NOT_LOOKED_UP = torch.empty(0)


class Sequence:
    """The rows of a feature without pooling: values [batch, max_length, dim], zeros where mask [batch, max_length] is
    False."""

    __slots__ = ("mask", "values")

    def __init__(self, values: Tensor, mask: Tensor) -> None:
        self.values, self.mask = values, mask


class InFlightBatch:
    """A batch as its stream holds it, until it is updated or dropped."""

    __slots__ = (
        *("_batch", "dense", "embeddings", "inputs", "label", "lost", "sequences", "step", "ticket"),
        *("trains", "used", "weight"),
    )

    def __init__(self, inputs: Inputs, step: int, dense: Tensor, label: Tensor | None) -> None:
        """step: the optimizer step that it belongs to; 0 in evaluation."""
        self.inputs, self.step, self.dense, self.label = inputs, step, dense, label
        self.embeddings = _NOT_LOOKED_UP
        self.sequences: Mapping[str, Sequence] = {}
        self.ticket: Any = None
        """Brings the gradients home; None in evaluation, of padding, and before the lookup."""
        self.weight = 1.0
        """What its gradients count, beside those of the other trainers. See `satrap.train.joint_step`."""
        self.used = False
        """The user was given the rows."""
        self.trains = False
        """That was where autograd records."""
        self.lost: str | None = None
        """Why the rows cannot be used any more."""
        self._batch: Callable[[], object] = _nothing

    def hand_over(self, use: "Callable[[InFlightBatch], None] | None", *, with_dense: bool = False) -> "Batch":
        """The user's view, once. use, with_dense: see Batch."""
        batch = Batch(self, use, with_dense=with_dense)
        self._batch = weakref.ref(batch)
        return batch

    def is_there(self) -> bool:
        """Whether it is looked up."""
        return self.embeddings is not _NOT_LOOKED_UP

    @property
    def is_padding(self) -> bool:
        """Whether it is there for the other trainers' sake."""
        return isinstance(self.inputs, Padding)

    @property
    def is_passed_over(self) -> bool:
        """Whether the user let go of it and never used its rows: no loss will reach it."""
        return not self.used and self._batch() is None

    @property
    def may_get_gradient(self) -> bool:
        """Whether a loss has reached it, or the user used it, holds it still and may have one."""
        return self.has_gradient or (self.trains and self._batch() is not None)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that collect gradients."""
        return [self.embeddings, *(sequence.values for sequence in self.sequences.values())]

    @property
    def tensors(self) -> list[Tensor]:
        """All that are here."""
        labels = [] if self.label is None else [self.label]
        rows = [*self.leaves, *(each.mask for each in self.sequences.values())] if self.is_there() else []
        return [self.dense, *labels, *rows]

    @property
    def has_gradient(self) -> bool:
        """Whether any backward pass reached it."""
        return self.used and any(leaf.grad is not None for leaf in self.leaves)

    def forbid_gradients(self, why: str) -> None:
        """It is updated or dropped: a gradient that comes now would be lost, so its backward pass raises."""

        def refuse(_: Tensor) -> None:  # holds no batch: leaf and batch would keep each other
            raise StreamError(why)

        for leaf in self.leaves:
            leaf.register_hook(refuse)

    def lose(self, why: str) -> None:
        """It is dropped: using its rows, or a backward pass to them, raises."""
        self.lost = why
        if self.used:
            self.forbid_gradients(why)


class Batch:
    """One batch of a stream."""

    __slots__ = ("__weakref__", "_dense", "_held", "_use", "inputs", "step")

    def __init__(self, held: InFlightBatch, use: Callable[[InFlightBatch], None] | None, *, with_dense: bool) -> None:
        """use: called before the first use of rows; with_dense: or of `dense`."""
        self.inputs = held.inputs
        """As the loader read it: ids, numpy arrays, other columns. No ids where a worker in a process of its own read
        it."""
        self.step = held.step
        """The optimizer step that it belongs to; 0 in evaluation."""
        self._held, self._use = held, use
        self._dense = None if with_dense else held.dense

    def __repr__(self) -> str:
        held = self._held
        label = "none" if held.label is None else list(held.label.shape)
        rows = list(held.embeddings.shape) if held.is_there() else "not looked up yet"
        return (
            f"Batch(step={self.step}, dense={list(held.dense.shape)}, embeddings={rows}, label={label}, "
            f"sequences={list(held.sequences)})"
        )

    def __len__(self) -> int:
        return self.inputs.batch_size

    @property
    def dense(self) -> Tensor:
        """float32 [batch, columns]; no columns if the source has none."""
        if self._dense is None:
            self._dense = self._used().dense
        return self._dense

    @property
    def label(self) -> Tensor:
        """float32 [batch], or [batch, labels]."""
        found = self._held.label
        if found is None:
            raise InputError("the batch has no label: name its column in the source, label=...")
        return found

    @property
    def embeddings(self) -> Tensor:
        """float32 [batch, sum of dims], features in the order of `Embeddings.features`. A batch that was handed out
        ahead of its lookup is looked up at the first use."""
        return (self._held if self._use is None else self._used()).embeddings

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """By feature. Looked up as `embeddings` are."""
        return (self._held if self._use is None else self._used()).sequences

    @property
    def position(self) -> Position | None:
        """Where the source stands after this batch."""
        return self.inputs.position

    def _used(self) -> InFlightBatch:
        if self._use is not None:
            self._use(self._held)
            self._use = None  # the stream may go before the batch
        return self._held


def _nothing() -> object:
    """A batch that was not handed over is not passed over."""
    return _nothing


def gradient_array(leaf: Tensor, weight: float = 1.0) -> NDArray[np.float32] | None:
    """A leaf's gradient in CPU memory, times a weight; None if no loss used the leaf. Waits for a device."""
    if leaf.grad is None:
        return None
    gradient = leaf.grad.detach() if weight == 1.0 else leaf.grad.detach() * weight
    gradient = gradient.to(device="cpu", dtype=torch.float32).contiguous()
    array: NDArray[np.float32] = gradient.numpy()
    return array
