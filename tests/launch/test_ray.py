"""`satrap run --cluster ray`: a run that Ray places on two nodes. It ends with the bits of a run on one machine when
processes or a whole node are killed, and leaves nothing behind.

Both nodes are on this machine, so they share its memory and files, and node ids tell where a process is. One Ray serves
all tests except those that have `satrap run` start a private one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from child_processes import SATRAP
from cluster import running_servers
from runs import (
    JOB,
    assert_same_result,
    is_running,
    name_processes,
    num_checkpoints,
    request_scale,
    run_to_its_end,
    scale_to,
    start_run,
    wait_for_exit,
    wait_for_output,
    write_changed_job,
)
from waiting import DEADLINE_SECONDS, wait_until

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'ray>=2.52'", allow_module_level=True)

SIZES = ("--servers", "2", "--trainers", "2")
pytestmark = pytest.mark.draw(3)
LIST_ACTORS = """
import json, sys, ray
from ray._private.state import actors

ray.init(sys.argv[1], log_to_driver=False)
alive = [each for each in actors().values() if each["State"] == "ALIVE"]
own = [each for each in alive if not each["ActorClassName"].startswith("_")]  # the others are those of ray.train
print(json.dumps([[each["ActorClassName"], each["Name"]] for each in own]))
"""
WITHOUT_TASK = """
import satrap.launch.ray_launcher
from satrap.cli.main import main

satrap.launch.ray_launcher._remove_node_files = None
raise SystemExit(main())
"""
ON_HEAD = ("--trainer-gpus", "1")  # the other node has no GPUs


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of two nodes. Only the first one claims to have GPUs, and a label; only the second one has a custom
    resource, places for servers."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    settings = {"health_check_period_ms": 1000, "health_check_failure_threshold": 10}  # to notice a lost node
    settings["worker_niceness"] = 0  # by default Ray's processes starve beside other tests
    head: dict[str, Any] = {"include_dashboard": False, "_system_config": settings}
    try:
        cluster.add_node(num_cpus=4, num_gpus=2, object_store_memory=100 << 20, labels={"role": "trainers"}, **head)
        cluster.add_node(num_cpus=2, num_gpus=0, object_store_memory=100 << 20, resources={"satrap_server": 2})
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The result of the job without Ray."""
    folder = tmp_path_factory.mktemp("one_machine")
    status, _, err = run_to_its_end(folder, JOB, *SIZES, arguments=(str(folder), "100"))
    assert status == 0, err
    with np.load(folder / "end.npz") as results:
        return dict(results)


def on_cluster(cluster: Any, *options: str) -> tuple[str, ...]:
    return ("--cluster", "ray", "--address", cluster.address, *options)


def children(folder: Path) -> dict[str, int]:
    """Returns the process ids of the run by name, on all nodes."""
    run = json.loads((folder / "run/run.json").read_text())["name"]
    return name_processes((each.name for each in Path("/proc").glob("[0-9]*")), "--die-with", f"satrap-{run}-")


def actor_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def assert_nothing_is_left(folder: Path, pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)))
    assert not list((folder / "memory").iterdir()), "rows and keys"
    assert not list((folder / "run").glob("*.key"))


@pytest.mark.draw(2, of="whole runs")
def test_a_run_with_killed_processes_ends_with_the_bits_of_one_machine(
    tmp_path: Path, cluster: Any, one_machine: dict[str, np.ndarray]
) -> None:
    # Ray reserves the bundles at once, but takes far longer than two seconds to start six processes in them.
    options = (*SIZES, "--workers", "1", "--placement-seconds", "2", *on_cluster(cluster))
    with start_run(tmp_path, JOB, *options, arguments=(str(tmp_path), "100")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 1, run)
        keys = list((tmp_path / "memory").glob("*.keys/*.key"))
        assert len(keys) == 6 and all(key.stat().st_mode & 0o777 == 0o600 for key in keys)
        pids = children(tmp_path)
        servers = [Path(f"/proc/{pids[name]}/cmdline").read_text() for name in ("server 0", "server 1")]
        nodes = {node.node_id for node in cluster.list_all_nodes()}
        assert {node for node in nodes for words in servers if node[:12] in words} == nodes, "servers are spread"
        os.kill(pids["server 0"], signal.SIGKILL)
        os.kill(actor_of(pids["server 1"]), signal.SIGKILL)
        wait_until(lambda: num_checkpoints(tmp_path) >= 3, run)
        os.kill(pids["trainer 1"], signal.SIGKILL)
        status, out, err = wait_for_exit(run)
    assert status == 0, err
    assert out == "began\nresumed\n", "the first trainer's output"
    assert "server 0 was killed by signal 9; restarting it" in err and "server 1: its Ray actor died" in err
    assert "launch 2: starting 2 trainers" in err and "launch 3" not in err, (
        "servers that find their rows do not end a launch"
    )
    assert_same_result(tmp_path, one_machine)
    assert_nothing_is_left(tmp_path, list(pids.values()))
    secrets = [
        each for log in (tmp_path / "run/logs").iterdir() for each in ("secret", "public") if each in log.read_text()
    ]
    assert not secrets


