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
from functools import cached_property
from itertools import chain

from satrap.planning.coefficients import Coefficients
from satrap.planning.machines import Layout, Limits, Pool, Request, misfit_of, requests_of
from satrap.planning.workload import Workload

_ID_BYTES = 8
_WIRE_BYTES = {"float32": 4.0, "float16": 2.0}
_FLOAT = 4.0
_OTHER_FILES, _CONNECTION_FILES = 32, 4
"""File descriptors of a process without a connection (its libraries, log, data and epoll), and of one connection."""
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


_Permitted = Iterator[tuple[str, str, float]]
"""A resource, its role, and the batches a second that it permits."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a layout achieves for a job. Each figure is computed when it is first read."""

    workload: Workload
    layout: Layout
    costs: Coefficients
    limits: Limits

    @cached_property
    def demand(self) -> Demand:
        """What a batch needs."""
        return demand_of(self.workload, self.layout, self.costs)

    @cached_property
    def rows_bytes(self) -> float:
        """Memory of rows on the server that owns the most buckets; 0 without servers."""
        servers = self.layout.count("server")
        return self.workload.server_bytes(servers) if servers else 0.0

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of each process, by role."""
        costs, training, layout, demand = self.costs, self.workload.training, self.layout, self.demand
        servers, trainers, workers = (layout.count(role) for role in ("server", "trainer", "worker"))
        in_flight = (training.staleness + 1) * _MESSAGES
        message = demand.requests + demand.replies
        block = 2 * self.workload.vector_floats * training.batch_size * _FLOAT
        client = in_flight * (message + 2 * _ID_BYTES * demand.ids + block)
        trainer = costs.trainer_bytes + _DENSE_COPIES * training.dense_parameters + in_flight * block
        trainer += client if layout.client_role == "trainer" else 0.0
        if not servers:
            return {"trainer": trainer + self.workload.bytes}
        server = costs.server_bytes + self.rows_bytes + trainers * in_flight * message / servers
        memory = {"trainer": trainer, "server": server}
        if workers:
            memory["worker"] = costs.server_bytes + client * -(-trainers // workers)
        return memory

    @cached_property
    def requests(self) -> dict[str, Request]:
        """What each process gets, by role."""
        seconds = {role: work for pool in self.layout.pools for role, work in self.core_seconds(pool).items()}
        return requests_of(self.layout, self.memory, self.rows_bytes, seconds, self.limits)

    @property
    def files(self) -> dict[str, int]:
        """The file descriptors of each process, by role. Trainers have connections to each other, too."""
        servers, workers, trainers = (self.layout.count(role) for role in ("server", "worker", "trainer"))
        trainers_of_worker = -(-trainers // workers) if workers else 0
        connections = {
            "server": _CONNECTION_FILES * trainers,
            "worker": _CONNECTION_FILES * (servers + 1) * trainers_of_worker,
            "trainer": _CONNECTION_FILES * (1 if workers else servers) + trainers,
        }
        return {role: _OTHER_FILES + count for role, count in connections.items() if self.layout.count(role)}

    @cached_property
    def misfits(self) -> tuple[Misfit, ...]:
        """Why it cannot run; empty if the processes fit on the machines."""
        reasons = [(pool, misfit_of(pool, self.requests, self.limits)) for pool in self.layout.pools]
        misfits = [Misfit(role=pool.roles[0], reason=reason) for pool, reason in reasons if reason is not None]
        if self.layout.count("worker") > self.layout.count("trainer"):
            reason = "there are more workers than trainers, and a trainer uses one worker"
            misfits.append(Misfit(role="trainer", reason=reason))
        return tuple(misfits)

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """What each resource permits, the tightest first."""
        permitted = chain(self._core_bounds(), self._pool_bounds(), self._process_bounds(), self._time_bounds())
        batch = self.workload.training.batch_size
        bounds = (
            Bound(name=name, role=role, samples_per_second=batch * batches, by_process="thread of each" in name)
            for name, role, batches in permitted
        )
        return tuple(sorted(bounds, key=lambda bound: bound.samples_per_second))

    @property
    def samples_per_second(self) -> float:
        """The rate that the tightest bound permits."""
        return self.bounds[0].samples_per_second

    def reaches(self, samples_per_second: float) -> bool:
        """Return whether the layout fits and has this rate."""
        return not self.misfits and self.samples_per_second >= samples_per_second

    @property
    def links(self) -> tuple[Link, ...]:
        """The traffic of each pool's machines."""
        rates = [(pool, self._batches / pool.num_machines, self._crossing(pool)) for pool in self.layout.pools]
        return tuple(Link(pool=pool, out_bytes=rate * out, in_bytes=rate * into) for pool, rate, (out, into) in rates)

    def cores_used(self, pool: Pool) -> dict[str, float]:
        """Return the cores of one machine that each role uses, at the requested rate or at the layout's if lower."""
        speed = pool.num_machines * pool.machine.core_speed
        return {role: self._batches * used / speed for role, used in self.core_seconds(pool).items()}

    def core_seconds(self, pool: Pool) -> dict[str, float]:
        """Return the seconds of a core that a batch takes in this pool, by role."""
        demand, layout = self.demand, self.layout
        dense = 0.0 if pool.machine.gpus else demand.dense_flops / self.costs.flops_per_second
        by_role = {
            "server": demand.server_seconds,
            "worker": 0.0,
            "trainer": demand.trainer_seconds + demand.reduce_seconds + dense,
        }
        by_role[layout.client_role] += demand.client_seconds
        return {role: by_role[role] * layout.share(pool, role) for role in pool.roles}

    @cached_property
    def upkeep(self) -> Upkeep:
        """What checkpoints cost. All machines with rows save at once, into one store, with what training leaves of
        their cores and links; training waits only for the cut. A resume has the cores and links for itself."""
        layout, costs = self.layout, self.costs
        pool = layout.pool_of("server" if layout.count("server") else "trainer")
        machine = pool.machine
        saved = self.workload.saved_bytes + 12.0 * self.workload.training.dense_parameters
        cores = pool.num_machines * machine.core_speed * machine.cores
        spare_cores = cores * max(_LEAST_SPARE, 1.0 - sum(self.cores_used(pool).values()) / machine.cores)
        (link,) = (link for link in self.links if link.pool is pool)
        store = self.limits.storage_gb_per_second * 1e9

        def rate(busy_bytes: float) -> float:
            if machine.storage_mb_per_second is not None:
                return pool.num_machines * machine.storage_mb_per_second * 1e6
            return pool.num_machines * max(_LEAST_SPARE * machine.link_bytes, machine.link_bytes - busy_bytes)

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

    @cached_property
    def _batches(self) -> float:
        """Batches a second, at the requested rate or at the layout's if lower."""
        training = self.workload.training
        return min(training.samples_per_second, self.samples_per_second) / training.batch_size

    def _core_bounds(self) -> _Permitted:
        """Yield what the CPUs of each role permit; on a machine with fewer cores than processes, these share them."""
        layout, limits = self.layout, self.limits
        for pool in layout.pools:
            seconds, machine = self.core_seconds(pool), pool.machine
            joint = self.costs.joint_cores if pool.trainers and layout.count("trainer") > 1 else 1.0
            speed = pool.num_machines * machine.core_speed * min(limits.cores, joint)
            if pool.processes > machine.pod_cores:
                if total := sum(seconds.values()):
                    role = max(seconds, key=lambda role: seconds[role])
                    yield f"cores of the {'/'.join(pool.roles)} machines", role, speed * machine.cores / total
                continue
            for role in pool.roles:
                cores = pool.each(role) * self.requests[role].cpus if layout.count("server") else machine.cores
                if seconds[role]:
                    yield f"cores of the {role}s", role, speed * cores / seconds[role]

    def _pool_bounds(self) -> _Permitted:
        flops = self.demand.dense_flops
        for pool in self.layout.pools:
            machine = pool.machine
            if crossing := max(self._crossing(pool)):
                where = f"network of the {'/'.join(pool.roles)} machines"
                yield where, pool.roles[0], pool.num_machines * machine.link_bytes * self.limits.network / crossing
            if pool.trainers and machine.gpus and flops:
                rate = pool.num_machines * machine.gpus * machine.gpu_tflops * 1e12
                yield "GPUs of the trainers", "trainer", rate / (flops * self.layout.share(pool, "trainer"))

    def _crossing(self, pool: Pool) -> tuple[float, float]:
        """Return the bytes of a batch that leave and that enter the machines of a pool. Calls within a machine cross no
        link. The all-reduce ring of the trainers leaves and enters a machine once, even if it has several trainers."""
        layout, demand = self.layout, self.demand
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

    def _process_bounds(self) -> _Permitted:
        """Yield what the one thread of each process that receives and sends permits."""
        layout, demand, role = self.layout, self.demand, self.layout.client_role
        if layout.count("server") and demand.server_thread_seconds:
            speed = layout.pool_of("server").machine.core_speed * self.limits.cores
            yield "network thread of each server", "server", speed / demand.server_thread_seconds
        if demand.client_thread_seconds:
            speed = layout.pool_of(role).machine.core_speed * self.limits.cores
            yield f"Python thread of each {role}", role, layout.count(role) * speed / demand.client_thread_seconds

    def _time_bounds(self) -> _Permitted:
        layout, demand, staleness = self.layout, self.demand, self.workload.training.staleness
        trainers, pool = layout.count("trainer"), layout.pool_of("trainer")
        trip = self.limits.round_trip_ms / 1e3 if layout.num_machines > 1 else 0.0
        loop = self._dense_seconds() + demand.trainer_seconds / pool.machine.core_speed
        if trainers > 1:
            # A ring over M machines has 2 (M - 1) hops, one after another, each of half a round trip.
            loop += demand.reduce_seconds / pool.machine.core_speed + _RINGS * (pool.num_machines - 1) * trip
            loop += demand.reduced / pool.machine.link_bytes if pool.num_machines > 1 else 0.0
        fixed = demand.client_thread_seconds
        serial = loop + fixed / layout.pool_of(layout.client_role).machine.core_speed
        serial += (demand.client_seconds - fixed) / self._threads(layout.client_role)
        at_once = trainers if staleness == 0 else 1
        if layout.count("server"):
            serial += at_once * demand.server_seconds / (layout.count("server") * self._threads("server"))
            serial += _CALL_TRIPS * trip
            serial += at_once * (demand.requests + demand.replies) / self._link(layout.client_role, "server")
        if layout.count("worker"):
            serial += _CALL_TRIPS * trip
            serial += at_once * (demand.vectors_to_trainer + demand.vectors_to_worker) / self._link("worker", "trainer")
        in_flight = staleness + 1
        yield f"a step's time, {in_flight} in flight", "trainer", trainers * in_flight / serial
        if in_flight > 1 and loop:
            yield "the trainers' own loop", "trainer", trainers / loop

    def _link(self, *roles: str) -> float:
        """Return the bytes a second between all machines of two roles; inf if all processes are on one machine."""
        if self.layout.num_machines == 1:
            return math.inf
        return min(pool.num_machines * pool.machine.link_bytes for pool in map(self.layout.pool_of, roles))

    def _dense_seconds(self) -> float:
        """Return the seconds of a trainer's dense network for a batch."""
        machine = self.layout.pool_of("trainer").machine
        rate = machine.gpu_tflops * 1e12 if machine.gpus else self.costs.flops_per_second * self._threads("trainer")
        return self.demand.dense_flops / rate

    def _threads(self, role: str) -> float:
        """Return a process's CPUs in those of the coefficients. A trainer without servers has its whole machine."""
        machine = self.layout.pool_of(role).machine
        return machine.core_speed * (self.requests[role].cpus if self.layout.count("server") else machine.cores)
