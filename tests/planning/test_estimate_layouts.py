"""An estimate's links, bounds and memory for each way to place the roles, against formulas with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plans import FREE, assess, bound, load, machine, split, workload
from satrap.planning.coefficients import DEFAULTS, Cost
from satrap.planning.estimate import Estimate
from satrap.planning.machines import Layout, Limits, Pool

UNIQUE = load(unique_share=0.5)  # 500 different ids in a batch of 1000, dim 16
LINK = 1e9  # bytes a second in one direction


def links(found: Estimate) -> dict[str, Any]:
    """Return the bytes that leave and enter all machines of each pool."""
    pools = {"/".join(each.pool.roles): each for each in found.links}
    count = {name: each.pool.num_machines for name, each in pools.items()}
    return {
        name: (pytest.approx(count[name] * each.out_bytes), pytest.approx(count[name] * each.in_bytes))
        for name, each in pools.items()
    }


JOB = workload(UNIQUE, samples_per_second=1000.0, read_bytes_per_sample=500.0)  # one batch a second


def test_links_of_processes_on_three_kinds_of_machines() -> None:
    found = assess(JOB, split(servers=2, workers=2, trainers=4))
    demand = found.demand
    assert links(found) == {
        "server": (demand.replies, demand.requests),
        "worker": (
            demand.requests + demand.vectors_to_trainer,
            demand.replies + demand.vectors_to_worker + demand.data,
        ),
        "trainer": (demand.vectors_to_worker + demand.reduced, demand.vectors_to_trainer + demand.reduced),
    }
    assert demand.data == 500_000 and demand.reduced > 0


@pytest.mark.parametrize("num_machines", [2, 4])
def test_links_of_machines_with_all_roles(num_machines: int) -> None:
    """Calls of a client to servers on its own machine cross no link; nor does a batch of the machine's worker."""
    pool = Pool(machine=machine(), num_machines=num_machines, servers=1, workers=1, trainers=1)
    found = assess(JOB, Layout(pools=(pool,)))
    demand = found.demand
    calls = (1 - 1 / num_machines) * (demand.requests + demand.replies) + demand.reduced
    assert links(found) == {"server/worker/trainer": (calls, calls + demand.data)}


def test_trainers_of_one_machine_reduce_within_it() -> None:
    servers = Pool(machine=machine(), num_machines=2, servers=1)
    found = assess(JOB, Layout(pools=(servers, Pool(machine=machine(), num_machines=1, trainers=4))))
    demand = found.demand
    assert links(found) == {
        "server": (demand.replies, demand.requests),
        "trainer": (demand.requests, demand.replies + demand.data),
    }


def test_limits_leave_head_room() -> None:
    """With a half of the cores, links and memory, the bounds halve, except where a joint step limits them already."""
    half = Limits(memory=0.5, cores=0.5, network=0.5, round_trip_ms=0.0)
    layout = split(servers=2, trainers=1)
    whole, found = (assess(JOB, layout, limits) for limits in (FREE, half))
    names = (
        "cores of the server",
        "cores of the trainer",
        "network of the server",
        "network of the trainer",
        "network thread of each server",
        "Python thread of each trainer",
    )
    for name in names:
        assert bound(found, name) == pytest.approx(bound(whole, name) / 2), name
    for cores in (0.01, 1.0):
        joint = assess(JOB, split(servers=2, trainers=3), replace(FREE, cores=cores))
        demand = joint.demand
        seconds = demand.client_seconds + demand.reduce_seconds + demand.dense_flops / DEFAULTS.flops_per_second
        wanted = 1000 * 30 * min(cores, DEFAULTS.joint_cores) / seconds
        assert bound(joint, "cores of the trainer") == pytest.approx(wanted)


def test_faster_cores() -> None:
    fast = machine(core_speed=2.0)
    layouts = [split(servers=2, workers=1, trainers=2, kind=kind) for kind in (machine(), fast)]
    plain, found = (assess(JOB, layout) for layout in layouts)
    for name in (
        "cores of the server",
        "cores of the worker",
        "network thread of each server",
        "Python thread of each worker",
    ):
        assert bound(found, name) == pytest.approx(2 * bound(plain, name)), name
    assert bound(plain, "network thread of each server") == pytest.approx(1000 / plain.demand.server_thread_seconds)
    assert bound(plain, "Python thread of each worker") == pytest.approx(1000 / plain.demand.client_thread_seconds)
    two = assess(JOB, split(servers=2, workers=2, trainers=2))
    assert bound(two, "Python thread of each worker") == pytest.approx(2000 / two.demand.client_thread_seconds)


