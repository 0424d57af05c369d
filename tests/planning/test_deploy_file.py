"""The job file for `satrap deploy render`, and the line that starts a plan."""

from __future__ import annotations

import shlex
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans import FREE, load, machine, prices, workload
from satrap.cli.parser import command_parser
from satrap.planning.coefficients import DEFAULTS
from satrap.planning.deploy_file import Start, deploy_toml, run_line
from satrap.planning.machines import Limits
from satrap.planning.planner import Plan, make_plan

START = Start(script="jobs/train it.py", arguments=("--name", 'a "b" \\ \n'))
GPU = machine("gpu", cores=96, memory_gib=680.0, gpus=8, gpu_tflops=0.01, network_gbit=100.0, roles=["trainer"])


def plan(rows: int = 10**9, **keys: float) -> Plan:
    listed = prices(machine(roles=["server"]), GPU, limits=Limits())
    return make_plan(workload(load(rows, capacity=rows), **keys), listed, DEFAULTS)


@given(st.integers(10**6, 10**10), st.floats(1e3, 1e5))
@settings(max_examples=15)
def test_every_process_fits_its_machine_with_what_it_needs(rows: int, rate: float) -> None:
    found = plan(rows, samples_per_second=rate)
    content = tomllib.loads(deploy_toml(found))
    layout = found.estimate.layout
    for role in ("server", "trainer"):
        if not layout.count(role):
            continue
        pool, part = layout.pool_of(role), content[f"{role}s"]
        assert part["count"] == layout.count(role)
        memory = int(part["memory"].removesuffix("GiB")) * 2**30
        assert found.estimate.memory[role] <= memory
        assert pool.each(role) * memory <= pool.machine.memory_bytes
        assert pool.each(role) * part["cpus"] <= pool.machine.cores
        assert part["machine"] == pool.machine.name


def test_the_file_of_a_run_with_gpus() -> None:
    content = tomllib.loads(deploy_toml(plan(samples_per_second=20_000.0)))
    assert content["trainers"]["per_pod"] == 8 and content["trainers"]["gpus"] == 1
    assert content["servers"]["per_pod"] == 1 and content["servers"]["gpus"] == 0
    assert content["workers"] == {"count": 0}


def test_a_plan_without_servers_has_one_on_kubernetes() -> None:
    found = make_plan(workload(samples_per_second=100.0), prices(limits=FREE), DEFAULTS)
    content = tomllib.loads(deploy_toml(found))
    assert content["servers"]["count"] == content["trainers"]["count"] == 1


def test_deploy_render_takes_the_file() -> None:
    job_file = pytest.importorskip("satrap.deploy.job_file", reason="satrap deploy is not in this tree")
    found = plan(samples_per_second=20_000.0)
    own = 'name = "job"\nscript = "/app/train.py"\n[image]\ncpu = "satrap:1"\n[workers]\ncount = 3\n'
    own += '[servers]\nrows = "1GiB"\n'
    job = job_file.parse_job([("deploy.toml", own), ("plan.toml", deploy_toml(found))])
    assert (job.trainers.count, job.workers.count) == (found.estimate.layout.count("trainer"), 0)
    assert job.servers.rows_bytes >= found.workload.server_bytes(job.servers.count)


def test_the_run_line_is_one_that_satrap_run_takes() -> None:
    words = shlex.split(run_line(plan(samples_per_second=20_000.0), START))
    assert words[0] == "satrap" and words[words.index("--") + 1 :] == list(START.arguments)
    options = command_parser().parse_args(words[1 : words.index("--")])
    assert options.script == START.script and options.cluster == "ray" and options.trainer_gpus == 1
    assert options.servers == plan(samples_per_second=20_000.0).estimate.layout.count("server")


def test_without_servers_the_script_runs_by_itself() -> None:
    found = make_plan(workload(samples_per_second=100.0), prices(limits=FREE), DEFAULTS)
    assert run_line(found, Start(script="train.py", arguments=("-x",))) == "python train.py -x"
