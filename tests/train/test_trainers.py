"""Several trainers under DDP over the same servers: synchronous trainers equal one trainer on the joined batch; stale
trainers apply each update once; and no trainer waits forever, however their numbers of batches differ."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from child_processes import child_process
from cluster import batch, one_table, running_servers, server_processes, sharded_worker
from faults import killed_at_random, random_faults, stop_and_go
from loop import BATCH, batches, tables
from satrap.errors import CapacityError, SnapshotError
from satrap.storage.folder import Folder
from satrap.table import group_cut
from satrap.table.snapshot.writer import write_cut
from trainers import Trainers, alone, require_result, require_same_as_alone
from waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.draw(5)


@pytest.mark.parametrize(("world_size", "overlap"), [(2, False), (3, True)])
def test_synchronous_trainers_equal_one_on_the_joined_batch(
    trainers: Trainers, world_size: int, overlap: bool, tmp_path: Path
) -> None:
    found = trainers.run_on_servers(2, world_size, tmp_path, batches=6 * world_size, overlap=overlap)
    assert all(len(each["seen"]) == 6 for each in found)
    assert len({json.dumps(values) for each in found for values in each["seen"]}) == 6 * world_size, (
        "each batch goes to one trainer"
    )
    require_same_as_alone(found, 6 * world_size)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_frozen_rows(trainers: Trainers, device: str | None, tmp_path: Path) -> None:
    """All items and some users keep their rows, on servers or on the devices of the trainers."""
    frozen = [[2, 3, 5, 7, 11, 13, 29], True]
    found = trainers.run_on_servers(0 if device else 2, 2, tmp_path, batches=8, frozen=frozen, device=device)
    require_same_as_alone(found, 8, features=tables(frozen=(frozen[0], frozen[1])))
    assert found[0]["updated"]["user"] and not found[0]["updated"]["item"]


WAITED_FOR = """
import datetime, sys, time
from pathlib import Path
import torch.distributed as dist
from satrap.train.process_group import ProcessGroup

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
dist.distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=1)  # for groups created from now on
trainers = ProcessGroup()
if rank == 0:
    (folder / "first").touch()
else:
    while not (folder / "first").exists():
        time.sleep(0.1)
    (folder / "second").touch()

def work():
    assert (folder / "second").exists(), "the other trainer may still use what this changes"
    time.sleep(3)

