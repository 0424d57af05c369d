"""Which server owns which bucket. Pure: numbers in, numbers out.

A bucket is the unit of ownership: all ids whose hash begins alike. Every table is cut into a number of them that its
configuration fixes, so a row's bucket never changes; its owner may, and each change makes a map of a higher version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from satrap.checks import check_integer, known_keys, require_mapping
from satrap.errors import ConfigError

MOST_SERVERS = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMap:
    """The owner of every bucket of every table."""

    version: int
    """Counts changes, from 1."""
    num_servers: int
    """Servers are 0 .. num_servers - 1. One may own nothing."""
    owners: tuple[tuple[int, ...], ...]
    """Of each table, of each of its buckets: the server."""

    def __post_init__(self) -> None:
        check_integer("BucketMap", "version", self.version, 1, 2**32 - 1)
        check_integer("BucketMap", "num_servers", self.num_servers, 1, MOST_SERVERS)
        for t, table in enumerate(self.owners):
            wrong = [owner for owner in table if not 0 <= owner < self.num_servers]
            if wrong or not table:
                found = f"server {wrong[0]}" if wrong else "no bucket"
                raise ConfigError(f"bucket map: table {t} names {found}; wanted servers 0..{self.num_servers - 1}")

    @classmethod
    def even(cls, num_buckets: Sequence[int], num_servers: int) -> Self:
        """The first map: adjacent buckets lie together, and every server owns as many as any other, give or take one.
        Tables begin at different servers, so that many small ones are spread, too."""
        owners, first = [], 0
        for buckets in num_buckets:
            each = tuple((b * num_servers // max(buckets, num_servers) + first) % num_servers for b in range(buckets))
            owners.append(each)
            first += len(set(each))
        return cls(version=1, num_servers=num_servers, owners=tuple(owners))

    def to_dict(self) -> dict[str, Any]:
        """This map as plain JSON types."""
        return {"version": self.version, "num_servers": self.num_servers, "owners": [list(t) for t in self.owners]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The map that `to_dict` wrote."""
        given = known_keys(cls, "BucketMap", require_mapping("BucketMap", data))
        owners = given.pop("owners", None)
        if not isinstance(owners, list) or not all(
            isinstance(table, list) and all(type(owner) is int for owner in table) for table in owners
        ):
            raise ConfigError(f"bucket map: owners is a {type(owners).__name__}; wanted a list of lists of servers")
        return cls(owners=tuple(map(tuple, owners)), **given)
