"""The rows of a feature without pooling, as a batch returns them: padded to one length, or jagged.

A jagged sequence holds the rows of all samples after each other and the offset where each sample begins, so it costs
what its ids cost, however long the longest sample is. `nested` and `padded` make other forms of it, through which
gradients flow.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.errors import InputError


class Sequence:
    """The rows of a feature without pooling: values [batch, max_length, dim], zeros where mask [batch, max_length] is
    False."""

    __slots__ = ("mask", "numbers", "values")

    def __init__(self, values: Tensor, mask: Tensor, numbers: Mapping[str, Tensor] | None = None) -> None:
        self.values, self.mask = values, mask
        self.numbers: Mapping[str, Tensor] = numbers or {}
        """The numbers beside the ids by column, float64 [batch, max_length]; zeros where the mask is False."""

    def __repr__(self) -> str:
        return f"Sequence(values={list(self.values.shape)}, {int(self.mask.sum())} rows)"

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the sequence."""
        return [self.values, self.mask, *self.numbers.values()]

    @property
    def lengths(self) -> Tensor:
        """The number of rows of each sample, int64 [batch]."""
        return self.mask.sum(1)

    @property
    def rows(self) -> Tensor:
        """The rows of all samples one after another, without padding, [rows, dim]."""
        return self.values[self.mask]

    def padded(self) -> "Sequence":
        """Return the sequence itself, so that a model may take both forms."""
        return self


class JaggedSequence:
    """The rows of a feature without pooling or padding. Sample s has the rows values[offsets[s] : offsets[s + 1]].

    `values` is [rows, dim], a leaf of autograd; `offsets`, int64, has one element more than the batch has samples.
    """

    __slots__ = ("_bounds", "numbers", "offsets", "values")

    def __init__(
        self, values: Tensor, offsets: Tensor, bounds: NDArray[np.int64], numbers: Mapping[str, Tensor] | None = None
    ) -> None:
        """bounds: the offsets in CPU memory."""
        self.values, self.offsets, self._bounds = values, offsets, bounds
        self.numbers: Mapping[str, Tensor] = numbers or {}
        """The numbers beside the ids by column, float64 [rows]."""

    def __repr__(self) -> str:
        return f"JaggedSequence(values={list(self.values.shape)}, {len(self._bounds) - 1} samples)"

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the sequence."""
        return [self.values, self.offsets, *self.numbers.values()]

    @property
    def shortest(self) -> int:
        """The length of the shortest sample, without a wait for a device."""
        return int(np.diff(self._bounds).min()) if len(self._bounds) > 1 else 0

    @property
    def longest(self) -> int:
        """The length of the longest sample, without a wait for a device."""
        return int(np.diff(self._bounds).max(initial=0))

    @property
    def lengths(self) -> Tensor:
        """The number of rows of each sample, int64 [batch]."""
        return self.offsets.diff()

    @property
    def samples(self) -> Tensor:
        """The sample of each row, int64 [rows]: `users[samples]` repeats what a sample has once for its rows, and the
        backward pass sums their gradients."""
        at = torch.arange(len(self.offsets) - 1, device=self.offsets.device)
        return at.repeat_interleave(self.lengths, output_size=len(self.values))

    @property
    def rows(self) -> Tensor:
        """`values`, by the name that a padded sequence has for its rows without padding."""
        return self.values

    def pooled(self, counts: Tensor, mode: str = "sum") -> Tensor:
        """Return the sums, or for "mean" the means, of consecutive rows, [groups, dim], for items with several ids.

        counts: the number of rows of each group, [groups]; a group without rows is 0.
        """
        if mode not in ("sum", "mean"):
            raise InputError(f"pooled: mode is {mode!r}; expected 'sum' or 'mean'")
        if counts.dim() != 1 or bool((counts < 0).any()) or int(counts.sum()) != len(self.values):
            raise InputError(
                f"pooled: counts have the shape {list(counts.shape)} and the sum {counts.sum().item():g}; expected one "
                f"number of rows, at least 0, for each group: the sequence has {len(self.values)} rows"
            )
        return torch.segment_reduce(self.values, mode, lengths=counts.long(), initial=0, unsafe=True)

    def nested(self) -> Tensor:
        """Return the rows as a nested tensor in torch's jagged layout, [batch, any length, dim], without a copy."""
        return torch.nested.nested_tensor_from_jagged(
            self.values, self.offsets, min_seqlen=self.shortest, max_seqlen=self.longest
        )

    def padded(self, max_length: int | None = None) -> Sequence:
        """Return the rows padded with zeros. max_length: at least `longest`, which is the default."""
        length = self.longest if max_length is None else max_length
        if length < self.longest:
            raise InputError(
                f"padded: max_length is {length}, and a sample has {self.longest} rows; expected at least as many: "
                "declare table.sequence(max_length, jagged=True) to look up no more"
            )
        mask = torch.arange(length, device=self.offsets.device) < self.lengths[:, None]
        return Sequence(
            _spread(self.values, mask), mask, {name: _spread(values, mask) for name, values in self.numbers.items()}
        )


def _spread(rows: Tensor, mask: Tensor) -> Tensor:
    """Return the rows at the places where the mask is True, in order, and zeros elsewhere."""
    return rows.new_zeros(*mask.shape, *rows.shape[1:]).index_put((mask,), rows)
