"""Every figure of an estimate, against its formula with round numbers; and what more of each resource changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import FREE, assess, bound, load, machine, split, workload
from satrap.planning.coefficients import DEFAULTS
from satrap.planning.estimate import Upkeep, demand_of
from satrap.planning.machines import Layout, Pool
from satrap.planning.workload import Workload

UNIQUE = load(unique_share=0.5)  # 500 different ids in a batch of 1000, dim 16
ALONE = Layout(pools=(Pool(machine=machine(), num_machines=1, trainers=1),))


def test_the_bytes_of_a_batch() -> None:
    found = demand_of(workload(UNIQUE, dense_features=13), split(servers=2, trainers=3, workers=1), DEFAULTS)
    assert found.unique_ids == 500
    assert found.requests == 500 * (8 + 16 * 4)
    assert found.replies == 500 * 16 * 4
    assert found.vectors_to_worker == 1000 * 16 * 4
    assert found.vectors_to_trainer == 1000 * (16 + 13) * 4
    assert found.reduced == pytest.approx(2 * (2 / 3) * 4 * 100_000)


def test_float16_halves_rows_and_vectors_but_not_ids() -> None:
    found = demand_of(workload(UNIQUE, wire="float16"), split(workers=1), DEFAULTS)
    assert (found.requests, found.replies, found.vectors_to_worker) == (500 * (8 + 32), 500 * 32, 1000 * 32)


def test_without_servers_nothing_is_sent() -> None:
    found = demand_of(workload(UNIQUE), ALONE, DEFAULTS)
    assert (found.requests, found.replies, found.vectors_to_trainer, found.reduced) == (0, 0, 0, 0)
    moved = 2 * (4 * 1000 * 16 + 500 * 160)
    assert found.client_seconds == pytest.approx(DEFAULTS.local.seconds(1000, moved))


def test_the_cores_of_each_role() -> None:
    job, layout = workload(UNIQUE), split(servers=2, trainers=3)
    found, demand = assess(job, layout), demand_of(workload(UNIQUE), layout, DEFAULTS)
    encrypted = DEFAULTS.key_byte * (demand.requests + demand.replies)
    server = DEFAULTS.server.seconds(500, 2 * (4 * 500 * 16 + 500 * 160)) + DEFAULTS.server.step + encrypted
    client = DEFAULTS.client.seconds(1000, 2 * 4 * (1000 * 16 + 500 * 16)) + DEFAULTS.call + encrypted
    dense = 3 * 1e6 * 1000 / DEFAULTS.flops_per_second
    reduce = DEFAULTS.reduce_step + DEFAULTS.reduce_byte * demand.reduced
    assert bound(found, "cores of the server") == pytest.approx(1000 * 2 * 10 / server)
    assert bound(found, "cores of the trainer") == pytest.approx(
        1000 * 3 * 10 * DEFAULTS.joint_cores / (client + dense + reduce)
    )


def test_the_links() -> None:
    found = assess(workload(UNIQUE, samples_per_second=20_000.0), split(servers=2, trainers=4))
    demand, rate = found.demand, 1e9  # bytes a second in one direction
    servers, trainers = found.links
    assert servers.in_bytes == pytest.approx(20 * demand.requests / 2)
    assert servers.out_bytes == pytest.approx(20 * demand.replies / 2)
    assert trainers.out_bytes == pytest.approx(20 * (demand.requests + demand.reduced) / 4)
    assert bound(found, "network of the server") == pytest.approx(1000 * 2 * rate / demand.requests)


@pytest.mark.parametrize("staleness", [0, 4])
def test_the_time_of_a_step_bounds_the_rate(staleness: int) -> None:
    """With one trainer and a server on another machine: four trips less two, the client, the server, the wire."""
    limits = replace(FREE, round_trip_ms=5.0)
    found = assess(workload(UNIQUE, staleness=staleness), split(servers=1, trainers=1), limits)
    demand = found.demand
    dense = 3e9 / (DEFAULTS.flops_per_second * 10)
    fixed = demand.client_thread_seconds
    client = fixed + (demand.client_seconds - fixed) / 10
    serial = dense + client + demand.server_seconds / 10 + (demand.requests + demand.replies) / 1e9 + 2 * 5e-3
    assert bound(found, "a step's time") == pytest.approx(1000 * (staleness + 1) / serial)


def test_memory() -> None:
    job = workload(load(1 << 20, num_buckets=4, unique_share=0.5))
    found = assess(job, split(servers=3, trainers=2))
    messages = 3 * (found.demand.requests + found.demand.replies)
    # The busiest of three servers has two of four buckets.
    assert found.memory["server"] == pytest.approx(DEFAULTS.server_bytes + (1 << 20) * 160 / 2 + 2 * messages / 3)
    alone = assess(job, ALONE)
    assert alone.memory["trainer"] > (1 << 20) * 160 + DEFAULTS.trainer_bytes + 16 * 100_000


def test_a_layout_that_does_not_fit_says_by_how_much() -> None:
    """160 GB of rows, its process and Ray's; the system keeps 8 % of a machine and 2 GiB."""
    (misfit,) = assess(workload(load(10**9)), split(servers=1)).misfits
    assert misfit.role == "server"
    assert misfit.reason == (
        "m: the server of a machine need 151 GiB together, so that they use at most 100% of it, and may have 56.9 of "
        "its 64 GiB"
    )


