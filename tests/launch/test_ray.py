"""`satrap run --cluster ray`: the run of one machine, placed by Ray on two nodes; whoever is killed, a whole node, too,
it ends in the bits of one machine, and leaves nothing.

The nodes are a Ray cluster's on this machine, so they share its memory and files; who is where is told by the nodes'
ids. One Ray serves all tests but those that ask `satrap run` to start one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runs import JOB, SATRAP, changed_job, finished, is_left, num_checkpoints, said, same, scale, scaled, started, until

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'ray>=2.52'", allow_module_level=True)

SIZES = ("--servers", "2", "--trainers", "2")
ON_HEAD = ("--trainer-gpus", "1")  # which the other node has none of


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes. Only the first has what Ray takes for GPUs."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    quick = {"health_check_period_ms": 1000, "health_check_failure_threshold": 10}  # to see that a node is gone
    how: dict[str, Any] = {"object_store_memory": 100 << 20, "include_dashboard": False, "_system_config": quick}
    try:
        cluster.add_node(num_cpus=4, num_gpus=2, **how)
        cluster.add_node(num_cpus=2, num_gpus=0, object_store_memory=100 << 20)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What the job ends in without Ray."""
    folder = tmp_path_factory.mktemp("one_machine")
    with started(folder, JOB, *SIZES, arguments=(str(folder), "100")) as run:
        status, _, err = finished(run)
    assert status == 0, err
    with np.load(folder / "end.npz") as found:
        return dict(found)


def on(cluster: Any, *options: str) -> tuple[str, ...]:
    return ("--cluster", "ray", "--address", cluster.address, *options)


def name_of(folder: Path) -> str:
    name = json.loads((folder / "run/run.json").read_text())["name"]
    assert isinstance(name, str)
    return name


