"""Rendered manifests of random jobs: Kubernetes takes them, Satrap takes their commands, their parts fit together."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import subprocess
from typing import Any

import pytest
from hypothesis import given, settings
from torch.distributed.run import parse_args as parse_torchrun

import kubernetes_schemas
from deploy_jobs import JOBS, host, pods_of, rendered
from satrap.cli.main import _split_arguments
from satrap.cli.parser import command_parser
from satrap.cli.run_command import _resources
from satrap.deploy.job_file import DeployJob
from satrap.deploy.kuberay import RAY_RESOURCES
from satrap.launch.resources import RayConfig
from satrap.launch.run_events import Role
from satrap.launch.supervisor import RunConfig

each_target = pytest.mark.parametrize("target", ["kuberay", "kubernetes"])
SIZES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "": 1}


def size(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w*)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * SIZES[unit]


@each_target
@given(JOBS)
@settings(max_examples=settings().max_examples // 20)
def test_kubernetes_takes_every_object(target: str, job: DeployJob) -> None:
    for each in rendered(job, target):
        kubernetes_schemas.validate(each)
        assert each["metadata"].get("namespace") == job.namespace
        assert len(each["metadata"]["name"]) <= 63


@each_target
@given(JOBS)
@settings(max_examples=settings().max_examples // 6)
def test_the_parts_of_a_pod_fit_together(target: str, job: DeployJob) -> None:
    pods = pods_of(rendered(job, target))
    assert {role: count for role, (count, _) in pods.items() if role != "head"} == {
        role: getattr(job, role).pods for role in ("servers", "workers", "trainers") if getattr(job, role).count
    }
    for role, (_, template) in pods.items():
        spec, wanted = template["spec"], getattr(job, role)
        (container,) = spec["containers"]
        limits = container["resources"]["limits"]
        assert container["resources"]["requests"] == limits
        assert size(limits["memory"]) == wanted.memory_bytes * wanted.per_pod
        assert int(limits["cpu"]) == wanted.cpus * wanted.per_pod
        assert int(limits.get("nvidia.com/gpu", 0)) == wanted.gpus * wanted.per_pod
        volumes = {each["name"]: each for each in spec["volumes"]}
        containers = [container, *spec.get("initContainers", [])]
        mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts", [])}
        assert mounted == set(volumes), "each volume is mounted, and nothing else"
        if shared := volumes.get("shared-memory"):
            rows = job.servers.rows_bytes if role == "servers" else 0
            assert rows <= size(shared["emptyDir"]["sizeLimit"]) <= size(limits["memory"])
        assert ("shared" in volumes) is (job.storage.volume is not None)
        ports = {each["name"] for each in container["ports"]}
        probes = [value["httpGet"]["port"] for key, value in container.items() if key.endswith("Probe")]
        assert all(port in ports or port == 52365 for port in probes) and (probes or role == "trainers")
        assert spec["terminationGracePeriodSeconds"] == wanted.grace_seconds
        assert spec.get("priorityClassName") == job.priority
        assert spec.get("serviceAccountName") == job.service_account
        if job.zone is None:
            (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert term["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        else:
            assert spec["nodeSelector"]["topology.kubernetes.io/zone"] == job.zone
        taints = {each["key"] for each in spec.get("tolerations", [])}
        own_taints = {"dedicated"} if role == "servers" else {"nvidia.com/gpu"} if wanted.gpus else set()
        assert taints == own_taints | {each.partition(":")[0].partition("=")[0] for each in wanted.tolerations}
        assert wanted.node_labels.items() <= spec.get("nodeSelector", {}).items()
        assert job.labels.items() <= template["metadata"]["labels"].items()
        variables = {each["name"]: each.get("value") for each in container.get("env", [])}
        given = dict(job.env) | dict(wanted.env)
        assert variables.items() >= {name: value.replace("$", "$$") for name, value in given.items()}.items()
        assert all(each["securityContext"]["allowPrivilegeEscalation"] is False for each in containers)
        images = {each["image"] for each in containers}
        assert images == {job.trainer_image if role == "trainers" else job.image.cpu}


@each_target
@given(JOBS)
@settings(max_examples=settings().max_examples // 12)
def test_policies_select_the_pods_that_they_are_for(target: str, job: DeployJob) -> None:
    objects = rendered(job, target)
    pods = {role: (count, template["metadata"]["labels"]) for role, (count, template) in pods_of(objects).items()}
    budgets = [each["spec"] for each in objects if each["kind"] == "PodDisruptionBudget"]
    assert len(budgets) == len(pods)
    for each in budgets:
        (role,) = [
            role for role, (_, found) in pods.items() if each["selector"]["matchLabels"].items() <= found.items()
        ]
        count = pods[role][0]
        moves = role == "servers" and job.servers.on_stop == "move" and count > 1
        assert each["minAvailable"] == count - moves
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    assert len(policies) == job.network_policy
    for each in policies:
        among, metrics, *others = each["ingress"]
        for selector in (each["podSelector"], among["from"][0]["podSelector"]):
            assert all(selector["matchLabels"].items() <= found.items() for _, found in pods.values())
        assert "from" not in metrics and len(others) == (target == "kuberay")
        assert all(rule["ports"] == [{"port": 8265, "protocol": "TCP"}] for rule in others)
        (ports,) = metrics["ports"]
        assert (ports["port"], ports.get("endPort", 9100)) == (9100, 9099 + job.trainers.per_pod)


@each_target
@given(JOBS)
@settings(max_examples=settings().max_examples // 20)
def test_a_pod_monitor_has_each_process_scraped(target: str, job: DeployJob) -> None:
    objects = rendered(job, target)
    monitors = [each["spec"] for each in objects if each["kind"] == "PodMonitor"]
    assert len(monitors) == job.pod_monitor
    for role, (_, template) in pods_of(objects).items():
        (container,) = template["spec"]["containers"]
        served = {each["name"] for each in container["ports"] if each["containerPort"] in range(9100, 9200)}
        assert len(served) == getattr(job, role).per_pod
        assert template["metadata"]["annotations"]["prometheus.io/port"] == "9100"
        for each in monitors:
            assert each["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            assert served <= {endpoint["port"] for endpoint in each["podMetricsEndpoints"]}


def one(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


@given(JOBS)
@settings(max_examples=settings().max_examples // 15)
def test_the_command_of_a_ray_job_is_what_satrap_run_takes_and_fits_its_pods(job: DeployJob) -> None:
    ray_job = one(rendered(job, "kuberay"), "RayJob")
    spec = ray_job["spec"]
    assert ray_job["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == job.queue
    assert spec["shutdownAfterJobFinishes"] is True, "Kueue requires that"
    cluster = spec["rayClusterSpec"]
    program, *words = shlex.split(spec["entrypoint"].replace("$$", "$"))  # Kubernetes, then the shell
    assert program == "satrap"
    options, arguments = parsed(words)
    assert (options.command, options.script, options.cluster, options.address) == ("run", job.script, "ray", "auto")
    assert arguments == list(job.arguments)
    RunConfig(servers=options.servers, workers=options.workers, trainers=options.trainers)
    assert options.checkpoints == list(job.storage.checkpoints) and options.data == list(job.storage.data)
    resources = {role: _resources(options, role) for role in Role}
    RayConfig(address="auto", memory=options.memory, placement_seconds=options.placement_seconds, resources=resources)
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    for name, resource in RAY_RESOURCES.items():
        wanted = getattr(job, name)
        if not wanted.count:
            assert name not in groups
            continue
        group = groups[name]
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
        bundle = resources[Role(name.removesuffix("s"))].bundle()
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        pod = {"CPU": int(limits["cpu"]), "GPU": int(limits.get("nvidia.com/gpu", 0)), "memory": size(limits["memory"])}
        pod |= {key: int(value) for key, value in group["resources"].items()}
        assert all(pod[key] >= wanted.per_pod * amount for key, amount in bundle.items()), "the processes of a pod fit"
        assert group["replicas"] * pod[resource] == wanted.count, "and no more of them"
    assert int(cluster["headGroupSpec"]["resources"]["cpu"]) == 0


@given(JOBS)
@settings(max_examples=settings().max_examples // 15)
def test_the_commands_of_plain_pods_are_what_satrap_takes_and_name_each_other(job: DeployJob) -> None:
    objects = rendered(job, "kubernetes")
    services = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"}
    listening: dict[str, list[str]] = {}
    for role, (count, template) in pods_of(objects).items():
        (container,) = template["spec"]["containers"]
        if job.queue is None:
            service = services.pop(f"{job.name}-{role}")
            assert service["selector"].items() <= template["metadata"]["labels"].items()
            assert service["clusterIP"] == "None"
            ports = {each["containerPort"] for each in container["ports"]}
            assert {each["port"] for each in service["ports"]} == ports
        (secret,) = [each["secret"] for each in template["spec"]["volumes"] if each["name"] == "keys"]
        assert secret["defaultMode"] == 0o440 and template["spec"]["securityContext"]["fsGroup"]
        keys = {f"/keys/{each['path']}" for each in secret["items"]}
        if role == "trainers":
            check_trainers(job, container["command"], listening, keys)
            continue
        for number in range(count):
            program, *words = expand(container["command"], {"POD_INDEX": str(number)})
            options, _ = parsed(words)
            assert program == "satrap" and options.command == role.removesuffix("s") and options.number == number
            assert str(options.keys) in keys and options.threads == getattr(job, role).cpus
            assert options.advertise == f"tcp://{host(job, role, number)}:{options.listen.rpartition(':')[2]}"
            listening.setdefault(role, []).append(options.advertise)
            if role == "servers":
                assert str(options.shared).startswith("/dev/shm/") and options.checkpoints == list(
                    job.storage.checkpoints
                )
                assert options.on_stop == job.servers.on_stop
                assert options.grace < job.servers.grace_seconds
                assert (options.advertise in options.join) is (job.servers.on_stop == "move")
            else:
                assert options.data == list(job.storage.data)
    assert not services


def check_trainers(job: DeployJob, command: list[str], listening: dict[str, list[str]], keys: set[str]) -> None:
    program, *words = expand(command, {})
    torchrun = parse_torchrun(words)
    assert program == "torchrun" and torchrun.module and torchrun.training_script == "satrap"
    assert int(torchrun.nnodes) * int(torchrun.nproc_per_node) == job.trainers.count
    assert torchrun.rdzv_endpoint == f"{host(job, 'trainers', 0)}:29400"
    options, arguments = parsed(torchrun.training_script_args)
    assert (options.command, options.script, arguments) == ("trainer", job.script, list(job.arguments))
    assert options.servers == listening["servers"] and options.workers == listening.get("workers", [])
    assert str(options.keys) in keys


def test_the_pod_of_a_server_that_stops_has_time_to_move_its_rows() -> None:
    """With Ray, its node drains so long, which Ray reads from the environment."""
    for on_stop, seconds in (("move", "110"), ("keep", "0")):
        servers = {"on_stop": on_stop, "grace_seconds": 120}
        job = DeployJob.from_dict({"name": "a", "script": "/a.py", "image": {"cpu": "a"}, "servers": servers})
        for role, (_, template) in pods_of(rendered(job, "kuberay")).items():
            env = {each["name"]: each["value"] for each in template["spec"]["containers"][0].get("env", ())}
            found = env.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
            assert found == (seconds if role == "servers" else None)


def test_a_trainers_pod_waits_for_all_that_it_calls() -> None:
    """The script runs here, with addresses of this machine. Of three processes that it waits for, one listens later."""
    found: dict[str, Any] = {"name": "run", "script": "/train.py", "image": {"cpu": "a"}, "servers": {"count": 2}}
    _, template = pods_of(rendered(DeployJob.from_dict(found), "kubernetes"))["trainers"]
    (script,) = template["spec"]["initContainers"][0]["args"]
    assert "run-servers-$i.run-servers/5555" in script and "getent hosts run-trainers-0.run-trainers" in script
    script = re.sub(r"run-(\w+)-(\$i|0)\.run-\w+", "localhost", script).replace("sleep 2", "sleep 0.05; echo waits")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as first:
        first.bind(("127.0.0.1", 0))  # refuses connections until it listens
        for number, listener in (("5555", server), ("29400", first)):
            script = script.replace(f"/{number})", f"/{listener.getsockname()[1]})")
        command = ["bash", "-c", script]
        environment = os.environ | {"JOB_COMPLETION_INDEX": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout is not None and waiting.stdout.readline() == "waits\n"
            first.listen()
            assert waiting.wait(60) == 0
        done = subprocess.run(command, env=os.environ | {"JOB_COMPLETION_INDEX": "0"}, timeout=60, check=True)
        assert done.returncode == 0, "the first one waits for its name only"


def expand(command: list[str], environment: dict[str, str]) -> list[str]:
    """Returns a container's command as Kubernetes passes it on."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([\w.-]+)\)", value, word) for word in command]


def parsed(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of a `satrap` command, and the arguments of its script, as the real parser reads them."""
    own, arguments = _split_arguments(words)
    return command_parser().parse_args(own), arguments


def test_a_working_directory_is_for_ray() -> None:
    job: dict[str, Any] = {
        "name": "run",
        "script": "train.py",
        "working_dir": "gs://bucket/train.zip",
        "image": {"cpu": "a"},
    }
    found = one(rendered(DeployJob.from_dict(job), "kuberay"), "RayJob")
    kubernetes_schemas.validate(found)
    assert found["spec"]["runtimeEnvYAML"] == "working_dir: gs://bucket/train.zip\n"
    assert found["spec"]["entrypoint"].startswith("satrap run train.py --cluster ray ")
    with pytest.raises(Exception, match=r"only Ray copies; use --target kuberay or remove it"):
        rendered(DeployJob.from_dict(job), "kubernetes")
