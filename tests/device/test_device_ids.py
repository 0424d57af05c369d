"""Ids that lie on the rows' device are sorted there: the same bits, counters and errors as for ids in CPU memory. The
device is the CPU, on which torch sorts ids only in these tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bag_oracle import UNIVERSE, draw_bags
from cluster import step_both
from contents import outcome
from device_workers import (
    LIVES,
    ArrayWorker,
    SortingWorker,
    as_tensors,
    assert_equal,
    every_kind,
    give_gradients_that_are_not_finite,
    take_random_steps,
    take_steps_of_every_size,
    three_features,
)
from loop import NUM_IDS, batches, job, loss_of, train
from one_row import OPTIMIZERS
from satrap import Embeddings, IterableSource, Table
from satrap.config.features import Features
from satrap.config.optimizers import Adagrad
from satrap.config.tables import Normal
from satrap.data.inputs import Inputs
from satrap.device import device_ids, reference
from satrap.device.device_ids import DeviceIds, GroupedIds
from satrap.errors import InputError
from satrap.worker.local_rows import local_worker


@pytest.fixture(autouse=True)
def sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_ids.SORTS_IDS, "cpu", True)


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that copies all ids of a batch to the CPU."""

    def refuse(_: DeviceIds) -> Any:
        raise AssertionError("all ids were copied")

    monkeypatch.setattr(DeviceIds, "on_cpu", refuse)


def three(declared: Features, **options: Any) -> list[Any]:
    """Workers with rows in the core, and on a device with ids in CPU memory and on the device."""
    return [
        local_worker(declared, seed=3, num_threads=2),
        ArrayWorker(declared, "cpu", seed=3, num_threads=2, **options),
        SortingWorker(declared, "cpu", seed=3, num_threads=2, **options),
    ]


@pytest.mark.draw(12)
@pytest.mark.usefixtures("stays")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_bits_and_counters(optimizer: Any, dtype: Any, rng: np.random.Generator) -> None:
    table = Table(
        "item",
        dim=int(rng.integers(1, 20)),
        optimizer=optimizer,
        dtype=dtype,
        initial=Normal(std=0.5),
        num_buckets=4,
    )
    take_steps_of_every_size(three(every_kind(table)), rng, UNIVERSE)


@pytest.mark.usefixtures("stays")
def test_one_id_in_each_bag_without_offsets(rng: np.random.Generator) -> None:
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1))
    workers = three(Features({"item": item, "other": item, "path": item.sequence(2), "user": replace(item, name="u")}))
    for step in range(1, 5):
        looked = []
        values = rng.choice(UNIVERSE, 4 * 50)
        for worker in workers:
            looked.append(worker.lookup(Inputs(names=worker.features.names, values=values, batch_size=50), step=step))
            np.testing.assert_array_equal(looked[-1].block, looked[0].block)
            np.testing.assert_array_equal(looked[-1].masks["path"], looked[0].masks["path"])
            assert looked[-1].truncated == looked[0].truncated
        block = rng.normal(size=looked[0].block.shape).astype(np.float32)
        for worker, each in zip(workers, looked, strict=True):
            worker.update([each.ticket], [block], step=step)
    assert_equal(workers)


@pytest.mark.parametrize("memory", [None, 10, 0])
@pytest.mark.parametrize("life", ["evicts", "expires", "counts", "draws", "zeros"])
def test_rows_live_as_in_the_core(life: str, memory: int | None, rng: np.random.Generator) -> None:
    """All rows on the device, some, and none."""
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1), **LIVES[life])
    device_memory = {None: None, 0: {"item": "none"}}.get(memory, {"item": 10 * 24})
    workers = three(three_features(item), device_memory=device_memory)[0 if memory is None else 1 :]
    take_random_steps(workers, item, rng, batch_size=1, same_errors=memory is not None)


