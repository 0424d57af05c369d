"""Checkpoints: the whole state is restored bit for bit, also after kill -9 at any moment; a checkpoint that does not
fit is refused."""

import json
import logging
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from checkpoint_job import NUM_IDS, Job, Source, names, run_killed, same, uninterrupted
from logged import logged, received
from loop import batches, job, loss_of
from satrap import CSV, Checkpoint, Embeddings, IdColumn, IterableSource, Table
from satrap.checkpoint.state_dict_file import FrozenState, read_state
from satrap.config.durable import checksum
from satrap.errors import CheckpointError, SatrapError, SnapshotError, StreamError
from satrap.storage.local_folder import LocalFolder
from satrap.train.embeddings import session_of

pytestmark = pytest.mark.draw(8)


@pytest.mark.parametrize("full_every", [1, 3])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, full_every: int) -> None:
    expected = uninterrupted(tmp_path, 20)
    run = str(tmp_path / "run")
    for steps in (4, 9, 11, 20):
        job = Job(run, steps, full_every=full_every)
        assert job.run.resume() == (steps > 4)
        job.source.num = steps
        job.train(every_steps=1)
    same(job.state(), expected)


def test_a_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path) -> None:
    same(run_killed("checkpoint_job.py", tmp_path / "run", 40), uninterrupted(tmp_path, 40))


def test_a_killed_run_with_rows_in_two_tiers_ends_with_the_bits_of_rows_in_memory(tmp_path: Path) -> None:
    rows = json.dumps({"device": "cpu", "device_memory": {"user": 20 * 32, "item": "none"}})
    same(run_killed("checkpoint_job.py", tmp_path / "run", 30, rows), uninterrupted(tmp_path, 30))


def test_a_killed_run_with_staleness_updates_each_batch_once(tmp_path: Path) -> None:
    steps = 40
    found = run_killed("counting_job.py", tmp_path / "run", steps)
    seen = np.zeros((2, NUM_IDS), np.int64)
    for inputs in Source(steps).batches({"user": None, "item": None}):
        for table, ids in enumerate(inputs.values.reshape(2, -1)):
            np.add.at(seen[table], ids.astype(np.int64), 1)
    assert found["step"] == steps
    for table, name in enumerate(("user", "item")):
        np.testing.assert_array_equal(found[name], np.repeat(-seen[table][:, None], 2, 1).astype(np.float32))


def test_a_run_whose_checkpoints_are_lost_says_so_and_saves_whole_tables(tmp_path: Path) -> None:
    """The disk may be unmounted, so that the folder is an empty one of another disk."""
    path = tmp_path / "run"
    expected = uninterrupted(tmp_path, 8)
    job = Job(str(path), 6, full_every=10)
    lost = r"000005-step-5 is gone from .*run: it was removed, or its disk is lost; step 6 is saved"
    with job.embeddings.stream(job.source) as stream, logged("satrap.checkpoint", lost) as warnings:
        for batch in stream:
            job.step(batch)
            if job.embeddings.step == 6:
                shutil.rmtree(path)
            job.run.save(every_steps=1)
    assert len(warnings) == 1
    again = Job(str(path), 8, full_every=10)
    assert again.run.resume()
    again.train(every_steps=1)
    same(again.state(), expected)


def test_old_checkpoints_are_removed_except_parents_of_those_kept(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 8, keep=2, full_every=4)
    job.train()
    assert names(tmp_path) == ["000005-step-5", "000006-step-6", "000007-step-7", "000008-step-8"]
    again = Job(str(tmp_path), 8)
    assert again.run.resume()
    same(again.state(), job.state())