def test_roles_on_one_machine_divide_its_cores_by_their_work() -> None:
    """Each process has whole CPUs; of ten, each has one, and eight are divided."""
    pool = Pool(machine=machine(), num_machines=2, servers=1, trainers=1)
    job = workload(UNIQUE, dense_flops=0.0, dense_parameters=0)
    found = assess(job, Layout(pools=(pool,)))
    server = found.demand.server_seconds
    trainer = found.demand.client_seconds + found.demand.reduce_seconds
    cpus = {role: found.requests[role].cpus for role in ("server", "trainer")}
    assert cpus == {
        "server": 1 + int(8 * server / (server + trainer)),
        "trainer": 1 + int(8 * trainer / (server + trainer)),
    }
    assert bound(found, "cores of the servers") == pytest.approx(
        1000 * 2 * cpus["server"] * DEFAULTS.joint_cores / server
    )
    assert bound(found, "cores of the trainers") == pytest.approx(
        1000 * 2 * cpus["trainer"] * DEFAULTS.joint_cores / trainer
    )


def test_processes_that_outnumber_the_cores_share_them() -> None:
    """The bound names the role that uses most of the machines."""
    pool = Pool(machine=machine(cores=2), num_machines=2, servers=1, trainers=1)
    for flops, role in ((1e9, "trainer"), (0.0, "server")):
        costs = replace(DEFAULTS, reduce_step=0.0, call=0.0, client=Cost(step=0.0, id=0.0, byte=0.0))
        job = workload(UNIQUE, dense_flops=flops, dense_parameters=0)
        found = Estimate(workload=job, layout=Layout(pools=(pool,)), costs=costs, limits=FREE)
        assert found.demand.server_seconds > found.demand.client_seconds
        (cores,) = (each for each in found.bounds if each.name.startswith("cores"))
        assert (cores.name, cores.role) == ("cores of the server/trainer machines", role)


@pytest.mark.parametrize("staleness", [0, 4])
def test_the_time_of_a_step_of_several_trainers(staleness: int) -> None:
    """Without staleness they call at the same time. With it, their loop is a separate bound."""
    limits = replace(FREE, round_trip_ms=5.0)
    found = assess(workload(UNIQUE, staleness=staleness), split(servers=2, trainers=3), limits)
    demand = found.demand
    rings = 2 * 2 * (3 - 1) * 5e-3 / 2  # two of them, each of four hops of half a round trip
    loop = 3e9 / (DEFAULTS.flops_per_second * 10) + demand.reduce_seconds + demand.reduced / LINK + rings
    client = demand.client_thread_seconds + (demand.client_seconds - demand.client_thread_seconds) / 10
    calls = demand.server_seconds / 20 + (demand.requests + demand.replies) / (2 * LINK)
    serial = loop + client + 2 * 5e-3 + (1 if staleness else 3) * calls
    assert bound(found, f"a step's time, {staleness + 1} in flight") == pytest.approx(
        1000 * 3 * (staleness + 1) / serial
    )
    own = [each for each in found.bounds if each.name == "the trainers' own loop"]
    assert [each.samples_per_second for each in own] == [pytest.approx(3000 / loop)] * (staleness > 0)


@pytest.mark.parametrize("staleness", [0, 4])
def test_the_time_of_a_step_with_workers(staleness: int) -> None:
    """Rows go to a worker, and their pooled vectors to its trainer: four round trips, over two kinds of links."""
    limits = replace(FREE, round_trip_ms=5.0)
    found = assess(workload(UNIQUE, staleness=staleness), split(servers=2, workers=2, trainers=3), limits)
    demand = found.demand
    loop = 3e9 / (DEFAULTS.flops_per_second * 10) + demand.trainer_seconds + demand.reduce_seconds
    loop += demand.reduced / LINK + 2 * 2 * (3 - 1) * 5e-3 / 2
    client = demand.client_thread_seconds + (demand.client_seconds - demand.client_thread_seconds) / 10
    vectors = demand.vectors_to_trainer + demand.vectors_to_worker
    calls = demand.server_seconds / 20 + (demand.requests + demand.replies + vectors) / (2 * LINK)
    serial = loop + client + 4 * 5e-3 + (1 if staleness else 3) * calls
    assert bound(found, "a step's time") == pytest.approx(1000 * 3 * (staleness + 1) / serial)


