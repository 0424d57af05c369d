"""Rows on a device are found ahead of their lookup, in the thread that reads: the same results as without."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bag_oracle import draw_bags
from cluster import step_both
from contents import bits, counted_bits
from device_workers import (
    ArrayWorker,
    FoundAhead,
    assert_equal,
    every_kind,
    give_gradients_that_are_not_finite,
    three_features,
    train_in_parts,
    user_and_item,
)
from loop import Net, job, loss_of, tables, train_dropping
from loop import batches as draw_batches
from satrap import Adagrad, Embeddings, MinCount, Table
from satrap.config.features import Features
from satrap.config.tables import Normal
from satrap.data.inputs import Inputs
from satrap.device.device_rows import OrderedTicket
from satrap.errors import TicketError
from satrap.worker.local_rows import local_worker
from satrap.worker.worker import LookupResult

NUM_IDS = 40


def batches(rng: np.random.Generator, num: int) -> list[Inputs]:
    return draw_batches(num, seed=int(rng.integers(1000)))


@pytest.mark.parametrize("options", [{}, {"capacity": 34}, {"capacity": 46}], ids=["grows", "tight", "evicts"])
@pytest.mark.parametrize(("staleness", "accumulate"), [(0, 1), (0, 3), (2, 1)])
def test_it_equals_rows_in_memory(
    options: dict[str, Any], staleness: int, accumulate: int, rng: np.random.Generator
) -> None:
    """A tight capacity has no room for the batch ahead, which is then found at its lookup."""
    data = batches(rng, 25)
    how: dict[str, Any] = {"staleness": staleness, "accumulate": accumulate, "deterministic": staleness > 0}
    expected = train_dropping(data, user_and_item(**options), **how)
    found = train_dropping(data, user_and_item(**options), overlap=True, device="cpu", **how)
    assert counted_bits(*found) == counted_bits(*expected)


def test_the_next_batch_is_found_while_a_step_is_in_progress(rng: np.random.Generator) -> None:
    embeddings, model, optimizer = job(features=user_and_item(), device="cpu")
    ahead = FoundAhead(embeddings.worker)
    with embeddings.stream(batches(rng, 4), overlap=True) as stream:
        for batch in stream:
            ahead.wait_for(min(4, batch.step + 1))
            loss_of(model, batch).backward()
            optimizer.step()
    assert ahead.steps == [1, 2, 3, 4]


def test_tables_whose_rows_depend_on_the_order_are_not_resolved_ahead(rng: np.random.Generator) -> None:
    data = batches(rng, 12)
    for options in ({"admission": MinCount(2)}, {"expire_after": 3}):
        found = train_dropping(data, user_and_item(**options), overlap=True, device="cpu")
        assert found[0].worker.resolve(data[0], step=100, oldest_open=100) is None
        assert counted_bits(*found) == counted_bits(*train_dropping(data, user_and_item(**options)))


def test_a_checkpoint_in_the_middle_resumes_to_the_same_end(tmp_path: Path, rng: np.random.Generator) -> None:
    """It may have rows of the batch ahead, with their initial values."""
    data = batches(rng, 12)
    features, on_cpu = user_and_item(capacity=46), {"device": "cpu"}
    whole, resumed = (
        bits(*train_in_parts(tmp_path / str(len(parts)), data, features, parts, 5, overlap=True))
        for parts in ([on_cpu], [on_cpu, on_cpu])
    )
    assert whole == resumed


def test_a_pause_waits_for_rows_that_are_being_found(rng: np.random.Generator) -> None:
    """A save would have them in some tables only."""
    embeddings = Embeddings(user_and_item(), device="cpu", num_threads=1)
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


class AheadWorker(ArrayWorker):
    """A worker that finds the rows of each batch ahead of its lookup."""

    def lookup(self, inputs: Inputs, **how: Any) -> LookupResult:
        if not how.get("train", True):
            return super().lookup(inputs, **how)
        at = {"step": how["step"], "oldest_open": how.get("oldest_open", how["step"])}
        looked_up = super().lookup
        self.worker.lookup, plain = self._resolved(at), self.worker.lookup
        try:
            return looked_up(inputs)
        finally:
            self.worker.lookup = plain

    def _resolved(self, at: dict[str, int]) -> Any:
        def look_up(inputs: Inputs) -> LookupResult:
            request = self.worker.resolve(inputs, **at)
            assert request is not None
            result: LookupResult = self.worker.lookup_resolved(request)
            return result

        return look_up


def ahead_and_not(declared: Features, device: str, **options: Any) -> list[Any]:
    alone = local_worker(declared, seed=3, num_threads=2)
    return [alone, *(kind(declared, device, seed=3, num_threads=2, **options) for kind in (ArrayWorker, AheadWorker))]


@pytest.mark.parametrize("memory", [None, {"item": 4000, "user": "none"}], ids=["on the device", "two tiers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_that_were_ordered_ahead_have_the_same_bits(
    dtype: Any, memory: Any, device: str, rng: np.random.Generator
) -> None:
    """A batch that is accumulated with another is ordered in the update, and so are the batches after it until an
    update has one batch again."""
    item = Table("item", dim=5, optimizer=Adagrad(lr=0.1), dtype=dtype, initial=Normal(std=0.5), num_buckets=4)
    workers = ahead_and_not(every_kind(item), device, device_memory=memory)
    were_ordered = []
    drop = workers[2].worker.update

    def note(tickets: Any, *given: Any, **how: Any) -> None:
        were_ordered.append([isinstance(ticket, OrderedTicket) for ticket in tickets])
        drop(tickets, *given, **how)

    workers[2].worker.update = note
    for step, num_batches in enumerate((1, 1, 2, 1, 1), 1):
        step_both(workers, rng, [draw_bags(rng, workers[0].features, 7) for _ in range(num_batches)], step)
    assert were_ordered == [[True], [True], [True, True], [False], [True]]
    assert_equal(workers)


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_gradients_that_are_not_finite(how: Any, device: str, rng: np.random.Generator) -> None:
    item = Table("item", dim=3, optimizer=Adagrad(lr=0.1), on_nonfinite=how)
    declared = three_features(item, padding_id=2)
    give_gradients_that_are_not_finite(ahead_and_not(declared, device), declared, rng)


def test_a_ticket_with_an_order_is_used_once(device: str) -> None:
    workers = [AheadWorker(Features({"item": Table("item", dim=2)}), device) for _ in range(2)]
    inputs = Inputs(names=("item",), values=np.array([1, 1], np.uint64), batch_size=2)
    tickets: list[Any] = [workers[0].lookup(inputs, step=step).ticket for step in (1, 2)]
    zeros = np.zeros((2, 2), np.float32)
    with pytest.raises(TicketError, match="another store"):
        workers[1].update(tickets[:1], [zeros])
    workers[0].update(tickets[:1], [zeros], step=1)
    workers[0].drop(tickets[1])
    assert all(isinstance(ticket, OrderedTicket) and ticket.used for ticket in tickets)
    for ticket in tickets:
        with pytest.raises(TicketError, match="used already"):
            workers[0].update([ticket], [zeros], step=2)
