"""Resuming in the middle of a run: the process then continues exactly as a new one that resumes the same checkpoint.

Train to a checkpoint, save, train on, resume, and train on again: every state equals that of a run that was never
disturbed, with rows in the process, on servers and behind workers, and with dense parameters on the servers.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_job import Job, same
from cluster import running_servers
from contents import bits
from logged import received
from loop import batches, job, loss_of, tables
from remote_worker_parts import working
from satrap import Checkpoint, Deployment, Embeddings
from satrap.errors import CheckpointError, SnapshotError, StreamError
from satrap.table.store import Store
from trainers import Trainers

NUM = 12


def train_and_save_at(job: Job, until: int, save_at: int | None = None) -> None:
    """Train up to a step, in one stream, with one save."""
    job.source.num, save = until, job.run.save
    vars(job.run)["save"] = lambda **_: save() if job.embeddings.step == save_at else False
    job.train()
    del vars(job.run)["save"]


def undisturbed(run: Path, until: int) -> dict[str, Any]:
    """Return the state of a new job after these steps."""
    job = Job(str(run), until)
    train_and_save_at(job, until)
    return job.state()


@settings(max_examples=settings().max_examples // 10, deadline=None)
@given(saved=st.integers(1, 5), further=st.integers(1, 5), times=st.integers(1, 2), full_every=st.sampled_from([1, 3]))
def test_a_run_that_resumes_itself_equals_an_undisturbed_one(
    tmp_path_factory: pytest.TempPathFactory, saved: int, further: int, times: int, full_every: int
) -> None:
    folder, end = tmp_path_factory.mktemp("run"), saved + further
    part, straight = (undisturbed(folder / str(until), until) for until in (saved, end))
    job = Job(str(folder / "run"), NUM, full_every=full_every)
    train_and_save_at(job, end, save_at=saved)
    for _ in range(times):
        same(job.state(), straight)
        assert job.run.resume()
        same(job.state(), part)
        train_and_save_at(job, end)
    same(job.state(), straight)
    job.run.save()
    assert job.run.resume()
    same(job.state(), straight)


def test_embeddings_with_a_part_of_a_checkpoint_refuse_everything_but_a_resume(tmp_path: Path) -> None:
    """The second table cannot be filled, after both were verified."""
    job = Job(str(tmp_path / "run"), 6)
    train_and_save_at(job, 6, save_at=3)
    before = job.state()
    fill = Store.fill

    def fill_first(store: Store, levels: Any) -> None:
        if store.table.name == "item":
            raise SnapshotError("the network is gone")
        fill(store, levels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "fill", fill_first)
        with pytest.raises(SnapshotError, match="the network is gone"):
            job.run.resume()
    after = job.state()
    for name in ("step", "lr", "random", "0.weight", "2.bias"):
        assert np.array_equal(after[name], before[name]), "the rest is as it was"
    batch = next(iter(job.source.batches(job.embeddings.features)))
    refused = "the tables hold a part of a checkpoint, because resuming it failed: resume again"
    for use in (
        lambda: job.embeddings.stream(job.source),
        lambda: job.embeddings.stream(job.source, train=False),
        lambda: job.embeddings(batch),
        lambda: job.run.save(),
    ):
        with pytest.raises(StreamError, match=refused):
            use()
    assert job.run.resume() and job.embeddings.step == 3
    train_and_save_at(job, 6)
    same(job.state(), before)


def test_a_second_save_of_a_step_is_another_checkpoint_of_it(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), 4, full_every=3)
    for batch in job.embeddings.stream(job.source):
        job.step(batch)
        for wait in (False, True):
            assert job.run.save(every_steps=2, wait=wait) == (batch.step % 2 == 0 and not wait), "of a step, once"
    before = job.state()
    assert job.run.save() and job.run.save()
    names = [f"00000{number}-step-{step}" for number, step in ((1, 2), (2, 4), (3, 4), (4, 4))]
    assert sorted(each.parent.name for each in tmp_path.glob("run/*/checkpoint.json")) == names
    for name in names[1:]:
        again = Job(str(tmp_path / "run"), 4)
        assert again.run.resume(name)
        same(again.state(), before)


def test_a_named_version_is_resumed_and_training_continues_from_it(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), 8, keep=9)
    train_and_save_at(job, 3)
    job.run.save(best=True)
    best = job.run.best
    assert best == "000001-step-3"
    at_best = job.state()
    train_and_save_at(job, 3)  # from the beginning of the data
    job.run.save()
    with pytest.raises(CheckpointError, match=r"has no checkpoint 'none'; it has \['000001-step-3', '000002-step-6'\]"):
        job.run.resume("none")
    with received("satrap.checkpoint") as records:
        assert job.run.resume("best") and job.run.resume("best")
    shown = [message for record in records if not (message := record.getMessage()).startswith("restore of")]
    assert shown == [f"{verb} step 3, from {tmp_path}/run/{best}" for verb in ("returns to", "continues after")]
    same(job.state(), at_best)
    job.run.save()
    again = Job(str(tmp_path / "run"), 8, keep=9)
    assert again.run.resume(best) and again.embeddings.step == 3
    again.run.save()
    assert sorted(each.name for each in (tmp_path / "run").glob("0*")) == [
        "000001-step-3",
        "000002-step-6",
        "000003-step-3",
        "000004-step-3",
    ]


def test_the_best_of_a_run_that_has_none(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), 8)
    before = job.state()
    assert not job.run.resume("best"), "a run that begins has nothing to resume, as without a name"
    same(job.state(), before)
    train_and_save_at(job, 2)
    job.run.save()
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint that was saved as the best; it has \['000001-step-2'\]"
    ):
        job.run.resume("best")
    assert job.embeddings.step == 2


def test_streams_end_and_shared_rows_are_replaced(tmp_path: Path) -> None:
    embeddings, model, optimizer = job(shared=tmp_path / "rows")
    run, data, item = Checkpoint(tmp_path / "run", model, optimizer, embeddings), batches(6), embeddings.tables["item"]
    with embeddings.stream(data) as stream:
        for batch in stream:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if batch.step == 2:
                run.save()
                expected = bits(embeddings, model)
            if batch.step == 4:
                loss_of(model, next(stream)).backward()
                break
        assert run.resume() and bits(embeddings, model) == expected and embeddings.tables["item"] is item
        assert all(each.grad is None for each in model.parameters())
        with pytest.raises(StreamError, match="a checkpoint was resumed"):
            next(stream)


WHERE = {"servers": (2, 0, "sync"), "workers": (2, 1, "sync"), "async": (2, 0, "async")}


@contextmanager
def running(where: str) -> Iterator[tuple[Embeddings, Any, Any]]:
    num_servers, num_workers, dense = WHERE[where]
    with ExitStack() as stack:
        servers = [each.address for each in stack.enter_context(running_servers(num_servers))]
        workers = [each.address for each in stack.enter_context(working(num_workers))] if num_workers else []
        torch.manual_seed(0)
        deployment = Deployment(servers, workers=workers)
        embeddings = Embeddings(tables(), num_threads=1, deployment=deployment, dense=dense)  # type: ignore[arg-type]
        stack.callback(embeddings.close)
        model = torch.nn.Sequential(torch.nn.Linear(14, 8), torch.nn.Linear(8, 1))
        yield embeddings, model, embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=0.05))


def steps(embeddings: Embeddings, model: Any, optimizer: Any, data: Any, until: int) -> list[bytes]:
    with embeddings.stream(data) as stream:
        for batch in stream:
            optimizer.zero_grad()
            logits = model(torch.cat([batch.dense, batch.embeddings], 1)).squeeze(1)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
            optimizer.step()
            if batch.step == until:
                break
    embeddings.drain()
    return bits(embeddings, model)


@pytest.mark.parametrize("where", WHERE)
def test_rows_on_servers(where: str, tmp_path: Path) -> None:
    data = batches(9)
    with running(where) as (embeddings, model, optimizer):
        expected = steps(embeddings, model, optimizer, data, 7)
    with running(where) as (embeddings, model, optimizer):
        run = Checkpoint(tmp_path / "run", model, optimizer, embeddings, data)
        saved = steps(embeddings, model, optimizer, data, 4)
        run.save()
        for _ in range(2):
            assert run.resume() and embeddings.step == 4
            assert bits(embeddings, model) == saved
            assert steps(embeddings, model, optimizer, data, 7) == expected


def test_several_trainers(tmp_path: Path) -> None:
    """They train, save at steps 2 and 4, and train the rest twice, from step 2 the second time."""
    options: dict[str, Any] = {"batches": 10, "staleness": 0}
    with Trainers(2) as trainers:
        with running_servers(2) as services:
            straight = trainers.run(services, 2, tmp_path, **options)
        with running_servers(2) as services:
            options |= {"checkpoint": str(tmp_path / "run"), "epochs": 2, "again": "000001-step-2"}
            found = trainers.run(services, 2, tmp_path, **options)
    for one, other in zip(straight, found, strict=True):
        assert other["seen"] == one["seen"] + one["seen"][2:]
        assert other["dense"] == one["dense"] and other["rows"] == one["rows"]