trainers.run_first(work, RuntimeError)
assert trainers.all(True)
dist.destroy_process_group()
"""


def test_run_first_starts_once_all_other_trainers_wait_and_may_outlast_torchs_timeout(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", WAITED_FOR, str(rank), str(tmp_path)] for rank in (0, 1)]
    with ExitStack() as stack:
        trainers = [stack.enter_context(child_process(command)) for command in commands]
        assert [each.wait(DEADLINE_SECONDS) for each in trainers] == [0, 0]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_all_drop_and_uneven_data(trainers: Trainers, tmp_path: Path, ahead: bool) -> None:
    found = trainers.run_on_servers(2, 2, tmp_path, batches=9, dropped=[[None, 2]], ahead=ahead)
    assert [len(each["seen"]) for each in found] == [5, 5] and found[1]["seen"][-1] == [], (
        "one trainer has padding at the end"
    )
    assert [each["lost"] for each in found] == [{"batches/zero_grad": 1}] * 2
    require_same_as_alone(found, 9, without=(2,))


@pytest.mark.parametrize(("staleness", "overlap"), [(0, False), (0, True), (2, True)])
@pytest.mark.parametrize("batches", [1, 2, 4])
def test_trainers_with_fewer_or_no_batches_join_each_step(
    trainers: Trainers, tmp_path: Path, batches: int, staleness: int, overlap: bool
) -> None:
    found = trainers.run_on_servers(2, 3, tmp_path, batches=batches, staleness=staleness, overlap=overlap)
    seen = [[len(values) for values in each["seen"]] for each in found]
    assert [len(each) for each in seen] == [1 + (batches - 1) // 3] * 3 and sum(map(bool, chain(*seen))) == batches
    assert [each["lost"] for each in found] == [{}] * 3
    if staleness == 0:
        require_same_as_alone(found, batches)


def test_uneven_epochs_and_a_save_between(trainers: Trainers, tmp_path: Path) -> None:
    """Both trainers are at the same step in the second epoch, and at the save."""
    found = trainers.run_on_servers(2, 2, tmp_path, batches=5, epochs=2, checkpoint=str(tmp_path / "run"))
    assert [len(each["seen"]) for each in found] == [6, 6]
    assert [each["lost"] for each in found] == [{}, {}]
    require_same_as_alone(found, 5)


@pytest.mark.parametrize("dropped", [[[0, 3]], [[None, 1]]], ids=["the last, one of them", "the first, all"])
@pytest.mark.parametrize("ahead", [False, True])
def test_drops_by_some_trainers(trainers: Trainers, tmp_path: Path, dropped: list[Any], ahead: bool) -> None:
    found = trainers.run_on_servers(2, 2, tmp_path, batches=6, dropped=dropped, ahead=ahead)
    assert all(len(each["seen"]) == 3 for each in found)
    assert all(each["rows"] == found[0]["rows"] for each in found)


def updates_of(steps: list[list[list[int]]], num: int) -> dict[str, int]:
    """Return the number of updates of each table, if each step is one update by the batches with these ids."""
    known = {json.dumps(each.values.tolist()): each for each in batches(num)}
    updated = {"user": 0, "item": 0}
    for step in steps:
        ids = [np.split(known[json.dumps(values)].values, [BATCH]) for values in step]
        for table, each in zip(updated, zip(*ids, strict=True), strict=True):
            updated[table] += len(np.unique(np.concatenate(each)))
    return updated


def test_a_dropped_micro_batch_leaves_the_others_of_its_step(trainers: Trainers, tmp_path: Path) -> None:
    found = trainers.run_on_servers(2, 2, tmp_path, batches=8, accumulate=2, dropped=[[None, 1]])
    first, *second = [[each["seen"][k] for each in found] for k in (1, 2, 3)]
    assert found[0]["updated"] == updates_of([first, list(chain(*second))], 8)


def test_stale_trainers_apply_each_update_once(trainers: Trainers, tmp_path: Path) -> None:
    found = trainers.run_on_servers(2, 2, tmp_path, batches=20, staleness=3, overlap=True)
    assert found[0]["updated"] == updates_of([[values] for each in found for values in each["seen"]], 20)
    assert all(each["dense"] == found[0]["dense"] for each in found)


@pytest.mark.parametrize("beside", [False, True])
def test_trainers_resume_together_on_other_servers(trainers: Trainers, tmp_path: Path, beside: bool) -> None:
    """The results are equal bit for bit: each trainer continues at its own position, all at the same step."""
    folder = tmp_path / "run"
    whole = trainers.run_on_servers(2, 2, tmp_path, batches=16)
    options = {"batches": 16, "checkpoint": str(folder), "beside": beside}
    first = trainers.run_on_servers(2, 2, tmp_path, until=6, **options)
    rest = trainers.run_on_servers(3, 2, tmp_path, **options)
    assert not any(each["resumed"] for each in first) and all(each["resumed"] for each in rest)
    for before, after, once in zip(first, rest, whole, strict=True):
        assert before["seen"][:4] + after["seen"] == once["seen"]
        assert (after["dense"], after["rows"]) == (once["dense"], once["rows"])


def test_all_trainers_report_a_save_beside_training_that_failed(
    trainers: Trainers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 4 on the servers; at step 6, all trainers learn it, and none is saved. The next saves are whole."""

    def write(cut: Any, folder: Folder, *options: Any) -> Any:
        if "-step-4/" in str(folder):
            raise SnapshotError("the disk is on fire")
        return write_cut(cut, folder, *options)

    monkeypatch.setattr(group_cut, "write_cut", write)
    options = {"checkpoint": str(tmp_path / "run"), "beside": True, "continues": True}
    found = trainers.run_on_servers(2, 2, tmp_path, batches=20, **options)
    ((first, cause),), ((other, hint),) = (each["failed"] for each in found)
    assert (first, other) == (6, 6) and "the disk is on fire" in cause
    assert hint == "trainer 0 failed; its own error says why"
    saved = [each.parent.name for each in sorted((tmp_path / "run").glob("*/checkpoint.json"))]
    assert saved[-2:] == ["000004-step-10", "000005-step-10"] and not any(name.endswith("-step-4") for name in saved)
    rest = trainers.run_on_servers(1, 2, tmp_path, batches=20, checkpoint=str(tmp_path / "run"))
    assert all(each["resumed"] and each["seen"] == [] for each in rest)
    assert [(each["dense"], each["rows"]) for each in rest] == [(each["dense"], each["rows"]) for each in found]


