"""What a layout achieves: the rate that each resource permits, the memory, links and descriptors of each process. Pure.

A resource permits `limit x capacity / (what a batch needs of it)` batches a second; the smallest bounds the plan.
Besides cores, links and GPUs there are two bounds on time: with staleness k at most k + 1 batches of a trainer are in
flight, each of which takes as long as a synchronous step; and a trainer's own work for its batches is done one after
another.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from satrap.planning.coefficients import Coefficients
from satrap.planning.demand import Demand, demand_of
from satrap.planning.layout import Layout, Pool
from satrap.planning.machines import Limits
from satrap.planning.workload import Workload

_SERIAL_TRIPS = 4
"""Round trips of a synchronous step: lookup, update, all-reduce, whether all trainers have a batch."""
_OPEN_TRIPS = 2
"""Round trips that staleness does not hide: the last two."""
SERVER_THREAD = "network thread of each server"
_OTHER_FILES = 32
"""File descriptors of a process without a connection: its libraries, log, data and epoll."""
_DENSE_COPIES = 16.0
"""Bytes of a dense parameter in a trainer: itself, its gradient, two states of an optimizer, float32."""
_MESSAGES = 3.0
"""Copies of a batch in flight that a process holds: as it came, as it is worked on, as it leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A resource, and the rate that it permits."""

    name: str
    role: str
    """The role of which more processes would help."""
    samples_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Traffic of one machine of a pool in each direction, at the requested rate."""

    pool: Pool
    out_bytes: float
    in_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a layout achieves."""

    layout: Layout
    demand: Demand
    bounds: tuple[Bound, ...]
    """The tightest first."""
    memory: dict[str, float]
    """Bytes of each process, by role."""
    links: tuple[Link, ...]
    files: dict[str, int]
    """File descriptors of each process, by role."""
    misfits: tuple[str, ...]
    """Why the layout cannot run; empty if it can."""

    @property
    def samples_per_second(self) -> float:
        """The rate that the tightest bound permits."""
        return self.bounds[0].samples_per_second


def estimate(workload: Workload, layout: Layout, costs: Coefficients, limits: Limits) -> Estimate:
    """Return what the layout achieves."""
    demand = demand_of(workload, layout, costs)
    batch = workload.training.batch_size
    found = [
        Bound(name=name, role=role, samples_per_second=batch * batches)
        for name, role, batches in (
            *_pool_bounds(layout, demand, costs, limits),
            *_process_bounds(layout, demand, limits),
            *_time_bounds(workload, layout, demand, costs, limits),
        )
    ]
    memory = _memory(workload, layout, demand, costs)
    batches = workload.training.samples_per_second / batch
    return Estimate(
        layout=layout,
        demand=demand,
        bounds=tuple(sorted(found, key=lambda bound: bound.samples_per_second)),
        memory=memory,
        links=tuple(
            Link(pool=pool, out_bytes=batches * out / pool.num_machines, in_bytes=batches * into / pool.num_machines)
            for pool in layout.pools
            for out, into in [_crossing(layout, pool, demand)]
        ),
        files=_files(layout, costs),
        misfits=tuple(_misfits(layout, memory, limits)),
    )


_Permitted = Iterator[tuple[str, str, float]]
"""A resource, its role, and the batches a second that it permits."""


def _pool_bounds(layout: Layout, demand: Demand, costs: Coefficients, limits: Limits) -> _Permitted:
    for pool in layout.pools:
        where = f"{'/'.join(pool.roles)} machines"
        seconds = core_seconds(layout, pool, demand, costs)
        role = max(seconds, key=lambda each: seconds[each])
        joint = costs.joint_cores if pool.trainers and layout.count("trainer") > 1 else 1.0
        cores = pool.num_machines * pool.machine.cores * pool.machine.core_speed * min(limits.cores, joint)
        if total := sum(seconds.values()):
            yield f"cores of the {where}", role, cores / total
        crossing = max(_crossing(layout, pool, demand))
        if crossing:
            yield (
                f"network of the {where}",
                role,
                pool.num_machines * pool.machine.link_bytes * limits.network / crossing,
            )
        if pool.trainers and pool.machine.gpus and demand.dense_flops:
            rate = pool.num_machines * pool.machine.gpus * pool.machine.gpu_tflops * 1e12
            yield f"GPUs of the {where}", "trainer", rate / (demand.dense_flops * layout.share(pool, "trainer"))


def core_seconds(layout: Layout, pool: Pool, demand: Demand, costs: Coefficients) -> dict[str, float]:
    """Return the seconds of a core that a batch takes in this pool, by role."""
    dense = 0.0 if pool.machine.gpus else demand.dense_flops / costs.flops_per_second
    by_role = {
        "server": demand.server_seconds,
        "worker": 0.0,
        "trainer": demand.trainer_seconds + demand.reduce_seconds + dense,
    }
    by_role[layout.client_role] += demand.client_seconds
    return {role: by_role[role] * layout.share(pool, role) for role in pool.roles}


def _crossing(layout: Layout, pool: Pool, demand: Demand) -> tuple[float, float]:
    """Return the bytes of a batch that leave and that enter the machines of a pool. Calls within a machine cross no
    link."""
    if layout.num_machines == 1:
        return 0.0, 0.0
    out, into = 0.0, demand.data * layout.share(pool, layout.client_role)
    client, server = layout.share(pool, layout.client_role), layout.share(pool, "server")
    beside = layout.pool_of(layout.client_role) is pool and server > 0
    crosses = 1.0 - 1.0 / pool.num_machines if beside else 1.0
    out += crosses * (client * demand.requests + server * demand.replies)
    into += crosses * (client * demand.replies + server * demand.requests)
    worker, trainer = layout.share(pool, "worker"), layout.share(pool, "trainer")
    if not (worker and trainer):
        out += worker * demand.vectors_to_trainer + trainer * demand.vectors_to_worker
        into += trainer * demand.vectors_to_trainer + worker * demand.vectors_to_worker
    if pool.num_machines > 1:
        out += trainer * demand.reduced
        into += trainer * demand.reduced
    return out, into


def _process_bounds(layout: Layout, demand: Demand, limits: Limits) -> _Permitted:
    """Yield what the one thread of each process that receives and sends permits."""
    if layout.count("server") and demand.server_thread_seconds:
        speed = layout.pool_of("server").machine.core_speed * limits.cores
        yield SERVER_THREAD, "server", speed / demand.server_thread_seconds
    role = layout.client_role
    if demand.client_thread_seconds:
        speed = layout.pool_of(role).machine.core_speed * limits.cores
        yield f"Python thread of each {role}", role, layout.count(role) * speed / demand.client_thread_seconds


def _time_bounds(workload: Workload, layout: Layout, demand: Demand, costs: Coefficients, limits: Limits) -> _Permitted:
    trainers = layout.count("trainer")
    pool = layout.pool_of("trainer")
    trip = limits.round_trip_ms / 1e3 if layout.num_machines > 1 else 0.0
    dense = dense_seconds(pool, demand, costs)
    reduce = 0.0
    if trainers > 1:
        reduce = demand.reduce_seconds + (demand.reduced / pool.machine.link_bytes if layout.num_machines > 1 else 0.0)
    loop = (
        dense
        + reduce
        + demand.trainer_seconds / pool.machine.core_speed
        + (_OPEN_TRIPS * trip if trainers > 1 else 0.0)
    )
    serial = (
        loop + _client_seconds(layout, demand) + trip * (_SERIAL_TRIPS - _OPEN_TRIPS if layout.count("server") else 0)
    )
    if layout.count("server"):
        at_once = trainers if workload.training.staleness == 0 else 1
        servers = layout.pool_of("server")
        cores = servers.count("server") * _threads(servers)
        serial += at_once * demand.server_seconds / cores
        if layout.num_machines > 1:
            link = min(servers.num_machines * servers.machine.link_bytes, pool.num_machines * pool.machine.link_bytes)
            serial += at_once * (demand.requests + demand.replies) / link
    in_flight = workload.training.staleness + 1
    yield f"a step's time, {in_flight} in flight", "trainer", trainers * in_flight / serial
    if in_flight > 1 and loop:
        yield "the trainers' own loop", "trainer", trainers / loop


def dense_seconds(pool: Pool, demand: Demand, costs: Coefficients) -> float:
    """Return the seconds of a trainer's dense network for a batch."""
    if pool.machine.gpus:
        return demand.dense_flops / (pool.machine.gpu_tflops * 1e12)
    return demand.dense_flops / (costs.flops_per_second * _threads(pool))


