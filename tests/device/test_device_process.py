"""Rows on a device and the process that has them: threads, forks, copies, the collector, Ctrl-C and memory that runs
out."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bag_oracle import UNIVERSE
from cluster import batch, one_table
from device_workers import assert_equal, pair
from forks import expect_refusal, in_fork
from satrap import Embeddings
from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adagrad, Adam
from satrap.config.tables import Normal, Table, Zeros
from satrap.data.inputs import Inputs
from satrap.device import reference
from satrap.device.device_worker import device_worker
from satrap.device.row_memory import RowMemory
from satrap.device.runs import Runs
from satrap.errors import CapacityError
from waiting import DEADLINE_SECONDS, wait_until

three_wide = partial(one_table, dim=3, initial=Normal(std=0.5))


@pytest.mark.parametrize("device_memory", [None, 60 * 12], ids=["one tier", "two tiers"])
def test_threads_lose_no_update(device_memory: int | None, tmp_path: Path) -> None:
    """Rows become minus the sum of their gradients, whatever the order; others read, save and check meanwhile. In two
    tiers, rows go home between their lookup and their update."""
    features = three_wide(optimizer=SGD(1.0), initial=Zeros(), num_buckets=4)
    worker: Any = device_worker(features, "cpu", num_threads=2, device_memory=device_memory)
    store, universe, steps, callers = worker.tables["t"], 200, 60, 3
    done = np.zeros(universe)

    def train_and_count(seed: int) -> np.ndarray[Any, Any]:
        rng, counts = np.random.default_rng(seed), np.zeros(universe)
        for _ in range(steps):
            ids = rng.integers(0, universe, 50)
            looked = worker.lookup(batch(ids))
            assert looked.ticket is not None
            if rng.random() < 0.2:
                worker.drop(looked.ticket)
                continue
            worker.update([looked.ticket], [-torch.ones(50, 3)])
            np.add.at(counts, ids, 1)
        return counts

    def watch(number: int) -> None:
        for i in range(10):
            rows = store.read(np.arange(universe, dtype=np.uint64))
            assert (rows.values == np.floor(rows.values)).all()
            assert store.stats()["rows"] <= universe
            store.check()
            store.save(tmp_path / f"{number}-{i}")
            worker.lookup(batch(np.arange(universe)), train=False)

    with ThreadPoolExecutor(callers + 2) as threads:
        watched = [threads.submit(watch, i) for i in range(2)]
        for each in [threads.submit(train_and_count, i) for i in range(callers)]:
            done += each.result(DEADLINE_SECONDS)
        for watching in watched:
            watching.result(DEADLINE_SECONDS)
    store.check()
    np.testing.assert_array_equal(store.read(np.arange(universe, dtype=np.uint64)).values, done[:, None].repeat(3, 1))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_is_refused_whatever_is_held(tmp_path: Path) -> None:
    worker: Any = device_worker(three_wide(), "cpu", num_threads=2)
    looked = worker.lookup(batch(UNIVERSE))
    ticket: Any = looked.ticket
    store, home, zeros = worker.tables["t"], os.getpid(), torch.zeros(len(UNIVERSE), 3)
    calls: list[Callable[[], object]] = [
        lambda: worker.lookup(batch(UNIVERSE)),
        lambda: worker.lookup(batch(UNIVERSE), train=False),
        lambda: worker.update([ticket], [zeros]),
        lambda: worker.update([ticket], [zeros], step=1),
        lambda: worker.drop(ticket),
        lambda: store.read(UNIVERSE),
        lambda: store.lookup(UNIVERSE, train=False),
        lambda: store.stats(),
        lambda: store.check(),
        lambda: store.save(tmp_path / "saved"),
        lambda: worker.tables.restore({"t": [tmp_path / "saved"]}),
    ]
    with worker.rows._engine.exclusive():

        def body() -> None:
            for call in calls:
                expect_refusal(home, call)
            gc.collect()

        in_fork(body)
    worker.update([ticket], [zeros])


def test_they_can_be_neither_copied_nor_pickled() -> None:
    for each in (
        device_worker(three_wide(), "cpu", num_threads=1),
        Embeddings(dict(one_table(dim=3)), num_threads=1, device="cpu"),
    ):
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"neither copied nor pickled|cannot pickle"):
                attempt(each)


def test_rows_are_freed_without_the_collector() -> None:
    gc.disable()
    try:
        worker: Any = device_worker(three_wide(), "cpu", num_threads=1)
        looked = worker.lookup(batch(UNIVERSE))
        engine = weakref.ref(worker.rows._engine)
        del worker, looked
        assert engine() is None
        embeddings = Embeddings(dict(one_table(dim=3)), num_threads=1, device="cpu")
        engine = weakref.ref(embeddings.worker.rows._engine)  # type: ignore[attr-defined]
        embeddings.worker.lookup(batch(UNIVERSE))
        next(embeddings.stream([batch(UNIVERSE)], train=False))
        del embeddings
        wait_until(lambda: engine() is None)  # a thread closes the stream
    finally:
        gc.enable()


def test_a_restore_frees_the_rows_before(tmp_path: Path) -> None:
    worker: Any = device_worker(three_wide(), "cpu", num_threads=1)
    worker.lookup(batch(UNIVERSE))
    worker.tables["t"].save(tmp_path)
    before = weakref.ref(worker.rows._engine)
    worker.tables.restore({"t": [tmp_path]})
    gc.collect()
    assert before() is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_rows_whose_values_could_not_be_written_get_them_later(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup inserts rows and fails before their initial values are on the device: no reader sees what was there."""
    workers = pair(three_wide())
    initialise = RowMemory.initialise

    def fail(*_: object) -> None:
        raise error("no memory, or Ctrl-C")

    later: list[Callable[[Any], object]] = [
        lambda worker: worker.lookup(batch(UNIVERSE[:3]), step=2),
        lambda worker: worker.lookup(batch(UNIVERSE[:3]), train=False),
        lambda worker: worker.tables["t"].read(UNIVERSE[:3]),
    ]
    for call in later:
        ids = UNIVERSE[:3]
        workers[0].lookup(batch(ids), step=1)
        monkeypatch.setattr(RowMemory, "initialise", fail)
        with pytest.raises(error):
            workers[1].lookup(batch(ids), step=1)
        with pytest.raises(error):  # it is still full
            call(workers[1])
        monkeypatch.setattr(RowMemory, "initialise", initialise)
        for worker in workers:
            call(worker)
        assert_equal(workers)
        workers = pair(three_wide())


