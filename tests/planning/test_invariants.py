"""What holds for every plan, over random jobs and price lists: what it writes can be read, rented and run, and neither
lower prices nor more machines make it dearer."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from plans import assess, load, machine, prices, workload
from satrap.deploy.job_file import DeployJob, Role, parse_job
from satrap.errors import ConfigError
from satrap.planning.coefficients import DEFAULTS
from satrap.planning.machines import ROLES, Layout, Limits, MachineType, PriceList
from satrap.planning.planner import Plan, exhausted, make_plan
from satrap.planning.report import deploy_toml
from satrap.planning.workload import TableLoad, Workload

OWN = 'name = "job"\nscript = "/app/train.py"\n[image]\ncpu = "satrap:1"\n[workers]\ncount = 3\n'
OWN += '[trainers]\ngpus = 8\nnode_labels = { "cloud.google.com/gke-accelerator" = "nvidia-tesla-a100" }\n'
OWN += '[servers]\nrows = "1GiB"\n'
SHARES = st.sampled_from([0.5, 0.7, 0.8, 1.0])
# Many price lists have no room for a job.
thirty = settings(max_examples=settings().max_examples // 4, suppress_health_check=list(HealthCheck))


@st.composite
def tables(draw: st.DrawFn) -> TableLoad:
    rows = draw(st.integers(1, 10 ** draw(st.integers(1, 11))))
    return load(
        rows,
        name=f"table {rows}",
        dim=draw(st.sampled_from([1, 16, 64, 256])),
        row_bytes=draw(st.integers(8, 4000)),
        capacity=draw(st.sampled_from([None, rows])),
        zipf=draw(st.sampled_from([0.0, 0.9, 1.2])),
        ids_per_sample=draw(st.sampled_from([0.0, 1.0, 30.0])),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Workload:
    loads = draw(st.lists(tables(), min_size=1, max_size=3, unique_by=lambda each: each.table.name))
    return workload(
        *loads,
        samples_per_second=10 ** draw(st.floats(1.0, 6.5)),
        batch_size=draw(st.sampled_from([64, 1024, 8192])),
        dense_flops=10 ** draw(st.floats(2.0, 8.0)),
        dense_parameters=draw(st.sampled_from([0, 10**5, 10**8])),
        dense_features=draw(st.sampled_from([0, 13])),
        staleness=draw(st.sampled_from([0, 1, 8])),
        wire=draw(st.sampled_from(["float32", "float16"])),
        read_bytes_per_sample=draw(st.sampled_from([0.0, 300.0])),
    )


@st.composite
def machine_types(draw: st.DrawFn, name: str) -> MachineType:
    gpus = draw(st.sampled_from([0, 0, 1, 8]))
    roles = draw(st.sampled_from([["server"], ["worker", "trainer"], ["trainer"], list(ROLES)]))
    return machine(
        name,
        cores=draw(st.sampled_from([1, 4, 32, 208])),
        memory_gib=draw(st.sampled_from([2.0, 15.0, 64.0, 500.0, 11776.0])),
        network_gbit=draw(st.sampled_from([1.0, 10.0, 100.0])),
        price_per_hour=draw(st.sampled_from([0.0, 0.1, 1.0, 7.5])),
        core_speed=draw(st.sampled_from([0.5, 1.0])),
        gpus=gpus,
        gpu_tflops=10.0 if gpus else 0.0,
        available=draw(st.sampled_from([1, 2, 3, 4, 6, 10, 40, 65535])),
        roles=["trainer"] if gpus else roles,
    )


@st.composite
def price_lists(draw: st.DrawFn) -> PriceList:
    """Return one to three machine types, on which servers and trainers may run."""
    kinds = [draw(machine_types(f"type-{number}")) for number in range(draw(st.integers(1, 3)))]
    assume(all(any(role in kind.roles for kind in kinds) for role in ("server", "trainer")))
    limits = Limits(memory=draw(SHARES), cores=draw(SHARES), network=draw(SHARES), round_trip_ms=0.2)
    return prices(*kinds, limits=limits)


def planned(job: Workload, listed: PriceList, *, needs_servers: bool = True) -> Plan:
    """Return the plan of a job for which the machines have room."""
    try:
        return make_plan(job, listed, DEFAULTS, needs_servers=needs_servers)
    except ConfigError as error:
        assert "no machines fit this job: " in str(error)
        assume(False)
        raise


def job_file(found: Plan) -> DeployJob:
    """Return the job that `satrap deploy render` reads from what the plan writes, after a user's own file."""
    text = deploy_toml(found.workload.name, found.estimate.layout, found.estimate.requests)
    return parse_job([("deploy.toml", OWN), ("plan.toml", text)])


@given(jobs(), price_lists(), st.booleans())
@thirty
def test_a_plan_keeps_every_limit_with_machines_that_exist_and_what_it_writes_fits_them(
    job: Workload, listed: PriceList, needs_servers: bool
) -> None:
    found = planned(job, listed, needs_servers=needs_servers)
    layout = found.estimate.layout
    for kind in listed.machines:
        assert sum(pool.num_machines for pool in layout.pools if pool.machine is kind) <= kind.available
    assert layout.count("worker") <= layout.count("trainer")
    assert found.meets == all(
        each.samples_per_second >= job.training.samples_per_second for each in found.estimate.bounds
    )
    for pool in layout.pools:
        for role, used in found.estimate.cores_used(pool).items():
            cores = (
                pool.each(role) * found.estimate.requests[role].cpus if layout.count("server") else pool.machine.cores
            )
            assert used <= listed.limits.cores * cores * (1 + 1e-9)
    for link in found.estimate.links:
        assert max(link.out_bytes, link.in_bytes) <= listed.limits.network * link.pool.machine.link_bytes * (1 + 1e-9)
    assert found.price_per_hour == sum(pool.num_machines * pool.machine.price_per_hour for pool in layout.pools)
    assert layout.count("server") or not needs_servers
    if layout.count("server"):
        check_job_file(found)


