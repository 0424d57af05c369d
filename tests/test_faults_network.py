"""A network between trainer and servers that is cut, that loses, delays, reorders and doubles packets, and of which one
end is started again unnoticed: every update is applied exactly once, and silence ends in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from bag_oracle import draw_bags
from cluster import Killable, both_step, contents, features, killables, remote
from faults import Fault, at_random, train_until
from network import ADDRESSES, CALM, CUT, SERVER, TRAINER, Network, Weather, network
from satrap.errors import DeadlineError
from satrap.local import LocalWorker
from satrap.remote import RemoteWorker
from satrap.rpc.keys import Keys, make_keys


@contextmanager
def beyond_a_network(
    tmp_path: Path, seed: int, *, deadline: float = 60.0
) -> Iterator[tuple[Network, list[Killable], RemoteWorker]]:
    """This thread at the trainer's end, two servers at the other, with keys."""
    server_key, client_key = make_keys(tmp_path / "keys")
    with network(seed) as wire:
        how = (f"tcp://{ADDRESSES[SERVER]}:0", ("--keys", str(server_key)), lambda: wire.inside(SERVER))
        with killables(tmp_path, 2, *how) as servers, wire.inside(TRAINER):
            addresses, keys = [each.address for each in servers], Keys.read(client_key)
            with remote(features(), addresses, keys=keys, deadline=deadline) as worker:
                yield wire, servers, worker


def test_cuts_of_some_seconds_at_random_moments(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    local = LocalWorker(features(), num_threads=1)
    with beyond_a_network(tmp_path, seed) as (wire, _, worker):
        faults = [
            Fault("cut", lambda: wire.all_weather(CUT), lambda: wire.all_weather(CALM), 3.0),
            Fault("cut to the servers", lambda: wire.weather.__setitem__(TRAINER, CUT), lambda: wire.all_weather(CALM), 2.0),
            Fault("cut to the trainer", lambda: wire.weather.__setitem__(SERVER, CUT), lambda: wire.all_weather(CALM), 2.0),
            Fault("link down", lambda: wire.link(TRAINER, "down"), lambda: wire.link(TRAINER, "up"), 2.0),
        ]
        began=time.monotonic()
        with at_random(faults, seed, num=4) as over:
            n=train_until(over, local, worker, rng)
        print("steps", n, time.monotonic()-began)


def test_a_lossy_network(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """A fifth is lost, packets overtake one another and come twice."""
    local = LocalWorker(features(), num_threads=1)
    with beyond_a_network(tmp_path, seed) as (wire, _, worker):
        wire.all_weather(Weather(drop=0.2, repeat=0.05, delay=(0.03, 0.07)))
        began=time.monotonic()
        for step in range(1, 7):
            both_step([local, worker], rng, [draw_bags(rng, local.features, 20)], step)
        print("6 steps", time.monotonic()-began)
        wire.all_weather(CALM)
        assert contents(worker) == contents(local)


def test_a_cut_beyond_the_deadline(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    local = LocalWorker(features(), num_threads=1)
    with beyond_a_network(tmp_path, seed, deadline=5.0) as (wire, servers, worker):
        both_step([local, worker], rng, [draw_bags(rng, local.features, 30)], 1)
        wire.all_weather(CUT)
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=rf"lookup at ({'|'.join(each.address for each in servers)}): there was"):
            worker.lookup(draw_bags(rng, local.features, 30).inputs(), step=2)
        assert 5.0 <= time.monotonic() - began < 60.0
        wire.all_weather(CALM)
        began = time.monotonic()
        both_step([local, worker], rng, [draw_bags(rng, local.features, 30)], 2)
        print("after", time.monotonic()-began)
        assert contents(worker) == contents(local)


def test_a_server_started_again_behind_a_cut(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """The trainer's connections are half open: nothing told it that their other end is gone."""
    local = LocalWorker(features(), num_threads=1)
    with beyond_a_network(tmp_path, seed) as (wire, servers, worker):
        for step, end in ((1, None), (2, TRAINER), (3, None)):
            both_step([local, worker], rng, [draw_bags(rng, local.features, 30)], step)
            wire.all_weather(CUT)
            for each in servers:
                each.kill()
                each.restart()
            wire.all_weather(CALM)
            began=time.monotonic()
            both_step([local, worker], rng, [draw_bags(rng, local.features, 30)], step+10)
            print("after restart", time.monotonic()-began)
        assert contents(worker) == contents(local)
