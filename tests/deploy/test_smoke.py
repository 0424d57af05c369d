"""Rendered manifests, carried out: the command of every pod runs as processes with networks and files of their own
(tests/support/pods.py). A node is lost, its pod starts again elsewhere with empty memory, and training ends with the
bits of a run on one machine.

KubeRay's part is tests/support/kuberay_pods.py. Its cluster has no dashboard, so the entrypoint is submitted on the
head (tests/support/ray_submit.py) and the probe of the dashboard is not tried."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy_jobs import host, pods_of, rendered
from kuberay_pods import ray_pods
from loop import NUM_IDS
from pods import Pod, Pods, pods
from runs import JOB, assert_same_result, num_checkpoints, run_to_its_end, wait_for_exit
from satrap.deploy.job_file import DeployJob, Image, Role, Storage
from satrap.rpc.keys import create_keys
from waiting import DEADLINE_SECONDS, wait_until

NUM_ROWS = 640
HEAD, NAMESPACE = "smoke-head-svc", "default.svc.cluster.local"
pytestmark = [pytest.mark.draw(1), pytest.mark.draw(2, of="whole runs")]


def write_data(path: Path, rng: np.random.Generator) -> None:
    ids = rng.integers(0, NUM_IDS, (NUM_ROWS, 4), dtype=np.uint64)
    columns = {"user": ids[:, 0], "item": ids[:, 1], "history": ids[:, 2:].tolist()}
    columns |= {"d0": rng.normal(size=NUM_ROWS), "d1": rng.normal(size=NUM_ROWS), "label": ids[:, 0] % 2 * 1.0}
    pq.write_table(pa.table(columns), path, row_group_size=80)


@pytest.mark.parametrize(
    ("lost", "num_trainers", "queue"),
    [("servers", 1, None), ("trainers", 1, None), ("servers", 2, None), ("servers", 1, "queue")],
)
def test_a_rendered_run_survives_the_loss_of_a_node(
    tmp_path: Path, rng: np.random.Generator, lost: str, num_trainers: int, queue: str | None
) -> None:
    """queue: of Kueue, for which the run is one JobSet."""
    with run_at_step_30(tmp_path, rng, smoke_job(num_trainers, queue)) as run:
        name = run.names(lost)[-1]
        run.pods[name].kill_node()
        run.start(name)
        assert "resumed" in run.end()


def test_a_rolling_restart_of_the_servers_loses_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    """Each pod of the StatefulSet is deleted in turn, once the pod before is ready again."""
    with run_at_step_30(tmp_path, rng, smoke_job(1)) as run:
        for name in ("smoke-servers-0", "smoke-servers-1"):
            pod = run.pods[name]
            pod.terminate()
            assert pod.process.wait(timeout=DEADLINE_SECONDS) == 0, logs(run.pods)
            run.start(name)
            wait_until(partial(run.has_joined, name))
            assert is_ready(run.pods[name], run.templates["servers"][1]["spec"])
        assert "resumed" not in run.end()


@dataclass(slots=True)
class Run:
    """A rendered run without Ray."""

    job: DeployJob
    cluster: Pods
    templates: dict[str, tuple[int, dict[str, Any]]]
    shared: Path
    expected: dict[str, np.ndarray]
    pods: dict[str, Pod] = field(default_factory=dict)

    def names(self, *roles: str) -> list[str]:
        names = [host(self.job, role, index) for role in roles for index in range(self.templates[role][0])]
        return [each.partition(".")[0] for each in names]

    def service(self, name: str) -> str:
        return host(self.job, name.split("-")[1], 0).partition(".")[2]

    def start(self, name: str) -> None:
        spec = self.templates[name.split("-")[1]][1]["spec"]
        self.pods[name] = self.cluster.start(name, self.service(name), spec, int(name.rpartition("-")[2]))

    def has_joined(self, name: str) -> bool:
        return '"event": "joined"' in self.pods[name].log.read_text() or has_ended(self.pods)

    def end(self) -> str:
        """Lets the script continue, and returns the output of the first trainer."""
        (self.shared / "job/hold").unlink()
        trainers = self.names("trainers")
        for name in trainers:
            assert self.pods[name].process.wait(timeout=DEADLINE_SECONDS) == 0, logs(self.pods)
        assert_same_result(self.shared / "job", self.expected)
        rest = [pod for name, pod in self.pods.items() if name not in trainers]
        for pod in rest:  # the end of the job: no server stays, so none waits for its grace period
            pod.terminate()
        assert [pod.process.wait(timeout=DEADLINE_SECONDS) for pod in rest] == [0] * len(rest), logs(self.pods)
        return self.pods[trainers[0]].log.read_text()


@contextmanager
def run_at_step_30(folder: Path, rng: np.random.Generator, job: DeployJob) -> Iterator[Run]:
    shared, app, expected = prepare(folder, rng, job.trainers.count)
    create_keys(folder / "keys")
    templates = pods_of(rendered(job, "kubernetes"))
    with pods(folder, {"runs": shared, "smoke-keys": folder / "keys"}, app) as cluster:
        run = Run(job, cluster, templates, shared, expected)
        for name in run.names(*templates):
            cluster.name(name, run.service(name))
        for name in run.names(*templates):
            run.start(name)
        wait_until(lambda: num_checkpoints(shared / "job") >= 2 or has_ended(run.pods))
        assert not has_ended(run.pods), logs(run.pods)
        yield run


@pytest.mark.parametrize("lost", ["servers", "workers", "trainers"])
def test_a_rendered_ray_job_survives_the_loss_of_a_node(tmp_path: Path, rng: np.random.Generator, lost: str) -> None:
    with ray_job_at_step_30(tmp_path, rng) as run:
        assert is_ready(run.pods["smoke-servers-0"], run.groups["servers"][1])
        name = f"smoke-{lost}-{run.groups[lost][0] - 1}"
        run.pods.pop(name).kill_node()
        run.start(f"{name}b", lost)
        out = run.end()
        assert "\nbegan\n" in out and "\nresumed\n" in out, out


def test_a_pod_of_a_rendered_ray_job_that_is_asked_to_stop_moves_its_rows(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Nothing is lost: no launch resumes a checkpoint. The pod that takes its place gets a share."""
    with ray_job_at_step_30(tmp_path, rng) as run:
        before = run.servers()
        pod = run.pods.pop("smoke-servers-1")
        pod.terminate()
        wait_until(lambda: len(run.servers()) == 1, run.process)
        wait_until(lambda: pod.process.poll() is not None, run.process)
        run.start("smoke-servers-1b", "servers")
        wait_until(lambda: len(run.servers()) == 2, run.process)
        assert run.servers()[0] in before and run.servers()[1] not in before
        out = run.end()
        assert "\nbegan\n" in out and "\nresumed\n" not in out, out


