"""Jobs and price lists for the tests of the planner, in which every number is round."""

from __future__ import annotations

from typing import Any

from satrap.config.optimizers import Adagrad, Optimizer
from satrap.config.tables import Table
from satrap.planning.coefficients import DEFAULTS
from satrap.planning.estimate import Estimate
from satrap.planning.machines import Layout, Limits, MachineType, Pool, PriceList
from satrap.planning.workload import TableLoad, Training, Workload

FREE = Limits(memory=1.0, cores=1.0, network=1.0, round_trip_ms=0.0)
"""Limits without head room, so that a formula has no factors of them."""


def load(
    rows: int = 1_000_000, *, dim: int = 16, row_bytes: int = 160, optimizer: Optimizer | None = None, **keys: Any
) -> TableLoad:
    """Return a table of so many rows, named after them."""
    own = {key: keys.pop(key) for key in ("capacity", "num_buckets", "dtype") if key in keys}
    table = Table(keys.pop("name", "item"), dim=dim, optimizer=optimizer or Adagrad(), **own)
    return TableLoad(table=table, rows=rows, row_bytes=row_bytes, saved_row_bytes=136, **keys)


def workload(*tables: TableLoad, **keys: Any) -> Workload:
    training = {
        "samples_per_second": 10_000.0,
        "batch_size": 1000,
        "dense_flops": 1e6,
        "dense_parameters": 100_000,
    } | keys
    return Workload(name="job", tables=tables or (load(),), training=Training(**training))


def machine(name: str = "m", **keys: Any) -> MachineType:
    """Return a machine type whose processes may have 10 cores together."""
    values = {"cores": 11, "memory_gib": 64.0, "network_gbit": 8.0, "price_per_hour": 1.0} | keys
    return MachineType(name=name, **values)


def prices(*machines: MachineType, limits: Limits = FREE) -> PriceList:
    return PriceList(machines=machines or (machine(),), limits=limits)


def split(servers: int = 2, trainers: int = 3, workers: int = 0, kind: MachineType | None = None) -> Layout:
    """Return a layout with a machine for each process."""
    kind = kind or machine()
    roles = {"servers": servers, "workers": workers, "trainers": trainers}
    return Layout(
        pools=tuple(Pool(machine=kind, num_machines=count, **{role: 1}) for role, count in roles.items() if count)
    )


def assess(job: Workload, layout: Layout, limits: Limits = FREE) -> Estimate:
    return Estimate(workload=job, layout=layout, costs=DEFAULTS, limits=limits)


def bound(found: Estimate, name: str) -> float:
    """Return the samples per second that the bound permits whose name begins so."""
    (rate,) = (each.samples_per_second for each in found.bounds if each.name.startswith(name))
    return rate
