"""Every figure of an estimate, against its formula with round numbers; and what more of each resource changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plans import FREE, assess, bound, load, machine, split, workload
from satrap.planning.coefficients import DEFAULTS
from satrap.planning.demand import demand_of
from satrap.planning.estimate import SERVER_THREAD
from satrap.planning.layout import Layout, Pool
from satrap.planning.upkeep import upkeep_of

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


def test_calls_within_a_machine_cross_no_link() -> None:
    beside = Layout(pools=(Pool(machine=machine(), num_machines=1, servers=1, trainers=2),))
    assert all(link.in_bytes == link.out_bytes == 0 for link in assess(workload(UNIQUE), beside).links)


def test_reading_data_uses_the_link_of_the_reader() -> None:
    job = workload(UNIQUE, read_bytes_per_sample=500.0)
    plain, reading = (assess(each, split(trainers=2)).links[1] for each in (workload(UNIQUE), job))
    assert reading.in_bytes - plain.in_bytes == pytest.approx(10_000 * 500 / 2)


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


def test_gpus_bound_the_dense_network() -> None:
    kind = machine(gpus=8, gpu_tflops=10.0)
    pool = Pool(machine=kind, num_machines=2, trainers=8)
    found = assess(workload(UNIQUE), Layout(pools=(Pool(machine=machine(), num_machines=1, servers=1), pool)))
    assert bound(found, "GPUs") == pytest.approx(1000 * 16 * 10e12 / 3e9)


def test_memory() -> None:
    job = workload(load(1 << 20, num_buckets=4, unique_share=0.5))
    found = assess(job, split(servers=3, trainers=2))
    messages = 3 * (found.demand.requests + found.demand.replies)
    # The busiest of three servers has two of four buckets.
    assert found.memory["server"] == pytest.approx(DEFAULTS.server_bytes + (1 << 20) * 160 / 2 + 2 * messages / 3)
    alone = assess(job, ALONE)
    assert alone.memory["trainer"] > (1 << 20) * 160 + DEFAULTS.trainer_bytes + 16 * 100_000


def test_a_layout_that_does_not_fit_says_by_how_much() -> None:
    found = assess(workload(load(10**9)), split(servers=1))
    assert len(found.misfits) == 1
    assert found.misfits[0].startswith("m: server need 149.") and "64.0 GiB of it may be used" in found.misfits[0]


def test_more_workers_than_trainers_do_not_fit() -> None:
    assert "more workers than trainers" in assess(workload(), split(trainers=2, workers=3)).misfits[0]


def test_file_descriptors() -> None:
    direct = assess(workload(), split(servers=10, trainers=4)).files
    assert direct["trainer"] == 32 + math.ceil(10 * DEFAULTS.client_files + 4)
    assert direct["server"] == 32 + math.ceil(4 * DEFAULTS.server_files)
    behind = assess(workload(), split(servers=10, trainers=4, workers=2)).files
    assert behind["worker"] == 32 + math.ceil(2 * (10 * DEFAULTS.worker_files + DEFAULTS.server_files))
    assert behind["trainer"] == 32 + math.ceil(DEFAULTS.client_files + 4)


def test_saves_pauses_and_resumes() -> None:
    kind = machine(storage_mb_per_second=100.0)
    job = workload(load(10**8), dense_parameters=0)
    found = upkeep_of(job, split(servers=4, kind=kind), DEFAULTS)
    assert found.checkpoint_bytes == 10**8 * 136
    assert found.save_seconds == pytest.approx(136e8 / 4 / 1e8) and found.bound == "storage"
    assert found.pause_seconds == pytest.approx(DEFAULTS.cut + 4 * DEFAULTS.cut_server)
    assert found.resume_seconds == pytest.approx(DEFAULTS.start + 34)
    fast = upkeep_of(job, split(servers=4, kind=machine(network_gbit=1000.0)), DEFAULTS)
    assert fast.save_seconds == pytest.approx(DEFAULTS.save_byte * 34e8 / 10) and fast.bound == "cores"


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
    assert bound(found, SERVER_THREAD) > 0