def test_long_runs_of_one_id(rng: np.random.Generator) -> None:
    """Float sums depend on the order, so another order shows in the bits."""
    item = Table("item", dim=8, optimizer=Adagrad(lr=0.1))
    workers = three(Features({"item": item.bag("sum"), "again": item.bag("mean")}))
    for step in range(1, 4):
        lengths = rng.choice([0, 1, 300], 2 * 30)
        offsets = np.append(0, lengths.cumsum())
        values = rng.choice(UNIVERSE[:3], int(offsets[-1]))
        looked = []
        for worker in workers:
            inputs = Inputs(names=worker.features.names, values=values, offsets=offsets, batch_size=30)
            looked.append(worker.lookup(inputs, step=step))
        block = (rng.normal(size=(30, 16)) * 10.0 ** rng.integers(-6, 6, (30, 1))).astype(np.float32)
        for worker, each in zip(workers, looked, strict=True):
            assert each.block.tobytes() == looked[0].block.tobytes()
            worker.update([each.ticket], [block], step=step)
    assert_equal(workers)


def test_only_unique_ids_are_copied(rng: np.random.Generator) -> None:
    values = torch.from_numpy(rng.choice(UNIVERSE.view(np.int64), 5000))
    tables = torch.arange(5000) // 2500
    found = GroupedIds.of(values, tables, 3)
    ids = values.numpy().view(np.uint64)
    parts = [ids[:2500], ids[2500:]]
    unique = [np.array(list(dict.fromkeys(part.tolist())), np.uint64) for part in parts]
    np.testing.assert_array_equal(found.ids, np.concatenate(unique))
    np.testing.assert_array_equal(found.offsets, np.cumsum([0, len(unique[0]), len(unique[1]), 0]))
    np.testing.assert_array_equal(found.ids[found.inverse], ids)
    for number, (begin, end) in enumerate(zip(found.begin.tolist(), found.end.tolist(), strict=True)):
        entries = found.order[begin:end]
        assert (entries.diff() > 0).all() and (found.inverse[entries] == number).all()


def test_batches_on_both_sides_are_one_step(rng: np.random.Generator) -> None:
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1))
    declared = Features({"item": item, "bag": item.bag("mean", weighted=True), "path": item.sequence(2)})
    workers = three(declared)
    for step in range(1, 4):
        bags = [draw_bags(rng, declared, 5) for _ in range(3)]
        blocks = [rng.normal(size=(5, 6)).astype(np.float32) for _ in bags]
        for worker in workers:
            tickets = [
                (ArrayWorker.lookup if number == 1 and worker is workers[2] else type(worker).lookup)(
                    worker, each.inputs(), step=step
                ).ticket
                for number, each in enumerate(bags)
            ]
            worker.update(tickets, blocks, step=step)
    assert_equal(workers)


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_gradients_that_are_not_finite(how: Any, rng: np.random.Generator) -> None:
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1), on_nonfinite=how)
    declared = three_features(item)
    give_gradients_that_are_not_finite(three(declared), declared, rng)


