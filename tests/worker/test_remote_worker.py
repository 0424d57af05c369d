"""A remote worker has the bits, counters and positions of one in the trainer's process; ids never reach the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from remote_worker_parts import BATCH, Net, bits, evaluate, made, running, serving, source, train, write
from satrap import Checkpoint, Embeddings, MinCount, Parquet, Table
from satrap.errors import StreamError
from satrap.worker.remote.client import RemoteBatches, RemoteInputs, RemoteWorker


@contextmanager
def running_on(num_servers: int, num_workers: int, **options: Any) -> Iterator[tuple[Embeddings, Net, Any]]:
    """Yield a job with so many servers and workers."""
    with serving(num_servers, num_workers) as (where, _), running(**where, **options) as job:
        yield job


WHERE = [(0, 0), (1, 0), (1, 1), (2, 1)]


def test_a_stream_that_a_worker_reads_has_a_length(tmp_path: Path) -> None:
    data = source(write(tmp_path / "a.parquet", 12), epochs=2)
    with running_on(1, 1) as (embeddings, *_):
        stream = embeddings.stream(data)
        assert len(stream) == 24
        next(stream)
        assert len(stream) == 24
        with pytest.raises(TypeError, match="the length of this stream is not known: rows may be left out"):
            len(embeddings.stream(data.replace(max_bad_rows=1)))


@pytest.mark.parametrize("overlap", [False, True, None])
@pytest.mark.parametrize(
    "options",
    [{}, {"staleness": 2, "deterministic": True}, {"accumulate": 3}, {"wire": "float16"}],
    ids=["sync", "stale", "accumulated", "rounded"],
)
def test_a_remote_worker_has_the_bits_of_a_local_one(
    tmp_path: Path, options: dict[str, Any], overlap: bool | None
) -> None:
    """Losses, rows, parameters, positions, scores of an evaluation within the training, and what was lost."""
    data = source(write(tmp_path / "a.parquet", 20), shuffle=True, shuffle_blocks=2, epochs=2)
    test = source(write(tmp_path / "b.parquet", 5, seed=1))
    how: dict[str, Any] = {"overlap": overlap} | ({"accumulate": 3} if "accumulate" in options else {})
    given = {name: value for name, value in options.items() if name != "accumulate"}
    found = []
    for where in WHERE[1:] if "wire" in options else WHERE:
        with running_on(*where, **given) as job:
            seen = train(job, data, **how)
            scores = evaluate(job, test)
            seen += train(job, data.replace(epochs=1, seed=5), **how)
            counters = job[0].counters()
            stale = counters.staleness if overlap is False else None  # with overlap, the time of a drop varies
            found.append((seen, scores, bits(job), counters.rows, counters.lost, stale))
    assert len(found[0][0]) == 60 and found[0][4]["ids/path"] and found[0][4]["batches/zero_grad"]
    assert all(each == found[0] for each in found)


def test_dense_parameters_on_servers_have_the_same_bits(tmp_path: Path) -> None:
    data = source(write(tmp_path / "a.parquet", 12))
    found = []
    for num_workers in (0, 1):
        with running_on(2, num_workers, dense="async") as job:
            found.append((train(job, data), bits(job)))
    assert len(found[0][0]) == 12 and found[0] == found[1]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("only", [True, False])
def test_sightings_of_the_first_epoch_only(tmp_path: Path, only: bool, where: tuple[int, int]) -> None:
    """Ids 0 to 4 occur in the first and the last batch of each epoch, the others in one batch."""
    path = tmp_path / "a.parquet"
    ids = [*range(43), *range(5)]
    pq.write_table(pa.table({"id": np.array(ids, np.uint64), "click": [0.0, 1.0] * 24}), path, row_group_size=20)
    data = Parquet(path, label="click", batch_size=8, block_rows=20, epochs=3)
    table = Table("t", dim=2, admission=MinCount(2, first_epoch_only=only))
    found = []
    with serving(*where) as (options, _), made({"id": table}, **options) as embeddings:
        model = torch.nn.Linear(2, 1)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in embeddings.stream(data):
            loss = model(batch.embeddings).squeeze(1) - batch.label
            loss.square().sum().backward()
            if batch.step % 6 == 0:  # before the update, after which the next batch is looked up
                found.append(set(np.flatnonzero(embeddings.tables["t"].read(np.arange(43)).present)))
            optimizer.step()
            optimizer.zero_grad()
    again = set(range(5))
    assert found == [again, again if only else set(range(43)), again if only else set(range(43))]


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_worker_holds_prefetched_batches(tmp_path: Path, staleness: int) -> None:
    """All batches are taken before the first step, which has the same bits as the plain loop."""
    data = source(write(tmp_path / "a.parquet", 12))
    found = []
    for where, ahead in (((0, 0), False), ((0, 0), True), ((2, 1), True)):
        with running_on(*where, staleness=staleness, deterministic=True) as job, job[0].stream(data) as stream:
            _, model, optimizer = job
            seen = []
            for batch in list(stream) if ahead else stream:
                loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append((batch.step, loss.item(), batch.position))
            stream.close()
            assert not stream.dropped
            found.append((seen, bits(job)))
    assert len(found[0][0]) == 12 and all(each == found[0] for each in found)


def test_the_ids_stay_with_the_worker(tmp_path: Path) -> None:
    data = source(write(tmp_path / "a.parquet", 2))
    with running_on(1, 1) as (embeddings, _, _), embeddings.stream(data) as stream:
        batch = next(stream)
        assert isinstance(batch.inputs, RemoteInputs) and len(batch) == BATCH
        for name in ("values", "offsets", "weights"):
            with pytest.raises(StreamError, match=f"no {name} here: its ids stay with the worker at ipc://"):
                getattr(batch.inputs, name)
        assert "number=1" in repr(batch.inputs)


def test_a_batch_that_is_looked_up_again_can_be_updated(tmp_path: Path) -> None:
    """By `forward`, in the middle of its step; and then the worker is restarted."""
    data = source(write(tmp_path / "a.parquet", 4))
    found = []
    with serving() as (addresses, (worker,)):
        for where in ({}, addresses):
            with running(**where) as job:
                again: list[bytes] = []

                def at(now: str, number: int, job: Any = job, again: Any = again, where: Any = where) -> None:
                    if now == "looked up":
                        batch = job[0]._session._training._held[0]
                        again.append(job[0](batch.inputs).embeddings.numpy().tobytes())
                        if where and number > 1:
                            worker.restart()

                found.append((train(job, data, at, overlap=False), again, bits(job)))
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [(0, 1, 0), (1, 0, 1)], ids=["without, with, without", "with, without, with"])
def test_a_checkpoint_resumes_with_or_without_a_worker(tmp_path: Path, workers: tuple[int, ...]) -> None:
    path = write(tmp_path / "a.parquet", 24)
    data = source(path, shuffle=True, shuffle_blocks=2, seed=3)
    with running() as job:
        whole = train(job, data)
        wanted = bits(job)
    seen: list[Any] = []
    for num_workers, until in zip(workers, (8, 16, None), strict=True):
        with running_on(2, num_workers) as job:
            embeddings, model, optimizer = job
            run = Checkpoint(tmp_path / "run", model, optimizer, embeddings, data)
            assert run.resume() == bool(seen)
            with embeddings.stream(data) as stream:
                for batch in stream:
                    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
                    loss.backward()
                    seen.append((batch.step, loss.item(), batch.position, batch.inputs.extra["note"].to_pylist()))
                    if len(seen) % 7:
                        optimizer.step()
                    optimizer.zero_grad()
                    if batch.step == until:
                        run.save()
                        break
            if until is None:
                assert bits(job) == wanted
    assert seen == whole


def test_batches_without_a_declared_source_are_looked_up_by_the_trainer(tmp_path: Path) -> None:
    """In between, in one run: the steps continue."""
    data = source(write(tmp_path / "a.parquet", 6))
    found = []
    for where in WHERE:
        with running_on(*where) as job:
            embeddings, model, optimizer = job
            names = embeddings.features
            seen = train(job, data)
            with embeddings.stream(list(data.batches(names))) as stream:
                assert not isinstance(stream._inputs, RemoteBatches)
                for batch in stream:
                    torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            seen += train(job, data)
            found.append((seen, bits(job), embeddings.counters().lost, embeddings.step))
            assert isinstance(embeddings.worker, RemoteWorker) == bool(where[1])
    assert all(each == found[0] for each in found)
