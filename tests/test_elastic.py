"""Buckets move between servers while training goes on: nothing is lost, nothing is applied twice.

The oracle is a worker with its own rows that is given the same batches: bit for bit the same rows in the end.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bag_oracle import draw_bags
from cluster import DEADLINE_SECONDS, batch, both_step, contents, features, killed_at_random, remote, serving
from satrap.config import SGD, Adagrad, MinCount, Normal, Table, Zeros
from satrap.features import Features
from satrap.local import LocalWorker
from satrap.mover import Moved, Mover
from satrap.remote import RemoteWorker
from satrap.rpc import Client

TOUR = (2, 3, 1, 2, 1, 3, 2, 1)  # how many servers there are, one after the other


class Tour:
    """Moves in a thread: from one server to as many as the tour says, one number after the other."""

    def __init__(self, addresses: list[str], tour: tuple[int, ...] = TOUR, **options: int) -> None:
        self.done: list[Moved] = []
        self.caught: BaseException | None = None
        self._thread = threading.Thread(target=self._move, args=(addresses, tour), kwargs=options)
        self._thread.start()

    def _move(self, addresses: list[str], tour: tuple[int, ...], **options: int) -> None:
        now = addresses[:1]
        try:
            for num_servers in tour:
                wanted = addresses[:num_servers]
                self.done.append(Mover(now, wanted, deadline=DEADLINE_SECONDS, **options).run())
                now = wanted
        except BaseException as error:
            self.caught = error

    def over(self) -> bool:
        if self.caught is not None:
            raise self.caught
        return not self._thread.is_alive()

    def __enter__(self) -> Tour:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(2 * DEADLINE_SECONDS)


def table(**options: Any) -> Features:
    return Features({"id": Table("t", dim=2, num_buckets=16, **{"optimizer": SGD(lr=0.25), "initial": Zeros(), **options})})


def dyadic(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Numbers whose sums are exact, in whatever order."""
    return (rng.integers(-8, 9, size=shape) / 8).astype(np.float32)


def test_rows_are_those_of_a_worker_whose_rows_never_moved(rng: np.random.Generator) -> None:
    """One synchronous trainer; every kind of feature, optimizers with state."""
    local = LocalWorker(features(), num_threads=1)
    with serving(3) as services, remote(features(), [services[0].address]) as worker:
        step = 0
        with Tour([each.address for each in services], group_bytes=1000) as tour:
            while not tour.over():
                step += 1
                bags = [draw_bags(rng, local.features, 60) for _ in range(1 + step % 2)]
                both_step([local, worker], rng, bags, step)
        assert contents(worker) == contents(local)
        for each in worker.tables.values():
            each.check()
        assert len(worker.servers) == TOUR[-1] and worker.servers.bucket_map.version > 50


def test_what_makes_and_unmakes_rows_moves_along(rng: np.random.Generator) -> None:
    """Counts before admission, last uses before eviction, and what has been counted."""
    life = table(initial=Normal(), capacity=256, admission=MinCount(n=2, window=512), optimizer=Adagrad(lr=0.1))
    local = LocalWorker(life, num_threads=1)
    with serving(3) as services, remote(life, [services[0].address]) as worker:
        step = 0
        with Tour([each.address for each in services], group_bytes=1000) as tour:
            while not tour.over() or step < 40:
                step += 1
                ids = rng.zipf(1.2, size=60) % 2000
                blocks = []
                for each in (local, worker):
                    looked = each.lookup(batch(ids), step=step)
                    blocks.append(looked.block.copy())
                    assert looked.ticket
                    each.update([looked.ticket], [looked.block + 1], step=step)
                assert blocks[0].tobytes() == blocks[1].tobytes()
        assert contents(worker, np.arange(2000, dtype=np.uint64)) == contents(local, np.arange(2000, dtype=np.uint64))
        found, wanted = worker.tables["t"].stats(), local.tables["t"].stats()
        exact = ("rows", "sightings", "inserted", "evicted", "updated", "not_applied_absent")
        assert {name: found[name] for name in exact} == {name: wanted[name] for name in exact}
        assert found["evicted"] > 0 and found["sightings"] > 0


