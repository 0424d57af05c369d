"""What `satrap.convert` puts in place of TorchRec's EmbeddingBagCollection and EmbeddingCollection.

TorchRec's forward calls the module of a table once for each feature. These join the features of a table, and look the
rows of all tables up in one call. They take a KeyedJaggedTensor and return what TorchRec's collections return.
TorchRec is imported only in forward: a model with such a collection has imported it before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from satrap.config.tables import Uniform
from satrap.errors import InputError
from satrap.nn.embedding import call_together, require_no_export

_MODULES = "torchrec.modules.embedding_modules"


class _Collection(torch.nn.Module):
    """What both have in common: the configs, and the features of each table joined."""

    def __init__(self, configs: Sequence[Any], names: Sequence[Sequence[str]], device: torch.device) -> None:
        """names: what the output calls the features of each table."""
        super().__init__()
        self._configs, self._names = list(configs), [list(given) for given in names]
        self._device = device

    @property
    def device(self) -> torch.device:
        """The device that the replaced module was created on."""
        return self._device

    def _joined(self, features: Any) -> Iterator[tuple[list[str], list[Any], Tensor]]:
        """Yield for each table the names of its outputs, its features' jagged tensors, and their ids joined."""
        jagged: Mapping[str, Any] = features.to_dict()
        for config, names in zip(self._configs, self._names, strict=True):
            if missing := [name for name in config.feature_names if name not in jagged]:
                raise InputError(
                    f"table {config.name!r} takes feature {missing[0]!r}, which the KeyedJaggedTensor does not have; "
                    f"expected a key for each of {config.feature_names}, found {list(jagged)}"
                )
            given = [jagged[name] for name in config.feature_names]
            yield names, given, _joined([part.values() for part in given])


class BagCollection(_Collection):
    """Stands in for torchrec.EmbeddingBagCollection."""

    def __init__(self, collection: Any) -> None:
        """collection: what this replaces; its bags have been replaced already, or stay as they are."""
        configs = collection.embedding_bag_configs()
        names, per_table = iter(collection._embedding_names), [len(config.feature_names) for config in configs]
        super().__init__(configs, [[next(names) for _ in range(count)] for count in per_table], collection.device)
        self.embedding_bags = collection.embedding_bags
        self._is_weighted: bool = collection.is_weighted()
        self.train(collection.training)

    def is_weighted(self) -> bool:
        """Return whether the bags use the weights of the KeyedJaggedTensor."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[Any]:
        """Return TorchRec's configs of the tables."""
        return self._configs

    def forward(self, features: Any) -> Any:
        """Return the pooled rows of each feature as a KeyedTensor."""
        require_no_export(self.embedding_bags.values())
        from torchrec.sparse.jagged_tensor import KeyedTensor

        if features.inverse_indices_or_none() is not None:
            raise InputError(
                "the KeyedJaggedTensor has inverse indices, of a batch with a size for each feature; expected one "
                "batch size for all features: repeat the samples"
            )
        keys: list[str] = []
        bags: list[tuple[Tensor, Tensor, Tensor | None]] = []
        sizes: list[list[int]] = []  # the number of bags of each feature
        for names, given, ids in self._joined(features):
            keys += names
            lengths = _joined([part.lengths() for part in given])
            weights = _joined([part.weights() for part in given]) if self._is_weighted else None
            bags.append((ids, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), weights))
            sizes.append([len(part.lengths()) for part in given])
        rows = call_together([self.embedding_bags[config.name] for config in self._configs], bags)
        pooled = [part for of_table, bags_of in zip(rows, sizes, strict=True) for part in of_table.split(bags_of)]
        return KeyedTensor(keys, [part.shape[1] for part in pooled], torch.cat(pooled, 1))

    __call__: Callable[..., Any]


class SequenceCollection(_Collection):
    """Stands in for torchrec.EmbeddingCollection."""

    def __init__(self, collection: Any) -> None:
        """collection: what this replaces; its modules have been replaced already, or stay as they are."""
        super().__init__(
            collection.embedding_configs(), collection.embedding_names_by_table(), torch.device(collection.device)
        )
        self.embeddings = collection.embeddings
        self._dim: int = collection.embedding_dim()
        self._need_indices: bool = collection.need_indices()
        self.train(collection.training)

    def need_indices(self) -> bool:
        """Return whether the output has the ids as its weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the dim of all tables."""
        return self._dim

    def embedding_configs(self) -> list[Any]:
        """Return TorchRec's configs of the tables."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return what the output calls the features of each table."""
        return self._names

    def forward(self, features: Any) -> dict[str, Any]:
        """Return the rows of each feature as a JaggedTensor."""
        require_no_export(self.embeddings.values())
        from torchrec.sparse.jagged_tensor import JaggedTensor

        by_feature: dict[str, Any] = {}
        joined = list(self._joined(features))
        modules = [self.embeddings[config.name] for config in self._configs]
        looked_up = call_together(modules, [(ids,) for *_, ids in joined])
        for (names, given, _), of_table in zip(joined, looked_up, strict=True):
            parts = of_table.split([len(part.values()) for part in given])
            for name, part, rows in zip(names, given, parts, strict=True):
                indices = part.values() if self._need_indices else None
                by_feature[name] = JaggedTensor(rows, lengths=part.lengths(), weights=indices)
        return by_feature

    __call__: Callable[..., dict[str, Any]]


_KINDS = {"EmbeddingBagCollection": BagCollection, "EmbeddingCollection": SequenceCollection}


def replace_collections(model: torch.nn.Module, replaced: set[int]) -> None:
    """Replace the collections of a model that have a module of these, by id()."""
    new: dict[int, BagCollection | SequenceCollection] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        kind = _kind_of(module)
        if kind and path and any(id(part) in replaced for part in module.modules()):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new.setdefault(id(module), kind(module)))


def initial_of(model: torch.nn.Module, path: str) -> Uniform | None:
    """Return the values that TorchRec's config gives the rows of a module; None if the config has another kind of
    values."""
    collection, _, name = path.rpartition(".")
    owner = model.get_submodule(collection.rpartition(".")[0]) if "." in collection else model
    if _kind_of(owner) is None:
        return None
    is_bag = hasattr(owner, "embedding_bag_configs")
    configs: list[Any] = owner.embedding_bag_configs() if is_bag else owner.embedding_configs()  # type: ignore
    config = next(config for config in configs if config.name == name)
    draw = getattr(config.init_fn, "func", None)  # that of the config itself, unless the user gave another
    is_own = draw is torch.nn.init.uniform_
    return Uniform(config.get_weight_init_min(), config.get_weight_init_max()) if is_own else None


def _kind_of(module: Any) -> Any:
    """Return what stands in for a module; None if it is no collection of TorchRec's."""
    return _KINDS.get(type(module).__name__) if type(module).__module__ == _MODULES else None


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
