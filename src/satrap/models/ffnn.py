"""FFNN: a fully connected network over dense features and embeddings, the model of the paper's measurements.

The default widths are the paper's; over 26 features of dim 16 they cost 77 MFLOP per sample in training.
"""

from collections.abc import Sequence

import torch
from torch import nn

from satrap.config.validation import known_arguments
from satrap.models.parts import block_dims, check_inputs, count, stack, widths


class FFNN(nn.Module):
    """Linear layers with ReLU between them, from all columns to the logit."""

    @known_arguments()
    def __init__(
        self,
        num_dense: int,
        embeddings: object,
        hidden: Sequence[int] = (4096, 2048, 1024, 512, 256),
        ignore: Sequence[str] = (),
    ) -> None:
        """embeddings: a satrap.Embeddings or its features, of any dims. hidden: the widths before the logit.

        ignore: features without pooling, which another part of the model uses: all of them, since this model cannot.
        """
        super().__init__()
        self.num_dense: int = count("FFNN", "num_dense", num_dense, 0)
        """Number of dense features."""
        self.total_dim: int = sum(block_dims("FFNN", embeddings, ignore).values())
        """Number of columns of the embeddings."""
        sizes = [self.num_dense + self.total_dim, *widths("FFNN", "hidden", hidden), 1]
        self.layers: nn.Sequential = stack(sizes, last_relu=False)
        """All layers."""

    def forward(self, dense: torch.Tensor | None, embeddings: torch.Tensor) -> torch.Tensor:
        """Return logits [batch] for dense [batch, num_dense], None if that is 0, and embeddings [batch, total_dim]."""
        check_inputs("FFNN", dense, embeddings, self.num_dense, self.total_dim)
        logits: torch.Tensor = self.layers(embeddings if dense is None else torch.cat([dense, embeddings], 1))
        return logits.squeeze(1).float()
