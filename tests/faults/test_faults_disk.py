"""File systems that are full: a failed save names the server, path and cause, and affects nothing else; the next save
that has room is whole. Rows that do not fit into shared memory are refused and kill no process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from child_processes import child_process
from cluster import ServerProcess, batch, one_table, running_servers, sharded_worker
from contents import bits, contents
from disk import small_disk
from loop import batches, running, train_step
from runs import JOB, start_run, wait_for_exit
from satrap import Checkpoint, _core
from satrap.errors import SharedMemoryError, SnapshotError
from satrap.worker.local_rows import local_worker
from trainers import CHILD
from waiting import DEADLINE_SECONDS

MEGABYTE, PAGE = 1 << 20, 4096


def test_a_full_disk_for_logs_ends_no_run(tmp_path: Path) -> None:
    said = tmp_path / "said"
    job = tmp_path / "job.py"
    job.write_text(
        f"import pathlib, time\nprint('x' * {4 * MEGABYTE}, flush=True)\n"
        f"while pathlib.Path({str(said)!r}).exists():\n    time.sleep(0.01)\nprint('the end')\n"
    )
    said.touch()
    with small_disk(tmp_path / "disk", MEGABYTE) as disk:
        (tmp_path / "run").symlink_to(disk.path)
        with start_run(tmp_path, job) as run:
            assert run.stderr is not None and run.stdout is not None
            assert len(run.stdout.readline()) > 4 * MEGABYTE, "the line is shown all the same"
            while "trainer-0.log cannot be written (No space left" not in run.stderr.readline():
                assert run.poll() is None
            disk.grow(2 * MEGABYTE)
            said.unlink()
            status, out, err = wait_for_exit(run)
        assert (status, out) == (0, "the end\n"), err
        log = (disk.path / "logs" / "trainer-0.log").read_text()
        assert re.search(r"up to \d+ bytes are missing here: they could not be written\nthe end\n$", log)


def test_a_run_that_cannot_be_recorded_does_not_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", MEGABYTE) as disk:
        (tmp_path / "run").symlink_to(disk.path)
        disk.fill(leaving=0)
        with start_run(tmp_path, JOB) as run:
            status, _, err = wait_for_exit(run)
    assert status == 1 and "run.json cannot be written (No space left on device), and no launch can start" in err


@pytest.mark.parametrize("full_every", [1, 3])
def test_a_full_disk_loses_only_the_checkpoints_without_room(full_every: int, tmp_path: Path) -> None:
    """Full from step 6 to step 12. The run continues, and checkpoints resumed meanwhile and afterwards are whole."""
    data = batches(20)
    with running(0) as (embeddings, model, optimizer):
        wanted = {step: now for step, now, _ in _train(embeddings, model, optimizer, data, lambda step: None)}
    with small_disk(tmp_path / "disk", 4 * MEGABYTE) as disk, running(2) as (embeddings, model, optimizer):
        path = disk.path / "run"
        run = Checkpoint(path, model, optimizer, embeddings, data, full_every=full_every)

        def save(step: int) -> None:
            if step == 6:
                disk.fill(leaving=2 * PAGE)
            elif step == 12:
                disk.make_room()
            run.save()

        for step, now, told in _train(embeddings, model, optimizer, data, save):
            assert now == wanted[step]
            if 6 <= step < 12:
                assert re.search(r"ipc://\S+: table '\w+': .*disk/run/\S*/[01]-of-2.*No space left", told)
                assert len(list(path.glob("[!.]*"))) == 2 and not list(path.glob(".*-step-*")), "no part of it is left"
            else:
                assert told == ""
            if step in (10, 12, 20):
                assert _resumed(path, data) == wanted[step if step >= 12 else 4]


def _train(
    embeddings: Any, model: Any, optimizer: Any, data: Any, save: Callable[[int], object]
) -> Iterator[tuple[int, list[bytes], str]]:
    """Yield every second step: its number, the bits there, and how saving failed."""
    for each in embeddings.stream(data):
        train_step(model, optimizer, each)
        if each.step % 2 == 0:
            told = ""
            try:
                save(each.step)
            except SnapshotError as error:
                told = str(error)
            yield each.step, bits(embeddings, model), told


def _resumed(path: Path, data: Any) -> list[bytes]:
    """Return what a new process restores into local rows."""
    with running(0) as (embeddings, model, optimizer):
        assert Checkpoint(path, model, optimizer, embeddings, data).resume()
        return bits(embeddings, model)


def test_one_of_two_servers_has_a_full_disk(tmp_path: Path) -> None:
    """All rows are on the second server, so the first one writes its part. Its version has advanced then, and changes
    since the last snapshot of both are saved nevertheless."""
    wide = one_table(dim=64)
    ids = np.arange(6000, dtype=np.uint64)
    ids = ids[_core.bucket_of(ids, 8) >= 4]
    local = local_worker(wide, num_threads=1)
    with running_servers(2) as services, sharded_worker(wide, [each.address for each in services]) as worker:
        table = worker.tables["t"]
        for step in (1, 2):
            for each in (local, worker):
                looked = each.lookup(batch(ids if step == 2 else ids[:10]), step=step)
                each.update([looked.ticket] if looked.ticket else [], [looked.block], step=step)
            if step == 1:
                first = table.save(tmp_path / "first")
        for since in (None, first):  # the second server writes to a separate file system
            part = tmp_path / str(since) / "1-of-2"
            with small_disk(part, MEGABYTE // 2):
                full = rf"^{services[1].address}: .*{part}/\S*: No space left on device; [^;]*$"
                with pytest.raises(SnapshotError, match=full):
                    table._save(part.parent, since)
        second = table.save_changes(tmp_path / "second", since=first)
        third = table.save_changes(tmp_path / "third", since=second)
        assert first < second < third
        chain = [tmp_path / name for name in ("first", "second", "third")]
        whole = contents(worker, ids)
        assert whole == contents(local, ids)
        worker.tables.restore({"t": chain})
        assert contents(worker, ids) == whole


def test_a_full_disk_is_reported_by_all_trainers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", MEGABYTE) as disk, running_servers(2) as services:
        disk.fill(leaving=2 * PAGE)
        given: dict[str, Any] = {
            "servers": [each.address for each in services],
            "checkpoint": str(disk.path / "run"),
            "until": None,
        }
        given |= {"batches": 8, "epochs": 1, "accumulate": 1, "staleness": 0, "overlap": False, "dropped": []}
        command, pipe = [sys.executable, str(CHILD)], subprocess.PIPE
        with ExitStack() as stack:
            how: dict[str, Any] = {"stdin": pipe, "stderr": pipe, "text": True}
            trainers = [stack.enter_context(child_process(command, 2 * DEADLINE_SECONDS, **how)) for _ in range(2)]
            for rank, each in enumerate(trainers):
                each.stdin.write(json.dumps([rank, 2, str(tmp_path / "meeting"), given]) + "\n")
                each.stdin.flush()
            told = [each.communicate(timeout=2 * DEADLINE_SECONDS)[1] for each in trainers]
        assert all(trainer.returncode for trainer in trainers)  # 1, or torch aborts when its groups are left open
        assert re.search(r"SnapshotError: ipc://\S+: .*No space left on device", told[0])
        assert "CheckpointError: trainer 0 failed; its own error says why" in told[1]


def test_rows_that_do_not_fit_into_shared_memory(tmp_path: Path) -> None:
    """An error and no SIGBUS. Existing rows can be trained, and with room the same batch succeeds."""
    wide = one_table(dim=256)
    local = local_worker(wide, num_threads=1)

    def step(number: int, ids: Any) -> None:
        for each in (worker, local):
            looked = each.lookup(batch(ids), step=number)
            each.update([looked.ticket] if looked.ticket else [], [looked.block], step=number)

    with small_disk(tmp_path / "disk", 40 * MEGABYTE) as disk:
        server = ServerProcess(disk.path / "rows")
        try:
            with sharded_worker(wide, [server.address]) as worker:
                groups = np.arange(2000 * 40, dtype=np.uint64).reshape(40, -1)
                number = 0
                with pytest.raises(
                    SharedMemoryError, match=r"rows.*cannot grow by .*No space left on device"
                ) as caught:
                    while number < len(groups) - 2:
                        step(number + 1, groups[number])
                        number += 1
                assert caught.value.__notes__ == [f"raised by ServerCalls.lookup at {server.address}"]
                assert number > 2
                step(number + 1, groups[1])
                disk.grow(400 * MEGABYTE)
                step(number + 2, groups[number])
                assert contents(worker, groups.reshape(-1)) == contents(local, groups.reshape(-1))
                worker.tables["t"].check()
        finally:
            server.end()
