"""Bags against plain PyTorch: pooled rows, and the rows after an update, for every pooling and optimizer.

The model is bag_oracle.py. In addition, whole trainings are compared with torch.nn.EmbeddingBag and torch's own sparse
optimizers, and all visible results are compared bit for bit between numbers of threads and SIMD paths.
"""

from __future__ import annotations

import hashlib
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from bag_oracle import Bags, assert_pooled, assert_stepped, draw_bags, draw_gradients, follow, read, summed, update
from contents import counters
from one_row import F32
from satrap import _core
from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, RowWiseAdagrad
from satrap.config.tables import Feature, Normal, Table
from satrap.data.inputs import Inputs
from satrap.errors import InputError
from satrap.worker.local_rows import local_worker
from satrap.worker.worker import Worker

OPTIMIZERS: list[Any] = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.01),
    AdamW(lr=0.01),
    Ftrl(lr=0.1, l1=0.02),
]
POOLINGS = [("sum", False), ("sum", True), ("mean", False), ("mean", True), ("sqrtn", False), ("sqrtn", True)]


def make(pooling: Any, weighted: bool, optimizer: Any, dim: int, **options: Any) -> Worker:
    """Use the pooling on a table that two more features share, and again on a table of another dim."""
    item = Table("item", dim=dim, optimizer=optimizer, initial=Normal(std=0.5))
    user = Table("user", dim=dim + 3, optimizer=optimizer, initial=Normal(std=0.5))
    features = {
        "bag": Feature(item, pooling, weighted=weighted),
        "user": Feature(user, pooling, weighted=weighted),
        "item": Feature(item),
        "path": item.sequence(3),
        "last": user.sequence(1),
        "first": user.sequence(2, keep="first"),
        "padded": item.sequence(2, padding_id=3),
        "jagged": item.sequence(padding_id=5),
        "jagged first": user.sequence(2, keep="first", jagged=True),
        "padded bag": Feature(user, pooling, weighted=weighted, padding_id=2**64 - 1),
    }
    return local_worker(Features(features), **{"num_threads": 1, **options})


