"""Rows on a device against rows in the core: the same bits, counters, errors and snapshots, for every option of a table
and of a feature. The device is the CPU, on which the same code runs as on any other; train/test_gpu.py imports these
tests for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bag_oracle import UNIVERSE, draw_bags, follow
from cluster import features, step_both
from contents import worker_contents
from device_workers import (
    LIVES,
    ArrayWorker,
    SortingWorker,
    every_kind,
    give_gradients_that_are_not_finite,
    pair,
    take_random_steps,
    take_steps_of_every_size,
    three_features,
)
from one_row import OPTIMIZERS
from satrap.config.features import Features
from satrap.config.optimizers import Adagrad, Adam
from satrap.config.tables import Feature, MinCount, Normal, Table
from satrap.data.inputs import Inputs
from satrap.device.device_worker import device_worker
from satrap.device.home_memory import RowLayout
from satrap.device.row_memory import RowMemory
from satrap.errors import CapacityError, InputError, SatrapError, TicketError
from satrap.table.store import Store
from snapshots import assert_same, exported

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_it_has_the_bits_of_the_core(optimizer: Any, dtype: Any, device: str, rng: np.random.Generator) -> None:
    dim = int(rng.integers(1, 40))
    table = Table("item", dim=dim, optimizer=optimizer, dtype=dtype, initial=Normal(std=0.5), num_buckets=4)
    take_steps_of_every_size(pair(every_kind(table), device=device), rng, UNIVERSE)


@pytest.mark.parametrize("life", LIVES)
def test_rows_live_as_in_the_core(life: str, device: str, rng: np.random.Generator) -> None:
    """Admission, eviction, expiry and absent rows; a feature without a gradient, dropped batches, and evaluation; with
    staleness, an id that was refused and is admitted before its gradient arrives."""
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1), **LIVES[life])
    take_random_steps(pair(three_features(item), device=device), item, rng, batch_size=1, same_errors=False)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_equals_torch(accumulate: int, device: str, rng: np.random.Generator) -> None:
    follow(ArrayWorker(features(), device, num_threads=1), rng, num_steps=3, accumulate=accumulate, scale=0.5)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_gradients_that_are_not_finite(on_nonfinite: Any, device: str, rng: np.random.Generator) -> None:
    item = Table("item", dim=3, on_nonfinite=on_nonfinite, optimizer=Adagrad(lr=0.1))
    declared = three_features(item)
    give_gradients_that_are_not_finite(pair(declared, device=device), declared, rng)


def test_gradients_of_another_number_of_rows_are_refused(device: str) -> None:
    """They would be read beyond their end; and lengths of aligned sequences are compared, wherever the ids are."""
    item = Table("item", dim=2)
    worker: Any = device_worker(Features({"a": item.sequence(), "b": item.sequence(aligned_with="a")}), device)
    ids, offsets = np.arange(6, dtype=np.uint64), np.array([0, 3, 3, 5, 6])
    with pytest.raises(InputError, match="sample 0 has 2 ids of 'b' and 3 of 'a', with which it is aligned"):
        worker.lookup(Inputs(names=("a", "b"), values=ids, offsets=offsets, batch_size=2), step=1)
    with pytest.raises(InputError, match="sample 0 has 2 ids of 'b' and 3 of 'a', with which it is aligned"):
        on_device: Any = (torch.from_numpy(each).to(device) for each in (ids.view(np.int64), offsets))
        values, bounds = on_device
        worker.lookup(Inputs(names=("a", "b"), values=values, offsets=bounds, batch_size=2), step=1)
    offsets = np.array([0, 2, 3, 5, 6])
    looked = worker.lookup(Inputs(names=("a", "b"), values=ids, offsets=offsets, batch_size=2), step=1)
    before = worker_contents(worker, UNIVERSE)
    rows = looked.sequences["a"]
    assert rows.shape == (3, 2) and looked.offsets["a"].tolist() == [0, 2, 3]
    with pytest.raises(InputError, match="a sequence's gradients are 4 floats; expected 6"):
        worker.update([looked.ticket], [None], [{"a": torch.ones_like(rows)[:2]}], step=1)
    assert worker_contents(worker, UNIVERSE) == before
    worker.update([looked.ticket], [None], [{"a": torch.ones_like(rows)}], step=1)
    assert worker_contents(worker, UNIVERSE) != before


def test_what_is_refused_changes_nothing(rng: np.random.Generator) -> None:
    worker: Any = device_worker(features(), CPU, num_threads=1)
    inputs = draw_bags(rng, worker.features, 4).inputs()
    looked = worker.lookup(inputs, step=1)
    ticket: Any = looked.ticket
    block = torch.ones_like(looked.block)
    before = worker_contents(worker, UNIVERSE)
    refused: list[tuple[Any, type[SatrapError], str]] = [
        (lambda: worker.update([ticket], [block.numpy()]), InputError, "is a ndarray; expected a tensor on cpu"),
        (
            lambda: worker.update([ticket], [block[:2]]),
            InputError,
            r"of shape \(2, .*expected float32 or 16",
        ),
        (lambda: worker.update([ticket], [block.double()]), InputError, "is torch.float64"),
        (lambda: worker.lookup(inputs, step=2, block=block[:2]), InputError, "block is torch.float32 of shape"),
        (lambda: worker.tables["item"].lookup(UNIVERSE), InputError, "only a stream of `Embeddings` trains them"),
        (lambda: worker.tables["item"].update(UNIVERSE, np.ones((14, 5), np.float32)), InputError, "updates them"),
    ]
    for call, error, match in refused:
        with pytest.raises(error, match=match):
            call()
    assert worker_contents(worker, UNIVERSE) == before
    worker.update([ticket], [block])
    with pytest.raises(TicketError, match="used already"):
        worker.update([ticket], [block])


def test_a_store_reads_rows_on_the_device(device: str, rng: np.random.Generator) -> None:
    workers = pair(features(), device=device)
    for step in range(1, 4):
        step_both(workers, rng, [draw_bags(rng, workers[0].features, 9)], step)
    for name, store in workers[0].tables.items():
        other = workers[1].tables[name]
        assert len(other) == len(store) and other.version == store.version
        np.testing.assert_array_equal(other.lookup(UNIVERSE, train=False), store.lookup(UNIVERSE, train=False))
        assert other.stats()["bytes"] > len(other) * 4 * store.table.dim
    offsets = np.array([0, 3, 5, 9])
    np.testing.assert_array_equal(*(worker.tables.lookup(UNIVERSE[:9], offsets, train=False) for worker in workers))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_snapshots_are_those_of_the_core(dtype: Any, device: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Full ones and changes, saved from either and loaded into either."""
    item = Table("item", dim=5, optimizer=Adam(), dtype=dtype, admission=MinCount(2), capacity=12, num_buckets=2)
    declared = Features({"item": Feature(item), "bag": item.bag("sum")})
    workers = pair(declared, device=device)
    stores = [worker.tables["item"] for worker in workers]
    for step in range(1, 9):
        step_both(workers, rng, [draw_bags(rng, declared, 1)], step)
        if step == 4:
            versions = [store.save(tmp_path / f"full{i}") for i, store in enumerate(stores)]
    for i, store in enumerate(stores):
        store.save_changes(tmp_path / f"changes{i}", since=versions[i])
    expected = exported(stores[0])
    for i in (0, 1):
        loaded = Store.load(tmp_path / f"full{i}", num_threads=1)
        loaded.apply_changes(tmp_path / f"changes{i}")
        assert_same(exported(loaded), expected)
        again = ArrayWorker(declared, device, seed=3, num_threads=1)
        again.tables.restore({"item": [tmp_path / f"full{i}", tmp_path / f"changes{i}"]})
        assert_same(exported(again.tables["item"]), expected)
        again.tables["item"].check()
        again.tables.restore({"item": [tmp_path / f"full{i}"]})  # once more, over used tables
        again.tables["item"].apply_changes(tmp_path / f"changes{i}")
        assert_same(exported(again.tables["item"]), expected)