class Prometheus:
    """A Prometheus in its own pod, beside those of a run."""

    def __init__(self, cluster: Pods, app: Path, configuration: dict[str, Any]) -> None:
        """app: a directory of the image. configuration: what to scrape."""
        found = {"global": {"scrape_interval": "1s"}, "scrape_configs": [{"job_name": "satrap", **configuration}]}
        (app / "prometheus.yml").write_text(json.dumps(found))
        command = ["prometheus", "--config.file=/app/prometheus.yml", "--storage.tsdb.path=/scratch/data"]
        spec = {"containers": [{"command": [*command, "--web.listen-address=127.0.0.1:9090"]}]}
        self._pod = cluster.start("prometheus", "prometheus", spec, 0)

    def query(self, expression: str) -> list[dict[str, str]]:
        """Return the labels of the series that an expression yields."""
        url = f"http://127.0.0.1:9090/api/v1/query?{urlencode({'query': expression})}"
        program = f"from urllib.request import urlopen; print(urlopen({url!r}, timeout=60).read().decode())"
        request = self._pod.run("python", "-c", program)
        out, _ = request.communicate(timeout=DEADLINE_SECONDS)
        return [] if request.returncode else [each["metric"] for each in json.loads(out)["data"]["result"]]


needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs prometheus (apt install prometheus), to scrape all roles"
)


@needs_prometheus
def test_prometheus_scrapes_every_pod_at_its_annotated_port(tmp_path: Path, rng: np.random.Generator) -> None:
    with run_at_step_30(tmp_path, rng, smoke_job(1)) as run:
        targets = []
        for name in run.names(*run.templates):
            annotations = run.templates[name.split("-")[1]][1]["metadata"]["annotations"]
            address = run.cluster.addresses[name].split()[0]
            targets.append(f"{address}:{annotations['prometheus.io/port']}")
        prometheus = Prometheus(run.cluster, tmp_path / "app", {"static_configs": [{"targets": targets}]})
        wait_until(lambda: len(prometheus.query("satrap_info")) == len(targets) or has_ended(run.pods))
        found = Counter(each["process"] for each in prometheus.query("satrap_info"))
        assert found == {"server": 2, "worker": 1, "trainer": 1}, logs(run.pods)
        run.end()


