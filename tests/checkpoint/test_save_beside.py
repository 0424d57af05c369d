"""Checkpoints that a thread writes while training continues (`save(wait=False)`): each is the state of its step bit for
bit, also after kill -9; a failure is raised by the next call; the next save waits."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint_job import Job, names, run_killed, same, uninterrupted
from child_processes import child_process
from cluster import ANYWHERE, running_servers
from disk import small_disk
from satrap import Deployment
from satrap.checkpoint.checkpoint import Checkpoint
from satrap.errors import CheckpointError, SnapshotError
from satrap.rpc import Service
from satrap.server import state
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.storage.folder import Writer
from satrap.table.snapshot import writer
from satrap.table.snapshot.directory import ChecksumFile
from waiting import DEADLINE_SECONDS, wait_until


class Held:
    """Writers of data files, which wait until they may begin."""

    def __init__(self) -> None:
        self.may_write, self.is_writing = threading.Event(), threading.Event()


@contextmanager
def held_writers() -> Iterator[Held]:
    """Hold every writer before its first byte."""
    held = Held()

    class HeldFile(ChecksumFile):
        def __init__(self, file: Writer) -> None:
            held.is_writing.set()
            assert held.may_write.wait(DEADLINE_SECONDS)
            super().__init__(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "ChecksumFile", HeldFile)
        try:
            yield held
        finally:
            held.may_write.set()


@contextmanager
def rows_at(num_servers: int) -> Iterator[dict[str, Any]]:
    """Yield the options of a Job whose rows are in this process, or on servers."""
    with ExitStack() as stack:
        if num_servers:
            services = stack.enter_context(running_servers(num_servers))
            yield {"rows": {"deployment": Deployment([each.address for each in services])}}
        else:
            yield {}


@pytest.mark.parametrize("num_servers", [0, 1, 3])
@pytest.mark.parametrize("full_every", [1, 3])
def test_a_checkpoint_holds_its_step_whatever_is_trained_meanwhile(
    tmp_path: Path, num_servers: int, full_every: int
) -> None:
    states: dict[int, dict[str, Any]] = {}
    with rows_at(num_servers) as rows:
        job = Job(str(tmp_path), 24, keep=100, full_every=full_every, **rows)
        with held_writers() as held:
            for number, batch in enumerate(job.embeddings.stream(job.source), start=1):
                job.step(batch)
                if number % 4 == 0:
                    assert job.run.best is None  # the save before is complete
                    held.may_write.clear()
                    states[number] = job.state()
                assert job.run.save(every_steps=4, wait=False) == (number % 4 == 0)
                if number % 4 == 2:  # two steps later
                    held.may_write.set()
            held.may_write.set()
        job.run.save()
        job.embeddings.close()
    assert len(names(tmp_path)) == 7
    again = Job(str(tmp_path), 24)
    for name in names(tmp_path):
        assert again.run.resume(name)
        same(again.state(), states[again.embeddings.step])


def test_the_bits_of_training_do_not_depend_on_the_saves(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), 20, full_every=3, save_memory=1)  # each step waits for the writer
    job.train(every_steps=3, wait=False)
    same(job.state(), uninterrupted(tmp_path, 20))
    job.embeddings.close()


@pytest.mark.draw(1)
@pytest.mark.parametrize("num_servers", [0, 2])
def test_a_run_killed_while_it_saves_beside_training_ends_with_the_same_bits(tmp_path: Path, num_servers: int) -> None:
    with running_servers(num_servers) as services:
        rows = json.dumps({"servers": [each.address for each in services]} if services else {})
        found = run_killed("checkpoint_job.py", tmp_path / "run", 40, rows, "beside")
    same(found, uninterrupted(tmp_path, 40))


@pytest.mark.parametrize("is_replaced_at_once", [False, True])
def test_servers_let_go_of_the_cut_of_a_killed_trainer(
    tmp_path: Path, is_replaced_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is killed while the servers write. Then nothing calls them, or its successor does."""
    monkeypatch.setattr(state, "CUT_SECONDS", 5.0)  # for a cut that the trainer took and did not yet have written
    with ExitStack() as stack:
        servers = [Server(num_threads=2, checkpoints=["/"]) for _ in range(2)]
        addresses = [stack.enter_context(Service(each, ServerCalls, ANYWHERE)).address for each in servers]
        held = stack.enter_context(held_writers())

        def old_bytes() -> list[int]:
            states = [each._fence.state for each in servers]
            return [0 if state is None else state.engine.cut_figures()["bytes"] for state in states]

        published = killed_in_a_save(tmp_path / "run", addresses, held, old_bytes)
        if is_replaced_at_once:
            stack.callback((timer := threading.Timer(0.05, held.may_write.set)).join)
            timer.start()
        else:
            held.may_write.set()
            wait_until(lambda: not any(old_bytes()))
        job = Job(str(tmp_path / "run"), 12, rows={"deployment": Deployment(addresses, take_over=True)})
        assert job.run.resume()
        assert old_bytes() == [0, 0] and published[-1].endswith(f"-step-{job.embeddings.step}")
        same(job.state(), uninterrupted(tmp_path, job.embeddings.step))
        job.train(every_steps=1, wait=False)
        job.embeddings.close()
        assert old_bytes() == [0, 0]
    found = names(tmp_path / "run")
    assert found[-1].endswith("-step-12") and not any(each.startswith(".") for each in found)


