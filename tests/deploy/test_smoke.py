"""Rendered manifests, carried out: the command of every pod runs as processes with networks and files of their own
(tests/pods.py). A node is lost, its pod starts again elsewhere with empty memory, and training ends with the bits of a
run on one machine.

KubeRay's part is tests/kuberay_pods.py. Its cluster has no dashboard, so the entrypoint is submitted on the head
(tests/ray_submit.py) and the probe of the dashboard is not tried."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy_jobs import pods_of, rendered
from kuberay_pods import ray_pods
from loop import NUM_IDS
from pods import Pod, Pods, pods
from runs import (
    DEADLINE_SECONDS,
    JOB,
    assert_same_result,
    num_checkpoints,
    run_to_its_end,
    wait_for_exit,
    wait_until,
)
from satrap.deploy.job_file import DeployJob, Image, Role, Storage
from satrap.rpc.keys import create_keys

NUM_ROWS = 640
HEAD, NAMESPACE = "smoke-head-svc", "default.svc.cluster.local"
pytestmark = pytest.mark.draw(1)


def write_data(path: Path, rng: np.random.Generator) -> None:
    ids = rng.integers(0, NUM_IDS, (NUM_ROWS, 4), dtype=np.uint64)
    columns = {"user": ids[:, 0], "item": ids[:, 1], "history": ids[:, 2:].tolist()}
    columns |= {"d0": rng.normal(size=NUM_ROWS), "d1": rng.normal(size=NUM_ROWS), "label": ids[:, 0] % 2 * 1.0}
    pq.write_table(pa.table(columns), path, row_group_size=80)


@pytest.mark.parametrize(("lost", "num_trainers"), [("servers", 1), ("trainers", 1), ("servers", 2)])
def test_a_rendered_run_survives_the_loss_of_a_node(
    tmp_path: Path, rng: np.random.Generator, lost: str, num_trainers: int
) -> None:
    shared, app, expected = prepare(tmp_path, rng, num_trainers)
    create_keys(tmp_path / "keys")
    job = smoke_job(num_trainers)
    templates = pods_of(rendered(job, "kubernetes"))
    numbers = {f"smoke-{role}-{i}": (role, i) for role, (count, _) in templates.items() for i in range(count)}
    with pods(tmp_path, {"runs": shared, "smoke-keys": tmp_path / "keys"}, app) as cluster:

        def start(name: str) -> Pod:
            role, index = numbers[name]
            return cluster.start(name, f"smoke-{role}", templates[role][1]["spec"], index)

        for name, (role, _) in numbers.items():
            cluster.name(name, f"smoke-{role}")
        running = {name: start(name) for name in numbers}
        trainers = [name for name in numbers if numbers[name][0] == "trainers"]
        folder = shared / "job"
        wait_until(lambda: num_checkpoints(folder) >= 2 or has_ended(running))
        assert not has_ended(running), logs(running)
        name = f"smoke-{lost}-{templates[lost][0] - 1}"
        running[name].kill_node()
        running[name] = start(name)
        (folder / "hold").unlink()
        for name in trainers:
            assert running[name].process.wait(timeout=DEADLINE_SECONDS) == 0, logs(running)
        assert "resumed" in running[trainers[0]].log.read_text()
        assert_same_result(folder, expected)
        rest = [pod for name, pod in running.items() if name not in trainers]
        for pod in rest:  # the end of the job: no server stays, so none waits for its grace period
            pod.terminate()
        assert [pod.process.wait(timeout=DEADLINE_SECONDS) for pod in rest] == [0] * len(rest), logs(running)


@pytest.mark.parametrize("lost", ["servers", "workers", "trainers"])
def test_a_rendered_ray_job_survives_the_loss_of_a_node(tmp_path: Path, rng: np.random.Generator, lost: str) -> None:
    shared, app, expected = prepare(tmp_path, rng, 1)
    folder = shared / "job"
    (ray_job,) = rendered(smoke_job(1), "kuberay")
    groups = ray_pods(ray_job, f"{HEAD}.{NAMESPACE}")
    with pods(tmp_path, {"runs": shared}, app) as cluster:
        running = start_ray(cluster, groups)
        entrypoint = ray_job["spec"]["entrypoint"]
        run = running[HEAD].run("python", str(JOB.with_name("ray_submit.py")), f"{HEAD}:6379", "", entrypoint)
        try:
            wait_until(lambda: num_checkpoints(folder) >= 2, run)
            assert is_ready(running["smoke-servers-0"], groups["servers"][1])
            name = f"smoke-{lost}-{groups[lost][0] - 1}"
            running.pop(name).kill_node()
            running[f"{name}b"] = cluster.start(f"{name}b", NAMESPACE, groups[lost][1], 0)
            (folder / "hold").unlink()
            status, out, err = wait_for_exit(run)
        finally:
            run.kill()
        assert status == 0, f"{out}{err}{logs(running)}"
        assert "\nbegan\n" in out and "\nresumed\n" in out, out
        assert_same_result(folder, expected)


def start_ray(cluster: Pods, groups: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, Pod]:
    """Starts the pods of a Ray cluster, the head first."""
    _, spec = groups["head"]
    running = {HEAD: cluster.start(HEAD, NAMESPACE, spec | {"initContainers": []}, 0)}
    wait_until(lambda: "Ray runtime started" in running[HEAD].log.read_text() or has_ended(running))
    for role, (count, spec) in groups.items():
        for index in range(count if role != "head" else 0):
            name = f"smoke-{role}-{index}"
            running[name] = cluster.start(name, NAMESPACE, spec, index)
    return running


def is_ready(pod: Pod, spec: dict[str, Any]) -> bool:
    """Tries the probe of a pod, inside it."""
    probe = spec["containers"][0]["readinessProbe"]["httpGet"]
    url = f"http://127.0.0.1:{probe['port']}{probe['path']}"
    request = pod.run("python", "-c", f"from urllib.request import urlopen; urlopen({url!r}, timeout=100)")
    request.communicate(timeout=DEADLINE_SECONDS)
    return request.returncode == 0


def prepare(
    folder: Path, rng: np.random.Generator, num_trainers: int
) -> tuple[Path, dict[str, Path], dict[str, np.ndarray]]:
    """Returns the shared volume with the data, the directories of the image, and the result of a run on one machine.
    The script waits at step 30."""
    (shared := folder / "shared").mkdir()
    (app := folder / "app").mkdir()
    for name in ("run_job.py", "loop.py", "lean_torch.py"):
        shutil.copy(JOB.with_name(name), app)
    write_data(shared / "data.parquet", rng)
    expected = oracle(folder / "one_machine", shared / "data.parquet", num_trainers)
    (shared / "job").mkdir()
    (shared / "job" / "hold").touch()
    return shared, {"/app": app}, expected


def smoke_job(num_trainers: int) -> DeployJob:
    return DeployJob(
        name="smoke",
        script="/app/run_job.py",
        image=Image(cpu="satrap:1"),
        arguments=["/shared/job", "0", "0", "/shared/data.parquet"],
        storage=Storage(checkpoints=["/shared/job"], data=["/shared"], volume="runs"),
        servers=Role(count=2, cpus=1, memory="2GiB"),
        workers=Role(count=1, cpus=1, memory="2GiB"),
        trainers=Role(count=num_trainers, cpus=1, memory="2GiB"),
    )


def oracle(folder: Path, data: Path, num_trainers: int) -> dict[str, np.ndarray]:
    """Returns the result of the job under `satrap run` on this machine."""
    folder.mkdir()
    sizes, arguments = ("--trainers", str(num_trainers)), (str(folder), "0", "0", str(data))
    status, _, err = run_to_its_end(folder, JOB, *sizes, arguments=arguments)
    assert status == 0, err
    with np.load(folder / "end.npz") as results:
        return dict(results)


def has_ended(running: dict[str, Pod]) -> bool:
    return any(pod.process.poll() is not None for pod in running.values())


def logs(running: dict[str, Pod]) -> str:
    return "\n".join(f"== {name}: {pod.process.poll()}\n{pod.log.read_text()[-3000:]}" for name, pod in running.items())
