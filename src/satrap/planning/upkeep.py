"""How long saves, pauses and resumes of a plan take. Pure.

A save writes the rows of all servers at once, each to its storage, while training continues; training waits only for
the cut. A resume reads them in the same way.
"""

from dataclasses import dataclass

from satrap.planning.coefficients import Coefficients
from satrap.planning.layout import Layout
from satrap.planning.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """Seconds and bytes of checkpoints."""

    checkpoint_bytes: float
    save_seconds: float
    """From the cut until a full checkpoint is complete; training continues."""
    pause_seconds: float
    """For which training waits."""
    resume_seconds: float
    """From the start of the processes until training continues; without the time to get machines."""
    bound: str
    """What a save waits for: "storage" or "cores"."""


def upkeep_of(workload: Workload, layout: Layout, costs: Coefficients) -> Upkeep:
    """Return what checkpoints cost, if saves may use all cores of the machines with rows."""
    pool = layout.pool_of("server" if layout.count("server") else "trainer")
    saved = workload.saved_bytes + 12.0 * workload.training.dense_parameters
    share = saved / pool.num_machines
    cores = pool.machine.cores * pool.machine.core_speed
    storage, computing = share / pool.machine.storage_bytes, costs.save_byte * share / cores
    reading = max(storage, costs.load_byte * share / cores)
    return Upkeep(
        checkpoint_bytes=saved,
        save_seconds=max(storage, computing),
        pause_seconds=costs.cut + costs.cut_server * layout.count("server"),
        resume_seconds=costs.start + reading,
        bound="storage" if storage >= computing else "cores",
    )