def test_servers_join_and_leave(tmp_path: Path, cluster: Any, one_machine: dict[str, np.ndarray]) -> None:
    """Two servers take all CPUs that the trainers leave. So a third one is refused, while training continues, and a
    server that joins after one has left gets its bundle."""
    (tmp_path / "job").mkdir()
    holds = ('"hold"', 'f"hold-{embeddings.step}"')
    script = write_changed_job(tmp_path / "job", ("step == 30", "step in (20, 35)"), holds)
    for step in (20, 35):
        (tmp_path / f"hold-{step}").touch()
    options = on_cluster(cluster, "--trainers", "2", "--server-cpus", "2", "--placement-seconds", "10")
    with start_run(tmp_path, script, *options, arguments=(str(tmp_path), "100")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 1, run)
        scale_to(tmp_path, run, 2)
        request_scale(tmp_path, 3)
        wait_for_output(run, "scaling to 3 servers from 2: requested by satrap scale")
        (tmp_path / "hold-20").unlink()
        wait_until(lambda: num_checkpoints(tmp_path) >= 7, run)
        wait_for_output(run, "Ray could not place server 2 with 2 CPU within 10 s")
        scale_to(tmp_path, run, 1)
        scale_to(tmp_path, run, 2)
        wait_until(lambda: len(list((tmp_path / "memory").glob("*-server-[0-9]"))) == 2, run)
        pids = children(tmp_path)
        assert "server 3" in pids
        os.kill(pids["server 3"], signal.SIGKILL)
        (tmp_path / "hold-35").unlink()
        status, out, err = wait_for_exit(run)
    assert (status, out) == (0, "began\n"), err
    assert "server 3 was killed by signal 9; restarting it" in err and "came back at another address" not in err
    assert_same_result(tmp_path, one_machine)
    assert_nothing_is_left(tmp_path, list(pids.values()))


def test_custom_resources_and_labels_choose_the_nodes(tmp_path: Path, cluster: Any) -> None:
    """Servers would be spread over the nodes, and the trainer could be on either."""
    chosen = ("--server-resource", "satrap_server=1", "--trainer-label", "role=trainers")
    (tmp_path / "hold").touch()
    with start_run(
        tmp_path, JOB, "--servers", "2", *on_cluster(cluster, *chosen), arguments=(str(tmp_path), "40")
    ) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 1, run)
        words = {name: Path(f"/proc/{pid}/cmdline").read_text() for name, pid in children(tmp_path).items()}
        (tmp_path / "hold").unlink()
        status, _, err = wait_for_exit(run)
    assert status == 0, err
    head, other = (node.node_id[:12] for node in cluster.list_all_nodes())
    where = {name: {node for node in (head, other) if node in each} for name, each in words.items()}
    assert where == {"server 0": {other}, "server 1": {other}, "trainer 0": {head}}


def test_resources_that_the_cluster_lacks_are_refused(tmp_path: Path, cluster: Any) -> None:
    options = on_cluster(cluster, "--placement-seconds", "1", "--trainer-cpus", "64", "--server-memory", "2GiB")
    status, _, err = run_to_its_end(tmp_path, JOB, *SIZES, *options)
    assert status == 1
    assert "Ray could not place 2 x server with 1 CPU, 2.0 GiB memory, 2 x trainer with 64 CPU within 1 s" in err
    assert "2 GPU" in err and "Traceback" not in err
    options = on_cluster(cluster, "--placement-seconds", "1", "--server-resource", "satrap_server=3")
    status, _, err = run_to_its_end(tmp_path, JOB, *options)
    assert status == 1 and "1 x server with 1 CPU, 3 satrap_server, 1 x trainer" in err
    assert "2 satrap_server are free" in err, err


