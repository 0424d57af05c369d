"""Opening checkpoints with a Reader: the newest, the best and any other; and scoring requests with one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from checkpoint_job import Job as SavedJob
from contents import bits
from loop import NUM_IDS
from satrap import (
    CSV,
    Checkpoint,
    CheckpointError,
    ConfigError,
    DenseColumn,
    Embeddings,
    IterableSource,
    Parquet,
    Reader,
    SnapshotError,
    StreamError,
    Table,
)
from satrap.checkpoint.run_directory import RunDirectory
from satrap.table.table_group import TableGroup

EVERY = np.arange(NUM_IDS + 5, dtype=np.uint64)  # some of the ids have no row


def test_dense_parameters_of_a_checkpoint(tmp_path: Path) -> None:
    trained_job = SavedJob(str(tmp_path / "run"), 3)
    trained_job.train()
    expected = trained_job.model.state_dict()
    torch.manual_seed(5)
    first = torch.nn.Linear(11, 8)
    model = torch.nn.Sequential(first, torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    assert not torch.equal(first.weight, expected["0.weight"])
    for path in (str(tmp_path / "run"), f"local://{tmp_path}/run"):
        with Reader(path) as reader:
            before = {name: value.clone() for name, value in model.state_dict().items()}
            with pytest.raises(CheckpointError, match=r"is of another model: .*build the same model"):
                reader.load_model(torch.nn.Linear(11, 8))
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            reader.load_model(model)
            assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
            torch.nn.init.zeros_(first.weight)
    with pytest.raises(StreamError, match="is closed"):
        reader.load_model(model)


@pytest.mark.parametrize("at", ["found", "read"])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_it_reads_the_newest_checkpoint_if_the_run_removes_an_older_one(
    at: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed while it is found, or its files are read."""
    path = str(tmp_path) if where == "disk" else f"memory:/{tmp_path}"
    saved = SavedJob(path, 2, keep=1)
    saved.train()
    of, name, times = (RunDirectory, "_entry", 3) if at == "found" else (TableGroup, "restore", 3)
    work, calls = getattr(of, name), []

    def removed_before(*given: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) < times:
            assert saved.run.save()
        return work(*given, **options)

    monkeypatch.setattr(of, name, removed_before)
    with Reader(path) as reader:
        assert len(calls) == times
        assert "000004-step-2" in str(reader)
        np.testing.assert_array_equal(
            reader.lookup("user", EVERY), saved.embeddings.tables["user"].lookup(EVERY, train=False)
        )


def test_a_damaged_checkpoint_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SavedJob(str(tmp_path), 1).train()
    (tmp_path / "000001-step-1/tables/0/manifest.json").write_text("{")
    read, calls = RunDirectory._entry, []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return read(*given)

    monkeypatch.setattr(RunDirectory, "_entry", counted)
    with pytest.raises(SnapshotError):
        Reader(tmp_path)
    assert len(calls) == 1


def saved_by_step(path: str, last: int, best: int) -> dict[int, list[bytes]]:
    """Save a checkpoint in each step, two of three as deltas; return what the rows and the model were in each."""
    saving, contents = SavedJob(path, last, keep=last, full_every=3), {}
    for batch in saving.embeddings.stream(saving.source):
        saving.step(batch)
        saving.run.save(best=batch.step == best)
        contents[batch.step] = bits(saving.embeddings, saving.model)
    return contents


