"""What the core has recorded is done on the device once, however often a part of it fails: each piece of work that must
not be done twice is pending by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from contents import contents
from device_workers import pair
from satrap import SGD, Adagrad, Normal, Table
from satrap.config.features import Features
from satrap.data.inputs import Inputs
from satrap.device import home_memory, reference
from satrap.device.device_engine import DeviceEngine
from satrap.device.device_worker import device_worker
from satrap.device.home_memory import HomeMemory
from satrap.device.row_memory import RowMemory
from satrap.errors import CapacityError
from stream_recorder import recorded

ROWS = 8
EVERY = np.arange(6 * ROWS, dtype=np.uint64)


def two_pools(**options: Any) -> Features:
    return Features(
        {
            name: Table(name, dim=dim, optimizer=Adagrad(lr=0.1), initial=Normal(std=1.0), **options)
            for name, dim in (("a", 4), ("b", 8))
        }
    )


def worker_of(features: Features, device: str, frames: int = ROWS) -> Any:
    sizes: dict[str, int | str] = {"a": 32 * frames, "b": 64 * frames}
    return device_worker(features, device, seed=1, num_threads=1, device_memory=sizes)


def batch(features: Features, number: int) -> Inputs:
    ids = np.arange(ROWS * number, ROWS * (number + 1), dtype=np.uint64)
    return Inputs(names=features.names, values=np.tile(ids, len(features)), batch_size=ROWS)


def look_up(worker: Any, number: int, step: int) -> None:
    found = worker.lookup(batch(worker.features, number), step=step, oldest_open=step, train=True)
    assert found.ticket is not None
    worker.drop(found.ticket)


def checked_contents(worker: Any) -> dict[str, list[bytes]]:
    for table in worker.tables.values():
        table.check()
    return contents(worker, EVERY)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("method", ["exchange", "initialise"])
@pytest.mark.parametrize("dim", [4, 8])
def test_a_move_that_fails_between_two_pools_is_done_once(
    dim: int, method: str, times: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exchange that is done twice puts both rows back where they were."""

    def run(failures: int) -> dict[str, list[bytes]]:
        worker = worker_of(two_pools(), device)
        for step in (1, 2, 3):
            look_up(worker, step - 1, step)
        works, left = getattr(RowMemory, method), [failures]

        def fail(memory: RowMemory, *given: Any) -> None:
            if memory.layout.dim == dim and left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            works(memory, *given)

        monkeypatch.setattr(RowMemory, method, fail)
        for _ in range(failures):
            with pytest.raises(torch.OutOfMemoryError):
                look_up(worker, 3 if method == "initialise" else 0, 4)
        monkeypatch.setattr(RowMemory, method, works)
        assert not left[0]
        look_up(worker, 3 if method == "initialise" else 0, 4)
        return checked_contents(worker)

    assert run(times) == run(0)