@pytest.mark.parametrize(("pooling", "weighted"), POOLINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_equals_torch(pooling: Any, weighted: bool, optimizer: Any, rng: np.random.Generator) -> None:
    worker = make(pooling, weighted, optimizer, int(rng.integers(1, 20)))
    follow(worker, rng, num_steps=3, scale=float(rng.choice([1.0, 0.5, 0.3])))


@pytest.mark.parametrize("dim", [1, 2, 7, 8, 13, 16, 17, 32, 61])
@pytest.mark.parametrize("simd", _core.simd_paths())
def test_any_dim_on_any_path(dim: int, simd: str, rng: np.random.Generator) -> None:
    """Columns at any offset: whole lines, half lines, neither."""
    follow(make("sqrtn", True, Adagrad(), dim, simd=simd), rng, num_steps=2)
    tables = [Table(f"t{i}", dim=dim, initial=Normal()) for i in range(3)]
    follow(local_worker(Features({table.name: table for table in tables}), simd=simd), rng, num_steps=2, single=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_rows(dtype: Any, rng: np.random.Generator) -> None:
    table = Table("item", dim=9, optimizer=Adagrad(lr=0.1), initial=Normal(std=0.5), dtype=dtype)
    follow(local_worker(Features({"a": table, "b": table.bag("mean"), "c": table.sequence(2)})), rng, num_steps=4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_accumulated_batches_are_one_step(optimizer: Any, rng: np.random.Generator) -> None:
    follow(make("mean", True, optimizer, 5), rng, num_steps=3, accumulate=3, scale=0.25)


poolings = st.sampled_from(["sum", "mean", "sqrtn"])
paddings = st.sampled_from([None, 0, 7])
two = [Table("a", dim=3, optimizer=SGD(lr=0.5), num_buckets=2), Table("b", dim=16, optimizer=Adam(), num_buckets=4)]
some_features = st.one_of(
    st.builds(Feature, st.sampled_from(two), poolings, weighted=st.booleans(), padding_id=paddings),
    st.builds(
        Table.sequence,
        st.sampled_from(two),
        st.integers(1, 4),
        keep=st.sampled_from(["last", "first"]),
        padding_id=paddings,
        jagged=st.booleans(),
    ),
    st.builds(Table.sequence, st.sampled_from(two), padding_id=paddings),
)


@settings(max_examples=settings().max_examples // 3)
@given(
    features=st.lists(some_features, min_size=1, max_size=6),
    batch_size=st.integers(0, 9),
    accumulate=st.integers(1, 3),
    threads=st.integers(1, 3),
    draw=st.integers(0, 2**32 - 1),
)
def test_any_features(features: list[Feature], batch_size: int, accumulate: int, threads: int, draw: int) -> None:
    worker = local_worker(Features({f"f{i}": each for i, each in enumerate(features)}), num_threads=threads)
    rng = np.random.default_rng(draw)
    follow(worker, rng, num_steps=2, batch_size=batch_size, accumulate=accumulate, single=bool(draw % 2))


def test_features_at_most_one_id(rng: np.random.Generator) -> None:
    """Missing values: empty bags among bags of one id are zeros, and get no gradient."""
    table = Table("t", dim=16, initial=Normal())
    worker = local_worker(Features({"a": table, "b": table.bag("mean"), "c": table}), num_threads=2)
    bags = Bags(worker.features, [[[(s % 9, np.float32(1))][: s % (f + 2)] for s in range(300)] for f in range(3)])
    looked = worker.lookup(bags.inputs())
    before = read(worker)
    assert_pooled(bags, looked, before)
    gradients = draw_gradients(rng, looked)
    update(worker, looked, gradients[0])
    assert_stepped(worker, before, summed([bags], [gradients], 1.0))


def test_a_missing_gradient_differs_from_zero(rng: np.random.Generator) -> None:
    """An id without a gradient stays unchanged, as in torch, while Adam would change it with a gradient of 0."""
    for without in ("block", "path", "last"):
        worker = make("sum", False, Adam(), 4)
        bags = draw_bags(rng, worker.features, 5)
        looked = worker.lookup(bags.inputs())
        before = read(worker)
        block: F32 | None
        block, sequences = draw_gradients(rng, looked)
        if without == "block":
            block = None
        sequences.pop(without, None)
        update(worker, looked, block, sequences)
        assert_stepped(worker, before, summed([bags], [(block, sequences)], 1.0))


# -- whole trainings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), Adagrad(lr=0.1, eps=1e-10), Adam(lr=0.01)], ids=type)
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
def test_trains_like_an_embedding_bag(optimizer: Any, mode: Any, weighted: bool, rng: np.random.Generator) -> None:
    """torch.nn.EmbeddingBag, autograd and torch's sparse optimizers, within float tolerance: torch sums duplicates in
    another order, and a first step of Adagrad or Adam divides a small sum by itself. Every id is in every step, so that
    SparseAdam's count is the row's."""
    num_ids, dim, batch_size = 20, 6, 12
    table = Table("item", dim=dim, optimizer=optimizer, initial=Normal(std=0.5))
    worker: Any = local_worker(Features({"bag": table.bag(mode, weighted=weighted)}))
    everyone = np.arange(num_ids, dtype=np.uint64)
    module = torch.nn.EmbeddingBag.from_pretrained(
        torch.from_numpy(worker.tables["item"].lookup(everyone).copy()), freeze=False, mode=mode, sparse=True
    )
    torch_optimizer = {SGD: torch.optim.SGD, Adagrad: torch.optim.Adagrad, Adam: torch.optim.SparseAdam}[
        type(optimizer)
    ](module.parameters(), lr=optimizer.lr)
    for _ in range(20):
        order = rng.permutation(np.concatenate([np.arange(num_ids), rng.integers(num_ids, size=15)])).tolist()
        ends = np.sort(rng.integers(len(order) + 1, size=batch_size - 1)).tolist()
        weights = rng.normal(size=len(order)).astype(np.float32)
        pairs = list(zip(order, weights, strict=True))
        bags = Bags(worker.features, [[pairs[a:b] for a, b in zip([0, *ends], [*ends, len(order)], strict=True)]])
        looked = worker.lookup(bags.inputs())
        block = module(
            torch.tensor(order),
            torch.tensor([0, *ends]),
            per_sample_weights=torch.from_numpy(weights) if weighted else None,
        )
        np.testing.assert_allclose(looked.block, block.detach().numpy(), rtol=1e-3, atol=1e-3)
        gradient = rng.normal(size=(batch_size, dim)).astype(np.float32)
        with torch.sparse.check_sparse_tensor_invariants(True):
            torch_optimizer.zero_grad()
            block.backward(torch.from_numpy(gradient))
            torch_optimizer.step()
        update(worker, looked, gradient)
    np.testing.assert_allclose(
        worker.tables["item"].read(everyone).values, module.weight.detach().numpy(), rtol=1e-3, atol=1e-3
    )


def test_a_history_keeps_its_last_ids_and_ignores_padding() -> None:
    """0 pads two of three histories: it has no row, no position, no part in a mean and is not counted as truncated."""
    item = Table("item", dim=2, initial=Normal())
    features = Features(
        {
            "last": item.sequence(2, padding_id=0),
            "first": item.sequence(2, keep="first", padding_id=0),
            "mean": item.bag("mean", padding_id=0),
        }
    )
    worker = local_worker(features)
    history = np.array([0, 0, 7, 8, 9, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    inputs = Inputs(names=features.names, values=np.tile(history, 3), offsets=np.arange(0, 46, 5), batch_size=3)
    looked = worker.lookup(inputs)
    rows = worker.tables["item"].read(np.arange(10)).values
    zeros = np.zeros_like(rows[0])
    assert len(worker.tables["item"]) == 4, "5, 7, 8 and 9: 0 has no row"
    np.testing.assert_array_equal(looked.sequences["last"], [[rows[8], rows[9]], [rows[5], zeros], [zeros, zeros]])
    np.testing.assert_array_equal(looked.sequences["first"], [[rows[7], rows[8]], [rows[5], zeros], [zeros, zeros]])
    for name in ("last", "first"):
        assert looked.masks[name].tolist() == [[True, True], [True, False], [False, False]]
    np.testing.assert_array_equal(looked.block, [(rows[7] + rows[8] + rows[9]) / np.float32(3), rows[5], zeros])
    assert worker.truncated == {"last": 1, "first": 1} and looked.truncated == [1, 1]


def test_padding_of_single_ids_and_its_weights() -> None:
    """Without offsets. The weight of padding may be anything, but not that of another id."""
    item = Table("item", dim=2, initial=Normal())
    other = item.bag("sum", weighted=True, padding_id=3)
    features = Features({"one": item.bag("sum", padding_id=2**64 - 1), "other": other})
    values, weights = np.array([2**64 - 1, 2, 3, 4], np.uint64), np.array([np.nan, 1, np.nan, 2], np.float32)
    worker = local_worker(features)
    looked = worker.lookup(Inputs(names=features.names, values=values, weights=weights, batch_size=2))
    rows = worker.tables["item"].read(np.array([2, 4])).values
    zeros = np.zeros_like(rows[0])
    wanted = [np.concatenate([zeros, zeros]), np.concatenate([rows[0], 2 * rows[1]])]
    np.testing.assert_array_equal(looked.block, wanted)
    assert len(worker.tables["item"]) == 2
    weights[3] = np.nan
    with pytest.raises(InputError, match="the weight of id 4 in sample 1 of feature 'other' is nan"):
        worker.lookup(Inputs(names=features.names, values=values, weights=weights, batch_size=2))


# -- one result --------------------------------------------------------------------------------------------------------


PADDING = 0x9E3779B97F4A7C15


def digest(num_threads: int, simd: str, num_buckets: int, seed: int) -> str:
    """Return all visible results of some large batches."""
    rng = np.random.default_rng(seed)
    some: dict[str, Any] = {"num_buckets": num_buckets, "initial": Normal()}
    item = Table("item", dim=16, optimizer=Adagrad(lr=0.1), **some)
    user = Table("user", dim=24, optimizer=RowWiseAdagrad(lr=0.1), **some)
    word = Table("word", dim=5, optimizer=Adam(lr=0.1), dtype="bfloat16", **some)
    features = Features(
        {
            "item": item, "user": user, "words": word.bag("sqrtn"), "seen": item.bag("mean", weighted=True),
            "path": item.sequence(3), "friends": user.bag("sum", padding_id=PADDING), "text": word.sequence(5),
            "padded": item.sequence(2, keep="first", padding_id=PADDING), "word": word, "all": user.sequence(),
        }
    )  # fmt: skip
    worker = local_worker(features, num_threads=num_threads, simd=simd, seed=1)
    seen = hashlib.sha256()
    for _ in range(3):
        looked = []
        for batch_size in (700, 300):
            lengths = np.stack([rng.integers(*most, size=batch_size) for most in ((1, 2), (0, 2), *[(0, 8)] * 8)])
            offsets = np.concatenate([[0], np.cumsum(lengths.reshape(-1))]).astype(np.int64)
            values = (rng.zipf(1.3, size=offsets[-1]) % 3000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            weights = rng.normal(size=offsets[-1]).astype(np.float32)
            inputs = Inputs(
                names=features.names, values=values, offsets=offsets, weights=weights, batch_size=batch_size
            )
            looked.append(worker.lookup(inputs))
        gradients = [draw_gradients(rng, each) for each in looked]
        tickets = [each.ticket for each in looked if each.ticket]
        worker.update(tickets, [b for b, _ in gradients], [s for _, s in gradients], scale=0.5)
        for each in looked:
            for array in (each.block, *each.sequences.values(), *each.masks.values()):
                seen.update(array.tobytes())
    everyone = np.arange(3000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for store in worker.tables.values():
        for array in store.read(everyone):
            seen.update(array.tobytes())
        seen.update(repr(counters(store)).encode())
    return seen.hexdigest()


def tiny_numbers(num_threads: int, flush: bool) -> str:
    """Run some batches of subnormal numbers, in a thread that flushes them to 0 or does not."""
    rng = np.random.default_rng(3)
    table = Table("t", dim=16, optimizer=SGD(lr=1.0), initial=Normal(std=1e-39))
    features = {name: Feature(table, name, weighted=name == "sqrtn") for name in ("sum", "mean", "sqrtn")}
    worker = local_worker(Features(features), num_threads=num_threads)
    seen = hashlib.sha256()
    torch.set_flush_denormal(flush)
    try:
        for _ in range(2):
            offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 8, size=3 * 500))]).astype(np.int64)
            inputs = Inputs(
                names=worker.features.names,
                values=rng.integers(400, size=offsets[-1]).astype(np.uint64),
                offsets=offsets,
                weights=rng.normal(size=offsets[-1]).astype(np.float32),
                batch_size=500,
            )
            looked = worker.lookup(inputs)
            update(worker, looked, rng.normal(size=(500, 48)).astype(np.float32), scale=1e-39)
            seen.update(looked.block.tobytes())
            assert np.mean(looked.block.view(np.uint32) << 1 != 0) > 0.5
    finally:
        torch.set_flush_denormal(False)
    seen.update(worker.tables["t"].read(np.arange(400, dtype=np.uint64)).values.tobytes())
    return seen.hexdigest()


def test_the_callers_float_mode_changes_nothing() -> None:
    wanted = tiny_numbers(1, False)
    for num_threads in (1, 2):
        assert tiny_numbers(num_threads, True) == wanted


def test_threads_paths_and_buckets_change_nothing(seed: int) -> None:
    wanted = digest(1, "portable", 1, seed)
    for simd in _core.simd_paths():
        for num_threads in (1, 2, 3, 4):
            assert digest(num_threads, simd, 1 << (num_threads * 2), seed) == wanted, (simd, num_threads)
