"""DIN: a history is summed with weights that depend on the item in question, its target.

A small network gives each row of the history a weight by the row, the target, their product and their difference. The
weights are no softmax: a long history of matching items has a larger sum than a short one.
"""

from collections.abc import Sequence as Names

import torch
from torch import nn

from satrap.config.validation import known_arguments
from satrap.errors import ConfigError, InputError
from satrap.models.parts import block_dims, check_inputs, columns_of, count, sequence_feature, stack, widths
from satrap.train.sequence import JaggedSequence, Sequence


class DIN(nn.Module):
    """A deep stack over dense features, embeddings and the history, summed with attention to the target."""

    target_columns: torch.Tensor

    @known_arguments()
    def __init__(
        self,
        num_dense: int,
        embeddings: object,
        history: str,
        target: str,
        attention: Names[int] = (36,),
        deep: Names[int] = (200, 80),
        ignore: Names[str] = (),
    ) -> None:
        """embeddings: a satrap.Embeddings or its features. history: the name of a sequence.

        target: the pooled feature with the item in question, of the history's dim.
        attention: widths of the layers that give a row its weight. deep: widths of the deep stack.
        ignore: the other features without pooling, which another part of the model uses: all of them.
        """
        super().__init__()
        feature, _ = sequence_feature("DIN", embeddings, history)
        dims = block_dims("DIN", embeddings, [*ignore, history] if not isinstance(ignore, str) else ignore)
        self.register_buffer("target_columns", columns_of("DIN, target", dims, [target]), persistent=False)
        self.dim: int = dims[target]
        if feature.table.dim != self.dim:
            raise ConfigError(
                f"DIN: target {target!r} has dim {self.dim} and history {history!r} has {feature.table.dim}; expected "
                "one dim, since their rows are multiplied: look both up in one table"
            )
        self.num_dense: int = count("DIN", "num_dense", num_dense, 0)
        self.total_dim: int = sum(dims.values())
        self.attention: nn.Sequential = stack(
            [4 * self.dim, *widths("DIN", "attention", attention), 1], last_relu=False
        )
        sizes = [self.num_dense + self.total_dim + self.dim, *widths("DIN", "deep", deep), 1]
        self.deep: nn.Sequential = stack(sizes, last_relu=False)

    def forward(
        self, dense: torch.Tensor | None, embeddings: torch.Tensor, history: Sequence | JaggedSequence
    ) -> torch.Tensor:
        """Return logits [batch] for dense [batch, num_dense], None if that is 0, embeddings [batch, total_dim], and the
        history."""
        check_inputs("DIN", dense, embeddings, self.num_dense, self.total_dim)
        rows, lengths = history.rows, history.lengths
        if len(lengths) != len(embeddings) or rows.shape[1] != self.dim:
            raise InputError(
                f"DIN: the history has {len(lengths)} samples of rows of {rows.shape[1]}; expected {len(embeddings)} "
                f"samples and rows of {self.dim}"
            )
        sample = torch.arange(len(lengths), device=rows.device).repeat_interleave(lengths, output_size=len(rows))
        target = embeddings[:, self.target_columns][sample]
        weights = self.attention(torch.cat([rows, target, rows * target, rows - target], 1))
        interest = rows.new_zeros(len(lengths), self.dim).index_add(0, sample, (weights * rows).to(rows.dtype))
        inputs = [embeddings, interest] if dense is None else [dense, embeddings, interest]
        logits: torch.Tensor = self.deep(torch.cat(inputs, 1))
        return logits.squeeze(1).float()
