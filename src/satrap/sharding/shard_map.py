"""The servers of a job at one moment: the bucket map and the address of each server. Pure.

A change makes the next shard map, with the next version. A server's number is its index in the list of addresses and
may change; its address does not.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from satrap.config.validation import Serializable
from satrap.errors import ConfigError
from satrap.sharding.bucket_map import BucketMap

NO_MEMBER = -1
"""The number of a server that a shard map does not list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMap(Serializable):
    """The bucket map of a job and the addresses of its servers."""

    bucket_map: BucketMap
    addresses: tuple[str, ...]
    """Addresses of server 0, 1, ..."""

    def __post_init__(self) -> None:
        check_addresses(self.addresses)
        if len(self.addresses) != self.bucket_map.num_servers:
            raise ConfigError(
                f"{len(self.addresses)} addresses; expected one for each of the bucket map's "
                f"{self.bucket_map.num_servers} servers"
            )

    @classmethod
    def first(cls, num_buckets: Sequence[int], addresses: Sequence[str], whole: Collection[int] = ()) -> Self:
        """Return the shard map of a new job. whole: the tables that one server owns alone."""
        return cls(bucket_map=BucketMap.even(num_buckets, len(addresses), whole), addresses=tuple(addresses))

    @property
    def version(self) -> int:
        """The version of the bucket map, which rises with each change."""
        return self.bucket_map.version

    def number(self, address: str) -> int:
        """Return the number of the server at this address; NO_MEMBER if there is none."""
        return self.addresses.index(address) if address in self.addresses else NO_MEMBER

    def owner(self) -> list[str]:
        """Return the address of each bucket's owner, one table after the other."""
        return [self.addresses[server] for server in self.bucket_map.flat()]

    def with_owners(self, to: Mapping[int, str]) -> Self:
        """Return the next shard map, in which these buckets belong to the servers at these addresses."""
        numbers = {bucket: self.addresses.index(address) for bucket, address in to.items()}
        return type(self)(bucket_map=self.bucket_map.with_owners(numbers), addresses=self.addresses)

    def with_servers(self, addresses: Sequence[str]) -> Self:
        """Return the next shard map, with these servers in this order. Those that join own nothing yet; those that
        leave must own nothing."""
        numbers = {old: addresses.index(address) for old, address in enumerate(self.addresses) if address in addresses}
        return type(self)(bucket_map=self.bucket_map.renumbered(numbers, len(addresses)), addresses=tuple(addresses))

    def changes(self, after: "ShardMap") -> dict[tuple[str, str], list[int]]:
        """Return the buckets whose owner differs in `after`, by the addresses of the old and the new owner."""
        moved: dict[tuple[str, str], list[int]] = {}
        for bucket, pair in enumerate(zip(self.owner(), after.owner(), strict=True)):
            if pair[0] != pair[1]:
                moved.setdefault(pair, []).append(bucket)
        return moved


def check_addresses(addresses: object) -> None:
    """Raise ConfigError unless `addresses` is a list of at least one server, each named once."""
    if (
        not isinstance(addresses, list | tuple)
        or not addresses
        or not all(isinstance(address, str) for address in addresses)
    ):
        raise ConfigError(f"addresses is {addresses!r}; expected a list of at least one 'tcp://host:port'")
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"addresses is {list(addresses)}; expected each server once")
