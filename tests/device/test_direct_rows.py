"""Tables with `num_rows` whose rows are on a device: the bits, counters, files and errors of rows in the core, without
a wait for the device and without work of the host for an id."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contents import contents, row_bytes, worker_contents
from device_workers import (
    ArrayWorker,
    Direct,
    as_tensors,
    assert_equal,
    every_kind,
    give_gradients_that_are_not_finite,
    pair,
    take_random_steps,
    take_steps_of_every_size,
    three_features,
)
from one_row import OPTIMIZERS
from satrap import Checkpoint, Embeddings, Table
from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adagrad
from satrap.config.tables import Normal
from satrap.data.inputs import Inputs
from satrap.device import device_blocks, home_memory
from satrap.device.direct_ids import DirectIds
from satrap.device.direct_rows import DirectRows
from satrap.errors import InputError, NonFiniteError
from torch_calls import READS, CountedCalls, IdleKernels

NUM_ROWS = 60
IDS = np.arange(NUM_ROWS, dtype=np.uint64)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_memory, "SEGMENT_BYTES", 512)


def every_worker(declared: Features, device: str, num_rows: int = 45) -> list[Any]:
    """Workers with rows in the core, and on a device: with ids in CPU memory and on the device, and with some rows at
    home, those of one table, or all."""
    some, first = {table.name: 25 * 4 * table.dim for table in declared.tables}, declared.tables[0]
    memories = (None, some, {first.name: "none"}, {table.name: "none" for table in declared.tables})
    on_device = [ArrayWorker(declared, device, seed=3, num_threads=2, device_memory=each) for each in memories]
    workers = [
        Direct(each, num_rows, device if at in (2, 4) else None)
        for at, each in enumerate([*pair(declared, device=device), *on_device])
    ]
    assert all(isinstance(each.rows, DirectRows) for each in workers[1:])
    return workers


@pytest.mark.draw(9)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_bits_and_counters(optimizer: Any, dtype: Any, device: str, rng: np.random.Generator) -> None:
    table = Table(
        "item",
        dim=int(rng.integers(1, 20)),
        optimizer=optimizer,
        dtype=dtype,
        initial=Normal(std=0.5),
        num_rows=NUM_ROWS,
        num_buckets=4,
        absent="zeros" if dtype == "float16" else "initial",
    )
    take_steps_of_every_size(every_worker(every_kind(table), device), rng, IDS[:45])


def test_one_id_in_each_bag_without_offsets(device: str, rng: np.random.Generator) -> None:
    """Without padding and sequences nothing of a batch is moved."""
    item = Table("item", dim=4, optimizer=Adagrad(lr=0.1), num_rows=NUM_ROWS)
    tables = [item, replace(item, name="b", num_rows=7), replace(item, name="c", dim=5), replace(item, name="d")]
    workers = every_worker(Features({table.name: table for table in tables}), device, num_rows=7)
    for step in range(1, 5):
        values = rng.integers(0, 2**63, len(tables) * 50).astype(np.uint64)
        batch = Inputs(names=workers[0].features.names, values=values, batch_size=50)
        looked = [worker.lookup(batch, step=step) for worker in workers]
        block = rng.normal(size=looked[0].block.shape).astype(np.float32)
        for worker, each in zip(workers, looked, strict=True):
            np.testing.assert_array_equal(each.block, looked[0].block)
            worker.update([each.ticket], [block], step=step, lrs={"b": 0.3})
    assert_equal(workers, IDS[:7])


@pytest.mark.parametrize("frozen", [False, range(2, 20), [2, 3, 7, 19, 40]])
def test_random_steps(frozen: Any, device: str, rng: np.random.Generator) -> None:
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1), num_rows=NUM_ROWS, frozen=frozen)
    take_random_steps(every_worker(three_features(item), device), item, rng, batch_size=3, ids=IDS[:45])


@pytest.mark.parametrize("frozen", [False, range(2, 20), [2, 3, 7, 19, 40]])
@pytest.mark.parametrize("how", ["raise", "skip"])
def test_gradients_that_are_not_finite(how: Any, frozen: Any, device: str, rng: np.random.Generator) -> None:
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1), on_nonfinite=how, num_rows=NUM_ROWS, frozen=frozen)
    declared = three_features(item, padding_id=2)
    give_gradients_that_are_not_finite(every_worker(declared, device), declared, rng, IDS[:45])


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_nothing_but_the_update_reads_gradients_of_tables_that_skip(
    how: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def largest(gradient: torch.Tensor) -> torch.Tensor:
        measured.append(len(gradient))
        return gradient.abs().max()

    monkeypatch.setattr(device_blocks, "_largest", largest)
    table = Table("item", dim=3, optimizer=SGD(lr=1.0), on_nonfinite=how, num_rows=NUM_ROWS)
    embeddings = Embeddings({"item": table}, device=device)
    optimizer = embeddings.optimizer()
    ids = Inputs(names=("item",), values=np.array([1, 2, 1], np.uint64), batch_size=3)
    before = embeddings.tables["item"].lookup(np.arange(3), train=False)
    with pytest.raises(NonFiniteError) if how == "raise" else nullcontext():
        for batch in embeddings.stream([ids], device=device):
            (batch.embeddings * torch.tensor([[1.0], [math.inf], [2.0]], device=device)).sum().backward()
            optimizer.step()
    change = embeddings.tables["item"].lookup(np.arange(3), train=False) - before
    np.testing.assert_allclose(change[:, 0], [0, -3 if how == "skip" else 0, 0], rtol=1e-6)
    assert measured == ([] if how == "skip" else [3])
    assert embeddings.tables["item"].stats()["skipped"] == (how == "skip")


WRONG: dict[str, dict[str, Any]] = {
    "an id that is too large": {"values": np.array([0, 1, 2, NUM_ROWS], np.uint64)},
    "a negative id": {"values": np.array([0, -1, 2, 3])},
    "a negative id of 32 bits": {"values": np.array([0, -1, 2, 3], np.int32)},
    "offsets that fall": {"offsets": np.array([0, 3, 2, 3, 4])},
    "offsets that begin late": {"offsets": np.array([1, 2, 2, 3, 4])},
    "offsets that end early": {"offsets": np.array([0, 2, 2, 3, 3])},
    "a weight that is not finite": {"weights": np.array([1, 1, np.nan, 1], np.float32)},
    "ids of another dtype": {"values": np.zeros(4, np.int16)},
    "ids of two dimensions": {"values": np.zeros((2, 2), np.uint64)},
    "too few ids": {"values": np.zeros(3, np.uint64), "offsets": None},
    "offsets of another size": {"offsets": np.array([0, 2, 4])},
    "no weights": {"weights": None},
    "too few weights": {"weights": np.ones(3, np.float32)},
}
FOUND_THERE = list(WRONG)[:7]


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_core_refuses_changes_nothing_and_has_its_message(wrong: str, tensors: bool, device: str) -> None:
    """What only the device knows is refused by the update, where it waits for the gradients; without training, by the
    lookup."""
    item = Table("item", dim=2, optimizer=SGD(lr=0.1), num_rows=NUM_ROWS)
    declared = Features({"item": item, "bag": item.bag("sum", weighted=True)})
    inputs = Inputs(
        names=declared.names,
        values=np.arange(4, dtype=np.uint64),
        offsets=np.array([0, 1, 2, 3, 4]),
        weights=np.ones(4, np.float32),
        batch_size=2,
    )
    in_core, on_device = pair(declared, device=device)
    bad = replace(inputs, **WRONG[wrong])
    given = as_tensors(bad, device) if tensors else bad
    values: Any = bad.values.astype(np.int64) if bad.values.itemsize == 4 else bad.values
    with pytest.raises(InputError) as expected:
        in_core.lookup(replace(bad, values=values), step=1)
    with pytest.raises(InputError) as found:
        if wrong in FOUND_THERE:
            ticket = on_device.lookup(given, step=1).ticket
            assert len(on_device.tables["item"]) == 0
            on_device.update([ticket], [np.ones((2, 4), np.float32)], step=1)
        else:
            on_device.lookup(given, step=1)
    advice = ".to(torch.int64)", ".astype(numpy.uint64)"
    assert str(found.value).replace(*advice) == str(expected.value)
    assert len(on_device.tables["item"]) == 0
    if wrong in FOUND_THERE:
        with pytest.raises(InputError) as found:
            on_device.lookup(given, train=False)
        assert str(found.value) == str(expected.value)
    good = [worker.lookup(inputs, step=2) for worker in (in_core, on_device)]
    assert good[0].block.tobytes() == good[1].block.tobytes()
    assert on_device.tables["item"].stats()["inserted"] == 4


def test_ids_of_32_bits_and_empty_batches(device: str, rng: np.random.Generator) -> None:
    item = Table("item", dim=4, optimizer=Adagrad(lr=0.1), num_rows=NUM_ROWS)
    declared = Features({"item": item.bag("sum"), "other": item.bag("mean", padding_id=5), "path": item.sequence(2)})
    workers = pair(declared, device=device)
    for step, size in enumerate((4, 0, 3, 0, 2), 1):
        lengths = rng.integers(0, 4, 3 * size) if step != 3 else np.zeros(9, np.int64)
        values = rng.integers(0, 9, int(lengths.sum()))
        inputs = Inputs(
            names=declared.names,
            values=values.astype(np.uint64),
            offsets=np.append(0, lengths.cumsum()),
            batch_size=size,
        )
        block = rng.normal(size=(size, 8)).astype(np.float32)
        paths = [{"path": rng.normal(size=(size, 2, 4)).astype(np.float32)}]
        for worker, dtype in zip(workers, (np.uint64, np.int32), strict=True):
            ticket = worker.lookup(replace(inputs, values=values.astype(dtype)), step=step).ticket
            worker.update([ticket], [block], paths, step=step)
    assert worker_contents(workers[0], IDS) == worker_contents(workers[1], IDS)


def test_the_memory_of_a_batch_may_be_used_again(device: str, rng: np.random.Generator) -> None:
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1), num_rows=NUM_ROWS)
    workers = pair(Features({"item": item}), device=device)
    memory = np.zeros(20, np.uint64)
    for step in range(1, 4):
        memory[:] = rng.integers(0, NUM_ROWS, 20)
        looked = [worker.lookup(Inputs(names=("item",), values=memory, batch_size=20), step=step) for worker in workers]
        memory[:] = 2**63
        block = rng.normal(size=(20, 3)).astype(np.float32)
        for worker, each in zip(workers, looked, strict=True):
            worker.update([each.ticket], [block], step=step)
    assert worker_contents(workers[0], IDS) == worker_contents(workers[1], IDS)


@pytest.mark.parametrize("others", [(0, 1), (1, 0), (1, 1)], ids=["to the device", "to the core", "on the device"])
def test_files_are_those_of_the_core(
    others: tuple[int, int], device: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Saved in full and as changes, opened in the core or on a device, which then train alike."""
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1), num_rows=NUM_ROWS, num_buckets=4)
    declared = Features({"item": item, "user": replace(item, name="user", dtype="bfloat16", num_rows=45)})
    first, second = pair(declared, device=device), pair(declared, device=device)
    source, target = first[others[0]], second[others[1]]
    folders: dict[str, list[Path]] = {name: [] for name in source.tables}

    def train_all(workers: list[Any], steps: range) -> None:
        for step in steps:
            values = rng.integers(0, 20 + step, 2 * 9).astype(np.uint64)
            block = rng.normal(size=(9, 6)).astype(np.float32)
            for worker in workers:
                looked = worker.lookup(Inputs(names=declared.names, values=values, batch_size=9), step=step)
                worker.update([looked.ticket], [block], step=step)

    train_all(first, range(1, 6))
    versions = {}
    for name in source.tables:
        saved = [worker.tables[name].save(tmp_path / f"{name}-full-{at}") for at, worker in enumerate(first)]
        assert saved[0] == saved[1]
        versions[name] = saved[0]
        folders[name].append(tmp_path / f"{name}-full-{others[0]}")
        assert [part.tobytes() for part in (first[0].tables[name].ids(), first[0].tables[name].bucket_ids(1))] == [
            part.tobytes() for part in (first[1].tables[name].ids(), first[1].tables[name].bucket_ids(1))
        ]
    train_all(first, range(6, 8))
    for name, version in versions.items():
        source.tables[name].save_changes(tmp_path / f"{name}-changes", since=version)
        folders[name].append(tmp_path / f"{name}-changes")
    target.tables.restore(folders)
    train_all([*first, target], range(8, 11))
    for name, store in target.tables.items():
        store.check()
        ids = IDS[: 45 if name == "user" else NUM_ROWS]
        assert row_bytes(store, ids) == row_bytes(first[0].tables[name], ids)
    assert worker_contents(first[0], IDS[:45]) == worker_contents(first[1], IDS[:45])


