"""The features of a model in the order that every batch uses, and the column where each begins in a block of rows.

Takes what the user declares (`{"user_id": user, "history": item.bag("mean")}`) and fixes the order: features of one
table are adjacent, so that a batch's ids arrive grouped by table. Reads no data and looks up no rows.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, Self

from satrap.config.tables import Feature, Table
from satrap.config.validation import ByName, Serializable, check_name, describe, known_arguments, require_mapping
from satrap.errors import ConfigError

__all__ = ["Feature", "Features"]


class Features(Serializable, Mapping[str, Feature]):
    """Features by name: tables in order of first appearance, and within a table the user's order.

    A block of pooled rows has one line for each sample: feature f is block[:, columns[f] : columns[f] + dims[f]].
    """

    @known_arguments()
    def __init__(self, features: Mapping[str, Feature | Table]) -> None:
        """Order the features. A bare table stands for Feature(table, "sum")."""
        if not isinstance(features, Mapping) or not features:
            raise ConfigError(
                f"features are {describe(features)}; expected a dict of at least one, e.g. {{'user': table}}"
            )
        by_name = {
            check_name("Feature", name, "'user_id'"): _as_feature(name, given) for name, given in features.items()
        }
        tables: dict[str, Table] = {}
        for name, feature in by_name.items():
            table = tables.setdefault(feature.table.name, feature.table)
            if table != feature.table:
                raise ConfigError(
                    f"feature {name!r}: its table {table.name!r} is configured differently from the table of that "
                    f"name before it ({_differences(table, feature.table)}): use one Table object for both, "
                    "or two names"
                )
        _check_aligned(by_name)
        ranks = {name: rank for rank, name in enumerate(tables)}
        ordered = sorted(by_name, key=lambda name: ranks[by_name[name].table.name])  # stable
        self._features = ByName("feature", {name: by_name[name] for name in ordered})
        self.names = tuple(ordered)
        """The features' names, in this order."""
        self.tables = tuple(tables.values())
        """The tables, each once."""
        self.table_index = tuple(ranks[feature.table.name] for feature in self._features.values())
        """For each feature the index in `tables` of the table that it looks rows up in. Never falls."""
        self.dims = tuple(feature.table.dim for feature in self._features.values())
        """For each feature the number of elements of a row."""
        pooled = {name: feature.table.dim for name, feature in self._features.items() if feature.pooling != "none"}
        begins = dict(zip(pooled, accumulate(pooled.values(), initial=0), strict=False))
        self.columns = tuple(begins.get(name, -1) for name in ordered)
        """For each feature the column where it begins in a block; -1 for a sequence, which is in no block."""
        self.pooled: dict[str, int] = pooled
        """The features of a block, in its order, each with its dim."""
        self.total_dim: int = sum(pooled.values())
        """Number of columns of a block."""

    def aligned(self, name: str) -> tuple[str, ...]:
        """Return the names of a sequence and of those that are aligned with it."""
        names = {name}
        while more := {name for name in self if self[name].aligned_with in names} - names:
            names |= more
        return tuple(name for name in self if name in names)

    def expanded(self, items: str) -> "Features":
        """Return the features of a model that takes `Batch.expand(items)`: the jagged sequence, and those aligned with
        it, have one id in each sample."""
        if items not in self or not self[items].jagged:
            sequences = [name for name, feature in self.items() if feature.jagged]
            raise ConfigError(f"expanded: items is {items!r}; expected a jagged sequence of the model, of {sequences}")
        aligned = self.aligned(items)
        return Features({name: Feature(f.table) if name in aligned else f for name, f in self.items()})

    def __getitem__(self, name: str) -> Feature:
        return self._features[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def to_dict(self) -> dict[str, Any]:
        """Return these features as plain JSON types, in their order."""
        return {name: feature.to_dict() for name, feature in self.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the features that `to_dict` wrote."""
        return cls({name: Feature.from_dict(feature) for name, feature in require_mapping("Features", data).items()})

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{name}: {_shown(feature)}' for name, feature in self.items())})"


def _shown(feature: Feature) -> str:
    """Return a feature as it is declared, with its table's name and dim."""
    table = f"{feature.table.name}[{feature.table.dim}]"
    if feature.pooling == "none":
        length = "" if feature.max_length is None else str(feature.max_length)
        return f"{table}.sequence({length}{', jagged=True' if length and feature.jagged else ''})"
    weighted = ", weighted=True" if feature.weighted else ""
    return table if feature.pooling == "sum" and not weighted else f"{table}.bag({feature.pooling!r}{weighted})"


def _check_aligned(features: Mapping[str, Feature]) -> None:
    """Raise ConfigError unless each sequence that is aligned with another has a sequence of its form."""
    for name, feature in features.items():
        other = feature.aligned_with
        if other is None:
            continue
        if other == name or other not in features or features[other].pooling != "none":
            sequences = [
                candidate for candidate in features if features[candidate].pooling == "none" and candidate != name
            ]
            raise ConfigError(
                f"feature {name!r}: aligned_with is {other!r}; expected another sequence of the model, of {sequences}"
            )
        for field in ("max_length", "keep", "jagged"):
            mine, its = getattr(feature, field), getattr(features[other], field)
            if mine != its:
                raise ConfigError(
                    f"feature {name!r}: {field} is {mine!r}, and {its!r} in {other!r}, with which it is aligned; "
                    "expected one value, so that both keep the same positions"
                )


def _as_feature(name: str, feature: object) -> Feature:
    if isinstance(feature, Table):
        return Feature(feature)
    if not isinstance(feature, Feature):
        raise ConfigError(f"feature {name!r} is {describe(feature)}; expected a satrap.Table or a table.bag(...)")
    return feature


def _differences(one: Table, other: Table) -> str:
    first, second = one.to_dict(), other.to_dict()
    return ", ".join(f"{key}: {first[key]} and {second[key]}" for key in first if first[key] != second[key])
