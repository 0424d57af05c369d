"""What a trainer sends to a worker in its handshake: all that the worker needs to look up and update for the trainer.

Pure. It travels as JSON and is compared field by field.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from satrap.config.features import Features
from satrap.config.job import Job
from satrap.config.tables import Table
from satrap.config.validation import check_integer, flat, known_keys, set_field
from satrap.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The configuration of one trainer's session at a worker."""

    features: Features
    seed: int
    servers: tuple[str, ...]
    """Addresses of the servers, in order."""
    wire: str
    """How rows and gradients cross to and from the servers."""
    barrier_size: int
    """How many trainers' updates form one step; 0: each update is a step."""
    extra_tables: tuple[Table, ...] = ()
    """Tables that the servers have in addition to the features'."""

    def __post_init__(self) -> None:
        if not isinstance(self.features, Features):
            raise ConfigError(f"WorkerSpec: features is a {type(self.features).__name__}; expected Features")
        check_integer("WorkerSpec", "barrier_size", self.barrier_size, 0, 2**32 - 1)
        set_field(self, "servers", tuple(self.servers))

    @property
    def job(self) -> Job:
        """What the servers and the worker must agree on."""
        return Job(tables=(*self.features.tables, *self.extra_tables), seed=self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Return this spec as plain JSON types."""
        return {
            "features": self.features.to_dict(),
            "seed": self.seed,
            "servers": list(self.servers),
            "wire": self.wire,
            "barrier_size": self.barrier_size,
            "extra_tables": [table.to_dict() for table in self.extra_tables],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the spec that `to_dict` wrote."""
        given = known_keys(cls, "WorkerSpec", data)
        given["features"] = Features.from_dict(given["features"])
        given["extra_tables"] = tuple(Table.from_dict(table) for table in given.get("extra_tables", ()))
        if not isinstance(given["servers"], list):
            raise ConfigError(
                f"WorkerSpec: servers is a {type(given['servers']).__name__}; expected a list of addresses"
            )
        return cls(**given)

    def differences(self, other: "WorkerSpec") -> list[str]:
        """Return the differences from `other`, except those of the tables: "feature 'history', pooling: ..."."""
        found = [
            f"{name}: {mine!r} here, {its!r} there"
            for name in ("servers", "wire", "barrier_size")
            if (mine := getattr(self, name)) != (its := getattr(other, name))
        ]
        if self.features.names != other.features.names:
            return [*found, f"features: {list(self.features.names)} here, {list(other.features.names)} there"]
        for name in self.features:
            mine, its = (flat(each.features[name].to_dict()) for each in (self, other))
            mine["table"], its["table"] = mine["table.name"], its["table.name"]
            found += [
                f"feature {name!r}, {key}: {mine[key]!r} here, {its[key]!r} there"
                for key in ("table", "pooling", "weighted", "max_length", "keep", "padding_id")
                if mine[key] != its[key]
            ]
        return found
