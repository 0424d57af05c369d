"""SASRec: self-attention over a history of items predicts the next item at each of its places.

Its state at a place is compared with the row of an item by their dot product, so the items of `satrap.topk` are the
rows of the history's own table. It trains on the item that followed each place and on one that did not: two sequences
that are aligned with the history.
"""

from collections.abc import Sequence as Names

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from satrap.config.validation import known_arguments
from satrap.errors import InputError
from satrap.models.parts import count, history_of
from satrap.train.sequence import JaggedSequence, Sequence


class SASRec(nn.Module):
    """Blocks of causal self-attention and two layers for each place, over rows of items and of their places."""

    @known_arguments()
    def __init__(
        self,
        embeddings: object,
        history: str,
        num_blocks: int = 2,
        num_heads: int = 1,
        dropout: float = 0.2,
        ignore: Names[str] = (),
    ) -> None:
        """embeddings: a satrap.Embeddings or its features. history: the name of a sequence with a max_length.

        ignore: the other features, which the loss or another part of the model uses: all of them."""
        super().__init__()
        self.dim, self.max_length = history_of("SASRec", embeddings, history, num_heads, ignore)
        self.places: nn.Embedding = nn.Embedding(self.max_length, self.dim)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        blocks = (Block(self.dim, num_heads, dropout) for _ in range(count("SASRec", "num_blocks", num_blocks, 1)))
        self.blocks: nn.ModuleList = nn.ModuleList(blocks)
        self.norm: nn.LayerNorm = nn.LayerNorm(self.dim)

    def forward(self, history: Sequence | JaggedSequence) -> torch.Tensor:
        """Return the states [rows, dim] of the rows of all samples, one after another, as `history.rows` has them."""
        padded = history.padded()
        length = padded.values.shape[1]
        if padded.values.shape[2] != self.dim or length > self.max_length:
            raise InputError(
                f"SASRec: the history has the shape {tuple(padded.values.shape)}; expected [batch, at most "
                f"{self.max_length}, {self.dim}]"
            )
        states = self.dropout(padded.values * self.dim**0.5 + self.places.weight[:length])
        for block in self.blocks:
            states = block(states)  # padding follows a sample's rows, so no row attends to it
        normed: torch.Tensor = self.norm(states[padded.mask])
        return normed.float()

    def queries(self, history: Sequence | JaggedSequence) -> torch.Tensor:
        """Return the last state of each sample, [batch, dim], for `satrap.topk`; zeros for an empty history."""
        states: torch.Tensor = self(history)
        lengths = history.lengths
        queries = states.new_zeros(len(lengths), self.dim)
        queries[lengths > 0] = states[lengths.cumsum(0)[lengths > 0] - 1]
        return queries


class Block(nn.Module):
    """Attention of each place to those before it and to itself, then two layers, each with a residual."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention, self.before_layers = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.layers: nn.Sequential = nn.Sequential(
            nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim), nn.Dropout(dropout)
        )
        self.dropout = dropout

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the next states [batch, length, dim]."""
        normed = self.before_attention(states)
        query, key, value = (
            layer(inputs).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for layer, inputs in ((self.query, normed), (self.key, states), (self.value, states))
        )
        dropout = self.dropout if self.training else 0.0
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        states = normed + self.out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = states + self.layers(self.before_layers(states))
        return out
