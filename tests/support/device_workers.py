"""Workers with rows on a device, by default the CPU, beside workers with rows in the core."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bag_oracle import UNIVERSE, draw_bags
from cluster import step_both
from contents import worker_contents
from loop import Net, job, loss_of
from satrap import Adagrad, Checkpoint, Embeddings, Table
from satrap.config.features import Features
from satrap.config.tables import Constant, MinCount, Probability, Uniform
from satrap.data.inputs import Inputs
from satrap.device.device_worker import device_worker
from satrap.errors import CapacityError, NonFiniteError
from satrap.worker.local_rows import local_worker
from satrap.worker.worker import LookupResult


class _Converting(ABC):
    """A worker that gives and gets other arrays than the one that does its work."""

    worker: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def lookup(self, *args: Any, **options: Any) -> LookupResult:
        result: LookupResult = self.worker.lookup(*args, **options)
        sequences = {name: self._seen(rows) for name, rows in result.sequences.items()}
        return replace(result, block=self._seen(result.block), sequences=sequences)

    def update(self, tickets: Any, block_gradients: Any, sequence_gradients: Any = None, **options: Any) -> None:
        blocks = [None if block is None else self._given(block) for block in block_gradients]
        if sequence_gradients is not None:
            sequence_gradients = [
                {name: self._given(rows) for name, rows in gradients.items()} for gradients in sequence_gradients
            ]
        self.worker.update(tickets, blocks, sequence_gradients, **options)

    @abstractmethod
    def _seen(self, rows: Any) -> Any:
        """Return rows as the caller sees them."""

    @abstractmethod
    def _given(self, gradients: Any) -> Any:
        """Return gradients as the worker gets them."""


class ArrayWorker(_Converting):
    """A worker on a device that takes and returns arrays, as the other workers do."""

    def __init__(self, declared: Features, device: str, *, output_dtype: str = "float32", **options: Any) -> None:
        self.worker = device_worker(declared, device, **options)
        self.worker.rows.output_dtype = output_dtype
        self._dtype = getattr(torch, output_dtype)

    def _seen(self, rows: Any) -> Any:
        assert rows.dtype == self._dtype
        return rows.float().cpu().numpy()

    def _given(self, gradients: Any) -> Any:
        return torch.from_numpy(gradients).to(device=self.worker.device, dtype=self._dtype)


class RoundingWorker(_Converting):
    """A worker whose rows, and the gradients that it gets, torch rounds to another dtype: the oracle of
    `output_dtype`."""

    def __init__(self, worker: Any, output_dtype: str) -> None:
        self.worker, self._dtype = worker, getattr(torch, output_dtype)

    def _seen(self, rows: Any) -> Any:
        return torch.from_numpy(rows).to(self._dtype).float().numpy()

    def _given(self, gradients: Any) -> Any:
        return self._seen(gradients)


def as_tensors(inputs: Inputs, device: str = "cpu") -> Inputs:
    """Return the batch with tensors in place of arrays."""
    parts: Any = {
        name: None if (array := getattr(inputs, name)) is None else torch.from_numpy(array).to(device)
        for name in ("values", "offsets", "weights", "dense", "label")
    }
    return replace(inputs, **parts)


class SortingWorker(ArrayWorker):
    """The same with ids in tensors, which are sorted as on a GPU where a test says so: `SORTS_IDS`."""

    def lookup(self, inputs: Inputs, **options: Any) -> LookupResult:
        found = super().lookup(as_tensors(inputs), **options)
        return replace(found, masks={name: np.asarray(mask) for name, mask in found.masks.items()})


def below(inputs: Inputs, num_rows: int) -> Inputs:
    """Return the batch with ids that the tables can have."""
    return replace(inputs, values=inputs.values % np.uint64(num_rows))


class Direct:
    """A worker whose batches are brought into range."""

    def __init__(self, worker: Any, num_rows: int, device: str | None) -> None:
        """device: where the ids are, in tensors; None: they are in an array."""
        self.worker, self._num_rows, self._device = worker, num_rows, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def lookup(self, inputs: Inputs, **options: Any) -> Any:
        given = below(inputs, self._num_rows)
        result = self.worker.lookup(given if self._device is None else as_tensors(given, self._device), **options)
        return replace(result, masks={name: torch.as_tensor(mask).cpu().numpy() for name, mask in result.masks.items()})


def pair(declared: Features, seed: int = 3, device: str = "cpu") -> list[Any]:
    return [
        local_worker(declared, seed=seed, num_threads=2),
        ArrayWorker(declared, device, seed=seed, num_threads=2),
    ]


def assert_equal(workers: Sequence[Any], ids: NDArray[np.uint64] = UNIVERSE) -> None:
    expected, *others = [worker_contents(worker, ids) for worker in workers]
    for found in others:
        assert found == expected


LIVES: dict[str, dict[str, Any]] = {
    "evicts": {"capacity": 8, "num_buckets": 2},
    "expires": {"expire_after": 2},
    "counts": {"admission": MinCount(2)},
    "draws": {"admission": Probability(0.4)},
    "zeros": {"admission": Probability(0.4), "absent": "zeros"},
    "uniform": {"initial": Uniform(-2.0, 3.0)},
    "constant": {"initial": Constant(0.25)},
    "frozen": {"frozen": range(3, 2**63)},
    "frozen set": {"frozen": [0, 3, 4, 9, 2**64 - 1]},
    "counts and evicts": {"admission": MinCount(2), "capacity": 6, "num_buckets": 1},
}


def every_kind(table: Table) -> Features:
    """Return features of every kind that tables with, or without, `num_rows` have on a device: over a table, and over
    others that share its memory or do not."""
    user = replace(table, name="user", dim=table.dim + 3)
    shared = replace(table, name="shared", num_rows=None if table.num_rows is None else table.num_rows * 3 // 4)
    kinds: dict[str, Any] = {
        "item": table,
        "mean": table.bag("mean", weighted=True, padding_id=3),
        "path": table.sequence(3),
        "user": user.bag("sqrtn"),
        "padded": user.sequence(2, keep="first", padding_id=4),
        "last": user.sequence(2, padding_id=2**63),
        "shared": shared.bag("sum", padding_id=1),
    }
    if table.num_rows is None:
        kinds |= {"jagged": table.sequence(padding_id=3), "jagged first": user.sequence(2, keep="first", jagged=True)}
    return Features(kinds)


def take_random_steps(
    workers: Sequence[Any],
    table: Table,
    rng: np.random.Generator,
    *,
    batch_size: int,
    ids: NDArray[np.uint64] = UNIVERSE,
    same_errors: bool = True,
) -> None:
    """Compare workers after each step: open steps, evaluation, dropped batches, parts without a gradient, lookups that
    the table has no place for. table: of dim 3, with the features of `three_features`.

    same_errors: the first worker has the message of the others when a table is full."""
    waiting: list[tuple[int, list[Any]]] = []
    for step in range(1, 30):
        bags, late = draw_bags(rng, three_features(table), batch_size), int(rng.integers(0, 3))
        evaluated = [worker.lookup(bags.inputs(), train=False) for worker in workers]
        assert all(each.block.tobytes() == evaluated[0].block.tobytes() for each in evaluated)
        oldest = waiting[0][0] if waiting else step
        try:
            looked = [workers[0].lookup(bags.inputs(), step=step, oldest_open=oldest)]
        except CapacityError as error:
            for worker in workers[1:]:
                with pytest.raises(CapacityError) as raised:
                    worker.lookup(bags.inputs(), step=step, oldest_open=oldest)
                assert not same_errors or str(raised.value) == str(error)
            assert_equal(workers, ids)
            continue
        looked += [worker.lookup(bags.inputs(), step=step, oldest_open=oldest) for worker in workers[1:]]
        for result in looked:
            assert result.block.tobytes() == looked[0].block.tobytes()
            np.testing.assert_array_equal(result.sequences["path"], looked[0].sequences["path"])
        waiting.append((step, looked))
        while len(waiting) > late:
            at, tickets = waiting.pop(0)
            block = None if at % 7 == 0 else rng.normal(size=(batch_size, 6)).astype(np.float32)
            path = rng.normal(size=(batch_size, 2, 3)).astype(np.float32)
            for worker, each in zip(workers, tickets, strict=True):
                if at % 5 == 0:
                    worker.drop(each.ticket)
                else:
                    paths = None if at % 3 == 0 else [{"path": path}]
                    worker.update([each.ticket], [block], paths, step=at, lrs={"item": 0.2}, scale=0.5)
        assert_equal(workers, ids)


def take_steps_of_every_size(workers: Sequence[Any], rng: np.random.Generator, ids: NDArray[np.uint64]) -> None:
    """Make the same lookups and updates of one batch or two on each worker, whose rows must be the same bits."""
    for step in range(1, 7):
        num_batches = 1 + step % 2
        size = int(rng.choice([1, 7, 40] if num_batches == 1 else [7, 40]))  # a batch without ids joins in the core
        bags = [draw_bags(rng, workers[0].features, size) for _ in range(num_batches)]
        evaluated = {worker.lookup(bags[0].inputs(), train=False).block.tobytes() for worker in workers}
        assert len(evaluated) == 1
        step_both(list(workers), rng, bags, step)
    assert_equal(workers, ids)


def three_features(table: Table, padding_id: int | None = None) -> Features:
    return Features({"item": table, "path": table.sequence(2), "bag": table.bag("mean", padding_id=padding_id)})


def give_gradients_that_are_not_finite(
    workers: Sequence[Any], features: Features, rng: np.random.Generator, ids: NDArray[np.uint64] = UNIVERSE
) -> None:
    """Compare workers after updates with a NaN, an infinity, and a number that the scale or a sum makes infinite.
    features: `three_features`. An update that is refused is made again, with zeros."""
    for step in range(1, 8):
        bags, messages = draw_bags(rng, features, 6), []
        block = rng.normal(size=(6, 6)).astype(np.float32)
        path = rng.normal(size=(6, 2, 3)).astype(np.float32)
        block[rng.integers(6), rng.integers(6)] = path[rng.random(path.shape) < 0.2] = [np.nan, np.inf, 3e38][step % 3]
        for worker in workers:
            ticket = worker.lookup(bags.inputs(), step=step).ticket
            try:
                worker.update([ticket], [block], [{"path": path}], step=step, scale=1.0 + step % 2)
            except NonFiniteError as error:
                messages.append(str(error))
                assert not ticket.used
                worker.update([ticket], [np.zeros_like(block)], step=step)
        assert len(messages) in (0, len(workers)) and len(set(messages)) <= 1
        assert_equal(workers, ids)


def user_and_item(**options: Any) -> dict[str, Any]:
    """Return features whose rows have 32 bytes on a device. options: of the table of items."""
    item = Table("item", dim=4, optimizer=Adagrad(lr=0.1), num_buckets=2, **options)
    user = Table("user", dim=4, optimizer=Adagrad(lr=0.1), num_buckets=2)
    return {"user": user, "item": item, "history": item.bag("mean")}


class FoundAhead:
    """Notes the steps whose batches a worker has found ahead of their lookup."""

    def __init__(self, worker: Any) -> None:
        self.steps: list[int] = []
        self._changed, self._resolve, worker.resolve = threading.Condition(), worker.resolve, self._note

    def wait_for(self, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: step in self.steps, 30)

    def _note(self, inputs: Inputs, **at: int) -> Any:
        request = self._resolve(inputs, **at)
        with self._changed:
            self.steps.append(at["step"])
            self._changed.notify()
        return request


def train_in_parts(
    folder: Path, data: list[Inputs], features: Any, parts: Sequence[dict[str, Any]], steps: int, **how: Any
) -> tuple[Embeddings, Net]:
    """Train one part of `steps` steps after the other, the last one to the end of the data; each resumes from the
    checkpoint that the one before saved. parts: options of `Embeddings`. how: options of the stream."""
    for number, options in enumerate(parts, 1):
        embeddings, model, optimizer = job(dense=how.get("device", "cpu"), features=features, seed=3, **options)
        run = Checkpoint(folder, model, optimizer, embeddings, data, full_every=2)
        assert run.resume() == (number > 1)
        for batch in embeddings.stream(data, **how):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if batch.step == number * steps and number < len(parts):
                run.save()
                break
        embeddings.drain()
    return embeddings, model
