"""Negatives and retrieval against dense torch and the true distributions, wherever the rows are."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import satrap
from cluster import one_table, running_servers, sharded_worker
from satrap import Feature, Frame, Store, Table, negatives
from satrap.device.device_worker import device_worker
from satrap.errors import InputError
from satrap.worker.local_rows import local_worker


@pytest.mark.parametrize("where", ["here", "device", "servers"])
@pytest.mark.parametrize("num_rows", [1, 700])
def test_all_rows_against_a_dense_matrix(
    where: str, num_rows: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("satrap.train.retrieval._MOST_PRODUCTS", 50)  # parts of five rows
    ids = rng.integers(0, 2**64, num_rows, dtype=np.uint64)
    values = rng.normal(size=(num_rows, 8)).astype(np.float32)
    queries = torch.randn(9, 8)
    targets = rng.integers(0, num_rows, 9)
    declared = one_table(dim=8)
    with running_servers(2) as services, sharded_worker(declared, [each.address for each in services]) as sharded:
        workers: dict[str, Any] = {"here": local_worker(declared), "servers": sharded}
        worker = workers.get(where) or device_worker(declared, "cpu")
        table = worker.tables["t"]
        table.write(ids, values)
        products = queries @ torch.from_numpy(values).T
        found, scores = satrap.topk(queries, table, 20)
        best = products.topk(min(20, num_rows), dim=1)
        torch.testing.assert_close(scores, best.values)
        assert np.array_equal(found, ids[best.indices.numpy()])
        expected = cross_entropy(products, torch.from_numpy(targets), reduction="none")
        torch.testing.assert_close(satrap.full_softmax(queries, ids[targets], table), expected, rtol=1e-5, atol=1e-5)


def test_counts_are_the_true_frequencies(rng: np.random.Generator) -> None:
    counts, truth = negatives.Counts(), Counter[int]()
    for number in range(30):
        batch = (rng.zipf(1.3, int(rng.integers(1, 400))) % 5000).astype(np.uint64) * np.uint64(2**40 + 1)
        counts.add(batch)
        truth.update(batch.tolist())
        if number == 15:
            state, counts = counts.state_dict(), negatives.Counts()
            counts.load_state_dict(state)
    ids = list(truth)
    expected = np.log(np.array([truth[i] for i in ids]) / truth.total())
    np.testing.assert_allclose(counts.log_q(ids).numpy(), expected, rtol=1e-6)
    with pytest.raises(InputError, match="id 3 was never counted"):
        counts.log_q([ids[0], 3])

    for draws, power in ((counts.by_frequency(0.75), 0.75), (negatives.Draws(np.sort(np.array(ids, np.uint64))), 0.0)):
        weights = np.array([truth[i] for i in ids], np.float64) ** power
        drawn, log_q = draws.draw(200_000, seed=1, number=2)
        again, _ = draws.draw(200_000, seed=1, number=2)
        assert np.array_equal(drawn, again)
        shares = dict(zip(ids, weights / weights.sum(), strict=True))
        np.testing.assert_allclose(log_q.numpy(), np.log([shares[i] for i in drawn.tolist()]), rtol=1e-5)
        seen = Counter(drawn.tolist())
        error = max(abs(seen[i] / 200_000 - share) for i, share in shares.items())
        assert error < 5 / np.sqrt(200_000), "five deviations"


def test_a_state_of_counts_stays_as_it_was() -> None:
    counts, other = negatives.Counts(), negatives.Counts()
    counts.add([1, 2, 2])
    state = counts.state_dict()
    counts.add([2, 3])
    other.load_state_dict(state)
    assert torch.exp(other.log_q([1, 2])).tolist() == pytest.approx([1 / 3, 2 / 3])


def test_the_softmax_of_a_batch(rng: np.random.Generator) -> None:
    """Each query's loss is that over its own item and those with other ids."""
    queries, items = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    ids = np.array([5, 1, 5, 2, 3, 1], np.uint64)
    log_q = torch.randn(6)
    logits = negatives.in_batch(queries, items, ids, log_q)
    for i in range(6):
        kept = [j for j in range(6) if j == i or ids[j] != ids[i]]
        loss = cross_entropy((queries[i] @ items[kept].T - log_q[kept])[None], torch.tensor([kept.index(i)]))
        torch.testing.assert_close(cross_entropy(logits, torch.arange(6), reduction="none")[i], loss)
    cross_entropy(logits, torch.arange(6)).backward()
    assert queries.grad is not None and queries.grad.isfinite().all()


