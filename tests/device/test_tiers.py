"""Rows in two tiers, in the device's memory and at home: the same results as rows in one, every row in one place. Here
both are memory of the CPU; train/test_gpu.py imports these tests for a GPU, and test_triton.py compares the kernel that
moves rows there."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bag_oracle import UNIVERSE
from cluster import batch, one_table
from contents import MOVES, bits, counted_bits, counted_contents
from device_workers import ArrayWorker, FoundAhead, train_in_parts, user_and_item
from loop import job, loss_of, train_dropping
from satrap import Adagrad, Embeddings, MinCount, RowWiseAdagrad, Table
from satrap.config.features import Features
from satrap.data.inputs import Inputs, Position
from satrap.device import home_memory, reference
from satrap.device.device_rows import DeviceRows
from satrap.device.device_worker import device_worker
from satrap.device.home_memory import HomeMemory
from satrap.errors import CapacityError, ConfigError
from satrap.worker.local_rows import local_worker
from satrap.worker.rows import BagRequest

NUM_IDS, SIZE, ROW = 600, 8, 32
EVERY = np.arange(2 * NUM_IDS, dtype=np.uint64)
TIERS: dict[str, Any] = {
    "a budget": 200 * ROW,
    "by table": {"user": 60 * ROW, "item": "4 kB"},
    "none": {"user": "none", "item": "none"},
    "none and all": {"user": "none"},
}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_memory, "SEGMENT_BYTES", 1024)


def draw_batches(rng: np.random.Generator, num: int) -> list[Inputs]:
    drawn = []
    for number in range(num):
        offsets = np.append(0, np.cumsum(np.append(np.ones(2 * SIZE, np.int64), rng.integers(0, 4, SIZE))))
        drawn.append(
            Inputs(
                names=("user", "item", "history"),
                values=np.minimum(rng.zipf(1.3, offsets[-1]) - 1, NUM_IDS - 1).astype(np.uint64)
                + rng.integers(0, 9, offsets[-1]).astype(np.uint64) * np.uint64(64),
                offsets=offsets,
                batch_size=SIZE,
                dense=rng.standard_normal((SIZE, 2)).astype(np.float32),
                label=rng.integers(0, 2, SIZE).astype(np.float32),
                position=Position(0, 0, number + 1),
            )
        )
    return drawn


def moves(embeddings: Embeddings) -> dict[str, int]:
    each = [table.stats() for table in embeddings.tables.values()]
    return {name: sum(stats.get(name, 0) for stats in each) for name in MOVES}


@pytest.mark.draw(12)
@pytest.mark.parametrize("options", [{}, {"capacity": 300}, {"expire_after": 9}], ids=["grows", "evicts", "expires"])
@pytest.mark.parametrize(("staleness", "overlap"), [(0, False), (0, True), (2, False), (2, True)])
@pytest.mark.parametrize("tiers", TIERS)
def test_training_equals_rows_in_memory(
    tiers: str, staleness: int, overlap: bool, options: dict[str, Any], device: str, rng: np.random.Generator
) -> None:
    data = draw_batches(rng, 60)
    how: dict[str, Any] = {"staleness": staleness, "deterministic": staleness > 0, "dense": device}
    expected = train_dropping(data, user_and_item(**options), **how)
    found = train_dropping(
        data, user_and_item(**options), overlap=overlap, device=device, device_memory=TIERS[tiers], **how
    )
    assert counted_bits(*found, EVERY) == counted_bits(*expected, EVERY)
    counted = moves(found[0])
    if "none" in tiers:
        assert counted["on_device"] == counted["moved_in"] == 0 and counted["at_home"] > 0
    else:
        assert counted["moved_in"] > 0 and counted["moved_out"] > 0 and 0 < counted["on_device"] <= 200


def test_tables_of_every_kind_share_a_device(device: str, rng: np.random.Generator) -> None:
    """Layouts, dtypes, admission and three residences in one batch."""
    user = Table("user", dim=3, optimizer=RowWiseAdagrad(0.1), dtype="bfloat16", admission=MinCount(2))
    item = Table("item", dim=4, optimizer=Adagrad(0.1), capacity=50)
    declared = Features({"user": user, "item": item, "history": item.sequence(3), "other": replace(item, name="b")})
    memory: dict[str, Any] = {"user": 20 * 10, "item": 20 * ROW, "b": "none"}
    tiered = ArrayWorker(declared, device, seed=1, num_threads=2, device_memory=memory)
    workers: list[Any] = [local_worker(declared, seed=1, num_threads=2), tiered]
    for step in range(1, 30):
        values = rng.integers(0, 70, 24).astype(np.uint64)
        inputs = Inputs(names=tuple(declared), values=values, offsets=np.arange(25), batch_size=6)
        results = [worker.lookup(inputs, step=step) for worker in workers]
        np.testing.assert_array_equal(*(result.block for result in results))
        np.testing.assert_array_equal(*(result.sequences["history"] for result in results))
        gradients = rng.normal(size=results[0].block.shape).astype(np.float32)
        of_history = {"history": rng.normal(size=(6, 3, 4)).astype(np.float32)}
        for worker, result in zip(workers, results, strict=True):
            worker.update([result.ticket], [gradients], [of_history], step=step)
        for name in ("user", "item", "b"):
            rows = [worker.tables[name].read(np.arange(70, dtype=np.uint64)) for worker in workers]
            for one, other in zip(*rows, strict=True):
                np.testing.assert_array_equal(one, other)
            tiered.tables[name].check()


def test_the_next_batch_is_on_the_device_before_its_step(rng: np.random.Generator) -> None:
    """At staleness 0 the rows of step t + 1 are moved while step t is in progress, and its lookup moves nothing."""
    embeddings, model, optimizer = job(features=user_and_item(), device="cpu", device_memory=TIERS["a budget"])
    ahead, exchange, exchanged = FoundAhead(embeddings.worker), reference.exchange, []

    def note_thread(*rows: Any) -> None:
        exchanged.append(threading.current_thread())
        exchange(*rows)

    steps = 40
    with pytest.MonkeyPatch.context() as patched, embeddings.stream(draw_batches(rng, steps), overlap=True) as stream:
        patched.setattr(reference, "exchange", note_thread)
        for batch in stream:
            ahead.wait_for(min(steps, batch.step + 1))
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(set(exchanged)) == 1 and exchanged[0] is not threading.main_thread()
    assert ahead.steps == list(range(1, steps + 1))


def test_batches_are_found_ahead_again_after_one_that_did_not_fit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve rows fit: two small batches, or a large one alone."""
    sizes, large = [4] * 40, 6
    sizes[large - 1] = 10
    ids = np.split(np.arange(sum(sizes)) % 70, np.cumsum(sizes)[:-1])
    data = [batch(of_step) for of_step in ids]
    resolve, refused = DeviceRows.resolve, []
    is_refused, is_found_again = threading.Event(), threading.Event()

    def note(rows: DeviceRows, request: BagRequest) -> BagRequest:
        assert request.step is not None
        try:
            resolved = resolve(rows, request)
        except CapacityError:
            refused.append(request.step)
            is_refused.set()
            raise
        if request.step > large:
            is_found_again.set()
        return resolved

    monkeypatch.setattr(DeviceRows, "resolve", note)
    declared, rows = one_table(dim=4, num_buckets=2), []
    tiered: dict[str, Any] = {"device": device, "device_memory": 12 * ROW}
    for where in (tiered, {}):
        embeddings = Embeddings(dict(declared), num_threads=1, seed=3, **where)
        optimizer = embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05))
        with embeddings.stream(data, overlap=True) as stream:
            for each in stream:
                (each.embeddings * each.step).sum().backward()
                if where and each.step == large - 1:  # the large one is found ahead in this step, not after it
                    assert is_refused.wait(60)
                if where and each.step == 2 * large:
                    assert is_found_again.wait(60)
                optimizer.step()
                optimizer.zero_grad()
        rows.append(embeddings.tables["t"].read(np.arange(70, dtype=np.uint64)))
    assert refused[0] == large
    for one, other in zip(*rows, strict=True):
        np.testing.assert_array_equal(one, other)


