"""A server that starts without a job while others train: it takes a share of their buckets. The oracle is a local
worker that gets the same batches."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rpc_parts  # noqa: F401  starts a thread that pyzmq keeps
from bag_oracle import draw_bags
from cluster import ANYWHERE, features, server_processes, sharded_worker, step_both
from contents import contents
from satrap.rpc import Client, Keys, Origin, Service
from satrap.rpc.keys import create_keys
from satrap.server.migration.arrival import Arrival, next_action
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.worker.local_rows import local_worker
from waiting import wait_until

MEMBER = {"number": 0, "addresses": ["a", "b"], "leaves": False}


@pytest.mark.parametrize(
    ("own", "other", "action"),
    [
        ({}, {}, "wait"),
        ({}, {"leaves": False}, "wait"),
        ({}, MEMBER | {"number": -1}, "wait"),
        ({}, MEMBER | {"leaves": True}, "wait"),
        ({}, MEMBER, "join"),
        ({"number": -1}, MEMBER, "join"),
        ({"number": 2}, MEMBER, "end"),
        ({"number": 0}, {}, "end"),
        ({}, MEMBER | {"number": 1}, "join"),
        ({}, MEMBER | {"addresses": ["a", "own"]}, "end"),
    ],
)
def test_the_next_action(own: dict[str, Any], other: dict[str, Any], action: str) -> None:
    assert next_action("own", own, other) == action


def is_ready(client: Client[ServerCalls]) -> bool:
    return not client.call.status(Origin())["not_ready"]


def test_servers_that_arrive_at_the_same_time(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each coordinates, so they interrupt each other until the last one has its share."""
    monkeypatch.setattr("satrap.server.migration.arrival._PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("satrap.server.migration.arrival._DEADLINE_SECONDS", 1.0)
    local = local_worker(features(), num_threads=1)
    servers = [Server(num_threads=1) for _ in range(3)]
    with ExitStack() as stack:
        addresses = [stack.enter_context(Service(each, ServerCalls, ANYWHERE)).address for each in servers]
        worker = stack.enter_context(sharded_worker(features(), addresses[:1]))
        step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], 1)
        arrivals = [Arrival(servers[number].status, addresses[number], addresses, None) for number in (1, 2)]
        for arrival in arrivals:
            arrival.start()
        step = 1

        def have_joined() -> bool:
            nonlocal step
            step += 1
            step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], step)
            return all(each.status(Origin()).get("number", -1) >= 0 for each in servers)

        wait_until(have_joined)
        for arrival in arrivals:
            arrival.close()
            arrival.join(60.0)
        step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], step + 1)
        assert contents(worker) == contents(local)


def test_a_rolling_restart_loses_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    """With keys, as in a cluster. Every server in turn leaves, and returns without its rows."""
    server_key, client_key = create_keys(tmp_path / "keys")
    keys: dict[str, Any] = {"keys": Keys.read(client_key)}
    options = ["--keys", str(server_key), "--on-stop", "move"]
    local = local_worker(features(), num_threads=1)
    with server_processes(tmp_path, 2, "tcp://127.0.0.1:0", options) as servers:
        addresses = [each.address for each in servers]
        options += ["--join", *addresses]
        with sharded_worker(features(), addresses, **keys) as worker:
            for step, server in enumerate(servers, start=1):
                step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], step)
                os.kill(server.pid, signal.SIGTERM)
                server.wait()
                server.shared.unlink()  # a pod's memory ends with it
                server.restart()
                with Client(ServerCalls, server.address, **keys) as client:
                    wait_until(partial(is_ready, client))
                    assert client.call.status(Origin())["buckets"]["owned"] > 0
            step_both([local, worker], rng, [draw_bags(rng, local.features, 60)], 3)
            assert sorted(worker.servers.addresses) == sorted(addresses)
            assert contents(worker) == contents(local)