WRONG: dict[str, dict[str, Any]] = {
    "ids of another dtype": {"values": np.zeros(4, np.int32)},
    "ids of two dimensions": {"values": np.zeros((2, 2), np.uint64)},
    "too few ids": {"values": np.zeros(3, np.uint64), "offsets": None},
    "offsets that fall": {"offsets": np.array([0, 3, 2, 3, 4])},
    "offsets that begin late": {"offsets": np.array([1, 2, 2, 3, 4])},
    "offsets that end early": {"offsets": np.array([0, 2, 2, 3, 3])},
    "offsets of another size": {"offsets": np.array([0, 2, 4])},
    "offsets of another dtype": {"offsets": np.array([0, 1, 2, 3, 4], np.int32)},
    "a weight that is not finite": {"weights": np.array([1, 1, np.nan, 1], np.float32)},
    "no weights": {"weights": None},
    "too few weights": {"weights": np.ones(3, np.float32)},
    "weights of another dtype": {"weights": np.ones(4)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_refused_has_the_same_message(wrong: str) -> None:
    item = Table("item", dim=2)
    declared = Features({"item": item, "bag": item.bag("sum", weighted=True)})
    inputs = Inputs(
        names=declared.names,
        values=np.arange(4, dtype=np.uint64),
        offsets=np.array([0, 1, 2, 3, 4]),
        weights=np.ones(4, np.float32),
        batch_size=2,
    )
    messages = []
    for worker in three(declared):
        with pytest.raises(InputError) as error:
            worker.lookup(replace(inputs, **WRONG[wrong]), step=1)
        messages.append(str(error.value).replace(".to(torch.int64)", ".astype(numpy.uint64)"))
        assert len(worker.tables["item"]) == 0
    assert len(set(messages)) == 1


@pytest.mark.usefixtures("stays")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("staleness", "accumulate"), [(0, 1), (0, 3), (2, 1)])
def test_a_loop_ends_with_the_same_bits(staleness: int, accumulate: int, overlap: bool) -> None:
    found = []
    for device in (None, "cpu"):
        embeddings, model, optimizer = job(staleness, deterministic=staleness > 0, device=device)
        data = batches(18, seed=5)
        given = data if device is None else [as_tensors(each) for each in data]
        with embeddings.stream(given, accumulate=accumulate, overlap=overlap) as stream:
            positions = []
            for number, batch in enumerate(stream, 1):
                loss_of(model, batch).backward()
                positions.append(batch.position)
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append([positions, *outcome(embeddings, model)])
    assert found[0] == found[1]


def test_a_source_keeps_only_whole_batches_on_the_device() -> None:
    """A source that cuts, selects or shuffles reads ids on the CPU, with the same result."""
    data = batches(4, seed=2)
    sources: list[Any] = [
        lambda items: IterableSource(items, batch_size=7),
        lambda items: IterableSource(items, batch_size=7, shuffle=True, seed=3),
        lambda items: IterableSource([replace(each, names=("item", "user", "history")) for each in items]),
        lambda items: IterableSource(lambda: iter(items), epochs=2),
    ]
    for source in sources:
        found = []
        for device in (None, "cpu"):
            embeddings, model, optimizer = job(device=device)
            given = data if device is None else [as_tensors(each) for each in data]
            losses = train(embeddings, model, optimizer, source(given))
            found.append([losses, *outcome(embeddings, model)])
        assert found[0] == found[1]


def test_rows_of_ids_by_feature(rng: np.random.Generator) -> None:
    item = Table("item", dim=3)
    declared: dict[str, Any] = {"item": item, "bag": item.bag("mean"), "path": item.sequence(2)}
    embeddings = Embeddings(declared, device="cpu", num_threads=1)
    ids, offsets = rng.integers(0, NUM_IDS, 9), np.array([0, 4, 4, 9])
    arrays = {"bag": (ids, offsets), "path": (ids, offsets), "item": ids[:3]}
    seen: list[Any] = []
    look_up = embeddings.worker.lookup

    def note(inputs: Inputs, **options: Any) -> Any:
        seen.append(type(inputs.values))
        return look_up(inputs, **options)

    embeddings.worker.lookup = note  # type: ignore[method-assign]
    tensors = {
        name: tuple(map(torch.from_numpy, each)) if isinstance(each, tuple) else torch.from_numpy(each)
        for name, each in arrays.items()
    }
    found = [embeddings(each) for each in (arrays, tensors)]
    assert seen == [np.ndarray, torch.Tensor]
    assert torch.equal(found[0].embeddings, found[1].embeddings)
    assert torch.equal(found[0]["path"].values, found[1]["path"].values)
    assert torch.equal(found[0]["path"].mask, found[1]["path"].mask)
    single = embeddings(dict.fromkeys(declared, tensors["item"]))
    assert torch.equal(single["item"], found[0]["item"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"item": torch.arange(3), "bag": torch.arange(2)},
        {"item": torch.arange(3)},
        {"item": torch.arange(3), "bag": torch.arange(3), "nothing": torch.arange(3)},
        {"item": torch.arange(3, dtype=torch.int32), "bag": torch.arange(3)},
        {"item": torch.arange(3), "bag": (torch.arange(3), torch.tensor([0, 2, 1, 3]))},
        {"item": torch.arange(3), "bag": (torch.arange(3), torch.tensor([1, 2, 3, 3]))},
        {"item": torch.arange(3), "bag": (torch.arange(3), torch.tensor([0, 1, 2, 3]), None)},
    ],
    ids=["samples", "missing", "unknown", "dtype", "falls", "begins", "parts"],
)
def test_ids_by_feature_that_are_refused(wrong: Any) -> None:
    item = Table("item", dim=3)
    messages = []
    for device in (None, "cpu"):
        embeddings = Embeddings({"item": item, "bag": item.bag("mean")}, device=device, num_threads=1)
        with pytest.raises(InputError) as error:
            embeddings(wrong)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("dim", [8, 5])