def killed_in_a_save(run: Path, addresses: list[str], held: Held, old_bytes: Callable[[], list[int]]) -> list[str]:
    """Run a trainer that saves beside training after each step, and kill it while servers keep old rows for its third
    save or a later one, of which they have written nothing; return its checkpoints."""
    command = [sys.executable, str(Path(__file__).parents[1] / "support/checkpoint_job.py"), str(run), "12"]
    command += [json.dumps({"servers": addresses}), "beside"]
    held.may_write.set()
    with child_process(command, 2 * DEADLINE_SECONDS, stdout=subprocess.PIPE, text=True) as trainer:
        assert [trainer.stdout.readline() for _ in range(3)] == ["1\n", "2\n", "3\n"]
        held.may_write.clear()
        held.is_writing.clear()
        wait_until(lambda: held.is_writing.is_set() and any(old_bytes()))
        published = [name for name in names(run) if not name.startswith(".")]
    assert [each for each in names(run) if not each.startswith(".")] == published and published
    return published


def test_the_next_save_waits_for_the_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_writers() as held:
        wait = Checkpoint._wait_for_running
        waited: list[Future[None]] = []

        def release(run: Checkpoint) -> None:
            if run._running is not None:
                if not waited:
                    assert not run._running.done()
                    held.may_write.set()
                waited.append(run._running)
            wait(run)

        monkeypatch.setattr(Checkpoint, "_wait_for_running", release)
        job = Job(str(tmp_path), 4)
        for batch in job.embeddings.stream(job.source):
            job.step(batch)
            job.run.save(every_steps=2, wait=False)
        assert len(waited) == 1 and waited[0].done(), "the second save waited for the first"
        job.embeddings.close()
        assert len(waited) == 2, "the end waits for the second"
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["000001-step-2", "000002-step-4"]


@pytest.mark.parametrize("num_servers", [0, 2])
def test_a_full_disk_is_reported_by_the_next_call(tmp_path: Path, num_servers: int) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as disk, rows_at(num_servers) as rows:
        job = Job(str(disk.path / "run"), 7, **rows)
        stream = job.embeddings.stream(job.source)

        def step() -> None:
            job.step(next(stream))

        step()
        assert job.run.save()
        step()
        disk.fill(leaving=0)
        assert job.run.save(wait=False), "it has begun"
        step()
        with pytest.raises((SnapshotError, CheckpointError), match="No space left on device"):
            job.run.save(wait=False)
        disk.make_room()
        assert names(disk.path / "run") == ["000001-step-1"]
        step()
        state = job.state()
        assert job.run.save(wait=False), "the error was raised once"
        step()
        job.embeddings.close()
        again = Job(str(disk.path / "run"), 7)
        assert again.run.resume()
        same(again.state(), state)


def test_a_save_that_is_not_due_reports_a_failure_too(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), 5)
    stream = job.embeddings.stream(job.source)
    job.step(next(stream))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "ChecksumFile", None)
        assert job.run.save(wait=False)
        assert job.run._running is not None
        job.run._running.exception(DEADLINE_SECONDS)
    with pytest.raises(TypeError):
        job.run.save(every_steps=1000)
    assert not job.run.save(every_steps=1000)
    assert job.run.save()


def test_close_raises_the_failure_of_the_last_save(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), 5)
    job.step(next(job.embeddings.stream(job.source)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "ChecksumFile", None)
        assert job.run.save(wait=False)
        with pytest.raises(TypeError):
            job.embeddings.close()


def test_resume_waits_for_the_save(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 9)
    stream = job.embeddings.stream(job.source)
    for _ in range(3):
        job.step(next(stream))
    state = job.state()
    with held_writers() as held:
        job.run.save(wait=False)
        job.step(next(stream))
        threading.Timer(0.05, held.may_write.set).start()
        assert job.run.resume()
    same(job.state(), state)


def test_the_tables_are_restored_after_the_save_that_reads_them(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), 9)
    stream = job.embeddings.stream(job.source)
    job.step(next(stream))
    job.run.save()
    before = job.state()
    job.step(next(stream))
    folders = {
        name: [tmp_path / "run" / names(tmp_path / "run")[0] / "tables" / str(i)]
        for i, name in enumerate(job.embeddings.tables)
    }
    with held_writers() as held:
        job.run.save(wait=False)
        stream.close()
        threading.Timer(0.05, held.may_write.set).start()
        job.embeddings.tables.restore(folders)
    values = job.embeddings.tables["user"].read(np.arange(200, dtype=np.uint64)).values
    np.testing.assert_array_equal(values, before["user.values"])
    job.embeddings.close()
    assert "000002-step-2" in names(tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({}, {"wait": 1}, "wait is 1; expected True or False"),
        ({"save_memory": 0}, {}, "save_memory is 0; expected an integer, 1 or more"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: Any, call: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Job(str(tmp_path), 3, **options).run.save(**call)
