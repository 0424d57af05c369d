"""The job that all processes of a run must agree on before batches may cross between them: its tables and seed.

Pure. A job travels as JSON in the first call to a server and is compared field by field, so two programs that differ in
one number get an error that names it, instead of training together.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from satrap.config.tables import Ftrl, Table
from satrap.config.validation import Serializable, check_integer, check_kind, flat, set_field
from satrap.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Serializable):
    """The tables and the seed of a run."""

    tables: tuple[Table, ...]
    """The tables, in the order in which every call numbers them."""
    seed: int = 0
    """Initial values and random draws are functions of it."""

    def __post_init__(self) -> None:
        set_field(self, "tables", tuple(self.tables))
        set_field(self, "seed", check_integer("Job", "seed", self.seed, 0, 2**64 - 1))
        for table in self.tables:
            check_kind("Job", "table", table, (Table,))
        names = [table.name for table in self.tables]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"Job: tables are {names}; expected at least one, each with its own name")

    def differences(self, other: "Job") -> list[str]:
        """Returns how this job differs from `other`, field by field: "table 'item', dim: 16 here, 32 there".

        The learning rate may differ, because each update brings its own; not FTRL's, which a row's first state uses.
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

    @property
    def fingerprint(self) -> str:
        """Eight characters that differ between jobs that `differences` tells apart."""
        text = json.dumps([self.seed, [_identity(table) for table in self.tables]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def _identity(table: Table) -> dict[str, Any]:
    found = flat(table.to_dict()) | {"num_buckets": table.resolved_num_buckets}
    if not isinstance(table.optimizer, Ftrl):
        del found["optimizer.lr"]
    return found
