"""Resources of a run's processes on a cluster: CPUs, GPUs, memory and Ray's custom resources of each, and the labels of
the nodes where it may be, by role. Values only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from satrap.config.validation import check_integer
from satrap.errors import ConfigError
from satrap.launch.run_events import Role
from satrap.launch.supervisor import RunConfig

_MAX_AMOUNT = 1 << 50
_OWN_NAMES = ("CPU", "GPU", "memory", "object_store_memory")  # Ray's, for which there are other options


def parse_custom(texts: Iterable[str]) -> dict[str, float]:
    """Return the amounts of custom resources, each given as NAME=AMOUNT."""
    amounts = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            amounts[name] = float(amount)
        except ValueError:
            amounts[name] = 0.0
        if not name or name in _OWN_NAMES or not 0 < amounts[name] <= _MAX_AMOUNT:
            raise ConfigError(
                f"resource is {text!r}; expected NAME=AMOUNT of a custom resource of Ray, such as satrap_server=1"
            )
    return amounts


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Return the labels of nodes, each given as NAME=VALUE."""
    labels = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator or not value:
            raise ConfigError(f"label is {text!r}; expected NAME=VALUE of a label of Ray's nodes, such as role=server")
        labels[name] = value
    return labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of one process."""

    cpus: int = 1
    gpus: int = 0
    memory_bytes: int = 0
    """Memory to reserve; 0: none."""
    custom: Mapping[str, float] = field(default_factory=dict)
    """Amounts of custom resources of Ray, by name."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the node must have."""

    def __post_init__(self) -> None:
        for name, low in (("cpus", 1), ("gpus", 0), ("memory_bytes", 0)):
            check_integer("resources", name, getattr(self, name), low, _MAX_AMOUNT)

    def bundle(self) -> dict[str, float]:
        """Return the resources as a bundle of a Ray placement group."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_bytes}
        return {name: float(amount) for name, amount in amounts.items() if amount} | dict(self.custom)

    def __str__(self) -> str:
        where = [f"a node with the label {name}={value}" for name, value in self.labels.items()]
        return " on ".join([describe_resources(self.bundle(), self.custom), *where])


RunResources = Mapping[Role, Resources]
"""Resources of one process of each role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """The Ray cluster of a run."""

    address: str | None
    """Address of the head node, or "auto"; None: a private Ray on this machine."""
    memory: Path
    """Folder in shared memory on every node, for the servers' rows."""
    placement_seconds: float
    """Time for Ray to find a node for a process."""
    resources: RunResources
    node_output: str | None = None
    """File on each node to which the output of its processes is copied, such as a pod's standard output; None: none."""

    def __post_init__(self) -> None:
        if not self.placement_seconds > 0:
            raise ConfigError(f"placement-seconds is {self.placement_seconds}; expected more than 0")
        for role, resource in self.resources.items():
            if self.address is None and (resource.custom or resource.labels):
                raise ConfigError(
                    f"{role}: custom resources and labels are those of a cluster's nodes, and a private Ray on this "
                    "machine has none; add --address, or remove the option"
                )


def describe_run(resources: RunResources, run_config: RunConfig) -> str:
    """Return the resources of the whole run in words."""
    return ", ".join(f"{count} x {role} with {resources[role]}" for role, count in run_config.counts.items() if count)


def total_cpus(resources: RunResources, run_config: RunConfig) -> int:
    """Return the CPUs of the whole run, with as many servers as it may scale to."""
    counts = run_config.counts | {Role.SERVER: run_config.max_servers or run_config.servers}
    return sum(count * resources[role].cpus for role, count in counts.items())


def describe_resources(amounts: dict[str, Any], custom: Iterable[str] = ()) -> str:
    """Return resources in words, such as "4 CPU, 64.0 GiB memory". custom: names of custom resources to describe."""
    parts = [f"{amounts[name]:g} {name}" for name in ("CPU", "GPU") if amounts.get(name)]
    parts += [f"{amounts['memory'] / 2**30:.1f} GiB memory"] if amounts.get("memory") else []
    parts += [f"{amounts.get(name, 0):g} {name}" for name in custom]
    return ", ".join(parts) or "nothing"