def contents_of(reader: Reader) -> list[bytes]:
    model = torch.nn.Sequential(torch.nn.Linear(11, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    reader.load_model(model)
    return bits(reader, model)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_any_checkpoint_of_a_run_opens_by_its_name_and_by_its_folder(where: str, tmp_path: Path) -> None:
    """Deltas too: what they continue is beside them."""
    path = str(tmp_path / "run") if where == "disk" else f"memory:/{tmp_path}/run"
    expected = saved_by_step(path, last=5, best=2)
    opened: list[tuple[int, Any, str | None]] = [(5, path, None), (2, path, "best")]
    for step in expected:
        name = f"{step:06}-step-{step}"
        if where == "memory":
            name = next(checkpoint for checkpoint in RunDirectory(path).folder.names() if checkpoint.startswith(name))
        opened += [(step, path, name), (step, f"{path}/{name}", None), (step, f"{path}/{name}/", None)]
    for step, folder, named in opened:
        with Reader(folder, name=named) as reader:
            assert reader.step == step and f"/{step:06}-step-{step}" in str(reader)
            assert contents_of(reader) == expected[step]


def test_a_checkpoint_opens_from_within_and_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = saved_by_step(str(tmp_path / "run"), last=2, best=1)[2]
    (tmp_path / "live").symlink_to("run/000002-step-2")
    monkeypatch.chdir(tmp_path / "run/000002-step-2")
    for path in (".", "../000002-step-2", tmp_path / "live"):
        with Reader(path) as reader:
            assert contents_of(reader) == expected


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    saved_by_step(str(tmp_path / "run"), last=2, best=0)
    first, second = (tmp_path / f"run/00000{step}-step-{step}" for step in (1, 2))
    with pytest.raises(
        CheckpointError, match=r"run has no checkpoint that was saved as the best; it has \['000001-step"
    ):
        Reader(tmp_path / "run", name="best")
    with pytest.raises(CheckpointError, match=r"run has no checkpoint 'step-2'; it has .*: name one of these"):
        Reader(tmp_path / "run", name="step-2")
    for path, kind in ((second, "one checkpoint"), (first / "tables/0", "the snapshot of a table")):
        with pytest.raises(ConfigError, match=rf"name is 'best' and .* is {kind}; expected the folder of a run's"):
            Reader(path, name="best")
    with pytest.raises(ConfigError, match="name is 'best', and the rows are on servers"):
        Reader(name="best", servers=["tcp://127.0.0.1:1"])
    copy = tmp_path / "copied" / second.name
    shutil.copytree(second, copy)
    with pytest.raises(CheckpointError, match=rf"needs its parent '{first.name}', which is not in .*: copy it there"):
        Reader(copy)
    shutil.copytree(first, copy.with_name(first.name))
    Reader(copy).close()
    with pytest.raises(CheckpointError, match=r"was saved as 000002-step-2, .* is called new: rename the folder back"):
        Reader(copy.rename(copy.with_name("new")))
    refused = SavedJob(str(second), 2)
    with pytest.raises(CheckpointError, match=rf"is one checkpoint, .*run', \.\.\.\)\.resume\('{second.name}'\)"):
        refused.run.resume()
    assert refused.embeddings.step == 0


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_request_is_scored_as_a_row_of_the_training_data(suffix: str, tmp_path: Path) -> None:
    """With the source's own columns: strings are hashed, numbers transformed, missing ones replaced. A text file has
    strings only, so that its requests have, too."""
    rows: list[dict[str, Any]] = [
        {"user": 7 + n, "tag": ("a", "b", None)[n], "price": (9.5, None, 2.0)[n]} for n in range(3)
    ]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        rows = [{name: None if value is None else str(value) for name, value in row.items()} for row in rows]
        lines = [rows[0].keys(), *([value or "" for value in row.values()] for row in rows)]
        path.write_text("".join(f"{','.join(line)}\n" for line in lines))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    columns: dict[str, Any] = {
        "dense": [DenseColumn("price", log1p=True, missing=-1.0)],
        "ids": {"word": "tag"},
        "missing_id": 3,
    }
    source = {"csv": CSV, "parquet": Parquet}[suffix](path, **columns)
    of = {"user": Table("user", dim=4), "word": Table("word", dim=2)}
    with Embeddings(of, num_threads=1) as embeddings:
        optimizer = embeddings.optimizer()
        for batch in embeddings.stream(source):
            batch.embeddings.sum().backward()
            optimizer.step()
        Checkpoint(tmp_path / "run", torch.nn.Linear(1, 1), optimizer, embeddings).save()
    with Reader(tmp_path / "run", of) as reader:
        (expected,) = reader.stream(source)
        for number, row in enumerate(rows):
            (batch,) = reader.stream(IterableSource([row], samples=True, batch_size=1, **columns))
            assert torch.equal(batch.dense, expected.dense[[number]])
            assert torch.equal(batch.embeddings, expected.embeddings[[number]])
            assert [batch.ids(name).tolist() for name in of] == [expected.ids(name)[[number]].tolist() for name in of]
        assert expected.dense[:, 0].tolist() == pytest.approx([np.log(10.5), -1.0, np.log(3.0)])
        assert len(reader.tables["word"]) == 3
