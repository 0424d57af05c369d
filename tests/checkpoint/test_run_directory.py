"""The folder of a run with foreign files and other runs in it: nothing foreign is changed, and no checkpoint becomes
unusable."""

import fcntl
import os
import re
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import satrap.checkpoint.run_directory
import satrap.run_context
from checkpoint_job import Job, names, same
from logged import logged
from satrap import Checkpoint, Embeddings, Parquet, Table
from satrap.checkpoint.run_directory import RunDirectory
from satrap.checkpoint.run_owner import OWNER
from satrap.errors import CheckpointError
from satrap.launch.run_loop import lock_run_folder
from satrap.run_context import RunContext
from satrap.storage.folder import Folder


def test_foreign_folders_are_neither_read_nor_removed(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 2, keep=1)
    job.train()
    foreign = ["best-step-1", "000001-step-1.bak", "backup-of-step-1", ".my-step-notes"]
    for name in foreign:
        shutil.copytree(tmp_path / "000002-step-2", tmp_path / name)
    again = Job(str(tmp_path), 4, keep=1)
    assert again.run.resume()
    again.train()
    assert names(tmp_path) == sorted([*foreign, "000004-step-4"])


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".0123abcd.000007-step-9").mkdir(parents=True)
    Job(str(tmp_path), 1).train()
    assert names(tmp_path) == ["000001-step-1"]


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "999998-step-0").mkdir()  # torn: its number is not reused
    with logged("satrap.checkpoint", match="999998-step-0"):
        Job(str(tmp_path), 1).train()
    (tmp_path / "999998-step-0").rmdir()
    job = Job(str(tmp_path), 3, keep=9)
    assert job.run.resume()
    job.train()
    assert names(tmp_path) == ["1000000-step-2", "1000001-step-3", "999999-step-1"]
    assert Job(str(tmp_path), 3).run.resume()


def test_a_removed_parent_makes_the_next_save_full(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 2, full_every=5)
    job.train()
    for name in names(tmp_path):
        shutil.rmtree(tmp_path / name)
    with logged("satrap.checkpoint", "000002-step-2 is gone from"):
        job.run.save()
    assert Job(str(tmp_path), 2).run.resume()


def test_another_runs_checkpoints_are_not_removed(tmp_path: Path) -> None:
    Job(str(tmp_path), 3).train()
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds 000003-step-3, which this run neither saved nor resumed: call"):
        Job(str(tmp_path), 2).train()
    with pytest.raises(CheckpointError, match="neither saved nor resumed"):  # at the first possible save
        Job(str(tmp_path), 2).train(every_steps=10**6)
    assert names(tmp_path) == before


def test_a_relative_path_in_a_copied_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray copies the script's folder to the nodes, and removes it with the run."""
    job = Job(str(tmp_path), 1)
    parts = job.model, job.optimizer, job.embeddings
    place = RunContext(rank=0, world_size=1, launch=1, servers=("tcp://127.0.0.1:1",), is_copy=True)
    monkeypatch.setattr(satrap.run_context, "_here", place)
    with pytest.raises(CheckpointError, match="path is 'run', but this script runs in a temporary copy of its folder"):
        Checkpoint("run", *parts)
    Checkpoint(tmp_path / "run", *parts)
    Checkpoint("memory://run", *parts)


def test_a_damaged_older_checkpoint_does_not_prevent_saves(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 3, keep=2)
    job.train()
    (tmp_path / "000002-step-2" / "checkpoint.json").write_text("{")
    assert job.run.save()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Job(str(tmp_path / "file" / "run"), 1).train()


def test_a_published_save_has_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if finding the versions to remove fails."""
    job = Job(str(tmp_path), 3, keep=1)
    job.train()
    publish = RunDirectory.publish

    def with_another_owner(home: RunDirectory, folder: Folder, manifest: bytes) -> str:
        name = publish(home, folder, manifest)
        (tmp_path / OWNER).write_text('{"format": "of a later Satrap"}')
        return name

    with monkeypatch.context() as patched, logged("satrap.checkpoint", match="could not be removed: .*cannot be read"):
        patched.setattr(RunDirectory, "publish", with_another_owner)
        assert job.run.save()
    assert names(tmp_path) == ["000003-step-3", "000004-step-3"]
    (tmp_path / OWNER).unlink()
    assert job.run.save() and names(tmp_path) == ["000005-step-3"]


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_reserved_names_are_refused(name: str, tmp_path: Path) -> None:
    job = Job(str(tmp_path), 1)
    with pytest.raises(CheckpointError, match=rf"extra_state has the reserved names \['{name}'\]: use other names"):
        Checkpoint(tmp_path, job.model, job.optimizer, job.embeddings, extra_state={name: job.scheduler})


@pytest.mark.parametrize(
    ("extra_state", "message"),
    [
        ({"epoch": 1}, r"extra_state\['epoch'\] is an int; expected an object with state_dict and load_state_dict"),
        ([1], "extra_state is a list; expected a dict of objects by name"),
    ],
)
def test_extra_state_that_no_save_could_write_is_refused(tmp_path: Path, extra_state: Any, message: str) -> None:
    job = Job(str(tmp_path / "other"), 1)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path / "run", job.model, job.optimizer, job.embeddings, extra_state=extra_state)
    assert not (tmp_path / "run").exists()


def test_a_random_state_that_cannot_be_loaded_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Job(str(tmp_path), 2).train()
    job = Job(str(tmp_path), 2)
    before = job.state()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "set_rng_state", lambda _: (_ for _ in ()).throw(RuntimeError("no such state")))
        with pytest.raises(RuntimeError, match="no such state"):
            job.run.resume()
    same(job.state(), before)
    assert job.run.resume()


# -- files of the source -----------------------------------------------------------------------------------------------


class Clicks:
    """A run over Parquet files in a folder."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.data = Parquet(folder / "data", label="click", batch_size=10, **options)
        self.embeddings = Embeddings({"user": Table("user", dim=2)})
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = self.embeddings.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.run = Checkpoint(folder / "run", self.model, self.optimizer, self.embeddings, self.data)

    def train(self, steps: int) -> list[Any]:
        seen = []
        with self.embeddings.stream(self.data) as stream:
            for batch in islice(stream, steps):
                self.model(batch.embeddings).square().sum().backward()
                self.optimizer.step()
                seen.append(batch.inputs.values.tolist())
        return seen


