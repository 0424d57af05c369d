"""Buckets move between servers while training continues: nothing is lost, nothing is applied twice.

The oracle is a local worker that gets the same batches: the rows must be equal bit for bit in the end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rpc_parts  # noqa: F401  starts a thread that pyzmq keeps
from bag_oracle import draw_bags, update
from cluster import ANYWHERE, batch, features, one_table, running_servers, sharded_worker, step_both
from contents import contents
from faults import killed_at_random
from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adagrad
from satrap.config.tables import MinCount, Normal, Zeros
from satrap.errors import ConfigError, DeadlineError, NotReadyError, SnapshotError
from satrap.rpc import Client, Origin, Service
from satrap.server.migration.coordinator import Migration
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.worker.local_rows import local_worker
from satrap.worker.worker import Worker
from tour import TOUR, Tour
from waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.draw(3)
EXACT = np.arange(200, dtype=np.uint64)  # ids of tables whose rows stay exact


def table(**options: Any) -> Features:
    given: dict[str, Any] = {"num_buckets": 16, "optimizer": SGD(lr=0.25), "initial": Zeros()}
    return one_table(**given | options)


def test_admission_and_eviction_state_migrates(rng: np.random.Generator) -> None:
    """Counts before admission, last uses before eviction, and counters."""
    life = table(initial=Normal(), capacity=256, admission=MinCount(n=2, window=512), optimizer=Adagrad(lr=0.1))
    local = local_worker(life, num_threads=1)
    with running_servers(3) as services, sharded_worker(life, [services[0].address]) as worker:
        step = 0
        with Tour([each.address for each in services], group_bytes=1000) as tour:
            while not tour.over() or step < 40:
                step += 1
                ids = rng.zipf(1.2, size=60) % 2000
                blocks = []
                for each in (local, worker):
                    looked = each.lookup(batch(ids), step=step)
                    blocks.append(looked.block.copy())
                    update(each, looked, looked.block + 1, step=step)
                assert blocks[0].tobytes() == blocks[1].tobytes()
        assert contents(worker, np.arange(2000, dtype=np.uint64)) == contents(local, np.arange(2000, dtype=np.uint64))
        found, wanted = worker.tables["t"].stats(), local.tables["t"].stats()
        exact = ("rows", "sightings", "inserted", "evicted", "updated", "not_applied_absent")
        assert {name: found[name] for name in exact} == {name: wanted[name] for name in exact}
        assert found["evicted"] > 0 and found["sightings"] > 0


def train_exactly(workers: list[Any], seed: int, ahead: int, over: Callable[[], bool]) -> NDArray[np.float64]:
    """Train each in a thread, with `ahead` steps looked up and not updated, until `over`. Returns EXACT's summed
    gradients."""
    total = np.zeros((len(workers), len(EXACT), 2))
    ended = [False] * len(workers)
    agreed = threading.Barrier(len(workers))

    def train_until_over(rank: int) -> None:
        draw, worker = np.random.default_rng([seed, rank]), workers[rank]
        looked_up: deque[tuple[int, Any, NDArray[np.float32]]] = deque()
        for step in range(1, 100_000):
            chosen = draw.integers(len(EXACT), size=50)
            looked = worker.lookup(batch(chosen), step=step, oldest_open=max(1, step - ahead))
            gradients = (draw.integers(-8, 9, size=(50, 2)) / 8).astype(np.float32)  # their sums are exact
            np.add.at(total[rank], chosen, gradients)
            looked_up.append((step, looked.ticket, gradients))
            if step % 10 == 0:  # so that all end at the same step
                ended[rank] = over()
                agreed.wait(2 * DEADLINE_SECONDS)
            last = step % 10 == 0 and all(ended)
            while len(looked_up) > (0 if last else ahead):
                at, ticket, given = looked_up.popleft()
                worker.update([ticket], [given], step=at)
            if last:
                return
            if step % 10 == 0:
                agreed.wait(2 * DEADLINE_SECONDS)

    def guarded(rank: int) -> None:
        try:
            train_until_over(rank)
        except BaseException:
            agreed.abort()
            raise

    with ThreadPoolExecutor(len(workers)) as pool:
        threads = [pool.submit(guarded, rank) for rank in range(len(workers))]
    errors = [error for error in (each.exception() for each in threads) if error is not None]
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    found: NDArray[np.float64] = total.sum(axis=0)
    return found


@contextmanager
def trainers(num_trainers: int, addresses: list[str], barrier_size: int) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        workers: list[Any] = []
        for rank in range(num_trainers):
            how = {"trainer": rank, "attempt": 1} if rank else {}
            workers.append(stack.enter_context(sharded_worker(table(), addresses, barrier_size=barrier_size, **how)))
        yield workers


@pytest.mark.draw(1)
@pytest.mark.parametrize("barrier_size", [0, 3], ids=["stale", "synchronous"])
def test_several_trainers_and_servers_killed_during_migrations(tmp_path: Path, seed: int, barrier_size: int) -> None:
    """Updates are exact, so their order does not matter."""
    with killed_at_random(tmp_path, seed, 8, num_servers=3) as (servers, over):
        addresses = [each.address for each in servers]
        with trainers(3, addresses[:1], barrier_size) as workers, Tour(addresses, group_bytes=200) as tour:
            total = train_exactly(workers, seed, 0 if barrier_size else 3, lambda: tour.over() and over.is_set())
            after = workers[0].tables["t"].read(EXACT).values
            np.testing.assert_array_equal(after, (-0.25 * total).astype(np.float32))


def test_saves_during_migrations_are_complete(tmp_path: Path, rng: np.random.Generator) -> None:
    """Whole snapshots at any moment; changes since before a migration are refused, and later ones are complete."""
    local = local_worker(features(), num_threads=1)
    with running_servers(3) as services, sharded_worker(features(), [services[0].address]) as worker:
        addresses, step, saved = [each.address for each in services], 0, []
        with Tour(addresses, group_bytes=1000) as tour:
            while not tour.over():
                step += 1
                step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], step)
                folders = {name: [tmp_path / f"{name}-{step}"] for name in worker.tables}
                for name, each in worker.tables.items():
                    each.save(folders[name][0])
                saved.append((folders, contents(local)))
        since = {name: worker.tables[name].version for name in worker.tables}
        Migration(addresses[:1], addresses[:2]).run()
        with pytest.raises(SnapshotError, match="or save the whole table"):
            worker.tables["item"].save_changes(tmp_path / "refused", since=since["item"])
        assert worker.tables.map_version == worker.servers.topology.shard_map.version
        folders = {name: [tmp_path / f"{name}-full", tmp_path / f"{name}-changes"] for name in worker.tables}
        since = {name: each.save(folders[name][0]) for name, each in worker.tables.items()}
        step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], step + 1)
        for name, each in worker.tables.items():
            each.save_changes(folders[name][1], since=since[name])
        saved.append((folders, contents(local)))
    for folders, wanted in [saved[0], *saved[-5:]]:
        restored = local_worker(features(), num_threads=1)
        restored.tables.restore(folders)
        assert contents(restored) == wanted


class LateVersionServer(Server):
    """Learns of the next version between the call for its version and the save, as from a server that has saved."""

    def __init__(self) -> None:
        super().__init__(num_threads=2, checkpoints=["/"])
        self.times, self._take_cut, self.take_cut = 0, self.take_cut, self.take_late

    def take_late(
        self, origin: Origin, cut: int, tables: list[int], versions: list[int], since: list[int] | None, memory: int
    ) -> bool:
        with self._fence.admit(origin) as served:
            if self.times < 2:
                served.engine.reach_table(tables[0], versions[0], 0)
                self.times += 1
        return self._take_cut(origin, cut, tables, versions, since, memory)


def test_a_server_that_learns_a_version_midway_is_saved_with_the_others(tmp_path: Path) -> None:
    local, told = local_worker(table(), num_threads=1), LateVersionServer()
    with (
        running_servers(1) as services,
        Service(told, ServerCalls, ANYWHERE) as second,
        sharded_worker(table(), [services[0].address, second.address]) as worker,
    ):
        for step in (1, 2):
            for each in (local, worker):
                looked = each.lookup(batch(EXACT[: 100 * step]), step=step)
                update(each, looked, looked.block + 1, step=step)
            told.times = 0
            if step == 1:
                since = worker.tables["t"].save(tmp_path / "whole")
            else:
                worker.tables["t"].save_changes(tmp_path / "changes", since=since)
            assert told.times == 2
        wanted = contents(local, EXACT)
        assert contents(worker, EXACT) == wanted
    restored = local_worker(table(), num_threads=1)
    restored.tables.restore({"t": [tmp_path / "whole", tmp_path / "changes"]})
    assert contents(restored, EXACT) == wanted


def test_a_restore_during_migrations(tmp_path: Path, rng: np.random.Generator) -> None:
    """Repeatedly: whatever was in flight, all servers hold the saved rows afterwards."""
    local = local_worker(features(), num_threads=1)
    with running_servers(3) as services, sharded_worker(features(), [services[0].address]) as worker:
        step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], 1)
        folders = {name: [tmp_path / name] for name in worker.tables}
        for name, each in worker.tables.items():
            each.save(folders[name][0])
        wanted, num_restores = contents(local), 0
        with Tour([each.address for each in services], group_bytes=1000) as tour:
            while not tour.over():
                worker.tables.restore(folders)
                assert contents(worker) == wanted
                num_restores += 1
                looked = worker.lookup(draw_bags(rng, local.features, 60).inputs(), step=2)
                update(worker, looked, looked.block + 1, step=2)
        worker.tables.restore(folders)
        assert contents(worker) == wanted and num_restores > 5


def test_memory_of_outgoing_buckets_is_reused(rng: np.random.Generator) -> None:
    local = local_worker(table(), num_threads=1)
    ids = rng.integers(1 << 63, size=40_000).astype(np.uint64)
    with running_servers(2) as services, sharded_worker(table(), [services[0].address]) as worker:
        addresses, sizes = [each.address for each in services], list[float]()
        with Client(ServerCalls, addresses[0]) as client:
            for step, (now, wanted) in enumerate(((1, 2), (2, 1), (1, 2)), 1):
                for each in (local, worker):
                    looked = each.lookup(batch(ids[: 15_000 * step]), step=step)
                    update(each, looked, looked.block + 1, step=step)
                before = client.call.load(Origin())
                Migration(addresses[:now], addresses[:wanted], pause_ratio=0.0).run()
                sizes.append(client.call.load(Origin())["bytes"] / before["bytes"])
                assert before["latest_step"] == step and before["work_seconds"] > 0
        assert sizes[0] < 0.7 and sizes[1] > 1.4 and sizes[2] < 0.7
        assert contents(worker, ids) == contents(local, ids)
        worker.tables["t"].check()


def test_later_trainers_find_the_current_servers(rng: np.random.Generator) -> None:
    """From the run's first addresses; and a server that has left may join again."""
    local = local_worker(features(), num_threads=1)
    with running_servers(3) as services:
        addresses = [service.address for service in services]
        with sharded_worker(features(), addresses[:1]) as worker:
            step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], 1)
            for now, wanted in ((addresses[:1], addresses), (addresses, addresses[:2]), (addresses[:2], addresses[1:])):
                Migration(now, wanted, pause_ratio=0.0).run()
        for given in (addresses[:1], addresses[1:], addresses):
            with sharded_worker(features(), given) as worker:
                assert worker.servers.addresses == tuple(addresses[1:])
                assert contents(worker) == contents(local)
                assert worker.servers.latest_step == 1
    with running_servers(1) as services, pytest.raises(NotReadyError, match="has a job: start a trainer"):
        Migration([services[0].address], [services[0].address]).run()


