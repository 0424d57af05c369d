"""Rows on a device are found ahead of their lookup, in the thread that reads: the same results as without."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loop import Net, loss_of, tables
from loop import batches as draw_batches
from satrap import Adagrad, Checkpoint, Embeddings, MinCount, Table
from satrap.data.inputs import Inputs

NUM_IDS = 40


def features(**options: Any) -> dict[str, Any]:
    item = Table("item", dim=4, optimizer=Adagrad(lr=0.1), num_buckets=2, **options)
    return {"user": Table("user", dim=4, optimizer=Adagrad(lr=0.1)), "item": item, "history": item.bag("mean")}


def batches(rng: np.random.Generator, num: int) -> list[Inputs]:
    return draw_batches(num, seed=int(rng.integers(1000)))


def train(
    data: list[Inputs], declared: dict[str, Any], *, overlap: bool, device: str | None, accumulate: int = 1, **how: Any
) -> tuple[Embeddings, torch.nn.Module]:
    torch.manual_seed(0)
    embeddings = Embeddings(declared, device=device, num_threads=1, seed=3, **how)
    model = Net()
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    with embeddings.stream(data, overlap=overlap, accumulate=accumulate) as stream:
        for number, batch in enumerate(stream, 1):
            loss_of(model, batch).backward()
            if number % 7 == 0:
                optimizer.zero_grad()
            elif batch.completes_step:
                optimizer.step()
                optimizer.zero_grad()
    return embeddings, model


def contents(embeddings: Embeddings, model: torch.nn.Module) -> Any:
    ids = np.arange(NUM_IDS, dtype=np.uint64)
    found = []
    for table in embeddings.tables.values():
        table.check()
        counts = {name: count for name, count in table.stats().items() if name != "bytes"}
        found.append((counts, [part.tobytes() for part in table.read(ids)]))
    return found, [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"capacity": 34}, {"capacity": 46}], ids=["grows", "tight", "evicts"])
@pytest.mark.parametrize(("staleness", "accumulate"), [(0, 1), (0, 3), (2, 1)])
def test_it_equals_rows_in_memory(
    options: dict[str, Any], staleness: int, accumulate: int, rng: np.random.Generator
) -> None:
    """A tight capacity has no room for the batch ahead, which is then found at its lookup."""
    data = batches(rng, 25)
    how: dict[str, Any] = {"staleness": staleness, "accumulate": accumulate, "deterministic": staleness > 0}
    expected = train(data, features(**options), overlap=False, device=None, **how)
    found = train(data, features(**options), overlap=True, device="cpu", **how)
    assert contents(*found) == contents(*expected)


def test_the_next_batch_is_found_while_a_step_is_in_progress(rng: np.random.Generator) -> None:
    embeddings = Embeddings(features(), device="cpu", num_threads=1)
    model = Net()
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    resolved, changed = [], threading.Condition()
    resolve = embeddings.worker.resolve

    def note(inputs: Inputs, **at: int) -> Any:
        request = resolve(inputs, **at)
        with changed:
            resolved.append(at["step"])
            changed.notify()
        return request

    embeddings.worker.resolve = note  # type: ignore[method-assign]
    with embeddings.stream(batches(rng, 4), overlap=True) as stream:
        for batch in stream:
            with changed:
                assert changed.wait_for(partial(lambda step: step in resolved, min(4, batch.step + 1)), 30)
            loss_of(model, batch).backward()
            optimizer.step()
    assert resolved == [1, 2, 3, 4]


def test_tables_whose_rows_depend_on_the_order_are_not_resolved_ahead(rng: np.random.Generator) -> None:
    data = batches(rng, 12)
    for options in ({"admission": MinCount(2)}, {"expire_after": 3}):
        found = train(data, features(**options), overlap=True, device="cpu")
        assert found[0].worker.resolve(data[0], step=100, oldest_open=100) is None
        assert contents(*found) == contents(*train(data, features(**options), overlap=False, device=None))


def test_a_checkpoint_in_the_middle_resumes_to_the_same_end(tmp_path: Path, rng: np.random.Generator) -> None:
    """It may have rows of the batch ahead, with their initial values."""
    data = batches(rng, 12)
    ends = []
    for until in (None, 5):
        torch.manual_seed(0)
        for part in range(1 if until is None else 2):
            embeddings = Embeddings(features(capacity=46), device="cpu", num_threads=1, seed=3)
            model = Net()
            optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
            run = Checkpoint(tmp_path / str(until), model, optimizer, embeddings, data)
            assert run.resume() == (part == 1)
            for batch in embeddings.stream(data, overlap=True):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if batch.step == until and part == 0:
                    run.save()
                    break
            embeddings.drain()
        found, dense = contents(embeddings, model)
        ends.append(([rows for _, rows in found], dense))
    assert ends[0] == ends[1]


def test_a_pause_waits_for_rows_that_are_being_found(rng: np.random.Generator) -> None:
    """A save would have them in some tables only."""
    embeddings = Embeddings(features(), device="cpu", num_threads=1)
    embeddings.optimizer(torch.optim.SGD(Net().parameters(), lr=0.05))
    started, is_paused, found_in_a_pause = threading.Event(), threading.Event(), []
    resolve = embeddings.worker.resolve

    def watched(inputs: Inputs, **at: int) -> Any:
        if at["step"] == 2:
            started.set()
            found_in_a_pause.append(is_paused.wait(0.3))
        return resolve(inputs, **at)

    embeddings.worker.resolve = watched  # type: ignore[method-assign]
    with embeddings.stream(batches(rng, 4), overlap=True) as stream:
        next(stream)
        assert started.wait(30)
        with stream._pipeline.pause():
            is_paused.set()
    assert found_in_a_pause == [False]


def test_batches_found_ahead_are_dropped_with_the_stream(rng: np.random.Generator) -> None:
    embeddings = Embeddings(tables(), device="cpu", num_threads=1)
    optimizer = embeddings.optimizer(torch.optim.SGD(Net().parameters(), lr=0.05))
    assert optimizer is not None
    stream = embeddings.stream(batches(rng, 6), overlap=True)
    next(stream)
    stream.close()
    assert all(batch.request is None for batch in stream._ledger.to_look_up)