def test_kernels_may_load_four_floats_at_a_place_if_every_dim_is_a_multiple_of_four(
    dim: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a table of another dim they may do so only where all places happen to be multiples of four; for ids on the
    device, whose places are not known here, not even there."""
    taken = []
    sum_runs = reference._sum_runs

    def look(runs: Any, *args: Any, **options: Any) -> Any:
        taken.append(runs)
        return sum_runs(runs, *args, **options)

    monkeypatch.setattr(reference, "_sum_runs", look)
    item, user = (Table(name, dim=dim, optimizer=Adagrad(lr=0.1)) for name in ("item", "user"))
    declared = Features(
        {"item": item, "user": replace(user, dim=12), "path": item.sequence(3), "bag": item.bag("mean")}
    )
    workers = three(declared)
    for step in range(1, 4):
        step_both(workers, rng, [draw_bags(rng, declared, 20) for _ in range(step)], step)
    assert len(taken) >= 2 * 3
    for runs in taken:
        assert runs.alignment == (4 if dim == 8 else 1)
        assert not (runs.places % runs.alignment).any()


@pytest.mark.parametrize("num_batches", [1, 2])
def test_the_memory_of_a_batch_may_be_used_again(num_batches: int, rng: np.random.Generator) -> None:
    """By a loop that writes each batch into the same tensors: the update has the ids that were looked up."""
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1))
    declared = Features({"item": item, "bag": item.bag("mean", weighted=True)})
    workers: list[Any] = [
        local_worker(declared, seed=3, num_threads=2),
        ArrayWorker(declared, "cpu", seed=3, num_threads=2),
    ]
    of_memory: dict[str, Any] = {
        "values": torch.zeros(15, dtype=torch.int64),
        "offsets": torch.zeros(11, dtype=torch.int64),
        "weights": torch.zeros(15),
    }
    memory: Any = Inputs(names=declared.names, batch_size=5, **of_memory)
    for step in range(1, 4):
        tickets: list[list[Any]] = [[], []]
        for _ in range(num_batches):
            lengths = np.append(np.ones(5, np.int64), rng.multinomial(10, np.full(5, 0.2)))
            batch = Inputs(
                names=declared.names,
                values=rng.choice(UNIVERSE, 15),
                offsets=np.append(0, lengths.cumsum()),
                weights=rng.random(15, np.float32),
                batch_size=5,
            )
            given = as_tensors(batch)
            for name in ("values", "offsets", "weights"):
                getattr(memory, name).copy_(getattr(given, name).view(getattr(memory, name).dtype))
            for of_worker, worker, inputs in zip(tickets, workers, (batch, memory), strict=True):
                of_worker.append(worker.lookup(inputs, step=step).ticket)
            for name in ("values", "offsets", "weights"):
                getattr(memory, name).fill_(1)
        blocks = [rng.normal(size=(5, 6)).astype(np.float32) for _ in range(num_batches)]
        for of_worker, worker in zip(tickets, workers, strict=True):
            worker.update(of_worker, blocks, step=step)
    assert_equal(workers)