class Training:
    """A trainer in a thread, and its oracle, until the end of the `with` block."""

    def __init__(self, local: Worker, worker: Any, rng: np.random.Generator) -> None:
        self.step = 0
        self._over, self._pool = threading.Event(), ThreadPoolExecutor(1)
        self._training = self._pool.submit(self._train, local, worker, rng)

    def _train(self, local: Worker, worker: Any, rng: np.random.Generator) -> None:
        while not self._over.is_set():
            self.step += 1
            step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], self.step)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        self._training.result()


def test_a_migration_killed_at_any_call_is_run_again(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """1 -> 3 -> 2 servers, each time restarted with a few calls more, until a run completes."""
    local = local_worker(features(), num_threads=1)
    begin, mine, left = Client.start, threading.get_ident(), [0]

    def counted(self: Client[Any], *arguments: Any, **named: Any) -> Any:
        if threading.get_ident() == mine:
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionAbortedError
        return begin(self, *arguments, **named)

    with running_servers(3) as services, sharded_worker(features(), [services[0].address]) as worker:
        addresses, num_deaths = [each.address for each in services], 0
        with Training(local, worker, rng) as training, monkeypatch.context() as patched:
            patched.setattr(Client, "start", counted)
            for now, wanted in ((addresses[:1], addresses), (addresses, addresses[1:])):
                for num_calls in range(3, 1000):
                    left[0] = num_calls
                    with suppress(ConnectionAbortedError):
                        Migration(now, wanted, group_bytes=500, pause_ratio=0.0).run()
                        break
                    num_deaths += 1
        assert contents(worker) == contents(local)
        worker.tables["item"].stats()
        assert worker.servers.addresses == tuple(addresses[1:]) and num_deaths > 40 and training.step > 10
        for name, each in worker.tables.items():
            each.check()
            assert each.stats()["rows"] == local.tables[name].stats()["rows"]


def test_a_coordinator_suspended_during_another_migration_is_refused(
    monkeypatch: pytest.MonkeyPatch, seed: int, rng: np.random.Generator
) -> None:
    """Suspended before one of its calls, a different one each time, while another coordinator completes a migration."""
    local, slept, refused = local_worker(features(), num_threads=1), 0, 0
    begin, mine = Client.start, threading.get_ident()
    with running_servers(3) as services, sharded_worker(features(), [services[0].address]) as worker:
        addresses = [service.address for service in services]
        with Training(local, worker, rng):
            for num_calls in range(seed % 12, 1000, 12):
                left, others = [num_calls], addresses[: 2 + slept % 2]

                def interrupted(
                    self: Client[Any], *arguments: Any, left: list[int] = left, others: list[str] = others, **named: Any
                ) -> Any:
                    if threading.get_ident() == mine:
                        left[0] -= 1
                        if left[0] == -1:
                            Migration(addresses, others, group_bytes=500, pause_ratio=0.0).run()
                    return begin(self, *arguments, **named)

                monkeypatch.setattr(Client, "start", interrupted)
                try:
                    Migration(addresses, addresses[1:], group_bytes=500, pause_ratio=0.0).run()
                except ConfigError as error:
                    assert "another migration is running" in str(error)
                    refused += 1
                monkeypatch.setattr(Client, "start", begin)
                if left[0] >= 0:
                    break  # the migration ended before
                slept += 1
        assert contents(worker) == contents(local) and slept > 5 and refused > slept // 2
        for each in worker.tables.values():
            each.check()


def test_server_addresses_are_those_of_the_first_trainer() -> None:
    with running_servers(2) as services:
        addresses = [service.address for service in services]
        others = [each.replace("ipc:///", "ipc:///./") for each in addresses]
        with (
            sharded_worker(table(), addresses),
            sharded_worker(table(), others),
            Client(ServerCalls, addresses[0]) as client,
        ):
            assert client.call.get_shard_map(Origin(), 0)["shard_map"]["addresses"] == addresses


def test_concurrent_coordinators_lose_nothing(seed: int, rng: np.random.Generator) -> None:
    local, caught = local_worker(features(), num_threads=1), list[BaseException]()
    with running_servers(3) as services, sharded_worker(features(), [services[0].address]) as worker:
        addresses = [service.address for service in services]

        def move(number: int) -> None:
            draw = np.random.default_rng([seed, number])
            for _ in range(40):
                wanted = [str(each) for each in draw.permutation(addresses)[: draw.integers(1, 4)]]
                try:
                    Migration(addresses, wanted, deadline=DEADLINE_SECONDS, group_bytes=500, pause_ratio=0.0).run()
                except ConfigError as error:
                    if "another migration is running" not in str(error):
                        caught.append(error)
                except BaseException as error:
                    caught.append(error)

        movers = [threading.Thread(target=move, args=(number,)) for number in range(3)]
        with Training(local, worker, rng):
            for each in movers:
                each.start()
            for each in movers:
                each.join(DEADLINE_SECONDS)
        Migration(addresses, addresses[:2], pause_ratio=0.0).run()
        assert contents(worker) == contents(local) and caught == []
        for table in worker.tables.values():
            table.check()


def test_servers_killed_during_migrations(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """Sources, targets and others, with their rows in shared memory; coordinators meet restarted servers."""
    local = local_worker(features(), num_threads=1)
    with (
        killed_at_random(tmp_path, seed, 8, num_servers=3) as (servers, over),
        sharded_worker(features(), [servers[0].address]) as worker,
    ):
        step = 0
        with Tour([each.address for each in servers], group_bytes=1000) as tour:
            while not tour.over() or not over.is_set():
                step += 1
                step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], step)
        assert contents(worker) == contents(local)
        for each in worker.tables.values():
            each.check()
        assert len(worker.servers.topology) == TOUR[-1] and worker.tables.map_version > 50


@pytest.mark.parametrize("when", ["_apply_map", "_copy_rows"])
def test_servers_that_lose_their_job_end_a_migration(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """All servers of the job were restarted without their rows, once the migration had begun."""
    server = Server(num_threads=2)
    with (
        Service(server, ServerCalls, ANYWHERE) as old,
        running_servers(1) as (new,),
        sharded_worker(table(), [old.address]),
    ):
        call = getattr(Migration, when)

        def lose_first(*arguments: Any) -> Any:
            server._fence.state = None
            return call(*arguments)

        monkeypatch.setattr(Migration, when, lose_first)
        with pytest.raises(DeadlineError, match=r"has a job any more|has no job yet"):
            Migration([old.address], [old.address, new.address], deadline=3.0).run()