def test_rows_of_an_import_that_fails_are_written_later(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core knows them by then."""
    worker = worker_of(two_pools(), device)
    engine: DeviceEngine = worker.rows._engine
    ids, steps = np.arange(3, dtype=np.uint64), np.ones(3, np.uint32)
    values, state = np.full((3, 4), 5.0, np.float32), np.full((3, 4), 6.0, np.float32)
    works = RowMemory.write

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(RowMemory, "write", fail)
    with pytest.raises(torch.OutOfMemoryError):
        engine.import_rows(0, ids, steps, values, state)
    monkeypatch.setattr(RowMemory, "write", works)
    found = worker.tables["a"].read(ids)
    np.testing.assert_array_equal(found.values, values)
    np.testing.assert_array_equal(found.state, state)


def test_skipped_gradients_are_counted_once(device: str) -> None:
    """Each table's count is pending by itself: a count that fails is not repeated for the tables before it."""
    tables = {name: Table(name, dim=2, optimizer=SGD(0.1), on_nonfinite="skip") for name in ("a", "b")}
    workers = pair(Features(tables), device=device)
    gradients = np.ones((ROWS, 4), np.float32)
    gradients[:3, 1], gradients[5, 3] = np.nan, np.inf
    inputs = batch(workers[0].features, 0)
    tickets = [worker.lookup(inputs, step=1).ticket for worker in workers]
    engine = workers[1].rows._engine
    core, has_failed = engine.core, list[int]()

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(core, name)

        def settle_frames(self, table: int, *given: Any) -> None:
            if table == 1 and not has_failed:
                has_failed.append(table)
                raise MemoryError
            core.settle_frames(table, *given)

    engine.core = Failing()
    workers[0].update([tickets[0]], [gradients], step=1)
    with pytest.raises(MemoryError):
        workers[1].update([tickets[1]], [gradients], step=1)
    engine.core = core
    assert has_failed
    for name, skipped in (("a", 3), ("b", 1)):
        workers[1].tables[name].check()  # does the pending work first
        found = [worker.tables[name].stats() for worker in workers]
        assert [each["skipped"] for each in found] == [skipped, skipped]


def test_memory_at_home_is_allocated_ahead_and_without_the_lock(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning a segment takes the driver long. Other calls go on meanwhile, and a segment is there before a lookup
    needs it."""
    monkeypatch.setattr(home_memory, "SEGMENT_BYTES", 1024)
    features = Features({"a": Table("a", dim=4, optimizer=Adagrad(lr=0.1), initial=Normal(std=1.0))})
    worker: Any = device_worker(features, device, num_threads=1, device_memory={"a": 32 * ROWS})
    engine: DeviceEngine = worker.rows._engine
    home, allocate, needed = engine.memories[0].home, HomeMemory._allocate, []
    assert home is not None

    def watched(memory: HomeMemory, size: int) -> Any:
        assert not engine._lock.locked(), "the lock is held while memory is allocated"
        reader = threading.Thread(target=lambda: worker.tables["a"].read(np.arange(3, dtype=np.uint64)))
        reader.start()
        reader.join(60)
        assert not reader.is_alive(), "another call waits for the memory"
        needed.append(in_lookup and not memory.spare)
        return allocate(memory, size)

    monkeypatch.setattr(HomeMemory, "_allocate", watched)
    keep, in_lookup = HomeMemory.keep_reserve, True

    def after_the_call(memory: HomeMemory) -> None:
        nonlocal in_lookup
        in_lookup = False
        keep(memory)
        in_lookup = True

    monkeypatch.setattr(HomeMemory, "keep_reserve", after_the_call)
    for number in range(20):
        found = worker.lookup(batch(features, number), step=number + 1, oldest_open=number + 1)
        assert found.ticket is not None
        worker.drop(found.ticket)
    assert len(home.segments) >= 4 and len(needed) >= len(home.segments)
    assert needed.count(True) == 1, "a lookup waited for memory, after the first"


def test_no_memory_for_the_reserve_is_no_error_until_it_is_needed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_memory, "SEGMENT_BYTES", 1024)
    features = two_pools()
    worker = worker_of(features, device)
    look_up(worker, 0, 1)
    look_up(worker, 1, 2)

    def fail(*_: Any) -> None:
        raise RuntimeError("full")

    with monkeypatch.context() as patched:
        patched.setattr(HomeMemory, "_allocate", fail)
        calls: list[Callable[[], object]] = [lambda n=n: look_up(worker, n, n + 1) for n in range(2, 30)]  # type: ignore[misc]
        num_done = 2
        with pytest.raises(CapacityError, match=r"tables '[ab]': this process has no (pinned )?memory for \d+ rows"):
            for call in calls:
                rows = checked_contents(worker)
                call()
                num_done += 1
        assert checked_contents(worker) == rows and num_done > 3
    look_up(worker, num_done, num_done + 1)
    assert checked_contents(worker) != rows


def test_a_step_whose_rounding_fails_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU device, whose step has parts that can run out of memory: the state changes with the values or not."""
    features = Features({"t": Table("t", dim=4, optimizer=Adagrad(lr=0.1), dtype="bfloat16", initial=Normal(std=1.0))})
    gradients, read = torch.ones(ROWS, 4), list[dict[str, list[bytes]]]()
    for fails in (False, True):
        worker: Any = device_worker(features, "cpu", seed=1, num_threads=1)
        ticket = worker.lookup(batch(features, 0), step=1).ticket
        assert ticket is not None
        if fails:
            with monkeypatch.context() as patched, pytest.raises(MemoryError):
                patched.setattr(reference, "round_stochastic", out_of_memory)
                worker.update([ticket], [gradients], step=1)
        else:
            worker.update([ticket], [gradients], step=1)
        read.append(checked_contents(worker))
    assert read[0] == read[1]


def out_of_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("failing", [4, 8])
def test_moves_wait_for_a_step_that_failed_midway(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has done, and what is done later, uses rows that the next lookup moves home."""
    with recorded(monkeypatch) as recorder, recorder.recording():
        worker = worker_of(two_pools(), "cpu")
        look_up(worker, 0, 1)
        ticket = worker.lookup(batch(worker.features, 1), step=2, oldest_open=2).ticket
        works, gradient = reference.update, torch.ones(ROWS, 12)

        def fail(values: torch.Tensor, *given: Any) -> Any:
            if values.shape[1] == failing:
                raise MemoryError
            return works(values, *given)

        with monkeypatch.context() as patched, pytest.raises(MemoryError):
            patched.setattr(reference, "update", fail)
            worker.update([ticket], [gradient], step=2)
        look_up(worker, 0, 3)
        assert checked_contents(worker)
    assert recorder.faults == []
