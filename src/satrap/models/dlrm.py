"""DLRM: dense features and embeddings interact in the dot products of all pairs of vectors."""

from collections.abc import Sequence

import torch
from torch import nn

from satrap.config.validation import known_arguments
from satrap.errors import ConfigError
from satrap.models.interaction import Interaction
from satrap.models.parts import block_dims, check_inputs, count, stack, widths


class DLRM(nn.Module):
    """Bottom layers map the dense features to the embeddings' dim; top layers take the dot products of all pairs.

    With one feature and no dense features there are no pairs, and the top layers take the feature's vector.
    """

    @known_arguments()
    def __init__(
        self,
        num_dense: int,
        embeddings: object,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (256, 1),
        ignore: Sequence[str] = (),
    ) -> None:
        """embeddings: a satrap.Embeddings or its features, all of one dim.

        bottom: widths of the bottom layers before that dim; unused without dense features.
        top: widths of the top layers, ending with 1, the logit.
        ignore: features without pooling, which another part of the model uses: all of them, since this model cannot.
        """
        super().__init__()
        dims = block_dims("DLRM", embeddings, ignore)
        self.dim: int = next(iter(dims.values()))
        """The dim of each feature."""
        other = next((name for name, dim in dims.items() if dim != self.dim), None)
        if other is not None:
            raise ConfigError(
                f"DLRM: feature {next(iter(dims))!r} has dim {self.dim} and {other!r} has {dims[other]}; expected one "
                "dim for all, since DLRM multiplies all pairs: give their tables the same dim, or use DCN or FFNN"
            )
        top = widths("DLRM", "top", top)
        if not top or top[-1] != 1:
            raise ConfigError(f"DLRM: top is {tuple(top)}; expected 1 as its last width, the logit, e.g. (256, 1)")
        self.num_dense: int = count("DLRM", "num_dense", num_dense, 0)
        """Number of dense features."""
        self.total_dim: int = len(dims) * self.dim
        """Number of columns of the embeddings."""
        sizes = [self.num_dense, *widths("DLRM", "bottom", bottom), self.dim]
        self.bottom: nn.Sequential | None = stack(sizes, last_relu=True) if self.num_dense else None
        num_vectors = len(dims) + (1 if self.num_dense else 0)
        self.interaction: Interaction | None = Interaction(num_vectors, self.dim) if num_vectors > 1 else None
        """The dot products; None if there is one vector."""
        # A single vector has no pairs: it is the input of the top itself, which would otherwise have none.
        vector_dim = self.dim if self.num_dense or num_vectors == 1 else 0
        width = vector_dim + num_vectors * (num_vectors - 1) // 2
        self.top: nn.Sequential = stack([width, *top], last_relu=False, pads_first=True)
        """The layers up to the logit."""

    def forward(self, dense: torch.Tensor | None, embeddings: torch.Tensor) -> torch.Tensor:
        """Return logits [batch] for dense [batch, num_dense], None if that is 0, and embeddings [batch, total_dim]."""
        check_inputs("DLRM", dense, embeddings, self.num_dense, self.total_dim)
        first = None if self.bottom is None else self.bottom(dense)
        padding = getattr(self.top[0], "padding", 0)  # a layer that replaced the first may take no more columns
        crossed = embeddings if self.interaction is None else self.interaction(first, embeddings, padding)
        logits: torch.Tensor = self.top(crossed)
        return logits.squeeze(1).float()
