"""Where the processes of a run are: pools of equal machines, each with its servers, workers and trainers. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from satrap.planning.machines import ROLES, MachineType


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal machines with the same processes on each."""

    machine: MachineType
    num_machines: int
    servers: int = 0
    """Servers on each machine."""
    workers: int = 0
    trainers: int = 0

    def count(self, role: str) -> int:
        """Return the processes of a role on all its machines."""
        return self.num_machines * self.each(role)

    def each(self, role: str) -> int:
        """Return the processes of a role on one machine."""
        return int(getattr(self, f"{role}s"))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in ROLES if self.each(role))

    @property
    def price_per_hour(self) -> float:
        return self.num_machines * self.machine.price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All machines of a run. Without servers, the only trainer holds the rows."""

    pools: Sequence[Pool]

    def count(self, role: str) -> int:
        """Return the processes of a role."""
        return sum(pool.count(role) for pool in self.pools)

    def share(self, pool: Pool, role: str) -> float:
        """Return the share of a role's processes that is in one pool."""
        return pool.count(role) / total if (total := self.count(role)) else 0.0

    def pool_of(self, role: str) -> Pool:
        """Return the pool of a role."""
        return next(pool for pool in self.pools if pool.each(role))

    @property
    def num_machines(self) -> int:
        return sum(pool.num_machines for pool in self.pools)

    @property
    def price_per_hour(self) -> float:
        return sum(pool.price_per_hour for pool in self.pools)

    @property
    def client_role(self) -> str:
        """The role that looks rows up."""
        return "worker" if self.count("worker") else "trainer"