def test_the_time_of_a_step_on_one_machine() -> None:
    """No trips, no links."""
    pool = Pool(machine=machine(), num_machines=1, servers=2, trainers=3)
    found = assess(workload(UNIQUE), Layout(pools=(pool,)), replace(FREE, round_trip_ms=5.0))
    demand = found.demand
    fixed = demand.client_thread_seconds
    servers, trainers = (found.requests[role].cpus for role in ("server", "trainer"))
    assert 2 * servers + 3 * trainers <= 10
    serial = 3e9 / (DEFAULTS.flops_per_second * trainers) + demand.reduce_seconds
    serial += fixed + (demand.client_seconds - fixed) / trainers + 3 * demand.server_seconds / (2 * servers)
    assert bound(found, "a step's time") == pytest.approx(3000 / serial)
    alone = assess(workload(UNIQUE), Layout(pools=(Pool(machine=machine(), num_machines=1, trainers=1),)))
    fixed = alone.demand.client_thread_seconds
    client = fixed + (alone.demand.client_seconds - fixed) / 11
    assert bound(alone, "a step's time") == pytest.approx(1000 / (3e9 / (DEFAULTS.flops_per_second * 11) + client))


def test_the_time_of_a_step_with_gpus() -> None:
    """A machine with more processes than cores has one core for each."""
    kind = machine(cores=2, gpus=4, gpu_tflops=10.0)
    layout = Layout(
        pools=(Pool(machine=machine(), num_machines=1, servers=1), Pool(machine=kind, num_machines=1, trainers=4))
    )
    found = assess(workload(UNIQUE), layout)
    demand = found.demand
    link = (demand.requests + demand.replies) / LINK
    serial = 3e9 / 10e12 + demand.reduce_seconds + demand.client_seconds  # the ring crosses no link
    assert bound(found, "a step's time") == pytest.approx(4000 / (serial + 4 * (demand.server_seconds / 10 + link)))
    cores = 1000 * 2 * DEFAULTS.joint_cores / (demand.client_seconds + demand.reduce_seconds)
    assert bound(found, "cores of the trainer") == pytest.approx(cores), "the dense network takes no cores"


@pytest.mark.parametrize("staleness", [0, 4])
def test_the_memory_of_each_role(staleness: int) -> None:
    job = workload(UNIQUE, staleness=staleness)
    direct, behind = (assess(job, split(servers=3, trainers=5, workers=count)).memory for count in (0, 2))
    demand = assess(job, split(servers=3, trainers=5)).demand
    in_flight, block = 3 * (staleness + 1), 2 * 16 * 1000 * 4
    message = demand.requests + demand.replies
    client = in_flight * (message + 16 * 1000 + block)
    trainer = DEFAULTS.trainer_bytes + 16 * 100_000 + in_flight * block
    server = DEFAULTS.server_bytes + job.server_bytes(3) + 5 * in_flight * message / 3
    assert direct == {"trainer": pytest.approx(trainer + client), "server": pytest.approx(server)}
    assert behind == {
        "trainer": pytest.approx(trainer),
        "worker": pytest.approx(DEFAULTS.server_bytes + 3 * client),  # the busiest worker has three trainers
        "server": pytest.approx(server),
    }
    alone = assess(job, Layout(pools=(Pool(machine=machine(), num_machines=1, trainers=1),)))
    client = in_flight * (16 * 1000 + block)
    assert alone.memory == {"trainer": pytest.approx(trainer + client + job.bytes)}


def test_a_layout_with_a_machine_for_each_process_fits() -> None:
    assert not assess(workload(), split(trainers=2, workers=2)).misfits


@pytest.mark.parametrize("share", [1.0, 0.8, 0.5])
def test_a_layout_fits_exactly(share: float) -> None:
    """The processes request so much that they use the permitted share of it, and that is what a machine must have."""
    limits = replace(FREE, memory=share)
    requests = assess(workload(), split(servers=2, trainers=1), limits).requests
    needed = max(each.memory_gib for each in requests.values())
    for spare in (0, -0.001):
        kind = machine(pod_memory_gib=needed + spare)
        assert bool(assess(workload(), split(servers=2, trainers=1, kind=kind), limits).misfits) == (spare < 0)


def gke_bytes(memory_gib: float) -> float:
    """Return what pods may have of a node on GKE: the kernel keeps 1.6 % for its pages, GKE the shares of its
    documentation and 100 MiB."""
    left, reserved = 0.984 * memory_gib, 0.1
    for size, share in ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (1e9, 0.02)):
        reserved += share * min(left, size)
        left -= min(left, size)
    return (0.984 * memory_gib - reserved) * 2**30


@pytest.mark.parametrize("memory_gib", [8, 15, 16, 32, 64, 120, 128, 256, 864, 1024, 5888, 11776])
def test_the_processes_of_a_machine_leave_memory_to_the_system(memory_gib: int) -> None:
    """GKE's nodes have room for them, on machines of all sizes."""
    pods = machine(memory_gib=memory_gib).pod_bytes
    assert 0 < pods <= gke_bytes(memory_gib)
    assert machine(memory_gib=memory_gib, pod_memory_gib=7.5).pod_bytes == 7.5 * 2**30