def test_resume_returns_false_at_first(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "new"), 3)
    assert not job.run.resume()
    assert not job.run.save(every_steps=2), "there is no step yet"
    job.train(every_steps=2)
    assert names(tmp_path / "new") == ["000001-step-2"]
    assert job.run.save()
    assert not job.run.save(every_steps=3), "this step is already saved"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hidden": 9}, CheckpointError, r"0\.weight: \(8, 11\) torch\.float32 in the checkpoint, \(9, 11\)"),
        ({"seed": 5}, SnapshotError, "seed is 5 in the table and 0 in the snapshot"),
        ({"dim": 3, "hidden": 8}, SatrapError, "in the checkpoint|dim is 3"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    Job(str(tmp_path), 3).train()
    other = Job(str(tmp_path), 3, **options)
    before = other.state()
    with received("satrap") as records, pytest.raises(error, match=message):
        other.run.resume()
    assert len([record for record in records if record.levelno > logging.INFO]) <= 1, "beside the exception"
    same(other.state(), before)


def test_a_position_of_another_order_is_refused(tmp_path: Path) -> None:
    Job(str(tmp_path), 2).train()
    job = Job(str(tmp_path), 2)
    before = job.state()
    job.source.seed = 1
    with pytest.raises(
        CheckpointError, match="position is of a source that is read differently: seed is 0 in the chec"
    ):
        job.run.resume()
    same(job.state(), before)
    assert Job(str(tmp_path), 2).run.resume()


class UnloadableScheduler:
    """A scheduler that refuses every state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError("unexpected keys")


def test_an_object_that_cannot_load_its_state_changes_nothing(tmp_path: Path) -> None:
    Job(str(tmp_path), 2).train()
    job = Job(str(tmp_path), 2)
    before = job.state()
    job.run._objects["scheduler"] = UnloadableScheduler()
    with pytest.raises(CheckpointError, match="scheduler cannot load its state: unexpected keys"):
        job.run.resume()
    same(job.state(), before)
    dense = torch.optim.SGD(job.model.parameters(), lr=0.5)
    with pytest.raises(
        CheckpointError, match=r"optimizer cannot load its state: the state is of a dense optimizer Adam; expected SGD"
    ):
        Checkpoint(
            tmp_path,
            job.model,
            job.embeddings.optimizer(dense),
            job.embeddings,
            job.source,
            extra_state={"scheduler": job.scheduler},
        ).resume()
    same(job.state() | {"lr": 0}, before | {"lr": 0})


def test_a_dense_optimizer_is_refused(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"optimizer is an Adam; expected that of embeddings\.optimizer"):
        Checkpoint(tmp_path, job.model, job.optimizer.dense, job.embeddings)
    with pytest.raises(CheckpointError, match=r"embeddings is a Linear; expected the satrap\.Embeddings"):
        Checkpoint(tmp_path, job.model, job.optimizer, torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_plain_list_continues_at_its_position(tmp_path: Path) -> None:
    """Sources are not the only data with positions: an iterable is read again up to its position."""
    data = batches(6)
    for until in (5, 6):
        embeddings, model, optimizer = job()
        run = Checkpoint(tmp_path, model, optimizer, embeddings, data)
        assert run.resume() == (until == 6)
        rest = []
        for batch in embeddings.stream(data):
            rest.append((batch.step, batch.inputs.values))
            loss_of(model, batch).backward()
            optimizer.step()
            run.save(every_steps=4)
            if batch.step == until:
                break
        embeddings.close()
    assert [step for step, _ in rest] == [5, 6]
    for (_, values), inputs in zip(rest, data[4:], strict=True):
        np.testing.assert_array_equal(values, inputs.values)


def test_a_replaced_source_is_refused_where_its_position_would_be_lost(tmp_path: Path) -> None:
    embeddings, model, optimizer = job()
    data = IterableSource(batches(4), batch_size=8, shuffle=True)
    Checkpoint(tmp_path / "run", model, optimizer, embeddings, data)
    for other in (data.replace(seed=1), data.replace(seed=1).replace(seed=2)):
        with pytest.raises(StreamError, match=r"is a replace\(\) of the one passed to Checkpoint\(\.\.\.\)"):
            embeddings.stream(other)
    embeddings.stream(IterableSource(batches(4))).close()  # data without a checkpoint
    embeddings.stream(data).close()
    embeddings.eval()
    embeddings.stream(data.replace(seed=1)).close()


@pytest.mark.parametrize("is_derived", [False, True])
def test_an_equal_source_is_the_one_passed_to_the_checkpoint(tmp_path: Path, is_derived: bool) -> None:
    (tmp_path / "a.csv").write_text("user,label\n" + "".join(f"{user},{user % 2}\n" for user in range(40)))

    def source() -> CSV:
        data = CSV(str(tmp_path / "a.csv"), label="label", batch_size=4, ids={"user": IdColumn()})
        return data.replace(share=(0, 0.9)) if is_derived else data

    trained = []
    for until in (3, 100):
        embeddings = Embeddings({"user": Table("user", dim=2)})
        model = torch.nn.Linear(2, 1)
        optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters()))
        run = Checkpoint(tmp_path / "run", model, optimizer, embeddings, source())
        assert run.resume() == (until == 100)
        for batch in embeddings.stream(source()):
            model(batch.embeddings).sum().backward()
            optimizer.step()
            trained += batch.inputs.values.tolist()
            if batch.step == until:
                break
        run.save()
    assert trained == [user for batch in source().batches(["user"]) for user in batch.values.tolist()]


@pytest.mark.parametrize("data", [batches(4), IterableSource(batches(4)), DataLoader(range(4))])  # type: ignore[arg-type]
def test_data_that_no_stream_has_read_is_warned_of_once(tmp_path: Path, data: Any) -> None:
    embeddings, model, optimizer = job()
    run = Checkpoint(tmp_path / "run", model, optimizer, embeddings, data)
    run.save()
    with logged("satrap.train", match=r"no stream has read the data passed to Checkpoint\(\.\.\.\)") as records:
        for batch in embeddings.stream(batches(3)):
            loss_of(model, batch).backward()
            optimizer.step()
            run.save()
    assert len(records) == 1
    embeddings, model, optimizer = job()
    run = Checkpoint(tmp_path / "other", model, optimizer, embeddings, batches(3))
    for batch in embeddings.stream(run._data):
        loss_of(model, batch).backward()
        optimizer.step()
        run.save()


@pytest.mark.parametrize("kind", ["str", "Path", "Stream"])
def test_what_is_no_data_is_refused(tmp_path: Path, kind: str) -> None:
    embeddings, model, optimizer = job()
    data = {"str": "a.csv", "Path": tmp_path, "Stream": embeddings.stream([])}[kind]
    with pytest.raises(CheckpointError, match=rf"data is a .*{kind}; expected the source that embeddings"):
        Checkpoint(tmp_path / "run", model, optimizer, embeddings, data)


def test_data_with_offsets_continues_with_untrained_items(tmp_path: Path) -> None:
    """The data is a broker, which returns nothing before the requested offset."""
    items, requested, trained = batches(9), [], []

    def broker(offset: int | None) -> Any:
        requested.append(offset)
        return ((items[i], i + 1) for i in range(offset or 0, 9))

    for until in (4, 9):
        embeddings, model, optimizer = job()
        data = IterableSource(broker, offsets=True)
        run = Checkpoint(tmp_path / "run", model, optimizer, embeddings, data)
        assert run.resume() == (until == 9)
        for batch in embeddings.stream(data):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            trained.append(batch.inputs.values)
            if batch.step == until:
                break
        run.save()
        embeddings.close()
    assert requested == [None, 3], "the last item is requested again, and skipped"
    assert [values.tolist() for values in trained] == [each.values.tolist() for each in items]


def test_names_in_a_state_cannot_collide(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(2)}, "c": {1: torch.ones(3), "1": torch.zeros(4)}}
    crc32c = FrozenState.of(state).save(LocalFolder(tmp_path), "state")
    assert crc32c == checksum((tmp_path / "state").read_bytes())
    found = read_state(LocalFolder(tmp_path), "state", crc32c)
    assert torch.equal(found["a.b"], torch.ones(1)) and torch.equal(found["a"]["b"], torch.zeros(2))
    assert torch.equal(found["c"][1], torch.ones(3)) and torch.equal(found["c"]["1"], torch.zeros(4))


def newest(run: Path) -> Path:
    return sorted(run.glob("0*-step-*"))[-1]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["checkpoint.json", "state.safetensors", "tables/0/manifest.json", "rows"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, file: str, harm: str) -> None:
    Job(str(tmp_path), 2).train()
    folder = newest(tmp_path)
    path = next((folder / "tables/0").glob("*.arrow")) if file == "rows" else folder / file
    if harm == "flip":
        flip(path)
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        path.unlink()
    job = Job(str(tmp_path), 2)
    before = job.state()
    if (file, harm) == ("checkpoint.json", "remove"):  # the version is then torn, and the one before it is the newest
        with logged(
            "satrap.checkpoint", match=rf"{folder} has no complete checkpoint.json: .*000001-step-1 is the newest"
        ):
            assert job.run.resume() and job.embeddings.step == 1
        job.train()  # does not reuse the torn version's number
        assert names(tmp_path) == ["000001-step-1", "000002-step-2", "000003-step-2"]
        return
    with pytest.raises(SatrapError, match=str(folder)):
        job.run.resume()
    same(job.state(), before)


def test_a_delta_without_its_parent_is_refused(tmp_path: Path) -> None:
    Job(str(tmp_path), 2, full_every=2).train()
    shutil.rmtree(tmp_path / "000001-step-1")
    with pytest.raises(CheckpointError, match="needs its parent '000001-step-1'"):
        Job(str(tmp_path), 2).run.resume()


def test_another_format_is_refused(tmp_path: Path) -> None:
    Job(str(tmp_path), 1).train()
    path = newest(tmp_path) / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 7}))
    with pytest.raises(CheckpointError, match="version 7; expected 'satrap-checkpoint' version"):
        Job(str(tmp_path), 1).run.resume()


def test_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 3)
    job.train()
    before = names(tmp_path)
    job.run._objects["further"] = Unsavable()
    with pytest.raises(CheckpointError, match=r"state\.objects\.further\.hook is a function"):
        job.run.save()
    assert names(tmp_path) == before
    del job.run._objects["further"]
    assert job.run.save()


class Unsavable:
    def state_dict(self) -> dict[str, Any]:
        return {"hook": lambda: None}


@pytest.mark.parametrize(("option", "value"), [("keep", 0), ("keep", True), ("full_every", "x")])
def test_bad_options_are_refused(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{option} is {value!r}; expected an integer"):
        Job(str(tmp_path), 1, **{option: value})


def test_another_file_system(tmp_path: Path) -> None:
    run = f"memory://{tmp_path.name}/run"
    job = Job(run, 5, keep=2, full_every=2)
    job.train()
    again = Job(run, 5)
    assert again.run.resume()
    same(again.state(), job.state())
    assert not Job(f"memory://{tmp_path.name}/other", 5).run.resume()


def test_random_states_are_resumed(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 2)
    job.train()
    expected = random.random(), torch.rand(3), np.random.rand(3)  # noqa: NPY002
    again = Job(str(tmp_path), 2)
    np.random.seed(9)  # noqa: NPY002
    assert again.run.resume()
    assert random.random() == expected[0]
    assert torch.equal(torch.rand(3), expected[1])
    np.testing.assert_array_equal(np.random.rand(3), expected[2])  # noqa: NPY002


def test_steps_above_a_thousand_have_separators_as_in_the_bar_beside_these_lines(tmp_path: Path) -> None:
    embeddings, model, optimizer = job()
    run = Checkpoint(tmp_path / "run", model, optimizer, embeddings)
    session_of(embeddings).resume_at(1032, None, None)
    with received("satrap") as records:
        run.save()
        assert run.resume()
    shown = "\n".join(record.getMessage() for record in records)
    assert re.search(r"^save of step 1,032 into .* done", shown, re.M) and "continues after step 1,032, from" in shown
    assert "step 1032 " not in shown