def check_job_file(found: Plan) -> None:
    """Check that what a plan writes fits its machines and holds the job's rows."""
    job, layout, share = found.workload, found.estimate.layout, found.prices.limits.memory
    roles: dict[str, Role] = {role: getattr(job_file(found), f"{role}s") for role in ROLES}
    assert {role: size.count for role, size in roles.items()} == {role: layout.count(role) for role in ROLES}
    assert roles["server"].count and roles["trainer"].count
    # All rows of the server that has the most of them, and no more than the permitted share of its /dev/shm.
    # The file with the rows grows by 16 MiB, and buckets of small tables are half empty.
    assert job.server_bytes(roles["server"].count) + 16 * 2**20 <= share * roles["server"].rows_bytes
    assert roles["server"].rows_bytes >= 2**30
    assert job.bytes <= share * roles["server"].rows_bytes * roles["server"].count
    for pool in layout.pools:
        for role in pool.roles:
            assert role in pool.machine.roles and roles[role].machine == pool.machine.name
            assert found.estimate.memory[role] <= share * roles[role].memory_bytes
        sizes = [(pool.each(role), roles[role]) for role in pool.roles]
        assert sum(each * size.memory_bytes for each, size in sizes) <= pool.machine.pod_bytes
        assert sum(each * size.cpus for each, size in sizes) <= pool.machine.cores
        assert sum(each * size.gpus for each, size in sizes) == pool.machine.gpus
        taints = ["dedicated=satrap-servers:NoSchedule"] if pool.servers else []
        for role in set(pool.roles) - {"server"}:
            assert list(roles[role].tolerations) == taints and not roles[role].node_labels
        if pool.roles == ("trainer",):
            assert pool.trainers == roles["trainer"].per_pod


@given(jobs(), price_lists(), st.data())
@thirty
def test_lower_prices_and_more_machines_never_make_a_plan_dearer(
    job: Workload, listed: PriceList, data: st.DataObject
) -> None:
    found = planned(job, listed, needs_servers=False)
    cheaper = [
        replace(
            kind,
            price_per_hour=kind.price_per_hour * data.draw(st.sampled_from([0.0, 0.3, 1.0])),
            available=min(65535, kind.available * data.draw(st.sampled_from([1, 2, 1000]))),
        )
        for kind in listed.machines
    ]
    added = data.draw(st.lists(machine_types("another"), max_size=1))
    better = make_plan(job, replace(listed, machines=(*cheaper, *added)), DEFAULTS)
    if found.meets:
        assert better.meets and better.price_per_hour <= found.price_per_hour
    else:  # the fastest plan is found to one per cent
        assert better.meets or better.estimate.samples_per_second >= found.estimate.samples_per_second / 1.02


def test_the_rows_of_a_plan_fill_shared_memory_to_its_limit_only() -> None:
    """617 GB of rows on machines of 256 GiB: they were given 562 GB of /dev/shm, of which rows may fill 80 %."""
    box = machine("box", cores=32, memory_gib=256.0, network_gbit=32.0, available=8)
    found = make_plan(
        workload(load(10**9, dim=64, row_bytes=617), staleness=4),
        prices(box, limits=Limits()),
        DEFAULTS,
        needs_servers=True,
    )
    servers = job_file(found).servers
    assert 617e9 <= 0.8 * servers.count * servers.rows_bytes <= 617e9 * 1.03


def test_machines_of_one_type_are_counted_over_all_pools() -> None:
    """Servers and trainers both run on it: a plan once had eight for trainers and three more for servers."""
    box = machine("box", cores=32, memory_gib=256.0, network_gbit=32.0)
    keys = {"samples_per_second": 1e6, "batch_size": 4096, "dense_flops": 3e6, "staleness": 4}
    job = workload(load(10**9, row_bytes=617), **keys)
    limits = Limits()
    unbound = make_plan(job, prices(box, limits=limits), DEFAULTS)
    needed = unbound.estimate.layout.num_machines
    assert unbound.meets and needed > 3
    exact = make_plan(job, prices(replace(box, available=needed), limits=limits), DEFAULTS)
    assert exact.meets and exact.price_per_hour == unbound.price_per_hour
    found = make_plan(job, prices(replace(box, available=needed - 1), limits=limits), DEFAULTS)
    assert not found.meets and found.estimate.layout.num_machines == needed - 1
    assert exhausted(found.estimate.layout) == [found.prices.machines[0]]


def test_a_machine_without_gpus_has_several_trainers_if_that_pays() -> None:
    """One Python thread is too slow for the cores of a machine."""
    box = machine("box", cores=100, memory_gib=500.0, network_gbit=100.0)
    job = workload(samples_per_second=7e5, staleness=4, dense_flops=1e3, dense_parameters=1000)
    found = make_plan(job, prices(box, limits=Limits()), DEFAULTS)
    (pool,) = found.estimate.layout.pools
    assert found.meets and pool.num_machines == 1 and pool.trainers > 1
    alone = assess(job, Layout(pools=(replace(pool, trainers=1),)), Limits())
    assert alone.bounds[0].name == "Python thread of each trainer" and not alone.reaches(7e5)