def test_killed_servers_under_synchronous_trainers(trainers: Trainers, tmp_path: Path, seed: int) -> None:
    """Half of a step may be waiting on the server, and half of it may be applied."""
    with killed_at_random(tmp_path, seed, 8) as (servers, _):
        found = trainers.run(servers, 2, tmp_path, batches=600)
    require_result(found[0], *alone(found, 600), tolerance=10)


def test_synchronous_trainers_and_suspended_servers(trainers: Trainers, tmp_path: Path, seed: int) -> None:
    """Processes are suspended at random moments, for a while; the others wait."""
    with server_processes(tmp_path) as servers:

        def stop_some(processes: list[subprocess.Popen[str]]) -> None:
            faults = [*(stop_and_go(each, 0.8) for each in servers), *(stop_and_go(each, 0.8) for each in processes)]
            with random_faults(faults, seed, num=10) as over:
                assert over.wait(DEADLINE_SECONDS)

        found = trainers.run(servers, 2, tmp_path, stop_some, batches=600)
    require_result(found[0], *alone(found, 600), tolerance=10)


def test_an_overflow_of_one_trainer(trainers: Trainers, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's scaler for several trainers spreads the overflow; with the plain GradScaler it is refused."""
    found = trainers.run_on_servers(1, 2, tmp_path, batches=6, scaler="sharded", overflow=[1, 2])
    assert [each["scale"] for each in found] == [512.0, 512.0]
    assert [each["lost"] for each in found] == [{"batches/overflow": 1}] * 2
    assert found[0]["dense"] == found[1]["dense"]
    with (
        running_servers(1) as services,
        Trainers(2) as others,
        pytest.raises(AssertionError, match="the trainer exited"),
    ):
        others.run(services, 2, tmp_path, batches=6, scaler="common", overflow=[1, 2])
    assert "StreamError: 1 of 2 trainers found an overflow" in capfd.readouterr().err


def test_rows_of_another_trainers_open_step_are_not_evicted() -> None:
    """Trainer 0 is still at step 1, trainer 1 at step 5: the oldest step counts."""
    full = one_table(capacity=8, num_buckets=1)
    with running_servers(1) as services:
        addresses = [services[0].address]
        with sharded_worker(full, addresses) as first, sharded_worker(full, addresses, trainer=1, attempt=1) as second:
            mine = first.lookup(batch(range(4)), step=1)
            theirs = second.lookup(batch(range(4, 8)), step=5)
            with pytest.raises(CapacityError, match="all of them are in use by open steps"):
                second.lookup(batch([9]), step=6)
            first.update([mine.ticket] if mine.ticket else [], [mine.block], step=1)
            second.update([theirs.ticket] if theirs.ticket else [], [theirs.block], step=5)
            assert first.tables["t"].stats()["not_applied_absent"] == 0
            assert first.tables["t"].stats()["updated"] == 8
