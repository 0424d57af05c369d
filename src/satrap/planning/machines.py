"""The price list of machines.toml: machine types, how far they may be used, and the network between them. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
_MAX_MACHINES = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType(Serializable):
    """One of [[machines]]: what a machine has, and what it costs."""

    name: str
    cores: int
    """Cores that the provider names; with hyper-threads, their number."""
    memory_gib: float
    network_gbit: float
    """Bandwidth in one direction, in Gbit/s."""
    price_per_hour: float
    gpus: int = 0
    gpu_tflops: float = 0.0
    """What your dense network reaches on one GPU, in 10^12 operations a second; a fraction of the data sheet's."""
    core_speed: float = 1.0
    """Speed of a core relative to those of the coefficients."""
    storage_mb_per_second: float | None = None
    """Rate at which checkpoints are written and read; None: that of the network."""
    available: int = _MAX_MACHINES
    """Machines of this type that you can get."""
    roles: Sequence[str] = ROLES
    """What may run on it."""

    def __post_init__(self) -> None:
        check_name("machine", self.name, "'c2-standard-30'")
        where = f"machine {self.name!r}"
        set_field(self, "cores", check_integer(where, "cores", self.cores, 1, 1 << 16))
        set_field(self, "gpus", check_integer(where, "gpus", self.gpus, 0, 1 << 10))
        set_field(self, "available", check_integer(where, "available", self.available, 1, _MAX_MACHINES))
        for name in ("memory_gib", "network_gbit", "core_speed", "price_per_hour", "gpu_tflops"):
            set_field(self, name, check_number(where, name, getattr(self, name), 0.0))
        for name in ("memory_gib", "network_gbit", "core_speed"):
            if getattr(self, name) == 0:
                raise ConfigError(f"{where}: {name} is 0; expected a number above 0")
        if self.storage_mb_per_second is not None:
            number = check_number(where, "storage_mb_per_second", self.storage_mb_per_second, 0.001)
            set_field(self, "storage_mb_per_second", number)
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
    def storage_bytes(self) -> float:
        """Bytes a second of a checkpoint."""
        return self.link_bytes if self.storage_mb_per_second is None else self.storage_mb_per_second * 1e6

    @classmethod
    def _where(cls, data: Mapping[str, Any]) -> str:
        return f"machine {data['name']!r}" if isinstance(data.get("name"), str) else "machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Serializable):
    """[limits]: the share of each resource that a plan may use; the rest is head room."""

    memory: float = 0.8
    """The mark above which `satrap run --max-servers` adds servers is the same."""
    cores: float = 0.7
    network: float = 0.7
    round_trip_ms: float = 0.2
    """Time of a round trip between two machines."""

    def __post_init__(self) -> None:
        for name in ("memory", "cores", "network"):
            share = check_number("limits", name, getattr(self, name), 0.0)
            if not 0 < share <= 1:
                raise ConfigError(f"limits: {name} is {share:g}; expected a share in (0, 1]")
            set_field(self, name, share)
        set_field(self, "round_trip_ms", check_number("limits", "round_trip_ms", self.round_trip_ms, 0.0))

    @classmethod
    def _where(cls, data: Mapping[str, Any]) -> str:
        return "limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """The content of machines.toml."""

    machines: tuple[MachineType, ...]
    limits: Limits = field(default_factory=Limits)
    currency: str = "$"

    def types(self, role: str) -> tuple[MachineType, ...]:
        """Return the machine types on which a role may run."""
        return tuple(each for each in self.machines if role in each.roles)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PriceList":
        """Read the content of machines.toml."""
        given = known_keys(cls, "price list", data)
        tables: Any = given["machines"]
        if not isinstance(tables, list) or not tables:
            raise ConfigError(f"machines is {describe(tables)}; expected at least one table [[machines]]")
        machines = tuple(MachineType.from_dict(require_mapping("machines", each)) for each in tables)
        names = [each.name for each in machines]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"machine {sorted(repeated)[0]!r} is listed more than once; expected each name once")
        found = cls(
            machines=machines,
            limits=Limits.from_dict(given.get("limits", {})),
            currency=check_name("price list", given.get("currency", "$"), "'$'"),
        )
        for role in ("server", "trainer"):
            if not found.types(role):
                raise ConfigError(f"no machine has the role {role!r}; found {', '.join(names)}: add it to roles")
        return found