def write(folder: Path, name: str, first: int) -> None:
    (folder / "data").mkdir(exist_ok=True)
    users = np.arange(first, first + 20)
    pq.write_table(pa.table({"user": users, "click": users % 2}), folder / "data" / name)


@pytest.mark.parametrize("shuffle", [False, True])
def test_files_may_be_added_after_the_others(shuffle: bool, tmp_path: Path) -> None:
    write(tmp_path, "b.parquet", 0)
    job = Clicks(tmp_path, shuffle=shuffle)
    job.train(1)
    job.run.save()
    write(tmp_path, "c.parquet", 20)
    again = Clicks(tmp_path, shuffle=shuffle)
    if shuffle:
        with pytest.raises(CheckpointError, match=r"file 1 \(name, bytes\) is None in the checkpoint and \['c"):
            again.run.resume()
    else:
        assert again.run.resume()
        assert again.train(9) == [list(range(10, 20)), list(range(20, 30)), list(range(30, 40))]


def test_another_file_before_the_position_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "b.parquet", 0)
    job = Clicks(tmp_path)
    job.train(1)
    job.run.save()
    write(tmp_path, "a.parquet", 1000)
    with pytest.raises(
        CheckpointError, match=r"file 0 \(name, bytes\) is \['b\.parquet', \d+\] in the checkpoint and \['a"
    ):
        Clicks(tmp_path).run.resume()


SHUFFLED = {"shuffle": True}
HALF = {"share": (0.0, 0.5)}


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ({}, SHUFFLED, {"shuffle"}),
        (SHUFFLED, {}, {"shuffle"}),
        (SHUFFLED, {"seed": 1}, {"shuffle"}),
        (SHUFFLED, {**SHUFFLED, "seed": 1, "shuffle_blocks": 2}, {"seed", "shuffle_blocks"}),
        ({}, HALF, {"share"}),
        (HALF, {"since": ("user", 5)}, {"share", "since"}),
        (HALF, {**SHUFFLED, **HALF}, {"shuffle"}),
        (HALF, {**SHUFFLED, "seed": 1}, {"seed", "share", "shuffle"}),
        ({"seed": 2, "shuffle_blocks": 2, "num_threads": 0}, {"block_rows": 5, "epochs": 2}, {"block_rows"}),
    ],
)
def test_a_source_read_in_another_order_is_refused_by_the_settings_that_count(
    before: dict[str, Any], after: dict[str, Any], shown: set[str], tmp_path: Path
) -> None:
    """And not by those that the other source has no use for, which the user may never have set."""
    write(tmp_path, "a.parquet", 0)
    job = Clicks(tmp_path, **before)
    job.train(1)
    job.run.save()
    with pytest.raises(CheckpointError, match="of a source that is read differently") as caught:
        Clicks(tmp_path, **after).run.resume()
    assert set(re.findall(r"(\w+) is [^;:]* in the checkpoint and ", str(caught.value))) == shown


def test_the_folder_of_a_live_run_is_refused_at_once(tmp_path: Path) -> None:
    """`satrap run --folder` keeps it locked, so each save there would wait for a minute, and fail."""
    folder = tmp_path / "run"
    with lock_run_folder(folder):
        for name in ("run.json", "status.json"):
            (folder / name).write_text("{}")
        job = Job(str(folder), 2)
        with pytest.raises(CheckpointError, match=r"is the --folder of a live satrap run.* such as .*/checkpoints$"):
            job.train(every_steps=2)
        assert job.embeddings.step == 1, "before there is work that cannot be saved"
        with pytest.raises(CheckpointError, match="is the --folder of a live satrap run"):
            job.run.save()
        assert names(folder) == ["run.json", "status.json"]
        below = Job(str(folder / "checkpoints"), 2)
        below.train()
        assert below.run.resume()
    job = Job(str(folder), 2)
    job.train()
    assert Job(str(folder), 2).run.resume(), "the run was killed, and its files are left"


def test_a_save_blocked_by_another_process_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the other process was suspended in the middle of a save."""
    monkeypatch.setattr(satrap.checkpoint.run_directory, "_LOCK_SECONDS", 0.2)
    job = Job(str(tmp_path), 2)
    job.train()
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"another process has been saving into it for 0\.2 s"):
            job.run.save()
    finally:
        os.close(other)
    assert names(tmp_path) == ["000001-step-1", "000002-step-2"]
    assert job.run.save()
