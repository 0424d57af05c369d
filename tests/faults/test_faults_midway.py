"""Servers that take long for a save or restore, or are killed during one: a working server is waited for, a silent one
is not. A lease on a manifest holds a server at exactly that point: its open() waits.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import batch, one_table, server_processes, sharded_worker
from contents import bits, contents
from loop import batches, job, running, train_step
from satrap import Checkpoint
from satrap.errors import AttemptError, ChangesError, DeadlineError
from satrap.table.snapshot.saved_table import checksum_of
from satrap.worker.local_rows import local_worker
from waiting import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.draw(3)
SILENCE_SECONDS = 3.0


class HeldFile:
    """A file that other processes wait to open until it is let go: this process has a lease on it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        fcntl.fcntl(self._file, fcntl.F_SETSIG, signal.SIGURG)  # what the kernel sends us then; it is ignored
        fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def wait_for_reader(self) -> None:
        wait_until(lambda: fcntl.fcntl(self._file, fcntl.F_GETLEASE) != fcntl.F_WRLCK)

    def let_go(self) -> None:
        """Let the reader that waits, if it lives, and later ones open the file."""
        os.close(self._file)


@contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Run `work` in another thread; its errors are raised here."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        yield
        done.result(DEADLINE_SECONDS)


def step(workers: list[Any], number: int) -> None:
    for each in workers:
        looked = each.lookup(batch(range(10 * number, 10 * number + 30)), step=number)
        each.update([looked.ticket] if looked.ticket else [], [np.ones((30, 2), np.float32)], step=number)


def test_a_long_save_and_servers_killed_during_one(tmp_path: Path) -> None:
    """1. A server that is held for twice the deadline is waited for. 2. One that is killed is named. 3. One that is
    killed and restarted saves again."""
    local, manifest = local_worker(one_table(), num_threads=1), tmp_path / "a/1-of-2/manifest.json"
    with (
        server_processes(tmp_path) as servers,
        sharded_worker(
            one_table(), [each.address for each in servers], deadline=SILENCE_SECONDS, retry_seconds=0.5
        ) as worker,
    ):
        table = worker.tables["t"]
        step([local, worker], 1)
        first = table.save(tmp_path / "a")
        held = HeldFile(manifest)

        def late() -> None:
            held.wait_for_reader()
            threading.Event().wait(2 * SILENCE_SECONDS)
            held.let_go()

        with meanwhile(late):  # 1.
            began = time.monotonic()
            assert table.save(tmp_path / "a") > first and time.monotonic() - began > 2 * SILENCE_SECONDS
        held = HeldFile(manifest)

        def killed() -> None:
            held.wait_for_reader()
            servers[1].kill()

        silent = rf"write cut at {servers[1].address}: there was a connection, but nothing was received for 3 s"
        with meanwhile(killed), pytest.raises(DeadlineError, match=silent):  # 2.
            table.save(tmp_path / "a")
        held.let_go()
        servers[1].restart()
        step([local, worker], 2)
        held = HeldFile(manifest)

        def replaced() -> None:
            killed()
            held.let_go()
            servers[1].restart()

        with meanwhile(replaced):  # 3.
            table.save(tmp_path / "a")
        step([local, worker], 3)
        assert contents(worker) == contents(local)
        worker.tables.restore({"t": [tmp_path / "a"]})
        other = local_worker(one_table(), num_threads=1)
        for number in (1, 2):
            step([other], number)
        assert contents(worker) == contents(other)


def test_a_server_killed_before_its_rows_are_replaced(tmp_path: Path) -> None:
    """During the verification of the checkpoint: all servers keep their rows."""
    with (
        server_processes(tmp_path) as servers,
        sharded_worker(
            one_table(), [each.address for each in servers], deadline=SILENCE_SECONDS, retry_seconds=0.5
        ) as worker,
    ):
        step([worker], 1)
        worker.tables["t"].save(tmp_path / "a")
        saved = contents(worker)
        step([worker], 2)
        before = contents(worker)
        folder, seen = str(tmp_path / "a"), checksum_of(tmp_path / "a")
        held = HeldFile(tmp_path / "a/1-of-2/manifest.json")  # after the trainer has read it, before the servers do

        def killed() -> None:
            held.wait_for_reader()
            servers[1].kill()

        with meanwhile(killed), pytest.raises(DeadlineError, match=rf"verify at {servers[1].address}: "):
            worker.servers.call_all("verify", [[folder]], [[seen]], patient=True)
        held.let_go()
        servers[1].restart()
        assert contents(worker) == before
        worker.tables.restore({"t": [tmp_path / "a"]})
        assert contents(worker) == saved


