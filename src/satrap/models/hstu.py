"""HSTU: layers over a history of items whose attention is no softmax, so that a state keeps how often an item occurs.

A layer makes four vectors of each row: a query, a key, a value and a gate. A row takes the values of the rows before it
and its own, each times SiLU(query . key + the weight of their distance) / length, and multiplies their sum, normalised,
with its gate. It has neither feed-forward layers nor vectors of places.
"""

from collections.abc import Sequence as Names

import torch
from torch import nn
from torch.nn.functional import layer_norm, silu

from satrap.config.validation import known_arguments
from satrap.errors import InputError
from satrap.models.parts import count, history_of
from satrap.train.sequence import JaggedSequence, Sequence


class HSTU(nn.Module):
    """Layers of gated pointwise attention over the rows of a history."""

    @known_arguments()
    def __init__(
        self, embeddings: object, history: str, num_layers: int = 2, num_heads: int = 1, ignore: Names[str] = ()
    ) -> None:
        """embeddings: a satrap.Embeddings or its features. history: the name of a sequence with a max_length.

        ignore: the other features, which the loss or another part of the model uses: all of them."""
        super().__init__()
        self.dim, self.max_length = history_of("HSTU", embeddings, history, num_heads, ignore)
        layers = (
            Layer(self.dim, num_heads, self.max_length) for _ in range(count("HSTU", "num_layers", num_layers, 1))
        )
        self.layers: nn.ModuleList = nn.ModuleList(layers)

    def forward(self, history: Sequence | JaggedSequence) -> torch.Tensor:
        """Return the states [rows, dim] of the rows of all samples, one after another, as `history.rows` has them."""
        padded = history.padded()
        states, length = padded.values, padded.values.shape[1]
        if states.shape[2] != self.dim or length > self.max_length:
            raise InputError(
                f"HSTU: the history has the shape {tuple(states.shape)}; expected [batch, at most {self.max_length}, "
                f"{self.dim}]"
            )
        at = torch.arange(length, device=states.device)
        distance = (at[:, None] - at).clamp(min=0)
        visible = (at[:, None] >= at) & padded.mask[:, None, :]
        lengths = padded.lengths.clamp(min=1)[:, None, None, None]
        for layer in self.layers:
            states = layer(states, distance, visible[:, None] / lengths)
        return layer_norm(states[padded.mask], (self.dim,)).float()


class Layer(nn.Module):
    """One layer, with a residual."""

    def __init__(self, dim: int, num_heads: int, max_length: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before, self.out = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.make: nn.Linear = nn.Linear(dim, 4 * dim)
        self.of_distance: nn.Parameter = nn.Parameter(torch.zeros(num_heads, max_length))

    def forward(self, states: torch.Tensor, distance: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Return the next states [batch, length, dim]. share: what a pair of rows counts; 0 if one may not see the
        other."""
        made = silu(self.make(self.before(states))).chunk(4, 2)
        query, key, value = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in made[:3])
        weights = silu(query @ key.transpose(2, 3) + self.of_distance[:, distance]) * share
        attended = (weights @ value).transpose(1, 2).flatten(2)
        out: torch.Tensor = states + self.out(layer_norm(attended, attended.shape[2:]) * made[3])
        return out
