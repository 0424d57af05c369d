"""What a layout achieves: the work, bytes and memory of a batch by role, the rate that each resource permits, the
traffic of links, the time of saves. Pure.

unique = expected different ids of the batch, by table
row    = dim numbers as the wire carries them
client -> server   8 bytes for each unique id, a row for each gradient
server -> client   a row for each unique id
worker <-> trainer the vectors of each sample, and their gradients; dense features once
trainer -> trainer 2 (T - 1) / T of the dense gradients: a ring of T trainers

A resource permits `limit x capacity / (what a batch needs of it)` batches a second; the smallest bounds the plan.
Besides cores, links and GPUs there are two bounds on time: with staleness k at most k + 1 batches of a trainer are in
flight, each of which takes as long as a synchronous step; and a trainer's own work for its batches is done one after
another.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from satrap.planning.coefficients import Coefficients
from satrap.planning.machines import Layout, Limits, Pool, Request, misfit_of, requests_of
from satrap.planning.workload import Workload

_ID_BYTES = 8
_WIRE_BYTES = {"float32": 4.0, "float16": 2.0}
_FLOAT = 4.0
_OTHER_FILES = 32
"""File descriptors of a process without a connection: its libraries, log, data and epoll."""
_DENSE_COPIES = 16.0
"""Bytes of a dense parameter in a trainer: itself, its gradient, two states of an optimizer, float32."""
_MESSAGES = 3.0
"""Copies of a batch in flight that a process holds: as it came, as it is worked on, as it leaves."""
_CALL_TRIPS = 2
"""Round trips of a synchronous step to the servers, and to a worker: lookup and update."""
_RINGS = 2
"""Rings of a step: the dense gradients, and whether all trainers have a batch."""
_LEAST_SPARE = 0.1
"""Share of cores and links that a save gets, even if training needs all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one batch needs."""

    ids: float
    unique_ids: float
    server_seconds: float
    """Seconds of all servers together."""
    client_seconds: float
    """Seconds of the worker, or without workers of the trainer."""
    trainer_seconds: float
    """Seconds of the trainer's process beside its dense network and what a client does."""
    dense_flops: float
    reduce_seconds: float
    """Seconds of a trainer for its part in averaging the dense gradients."""
    requests: float
    """Bytes from the client to all servers."""
    replies: float
    """Bytes from all servers to the client."""
    vectors_to_trainer: float
    """Bytes from a worker process to its trainer."""
    vectors_to_worker: float
    reduced: float
    """Bytes that a trainer sends to the next one of the ring, and receives from the one before."""
    data: float
    """Bytes of training data."""
    server_thread_seconds: float
    """Seconds of the one thread of each server that receives and sends."""
    client_thread_seconds: float
    """Seconds of a client's serial work: Python runs one thread at a time."""


def demand_of(workload: Workload, layout: Layout, costs: Coefficients) -> Demand:
    """Return what a batch costs with the processes of this layout."""
    training = workload.training
    batch, servers = training.batch_size, layout.count("server")
    ids = sum(batch * load.ids_per_sample for load in workload.tables)
    unique = [(load, load.unique_ids(batch)) for load in workload.tables]
    total_unique = sum(count for _, count in unique)
    wire = _WIRE_BYTES[training.wire]
    rows = sum(count * load.table.dim for load, count in unique)
    touched = sum(count * load.row_bytes for load, count in unique)
    looked_up = sum(batch * load.ids_per_sample * load.table.dim for load in workload.tables)
    crosses = 1.0 if layout.num_machines > 1 else 0.0
    requests = total_unique * _ID_BYTES + rows * wire if servers else 0.0
    replies = rows * wire if servers else 0.0
    encrypted = crosses * costs.key_byte * (requests + replies)
    fixed = costs.client.step + costs.call * (servers - 1) if servers else costs.local.step
    if servers:
        client = costs.client.seconds(ids, 2 * _FLOAT * (looked_up + rows)) + costs.call * (servers - 1) + encrypted
        server = costs.server.seconds(total_unique, 2 * (_FLOAT * rows + touched))
        server += costs.server.step * (servers - 1) + encrypted
    else:
        client = costs.local.seconds(ids, 2 * (_FLOAT * looked_up + touched))
        server = 0.0
    client += costs.read_byte * training.read_bytes_per_sample * batch
    has_workers = layout.count("worker") > 0
    vectors = workload.vector_floats * batch * wire if has_workers else 0.0
    numbers = training.dense_features * batch * _FLOAT if has_workers else 0.0
    transfer = (costs.transfer_byte + crosses * costs.key_byte) * (2 * vectors + numbers)
    trainers, gpus = layout.count("trainer"), layout.pool_of("trainer").machine.gpus
    reduced = 2.0 * (trainers - 1) / trainers * _FLOAT * training.dense_parameters
    return Demand(
        ids=ids,
        unique_ids=total_unique,
        server_seconds=server,
        client_seconds=client + (transfer if has_workers else 0.0),
        trainer_seconds=costs.local.step + transfer if has_workers else 0.0,
        dense_flops=workload.step_flops,
        reduce_seconds=costs.reduce_step + (0.0 if gpus else costs.reduce_byte * reduced) if trainers > 1 else 0.0,
        requests=requests,
        replies=replies,
        vectors_to_trainer=vectors + numbers,
        vectors_to_worker=vectors,
        reduced=reduced,
        data=training.read_bytes_per_sample * batch,
        server_thread_seconds=costs.server.step + encrypted / servers if servers else 0.0,
        client_thread_seconds=fixed + encrypted,
    )


