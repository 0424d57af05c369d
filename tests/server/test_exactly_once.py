"""Networks that lose, duplicate and delay messages, and servers that are killed: every update is applied exactly once.

The oracle is a local worker that gets the same batches: the rows must be equal bit for bit in the end. Where lookups
and updates run concurrently, every row must end as minus the number of times that its id was seen.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from bag_oracle import draw_bags, update
from cluster import ANYWHERE, batch, features, one_table, running_servers, server_processes, sharded_worker, step_both
from contents import contents
from faults import killed_at_random
from rpc_parts import FrameProxy
from satrap import SGD, Constant, Deployment, Embeddings, Table
from satrap.errors import ConfigError, SharedMemoryError
from satrap.rpc import Service
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.table.store import Store
from satrap.worker.local_rows import local_worker


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    ("drop", "repeat", "hold"), [(0.2, 0.0, 0.0), (0.0, 0.5, 0.5), (0.15, 0.2, 0.2)], ids=["lossy", "doubling", "bad"]
)
def test_a_faulty_network(seed: int, rng: np.random.Generator, drop: float, repeat: float, hold: float) -> None:
    local = local_worker(features(), num_threads=1)
    with ExitStack() as stack:
        services = stack.enter_context(running_servers(2))
        proxies = [stack.enter_context(FrameProxy(each.address, seed, drop, repeat, hold)) for each in services]
        addresses = [each.address for each in proxies]
        worker = stack.enter_context(sharded_worker(features(), addresses, retry_seconds=0.03))
        for step in range(1, 31):
            step_both([local, worker], rng, [draw_bags(rng, local.features, 12) for _ in range(1 + step % 2)], step)
        assert contents(worker) == contents(local)
        repeated = 0
        for table in worker.tables.values():
            table.check()
            repeated += table.stats()["repeated"]
        assert repeated > 0, "no update was duplicated, so nothing was tested"


def test_a_restarted_server_continues(tmp_path: Path) -> None:
    """A restart between lookup and update: the tickets are lost, the rows are not."""
    local = local_worker(one_table(), num_threads=1)
    with server_processes(tmp_path, 1) as (server,), sharded_worker(one_table(), [server.address]) as worker:
        looked = [each.lookup(batch(range(30)), step=1) for each in (local, worker)]
        server.kill()
        server.restart()
        for each, one in zip((local, worker), looked, strict=True):
            update(each, one, np.ones((30, 2), np.float32), step=1)
        assert contents(worker) == contents(local)


def test_a_stale_loop_with_duplicate_messages_and_killed_servers(
    tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    """Uses a thread for lookups and one for updates."""
    table = Table("t", dim=2, optimizer=SGD(lr=1.0), initial=Constant(0.0), num_buckets=8)
    data = [batch(rng.integers(0, 60, 40)) for _ in range(50)]
    with killed_at_random(tmp_path, seed, 3) as (servers, over), ExitStack() as stack:
        proxies = [stack.enter_context(FrameProxy(each.address, seed, 0.0, 0.3, 0.3)) for each in servers]
        embeddings = Embeddings(
            {"id": table}, staleness=3, num_threads=1, deployment=Deployment([each.address for each in proxies])
        )
        worker = embeddings.worker
        assert worker.servers is not None
        stack.callback(worker.servers.close)
        optimizer = embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
        seen = np.zeros(60)
        while not over.is_set() or not seen.any():
            for one in embeddings.stream(data, overlap=True):
                one.embeddings.sum().backward()
                optimizer.step()
                seen += np.bincount(one.inputs.values.astype(np.int64), minlength=60)
        found = embeddings.tables["t"].read(np.arange(60, dtype=np.uint64))
        np.testing.assert_array_equal(found.values, -np.stack([seen, seen], 1))
        counters = embeddings.counters()
        assert max(counters.staleness) <= 3 and not counters.lost
        embeddings.tables["t"].check()


def test_servers_restarted_with_swapped_rows_are_refused(tmp_path: Path) -> None:
    """Uses real processes: a file is locked while its server lives."""
    with (
        server_processes(tmp_path) as servers,
        sharded_worker(one_table(), [each.address for each in servers]) as worker,
    ):
        worker.lookup(batch(range(20)), step=1)
        for each in servers:
            each.kill()
        servers[0].shared, servers[1].shared = servers[1].shared, servers[0].shared
        for each in servers:
            each.restart()
        with pytest.raises(ConfigError, match=r"server: number (0 of 2 here, 1|1 of 2 here, 0) of 2 there"):
            worker.lookup(batch(range(20)), step=2)


@pytest.mark.parametrize("left", ["a page of nothing", "half of a table"])
def test_an_incomplete_file_is_replaced(tmp_path: Path, left: str) -> None:
    """Its server was killed during the hello that created it, or during a restore; both are retried."""
    file = tmp_path / "rows"
    if left == "half of a table":
        store = Store(Table("t", dim=2), num_threads=1, shared=file)
        store._engine.set_complete(False)
        del store
    else:
        file.touch(0o600)
        file.write_bytes(bytes(4096))
    server = Server(num_threads=1, shared=file)
    assert not file.exists()
    with Service(server, ServerCalls, ANYWHERE) as service, sharded_worker(one_table(), [service.address]) as worker:
        worker.lookup(batch(range(10)), step=1)
        assert len(worker.tables["t"]) == 10
    file_of_another = tmp_path / "other"
    file_of_another.touch(0o600)
    file_of_another.write_bytes(b"not ours" * 512)
    with pytest.raises(SharedMemoryError, match="is not a Satrap shared-memory file"):
        Server(num_threads=1, shared=file_of_another)
    assert file_of_another.exists()