def children(folder: Path) -> dict[str, int]:
    """The processes of the run by name, wherever they are."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "--die-with" not in words or f"satrap-{name_of(folder)}-" not in " ".join(words):
            continue
        if "trainer" in words:
            found[f"trainer {json.loads(words[words.index('--place') + 1])['rank']}"] = int(each.name)
        elif "--shared" in words:
            found[f"server {words[words.index('--shared') + 1][-1]}"] = int(each.name)
    return found


def servers_of(folder: Path) -> set[str]:
    return {name for name in children(folder) if name.startswith("server")}


def actor_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def nothing_of_it_is_left(folder: Path, pids: list[int]) -> None:
    until(lambda: not any(map(is_left, pids)))
    assert not list((folder / "memory").iterdir()), "rows and keys"
    assert not list((folder / "run").glob("*.key"))


def test_whoever_is_killed_it_ends_in_the_bits_of_one_machine(
    tmp_path: Path, cluster: Any, one_machine: dict[str, np.ndarray]
) -> None:
    # Ray reserves places at once, and takes far longer than two seconds to start six processes there.
    options = (*SIZES, "--workers", "1", "--placement-seconds", "2", *on(cluster))
    with started(tmp_path, JOB, *options, arguments=(str(tmp_path), "100")) as run:
        until(lambda: num_checkpoints(tmp_path) >= 1, run)
        keys = list((tmp_path / "memory").glob("*.keys/*.key"))
        assert len(keys) == 6 and all(key.stat().st_mode & 0o777 == 0o600 for key in keys)
        pids = children(tmp_path)
        servers = [Path(f"/proc/{pids[name]}/cmdline").read_text() for name in ("server 0", "server 1")]
        nodes = {node.node_id for node in cluster.list_all_nodes()}
        assert {node for node in nodes for words in servers if node[:12] in words} == nodes, "servers are spread"
        os.kill(pids["server 0"], signal.SIGKILL)
        os.kill(actor_of(pids["server 1"]), signal.SIGKILL)
        until(lambda: num_checkpoints(tmp_path) >= 3, run)
        os.kill(pids["trainer 1"], signal.SIGKILL)
        status, out, err = finished(run)
    assert status == 0, err
    assert out == "began\nresumed\n", "the first trainer's lines"
    assert "server 0 was ended by signal 9: it is started again" in err and "server 1: its actor is gone" in err
    assert "launch 2: 2 trainers" in err and "launch 3" not in err, "servers that find their rows end no launch"
    same(tmp_path, one_machine)
    nothing_of_it_is_left(tmp_path, list(pids.values()))
    secrets = [
        each for log in (tmp_path / "run/logs").iterdir() for each in ("secret", "public") if each in log.read_text()
    ]
    assert not secrets


def test_servers_join_and_leave(tmp_path: Path, cluster: Any, one_machine: dict[str, np.ndarray]) -> None:
    """Two of them take all that the nodes have beside the trainers; so a third is refused, while training goes on, and
    one that comes after one has left has its place."""
    (tmp_path / "job").mkdir()
    holds = ('"hold"', 'f"hold-{embeddings.step}"')
    script = changed_job(tmp_path / "job", ("step == 30", "step in (20, 35)"), holds)
    for step in (20, 35):
        (tmp_path / f"hold-{step}").touch()
    options = on(cluster, "--trainers", "2", "--server-cpus", "2", "--placement-seconds", "10")
    with started(tmp_path, script, *options, arguments=(str(tmp_path), "100")) as run:
        until(lambda: num_checkpoints(tmp_path) >= 1, run)
        scaled(tmp_path, run, 2)
        scale(tmp_path, 3)
        said(run, "3 servers instead of 2: asked for by satrap scale")
        (tmp_path / "hold-20").unlink()
        until(lambda: num_checkpoints(tmp_path) >= 7, run)
        said(run, "Ray found no place for server 2 with 2 CPU, within 10 s")
        scaled(tmp_path, run, 1)
        scaled(tmp_path, run, 2)
        until(lambda: len(list((tmp_path / "memory").glob("*-server-[0-9]"))) == 2, run)
        pids = children(tmp_path)
        assert "server 3" in pids
        os.kill(pids["server 3"], signal.SIGKILL)
        (tmp_path / "hold-35").unlink()
        status, out, err = finished(run)
    assert (status, out) == (0, "began\n"), err
    assert "server 3 was ended by signal 9: it is started again" in err and "no longer where it was" not in err
    same(tmp_path, one_machine)
    nothing_of_it_is_left(tmp_path, list(pids.values()))


def test_a_node_that_is_lost_takes_its_server_and_the_run_goes_on_from_the_checkpoint(
    tmp_path: Path, cluster: Any, one_machine: dict[str, np.ndarray]
) -> None:
    head, lost = cluster.head_node, next(iter(cluster.worker_nodes))
    options = on(cluster, *ON_HEAD)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text('{"name": "before", "launch": 4}')
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/satrap-before-0-server-0").write_text("of a driver that was killed")
    (tmp_path / "hold").touch()
    with started(tmp_path, JOB, *SIZES, *options, arguments=(str(tmp_path), "100")) as run:
        until(lambda: num_checkpoints(tmp_path) >= 2, run)
        for number in (3, 1, 2):
            scaled(tmp_path, run, number)
        until(lambda: {"server 0", "server 3"} == servers_of(tmp_path), run)
        pids = children(tmp_path)
        on_lost = [each for each in (tmp_path / "memory").iterdir() if lost.node_id[:12] in each.name]
        assert sorted(each.suffix for each in on_lost) == ["", ".keys"], "one server, in the place of one that left"
        trainers = [Path(f"/proc/{pids[name]}/environ").read_text() for name in ("trainer 0", "trainer 1")]
        assert sorted(each.partition("CUDA_VISIBLE_DEVICES=")[2][0] for each in trainers) == ["0", "1"]
        servers = [pids[name] for name in ("server 0", "server 3")]
        (server,) = (pid for pid in servers if lost.node_id[:12] in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(actor_of(server), signal.SIGKILL)  # a machine takes all of its processes at once
        cluster.remove_node(lost, allow_graceful=False)
        (tmp_path / "hold").unlink()
        status, out, err = finished(run)
    assert status == 0, err
    assert "is no longer where it was: the trainers start again from the last checkpoint" in err
    assert out == "began\nresumed\n" and "launch 6: 2 trainers" in err
    assert len(cluster.list_all_nodes()) == 1 and cluster.head_node == head
    same(tmp_path, one_machine)
    nothing_of_it_is_left(tmp_path, list(pids.values()))


@pytest.mark.parametrize("whose", ["the cluster's", "its own"])
def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path, cluster: Any, whose: str) -> None:
    told, killed = (tmp_path / name for name in ("told", "killed"))
    options = on(cluster) if whose == "the cluster's" else ("--cluster", "ray")
    number = signal.SIGINT if whose == "the cluster's" else signal.SIGTERM
    for folder in (told, killed):
        folder.mkdir()
    with (
        started(told, JOB, *options, arguments=(str(told), "20000", "4")) as first,
        started(killed, JOB, *options, arguments=(str(killed), "20000", "4")) as second,
    ):
        until(lambda: num_checkpoints(told) >= 1, first)
        until(lambda: num_checkpoints(killed) >= 1, second)
        pids = processes(first, told) + processes(second, killed)
        assert len(pids) >= 8 + 2 * (whose == "its own"), "Ray's own, too"
        first.send_signal(number)
        second.kill()
        status, _, err = finished(first)
    assert status == 130
    assert f"{number.name}: the run ends" in err
    nothing_of_it_is_left(told, pids)


def processes(run: subprocess.Popen[str], folder: Path) -> list[int]:
    """Those of the run, their actors, and of Ray what the run started."""
    pids = list(children(folder).values())
    own = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return [*pids, *(actor_of(pid) for pid in pids), *map(int, own)]


def test_what_the_cluster_does_not_have_is_refused(tmp_path: Path, cluster: Any) -> None:
    options = on(cluster, "--placement-seconds", "1", "--trainer-cpus", "64", "--server-memory", "2GiB")
    with started(tmp_path, JOB, *SIZES, *options) as run:
        status, _, err = finished(run)
    assert status == 1
    assert "Ray found no place for 2 x server with 1 CPU, 2.0 GiB memory, 2 x trainer with 64 CPU, within 1 s" in err
    assert "2 GPU" in err and "Traceback" not in err


def test_a_node_without_the_folder_for_rows(tmp_path: Path, cluster: Any) -> None:
    with started(tmp_path, JOB, *on(cluster, "--memory", str(tmp_path / "nowhere"))) as run:
        status, _, err = finished(run)
    assert status == 1 and "nowhere', which cannot be written to at " in err
    assert "Traceback" not in err


def test_a_place_that_is_lost_and_not_found_again_ends_the_run(tmp_path: Path, cluster: Any) -> None:
    """With the only node that has room for the server."""
    node = cluster.add_node(num_cpus=6, num_gpus=0, object_store_memory=100 << 20)
    options = on(cluster, *ON_HEAD, "--server-cpus", "5", "--placement-seconds", "5")
    (tmp_path / "hold").touch()
    with started(tmp_path, JOB, *options, arguments=(str(tmp_path), "100")) as run:
        until(lambda: num_checkpoints(tmp_path) >= 1, run)
        pids = children(tmp_path)
        os.kill(actor_of(pids["server 0"]), signal.SIGKILL)
        cluster.remove_node(node, allow_graceful=False)
        status, _, err = finished(run)
    assert status == 1 and "Ray found no place for server 0 with 5 CPU, within 5 s" in err, err
    nothing_of_it_is_left(tmp_path, list(pids.values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--server-cpus", "4"], "--server-cpus requires --cluster ray"),
        (["--address", "auto"], "--address requires --cluster ray"),
        (["--cluster", "ray", "--trainer-memory", "4G"], "memory is '4G'; wanted a whole number of bytes, KiB"),
        (["--cluster", "ray", "--server-cpus", "0"], "cpus is 0; expected"),
        (["--cluster", "ray", "--address", "ray://127.0.0.1:1"], "wanted host:port of the cluster's head, or auto"),
        (["--cluster", "ray", "--address", "127.0.0.1:1"], "'127.0.0.1:1', where no Ray answers"),
        (["--cluster", "ray", "--placement-seconds", "0"], "placement-seconds is 0.0; wanted more"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    command = [str(SATRAP), "run", str(JOB), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and message in done.stderr