def test_a_run_that_loses_a_node_with_a_server_resumes_its_checkpoint(
    tmp_path: Path, cluster: Any, one_machine: dict[str, np.ndarray]
) -> None:
    head, lost = cluster.head_node, next(iter(cluster.worker_nodes))
    options = on_cluster(cluster, *ON_HEAD)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text('{"name": "before", "launch": 4}')
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/satrap-before-0-server-0").write_text("left by a driver that was killed")
    (tmp_path / "hold").touch()
    with start_run(tmp_path, JOB, *SIZES, *options, arguments=(str(tmp_path), "100")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 2, run)
        for number in (3, 1, 2):
            scale_to(tmp_path, run, number)
        wait_until(lambda: children(tmp_path).keys() == {"server 0", "server 3", "trainer 0", "trainer 1"}, run)
        pids = children(tmp_path)
        on_lost = [each for each in (tmp_path / "memory").iterdir() if lost.node_id[:12] in each.name]
        assert sorted(each.suffix for each in on_lost) == ["", ".keys"], "one server, in the bundle of one that left"
        trainers = [Path(f"/proc/{pids[name]}/environ").read_text() for name in ("trainer 0", "trainer 1")]
        assert sorted(each.partition("CUDA_VISIBLE_DEVICES=")[2][0] for each in trainers) == ["0", "1"]
        servers = [pids[name] for name in ("server 0", "server 3")]
        (server,) = (pid for pid in servers if lost.node_id[:12] in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(actor_of(server), signal.SIGKILL)  # all processes of a machine die at the same time
        cluster.remove_node(lost, allow_graceful=False)
        (tmp_path / "hold").unlink()
        status, out, err = wait_for_exit(run)
    assert status == 0, err
    assert "came back at another address; restarting the trainers from the last checkpoint" in err
    assert out == "began\nresumed\n" and "launch 6: starting 2 trainers" in err
    assert len(cluster.list_all_nodes()) == 1 and cluster.head_node == head, "the tests below have one node"
    assert_same_result(tmp_path, one_machine)
    assert_nothing_is_left(tmp_path, list(pids.values()))


def test_a_job_with_a_working_directory(tmp_path: Path, cluster: Any, one_machine: dict[str, np.ndarray]) -> None:
    """`ray job submit --working-dir . -- satrap run jobs/job.py` and a RayJob with a runtimeEnv start such a job.
    The variables of its environment reach the script."""
    (work := tmp_path / "work").mkdir()
    (work / "jobs").mkdir()
    write_changed_job(work / "jobs", ('"resumed" if', 'os.environ["GREETING"] if'), ("import sys", "import os, sys"))
    options = ("--address", "auto", "--folder", str(tmp_path / "run"), "--memory", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    words = [str(SATRAP), "run", "jobs/job.py", "--cluster", "ray", *SIZES, *options, "--", str(tmp_path), "100"]
    submit = [sys.executable, str(JOB.with_name("ray_submit.py")), cluster.address, str(work), " ".join(words)]
    (tmp_path / "hold").touch()
    with subprocess.Popen(submit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            wait_until(lambda: num_checkpoints(tmp_path) >= 2, job)
            pids = children(tmp_path)
            os.kill(pids["trainer 1"], signal.SIGKILL)
            (tmp_path / "hold").unlink()
            status, out, _ = wait_for_exit(job)
        finally:
            job.kill()
    assert status == 0 and "\nhello\n" in out, out
    assert_same_result(tmp_path, one_machine)
    assert_nothing_is_left(tmp_path, list(pids.values()))


def test_trainers_of_ray_train_use_servers_beside_them(
    tmp_path: Path, cluster: Any, one_machine: dict[str, np.ndarray]
) -> None:
    script = JOB.with_name("ray_train_job.py")
    with running_servers(2) as servers:
        command = [
            sys.executable,
            str(script),
            cluster.address,
            str(tmp_path),
            "100",
            *(each.address for each in servers),
        ]
        deadline = 3 * DEADLINE_SECONDS  # four processes import Ray Train and torch
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists(), "a worker of Ray Train dies once"
    assert_same_result(tmp_path, one_machine)


@pytest.mark.draw(1)
@pytest.mark.parametrize("whose", ["the cluster's", "its own"])
def test_a_stopped_run_leaves_nothing_behind(tmp_path: Path, cluster: Any, whose: str) -> None:
    stopped, killed = (tmp_path / name for name in ("told", "killed"))
    options = on_cluster(cluster) if whose == "the cluster's" else ("--cluster", "ray")
    number = signal.SIGINT if whose == "the cluster's" else signal.SIGTERM
    for folder in (stopped, killed):
        folder.mkdir()
    with (
        start_run(stopped, JOB, *options, arguments=(str(stopped), "20000", "4")) as first,
        start_run(killed, JOB, *options, arguments=(str(killed), "20000", "4")) as second,
    ):
        wait_until(lambda: num_checkpoints(stopped) >= 1, first)
        wait_until(lambda: num_checkpoints(killed) >= 1, second)
        pids = processes(first, stopped) + processes(second, killed)
        assert len(pids) >= 8 + 2 * (whose == "its own"), "including Ray's own"
        first.send_signal(number)
        second.kill()
        status, _, err = wait_for_exit(first)
    assert status == 130
    assert f"{number.name}: stopping the run" in err
    assert_nothing_is_left(stopped, pids)


@pytest.mark.draw(1)
@pytest.mark.parametrize("how", ["finished", "interrupted", "failed"])
def test_actors_are_named_by_role_and_remove_their_own_files(
    tmp_path: Path, cluster: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run, no task for cleaning is started: with the last process its rows and keys are gone."""
    no_key = '1 / __import__("os").path.exists("client.key")'  # that it fails shows that no key was copied
    script = write_changed_job(tmp_path, ("embeddings.drain()", no_key)) if how == "failed" else JOB
    (tmp_path / "client.key").write_text("of another run")
    without_task = tmp_path / "satrap"
    patch = "import satrap.launch.ray_launcher as launcher; launcher._remove_node_files = None"
    without_task.write_text(
        f"#!{sys.executable}\n{patch}\nfrom satrap.cli.main import main; raise SystemExit(main())\n"
    )
    without_task.chmod(0o755)
    monkeypatch.setattr("runs.SATRAP", without_task)
    (tmp_path / "hold").touch()
    options = ("--servers", "2", "--workers", "1", *on_cluster(cluster))
    with start_run(tmp_path, script, *options, arguments=(str(tmp_path), "40")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 6, run)  # the script waits at step 30
        pids = list(children(tmp_path).values())
        listed = subprocess.run(
            [sys.executable, "-c", LIST_ACTORS, cluster.address],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        assert len(list((tmp_path / "memory").iterdir())) == 6, "rows of two servers, keys of four processes"
        if how == "interrupted":
            run.send_signal(signal.SIGINT)
        (tmp_path / "hold").unlink()
        status, _, err = wait_for_exit(run)
    assert status == {"finished": 0, "interrupted": 130, "failed": 1}[how], err
    expected = {("ServerActor", "server-0.1"), ("ServerActor", "server-1.1"), ("WorkerActor", "worker-0.1")}
    expected |= {("TrainerActor", "trainer-0.1")}
    assert {tuple(each) for each in json.loads(listed.stdout.splitlines()[-1])} == expected
    assert f"Ray at {cluster.address}, without a dashboard; its messages in {tmp_path / 'run/logs/ray.log'}" in err
    assert_nothing_is_left(tmp_path, pids)


def processes(run: subprocess.Popen[str], folder: Path) -> list[int]:
    """Returns the ids of the run's processes, of their actors, and of the Ray processes that the run started."""
    pids = list(children(folder).values())
    own = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return [*pids, *(actor_of(pid) for pid in pids), *map(int, own)]


def test_a_node_without_the_directory_for_rows(tmp_path: Path, cluster: Any) -> None:
    status, _, err = run_to_its_end(tmp_path, JOB, *on_cluster(cluster, "--memory", str(tmp_path / "nowhere")))
    assert status == 1 and "nowhere', which cannot be written to on node " in err
    assert "Traceback" not in err


def test_a_server_that_cannot_be_placed_again_ends_the_run(tmp_path: Path, cluster: Any) -> None:
    """The only node with room for the server is lost."""
    node = cluster.add_node(num_cpus=6, num_gpus=0, object_store_memory=100 << 20)
    options = on_cluster(cluster, *ON_HEAD, "--server-cpus", "5", "--placement-seconds", "5")
    (tmp_path / "hold").touch()
    with start_run(tmp_path, JOB, *options, arguments=(str(tmp_path), "100")) as run:
        wait_until(lambda: num_checkpoints(tmp_path) >= 1, run)
        pids = children(tmp_path)
        os.kill(actor_of(pids["server 0"]), signal.SIGKILL)
        cluster.remove_node(node, allow_graceful=False)
        status, _, err = wait_for_exit(run)
    assert status == 1 and "Ray could not place server 0 with 5 CPU within 5 s" in err, err
    assert_nothing_is_left(tmp_path, list(pids.values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--server-cpus", "4"], "--server-cpus requires --cluster ray"),
        (["--address", "auto"], "--address requires --cluster ray"),
        (["--cluster", "ray", "--trainer-memory", "4G"], "--trainer-memory is '4G' (str); expected bytes"),
        (["--cluster", "ray", "--server-cpus", "0"], "cpus is 0; expected"),
        (["--server-label", "role=server"], "--server-label requires --cluster ray"),
        (
            ["--cluster", "ray", "--worker-resource", "a=1"],
            "worker: custom resources and labels are those of a cluster's",
        ),
        (
            ["--cluster", "ray", "--address", "ray://127.0.0.1:1"],
            "expected host:port of the cluster's head node, or auto",
        ),
        (["--cluster", "ray", "--address", "127.0.0.1:1"], "'127.0.0.1:1', where no Ray answers"),
        (["--cluster", "ray", "--placement-seconds", "0"], "placement-seconds is 0.0; expected more"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    command = [str(SATRAP), "run", str(JOB), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and message in done.stderr