def test_memory_grows_with_the_rows_and_frames_are_used_again(device: str) -> None:
    item = Table("item", dim=4, capacity=64, num_buckets=1)
    worker = device_worker(Features({"item": item}), device, num_threads=1)
    for step in range(1, 50):
        ids = np.arange(step * 10, step * 10 + 16, dtype=np.uint64)
        looked = worker.lookup(Inputs(names=("item",), values=ids, batch_size=16), step=step)
        assert looked.ticket is not None
        worker.drop(looked.ticket)
        worker.tables["item"].check()
    store = worker.tables["item"]
    assert len(store) == 64 and store.stats()["evicted"] > 300
    assert len(worker.rows._engine.memory(0).values) <= 120  # type: ignore[attr-defined]


def test_the_error_of_a_gpu_without_memory_has_the_bytes_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: only the allocation and the count of free bytes are asked of the device."""

    def full(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    memory = RowMemory(RowLayout("float32", 4, 4), CPU)
    memory.device = torch.device("cuda", 1)
    free = {memory.device: (12_345, 80 << 30)}
    monkeypatch.setattr("satrap.device.row_memory.torch.empty", full)
    monkeypatch.setattr("torch.cuda.mem_get_info", free.__getitem__)
    expected = (
        "tables 'item', 'user': cuda:1 has no memory for 1000 rows: expected 32,000 bytes and has 12,345 bytes free"
    )
    with pytest.raises(CapacityError, match=expected) as error:
        memory.reserve(1000, ["item", "user"])
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    assert len(memory.values) == 0


def test_a_device_without_memory_is_an_error_that_changes_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item = Table("item", dim=4)
    worker = device_worker(Features({"item": item}), device, num_threads=1)
    first = Inputs(names=("item",), values=UNIVERSE, batch_size=len(UNIVERSE))
    worker.lookup(first, step=1)
    before = worker_contents(worker, UNIVERSE)

    def full(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    many = Inputs(names=("item",), values=np.arange(100, 200, dtype=np.uint64), batch_size=100)
    with monkeypatch.context() as patched:
        patched.setattr("satrap.device.row_memory.torch.empty", full)
        patched.setattr(worker.rows, "empty", lambda lines, floats: torch.zeros((lines, floats), device=device))
        expected = rf"tables 'item': {device}.* has no memory for 1\d\d rows: expected [\d,]+ bytes"
        with pytest.raises(CapacityError, match=expected + (".* bytes free" if device == "cuda" else "")):
            worker.lookup(many, step=2)
    assert worker_contents(worker, UNIVERSE) == before
    worker.lookup(many, step=2)
    assert len(worker.tables["item"]) == len(UNIVERSE) + 100


@pytest.mark.parametrize("memory", [None, "none", 2 * 32])
def test_a_write_that_does_not_fit_changes_nothing(memory: Any, device: str) -> None:
    """Else rows would be left whose frames hold no values."""
    item = Table("item", dim=4, optimizer=Adagrad(lr=0.1), capacity=4, num_buckets=1)
    memories = None if memory is None else {"item": memory}
    worker: Any = device_worker(Features({"item": item}), device, num_threads=1, device_memory=memories)
    store, ids = worker.tables["item"], np.arange(9, dtype=np.uint64)
    store.write(ids[:2], np.full((2, 4), 5, np.float32))
    before = worker_contents(worker, ids)
    with pytest.raises(CapacityError, match=r"bucket 0 of 1 would have 9 rows .* at least 9 with num_buckets=1"):
        store.write(ids[1:], np.full((8, 4), 7, np.float32))
    assert worker_contents(worker, ids) == before
    store.write(ids[1:4], np.full((3, 4), 7, np.float32))
    assert (store.read(ids[:4]).values[:, 0] == [5, 7, 7, 7]).all()
    assert worker_contents(worker, ids) != before


def test_offsets_that_are_refused_take_no_memory(device: str) -> None:
    """They say how many rows a lookup may insert, and the core checks them later."""
    tables = {name: Table(name, dim=4) for name in ("a", "b")}
    worker: Any = device_worker(Features({name: table.bag("sum") for name, table in tables.items()}), device)
    inputs = Inputs(
        names=("a", "b"),
        values=np.arange(3, dtype=np.uint64),
        offsets=np.array([0, 1, 10**12, 2, 3]),
        batch_size=2,
    )
    with pytest.raises(InputError, match="offsets fall from 1000000000000 to 2 at sample 0 of feature 'b'"):
        worker.lookup(inputs, step=1)
    assert len(worker.rows._engine.memory(0).values) <= 3


@pytest.mark.parametrize("num_rows", [None, 60])
@pytest.mark.parametrize("kind", [ArrayWorker, SortingWorker])
def test_a_ticket_is_used_once(kind: type[ArrayWorker], num_rows: int | None) -> None:
    item = Table("item", dim=2, num_rows=num_rows)
    worker, other = (kind(Features({"item": item}), "cpu") for _ in range(2))
    ticket: Any = worker.lookup(Inputs(names=("item",), values=np.array([1, 1], np.uint64), batch_size=2)).ticket
    zeros = np.zeros((2, 2), np.float32)
    with pytest.raises(TicketError, match="used already"):
        worker.update([ticket, ticket], [zeros, zeros])
    with pytest.raises(TicketError, match="another store"):
        other.update([ticket], [zeros])
    worker.update([ticket], [zeros])
    calls: list[Any] = [lambda: worker.update([ticket], [zeros]), lambda: worker.drop(ticket)]
    for call in calls:
        with pytest.raises(TicketError, match="used already"):
            call()