def test_reading_and_evaluation_move_nothing(device: str, rng: np.random.Generator) -> None:
    data = draw_batches(rng, 30)
    embeddings, _ = train_dropping(data, user_and_item(), dense=device, device=device, device_memory=TIERS["a budget"])
    expected, _ = train_dropping(data, user_and_item(), dense=device)
    before = moves(embeddings)
    assert before["at_home"] > 0
    for one, other in zip(*(each.stream(data, train=False) for each in (embeddings, expected)), strict=True):
        assert torch.equal(one.embeddings.cpu(), other.embeddings)
    assert counted_contents(embeddings, EVERY) == counted_contents(expected, EVERY)
    assert moves(embeddings) == before


def test_a_checkpoint_resumes_with_other_tiers(device: str, tmp_path: Path, rng: np.random.Generator) -> None:
    data, tiered = draw_batches(rng, 40), {"device": device}
    several = [tiered | {"device_memory": TIERS["a budget"]}, {}, tiered | {"device_memory": TIERS["by table"]}]
    whole, resumed = (
        bits(*train_in_parts(tmp_path / name, data, user_and_item(), parts, 13, device=device), EVERY)
        for name, parts in (("whole", [tiered]), ("resumed", several))
    )
    assert whole == resumed


def test_a_batch_that_does_not_fit_is_refused_by_name(device: str) -> None:
    worker = device_worker(one_table(dim=4, num_buckets=2), device, num_threads=1, device_memory=5 * ROW)
    expected = "table 't': the batch has 6 unique ids; expected at most 5, the rows in 160 bytes of the device: give"
    with pytest.raises(CapacityError, match=expected):
        worker.lookup(batch(np.arange(6)))
    assert len(worker.tables["t"]) == 0
    ticket = worker.lookup(batch(np.arange(5)), step=1).ticket
    expected = r"at step 2 the batch has 3 unique ids .* and 4 other rows are in use by open steps \(1 and later\)"
    with pytest.raises(CapacityError, match=expected):
        worker.lookup(batch([3, 8, 9]), step=2, oldest_open=1)
    assert len(worker.tables["t"]) == 5
    worker.tables["t"].check()
    assert ticket is not None
    worker.update([ticket], [torch.ones(5, 4, device=device)])  # its rows have not moved
    assert worker.tables["t"].stats()["moved_out"] == 0
    worker.lookup(batch([3, 8, 9]), step=3)
    assert worker.tables["t"].stats()["moved_out"] == 2


