"""Maps every bucket to the server that owns it. Pure: numbers in, numbers out.

A bucket, the set of ids with the same hash prefix, is the unit of ownership. A table's configuration fixes its number
of buckets, so a row never changes its bucket. The owner of a bucket may change; each change makes a map of a higher
version.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from satrap.config.validation import Serializable, check_integer
from satrap.errors import ConfigError

MOST_SERVERS = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMap(Serializable):
    """The owner of every bucket of every table."""

    version: int
    """Rises by 1 with each change, from 1."""
    num_servers: int
    """Servers are numbered 0 .. num_servers - 1. A server may own no bucket."""
    owners: tuple[tuple[int, ...], ...]
    """For each table, the server that owns each bucket."""

    def __post_init__(self) -> None:
        check_integer("BucketMap", "version", self.version, 1, 2**32 - 1)
        check_integer("BucketMap", "num_servers", self.num_servers, 1, MOST_SERVERS)
        for t, table in enumerate(self.owners):
            wrong = [owner for owner in table if type(owner) is not int or not 0 <= owner < self.num_servers]
            if wrong or not table:
                named = f"server {wrong[0]!r}" if wrong else "no bucket"
                raise ConfigError(f"bucket map: table {t} names {named}; expected servers 0..{self.num_servers - 1}")

    @classmethod
    def even(cls, num_buckets: Sequence[int], num_servers: int, whole: Collection[int] = ()) -> Self:
        """Return the first map: each server owns a range of adjacent buckets, and as many as any other server, to
        within one. Tables start at different servers, so that many small tables are spread out, too.

        whole: the numbers of the tables that one server owns alone. Each server gets as many of these as any other, to
            within one."""
        owners, first, num_whole = [], 0, 0
        for number, buckets in enumerate(num_buckets):
            if number in whole:
                owners.append((num_whole % num_servers,) * buckets)
                num_whole += 1
                continue
            table_owners = tuple(
                (b * num_servers // max(buckets, num_servers) + first) % num_servers for b in range(buckets)
            )
            owners.append(table_owners)
            first += len(set(table_owners))
        return cls(version=1, num_servers=num_servers, owners=tuple(owners))

    def with_owners(self, to: Mapping[int, int]) -> Self:
        """Return the next map, in which these buckets, numbered over all tables, belong to other servers."""
        flat = [to.get(b, owner) for b, owner in enumerate(self.flat())]
        return self._next(flat, self.num_servers)

    def renumbered(self, numbers: Mapping[int, int], num_servers: int) -> Self:
        """Return the next map, with the same owners under other numbers. A server without a new number owns nothing."""
        flat = [numbers[owner] for owner in self.flat()]
        return self._next(flat, num_servers)

    def flat(self) -> list[int]:
        """Return the owner of each bucket, one table after the other."""
        return [owner for table in self.owners for owner in table]

    def spread(self, servers: Sequence[int]) -> dict[int, int]:
        """Return which buckets must move, and to which server, so that `servers` own all of them: of each table, and in
        total, each server gets as many buckets as any other, to within one. No server both gives and takes buckets of
        one table."""
        if not servers or len(set(servers)) < len(servers) or not all(0 <= s < self.num_servers for s in servers):
            raise ConfigError(f"servers are {list(servers)}; expected some of 0..{self.num_servers - 1}, each once")
        own = [[table.count(server) for server in servers] for table in self.owners]
        shares = _even_shares(own, [len(table) for table in self.owners])
        moves, first = {}, 0
        for table, have, share in zip(self.owners, own, shares, strict=True):
            spare = {server: have[k] - share[k] for k, server in enumerate(servers)}
            takers = [server for server in servers for _ in range(-spare[server])]
            for b in reversed(range(len(table))):
                if spare.get(table[b], 1) > 0:
                    spare[table[b]] = spare.get(table[b], 1 + len(table)) - 1
                    moves[first + b] = takers.pop()
            first += len(table)
        return moves

    def _next(self, flat: Sequence[int], num_servers: int) -> Self:
        owners, at = [], 0
        for table in self.owners:
            owners.append(tuple(flat[at : at + len(table)]))
            at += len(table)
        return type(self)(version=self.version + 1, num_servers=num_servers, owners=tuple(owners))


def _even_shares(own: Sequence[Sequence[int]], num_buckets: Sequence[int]) -> list[list[int]]:
    """Return how many buckets of each table each server should own, given that it owns `own[table][server]`."""
    num_servers = len(own[0])
    total = [0] * num_servers
    shares = []
    for have, buckets in zip(own, num_buckets, strict=True):
        least, more = divmod(buckets, num_servers)
        # The remainder goes to servers that own one more already, then to those with the fewest buckets in total.
        order = sorted(range(num_servers), key=lambda s: (-max(0, have[s] - least), total[s], s))
        share = [least] * num_servers
        for s in order[:more]:
            share[s] += 1
        shares.append(share)
        total = [a + b for a, b in zip(total, share, strict=True)]
    while max(total) - min(total) > 1:
        rich, poor = total.index(max(total)), total.index(min(total))
        tables = [t for t, share in enumerate(shares) if share[rich] > share[poor]]
        t = min(tables, key=lambda t: (own[t][rich] >= shares[t][rich], own[t][poor] <= shares[t][poor]))
        for s, by in ((rich, -1), (poor, 1)):
            shares[t][s] += by
            total[s] += by
    return shares
