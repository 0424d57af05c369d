"""Replaces the nn.Embedding and nn.EmbeddingBag of a model by modules over Satrap's tables.

An nn.Linear whose weight is that of an embedding, such as the tied output layer of a language model, is replaced too,
and so are TorchRec's collections.
Everything is checked before anything is changed. What the new module would not do is refused: max_norm,
scale_grad_by_freq, hooks, a subclass, a weight that another kind of module or a penalty also uses.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Never, get_args

import numpy as np
import torch
from torch import Tensor

from satrap.config.optimizers import Optimizer
from satrap.config.tables import Normal, Table, Uniform
from satrap.config.validation import check_flag, check_integer, kind_of, known_arguments, suggest
from satrap.errors import ConfigError
from satrap.nn.collections import initial_of, replace_collections
from satrap.nn.embedding import Embedding, EmbeddingBag
from satrap.train.embeddings import DEPLOYMENT_ARGUMENTS, Embeddings

_KINDS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PENALTY = "empty it, and give the table's optimizer weight_decay, which decays the rows of each batch"
_HINT = "leave the module out, or change the model"


@known_arguments(DEPLOYMENT_ARGUMENTS, options_of=Embeddings.__init__)
def convert(
    model: torch.nn.Module,
    tables: Mapping[str, Table] | Optimizer,
    *,
    min_rows: int = 1,
    weights: bool = False,
    **options: Any,
) -> Embeddings:
    """Replace modules of the model by `satrap.nn.Embedding` and `satrap.nn.EmbeddingBag`, and return the `Embeddings`
    that has their tables. Modules that share a weight share a table. Call this before the dense optimizer is created.

    tables: the table of each module by the module's name, such as "encoder.item"; or an optimizer: then every
        nn.Embedding and nn.EmbeddingBag with at least `min_rows` rows gets a table, with the module's name, its number
        of rows as num_rows, and initial values as its weight has: normal, of nearly the same mean and deviation. A job
        that is resumed, or has several trainers, must find the same values: call torch.manual_seed before you create
        the model. On device meta, TorchRec's collections have the initial values of their configs.
    min_rows: smallest number of rows of a module that gets a table, if `tables` is an optimizer.
    weights: write the modules' weights into the tables. On servers they must hold no rows of an earlier run.
    options: as in `Embeddings`.
    """
    check_flag("convert", "weights", weights)
    check_integer("convert", "min_rows", min_rows, 1, 2**63 - 1)
    if not any(_modules(model)) and any(isinstance(module, Embedding | EmbeddingBag) for module in model.modules()):
        raise ConfigError("convert: the modules of the model were replaced before: create the model again")
    if isinstance(tables, Mapping):
        chosen = _named(model, tables)
    elif isinstance(tables, get_args(Optimizer)):
        chosen = _large(model, tables, min_rows)
    else:
        raise ConfigError(
            f"tables is {kind_of(tables)}; expected a dict from a module's name to a satrap.Table, or an optimizer, "
            "such as satrap.Adagrad(lr=0.1)"
        )
    _require_no_regularizer(model)
    for choice in chosen:
        choice.require_possible(model, has_weights=weights)
    embeddings = Embeddings({choice.table.name: choice.table for choice in chosen}, **options)
    try:
        new = {id(choice.module): choice.replacement(embeddings) for choice in chosen}
        if weights:
            embeddings.trainers.run_first(lambda: _write(embeddings, chosen), ConfigError)
    except BaseException:
        embeddings.close()
        raise
    tied = _tied_layers(model, chosen)
    for choice in chosen:
        choice.module.weight.in_satrap_table = choice.table.name  # `Embeddings.optimizer` refuses it
        choice.module.forward = partial(_refuse_call, choice.table.name)
        _replace(model, choice.path, new[id(choice.module)])
    for path, (linear, module) in tied.items():
        _replace(model, path, TiedLinear(new[id(module)], linear))
    replace_collections(model, {id(module) for module in new.values()})
    return embeddings


def _refuse_call(table: str, *_: Any, **__: Any) -> Never:
    """Stand in for forward of a module that was replaced: what still calls it would train nothing."""
    raise ConfigError(
        f"this module was replaced by one over table {table!r}, and does not train any more: get it from the model by "
        "its name after satrap.convert; convert models that share a module together, in one nn.ModuleList"
    )


def _replace(model: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A module of the model that will be replaced, under one of its names."""

    path: str
    module: Any
    table: Table

    def require_possible(self, model: torch.nn.Module, *, has_weights: bool) -> None:
        """Raise ConfigError if the new module would differ from this one."""
        module, where, weight = self.module, f"convert: module {self.path!r}", self.module.weight
        if not self.path:
            raise ConfigError("convert: the model itself is an embedding: pass the module that has it")
        refused = {
            f"is a {type(module).__name__}, a class of the model's code": type(module) not in _KINDS,
            f"has max_norm={module.max_norm}": module.max_norm is not None,
            "has scale_grad_by_freq=True": module.scale_grad_by_freq,
            f"has a weight of {weight.dtype}, and rows are float32": weight.dtype != torch.float32,
            "shares its weight with a module that convert has replaced": hasattr(weight, "in_satrap_table"),
            "has hooks": any(getattr(module, name) for name in _HOOKS) or bool(weight._backward_hooks),
        }
        if reasons := [reason for reason, is_so in refused.items() if is_so]:
            raise ConfigError(f"{where} {reasons[0]}, which a table does not do: {_HINT}")
        if weight.is_meta and has_weights:
            raise ConfigError(f"{where} has its weight on device meta, without values to write: pass weights=False")
        if not weight.requires_grad and not has_weights:
            raise ConfigError(
                f"{where} has a frozen weight, and weights is False, so frozen rows would have other values: pass "
                "weights=True"
            )
        if holders := list(_holders(model, module)):
            raise ConfigError(
                f"{where}: attribute {holders[0]!r} of the model has the module too, and would still have the old one: "
                "make the attribute an nn.ModuleList or nn.ModuleDict, or leave it out"
            )
        if holders := list(_holders(model, weight)):
            raise ConfigError(
                f"{where}: attribute {holders[0]!r} of the model has its weight too, such as for an L2 penalty, and "
                f"would no longer see what trains: {_PENALTY}"
            )
        self._require_possible_users(model, where)
        tied = {other.padding_idx for _, other in _owners(model, weight) if isinstance(other, _KINDS)}
        if len(tied) > 1:
            raise ConfigError(
                f"{where} shares its weight with modules of another padding_idx; found {sorted(tied, key=str)}, "
                "expected the same, since a row of padding reads as 0"
            )
        if self.table.dim != module.embedding_dim:
            raise ConfigError(
                f"{where} has embedding_dim {module.embedding_dim}, and table {self.table.name!r} has dim "
                f"{self.table.dim}; expected the same"
            )
        if self.table.num_rows is not None and self.table.num_rows < module.num_embeddings:
            raise ConfigError(
                f"{where} has {module.num_embeddings} rows, and table {self.table.name!r} has num_rows "
                f"{self.table.num_rows}; expected at least as many, or None"
            )
        if has_weights and module.padding_idx is not None and bool(weight[module.padding_idx].any()):
            raise ConfigError(
                f"{where} has padding_idx {module.padding_idx}, whose weight is not 0; rows of padding are 0: {_HINT}, "
                "or pass weights=False"
            )

    def _require_possible_users(self, model: torch.nn.Module, where: str) -> None:
        """Raise ConfigError if a module that shares the weight could not share the table."""
        for name, owner in _owners(model, self.module.weight):
            if isinstance(owner, _KINDS):
                continue
            if type(owner) is not torch.nn.Linear or name.endswith(".bias"):
                raise ConfigError(
                    f"{where} shares its weight with {name!r}, which is neither an embedding nor an nn.Linear: {_HINT}"
                )
            if any(getattr(owner, hooks) for hooks in _HOOKS):
                raise ConfigError(f"{where} shares its weight with {name!r}, whose module has hooks: {_HINT}")
            if self.module.padding_idx is not None:
                raise ConfigError(
                    f"{where} has padding_idx {self.module.padding_idx} and shares its weight with {name!r}, which "
                    f"trains that row, and a row of padding is not trained: {_HINT}"
                )
            if self.table.num_rows != owner.out_features:
                raise ConfigError(
                    f"{where} shares its weight with {name!r}, which needs all {owner.out_features} rows in each step, "
                    f"and table {self.table.name!r} has num_rows {self.table.num_rows}; expected {owner.out_features}"
                )

    def replacement(self, embeddings: Embeddings) -> torch.nn.Module:
        """Return the new module."""
        module, padding = self.module, self.module.padding_idx
        new: Embedding | EmbeddingBag
        if isinstance(module, torch.nn.Embedding):
            new = Embedding(embeddings, self.table, padding_idx=padding)
        else:
            bags: dict[str, Any] = {"mode": module.mode, "include_last_offset": module.include_last_offset}
            new = EmbeddingBag(embeddings, self.table, padding_idx=padding, **bags)
        new.train(module.training)
        return new if module.weight.requires_grad else new.requires_grad_(False)


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the embeddings of a model under each of their names."""
    named = model.named_modules(remove_duplicate=False)
    return ((path, module) for path, module in named if isinstance(module, _KINDS))


def _owners(model: torch.nn.Module, weight: Tensor) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules that use a weight, by the name of the Parameter."""
    return [
        (f"{path}.{name}".removeprefix("."), module)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter is weight
    ]