def test_more_workers_than_trainers_do_not_fit() -> None:
    assert "more workers than trainers" in assess(workload(), split(trainers=2, workers=3)).misfits[0].reason


def test_file_descriptors() -> None:
    direct = assess(workload(), split(servers=10, trainers=4)).files
    assert direct == {"trainer": 32 + 10 * 4 + 4, "server": 32 + 4 * 4}
    behind = assess(workload(), split(servers=10, trainers=4, workers=2)).files
    assert (behind["worker"], behind["trainer"]) == (32 + 2 * (10 * 4 + 4), 32 + 4 + 4)


def upkeep(job: Workload, layout: Layout, storage_gb_per_second: float = 1000.0) -> Upkeep:
    limits = replace(FREE, storage_gb_per_second=storage_gb_per_second)
    return assess(job, layout, limits).upkeep


def test_saves_pauses_and_resumes() -> None:
    """13.6 GB of four servers, to disks of 100 MB/s each; to one store of 0.2 GB/s; by all cores that are idle."""
    layout = split(servers=4, kind=machine(storage_mb_per_second=100.0))
    job = workload(load(10**8), dense_parameters=0, samples_per_second=1e-3)
    found = upkeep(job, layout)
    assert found.checkpoint_bytes == 10**8 * 136
    assert found.save_seconds == pytest.approx(34) and found.bound == "machines"
    assert found.pause_seconds == pytest.approx(DEFAULTS.cut + 4 * DEFAULTS.cut_server)
    assert found.resume_seconds == pytest.approx(DEFAULTS.start + 34)
    store = upkeep(job, layout, storage_gb_per_second=0.2)
    assert store.save_seconds == pytest.approx(68) and store.bound == "store"
    assert store.resume_seconds == pytest.approx(DEFAULTS.start + 68)
    fast = upkeep(job, split(servers=4, kind=machine(network_gbit=1000.0)))
    assert fast.save_seconds == pytest.approx(DEFAULTS.save_byte * 34e8 / 11, rel=1e-3) and fast.bound == "cores"


def test_a_save_gets_what_training_leaves_of_the_links() -> None:
    job = workload(load(10**8), dense_parameters=0, samples_per_second=2e6, dense_flops=0, staleness=100)
    layout = split(servers=1, trainers=40, kind=machine(network_gbit=0.8, cores=1000, memory_gib=1000.0))
    found = assess(job, layout)
    (link,) = (each for each in found.links if each.pool.servers)
    assert 0.1 < link.out_bytes / 1e8 < 0.9
    assert upkeep(job, layout).save_seconds == pytest.approx(136e8 / (1e8 - link.out_bytes))


def test_gpus_average_gradients_by_nccl() -> None:
    """It takes no core, and each machine sends and receives the ring's bytes once, however many GPUs it has."""
    job = workload(UNIQUE, dense_parameters=10**7, samples_per_second=1000.0)
    servers = Pool(machine=machine(), num_machines=1, servers=1)
    plain = Pool(machine=machine(cores=100), num_machines=2, trainers=4)
    with_gpus = replace(plain, machine=machine(cores=100, gpus=4, gpu_tflops=10.0))
    cpu, gpu = (assess(job, Layout(pools=(servers, pool))) for pool in (plain, with_gpus))
    ring = 2 * (7 / 8) * 4 * 10**7
    assert cpu.demand.reduced == gpu.demand.reduced == pytest.approx(ring)
    assert cpu.demand.reduce_seconds == pytest.approx(DEFAULTS.reduce_step + DEFAULTS.reduce_byte * ring)
    assert gpu.demand.reduce_seconds == pytest.approx(DEFAULTS.reduce_step)
    # One batch a second of all trainers: an eighth of a step, in which each of two machines sends the ring's bytes.
    link = gpu.links[1]
    assert link.out_bytes == pytest.approx(gpu.demand.requests / 2 + ring / 8)


SIZES = st.integers(1, 12)


@given(SIZES, SIZES, st.sampled_from([0, 4]), st.sampled_from(["float32", "float16"]))
def test_more_of_everything_is_never_slower(servers: int, trainers: int, staleness: int, wire: str) -> None:
    job: Any = workload(UNIQUE, staleness=staleness, wire=wire)
    limits = replace(FREE, round_trip_ms=0.2)
    plain = assess(job, split(servers, trainers), limits).samples_per_second
    for better in ({"cores": 20}, {"core_speed": 2.0}, {"network_gbit": 80.0}, {"memory_gib": 128.0}):
        faster = assess(job, split(servers, trainers, kind=machine(**better)), limits).samples_per_second
        assert faster >= plain * (1 - 1e-9)
    assert assess(job, split(servers, trainers + 1), limits).samples_per_second >= plain * 0.5
    stale = assess(workload(UNIQUE, staleness=staleness + 1, wire=wire), split(servers, trainers), limits)
    assert stale.samples_per_second >= plain * (1 - 1e-9)


@given(SIZES, SIZES, SIZES)
def test_the_tightest_bound_is_the_rate_and_comes_first(servers: int, trainers: int, workers: int) -> None:
    found = assess(workload(UNIQUE, staleness=2), split(servers, trainers, workers))
    rates = [each.samples_per_second for each in found.bounds]
    assert rates == sorted(rates) and found.samples_per_second == rates[0]
    assert {each.role for each in found.bounds} <= {"server", "worker", "trainer"}
    assert bound(found, "network thread of each server") > 0
