"""Parts that the models share: the features in the block, checks of sizes and inputs, a stack of linear layers.

A model takes the shape of the embeddings from `satrap.Embeddings` or its `.features` when it is created, and the block
[batch, total_dim] in every step: the pooled rows of all features side by side. Features without pooling, sequences, are
not in the block, so a model refuses them unless its user names them in `ignore`.
"""

import numbers
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from satrap.config.features import Features
from satrap.config.tables import Feature
from satrap.errors import ConfigError, InputError


def block_dims(where: str, embeddings: object, ignore: Sequence[str] = ()) -> dict[str, int]:
    """Return the dim of each feature in the block, in the block's order. ignore: the sequences, which are not in it."""
    features = _features_of(where, embeddings)
    sequences = [name for name in features if name not in features.pooled]
    if isinstance(ignore, str) or sorted(ignore) != sorted(sequences):
        raise ConfigError(
            f"{where}: the sequences of the embeddings are {sequences}, and ignore is {ignore!r}: pool them, by "
            f"table.bag('mean') in place of table.sequence(n), or give ignore={sequences} if another part of your "
            "model uses batch[name]"
        )
    if not features.pooled:
        raise ConfigError(f"{where}: all features are sequences; expected at least one that is pooled")
    return dict(features.pooled)


def sequence_feature(where: str, embeddings: object, name: str) -> tuple[Feature, list[str]]:
    """Return the feature of that name, a sequence, and the names of the other features."""
    features = _features_of(where, embeddings)
    sequences = [feature for feature in features if features[feature].pooling == "none"]
    if name not in sequences:
        raise ConfigError(f"{where}: history is {name!r}; expected one of the sequences {sequences}")
    return features[name], [other for other in features if other != name]


def _features_of(where: str, embeddings: object) -> Features:
    features: object = getattr(embeddings, "features", embeddings)
    if not isinstance(features, Features):
        raise ConfigError(
            f"{where}: embeddings is a {type(embeddings).__name__}; expected satrap.Embeddings or its features"
        )
    return features


def history_of(where: str, embeddings: object, history: str, num_heads: int, ignore: Sequence[str]) -> tuple[int, int]:
    """Return the dim and the max_length of the one sequence that a model of histories takes.

    num_heads: by which the dim must be divisible. ignore: must name all other features."""
    feature, others = sequence_feature(where, embeddings, history)
    if isinstance(ignore, str) or sorted(ignore) != sorted(others):
        raise ConfigError(
            f"{where}: its input is the sequence {history!r}, the other features are {others}, and ignore is "
            f"{ignore!r}; expected ignore={others}, if the loss or another part of your model uses batch[name]"
        )
    if feature.max_length is None:
        raise ConfigError(
            f"{where}: {history!r} has no max_length, and the model has weights for each place; use "
            "table.sequence(max_length), or table.sequence(max_length, jagged=True)"
        )
    dim = feature.table.dim
    if dim % count(where, "num_heads", num_heads, 1):
        raise ConfigError(f"{where}: num_heads is {num_heads} and the rows have dim {dim}; expected a divisor")
    return dim, feature.max_length


def columns_of(where: str, dims: dict[str, int], names: Sequence[str]) -> torch.Tensor:
    """Return the columns in the block of some of its features, side by side."""
    begins = dict(zip(dims, accumulate(dims.values(), initial=0), strict=False))
    unknown = [name for name in names if name not in dims]
    if isinstance(names, str) or unknown or not names:
        raise ConfigError(f"{where} is {names!r}; expected at least one of the pooled features {list(dims)}")
    return torch.cat([torch.arange(begins[name], begins[name] + dims[name]) for name in names])


def check_inputs(
    where: str, dense: torch.Tensor | None, embeddings: torch.Tensor, num_dense: int, total_dim: int
) -> None:
    """Raise InputError for inputs of another shape than the model's. Reads only shapes, so it costs nothing when
    compiled."""
    if is_traced():  # sizes are tensors there, and comparing them would turn them into constants
        return
    if embeddings.dim() != 2 or embeddings.shape[1] != total_dim:
        raise InputError(
            f"{where}: embeddings have the shape {tuple(embeddings.shape)}; expected [batch, {total_dim}], the block "
            "of the features that the model was created with"
        )
    if dense is None and num_dense == 0:
        return
    if dense is None or dense.shape != (embeddings.shape[0], num_dense):
        shown = "is None" if dense is None else f"has the shape {tuple(dense.shape)}"
        hint = "; name the columns in the source: dense=[...]" if dense is None or dense.shape[-1] == 0 else ""
        raise InputError(
            f"{where}: dense {shown}; expected the shape ({embeddings.shape[0]}, {num_dense}), one row for each sample "
            f"and num_dense columns{'' if num_dense else ', or None'}{hint}"
        )


def is_traced() -> bool:
    """Return whether torch.jit.trace records this call."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def count(where: str, name: str, value: object, low: int) -> int:
    """Return the value if it is an integer of at least `low`; else raise ConfigError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ConfigError(f"{where}: {name} is {value!r}; expected an integer of at least {low}")
    return int(value)


def widths(where: str, name: str, value: Sequence[int]) -> list[int]:
    """Return the widths of a stack of layers, which may be empty; raise ConfigError if some are invalid."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{where}: {name} is {value!r}; expected the widths of the layers, e.g. (512, 256)")
    return [count(where, f"{name}[{index}]", width, 1) for index, width in enumerate(value)]


def stack(sizes: Sequence[int], *, last_relu: bool, pads_first: bool = False) -> nn.Sequential:
    """Return linear layers from sizes[0] to sizes[-1] with a ReLU between each two, and after the last if
    `last_relu`. pads_first: the first is a `PaddedLinear`."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        kind = PaddedLinear if pads_first and not layers else nn.Linear
        layers += [kind(before, after), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class PaddedLinear(nn.Linear):
    """A linear layer that multiplies a multiple of 8 columns, which a GPU's tensor cores need for their full rate. The
    weight has columns of zeros while it is multiplied, so parameters and state dict are those of `nn.Linear`."""

    @property
    def padding(self) -> int:
        """The number of columns that an input may have beyond `in_features`. They must be finite."""
        return -self.in_features % 8

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Take `in_features` columns, or `padding` more."""
        is_padded = not is_traced() and input.shape[-1] > self.in_features
        weight = nn.functional.pad(self.weight, (0, self.padding)) if is_padded else self.weight
        return nn.functional.linear(input, weight, self.bias)
