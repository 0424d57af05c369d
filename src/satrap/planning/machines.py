"""What can be rented, and how a run uses it: the price list of machines.toml, pools of equal machines, and what each of
their processes asks for. Pure.

`requests_of` sizes the processes. The same sizes decide whether a layout fits its machines, and are written into the
job file and the command, so a plan that fits is one that starts.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from satrap.config.validation import (
    Serializable,
    check_integer,
    check_name,
    check_number,
    describe,
    known_keys,
    require_mapping,
    set_field,
)
from satrap.errors import ConfigError

ROLES = ("server", "worker", "trainer")
MAX_MACHINES = 65535
NO_SOURCE = "of a date and kind that the price list does not say (source)"
_POD_MEMORY, _SYSTEM_BYTES = 0.92, 2 * 2**30
_POD_CORES = 0.97
_GIB, _MIB = 2**30, 2**20
_LEAST_GIB = 2
_POD_BYTES = _GIB // 2
"""Memory of Ray's own processes beside one of ours."""
_BESIDE_ROWS = _GIB
"""Memory that a job file demands of a server beside its rows."""
_LEAST_ROWS_MIB = 1024
_FILE_STEP_BYTES = 16 * _MIB
"""By how much the file with a server's rows grows at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType(Serializable):
    """One of [[machines]]: what a machine has, and what it costs."""

    name: str
    cores: int
    """vCPUs, as the provider and Kubernetes count them: hardware threads, two to a core, on most machines."""
    memory_gib: float
    network_gbit: float
    """Bandwidth in one direction, in Gbit/s."""
    price_per_hour: float
    gpus: int = 0
    gpu_tflops: float = 0.0
    """What your dense network reaches on one GPU, in 10^12 operations a second; a fraction of the data sheet's."""
    core_speed: float = 1.0
    """Speed of a vCPU relative to those of the coefficients."""
    pod_memory_gib: float | None = None
    """Memory that the processes of a machine may have together, which Kubernetes calls allocatable; None: 92 % of
    `memory_gib` less 2 GiB, which is less than GKE leaves on machines of 8 GiB and more."""
    storage_mb_per_second: float | None = None
    """Rate at which a machine writes and reads checkpoints; None: what training leaves of its link."""
    available: int = MAX_MACHINES
    """Machines of this type that you can get; 0: none, as if it were not listed."""
    roles: Sequence[str] = ROLES
    """What may run on it."""

    def __post_init__(self) -> None:
        check_name("machine", self.name, "'c2-standard-30'")
        where = f"machine {self.name!r}"
        set_field(self, "cores", check_integer(where, "cores", self.cores, 1, 1 << 16))
        set_field(self, "gpus", check_integer(where, "gpus", self.gpus, 0, 1 << 10))
        set_field(self, "available", check_integer(where, "available", self.available, 0, MAX_MACHINES))
        for name in ("memory_gib", "network_gbit", "core_speed", "price_per_hour", "gpu_tflops"):
            set_field(self, name, check_number(where, name, getattr(self, name), 0.0))
        for name in ("memory_gib", "network_gbit", "core_speed"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{where}: {name} is 0; expected a number above 0")
        for name, low in (("storage_mb_per_second", 0.001), ("pod_memory_gib", 0.0)):
            if getattr(self, name) is not None:
                set_field(self, name, check_number(where, name, getattr(self, name), low))
        if self.pod_memory_gib is not None and self.pod_memory_gib > self.memory_gib:
            raise ConfigError(
                f"{where}: pod_memory_gib is {self.pod_memory_gib:g} and memory_gib {self.memory_gib:g}; expected at "
                "most memory_gib"
            )
        if self.gpus and not self.gpu_tflops:
            raise ConfigError(
                f"{where}: gpus is {self.gpus} and gpu_tflops 0; expected what your dense network reaches on one of "
                "them, such as 30"
            )
        roles: Any = self.roles
        if not isinstance(roles, list | tuple) or not roles or not set(roles) <= set(ROLES):
            raise ConfigError(f"{where}: roles is {describe(roles)}; expected a list of {', '.join(map(repr, ROLES))}")
        set_field(self, "roles", tuple(role for role in ROLES if role in roles))

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30

    @property
    def link_bytes(self) -> float:
        """Bytes a second in one direction."""
        return self.network_gbit * 1e9 / 8

    @property
    def pod_bytes(self) -> float:
        """Memory that the processes of a machine may have together; the rest is the system's."""
        if self.pod_memory_gib is not None:
            return self.pod_memory_gib * 2**30
        return max(0.0, _POD_MEMORY * self.memory_bytes - _SYSTEM_BYTES)

    @property
    def pod_cores(self) -> int:
        """Whole vCPUs that the processes of a machine may have together."""
        return max(1, int(_POD_CORES * self.cores))

    @classmethod
    def _where(cls, data: Mapping[str, Any]) -> str:
        return f"machine {data['name']!r}" if isinstance(data.get("name"), str) else "machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Serializable):
    """[limits]: the share of each resource that a plan may use; the rest is head room."""

    memory: float = 0.8
    """Each process uses at most this share of the memory that it requests, and a server of the part that is for rows.
    The alert SatrapMemory fires above 0.8, and `satrap run --max-servers` then adds servers."""
    cores: float = 0.7
    network: float = 0.7
    round_trip_ms: float = 0.2
    """Time of a round trip between two machines."""
    storage_gb_per_second: float = 25.0
    """Rate at which the store takes and returns checkpoints, in GB/s, for all machines together."""

    def __post_init__(self) -> None:
        for name in ("memory", "cores", "network"):
            share = check_number("limits", name, getattr(self, name), 0.0)
            if not 0 < share <= 1:
                raise ConfigError(f"limits: {name} is {share:g}; expected a share in (0, 1]")
            set_field(self, name, share)
        for name, low in (("round_trip_ms", 0.0), ("storage_gb_per_second", 0.001)):
            set_field(self, name, check_number("limits", name, getattr(self, name), low))

    @classmethod
    def _where(cls, data: Mapping[str, Any]) -> str:
        return "limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """The content of machines.toml."""

    machines: tuple[MachineType, ...]
    limits: Limits = field(default_factory=Limits)
    currency: str = "$"
    source: str = NO_SOURCE
    """Where the prices are from: provider, region, date, and which discounts they have."""

    def types(self, role: str) -> tuple[MachineType, ...]:
        """Return the machine types on which a role may run."""
        return tuple(machine for machine in self.machines if role in machine.roles and machine.available)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PriceList":
        """Read the content of machines.toml."""
        given = known_keys(cls, "price list", data)
        tables: Any = given["machines"]
        if not isinstance(tables, list) or not tables:
            raise ConfigError(f"machines is {describe(tables)}; expected at least one table [[machines]]")
        machines = tuple(MachineType.from_dict(require_mapping("machines", table)) for table in tables)
        names = [machine.name for machine in machines]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"machine {sorted(repeated)[0]!r} is listed more than once; expected each name once")
        prices = cls(
            machines=machines,
            limits=Limits.from_dict(given.get("limits", {})),
            currency=check_name("price list", given.get("currency", "$"), "'$'"),
            source=check_name("price list", given.get("source", NO_SOURCE), "'Provider, region, 2026-11, on demand'"),
        )
        for role in ("server", "trainer"):
            if not prices.types(role):
                raise ConfigError(
                    f"no available machine has the role {role!r}; found {', '.join(names)}: add it to roles"
                )
        return prices


@dataclass(frozen=True, kw_only=True)
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
        return {"server": self.servers, "worker": self.workers, "trainer": self.trainers}[role]

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in ROLES if self.each(role))

    @property
    def processes(self) -> int:
        """Processes of all roles on one machine."""
        return self.servers + self.workers + self.trainers

    @property
    def price_per_hour(self) -> float:
        return self.num_machines * self.machine.price_per_hour


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All machines of a run. Without servers, the only trainer holds the rows."""

    pools: Sequence[Pool]

    def count(self, role: str) -> int:
        """Return the processes of a role."""
        return self._counts[role]

    def share(self, pool: Pool, role: str) -> float:
        """Return the share of a role's processes that is in one pool."""
        return pool.count(role) / total if (total := self._counts[role]) else 0.0

    def pool_of(self, role: str) -> Pool:
        """Return the pool of a role."""
        return self._pools[role]

    @cached_property
    def _counts(self) -> dict[str, int]:
        return {role: sum(pool.count(role) for pool in self.pools) for role in ROLES}

    @cached_property
    def _pools(self) -> dict[str, Pool]:
        return {role: pool for pool in reversed(self.pools) for role in pool.roles}

    @cached_property
    def num_machines(self) -> int:
        return sum(pool.num_machines for pool in self.pools)

    @property
    def machines_by_type(self) -> Counter[str]:
        """The machines of all pools, by the name of their type."""
        return sum((Counter({pool.machine.name: pool.num_machines}) for pool in self.pools), Counter())

    @property
    def price_per_hour(self) -> float:
        return sum(pool.price_per_hour for pool in self.pools)

    @property
    def client_role(self) -> str:
        """The role that looks rows up."""
        return "worker" if self._counts["worker"] else "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one process asks for."""

    cpus: int
    memory_gib: int
    rows_mib: int = 0
    """Part of a server's memory for rows: the size of its /dev/shm."""
    gpus: int = 0


def requests_of(
    layout: Layout, memory: Mapping[str, float], rows_bytes: float, seconds: Mapping[str, float], limits: Limits
) -> dict[str, Request]:
    """Return what a process of each role asks for: memory with head room, and its share of the machine's cores.

    memory: bytes that a process of each role needs. rows_bytes: those of a server's rows. seconds: of a core that a
    batch takes in all processes of a role, by which roles on one machine divide its cores.
    """
    requests = {}
    for pool in layout.pools:
        cpus = _cpus(pool, seconds)
        for role in pool.roles:
            least = (memory[role] + _POD_BYTES) / limits.memory
            rows_mib = 0
            if role == "server":
                rows_mib = max(_LEAST_ROWS_MIB, math.ceil((rows_bytes + _FILE_STEP_BYTES) / limits.memory / _MIB))
                least = max(least, rows_mib * _MIB + _BESIDE_ROWS)
            gpus = pool.machine.gpus // pool.trainers if role == "trainer" else 0
            memory_gib = max(_LEAST_GIB, math.ceil(least / _GIB))
            requests[role] = Request(cpus=cpus[role], memory_gib=memory_gib, rows_mib=rows_mib, gpus=gpus)
    return requests


def _cpus(pool: Pool, seconds: Mapping[str, float]) -> dict[str, int]:
    """Return the whole CPUs of a process of each role: one, and a part of the others by its work."""
    spare = pool.machine.pod_cores - pool.processes
    total = sum(seconds[role] for role in pool.roles)
    if spare <= 0 or not total:
        return {role: max(1, pool.machine.pod_cores // pool.processes) for role in pool.roles}
    return {role: 1 + int(spare * seconds[role] / total / pool.each(role)) for role in pool.roles}


def misfit_of(pool: Pool, requests: Mapping[str, Request], limits: Limits) -> str | None:
    """Return why the processes of a pool do not fit on its machines; None if they do."""
    machine = pool.machine
    who = f"{machine.name}: the {' and '.join(_counted(pool.each(role), role) for role in pool.roles)} of a machine"
    memory = sum(pool.each(role) * requests[role].memory_gib for role in pool.roles)
    if memory * _GIB > machine.pod_bytes:
        return (
            f"{who} need {memory:,} GiB together, so that they use at most {limits.memory:.0%} of it, and may have "
            f"{machine.pod_bytes / _GIB:,.1f} of its {machine.memory_gib:,.0f} GiB"
        )
    cpus = sum(pool.each(role) * requests[role].cpus for role in pool.roles)
    if cpus > machine.pod_cores:
        return f"{who} need {cpus} CPUs together, and may have {machine.pod_cores} of its {machine.cores}"
    return None


def _counted(count: int, role: str) -> str:
    return role if count == 1 else f"{count} {role}s"
