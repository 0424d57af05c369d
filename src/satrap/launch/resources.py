"""What the processes of a run are given on a cluster: CPUs, GPUs and memory of each, by role. Values only."""

import re
from dataclasses import dataclass, field
from typing import Any

from satrap.config.validation import check_integer
from satrap.errors import ConfigError
from satrap.launch.supervisor import Plan, Role

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*(\w*)")
_MOST = 1 << 50


def size_in_bytes(text: str) -> int:
    """Of "64GiB", "512 MiB" or a number of bytes."""
    found = _SIZE.fullmatch(text)
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"memory is {text!r}; wanted a whole number of bytes, KiB, MiB, GiB or TiB, such as 64GiB")
    return int(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Of one process."""

    cpus: int = 1
    gpus: int = 0
    memory_bytes: int = 0
    """0: not asked for."""

    def __post_init__(self) -> None:
        for name, low in (("cpus", 1), ("gpus", 0), ("memory_bytes", 0)):
            check_integer("resources", name, getattr(self, name), low, _MOST)

    def bundle(self) -> dict[str, float]:
        """As Ray has it."""
        found = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_bytes}
        return {name: float(amount) for name, amount in found.items() if amount}

    def __str__(self) -> str:
        return amounts(self.bundle())


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Of all processes of a run."""

    server: Resources = field(default_factory=Resources)
    worker: Resources = field(default_factory=Resources)
    trainer: Resources = field(default_factory=Resources)

    def of(self, role: Role) -> Resources:
        """Those of one process of that role."""
        return {Role.SERVER: self.server, Role.WORKER: self.worker, Role.TRAINER: self.trainer}[role]

    def asked(self, plan: Plan) -> str:
        """In words."""
        counts = {Role.SERVER: plan.servers, Role.WORKER: plan.workers, Role.TRAINER: plan.trainers}
        return ", ".join(f"{count} x {role} with {self.of(role)}" for role, count in counts.items() if count)

    def cpus(self, plan: Plan) -> int:
        """Of all together."""
        return plan.servers * self.server.cpus + plan.workers * self.worker.cpus + plan.trainers * self.trainer.cpus


def amounts(found: dict[str, Any]) -> str:
    """Resources in words: "4 CPU, 64.0 GiB memory"."""
    said = [f"{found[name]:g} {name}" for name in ("CPU", "GPU") if found.get(name)]
    said += [f"{found['memory'] / 2**30:.1f} GiB memory"] if found.get("memory") else []
    return ", ".join(said) or "nothing"