def test_memory_for_the_rows_that_are_needed_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory grows by half, and by what a batch needs where that does not fit."""
    worker: Any = device_worker(three_wide(), "cpu", num_threads=1)
    worker.lookup(batch(np.arange(100)))
    empty = RowMemory._empty

    def limited(memory: RowMemory, frames: int) -> Any:
        if frames > 110:
            raise torch.OutOfMemoryError("full")
        return empty(memory, frames)

    monkeypatch.setattr(RowMemory, "_empty", limited)
    worker.lookup(batch(np.arange(100, 110)))
    assert len(worker.tables["t"]) == 110
    with pytest.raises(CapacityError, match="tables 't': cpu has no memory for 111 rows: expected 2,664 bytes"):
        worker.lookup(batch([110]))
    assert len(worker.tables["t"]) == 110


def test_the_memory_of_bounded_tables_is_allocated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never copied to grow, which would take 2.5 times as much. A table that may grow is none of them."""
    two = {name: Table(name, dim=3, capacity=100, num_buckets=2) for name in ("a", "b")}
    worker: Any = device_worker(Features(two), "cpu", num_threads=1)
    memory = worker.rows._engine.memories[0]
    inputs = [Inputs(names=("a", "b"), values=np.arange(2 * n, dtype=np.uint64) + 9, batch_size=n) for n in (1, 60)]
    worker.lookup(inputs[0])
    address = memory.values.data_ptr()
    assert len(memory.values) == 200
    for _ in range(9):
        worker.lookup(inputs[1])
        inputs[1].values[:] += np.uint64(40)
    worker.tables["a"].check()
    assert memory.values.data_ptr() == address and len(memory.values) == 200
    grows: Any = device_worker(three_wide(capacity=100, on_full="grow"), "cpu", num_threads=1)
    grows.lookup(batch([1]))
    assert len(grows.rows._engine.memories[0].values) == 1

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    full: Any = device_worker(three_wide(capacity=500), "cpu", num_threads=1)
    monkeypatch.setattr(RowMemory, "_empty", fail)
    expected = "tables 't': cpu has no memory for 500 rows, all that their capacity permits: expected 12,000 bytes"
    with pytest.raises(CapacityError, match=expected):
        full.lookup(batch([1]))
    assert len(full.tables["t"]) == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("where", ["to_device", "update"])
def test_an_update_that_runs_out_of_memory_is_done_later(
    where: str, on_nonfinite: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core has stamped and counted its rows, so it must happen, before anything reads them, and once."""
    tables = {name: Table(name, dim=3, optimizer=Adam(0.1), on_nonfinite=on_nonfinite) for name in ("a", "b")}
    tables["b"] = replace(tables["b"], optimizer=Adagrad(0.1))
    workers = pair(Features(tables))
    owner, name = {"to_device": (Runs, "to_device"), "update": (reference, "update")}[where]
    works = getattr(owner, name)
    gradient = torch.arange(12, dtype=torch.float32).reshape(2, 6).numpy()
    if on_nonfinite == "skip":
        gradient[0, :] = np.nan
    later: list[Callable[[Any, Any], object]] = [
        lambda worker, inputs: worker.lookup(inputs, step=2),
        lambda worker, inputs: worker.lookup(inputs, train=False),
        lambda worker, inputs: worker.tables["a"].read(inputs.values),
    ]
    for call in later:
        inputs = Inputs(names=("a", "b"), values=UNIVERSE[:4], batch_size=2)
        tickets = [worker.lookup(inputs, step=1).ticket for worker in workers]
        workers[0].update([tickets[0]], [gradient], step=1)
        calls: list[int] = []

        def fail(*given: Any, calls: list[int] = calls, **how: Any) -> Any:
            calls.append(1)
            if where == "update" and len(calls) == 1:
                return works(*given, **how)  # the first group of tables
            raise error("no memory, or Ctrl-C")

        monkeypatch.setattr(owner, name, fail)
        with pytest.raises(error):
            workers[1].update([tickets[1]], [gradient], step=1)
        with pytest.raises(error):  # it is still full
            call(workers[1], inputs)
        monkeypatch.setattr(owner, name, works)
        for worker in workers:
            call(worker, inputs)
        assert_equal(workers)
        workers = pair(Features(tables))
