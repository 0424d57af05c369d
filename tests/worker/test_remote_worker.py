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
from hypothesis import given
from hypothesis import strategies as st

from remote_worker_parts import (
    BATCH,
    Net,
    drained_bits,
    evaluate,
    made,
    running,
    serving,
    source,
    train_and_note,
    write,
)
from satrap import Checkpoint, Embeddings, MinCount, Parquet, Table, _core
from satrap.config.features import Features
from satrap.errors import InputError, StreamError
from satrap.table.engine import native_config
from satrap.worker.remote.client import RemoteBatches, RemoteInputs, RemoteRows
from satrap.worker.remote.protocol import PooledCodec
from satrap.worker.rows import native_features


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


@pytest.mark.draw(3)
@pytest.mark.parametrize("overlap", [False, True, None])
@pytest.mark.parametrize(
    "options",
    [{}, {"staleness": 2, "deterministic": True}, {"accumulate": 3}],
    ids=["sync", "stale", "accumulated"],
)
def test_a_remote_worker_has_the_bits_of_a_local_one(
    tmp_path: Path, options: dict[str, Any], overlap: bool | None
) -> None:
    """Losses, rows, parameters, positions, scores of an evaluation within the training, and what was lost."""
    data = source(write(tmp_path / "a.parquet", 21), shuffle=True, shuffle_blocks=2, epochs=2)
    test = source(write(tmp_path / "b.parquet", 5, seed=1))
    how: dict[str, Any] = {"overlap": overlap} | ({"accumulate": 3} if "accumulate" in options else {})
    given = {name: value for name, value in options.items() if name != "accumulate"}
    found = []
    for where in WHERE:
        with running_on(*where, **given) as job:
            seen = train_and_note(job, data, **how)
            scores = evaluate(job, test)
            seen += train_and_note(job, data.replace(epochs=1, seed=5), **how)
            counters = job[0].counters()
            stale = counters.staleness if overlap is False else None  # with overlap, the time of a drop varies
            found.append((seen, scores, drained_bits(job), counters.rows, counters.lost, stale))
    assert len(found[0][0]) == 63 and found[0][4]["ids/path"] and found[0][4]["batches/zero_grad"]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_wire_that_rounds_reaches_from_the_servers_to_the_trainer(
    tmp_path: Path, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block, sequence and gradient between a worker and its trainer has two bytes for a number, and the result is
    close to that of a wire that does not round. The number of servers changes no bit."""
    data = source(write(tmp_path / "a.parquet", 21))
    sizes: list[tuple[int, int]] = []
    encode = PooledCodec.encode

    def encode_and_measure(codec: PooledCodec, flat: Any, *given: Any) -> Any:
        floats, coded = encode(codec, flat, *given)
        assert floats is None and coded is not None
        sizes.append((flat.nbytes, coded.nbytes))
        return floats, coded

    exact: list[Any] = []
    rounded: list[Any] = []
    for found, wire, where in ((exact, "float32", (1, 1)), (rounded, "float16", (1, 1)), (rounded, "float16", (2, 1))):
        with monkeypatch.context() as patched, running_on(*where, wire=wire) as job:
            if wire == "float16":
                patched.setattr(PooledCodec, "encode", encode_and_measure)
            seen = train_and_note(job, data, accumulate=accumulate)
            found.append((seen, drained_bits(job)))
    assert rounded[0] == rounded[1] and rounded[0] != exact[0]
    losses, exact_losses = ([loss for _, loss, *_ in found[0][0]] for found in (rounded, exact))
    assert 0 < np.abs(np.array(losses) - exact_losses).max() < 1e-3
    assert len(sizes) >= 2 * 2 * 17, "lookups and gradients"
    assert all(coded < 0.65 * floats for floats, coded in sizes)


@st.composite
def pooled_features(draw: st.DrawFn) -> Features:
    dims = draw(st.lists(st.sampled_from([1, 2, 5, 16]), min_size=1, max_size=5))
    lengths = draw(st.lists(st.integers(0, 4), min_size=len(dims), max_size=len(dims)))  # 0: pooled; 4: jagged
    return Features(
        {
            f"f{i}": Table(f"t{i}", dim=dim).sequence(length if length < 4 else None)
            if length
            else Table(f"t{i}", dim=dim)
            for i, (dim, length) in enumerate(zip(dims, lengths, strict=True))
        }
    )


@given(pooled_features(), st.integers(0, 9), st.integers(0, 2**32 - 1), st.data())
def test_pooled_rows_are_rounded_row_by_row(of: Features, batch_size: int, seed: int, data: st.DataObject) -> None:
    """By at most 2^-11 of the largest magnitude in each sample's part of a feature; what is absent has no bytes."""
    rng = np.random.default_rng(seed)
    jagged = {name: np.append(0, np.cumsum(rng.integers(0, 4, batch_size))) for name in of if of[name].jagged}
    counts = {name: batch_size * (each.padded_length or 0) for name, each in of.items()}
    counts |= {name: int(offsets[-1]) for name, offsets in jagged.items()}
    lengths = [(each.table.dim, counts[name]) for name, each in of.items() if each.pooling == "none"]
    present = [data.draw(st.booleans()) for _ in range(1 + len(lengths))]
    rows = [dim for _ in range(batch_size) for dim in of.pooled.values()] if present[0] else []
    for (dim, num_rows), is_present in zip(lengths, present[1:], strict=True):
        rows += [dim] * num_rows * is_present
    scales = np.repeat(10.0 ** rng.integers(-20, 20, len(rows)), rows)
    flat = (rng.standard_normal(sum(rows)) * scales).astype(np.float32)
    split = _core.Split([native_config(each) for each in of.tables], native_features(of, of.tables), 1, "auto")
    exact = PooledCodec(of, split, "float32")
    assert exact.encode(flat, batch_size, present, jagged) == (flat, None)
    assert exact.decode(flat, None, batch_size, present, jagged) is flat
    codec = PooledCodec(of, split, "float16")
    floats, coded = codec.encode(flat, batch_size, present, jagged)
    assert floats is None and coded is not None and len(coded) == 2 * len(flat) + len(rows) + len(rows) % 2
    found = codec.decode(None, coded, batch_size, present, jagged)
    at = 0
    for dim in rows:
        row, its = flat[at : at + dim], found[at : at + dim]
        assert np.abs(row - its).max() <= 2.0**-11 * np.abs(row).max()
        at += dim
    for both in (True, False):
        with pytest.raises(InputError, match="in one of the two forms"):
            codec.decode(flat if both else None, coded if both else None, batch_size, present, jagged)
    with pytest.raises(InputError, match="message"):
        codec.decode(None, coded[:-1] if len(coded) else np.zeros(1, np.uint8), batch_size, present, jagged)


def test_dense_parameters_on_servers_have_the_same_bits(tmp_path: Path) -> None:
    data = source(write(tmp_path / "a.parquet", 12))
    found = []
    for num_workers in (0, 1):
        with running_on(2, num_workers, dense="async") as job:
            found.append((train_and_note(job, data), drained_bits(job)))
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
            found.append((seen, drained_bits(job)))
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
                        batch = job[0]._session._training._ledger.held()[0]
                        again.append(job[0](batch.inputs).embeddings.numpy().tobytes())
                        if where and number > 1:
                            worker.restart()

                found.append((train_and_note(job, data, at, overlap=False), again, drained_bits(job)))
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [(0, 1, 0), (1, 0, 1)], ids=["without, with, without", "with, without, with"])
def test_a_checkpoint_resumes_with_or_without_a_worker(tmp_path: Path, workers: tuple[int, ...]) -> None:
    path = write(tmp_path / "a.parquet", 24)
    data = source(path, shuffle=True, shuffle_blocks=2, seed=3)
    with running() as job:
        whole = train_and_note(job, data)
        wanted = drained_bits(job)
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
                assert drained_bits(job) == wanted
    assert seen == whole


def test_batches_without_a_declared_source_are_looked_up_by_the_trainer(tmp_path: Path) -> None:
    """In between, in one run: the steps continue."""
    data = source(write(tmp_path / "a.parquet", 6))
    found = []
    for where in WHERE:
        with running_on(*where) as job:
            embeddings, model, optimizer = job
            names = embeddings.features
            seen = train_and_note(job, data)
            with embeddings.stream(list(data.batches(names))) as stream:
                assert not isinstance(stream._inputs, RemoteBatches)
                for batch in stream:
                    torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            seen += train_and_note(job, data)
            found.append((seen, drained_bits(job), embeddings.counters().lost, embeddings.step))
            assert isinstance(embeddings.worker.rows, RemoteRows) == bool(where[1])
    assert all(each == found[0] for each in found)