@pytest.mark.parametrize("together", [0, 3], ids=["stale", "synchronous"])
def test_several_trainers(rng: np.random.Generator, seed: int, together: int) -> None:
    """Each with lookups ahead of its updates, or all in step. Updates are exact, so their order does not matter."""
    of, ids, num_trainers = table(), np.arange(200, dtype=np.uint64), 3
    total = np.zeros((num_trainers, len(ids), 2))
    caught: list[BaseException] = []
    with ExitStack() as stack:
        addresses = [each.address for each in stack.enter_context(serving(3))]
        workers = [stack.enter_context(remote(of, addresses[:1], together=together))]
        workers += [
            stack.enter_context(remote(of, addresses[:1], trainer=r, attempt=1, together=together))
            for r in range(1, num_trainers)
        ]
        workers[0].lookup(batch(ids), step=1)
        before = workers[0].tables["t"].read(ids).values
        tour = stack.enter_context(Tour(addresses, group_bytes=1))
        agreed = threading.Barrier(num_trainers)

        def train(rank: int) -> None:
            draw = np.random.default_rng([seed, rank])
            open_batches: deque[tuple[int, Any, NDArray[np.float32]]] = deque()
            try:
                for step in range(2, 10_000):
                    chosen = draw.integers(len(ids), size=50)
                    looked = workers[rank].lookup(batch(chosen), step=step, oldest_open=max(1, step - 4))
                    gradients = dyadic(draw, (50, 2))
                    np.add.at(total[rank], chosen, gradients)
                    open_batches.append((step, looked.ticket, gradients))
                    if len(open_batches) > (0 if together else 3):
                        at, ticket, given = open_batches.popleft()
                        workers[rank].update([ticket], [given], step=at)
                    if step % 10 == 0:  # they end at the same step
                        ended[rank] = tour.over()
                        agreed.wait(DEADLINE_SECONDS)
                        if all(ended):
                            break
                        agreed.wait(DEADLINE_SECONDS)
                for at, ticket, given in open_batches:
                    workers[rank].update([ticket], [given], step=at)
            except BaseException as error:
                agreed.abort()
                caught.append(error)

        ended = [False] * num_trainers
        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(num_trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * DEADLINE_SECONDS)
        if caught:
            raise caught[0]
        after = workers[0].tables["t"].read(ids).values
        np.testing.assert_array_equal(after - before, (-0.25 * total.sum(axis=0)).astype(np.float32))
        assert len(tour.done) == len(TOUR)


class Training:
    """A trainer in a thread, and its oracle, until it is told that it is over."""

    def __init__(self, local: LocalWorker, worker: RemoteWorker, rng: np.random.Generator) -> None:
        self.caught: BaseException | None = None
        self.step = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train, args=(local, worker, rng))

    def _train(self, local: LocalWorker, worker: RemoteWorker, rng: np.random.Generator) -> None:
        try:
            while not self._over.is_set():
                self.step += 1
                both_step([local, worker], rng, [draw_bags(rng, local.features, 60)], self.step)
        except BaseException as error:
            self.caught = error

    def __enter__(self) -> Training:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2 * DEADLINE_SECONDS)
        if self.caught is not None:
            raise self.caught


def test_a_mover_that_dies_at_any_call_is_run_again(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """1 -> 3 -> 2 servers, each time begun again with a few calls more, until a run comes through."""
    local = LocalWorker(features(), num_threads=1)
    begin, mine, left = Client.begin, threading.get_ident(), [0]

    def counted(self: Client[Any], *arguments: Any, **named: Any) -> Any:
        if threading.get_ident() == mine:
            left[0] -= 1
            if left[0] < 0:
                raise ConnectionAbortedError
        return begin(self, *arguments, **named)

    with serving(3) as services, remote(features(), [services[0].address]) as worker:
        addresses, num_deaths = [each.address for each in services], 0
        with Training(local, worker, rng) as training, monkeypatch.context() as patched:
            patched.setattr(Client, "begin", counted)
            for now, wanted in ((addresses[:1], addresses), (addresses, addresses[1:])):
                for num_calls in range(3, 1000):
                    left[0] = num_calls
                    with suppress(ConnectionAbortedError):
                        Mover(now, wanted, group_bytes=500).run()
                        break
                    num_deaths += 1
        assert contents(worker) == contents(local)
        worker.tables["item"].stats()
        assert worker.servers.addresses == tuple(addresses[1:]) and num_deaths > 40 and training.step > 10
        for name, each in worker.tables.items():
            each.check()
            assert each.stats()["rows"] == local.tables[name].stats()["rows"]


def test_servers_that_are_killed_during_moves(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """Sources, targets and others, with their rows in shared memory; movers meet servers that were started again."""
    local = LocalWorker(features(), num_threads=1)
    with (
        killed_at_random(tmp_path, seed, 8, num_servers=3) as (servers, over),
        remote(features(), [servers[0].address]) as worker,
    ):
        step = 0
        with Tour([each.address for each in servers], group_bytes=1000) as tour:
            while not tour.over() or not over.is_set():
                step += 1
                both_step([local, worker], rng, [draw_bags(rng, local.features, 60)], step)
        assert contents(worker) == contents(local)
        for each in worker.tables.values():
            each.check()
