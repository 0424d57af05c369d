"""What a trainer sends to a worker in its handshake: all that the worker needs to look up and update for the trainer.

Pure. It travels as JSON and is compared field by field.
"""

from dataclasses import dataclass, replace
from typing import Any

from satrap.config.features import Features
from satrap.config.id_set import IdSet
from satrap.config.job import Job
from satrap.config.tables import Table, with_frozen_ids
from satrap.config.validation import Serializable, check_integer, flat, set_field


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(Serializable):
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
        check_integer("WorkerSpec", "barrier_size", self.barrier_size, 0, 2**32 - 1)
        set_field(self, "servers", tuple(self.servers))

    @property
    def job(self) -> Job:
        """What the servers and the worker must agree on."""
        return Job(tables=(*self.features.tables, *self.extra_tables), seed=self.seed)

    @property
    def frozen_ids(self) -> list[Any]:
        """The array of each set of frozen ids, which the form in JSON does not have."""
        return [table.frozen.ids for table in self.features.tables if isinstance(table.frozen, IdSet)]

    def with_frozen_ids(self, ids: Any) -> "WorkerSpec":
        """Return the specification that was read from JSON with these arrays, one after another."""
        begin, tables = 0, {}
        for table in self.features.tables:
            if isinstance(table.frozen, IdSet):
                end = begin + len(table.frozen)
                tables[table.name], begin = with_frozen_ids(table, ids[begin:end]), end
        features = {
            name: replace(feature, table=tables.get(feature.table.name, feature.table))
            for name, feature in self.features.items()
        }
        return replace(self, features=Features(features)) if tables else self

    def differences(self, other: "WorkerSpec") -> list[str]:
        """Return the differences from `other`, except those of the tables: "feature 'history', pooling: ..."."""
        differences = [
            f"{name}: {mine!r} here, {its!r} there"
            for name in ("servers", "wire", "barrier_size")
            if (mine := getattr(self, name)) != (its := getattr(other, name))
        ]
        if self.features.names != other.features.names:
            return [*differences, f"features: {list(self.features.names)} here, {list(other.features.names)} there"]
        for name in self.features:
            mine, its = (flat(spec.features[name].to_dict()) for spec in (self, other))
            mine["table"], its["table"] = mine["table.name"], its["table.name"]
            differences += [
                f"feature {name!r}, {key}: {mine[key]!r} here, {its[key]!r} there"
                for key in mine
                if not key.startswith("table.") and mine[key] != its[key]
            ]
        return differences