def memory_of(workload: Workload, layout: Layout, demand: Demand, costs: Coefficients) -> dict[str, float]:
    """Return the bytes of memory of each process, by role."""
    training = workload.training
    servers, trainers = layout.count("server"), layout.count("trainer")
    in_flight = (training.staleness + 1) * _MESSAGES
    message = demand.requests + demand.replies
    block = 2 * workload.vector_floats * training.batch_size * _FLOAT
    client = in_flight * (message + 2 * _ID_BYTES * demand.ids + block)
    trainer = costs.trainer_bytes + _DENSE_COPIES * training.dense_parameters + in_flight * block
    trainer += client if layout.client_role == "trainer" else 0.0
    if not servers:
        return {"trainer": trainer + workload.bytes}
    server = costs.server_bytes + workload.server_bytes(servers) + trainers * in_flight * message / servers
    memory = {"trainer": trainer, "server": server}
    if layout.count("worker"):
        memory["worker"] = costs.server_bytes + client * -(-trainers // layout.count("worker"))
    return memory


def files_of(layout: Layout, costs: Coefficients) -> dict[str, int]:
    """Return the file descriptors of each process, by role. Trainers have connections to each other, too."""
    servers, workers, trainers = (layout.count(role) for role in ("server", "worker", "trainer"))
    trainers_of_worker = -(-trainers // workers) if workers else 0
    connections = {
        "server": costs.server_files * trainers,
        "worker": (costs.worker_files * servers + costs.server_files) * trainers_of_worker,
        "trainer": costs.client_files * (1 if workers else servers) + trainers,
    }
    return {role: _OTHER_FILES + math.ceil(count) for role, count in connections.items() if layout.count(role)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A resource, and the rate that it permits."""

    name: str
    role: str
    """The role of which more processes would help."""
    samples_per_second: float
    by_process: bool = False
    """Whether it bounds each process, so that more processes on the same machines would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Traffic of one machine of a pool in each direction, at the requested rate or the layout's if that is lower."""

    pool: Pool
    out_bytes: float
    in_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Why a layout cannot run."""

    role: str
    """The role of which more machines may help."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a layout achieves."""

    layout: Layout
    demand: Demand
    bounds: tuple[Bound, ...]
    """The tightest first."""
    memory: dict[str, float]
    """Bytes of each process, by role."""
    requests: dict[str, Request]
    """What each process gets, by role."""
    misfits: tuple[Misfit, ...]
    """Empty if the processes fit on the machines."""

    @property
    def samples_per_second(self) -> float:
        """The rate that the tightest bound permits."""
        return self.bounds[0].samples_per_second

    def reaches(self, samples_per_second: float) -> bool:
        """Return whether the layout fits and has this rate."""
        return not self.misfits and self.samples_per_second >= samples_per_second


def estimate(workload: Workload, layout: Layout, costs: Coefficients, limits: Limits) -> Estimate:
    """Return what the layout achieves."""
    demand = demand_of(workload, layout, costs)
    memory = memory_of(workload, layout, demand, costs)
    seconds = {
        role: seconds for pool in layout.pools for role, seconds in core_seconds(layout, pool, demand, costs).items()
    }
    servers = layout.count("server")
    rows_bytes = workload.server_bytes(servers) if servers else 0.0
    requests = requests_of(layout, memory, rows_bytes, seconds, limits)
    permitted = (
        *_core_bounds(layout, demand, costs, limits, requests),
        *_pool_bounds(layout, demand, limits),
        *_process_bounds(layout, demand, limits),
        *_time_bounds(workload, layout, demand, costs, limits, requests),
    )
    batch = workload.training.batch_size
    bounds = (
        Bound(name=name, role=role, samples_per_second=batch * batches, by_process="thread of each" in name)
        for name, role, batches in permitted
    )
    return Estimate(
        layout=layout,
        demand=demand,
        bounds=tuple(sorted(bounds, key=lambda bound: bound.samples_per_second)),
        memory=memory,
        requests=requests,
        misfits=tuple(_misfits(layout, requests, limits)),
    )


_Permitted = Iterator[tuple[str, str, float]]
"""A resource, its role, and the batches a second that it permits."""


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


def _core_bounds(
    layout: Layout, demand: Demand, costs: Coefficients, limits: Limits, requests: dict[str, Request]
) -> _Permitted:
    """Yield what the CPUs of each role permit; on a machine with fewer cores than processes, these share the cores."""
    for pool in layout.pools:
        seconds = core_seconds(layout, pool, demand, costs)
        joint = costs.joint_cores if pool.trainers and layout.count("trainer") > 1 else 1.0
        speed = pool.num_machines * pool.machine.core_speed * min(limits.cores, joint)
        if sum(pool.each(role) for role in pool.roles) > pool.machine.pod_cores:
            if total := sum(seconds.values()):
                role = max(seconds, key=lambda role: seconds[role])
                yield f"cores of the {'/'.join(pool.roles)} machines", role, speed * pool.machine.cores / total
            continue
        for role in pool.roles:
            cores = pool.each(role) * requests[role].cpus if layout.count("server") else pool.machine.cores
            if seconds[role]:
                yield f"cores of the {role}s", role, speed * cores / seconds[role]


def _pool_bounds(layout: Layout, demand: Demand, limits: Limits) -> _Permitted:
    for pool in layout.pools:
        machines = pool.num_machines
        if crossing := max(_crossing(layout, pool, demand)):
            role = "trainer" if pool.roles == ("trainer",) else pool.roles[0]
            where = f"network of the {'/'.join(pool.roles)} machines"
            yield where, role, machines * pool.machine.link_bytes * limits.network / crossing
        if pool.trainers and pool.machine.gpus and demand.dense_flops:
            rate = machines * pool.machine.gpus * pool.machine.gpu_tflops * 1e12
            yield "GPUs of the trainers", "trainer", rate / (demand.dense_flops * layout.share(pool, "trainer"))


def _crossing(layout: Layout, pool: Pool, demand: Demand) -> tuple[float, float]:
    """Return the bytes of a batch that leave and that enter the machines of a pool. Calls within a machine cross no
    link, and the ring of the trainers leaves and enters each machine once, however many of them it has."""
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
    if pool.trainers and pool.num_machines > 1:
        out += trainer * demand.reduced / pool.trainers
        into += trainer * demand.reduced / pool.trainers
    return out, into


def _process_bounds(layout: Layout, demand: Demand, limits: Limits) -> _Permitted:
    """Yield what the one thread of each process that receives and sends permits."""
    if layout.count("server") and demand.server_thread_seconds:
        speed = layout.pool_of("server").machine.core_speed * limits.cores
        yield "network thread of each server", "server", speed / demand.server_thread_seconds
    role = layout.client_role
    if demand.client_thread_seconds:
        speed = layout.pool_of(role).machine.core_speed * limits.cores
        yield f"Python thread of each {role}", role, layout.count(role) * speed / demand.client_thread_seconds


def _time_bounds(
    workload: Workload,
    layout: Layout,
    demand: Demand,
    costs: Coefficients,
    limits: Limits,
    requests: dict[str, Request],
) -> _Permitted:
    trainers, pool = layout.count("trainer"), layout.pool_of("trainer")
    trip = limits.round_trip_ms / 1e3 if layout.num_machines > 1 else 0.0
    loop = _dense_seconds(layout, demand, costs, requests) + demand.trainer_seconds / pool.machine.core_speed
    if trainers > 1:
        # A ring over M machines has 2 (M - 1) hops, one after another, each of half a round trip.
        loop += demand.reduce_seconds / pool.machine.core_speed + _RINGS * (pool.num_machines - 1) * trip
        loop += demand.reduced / pool.machine.link_bytes if pool.num_machines > 1 else 0.0
    client = layout.pool_of(layout.client_role).machine.core_speed
    fixed = demand.client_thread_seconds / client
    divided = demand.client_seconds - demand.client_thread_seconds
    serial = loop + fixed + divided / _threads(layout, layout.client_role, requests)
    at_once = trainers if workload.training.staleness == 0 else 1
    if layout.count("server"):
        serial += at_once * demand.server_seconds / (layout.count("server") * _threads(layout, "server", requests))
        serial += _CALL_TRIPS * trip
        serial += at_once * (demand.requests + demand.replies) / _link(layout, layout.client_role, "server")
    if layout.count("worker"):
        serial += _CALL_TRIPS * trip
        serial += at_once * (demand.vectors_to_trainer + demand.vectors_to_worker) / _link(layout, "worker", "trainer")
    in_flight = workload.training.staleness + 1
    yield f"a step's time, {in_flight} in flight", "trainer", trainers * in_flight / serial
    if in_flight > 1 and loop:
        yield "the trainers' own loop", "trainer", trainers / loop


def _link(layout: Layout, *roles: str) -> float:
    """Return the bytes a second between all machines of two roles; inf if all processes are on one machine."""
    if layout.num_machines == 1:
        return math.inf
    return min(pool.num_machines * pool.machine.link_bytes for pool in map(layout.pool_of, roles))


def _dense_seconds(layout: Layout, demand: Demand, costs: Coefficients, requests: dict[str, Request]) -> float:
    """Return the seconds of a trainer's dense network for a batch."""
    machine = layout.pool_of("trainer").machine
    if machine.gpus:
        return demand.dense_flops / (machine.gpu_tflops * 1e12)
    return demand.dense_flops / (costs.flops_per_second * _threads(layout, "trainer", requests))


def _threads(layout: Layout, role: str, requests: dict[str, Request]) -> float:
    """Return the CPUs of a process in those of the coefficients. A trainer without servers has its whole machine."""
    machine = layout.pool_of(role).machine
    return machine.core_speed * (requests[role].cpus if layout.count("server") else machine.cores)


def _misfits(layout: Layout, requests: dict[str, Request], limits: Limits) -> Iterator[Misfit]:
    for pool in layout.pools:
        if (reason := misfit_of(pool, requests, limits)) is not None:
            yield Misfit(role=pool.roles[0], reason=reason)
    if layout.count("worker") > layout.count("trainer"):
        reason = "there are more workers than trainers, and a trainer uses one worker"
        yield Misfit(role="trainer", reason=reason)


def links_of(candidate: Estimate, workload: Workload) -> tuple[Link, ...]:
    """Return the traffic of each pool's machines."""
    batches = _batches(candidate, workload)
    return tuple(
        Link(pool=pool, out_bytes=batches * out / pool.num_machines, in_bytes=batches * into / pool.num_machines)
        for pool in candidate.layout.pools
        for out, into in [_crossing(candidate.layout, pool, candidate.demand)]
    )


def cores_used(candidate: Estimate, pool: Pool, workload: Workload, costs: Coefficients) -> dict[str, float]:
    """Return the cores of one machine that each role uses, at the requested rate or at the layout's if lower."""
    seconds = core_seconds(candidate.layout, pool, candidate.demand, costs)
    speed = pool.num_machines * pool.machine.core_speed
    return {role: _batches(candidate, workload) * used / speed for role, used in seconds.items()}


def _batches(candidate: Estimate, workload: Workload) -> float:
    training = workload.training
    return min(training.samples_per_second, candidate.samples_per_second) / training.batch_size


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
    """What a save waits for: "store", "machines" (their links or disks) or "cores"."""


def upkeep_of(candidate: Estimate, workload: Workload, costs: Coefficients, limits: Limits) -> Upkeep:
    """Return what checkpoints cost. All machines with rows save at once, into one store, with what training leaves of
    their cores and links; training waits only for the cut. A resume has the cores and links for itself."""
    layout = candidate.layout
    pool = layout.pool_of("server" if layout.count("server") else "trainer")
    saved = workload.saved_bytes + 12.0 * workload.training.dense_parameters
    used = sum(cores_used(candidate, pool, workload, costs).values())
    cores = pool.num_machines * pool.machine.core_speed * pool.machine.cores
    spare_cores = cores * max(_LEAST_SPARE, 1.0 - used / pool.machine.cores)
    (link,) = (link for link in links_of(candidate, workload) if link.pool is pool)
    store = limits.storage_gb_per_second * 1e9

    def rate(busy_bytes: float) -> float:
        if pool.machine.storage_mb_per_second is not None:
            return pool.num_machines * pool.machine.storage_mb_per_second * 1e6
        spare = max(_LEAST_SPARE * pool.machine.link_bytes, pool.machine.link_bytes - busy_bytes)
        return pool.num_machines * spare

    seconds = {
        "store": saved / store,
        "machines": saved / rate(link.out_bytes),
        "cores": costs.save_byte * saved / spare_cores,
    }
    bound = max(seconds, key=lambda cause: seconds[cause])
    return Upkeep(
        checkpoint_bytes=saved,
        save_seconds=seconds[bound],
        pause_seconds=costs.cut + costs.cut_server * layout.count("server"),
        resume_seconds=costs.start + max(saved / store, saved / rate(0.0), costs.load_byte * saved / cores),
        bound=bound,
    )
