"""What work costs: seconds of one core, bytes of a process; measured by `--calibrate` or these defaults. Pure.

A core is here what providers call a vCPU: the defaults were measured on an AMD EPYC (a virtual machine with two vCPUs,
no AMX), on one of two hardware threads of a core while the other one was busy; docs/internals/log.md says how much
they vary. Alone on its core, such a thread was 1.4 times as fast. A vCPU of another machine is `core_speed` times as
fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from satrap.config.validation import Serializable, check_name, check_number, set_field


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(Serializable):
    """The seconds of one core that a part of a step takes: a constant, and a cost for each id and each byte moved."""

    step: float
    """Seconds of a step however small."""
    id: float
    """Seconds for each id; at a server, for each different id."""
    byte: float
    """Seconds for each byte of rows, gradients and embeddings that is read or written."""

    def __post_init__(self) -> None:
        for name in ("step", "id", "byte"):
            set_field(self, name, check_number("coefficients", name, getattr(self, name), 0.0))

    def seconds(self, ids: float, moved_bytes: float) -> float:
        """Return the seconds of a step with so many ids and bytes."""
        return self.step + self.id * ids + self.byte * moved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients(Serializable):
    """What each part of a step costs, and the memory of each process."""

    source: str
    """Where the numbers come from."""
    local: Cost
    """Cost at a trainer that holds the rows: lookup, update and the loop around them."""
    client: Cost
    """Cost at a trainer or worker with rows on servers: unique ids, pooled rows, sums of gradients, calls to one
    server."""
    server: Cost
    """Cost of the lookup and the update of a batch at all servers together; `step` for each server."""
    call: float
    """Seconds at a client for the two calls of a batch to each further server."""
    flops_per_second: float
    """Floating-point operations of a dense network on one core."""
    reduce_step: float
    """Seconds of the calls by which several trainers average their gradients and agree on a step, however few bytes
    these have. They use gloo, except that NCCL averages the gradients of trainers with GPUs."""
    joint_cores: float
    """Share of their machines' cores that several trainers can use, since they wait for each other in each step."""
    reduce_byte: float
    """Seconds for each byte of dense gradients that a trainer without a GPU sends, by gloo. With NCCL it costs no core:
    what its own threads take for sockets was not measured and is left out."""
    transfer_byte: float
    """Seconds at each end for a byte of pooled rows between a worker and its trainer."""
    key_byte: float
    """Seconds at each end to encrypt or decrypt a byte between machines; one thread of a process does it."""
    read_byte: float
    """Seconds to read and decode a byte of training data."""
    save_byte: float
    """Seconds to write a byte of a checkpoint."""
    load_byte: float
    """Seconds to read a byte of a checkpoint into a table."""
    cut: float
    """Seconds for which training waits when a checkpoint begins."""
    cut_server: float
    """The same for each server."""
    start: float
    """Seconds from a start until a process is ready."""
    trainer_bytes: float
    """Memory of a trainer's process without a job: Python, torch."""
    server_bytes: float
    """Memory of a server or worker without a job."""

    def __post_init__(self) -> None:
        check_name("coefficients", self.source, "'this machine, 2026-11-23'")
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if field.name != "source" and not isinstance(value, Cost):
                set_field(self, field.name, check_number("coefficients", field.name, value, 0.0))
        for name, lowest in (("flops_per_second", 1), ("joint_cores", 0.01)):
            set_field(self, name, check_number("coefficients", name, getattr(self, name), lowest))

    @classmethod
    def _where(cls, data: Mapping[str, Any]) -> str:
        return "coefficients"


DEFAULTS = Coefficients(
    source="defaults: AMD EPYC, 2 cores, by --calibrate on 2026-11-24 (docs/internals/log.md)",
    local=Cost(step=1.1e-3, id=160e-9, byte=0.20e-9),
    client=Cost(step=1.9e-3, id=65e-9, byte=0.22e-9),
    server=Cost(step=0.9e-3, id=180e-9, byte=0.18e-9),
    call=0.44e-3,
    flops_per_second=60e9,
    reduce_step=0.5e-3,
    joint_cores=0.87,
    reduce_byte=0.65e-9,
    transfer_byte=0.5e-9,
    key_byte=0.83e-9,
    read_byte=4.4e-9,
    save_byte=1.7e-9,
    load_byte=1.0e-9,
    cut=0.012,
    cut_server=0.0036,
    start=2.1,
    trainer_bytes=416e6,
    server_bytes=50e6,
)
"""Used without `--coefficients` and `--calibrate`."""
