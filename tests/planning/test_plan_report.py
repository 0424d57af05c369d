"""What a plan writes: the job file for `satrap deploy render`, and the line that starts it."""

from __future__ import annotations

import shlex
import tomllib

from plans import FREE, load, machine, prices, workload
from satrap.cli.parser import command_parser
from satrap.planning.coefficients import DEFAULTS
from satrap.planning.machines import Limits
from satrap.planning.planner import Plan, make_plan
from satrap.planning.report import deploy_toml, run_line

SCRIPT = ["jobs/train it.py", "--name", 'a "b" \\ \n']
GPU = machine("gpu", cores=96, memory_gib=680.0, gpus=8, gpu_tflops=0.01, network_gbit=100.0, roles=["trainer"])


def plan(rows: int = 10**9, **keys: float) -> Plan:
    listed = prices(machine(roles=["server"]), GPU, limits=Limits())
    return make_plan(workload(load(rows, capacity=rows), **keys), listed, DEFAULTS)


def written(found: Plan) -> dict[str, dict[str, object]]:
    return tomllib.loads(deploy_toml(found.workload.name, found.estimate.layout, found.estimate.requests))


def line(found: Plan, script: list[str]) -> str:
    return run_line(found.estimate.layout, found.estimate.requests, script)


def test_a_plan_for_kubernetes_has_servers() -> None:
    """A small job runs in one process, whose rows would be lost with its pod."""
    job = workload(samples_per_second=100.0)
    alone, found = (make_plan(job, prices(limits=FREE), DEFAULTS, needs_servers=needs) for needs in (False, True))
    assert not alone.estimate.layout.count("server")
    content = written(found)
    assert content["servers"]["count"] == content["trainers"]["count"] == 1
    assert content["servers"]["machine"] == content["trainers"]["machine"] == "m"
    assert found.estimate.layout.num_machines == 1


def test_the_run_line_is_one_that_satrap_run_takes() -> None:
    found = plan(samples_per_second=20_000.0)
    words = shlex.split(line(found, SCRIPT))
    assert words[0] == "satrap" and words[words.index("--") + 1 :] == SCRIPT[1:]
    options = command_parser().parse_args(words[1 : words.index("--")])
    assert options.script == SCRIPT[0] and options.cluster == "ray" and options.trainer_gpus == 1
    assert options.servers == found.estimate.layout.count("server")
    assert options.server_memory == f"{found.estimate.requests['server'].memory_gib}GiB"


def test_without_servers_the_script_runs_by_itself() -> None:
    found = make_plan(workload(samples_per_second=100.0), prices(limits=FREE), DEFAULTS)
    assert line(found, ["train.py", "-x"]) == "python train.py -x"