KILLED = """
import os, signal, sys
from satrap.cli.main import main
from satrap.table import table_group
from satrap.table.snapshot import reader
def killed(*_): os.kill(os.getpid(), signal.SIGKILL)
{at} = killed
sys.exit(main())
"""


@pytest.mark.parametrize("at", ["table_group.TableGroup.fill", "reader.Snapshot.fill"])
def test_a_server_killed_while_its_rows_are_replaced(at: str, tmp_path: Path) -> None:
    """The old rows are dropped and the new ones incomplete. If the file of the rows can still be attached, the server
    reports that, and a second restore is whole; else the server starts without rows, and the retried call is."""
    with (
        server_processes(tmp_path, 1) as servers,
        sharded_worker(one_table(), [servers[0].address], retry_seconds=0.5) as worker,
    ):
        step([worker], 1)
        worker.tables["t"].save(tmp_path / "a")
        saved = contents(worker)
        folder, seen = str(tmp_path / "a"), checksum_of(tmp_path / "a")
        program = servers[0].program
        servers[0].kill()
        servers[0].program = [sys.executable, "-c", KILLED.format(at=at)]
        servers[0].restart()
        step([worker], 2)

        def restarted() -> None:
            servers[0].wait()
            servers[0].program = program
            servers[0].restart()

        is_reported = at.startswith("table_group")
        with (
            meanwhile(restarted),
            pytest.raises(AttemptError, match="restarted during or after a restore that started attempt 2")
            if is_reported
            else nullcontext(),
        ):
            worker.servers.attempt += 1
            worker.servers.call_all("restore", [[folder]], [[seen]], patient=True)
        if is_reported:
            worker.tables.restore({"t": [tmp_path / "a"]})
        assert contents(worker) == saved
        step([worker], 2)


def test_a_server_killed_in_a_save_of_changes_after_it_wrote_its_part(tmp_path: Path) -> None:
    """Its answer is lost. The restarted server no longer knows the changes, and reports that."""
    with (
        server_processes(tmp_path) as servers,
        sharded_worker(one_table(), [each.address for each in servers]) as worker,
    ):
        table = worker.tables["t"]
        step([worker], 1)
        since = table.save(tmp_path / "a")
        step([worker], 2)
        table.save_changes(tmp_path / "b", since=since)
        servers[1].kill()
        servers[1].restart()
        with pytest.raises(ChangesError, match="do not know all changes since version 2"):
            table.save_changes(tmp_path / "b", since=since)


@pytest.mark.parametrize(
    ("victim", "at", "every", "full_every", "whole"),
    [(0, 10, 4, 9, [0, 2]), (1, 5, 2, 4, [0, 2, 6])],
    ids=["the first", "the second"],
)
def test_a_restarted_server_saves_whole_tables_instead_of_changes(
    victim: int, at: int, every: int, full_every: int, whole: list[int], tmp_path: Path
) -> None:
    """It has its rows, but not the removed ids, and the servers' versions differ from then on. The run continues to
    save, and its checkpoints are whole."""
    data = batches(20)
    with server_processes(tmp_path) as servers:
        embeddings, model, optimizer = job(servers=[each.address for each in servers])
        assert embeddings.worker.servers is not None
        try:
            run = Checkpoint(tmp_path / "run", model, optimizer, embeddings, data, keep=10, full_every=full_every)
            for each in embeddings.stream(data):
                train_step(model, optimizer, each)
                if each.step == at:
                    servers[victim].kill()
                    servers[victim].restart()
                run.save(every_steps=every)
            wanted = bits(embeddings, model)
        finally:
            embeddings.worker.servers.close()
    files = sorted(tmp_path.glob("run/*/checkpoint.json"))
    parents = [json.loads(each.read_text())["parent"] for each in files]
    assert len(files) == 20 // every
    assert [each and each["name"] for each in parents] == [
        None if number in whole else files[number - 1].parent.name for number in range(len(files))
    ]
    for num_servers in (0, 3):
        with running(num_servers) as (embeddings, model, optimizer):
            assert Checkpoint(tmp_path / "run", model, optimizer, embeddings, data).resume()
            assert bits(embeddings, model) == wanted
