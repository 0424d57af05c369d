"""A network between trainer and servers that is cut, that loses, delays, reorders and duplicates packets, and one end
of which restarts without a sign: every update is applied exactly once, and silence ends in time.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bag_oracle import draw_bags
from cluster import features, step_both
from contents import contents
from faults import BAD, Fault, networked_cluster, random_faults, train_both_until
from network import CALM, CUT, TRAINER, Weather
from satrap.errors import DeadlineError
from satrap.worker.local_rows import local_worker
from waiting import DEADLINE_SECONDS


def test_cuts_of_some_seconds_at_random_moments(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """In both directions, in one, and such that the trainer's system notices."""
    local = local_worker(features(), num_threads=1)
    with networked_cluster(tmp_path, seed) as (wire, _, worker):

        def cut(name: str, to_servers: Weather, to_trainer: Weather) -> Fault:
            return Fault(name, lambda: wire.be(to_servers, to_trainer), lambda: wire.be(CALM, CALM), most_seconds=2.0)

        faults = [cut("cut", CUT, CUT), cut("cut to the servers", CUT, CALM), cut("cut to the trainer", CALM, CUT)]
        faults.append(Fault("link", lambda: wire.link(TRAINER, "down"), lambda: wire.link(TRAINER, "up"), 2.0))
        with random_faults(faults, seed, num=5) as over:
            train_both_until(over, local, worker, rng)


def test_a_network_that_loses_delays_and_duplicates(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """A fifth of the packets is lost, and packets overtake one another."""
    local = local_worker(features(), num_threads=1)
    with networked_cluster(tmp_path, seed) as (wire, _, worker):
        wire.be(BAD, BAD)
        for step in range(1, 5):
            step_both([local, worker], rng, [draw_bags(rng, local.features, 20)], step)
        wire.be(CALM, CALM)
        assert contents(worker) == contents(local)


def test_a_cut_beyond_the_deadline_is_reported_and_training_continues(
    tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    local = local_worker(features(), num_threads=1)
    with networked_cluster(tmp_path, seed, deadline=2.5) as (wire, servers, worker):
        step_both([local, worker], rng, [draw_bags(rng, local.features, 30)], 1)
        wire.be(CUT, CUT)
        began, either = time.monotonic(), "|".join(each.address for each in servers)
        late = draw_bags(rng, local.features, 30)  # may still arrive, and create its rows
        with pytest.raises(DeadlineError, match=rf"lookup at ({either}): there was a connection, but no answer"):
            worker.lookup(late.inputs(), step=2)
        assert 2.5 <= time.monotonic() - began < DEADLINE_SECONDS
        wire.be(CALM, CALM)
        reaches(worker)
        step_both([local, worker], rng, [late], 2)
        assert contents(worker) == contents(local)


def reaches(worker: Any) -> None:
    """Return once all servers answer: TCP waits longer and longer before it retries."""
    last = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            worker.servers.require_reachable()
            return
        except DeadlineError:
            assert time.monotonic() < last


def test_servers_restarted_behind_a_cut(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """The trainer's connections are half open: it got no sign that the other ends were closed."""
    local = local_worker(features(), num_threads=1)
    with networked_cluster(tmp_path, seed) as (wire, servers, worker):
        for step in range(1, 4):
            step_both([local, worker], rng, [draw_bags(rng, local.features, 30)], step)
            if step < 3:
                wire.be(CUT, CUT)
                for each in servers:
                    each.kill()
                    each.restart()
                wire.be(CALM, CALM)
        assert contents(worker) == contents(local)
