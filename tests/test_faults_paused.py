"""Processes that stand still (SIGSTOP) at random moments and go on: servers, trainers, trainers that were replaced."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from cluster import batch, contents, features, killables, one_table, remote
from faults import at_random, stop_and_go, train_until
from satrap.errors import DeadlineError
from satrap.job import Job
from satrap.local import LocalWorker
from satrap.remote import RemoteWorker
from satrap.servers import Servers


def test_servers_stopped_at_random_moments(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    local = LocalWorker(features(), num_threads=1)
    with (
        killables(tmp_path) as servers,
        remote(features(), [each.address for each in servers], retry_seconds=0.1) as worker,
        at_random([stop_and_go(each, 0.8) for each in servers], seed, num=12) as over,
    ):
        train_until(over, local, worker, rng)


def test_a_server_stopped_beyond_the_deadline_is_named_and_goes_on_later(tmp_path: Path) -> None:
    """Within the deadline and no more than some seconds; what was asked is then applied once."""
    local = LocalWorker(one_table(), num_threads=1)
    with killables(tmp_path) as servers:
        job = Job(tables=one_table().tables)
        of_servers = Servers(job, [each.address for each in servers], deadline=5.0, retry_seconds=0.2)
        try:
            worker = RemoteWorker(one_table(), of_servers, num_threads=1)
            looked = [each.lookup(batch(range(30)), step=1) for each in (local, worker)]
            assert looked[1].ticket and looked[0].ticket
            servers[1].stop()
            began = time.monotonic()
            try:
                with pytest.raises(
                    DeadlineError, match=rf"update at {servers[1].address}: there was a connection, but"
                ):
                    worker.update([looked[1].ticket], [np.ones((30, 2), np.float32)], step=1)
                assert 5.0 <= time.monotonic() - began < 60.0
            finally:
                servers[1].go_on()
            worker.update([looked[1].ticket], [np.ones((30, 2), np.float32)], step=1)
            local.update([looked[0].ticket], [np.ones((30, 2), np.float32)], step=1)
            assert contents(worker) == contents(local)
        finally:
            of_servers.close()