@pytest.mark.parametrize("where", ["here", "servers"])
def test_negatives_are_trained_by_a_stream(where: str, rng: np.random.Generator) -> None:
    item = Table("item", dim=4, optimizer=satrap.SGD(lr=1.0), initial=satrap.Zeros())
    with running_servers(2) as services:
        deployment = satrap.Deployment([each.address for each in services]) if where == "servers" else None
        features: dict[str, Feature | Table] = {"item": item, "negatives": item.bag("sum")}
        with satrap.Embeddings(features, deployment=deployment) as embeddings:
            optimizer = embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
            draws = negatives.Draws(np.arange(50, dtype=np.uint64))
            source = Frame({"item": np.arange(100, 140)}, batch_size=8)
            seen = Counter[int]()
            with_negatives = negatives.add(source.batches(["item"]), "negatives", draws, size=3)
            for batch in embeddings.stream(satrap.IterableSource(with_negatives)):
                batch.embeddings.sum().backward()
                optimizer.step()
                seen.update(batch.inputs.values.tolist())
            assert seen.total() == 40 * 4 and set(range(100, 140)) < set(seen)
            ids = list(seen)
            values = embeddings.tables["item"].read(ids).values
            np.testing.assert_array_equal(values[:, 0], [-seen[i] for i in ids])


def as_any(value: Any) -> Any:
    return value


def counted() -> negatives.Counts:
    counts = negatives.Counts()
    counts.add([1, 2, 2])
    return counts


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda table: satrap.topk(torch.zeros(2, 3), table, 1), r"queries are torch.float32 of shape \(2, 3\)"),
        (lambda table: satrap.topk(torch.zeros(2, 2), table, 0), "k is 0"),
        (lambda table: satrap.topk(torch.tensor(1.0), table, 1), r"of shape \(\); expected a float32 tensor \[n, 2\]"),
        (lambda table: satrap.topk(torch.zeros(2, 2, 1), table, 1), r"of shape \(2, 2, 1\)"),
        (lambda table: satrap.topk(as_any([[0.0, 0.0]]), table, 1), "queries are <class 'list'>"),
        (lambda _: counted().by_frequency(math.nan), "power is nan, which float64 cannot raise counts of up to 2 to"),
        (lambda _: counted().by_frequency(2000), "power is 2000"),
        (lambda _: counted().by_frequency(-2000), "power is -2000"),
        (lambda _: counted().by_frequency(as_any("a")), "power is 'a'; expected a number"),
        (lambda _: counted().by_frequency().draw(1, seed=-1, number=0), "draw: seed is -1; expected an integer from 0"),
        (
            lambda _: satrap.topk(torch.zeros(2, 2), as_any("user"), 3),
            r"topk: table is 'user' \(str\); expected one of",
        ),
        (lambda _: satrap.topk(torch.zeros(2, 2), as_any(Table("t", dim=2)), 3), r"table is .*: embeddings\.tables\["),
        (lambda _: satrap.full_softmax(torch.zeros(2, 2), [1], as_any({})), r"full_softmax: table is {} \(dict\)"),
        (lambda table: satrap.full_softmax(torch.zeros(2, 2), [1, 9], table), "target 9 has no row"),
        (lambda table: satrap.full_softmax(torch.zeros(2, 2), [1], table), "found 1 targets for 2 queries"),
        (
            lambda table: negatives.in_batch(torch.zeros(2, 2), torch.zeros(3, 2), [1, 2]),
            r"are of \[\(2, 2\)",
        ),
        (lambda table: negatives.Draws.uniform(Store(Table("none", dim=2))), "there are no ids to draw from"),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    store = Store(Table("t", dim=2))
    store.write([1], np.ones((1, 2), np.float32))
    with pytest.raises(InputError, match=message):
        call(store)