def _require_no_regularizer(model: torch.nn.Module) -> None:
    """Raise ConfigError if FuxiCTR's model adds a penalty over the Parameters of embeddings to its loss."""
    for path, module in model.named_modules():
        if value := vars(module).get("_embedding_regularizer"):
            name = f"{path}._embedding_regularizer".removeprefix(".")
            raise ConfigError(
                f"convert: {name} is {value!r}, a penalty over Parameters, and rows of a table are none: {_PENALTY}"
            )


def _holders(model: torch.nn.Module, used: Tensor | torch.nn.Module) -> Iterator[str]:
    """Yield the names of attributes in which modules of the model hold this weight or module, Parameters and submodules
    left out."""

    def has(value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(map(has, value.values()))
        if value is used or (isinstance(value, MethodType) and value.__self__ is used):
            return True
        return isinstance(value, list | tuple | set) and any(map(has, value))

    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules", "_buffers") and has(value):
                yield f"{path}.{name}".removeprefix(".")


def _tied_layers(model: torch.nn.Module, chosen: list[_Chosen]) -> dict[str, tuple[torch.nn.Linear, torch.nn.Module]]:
    """Return by name each nn.Linear that shares its weight with a module, and that module."""
    modules = {id(choice.module.weight): choice.module for choice in chosen}
    return {
        path: (layer, modules[id(layer.weight)])
        for path, layer in model.named_modules(remove_duplicate=False)
        if type(layer) is torch.nn.Linear and id(layer.weight) in modules
    }


def _named(model: torch.nn.Module, tables: Mapping[str, Table]) -> list[_Chosen]:
    """Return the modules with these names, and those that share a weight with them."""
    modules = dict(_modules(model))
    by_weight: dict[int, tuple[str, Table]] = {}
    for path, table in tables.items():
        if path not in modules:
            raise ConfigError(
                f"convert: the model has no nn.Embedding or nn.EmbeddingBag {path!r}; {suggest(path, list(modules))}"
            )
        if not isinstance(table, Table):
            raise ConfigError(f"convert: tables[{path!r}] is {kind_of(table)}; expected a satrap.Table")
        before, other = by_weight.setdefault(id(modules[path].weight), (path, table))
        if other != table:
            raise ConfigError(
                f"convert: modules {before!r} and {path!r} share a weight and have different tables, {other.name!r} "
                f"and {table.name!r}; expected one table for both"
            )
    if not by_weight:
        raise ConfigError("convert: tables names no module; expected at least one")
    _require_own_tables(by_weight)
    return [
        _Chosen(path, module, by_weight[id(module.weight)][1])
        for path, module in modules.items()
        if id(module.weight) in by_weight
    ]


def _require_own_tables(by_weight: Mapping[int, tuple[str, Table]]) -> None:
    """Raise ConfigError if two weights would have one table."""
    paths = defaultdict(list)
    for path, table in by_weight.values():
        paths[table.name].append(path)
    for name, sharing in paths.items():
        if len(sharing) > 1:
            raise ConfigError(
                f"convert: modules {sharing[0]!r} and {sharing[1]!r} have different weights and one table {name!r}; "
                "expected a table for each weight; to share rows, tie the modules first: "
                f"model.get_submodule({sharing[1]!r}).weight = model.get_submodule({sharing[0]!r}).weight"
            )


def _large(model: torch.nn.Module, optimizer: Optimizer, min_rows: int) -> list[_Chosen]:
    """Return the modules with enough rows, with a table for each weight."""
    tables: dict[int, Table] = {}
    chosen = []
    for path, module in _modules(model):
        if module.num_embeddings < min_rows:
            continue
        if id(module.weight) not in tables:
            initial = _initial(model, path, module.weight.detach())
            try:
                tables[id(module.weight)] = Table(
                    path or "model",
                    module.embedding_dim,
                    optimizer=optimizer,
                    initial=initial,
                    num_rows=module.num_embeddings,
                )
            except ConfigError as error:
                raise ConfigError(
                    f"convert: module {path!r} cannot have a table by its name and its weight ({error}): name the "
                    "module with a satrap.Table"
                ) from error
        chosen.append(_Chosen(path, module, tables[id(module.weight)]))
    if not chosen:
        raise ConfigError(f"convert: the model has no nn.Embedding or nn.EmbeddingBag with {min_rows} rows or more")
    return chosen


def _initial(model: torch.nn.Module, path: str, weight: Tensor) -> Normal | Uniform:
    """Return the normal distribution of a weight, or what TorchRec's config says of one on device meta. Its numbers are
    as short as they can be, so that nearly always they are the same in another process, which draws another weight from
    the same distribution."""
    if weight.is_meta:
        if (initial := initial_of(model, path)) is None:
            raise ConfigError(
                f"convert: module {path!r} has its weight on device meta, so its initial values are unknown: name "
                "the module with a satrap.Table that has initial=, or create it on the CPU"
            )
        return initial
    if not weight.isfinite().all():
        raise ConfigError(
            f"convert: the weight of module {path!r} holds NaN or infinity; expected finite numbers: initialise the "
            "module again, or load a sound state"
        )
    mean, std = float(weight.mean()), float(weight.std(correction=0))
    error = min(max(0.01, 4 / math.sqrt(2 * weight.numel())), 0.05) * std
    return Normal(mean=_shortest(mean, 2 * error), std=_shortest(std, error))


def _shortest(number: float, error: float) -> float:
    """Return the number with the fewest digits of those that differ by at most `error`."""
    rounded = (float(f"{number:.{digits}e}") for digits in range(16))
    return 0.0 if abs(number) <= error else next((near for near in rounded if abs(near - number) <= error), number)


def _write(embeddings: Embeddings, chosen: list[_Chosen]) -> None:
    """Write the weights into the tables, each once."""
    written = set()
    for choice in chosen:
        if choice.table.name not in written:
            written.add(choice.table.name)
            values = choice.module.weight.detach().cpu().numpy()
            ids = np.setdiff1d(
                np.arange(len(values)), [] if choice.module.padding_idx is None else choice.module.padding_idx
            )
            embeddings.tables[choice.table.name].write(ids, values[ids])


class TiedLinear(torch.nn.Module):
    """An nn.Linear whose weight is all rows of a table. Its only Parameter is the bias."""

    def __init__(self, embedding: torch.nn.Module, layer: torch.nn.Linear) -> None:
        """embedding: the module over the table, with `num_rows`. layer: what this replaces."""
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that the model has it under one name
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias: torch.nn.Parameter | None = layer.bias
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:
        """All rows of the table: each use is a lookup."""
        weight = self._embedding[0].weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the products of the input with all rows, plus the bias."""
        return torch.nn.functional.linear(input, self.weight, self.bias)

    __call__: Callable[..., Tensor]

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, tied to {self._embedding[0]}"
