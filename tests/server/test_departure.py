"""A server that is asked to stop: its buckets move to the other servers while training continues, or its rows stay in
shared memory. The oracle is a local worker that gets the same batches."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rpc_parts  # noqa: F401  starts a thread that pyzmq keeps
from bag_oracle import draw_bags
from cluster import ANYWHERE, features, server_processes, sharded_worker, step_both
from contents import contents
from logged import logged
from satrap.rpc import Client, Keys, Origin, Service
from satrap.rpc.keys import create_keys
from satrap.server.migration.coordinator import Migration
from satrap.server.migration.departure import Answer, Departure, next_action, own_address
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.worker.local_rows import local_worker
from waiting import DEADLINE_SECONDS

ANSWERS = st.sampled_from(["leaves", "stays", "silent"])


@given(st.lists(ANSWERS, min_size=1, max_size=6))
def test_one_of_those_that_leave_moves_the_buckets_of_all(states: list[Answer]) -> None:
    """Each asks at the same time. `silent` servers ask nothing."""
    answers = {f"tcp://s{number}:1": state for number, state in enumerate(states)}
    addresses = list(answers)
    actions = [
        next_action(addresses, own, {each: answers[each] for each in addresses if each != own})
        for own in addresses
        if answers[own] == "leaves"
    ]
    if "stays" not in states:
        assert set(actions) <= {"end"}, "nothing can take the rows"
    elif "silent" in states:
        assert set(actions) <= {"wait"}
    else:
        assert actions == ["move", *["wait"] * (len(actions) - 1)][: len(actions)]


@given(st.lists(ANSWERS, min_size=1, max_size=6), st.data())
def test_what_a_server_that_leaves_does_next(states: list[Answer], data: st.DataObject) -> None:
    """It moves the buckets if it is the first that leaves, all others answer, and one of them stays."""
    addresses = [f"tcp://s{number}:1" for number in range(len(states) + 1)]
    own = data.draw(st.sampled_from(addresses))
    others = [each for each in addresses if each != own]
    answers = dict(zip(others, states, strict=True))
    before = [answers[each] for each in addresses[: addresses.index(own)]]
    wanted = "wait" if "silent" in states or "leaves" in before else "move"
    assert next_action(addresses, own, answers) == (wanted if "stays" in states else "end")
    assert next_action(addresses, None, answers) == "end"


@pytest.mark.parametrize(
    ("status", "address"),
    [
        ({}, None),
        ({"number": -1, "addresses": ["a", "b"]}, None),
        ({"number": 0, "addresses": ["a", "b"]}, "a"),
        ({"number": 1, "addresses": ["a", "b"]}, "b"),
    ],
)
def test_a_servers_own_address(status: dict[str, Any], address: str | None) -> None:
    assert own_address(status) == address


def test_a_server_that_is_in_no_job_ends_at_once() -> None:
    assert next_action([], None, {}) == "end"
    ended = threading.Event()
    Departure(Server(num_threads=1), None, 100.0).start(ended.set)
    assert ended.wait(DEADLINE_SECONDS)


@contextmanager
def running(num_servers: int) -> Iterator[list[tuple[Server, Service]]]:
    with ExitStack() as stack:
        servers = [Server(num_threads=1) for _ in range(num_servers)]
        yield [(each, stack.enter_context(Service(each, ServerCalls, ANYWHERE))) for each in servers]


@pytest.mark.parametrize("leaving", [(1,), (0, 2), (2, 0), (0, 1, 2)])
def test_servers_that_leave_at_the_same_time(leaving: tuple[int, ...], rng: np.random.Generator) -> None:
    local = local_worker(features(), num_threads=1)
    with running(3) as servers, sharded_worker(features(), [each.address for _, each in servers]) as worker:
        step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], 1)
        ended = {number: threading.Event() for number in leaving}
        departures = {number: Departure(servers[number][0], None, DEADLINE_SECONDS) for number in leaving}
        for server in leaving:
            servers[server][0].leaves = True
        start = time.monotonic()
        for number, departure in departures.items():
            departure.start(ended[number].set)
        step = 1
        while not all(each.is_set() for each in ended.values()):
            step += 1
            step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], step)
        assert time.monotonic() - start < DEADLINE_SECONDS
        step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], step + 1)
        assert contents(worker) == contents(local)
        for number, departure in departures.items():
            status = servers[number][0].status(Origin())
            if len(leaving) < 3:
                assert status["buckets"]["owned"] == 0 and status["number"] == -1
                assert "asked to stop" in status["not_ready"]
                with logged("satrap.server", "this server's buckets have moved", logging.INFO):
                    departure.report()
            else:
                with logged("satrap.server", f"ends with {status['buckets']['owned']} buckets", logging.WARNING):
                    departure.report()


def test_without_the_answer_of_a_server_it_waits_until_its_time_is_over(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("satrap.server.migration.coordinator._ASK_SECONDS", 0.1)
    local = local_worker(features(), num_threads=1)
    with running(3) as servers, sharded_worker(features(), [each.address for _, each in servers]) as worker:
        step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], 1)
        servers[2][1].close()
        ended, departure = threading.Event(), Departure(servers[0][0], None, 1.0)
        departure.start(ended.set)
        assert ended.wait(DEADLINE_SECONDS)
        owned = servers[0][0].status(Origin())["buckets"]["owned"]
        assert owned > 0
        with logged("satrap.server", f"ends with {owned} buckets", logging.WARNING):
            departure.report()


def test_a_process_moves_its_buckets_at_sigterm_and_its_successor_gets_some(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """With keys, as in a cluster; the client's are beside the server's."""
    server_key, client_key = create_keys(tmp_path / "keys")
    keys: dict[str, Any] = {"keys": Keys.read(client_key)}
    options = ("--keys", str(server_key), "--on-stop", "move", "--grace", str(DEADLINE_SECONDS))
    local = local_worker(features(), num_threads=1)
    with server_processes(tmp_path, 2, "tcp://127.0.0.1:0", options) as servers:
        addresses = [each.address for each in servers]
        with sharded_worker(features(), addresses, **keys) as worker:
            step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], 1)
            os.kill(servers[1].pid, signal.SIGTERM)
            servers[1].wait()
            step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], 2)
            assert worker.servers.addresses == (addresses[0],)
            servers[1].shared.unlink()  # a pod's memory ends with it
            servers[1].restart()
            Migration(addresses, addresses, **keys).run()
            step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], 3)
            assert worker.servers.addresses == tuple(addresses)
            assert contents(worker) == contents(local)
            with Client(ServerCalls, addresses[1], **keys) as client:
                assert client.call.status(Origin())["buckets"]["owned"] > 0
        # Both leave when the job ends: each finds that no server stays.


def test_rows_that_cannot_move_in_time_stay_in_shared_memory(tmp_path: Path, rng: np.random.Generator) -> None:
    """The next process with the file continues with them, as after Ctrl-C or with `--on-stop keep`."""
    local = local_worker(features(), num_threads=1)
    with (
        server_processes(tmp_path, 2, ANYWHERE, ("--on-stop", "move", "--grace", "0.5")) as servers,
        sharded_worker(features(), [each.address for each in servers]) as worker,
    ):
        for step, number in ((1, signal.SIGINT), (2, signal.SIGTERM)):
            step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], step)
            if number == signal.SIGTERM:
                servers[0].stop()  # it does not answer, so nothing can move
            os.kill(servers[1].pid, number)
            servers[1].wait()
            servers[0].resume()
            servers[1].restart()
        step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], 3)
        assert contents(worker) == contents(local)
