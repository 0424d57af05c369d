"""Streams that end early, fail, or overlap: nothing hangs, every loss is reported, and the next stream works."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint_job import Job, Source
from loop import BATCH, batches, job, rows, train, train_step
from satrap import Checkpoint, Embeddings, Inputs, StreamError
from satrap.errors import NonFiniteError, SourceError
from satrap.train.embeddings import session_of
from waiting import DEADLINE_SECONDS

each_way = pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlap"])


@each_way
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("saves", [False, True])
def test_a_batch_without_a_loss_is_passed_in_order(overlap: bool, staleness: int, saves: bool, tmp_path: Path) -> None:
    """Updates wait for lookups, which wait for the batch that no loss used."""
    embeddings, model, optimizer = job(staleness, deterministic=True)
    run = Checkpoint(tmp_path, model, optimizer, embeddings)
    for batch in embeddings.stream(batches(8), overlap=overlap):
        if batch.step in (2, 5):
            continue
        train_step(model, optimizer, batch)
        if saves:
            run.save(every_steps=1)
    embeddings.drain()
    assert embeddings.counters().lost == {"batches/unused": 2}
    assert embeddings.step == 8


@each_way
def test_after_an_error_the_next_stream_works(overlap: bool, tmp_path: Path) -> None:
    embeddings, model, optimizer = job(1)
    run = Checkpoint(tmp_path, model, optimizer, embeddings)

    def torn() -> Iterator[Inputs]:
        yield from batches(4)
        raise OSError("torn file")

    with pytest.raises(OSError, match="torn file"):
        train(embeddings, model, optimizer, torn(), overlap=overlap)
    assert run.save()
    assert embeddings.counters().lost.keys() <= {"batches/closed"}
    train(embeddings, model, optimizer, batches(3), overlap=overlap)
    embeddings.drain()
    assert embeddings.step >= 4
    for store in embeddings.tables.values():
        store.check()


@each_way
def test_a_refused_gradient_is_reported_once_and_counted(overlap: bool) -> None:
    embeddings, model, optimizer = job()
    with pytest.raises(NonFiniteError) as raised, embeddings.stream(batches(4), overlap=overlap) as stream:
        for batch in stream:
            (batch.embeddings.sum() * float("nan")).backward()
            optimizer.step()
    assert overlap or raised.traceback[-1].name == "_step"  # without the frames of the pipeline
    assert all(np.isfinite(values).all() for values in rows(embeddings).values())
    assert embeddings.counters().lost["batches/failed"] == 1
    train(embeddings, model, optimizer, batches(2))
    assert embeddings.counters().lost["batches/failed"] == 1


@each_way
def test_an_error_is_raised_once_without_a_with_block(overlap: bool) -> None:
    embeddings, model, optimizer = job(1)
    stream = embeddings.stream(batches(6), overlap=overlap)
    with pytest.raises(NonFiniteError):
        for batch in stream:
            (batch.embeddings.sum() * (float("inf") if batch.step == 2 else 1.0)).backward()
            optimizer.step()
        embeddings.drain()
    train(embeddings, model, optimizer, batches(2), overlap=overlap)
    embeddings.drain()
    assert embeddings.counters().lost["batches/failed"] == 1


@each_way
def test_one_training_stream_at_a_time(overlap: bool) -> None:
    embeddings, model, optimizer = job(1)
    outer = embeddings.stream(batches(6), overlap=overlap)
    train_step(model, optimizer, next(outer))
    train(embeddings, model, optimizer, batches(2), overlap=overlap)
    with pytest.raises(StreamError, match="ended when another training stream started"):
        next(outer)
    assert sum(embeddings.counters().lost.values()) == 0
    outer.close()


@each_way
def test_a_closed_stream_is_at_its_end_or_refuses(overlap: bool) -> None:
    embeddings, model, optimizer = job(1)
    stream = embeddings.stream(batches(5), overlap=overlap)
    for _ in range(2):
        train_step(model, optimizer, next(stream))
    stream.close()
    with pytest.raises(StreamError, match="this stream was closed"):
        next(stream)
    assert embeddings.step == 2, "updates that were handed over are applied"
    whole = embeddings.stream(batches(1), overlap=overlap)
    train_step(model, optimizer, next(whole))
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(whole)


def test_a_hanging_source_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.train.prefetch_pipeline._CLOSE_SECONDS", 0.2)
    embeddings, model, optimizer = job()
    before = threading.enumerate()
    inside, release = threading.Event(), threading.Event()

    def hanging() -> Iterator[Inputs]:
        yield from batches(1)
        inside.set()
        release.wait(DEADLINE_SECONDS)

    stream = embeddings.stream(hanging(), overlap=True)
    next(stream)
    assert inside.wait(DEADLINE_SECONDS)
    with pytest.raises(StreamError, match="satrap-read did not stop within"):
        stream.close()
    stream.close()
    train(embeddings, model, optimizer, batches(2))
    release.set()
    for thread in threading.enumerate():
        if thread.name == "satrap-read" and thread not in before:
            thread.join(DEADLINE_SECONDS)


@each_way
def test_a_checkpoint_from_another_thread(overlap: bool, tmp_path: Path) -> None:
    embeddings, model, optimizer = job()
    run = Checkpoint(tmp_path, model, optimizer, embeddings, keep=1)
    inside, done = threading.Event(), threading.Event()

    def save() -> None:
        with session_of(embeddings).pause():
            inside.set()
            done.wait(0.3)

    saver = threading.Thread(target=save)
    with embeddings.stream(batches(20), overlap=overlap) as stream:
        for batch in stream:
            train_step(model, optimizer, batch)
            if batch.step == 3:
                saver.start()
                assert inside.wait(DEADLINE_SECONDS)
    saver.join(DEADLINE_SECONDS)
    assert not saver.is_alive() and embeddings.step == 20
    assert run.save()


def test_positions_belong_to_their_source(tmp_path: Path) -> None:
    job_ = Job(str(tmp_path), 6)
    other: Any = Source(9)
    for source, steps in ((job_.source, 2), (other, 4)):
        stream = job_.embeddings.stream(source)
        for _ in range(steps):
            next(stream).embeddings.sum().backward()
            job_.optimizer.step()
    job_.run.save()
    again = Job(str(tmp_path), 6)
    assert again.run.resume()
    stream = again.embeddings.stream(other)
    next(stream).embeddings.sum().backward()  # starts at its beginning, and changes no position
    first = next(again.embeddings.stream(again.source))
    assert first.position is not None and first.position.batch == 3


def test_positions_never_go_back(tmp_path: Path) -> None:
    source, features = Source(8), Job(str(tmp_path), 8).embeddings.features
    embeddings = Embeddings(dict(features), staleness=4, num_threads=1)
    optimizer = embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    session_of(embeddings).track_position(source)
    for batch in embeddings.stream(source, overlap=False):
        if batch.step != 6:
            batch.embeddings.sum().backward()
            optimizer.step()
    position = session_of(embeddings).position_of(source)
    assert position is not None and position.batch == 8


def test_a_loss_after_the_step_is_refused() -> None:
    embeddings, _, optimizer = job()
    batch = next(embeddings.stream(batches(2)))
    loss = batch.embeddings.sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(StreamError, match=r"step 1: a loss reached its batch after optimizer\.step\(\) had taken it"):
        loss.backward()


def test_a_cyclic_momentum_schedule_works() -> None:
    embeddings, model, _ = job()
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters()))
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.1, 0.1], total_steps=6)
    for batch in embeddings.stream(batches(5)):
        train_step(model, optimizer, batch)
        cycle.step()
    assert embeddings.step == 5


def test_training_in_eval_is_refused() -> None:
    embeddings, model, optimizer = job()
    train(embeddings, model, optimizer, batches(2))
    embeddings.eval()
    with pytest.raises(StreamError, match=r"in eval\(\): call embeddings\.train\(\) before"):
        train(embeddings, model, optimizer, batches(2))
    embeddings.train()
    for batch in embeddings.stream(batches(2)):
        embeddings.eval()
        for _ in embeddings.stream(batches(1)):  # an evaluation within the training
            pass
        embeddings.train()
        train_step(model, optimizer, batch)
    assert embeddings.step == 4


def test_an_iterable_is_iterated_once() -> None:
    class Loader:
        times = 0

        def __iter__(self) -> Iterator[Inputs]:
            self.times += 1
            return iter(batches(2))

    embeddings, model, optimizer = job()
    loader = Loader()
    train(embeddings, model, optimizer, loader)
    assert loader.times == 1


def test_a_data_frame_is_refused_as_batches() -> None:
    embeddings, *_ = job()
    with pytest.raises(SourceError, match=r"item 0 is a str; expected .* to satrap\.Frame"):
        next(embeddings.stream({"user": np.arange(BATCH)}))
