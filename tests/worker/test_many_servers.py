"""128 servers of one trainer, and 64 of four trainers over one worker: the bits of local tables, and few descriptors.

The servers are objects in two processes, with a socket each. The tables are tiny.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.cluster.processes import receive, talking
from numpy.typing import NDArray

from cluster import batch, one_table, sharded_worker
from contents import contents
from remote_worker_parts import KillableWorker, ending
from satrap import Parquet
from satrap.config.job import Job
from satrap.errors import ConfigError
from satrap.rpc import Client, Origin
from satrap.rpc.open_files import FILES_PER_CONNECTION
from satrap.server.protocol import ServerCalls
from satrap.worker.local_rows import local_worker
from satrap.worker.remote.client import remote_worker
from satrap.worker.server_group import ServerGroup
from satrap.worker.worker import Worker
from waiting import DEADLINE_SECONDS

FEATURES = one_table(num_buckets=512)
IDS = np.arange(1500, dtype=np.uint64)
OTHER_FILES = 40  # that a process opens besides its connections


HOST = """
import contextlib, json, sys
from satrap.rpc import Service
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
with contextlib.ExitStack() as stack:
    servers = [Server(num_threads=1) for _ in range(int(sys.argv[1]))]
    new = [Service(server, ServerCalls, "tcp://127.0.0.1:0", insecure=True) for server in servers]
    print(json.dumps([stack.enter_context(service).address for service in new]), flush=True)
    sys.stdin.read()
"""


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Start so many servers in two processes, and yield their addresses."""
    with ExitStack() as stack:
        command = [sys.executable, "-c", HOST, str(count // 2)]
        processes = [stack.enter_context(talking(command)) for _ in range(2)]
        yield [address for process in processes for address in receive(process)]


@pytest.fixture
def few_files() -> Iterator[None]:
    """Lower the soft limit of descriptors below what this process needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files() + OTHER_FILES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_files(process: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def step(worker: Worker, ids: NDArray[np.uint64], number: int) -> bytes:
    """Look up and update a batch; return the rows that were looked up."""
    looked = worker.lookup(batch(ids), step=number)
    assert looked.ticket is not None
    worker.update([looked.ticket], [np.sin(looked.block)], step=number)
    return bytes(looked.block.tobytes())


def test_128_servers_of_one_trainer(few_files: None, rng: np.random.Generator) -> None:
    local = local_worker(FEATURES, num_threads=1)
    before = num_files()
    with hosts(128) as addresses, sharded_worker(FEATURES, addresses) as worker:
        for number in range(1, 5):
            ids = rng.choice(IDS, 1000, replace=False)
            assert step(worker, ids, number) == step(local, ids, number)
        assert contents(worker, IDS) == contents(local, IDS)
        num_threads = 2  # this one, and that of the lease
        assert num_files() - before <= 128 * num_threads * FILES_PER_CONNECTION + OTHER_FILES
    assert num_files() - before <= OTHER_FILES


def test_four_trainers_over_one_worker_with_64_servers(tmp_path: Path, rng: np.random.Generator) -> None:
    """Each reads its part of the data from the worker and updates by itself, one after the other."""
    pq.write_table(pa.table({"id": rng.choice(IDS, 1200), "label": np.zeros(1200)}), tmp_path / "a.parquet")
    source = Parquet(str(tmp_path / "a.parquet"), label="label", batch_size=100, num_threads=1)
    local = local_worker(FEATURES, num_threads=1)
    worker, job = KillableWorker(), Job(tables=FEATURES.tables)
    with ExitStack() as stack:
        stack.enter_context(ending([worker]))
        addresses = stack.enter_context(hosts(64))
        before, streams = num_files(worker.pid), []
        attempt: int | None = None
        for rank in range(4):
            servers = ServerGroup(job, addresses, trainer=rank, attempt=attempt, deadline=DEADLINE_SECONDS)
            stack.callback(servers.close)
            attempt = servers.attempt
            trainer = remote_worker(FEATURES, servers, worker.address, num_threads=1, deadline=DEADLINE_SECONDS)
            stack.callback(trainer.close)
            own = local.batches(source, rank=rank, world_size=4)
            streams.append((trainer, trainer.batches(source, rank=rank, world_size=4), own))
        for number in range(1, 4):
            for trainer, remote, own in streams:
                mine, theirs = local.lookup(next(own)), trainer.lookup(next(remote), step=number)
                np.testing.assert_array_equal(theirs.block, mine.block)
                for each, looked, at in ((local, mine, None), (trainer, theirs, number)):
                    assert looked.ticket is not None
                    each.update([looked.ticket], [np.cos(looked.block)], step=at)
        assert contents(streams[0][0], IDS) == contents(local, IDS)
        connections = (num_files(worker.pid) - before - OTHER_FILES) / (4 * 64)
        print(f"{connections / FILES_PER_CONNECTION:.1f} connections for each trainer and server")
        assert connections <= 4 * FILES_PER_CONNECTION


def test_a_limit_below_the_need_is_an_error_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    num_open = num_files()
    limit = num_open + 500
    monkeypatch.setattr("satrap.rpc.open_files.resource.getrlimit", lambda _: (limit, limit))
    addresses = [f"tcp://127.0.0.1:{port}" for port in range(1, 129)]
    words = rf"connections to 128 servers need 512 file .* its limit is {limit} \(hard limit: {limit}\): raise the hard"
    with pytest.raises(ConfigError, match=words):
        ServerGroup(Job(tables=FEATURES.tables), addresses)
    assert num_files() <= num_open + 2
    # Each further thread that calls has connections, too.
    with Client(ServerCalls, addresses[0]) as client:
        limit = num_files()
        with pytest.raises(ConfigError, match=r"the connection to tcp://127.0.0.1:1, with its handshake, would need 4"):
            client.call.progress(Origin())
