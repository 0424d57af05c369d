"""Plans, against a search of all layouts; and what is said if nothing reaches the rate."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans import FREE, assess, load, machine, prices, workload
from satrap.errors import ConfigError
from satrap.planning.coefficients import DEFAULTS
from satrap.planning.machines import Layout, Limits, MachineType, Pool, PriceList
from satrap.planning.planner import Plan, make_plan
from satrap.planning.report import lines_of
from satrap.planning.workload import Workload


def plan(job: Workload, *machines: MachineType, limits: Limits = FREE) -> Plan:
    return make_plan(job, prices(*machines, limits=limits), DEFAULTS)


def every_layout(job: Workload, listed: PriceList) -> Iterator[Layout]:
    """Yield the layouts of up to three machines for each role, and up to two servers and trainers on a machine."""
    numbers = range(1, 4)
    for kind in listed.types("trainer"):
        yield Layout(pools=(Pool(machine=kind, num_machines=1, trainers=1),))
        sizes = itertools.product(listed.types("server"), numbers, numbers, (1, 2), (1, 2))
        for server, many, count, each, beside in sizes:
            servers = Pool(machine=server, num_machines=many, servers=each)
            trainers = Pool(machine=kind, num_machines=count, trainers=beside)
            yield Layout(pools=(servers, trainers))
            if server is kind:
                yield Layout(pools=(replace(servers, trainers=beside),))
            for worker, workers in itertools.product(listed.types("worker"), range(1, count + 1)):
                yield Layout(pools=(servers, Pool(machine=worker, num_machines=workers, workers=1), trainers))


@given(st.floats(3e3, 3e5), st.integers(10**5, 10**9), st.floats(0.3, 3.0), st.sampled_from([0, 4]))
@settings(max_examples=settings().max_examples // 20)
def test_no_other_layout_is_much_cheaper(rate: float, rows: int, price: float, staleness: int) -> None:
    job = workload(load(rows), samples_per_second=rate, staleness=staleness)
    listed = prices(machine("a"), machine("b", cores=24, memory_gib=256.0, price_per_hour=price * 2))
    found = make_plan(job, listed, DEFAULTS)
    fitting = [
        each.layout.price_per_hour
        for each in (assess(job, layout) for layout in every_layout(job, listed))
        if not each.misfits and each.samples_per_second >= rate
    ]
    if fitting:
        assert found.meets and found.price_per_hour <= 1.2 * min(fitting)


@given(st.floats(1e4, 1e6), st.integers(10**6, 10**9), st.sampled_from([0, 4]), st.integers(3, 12))
@settings(max_examples=settings().max_examples // 20)
def test_every_machine_of_a_plan_is_needed(rate: float, rows: int, staleness: int, available: int) -> None:
    """With one machine less of any kind, a plan is below the rate, or its own if that is lower, or does not fit."""
    job = workload(load(rows), samples_per_second=rate, staleness=staleness)
    found = plan(job, machine(available=available))
    pools, reached = found.estimate.layout.pools, min(rate, found.estimate.samples_per_second)
    for pool in pools:
        if pool.num_machines > 1:
            fewer = replace(pool, num_machines=pool.num_machines - 1)
            less = assess(job, Layout(pools=tuple(fewer if each is pool else each for each in pools)))
            assert less.misfits or less.samples_per_second < reached


@given(st.floats(1e4, 1e7), st.integers(10**6, 10**9))
@settings(max_examples=settings().max_examples // 12)
def test_alternatives_place_the_roles_in_other_ways(rate: float, rows: int) -> None:
    """One for each way that reaches the rate of the plan, the cheapest first."""
    found = plan(workload(load(rows), samples_per_second=rate), machine(available=50))
    ranked = [found.estimate, *found.alternatives]
    ways = [tuple(pool.roles for pool in each.layout.pools) for each in ranked]
    assert len(set(ways)) == len(ways)
    preference = [(each.layout.price_per_hour, each.layout.num_machines) for each in ranked]
    assert preference == sorted(preference)
    reached = rate if found.meets else found.estimate.samples_per_second / 1.02
    assert all(each.samples_per_second >= reached for each in ranked)


def test_each_gpu_has_a_trainer() -> None:
    """So a machine with several GPUs needs servers for the rows."""
    for gpus in (1, 8):
        kind = machine(gpus=gpus, gpu_tflops=10.0)
        found = plan(workload(samples_per_second=100.0), kind)
        ways = [tuple(pool.roles for pool in each.layout.pools) for each in (found.estimate, *found.alternatives)]
        assert ((("trainer",),) in ways) == (gpus == 1)
        for each in (found.estimate, *found.alternatives):
            assert each.layout.pool_of("trainer").trainers == gpus


def test_more_servers_on_a_machine_share_the_work_of_a_busy_network_thread() -> None:
    """One server would need 95 % of each second for 100 batches of 10 MB."""
    job = workload(
        load(10**8, dim=64, unique_share=1.0),
        samples_per_second=4e6,
        batch_size=20_000,
        staleness=4,
        dense_flops=0,
        dense_parameters=0,
    )
    kind = machine(cores=200, network_gbit=1e6, memory_gib=1e4)
    found = plan(job, kind)
    ways = {"/".join(role for pool in each.layout.pools for role in pool.roles): each for each in found.alternatives}
    ways |= {"/".join(role for pool in found.estimate.layout.pools for role in pool.roles): found.estimate}
    pool = ways["server/trainer"].layout.pool_of("server")
    assert found.meets and 1 < pool.servers <= 16
    fewer = [
        replace(each, servers=each.servers - 1) if each is pool else each
        for each in ways["server/trainer"].layout.pools
    ]
    less = assess(job, Layout(pools=tuple(fewer)))
    assert less.bounds[0].name == "network thread of each server" and not less.reaches(4e6)


def test_more_workers_on_a_machine_share_the_work_of_busy_python_threads() -> None:
    """Encryption is the work of one thread: a machine of 50 cores has several workers."""
    kinds = [machine(role, cores=50, roles=[role], network_gbit=100.0) for role in ("server", "worker", "trainer")]
    job = workload(load(dim=64, unique_share=1.0), samples_per_second=7e5, staleness=4, dense_flops=1e7)
    found = plan(job, *kinds)
    (behind,) = (
        each
        for each in (found.estimate, *found.alternatives)
        if "worker" in [p.machine.name for p in each.layout.pools]
    )
    pool = behind.layout.pool_of("worker")
    assert pool.num_machines == 1 and pool.workers > 1
    fewer = [replace(each, workers=each.workers - 1) if each is pool else each for each in behind.layout.pools]
    less = assess(job, Layout(pools=tuple(fewer)))
    assert not less.reaches(7e5)


def test_a_small_job_runs_in_one_process() -> None:
    found = plan(workload(samples_per_second=1000.0))
    assert [(pool.num_machines, pool.roles) for pool in found.estimate.layout.pools] == [(1, ("trainer",))]


def test_rows_that_no_machines_hold_are_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"no machines fit this job: .*machines are needed for 1\.60 TB of rows, and 2 are"
    ):
        plan(workload(load(10**10)), machine(available=2))


def test_a_bucket_larger_than_a_machine_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"one bucket of table 'item' takes 372\.\d GiB .* num_buckets"):
        plan(workload(load(10**10, num_buckets=4)))


def test_a_rate_out_of_reach_gives_the_fastest_and_what_to_change() -> None:
    found = plan(workload(load(10**9), samples_per_second=1e9), machine(available=4))
    assert not found.meets
    text = "\n".join(lines_of(found, ["train.py"]))
    assert "NOT MET  no plan reaches 1,000,000,000 samples/s; this one reaches" in text
    assert "change   make more than 4 m available" in text
    assert "change   train with staleness 1 or more" in text


@pytest.mark.parametrize("batch_size", [8, 100, 1000, 100_000])
@pytest.mark.parametrize("staleness", [0, 4])
def test_a_larger_batch_is_advised_where_it_helps(batch_size: int, staleness: int) -> None:
    job = workload(load(10**6), samples_per_second=1e9, batch_size=batch_size, staleness=staleness, dense_flops=1e4)
    found = plan(job, machine(available=4))
    text = "\n".join(lines_of(found, ["train.py"]))
    advice = re.search(r"use batches of ([\d,]+) samples: these machines then reach ([\d,]+) samples/s", text)
    rates = {
        factor * batch_size: replace(
            found.estimate, workload=replace(job, training=replace(job.training, batch_size=factor * batch_size))
        ).samples_per_second
        for factor in (1, 2, 4, 8, 16)
    }
    if advice is None:
        assert max(rates.values()) < 1.05 * rates[batch_size]
    else:
        reached = rates[int(advice[1].replace(",", ""))]
        assert advice[2] == f"{reached:,.0f}" and reached == max(rates.values()) >= 1.05 * rates[batch_size]


def test_a_larger_batch_is_advised_where_servers_are_the_limit() -> None:
    """A call costs a server the same time for 50 samples as for 800."""
    job = workload(load(10**6), samples_per_second=2e6, batch_size=50, staleness=8, dense_flops=1e3, dense_parameters=0)
    found = plan(job, machine("s", roles=["server"], available=1), machine("t", roles=["trainer"], cores=64))
    assert not found.meets and found.estimate.bounds[0].role == "server"
    assert "change   use batches of 800 samples" in "\n".join(lines_of(found, ["train.py"]))


@pytest.mark.parametrize(("rows", "rate", "decides"), [(10**9, 1e4, True), (10**6, 1e6, False)])
def test_memory_is_named_where_it_decides_the_number_of_machines(rows: int, rate: float, decides: bool) -> None:
    tables = load(rows, unique_share=1.0)
    job = workload(tables, samples_per_second=rate, staleness=4, dense_flops=1e4, dense_parameters=0)
    kinds = machine("s", roles=["server"], cores=4), machine("t", roles=["trainer"], cores=64, network_gbit=100.0)
    found = plan(job, *kinds)
    servers, trainers = found.estimate.layout.pools
    less = assess(job, Layout(pools=(replace(servers, num_machines=servers.num_machines - 1), trainers)))
    assert found.meets and servers.num_machines > 1 and bool(less.misfits) is decides
    text = "\n".join(lines_of(found, ["train.py"]))
    assert ("memory   decides the number of s: one machine less would not hold the rows" in text) is decides


def test_a_rate_just_missed_is_not_shown_as_reached() -> None:
    found = plan(workload(load(10**9), samples_per_second=1e9), machine(available=4))
    rate = found.estimate.samples_per_second * 1.001
    estimate = replace(found.estimate, workload=workload(load(10**9), samples_per_second=rate))
    text = "\n".join(lines_of(replace(found, estimate=estimate), ["train.py"]))
    assert "(99%)" in text and "it permits 99% of the requested rate" in text