def train_part(how: dict[str, Any], folder: Path, data: list[Any], saves_at: tuple[int, ...]) -> tuple[Any, bytes]:
    """Resume from the folder, train with a thread that looks batches up ahead, and save after some batches. Return the
    rows and the dense parameters."""
    item = Table("item", dim=4, optimizer=Adagrad(lr=0.1), num_rows=NUM_ROWS)
    declared: dict[str, Any] = {"item": item, "user": replace(item, name="user")}
    embeddings = Embeddings(declared, **how, staleness=1, num_threads=1, deterministic=True)
    model = torch.nn.Linear(8, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    run = Checkpoint(folder, model, optimizer, embeddings)
    run.resume()
    batches = [Inputs(names=("item", "user"), values=values, batch_size=16) for values in data]
    with embeddings.stream(batches, overlap=True) as stream:
        for number, batch in enumerate(stream, 1):
            model(batch.embeddings).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number in saves_at:
                run.save()
    assert isinstance(embeddings.worker.rows, DirectRows) == bool(how)
    return contents(embeddings, IDS), model.weight.detach().numpy().tobytes()


def test_a_job_of_such_tables_ends_with_the_same_bits(rng: np.random.Generator, tmp_path: Path) -> None:
    """Through checkpoints, of all rows and of changes, that the core or a device saves and either resumes."""
    data = [rng.integers(0, NUM_ROWS, 2 * 16).astype(np.uint64) for _ in range(12)]
    ends: list[tuple[Any, bytes]] = []
    places: list[dict[str, Any]] = [{}, {"device": "cpu"}, {"device": "cpu", "device_memory": {"item": 400}}]
    for before in places:
        for after in places:
            folder = tmp_path / f"{len(ends)}"
            train_part(before, folder, data[:7], saves_at=(2, 4, 7))
            ends.append(train_part(after, folder, data[7:], saves_at=(5,)))
    assert all(each == ends[0] for each in ends)


def test_a_step_waits_for_the_largest_gradient_alone(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the ids is read by the host: each of these calls would wait for a device."""
    item = Table("item", dim=4, optimizer=Adagrad(lr=0.1), num_rows=NUM_ROWS)
    declared = Features({"item": item, "bag": item.bag("mean", padding_id=3)})
    worker = pair(declared)[1].worker
    waits: list[str] = []
    for name in READS:
        original = getattr(torch.Tensor, name)

        def note(self: Any, *args: Any, _original: Any = original, _name: str = name, **options: Any) -> Any:
            waits.append(_name)
            return _original(self, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, note)
    monkeypatch.setattr(worker.rows, "_kernels", IdleKernels)
    for step in range(1, 4):
        lengths = rng.integers(0, 3, 2 * 30)
        values = rng.integers(0, NUM_ROWS, int(lengths.sum())).astype(np.uint64)
        inputs = Inputs(names=declared.names, values=values, offsets=np.append(0, lengths.cumsum()), batch_size=30)
        waits.clear()
        looked = worker.lookup(inputs, step=step)
        assert not waits
        worker.update([looked.ticket], [torch.ones(30, 8)], step=step)
        assert sorted(waits) == ["__bool__", "__float__", "__float__"], "the verdict, its weight, and the magnitude"


def test_a_table_without_num_rows_has_a_directory() -> None:
    tables = [Table("item", dim=4, num_rows=NUM_ROWS), Table("user", dim=4)]
    worker = ArrayWorker(Features({table.name: table for table in tables}), "cpu")
    assert not isinstance(worker.rows, DirectRows)
    values = np.arange(4, dtype=np.uint64)
    assert worker.lookup(Inputs(names=worker.features.names, values=values, batch_size=2)).ticket is not None


def test_ids_in_a_list_are_placed_once_the_core_has_accepted_them() -> None:
    item = Table("item", dim=2, num_rows=NUM_ROWS)
    worker = ArrayWorker(Features({"item": item}), "cpu")
    for given in ([3, 1], np.array([3, 1], np.ulonglong)):
        values: Any = given
        ticket: Any = worker.lookup(Inputs(names=("item",), values=values, batch_size=2)).ticket
        assert isinstance(ticket.ids, DirectIds) and ticket.ids.rows.tolist() == [3, 1]


def test_steps_of_32_bits(device: str, rng: np.random.Generator) -> None:
    """Stamps are unsigned; a late step does not lower them."""
    item = Table("item", dim=2, optimizer=Adagrad(lr=0.1), num_rows=NUM_ROWS, num_buckets=4)
    workers = pair(Features({"item": item}), device=device)
    for step in (5, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 9, 2**31 - 5, 2**32 - 2, 3):
        inputs = Inputs(names=("item",), values=rng.integers(0, NUM_ROWS, 9).astype(np.uint64), batch_size=9)
        for worker in workers:
            worker.update([worker.lookup(inputs, step=step).ticket], [np.ones((9, 2), np.float32)], step=step)
    exported = [worker.tables["item"]._slot.rows.export_rows(0, 0, 4, 0) for worker in workers]
    for name in ("id", "step", "values", "state"):
        assert exported[0][name].tobytes() == exported[1][name].tobytes()
    assert worker_contents(workers[0], IDS) == worker_contents(workers[1], IDS)


@pytest.mark.parametrize("is_flat", [True, False])
def test_the_host_does_the_same_for_any_number_of_ids(is_flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where each bag has one id, the places of a batch's gradients are kept for the next batch of its size.
    tables = [Table(f"t{number}", dim=4, optimizer=SGD(lr=0.1), num_rows=NUM_ROWS) for number in range(26)]
    declared = Features({table.name: table if is_flat else table.bag("sum") for table in tables})
    worker = pair(declared)[1].worker
    monkeypatch.setattr(worker.rows, "_kernels", IdleKernels)
    counts = []
    for step, size in enumerate((3, 3, 700, 700), 1):
        values = (np.arange(26 * size) % NUM_ROWS).astype(np.uint64)
        offsets = None if is_flat else np.arange(26 * size + 1)
        inputs = Inputs(names=declared.names, values=values, offsets=offsets, batch_size=size)
        calls: Any = CountedCalls()  # type: ignore[no-untyped-call]
        with calls:
            looked = worker.lookup(inputs, step=step)
            worker.update([looked.ticket], [torch.ones(size, 26 * 4)], step=step)
        counts.append(calls.count)
    assert counts[1] == counts[3] <= (135 if is_flat else 185), f"{counts} operations of torch in the steps"


def test_rows_that_are_written_before_the_first_step(device: str) -> None:
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1), num_rows=NUM_ROWS)
    workers = pair(Features({"item": item}), device=device)
    for worker in workers:
        worker.tables["item"].write(IDS[:5], np.ones((5, 3), np.float32))
    assert worker_contents(workers[0], IDS) == worker_contents(workers[1], IDS)