def _client_seconds(layout: Layout, demand: Demand) -> float:
    pool = layout.pool_of(layout.client_role)
    fixed = demand.client_thread_seconds / pool.machine.core_speed
    return fixed + (demand.client_seconds - demand.client_thread_seconds) / _threads(pool)


def _threads(pool: Pool) -> float:
    """Return the cores that each process of a machine has, if they divide the cores evenly."""
    processes = sum(pool.each(each) for each in pool.roles)
    return max(1.0, pool.machine.cores / processes) * pool.machine.core_speed


def _memory(workload: Workload, layout: Layout, demand: Demand, costs: Coefficients) -> dict[str, float]:
    training = workload.training
    servers, trainers = layout.count("server"), layout.count("trainer")
    in_flight = (training.staleness + 1) * _MESSAGES
    message = demand.requests + demand.replies
    block = 2 * workload.vector_floats * training.batch_size * 4.0
    ids = 16.0 * demand.ids
    client = in_flight * (message + ids + block)
    found = {
        "trainer": costs.trainer_bytes
        + _DENSE_COPIES * training.dense_parameters
        + in_flight * block
        + (client if layout.client_role == "trainer" else 0.0)
    }
    if not servers:
        found["trainer"] += workload.bytes
        return found
    if layout.count("worker"):
        found["worker"] = costs.server_bytes + client * -(-trainers // layout.count("worker"))
    found["server"] = costs.server_bytes + workload.server_bytes(servers) + trainers * in_flight * message / servers
    return found


def _files(layout: Layout, costs: Coefficients) -> dict[str, int]:
    """Return the file descriptors of each process. Trainers have connections to each other, too."""
    servers, workers, trainers = (layout.count(role) for role in ("server", "worker", "trainer"))
    trainers_of_worker = -(-trainers // workers) if workers else 0
    needed = {
        "server": costs.server_files * trainers,
        "worker": (costs.worker_files * servers + costs.server_files) * trainers_of_worker,
        "trainer": costs.client_files * (1 if workers else servers) + trainers,
    }
    return {role: _OTHER_FILES + math.ceil(needed[role]) for role in needed if layout.count(role)}


def _misfits(layout: Layout, memory: dict[str, float], limits: Limits) -> Iterator[str]:
    for pool in layout.pools:
        needed = sum(pool.each(role) * memory[role] for role in pool.roles)
        usable = pool.machine.memory_bytes * limits.memory
        if needed > usable:
            yield (
                f"{pool.machine.name}: {' and '.join(pool.roles)} need {needed / 2**30:,.1f} GiB of each machine, and "
                f"{usable / 2**30:,.1f} GiB of it may be used ({limits.memory:.0%} of {pool.machine.memory_gib:,.0f})"
            )
        if pool.num_machines > pool.machine.available:
            yield f"{pool.machine.name}: {pool.num_machines} machines, and {pool.machine.available} are available"
    if layout.count("worker") > layout.count("trainer"):
        yield "there are more workers than trainers, and a trainer uses one worker"
