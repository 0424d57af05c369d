"""The job that all processes of a run must agree on before batches may cross between them: its tables and seed.

Pure. A job travels as JSON in the first call to a server and is compared field by field, so two programs that differ in
one number get an error that names it, instead of training together.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from satrap.config.optimizers import Ftrl
from satrap.config.tables import DEFAULT_BUCKETS, MAX_BUCKETS, Table
from satrap.config.validation import Serializable, check_integer, check_kind, flat, set_field
from satrap.errors import ConfigError

_BUCKETS_PER_SERVER = 8  # so that the busiest server has at most 1.13 times the mean


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

    def on_servers(self, num_servers: int, there: "Job | None") -> "Job":
        """Return the job with a number of buckets for each table that does not set one: enough for so many servers.

        there: the job that the servers have already. Its numbers are kept, however many servers there are now.
        """
        if there is not None:
            return replace(self, tables=with_buckets_of(self.tables, there.tables))
        number = buckets_for(num_servers)
        return replace(self, tables=tuple(t.with_buckets(number) if t.shard == "rows" else t for t in self.tables))

    def differences(self, other: "Job") -> list[str]:
        """Return how this job differs from `other`, field by field: "table 'item', dim: 16 here, 32 there".

        The learning rate may differ, because each update brings its own; not FTRL's, which a row's first state uses.
        """
        lines = [] if self.seed == other.seed else [f"seed: {self.seed} here, {other.seed} there"]
        names, there = [table.name for table in self.tables], [table.name for table in other.tables]
        if names != there:
            return [*lines, f"tables, in their order: {names} here, {there} there"]
        for mine, its in zip(map(_identity, self.tables), map(_identity, other.tables), strict=True):
            lines += [
                f"table {mine['name']!r}, {key}: {mine.get(key)!r} here, {its.get(key)!r} there"
                for key in sorted(mine.keys() | its.keys())
                if mine.get(key) != its.get(key)
            ]
        return lines

    @property
    def fingerprint(self) -> str:
        """Eight characters that differ between jobs that `differences` tells apart."""
        text = json.dumps([self.seed, [_identity(table) for table in self.tables]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def buckets_for(num_servers: int) -> int:
    """Return how many buckets a table without a capacity has on so many servers."""
    num = max(DEFAULT_BUCKETS, _BUCKETS_PER_SERVER * num_servers)
    return min(1 << (num - 1).bit_length(), MAX_BUCKETS)


def with_buckets_of(tables: Sequence[Table], there: Sequence[Table]) -> tuple[Table, ...]:
    """Return the tables, where those that do not set `num_buckets` take the number of the table of the same name in
    `there`."""
    known = {table.name: table.resolved_num_buckets for table in there}
    return tuple(table.with_buckets(known.get(table.name, table.resolved_num_buckets)) for table in tables)


def _identity(table: Table) -> dict[str, Any]:
    identity = flat(table.to_dict()) | {"num_buckets": table.resolved_num_buckets}
    if not isinstance(table.optimizer, Ftrl):
        del identity["optimizer.lr"]
    return identity