@needs_prometheus
def test_prometheus_finds_all_processes_of_a_ray_job_and_pods_print_their_logs(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """It knows one page, that of the head; each process is there by the address of its pod, at a fixed port."""
    with ray_job_at_step_30(tmp_path, rng) as run:
        url = f"http://{HEAD}:9100/targets"
        discovery = {"http_sd_configs": [{"url": url, "refresh_interval": "1s"}]}
        prometheus = Prometheus(run.cluster, tmp_path / "app", discovery)
        expected = {"run": 1, "server": 2, "worker": 1, "trainer": 1}
        wait_until(lambda: len(prometheus.query("satrap_info")) == sum(expected.values()), run.process)
        found = prometheus.query("satrap_info")
        assert Counter(each["process"] for each in found) == expected
        assert all(each["process"] == each["role"] for each in found), "labels of the discovery"
        addresses = {line.split()[0] for line in run.cluster.addresses.values()}
        assert {each["instance"] for each in found} <= {f"{address}:9100" for address in addresses}
        assert len(prometheus.query("up == 1")) == len(found)
        for name in ("smoke-servers-0", "smoke-servers-1", "smoke-workers-0", "smoke-trainers-0"):
            role = name.split("-")[1].removesuffix("s")
            assert f'"role": "{role}"' in run.pods[name].log.read_text(), name
        run.end()


@dataclass(slots=True)
class RayRun:
    """A rendered RayJob that runs."""

    cluster: Pods
    groups: dict[str, tuple[int, dict[str, Any]]]
    shared: Path
    expected: dict[str, np.ndarray]
    pods: dict[str, Pod] = field(default_factory=dict)
    process: subprocess.Popen[str] = field(init=False)

    def start(self, name: str, role: str) -> None:
        self.pods[name] = self.cluster.start(name, NAMESPACE, self.groups[role][1], 0)

    def submit(self, entrypoint: str) -> None:
        """Starts the pods, the head first, and submits the job."""
        names = [
            f"smoke-{role}-{i}" for role, (count, _) in self.groups.items() for i in range(count) if role != "head"
        ]
        for name in (HEAD, *names):  # one by one: Ray gives a node 30 s to start, on a busy machine, too
            self.start(name, "head" if name == HEAD else name.split("-")[1])
            log = self.pods[name].log
            wait_until(lambda log=log: "Ray runtime started" in log.read_text() or has_ended(self.pods))  # type: ignore[misc]
        script = str(JOB.with_name("ray_submit.py"))
        self.process = self.pods[HEAD].run("python", script, f"{HEAD}:6379", "", entrypoint)

    def servers(self) -> list[str]:
        """Returns the addresses of the servers that own all buckets."""
        state = json.loads((self.shared / "smoke/run/run.json").read_text())
        return list(state["servers"])

    def end(self) -> str:
        """Lets the script continue, and returns the output of the job."""
        (self.shared / "job/hold").unlink()
        status, out, err = wait_for_exit(self.process)
        assert status == 0, f"{out}{err}{logs(self.pods)}"
        assert_same_result(self.shared / "job", self.expected)
        for pod in self.pods.values():  # the end of the cluster: nothing runs there, so no node drains for long
            pod.terminate()
        for pod in self.pods.values():
            pod.process.wait(timeout=DEADLINE_SECONDS)
        assert not any("did not finish draining" in pod.log.read_text() for pod in self.pods.values()), logs(self.pods)
        return out


@contextmanager
def ray_job_at_step_30(folder: Path, rng: np.random.Generator) -> Iterator[RayRun]:
    shared, app, expected = prepare(folder, rng, 1)
    (ray_job,) = [each for each in rendered(smoke_job(1), "kuberay") if each["kind"] == "RayJob"]
    groups = ray_pods(ray_job, f"{HEAD}.{NAMESPACE}")
    with pods(folder, {"runs": shared}, app) as cluster:
        run = RayRun(cluster, groups, shared, expected)
        run.submit(ray_job["spec"]["entrypoint"])
        try:
            wait_until(lambda: num_checkpoints(shared / "job") >= 2, run.process)
            yield run
        finally:
            run.process.kill()
            run.process.communicate()


def is_ready(pod: Pod, spec: dict[str, Any]) -> bool:
    """Tries the probe of a pod, inside it."""
    probe = spec["containers"][0]["readinessProbe"]["httpGet"]
    ports = {each["name"]: each["containerPort"] for each in spec["containers"][0]["ports"]}
    url = f"http://127.0.0.1:{ports.get(probe['port'], probe['port'])}{probe['path']}"
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


def smoke_job(num_trainers: int, queue: str | None = None) -> DeployJob:
    return DeployJob(
        name="smoke",
        queue=queue,
        script="/app/run_job.py",
        image=Image(cpu="satrap:1"),
        arguments=["/shared/job", "0", "0", "/shared/data.parquet"],
        storage=Storage(checkpoints=["/shared/job"], data=["/shared"], volume="runs"),
        servers=Role(count=2, cpus=1, memory="2GiB", grace_seconds=40),
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
