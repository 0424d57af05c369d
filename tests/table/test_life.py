"""The life of a row, one rule per test: admission, capacity, eviction, pinning, expiry, absence, and what stats()
says.

test_property.py mixes all of this; here are the rules that its draws rarely reach, and messages. Stores have one
bucket where the exact order of eviction matters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oracle import Full, Oracle, as_ids
from satrap.config.optimizers import SGD, Adagrad
from satrap.config.tables import Always, Constant, MinCount, Probability, Table
from satrap.errors import CapacityError
from satrap.table.store import Store

OpenStore = Callable[..., Store]


def table(**options: Any) -> Table:
    plain = {"dim": 2, "optimizer": SGD(lr=1.0), "initial": Constant(1.0), "num_buckets": 1}
    return Table("item", **{**plain, **options})


def present(store: Store, ids: Any) -> list[int]:
    ids = list(ids)
    return [id_ for id_, there in zip(ids, store.read(as_ids(ids)).present, strict=True) if there]


# -- ids ---------------------------------------------------------------------------------------------------------------


def test_all_64_bits_count(open_store: OpenStore, rng: np.random.Generator) -> None:
    """Ids that agree in any half, or differ in one bit, have different rows; int64 is the same bits."""
    store = open_store(table(num_buckets=16))
    ids = [0, 2**64 - 1, *(1 << k for k in range(64)), *(k << 32 for k in range(2, 50)), 0x0123456789ABCDEF]
    ids = list(dict.fromkeys(ids))
    store.lookup(as_ids(ids))
    assert len(store) == len(ids)
    gradients = rng.integers(-100, 100, size=(len(ids), 2)).astype(np.float32)
    store.update(as_ids(ids), gradients)
    np.testing.assert_array_equal(store.read(as_ids(ids)).values, 1 - gradients)
    signed = as_ids(ids).view(np.int64)
    np.testing.assert_array_equal(store.lookup(signed), 1 - gradients)
    assert len(store) == len(ids)


# -- admission ---------------------------------------------------------------------------------------------------------


def test_probability_is_a_draw_of_seed_table_id_and_step(open_store: OpenStore, rng: np.random.Generator) -> None:
    ids = rng.integers(2**64, size=20_000, dtype=np.uint64)
    ids = np.unique(ids)

    def admitted(*, seed: int = 0, step: int = 1, name: str = "item", order: Any = None, **options: Any) -> Any:
        store = open_store(
            Table(name, dim=1, admission=Probability(0.3), num_buckets=options.pop("num_buckets", 1)),
            seed=seed,
            **options,
        )
        store.lookup(ids if order is None else ids[order], step=step)
        return store.read(ids).present

    base = admitted()
    n = len(ids)
    assert abs(base.mean() - 0.3) < 6 * (0.21 / n) ** 0.5
    for same in (admitted(num_threads=3), admitted(num_buckets=64), admitted(order=rng.permutation(n))):
        np.testing.assert_array_equal(base, same)
    for other in (admitted(seed=1), admitted(step=2), admitted(name="user")):
        both = np.mean(base & other)
        assert abs(both - 0.09) < 6 * (0.09 * 0.91 / n) ** 0.5, "draws are not independent"


# -- capacity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("admission", [Always(), MinCount(2, window=400)])
def test_large_buckets_evict_as_the_model_does(admission: Any, open_store: OpenStore, seed: int) -> None:
    """The property test has few ids; here victims are collected by the dozen while steps repeat, jump and go back."""
    rng = np.random.default_rng(seed)
    config = table(capacity=240, num_buckets=2, admission=admission)
    store, model = open_store(config), Oracle(config, 0)
    for _ in range(90):
        ids = rng.integers(1500, size=40).tolist()
        step = max(1, store.latest_step + int(rng.integers(-6, 4)))
        oldest_open = max(1, step - int(rng.integers(0, 3)))
        try:
            model.lookup(ids, step=step, oldest_open=oldest_open)
        except Full:
            with pytest.raises(CapacityError):
                store.lookup(as_ids(ids), step=step, oldest_open=oldest_open)
            model.adopt(store)
            continue
        store.lookup(as_ids(ids), step=step, oldest_open=oldest_open)
        some = rng.integers(1500, size=40).tolist()
        step = max(1, step + int(rng.integers(-3, 2)))
        model.update(some, np.zeros((40, 2), np.float32), step=step)
        store.update(as_ids(some), np.zeros((40, 2), np.float32), step=step)
        model.compare(store, range(1500))
    assert store.stats()["evicted"] > 100


def test_open_steps_pin_their_rows(open_store: OpenStore) -> None:
    """Rows looked up at or after the oldest open step stay; the error names the capacity that is needed."""
    store = open_store(table(capacity=4))
    store.lookup(as_ids([1, 2]), step=1)
    store.lookup(as_ids([3, 4]), step=2, oldest_open=1)
    with pytest.raises(CapacityError, match=r"table 'item'.*step 3") as raised:
        store.lookup(as_ids([5, 6]), step=3, oldest_open=1)
    assert present(store, range(1, 7)) == [1, 2, 3, 4], "nothing pinned went"
    needed = int(re.findall(r"capacity to at least (\d+)", str(raised.value))[0])
    assert needed == 6
    roomy = open_store(table(capacity=needed))
    for step, ids in enumerate(([1, 2], [3, 4], [5, 6]), 1):
        roomy.lookup(as_ids(ids), step=step, oldest_open=1)
    store.lookup(as_ids([5, 6]), step=3, oldest_open=2)  # step 1 is closed: its rows may go
    assert present(store, range(1, 7)) == [3, 4, 5, 6]


def test_a_batch_larger_than_the_table_needs_its_own_capacity(open_store: OpenStore) -> None:
    store = open_store(table(capacity=5))
    with pytest.raises(CapacityError, match="capacity to at least 8"):
        store.lookup(as_ids(range(8)), step=1)


def test_memory_does_not_grow_at_capacity(open_store: OpenStore, rng: np.random.Generator) -> None:
    store = open_store(table(dim=16, capacity=2000, num_buckets=4, optimizer=Adagrad()))
    sizes = []
    for step in range(1, 120):
        store.lookup(rng.integers(2**64, size=200, dtype=np.uint64), step=step)
        sizes.append(store.stats()["bytes"])
    assert max(sizes[60:]) == sizes[60], f"bytes grow under eviction: {sizes[60:]}"


# -- expiry ------------------------------------------------------------------------------------------------------------


def test_a_row_of_a_step_below_the_line_of_expiry_lives(open_store: OpenStore) -> None:
    """A row that a very late lookup inserts is stamped with expire_before, not with its step: its update finds it."""
    store = open_store(table(expire_after=2, capacity=3))
    store.lookup(as_ids([1]), step=100)  # rows stamped before 98 are gone
    _, ticket = store.lookup_for_update(as_ids([2, 3]), step=5)
    store.update(ticket, np.ones((2, 2), np.float32) * -4, step=5)
    assert np.all(store.read(as_ids([2, 3])).values == 5)
    with pytest.raises(CapacityError):
        store.lookup(as_ids([4]), step=6)  # in use by steps later than this one, all of them
    assert (len(store), store.latest_step, store.stats()["expired"]) == (3, 100, 0)
    store.lookup(as_ids([1]), step=101)
    assert present(store, [1, 2, 3]) == [1]
    assert (len(store), store.stats()["expired"]) == (1, 2)


# -- steps -------------------------------------------------------------------------------------------------------------


def test_the_last_step(open_store: OpenStore) -> None:
    """Steps end at 2**32 - 2; the store's own counting stops there with an error, and does not wrap."""
    store = open_store(table())
    store.lookup(as_ids([1]), step=2**32 - 2)
    for _ in range(3):
        with pytest.raises(ValueError, match="step"):
            store.lookup(as_ids([1]))
    assert store.latest_step == 2**32 - 2
    store.check()


def test_a_refused_capacity_costs_no_sighting(open_store: OpenStore) -> None:
    """An id that was admitted but found no room keeps its count: the retry with room inserts it."""
    store = open_store(table(admission=MinCount(2), capacity=1))
    store.lookup(as_ids([1, 2]), step=1)
    store.lookup(as_ids([1]), step=2)
    with pytest.raises(CapacityError):
        store.lookup(as_ids([2]), step=3, oldest_open=2)
    store.lookup(as_ids([2]), step=3, oldest_open=3)
    assert present(store, [1, 2]) == [2]
