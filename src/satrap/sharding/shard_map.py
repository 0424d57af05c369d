"""The servers of a job at one moment: who owns which bucket, and where each server is called. Pure.

A change makes the next members, of the next map version. A server's number is its place in the list of addresses and
may change; its address does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from satrap.config.validation import known_keys, require_mapping
from satrap.errors import ConfigError
from satrap.sharding.bucket_map import BucketMap

NO_MEMBER = -1
"""The number of a server that is not of the members (any more)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMap:
    """See the file's docstring."""

    bucket_map: BucketMap
    addresses: tuple[str, ...]
    """Of server 0, 1, ..."""

    def __post_init__(self) -> None:
        check_addresses(self.addresses)
        if len(self.addresses) != self.bucket_map.num_servers:
            raise ConfigError(f"{len(self.addresses)} addresses; the bucket map has {self.bucket_map.num_servers}")

    @classmethod
    def first(cls, num_buckets: Sequence[int], addresses: Sequence[str]) -> Self:
        """Of a new job."""
        return cls(bucket_map=BucketMap.even(num_buckets, len(addresses)), addresses=tuple(addresses))

    @property
    def version(self) -> int:
        """Of the map; it rises with every change."""
        return self.bucket_map.version

    def number(self, address: str) -> int | None:
        """Which server is called there; None: none of these."""
        return self.addresses.index(address) if address in self.addresses else None

    def owner(self) -> list[str]:
        """The address of the owner of each bucket, of one table after the other."""
        return [self.addresses[server] for server in self.bucket_map.flat()]

    def joined(self, addresses: Sequence[str]) -> Self:
        """The next ones, with servers that own nothing yet."""
        every = (*self.addresses, *addresses)
        same = {server: server for server in range(len(self.addresses))}
        return type(self)(bucket_map=self.bucket_map.numbered(same, len(every)), addresses=every)

    def moved(self, to: Mapping[int, str]) -> Self:
        """The next ones: these buckets belong to the servers at these addresses."""
        numbers = {bucket: self.addresses.index(address) for bucket, address in to.items()}
        return type(self)(bucket_map=self.bucket_map.moved(numbers), addresses=self.addresses)

    def only(self, addresses: Sequence[str]) -> Self:
        """The next ones: these servers in this order. The others own nothing any more."""
        numbers = {server: addresses.index(each) for server, each in enumerate(self.addresses) if each in addresses}
        return type(self)(bucket_map=self.bucket_map.numbered(numbers, len(addresses)), addresses=tuple(addresses))

    def changes(self, after: "ShardMap") -> dict[tuple[str, str], list[int]]:
        """The buckets that another server owns afterwards, by the addresses of both owners."""
        found: dict[tuple[str, str], list[int]] = {}
        for bucket, pair in enumerate(zip(self.owner(), after.owner(), strict=True)):
            if pair[0] != pair[1]:
                found.setdefault(pair, []).append(bucket)
        return found

    def to_dict(self) -> dict[str, Any]:
        """These as plain JSON types."""
        return {"bucket_map": self.bucket_map.to_dict(), "addresses": list(self.addresses)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Those that `to_dict` wrote."""
        given = known_keys(cls, "Members", require_mapping("Members", data))
        if not isinstance(given.get("addresses"), list):
            raise ConfigError(f"Members: addresses is {given.get('addresses')!r}; wanted a list of them")
        bucket_map = BucketMap.from_dict(require_mapping("bucket_map", given.get("bucket_map")))
        return cls(bucket_map=bucket_map, addresses=tuple(given["addresses"]))


def check_addresses(addresses: object) -> None:
    """Raises unless they are several servers', each once."""
    if (
        not isinstance(addresses, list | tuple)
        or not addresses
        or not all(isinstance(address, str) for address in addresses)
    ):
        raise ConfigError(f"addresses is {addresses!r}; wanted a list of at least one 'tcp://host:port'")
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"addresses is {list(addresses)}; wanted each server once")