def test_an_update_of_rows_that_went_home_is_applied_there(device: str) -> None:
    """A caller without a stream may look up more batches than fit before it updates the first."""
    workers: list[Any] = [local_worker(one_table(dim=4, num_buckets=2, dtype="float16"), num_threads=1)]
    workers.append(
        ArrayWorker(one_table(dim=4, num_buckets=2, dtype="float16"), device, num_threads=1, device_memory=5 * 24)
    )
    tickets = [[worker.lookup(batch(np.arange(k, k + 5)), step=k + 1).ticket for k in range(4)] for worker in workers]
    gradients = np.random.default_rng(0).normal(size=(4, 5, 4)).astype(np.float32)
    for worker, of_worker in zip(workers, tickets, strict=True):
        worker.update(of_worker[:2], list(gradients[:2]), step=5)  # partly at home
        worker.update(of_worker[2:], list(gradients[2:]), step=6)
        worker.tables["t"].check()
    for one, other in zip(*(worker.tables["t"].read(np.arange(9, dtype=np.uint64)) for worker in workers), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("where", ["exchange", "home"])
def test_memory_that_runs_out_loses_no_row(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[Any] = [local_worker(one_table(dim=4, num_buckets=2), num_threads=1)]
    workers.append(ArrayWorker(one_table(dim=4, num_buckets=2), "cpu", num_threads=1, device_memory=5 * ROW))
    for worker in workers:
        for k in range(10):
            result = worker.lookup(batch(np.arange(5 * k, 5 * k + 5)), step=k + 1)
            worker.update([result.ticket], [np.full((5, 4), k, np.float32)])
    before = workers[1].tables["t"].stats()

    def fail(*_: object) -> Any:
        raise torch.OutOfMemoryError("full")

    new = batch(np.arange(3, 8)) if where == "exchange" else batch(np.arange(100, 105))
    with monkeypatch.context() as patched:
        if where == "exchange":
            patched.setattr(reference, "exchange", fail)
            for _ in range(2):  # pending work is not forgotten
                with pytest.raises(torch.OutOfMemoryError):
                    workers[1].lookup(new, step=20)
        else:
            patched.setattr(HomeMemory, "_allocate", fail)
            for k in range(100, 200, 5):
                try:
                    workers[1].lookup(batch(np.arange(k, k + 5)), step=20 + k)
                    workers[0].lookup(batch(np.arange(k, k + 5)), step=20 + k)
                except CapacityError as error:
                    assert "tables 't': this process has no memory for" in str(error)
                    break
            else:
                pytest.fail("home never ran out")
    if where == "exchange":
        workers[0].lookup(new, step=20)
    for one, other in zip(*(worker.tables["t"].read(UNIVERSE) for worker in workers), strict=True):
        np.testing.assert_array_equal(one, other)
    ids = np.arange(300, dtype=np.uint64)
    for one, other in zip(*(worker.tables["t"].read(ids) for worker in workers), strict=True):
        np.testing.assert_array_equal(one, other)
    workers[1].tables["t"].check()
    assert workers[1].tables["t"].stats()["moved_out"] > before["moved_out"]


def test_bounded_tables_that_fit_have_one_tier() -> None:
    worker: Any = device_worker(
        one_table(dim=4, num_buckets=2, capacity=20), "cpu", num_threads=1, device_memory="1MiB"
    )
    worker.lookup(batch(np.arange(10)))
    assert "on_device" not in worker.tables["t"].stats()
    assert len(worker.rows._engine.memories[0].values) == 20


def test_device_memory_is_checked() -> None:
    refused: list[tuple[Any, str]] = [
        ("12 parsecs", r"device_memory is '12 parsecs' \(str\); expected bytes as an integer, or a string such as"),
        (-1, r"device_memory is -1 \(int\)"),
        (True, r"device_memory is True \(bool\)"),
        ({"t": None}, r"device_memory\['t'\] is None \(NoneType\); .* 'all' or 'none'"),
        ({"u": 5}, r"device_memory names 'u'; expected tables of the features, \['t'\]"),
        (31, "device_memory leaves 31 bytes to table 't'; expected at least the 32 of one row"),
        ({"t": 31}, r"device_memory\['t'\] leaves 31 bytes to table 't'"),
    ]
    for memory, expected in refused:
        with pytest.raises(ConfigError, match=expected):
            device_worker(one_table(dim=4, num_buckets=2), "cpu", device_memory=memory)
    with pytest.raises(ConfigError, match="device_memory is '1GiB' without a device; expected device= beside it"):
        Embeddings(user_and_item(), device_memory="1GiB")


def test_batches_found_ahead_have_the_bits_of_rows_in_memory(device: str, rng: np.random.Generator) -> None:
    """With gradients that depend on the rows, so that an update and a move in the wrong order would show."""
    here = local_worker(one_table(dim=64, num_buckets=2), num_threads=1)
    there = device_worker(one_table(dim=64, num_buckets=2), device, num_threads=1, device_memory=2200 * 512)
    data = [batch(rng.integers(0, 8000, 1024)) for _ in range(30)]
    request = there.resolve(data[0], step=1, oldest_open=1)
    for step, inputs in enumerate(data, 1):
        assert request is not None
        found, expected = there.lookup_resolved(request), here.lookup(inputs, step=step)
        if step < len(data):
            request = there.resolve(data[step], step=step + 1, oldest_open=step)
        np.testing.assert_array_equal(found.block.cpu().numpy(), expected.block)
        assert found.ticket is not None and expected.ticket is not None
        there.update([found.ticket], [found.block * 0.25 + 1], step=step)
        here.update([expected.ticket], [expected.block * np.float32(0.25) + np.float32(1)], step=step)
    ids = np.arange(8000, dtype=np.uint64)
    for one, other in zip(here.tables["t"].read(ids), there.tables["t"].read(ids), strict=True):
        np.testing.assert_array_equal(one, other)
    there.tables["t"].check()
    assert there.tables["t"].stats()["moved_in"] > 10_000
