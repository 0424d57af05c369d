"""What the user gets from a stream: one batch as tensors, and the gradients that came back for it.

`embeddings` is a leaf, [batch, sum of dims]: autograd collects its gradient as it does a parameter's, so losses add up,
and the combined optimizer finds it there. Bags that are not pooled come as `sequences`, each a leaf of its own.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.errors import InputError, StreamError
from satrap.inputs import Inputs, Position


class Sequence:
    """The rows of a feature without pooling: values [batch, max_length, dim], zeros where mask [batch, max_length] is
    False."""

    __slots__ = ("mask", "values")

    def __init__(self, values: Tensor, mask: Tensor) -> None:
        self.values, self.mask = values, mask


class Batch:
    """One batch of a stream."""

    __slots__ = ("_label", "dense", "embeddings", "inputs", "sequences", "step", "ticket")

    def __init__(
        self,
        inputs: Inputs,
        step: int,
        ticket: Any,
        *,
        dense: Tensor,
        label: Tensor | None,
        embeddings: Tensor,
        sequences: Mapping[str, Sequence],
    ) -> None:
        self.inputs = inputs
        """As the loader read it: ids, numpy arrays, other columns. No ids where a worker in a process of its own read
        it."""
        self.step = step
        """The optimizer step that it belongs to; 0 in evaluation."""
        self.ticket = ticket
        """What brings its gradients home; None in evaluation."""
        self.dense = dense
        """float32 [batch, columns]; no columns if the source has none."""
        self._label = label
        self.embeddings = embeddings
        """float32 [batch, sum of dims], features in the order of `Embeddings.features`."""
        self.sequences = sequences
        """By feature."""

    def __repr__(self) -> str:
        label = "none" if self._label is None else list(self._label.shape)
        return (
            f"Batch(step={self.step}, dense={list(self.dense.shape)}, embeddings={list(self.embeddings.shape)}, "
            f"label={label}, sequences={list(self.sequences)})"
        )

    def __len__(self) -> int:
        return self.inputs.batch_size

    @property
    def label(self) -> Tensor:
        """float32 [batch], or [batch, labels]."""
        if self._label is None:
            raise InputError("the batch has no label: name its column in the source, label=...")
        return self._label

    @property
    def position(self) -> Position | None:
        """Where the source stands after this batch."""
        return self.inputs.position

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that collect gradients."""
        return [self.embeddings, *(sequence.values for sequence in self.sequences.values())]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        labels = [] if self._label is None else [self._label]
        return [self.dense, *labels, *self.leaves, *(sequence.mask for sequence in self.sequences.values())]

    def forbid_gradients(self) -> None:
        """Its update was handed over: a gradient that comes now would be lost."""
        step = self.step  # not self: leaf and batch would keep each other

        def refuse(_: Tensor) -> None:
            raise StreamError(
                f"step {step}: a loss reached its batch after optimizer.step() had taken it; add the losses up before "
                "the step, or look the batch up again"
            )

        for leaf in self.leaves:
            leaf.register_hook(refuse)

    @property
    def has_gradient(self) -> bool:
        """Whether any backward pass reached it."""
        return any(leaf.grad is not None for leaf in self.leaves)


def gradient_array(leaf: Tensor) -> NDArray[np.float32] | None:
    """A leaf's gradient in CPU memory; None if no loss used the leaf. Waits for a copy from a device."""
    if leaf.grad is None:
        return None
    gradient = leaf.grad.detach().to(device="cpu", dtype=torch.float32).contiguous()
    array: NDArray[np.float32] = gradient.numpy()
    return array
