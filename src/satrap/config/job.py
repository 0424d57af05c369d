"""What all processes of a run must agree on before a batch may cross between them: the job's tables and seed.

Pure. It travels as JSON in the first call to a server, and is compared field by field, so that two programs that differ
in one number are told which, instead of training something else together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from satrap.config.tables import Ftrl, Table
from satrap.config.validation import check_integer, check_kind, flat, known_keys, set_field
from satrap.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """See the file's docstring."""

    tables: tuple[Table, ...]
    """In the order that every call numbers them by."""
    seed: int = 0
    """What initial values and random draws are a function of."""

    def __post_init__(self) -> None:
        set_field(self, "tables", tuple(self.tables))
        set_field(self, "seed", check_integer("Job", "seed", self.seed, 0, 2**64 - 1))
        for table in self.tables:
            check_kind("Job", "table", table, (Table,))
        names = [table.name for table in self.tables]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"Job: tables are {names}; wanted at least one, each of a name of its own")

    def to_dict(self) -> dict[str, Any]:
        """This job as plain JSON types."""
        return {"seed": self.seed, "tables": [table.to_dict() for table in self.tables]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The job that `to_dict` wrote."""
        given = known_keys(cls, "Job", data)
        if not isinstance(given["tables"], list):
            raise ConfigError(f"Job: tables is a {type(given['tables']).__name__}; wanted a list of them")
        given["tables"] = tuple(Table.from_dict(table) for table in given["tables"])
        return cls(**given)

    def differences(self, other: "Job") -> list[str]:
        """In what this job is another one than `other`, field by field: "table 'item', dim: 16 here, 32 there".

        The learning rate may differ, because each update brings its own; but not FTRL's, which its state begins with.
        """
        found = [] if self.seed == other.seed else [f"seed: {self.seed} here, {other.seed} there"]
        names, there = [table.name for table in self.tables], [table.name for table in other.tables]
        if names != there:
            return [*found, f"tables, in their order: {names} here, {there} there"]
        for mine, its in zip(map(_identity, self.tables), map(_identity, other.tables), strict=True):
            found += [
                f"table {mine['name']!r}, {key}: {mine.get(key)!r} here, {its.get(key)!r} there"
                for key in sorted(mine.keys() | its.keys())
                if mine.get(key) != its.get(key)
            ]
        return found


def _identity(table: Table) -> dict[str, Any]:
    found = flat(table.to_dict()) | {"num_buckets": table.resolved_num_buckets}
    if not isinstance(table.optimizer, Ftrl):
        del found["optimizer.lr"]
    return found
