"""Processes that are suspended (SIGSTOP) at random moments and resumed: servers, trainers, and replaced trainers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from child_processes import child_process
from cluster import batch, features, one_table, running_servers, server_processes, sharded_worker, suspend
from contents import bits, contents
from faults import random_faults, stop_and_go, train_both_until
from loop import batches, job, train_step
from rpc_parts import ANYWHERE, Calls, Served
from satrap import Checkpoint
from satrap.config.job import Job
from satrap.errors import DeadlineError
from satrap.rpc import Service
from satrap.worker import sharded_rows
from satrap.worker.local_rows import local_worker
from satrap.worker.server_group import ServerGroup
from waiting import DEADLINE_SECONDS


def test_servers_stopped_at_random_moments(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    local = local_worker(features(), num_threads=1)
    with (
        server_processes(tmp_path) as servers,
        sharded_worker(features(), [each.address for each in servers], retry_seconds=0.1) as worker,
        random_faults([stop_and_go(each, 0.8) for each in servers], seed, num=8) as over,
    ):
        train_both_until(over, local, worker, rng)


def test_a_server_stopped_beyond_the_deadline_is_named_and_continues_later(tmp_path: Path) -> None:
    """After the deadline and at most some seconds more; the call in flight is then applied once."""
    local = local_worker(one_table(), num_threads=1)
    with server_processes(tmp_path) as servers:
        job = Job(tables=one_table().tables)
        of_servers = ServerGroup(job, [each.address for each in servers], deadline=5.0, retry_seconds=0.2)
        try:
            worker = sharded_rows.sharded_worker(one_table(), of_servers, num_threads=1)
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
                servers[1].resume()
            worker.update([looked[1].ticket], [np.ones((30, 2), np.float32)], step=1)
            local.update([looked[0].ticket], [np.ones((30, 2), np.float32)], step=1)
            assert contents(worker) == contents(local)
        finally:
            of_servers.close()


def test_a_replaced_trainer_changes_nothing_when_it_resumes(tmp_path: Path, rng: np.random.Generator) -> None:
    """Stopped at any moment with updates in flight; it resumes while its successor trains. The oracle continues from
    the same checkpoint without a resumed trainer."""
    with running_servers(2) as services:
        addresses = [service.address for service in services]
        command = [sys.executable, str(Path(__file__).parents[1] / "support/stopped_child.py"), json.dumps(addresses)]

        def wake(step: int) -> None:
            if step == 15:
                old.send_signal(signal.SIGCONT)
            elif step == 40:
                _, told = old.communicate(timeout=DEADLINE_SECONDS)
                assert old.returncode == 1 and "AttemptError" in told and "this process was replaced" in told

        command += [str(tmp_path / "run"), "5"]
        with child_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as old:
            for _ in range(6 + int(rng.integers(30))):
                assert old.stdout.readline()
            threading.Event().wait(rng.uniform(0.0, 0.01))
            suspend(old.pid)
            found = _gone_on(tmp_path / "run", wake, servers=addresses)
    assert found == _gone_on(tmp_path / "run", lambda step: None)


def _gone_on(run: Path, meanwhile: Callable[[int], None], **options: Any) -> list[bytes]:
    """Continue from the checkpoint of step 5 to the end."""
    data = batches(60)
    embeddings, model, optimizer = job(staleness=2, deterministic=True, **options)
    try:
        assert Checkpoint(run, model, optimizer, embeddings, data).resume() and embeddings.step == 5
        with embeddings.stream(data) as stream:
            for each in stream:
                train_step(model, optimizer, each)
                meanwhile(each.step)
        for table in embeddings.tables.values():
            table.check()
        return bits(embeddings, model)
    finally:
        if embeddings.worker.servers is not None:
            embeddings.worker.servers.close()


def test_a_trainer_stopped_for_longer_than_its_deadline_continues(rng: np.random.Generator) -> None:
    """No other process replaced it, and its clock for deadlines stood still: no call is late."""
    program = """if True:
        import sys
        from rpc_parts import Calls
        from satrap.rpc import Client
        with Client(Calls, sys.argv[1], deadline=2.0, retry_seconds=0.5) as client:
            while True:
                print(client.call.add(1), flush=True)
    """
    support = Path(__file__).parents[1] / "support"
    with ExitStack() as stack:
        service = stack.enter_context(Service(Served(), Calls, ANYWHERE))
        command = [sys.executable, "-c", program, service.address]
        child = stack.enter_context(child_process(command, stdout=subprocess.PIPE, cwd=support, text=True))
        for _ in range(2):
            for _ in range(20):
                assert child.stdout.readline(), "a call failed"
            threading.Event().wait(rng.uniform(0.0, 0.01))
            suspend(child.pid)
            threading.Event().wait(3.0)
            child.send_signal(signal.SIGCONT)
            for _ in range(20):
                assert child.stdout.readline(), "a call failed"
        assert child.poll() is None
