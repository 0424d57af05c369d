"""The worker's calls: what it refuses and how, tickets, memory, threads, and that its cost in Python stays small.

Its results are the subject of worker/test_bags.py.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch

from bag_oracle import update
from contents import worker_contents
from oracle import as_ids
from satrap._core import Ticket
from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adagrad, Ftrl
from satrap.config.tables import Constant, Table
from satrap.data.inputs import Inputs
from satrap.errors import ConfigError, InputError, NonFiniteError, TicketError
from satrap.worker.local_rows import local_worker
from satrap.worker.worker import LookupResult
from waiting import DEADLINE_SECONDS

ITEM = Table("item", dim=2, optimizer=SGD(lr=1.0), initial=Constant(0.0), num_buckets=2)
USER = Table("user", dim=3, optimizer=Ftrl(), initial=Constant(0.0), num_buckets=2)
FEATURES = Features({"item": ITEM, "seen": ITEM.bag("mean", weighted=True), "path": ITEM.sequence(2), "user": USER})
GOOD = Inputs(
    names=("item", "seen", "path", "user"),
    values=as_ids([1, 2, 3, 4, 5, 6, 7, 8, 9]),
    offsets=np.array([0, 1, 2, 4, 4, 7, 7, 8, 9]),
    weights=np.ones(9, np.float32),
    batch_size=2,
)
BLOCK = np.ones((2, 7), np.float32)
PATH = np.ones((2, 2, 2), np.float32)


@pytest.fixture
def worker() -> Iterator[Any]:
    """A worker that has trained, and that no test here may change."""
    made = local_worker(FEATURES, num_threads=2)
    update(made, made.lookup(GOOD), BLOCK, {"path": PATH})
    before = worker_contents(made, as_ids(range(12)), left_out=())
    yield made
    for store in made.tables.values():
        store.check()
    assert worker_contents(made, as_ids(range(12)), left_out=()) == before, "a refused call changed the tables"


# -- what is refused ---------------------------------------------------------------------------------------------------


def with_(**changes: Any) -> Inputs:
    return replace(GOOD, **changes)


def offsets(*values: int) -> Any:
    return np.array(values, np.int64)


BAD_INPUTS: list[tuple[Any, str]] = [
    ({"ids": 1}, "inputs is a dict; expected a satrap.data.inputs.Inputs"),
    (with_(names=["item"]), "names is a list; expected the tuple of features.names"),
    (with_(names=("item", "seen", "path")), r"the features \['user'\] are missing and \[\] are unknown"),
    (with_(names=("item", "seen", "path", "usr")), r"\['user'\] are missing and \['usr'\] are unknown"),
    (with_(names=("user", "item", "seen", "path")), "expected them in the order of features.names"),
    (with_(batch_size=-1), "batch_size is -1; expected an integer from 0"),
    (with_(batch_size=2.0), r"batch_size is 2\.0 \(float\)"),
    (with_(batch_size=True), "batch_size is True"),
    (with_(batch_size=2**30), "batch_size is 1073741824; expected an integer from 0"),
    (
        with_(batch_size=3),
        r"offsets are int64 of shape \(9,\); expected int64 of shape \(13,\): features \* batch_size",
    ),
    (with_(values=[1.0, 2.0]), r"ids\[0\] is 1.0 \(float\); expected an integer"),
    (with_(values=GOOD.values.astype(np.int32)), "ids are int32; expected uint64"),
    (with_(values=GOOD.values.reshape(3, 3)), r"ids have the shape \(3, 3\)"),
    (with_(values=GOOD.values[:-1]), "offsets run from 0 to 9; expected 0 to the number of ids, 8"),
    (with_(offsets=GOOD.offsets.astype(np.int32)), "offsets are int32"),  # type: ignore[union-attr]
    (with_(offsets=list(range(9))), "offsets is a list; expected an int64 array"),
    (with_(offsets=offsets(1, 1, 2, 4, 4, 7, 7, 8, 9)), "offsets run from 1 to 9"),
    (with_(offsets=offsets(0, 1, 2, 4, 3, 7, 7, 8, 9)), "offsets fall from 4 to 3 at sample 1 of feature 'seen'"),
    (with_(offsets=offsets(0, 1, 2, 4, 4, 7, 7, 12, 9)), "offsets fall from 12 to 9 at sample 1 of feature 'user'"),
    (with_(offsets=offsets(0, -1, 2, 4, 4, 7, 7, 8, 9)), "offsets fall from 0 to -1 at sample 0 of feature 'item'"),
    (
        with_(offsets=offsets(0, 2**63 - 1, -(2**63), -1, 0, 7, 7, 8, 9)),  # rises modulo 2**64
        "offsets fall from 9223372036854775807 to -9223372036854775808 at sample 1 of feature 'item'",
    ),
    (with_(offsets=None), "9 ids without offsets; expected 8, one for each of 4 features and 2 samples, or offsets"),
    (with_(weights=None), "feature 'seen' is weighted and there are no weights"),
    (with_(weights=np.ones(9)), r"weights are float64 of shape \(9,\); expected float32"),
    (with_(weights=np.ones(8, np.float32)), "8 weights; expected 9, one for each id"),
    (with_(weights=[1.0] * 9), "weights is a list"),
    (
        with_(weights=np.array([1, 1, 1, np.nan, 1, 1, 1, 1, 1], np.float32)),
        "the weight of id 4 in sample 0 of feature 'seen' is nan; expected a finite number",
    ),
    (with_(weights=np.array([1, 1, -np.inf, 1, 1, 1, 1, 1, 1], np.float32)), "the weight of id 3 .* is -inf"),
]


@pytest.mark.parametrize(("inputs", "words"), BAD_INPUTS)
def test_bad_inputs(worker: Any, inputs: Any, words: str) -> None:
    for train in (True, False):
        with pytest.raises(InputError, match=words):
            worker.lookup(inputs, train=train)


BAD_LOOKUPS: list[tuple[dict[str, Any], str]] = [
    ({"train": 1}, "train is 1"),
    ({"train": False, "step": 3}, "step is 3 and train=False"),
    ({"step": 0}, "step is 0"),
    ({"step": 3, "oldest_open": 4}, "oldest_open is 4"),
    ({"block": np.zeros((2, 6), np.float32)}, r"block is float32 of shape \(2, 6\); expected .*\(2, 7\)"),
    ({"block": np.zeros((2, 7))}, "block is float64"),
    ({"block": np.zeros((7, 2), np.float32).T}, "block is not contiguous"),
    ({"block": [[0.0] * 7] * 2}, "block is a list"),
]


@pytest.mark.parametrize(("options", "words"), BAD_LOOKUPS)
def test_bad_lookups(worker: Any, options: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        worker.lookup(GOOD, **options)


def test_weights_without_a_weighted_feature_are_refused() -> None:
    plain = local_worker(Features({"item": ITEM}))
    inputs = Inputs(names=("item",), values=as_ids([1]), weights=np.ones(1, np.float32), batch_size=1)
    with pytest.raises(InputError, match="there are weights and no feature is weighted"):
        plain.lookup(inputs)
    with pytest.raises(ConfigError, match=r"features is a dict; expected a satrap\.config\.features\.Features"):
        local_worker({"item": ITEM})  # type: ignore[arg-type]


BAD_UPDATES: list[tuple[dict[str, Any], str]] = [
    ({"tickets": []}, "0 tickets and 1 block_gradients; expected at least one ticket, and gradients for each"),
    ({"tickets": None}, "tickets is a NoneType; expected a list"),
    ({"tickets": [None]}, "a ticket is a NoneType; expected one that lookup returned"),
    ({"block_gradients": BLOCK}, "block_gradients is a ndarray; expected a list, one of each batch"),
    ({"block_gradients": [BLOCK, BLOCK]}, "1 tickets and 2 block_gradients"),
    ({"block_gradients": [BLOCK[:, :6]]}, r"gradients have the shape \(2, 6\); expected \(2, 7\)"),
    ({"block_gradients": [BLOCK[:1]]}, r"gradients have the shape \(1, 7\); expected \(2, 7\)"),
    ({"block_gradients": [BLOCK.astype(np.float16)]}, "gradients are float16; expected float32"),
    ({"block_gradients": [[0.0]]}, "gradients is a list"),
    ({"sequence_gradients": {"path": PATH}}, "sequence_gradients is a dict; expected a list"),
    ({"sequence_gradients": []}, "1 tickets and 0 sequence_gradients"),
    ({"sequence_gradients": [PATH]}, "sequence gradients are a ndarray; expected a dict by feature"),
    ({"sequence_gradients": [{"paht": PATH}]}, r"sequence gradients name \['paht'\]; expected names of sequences"),
    ({"sequence_gradients": [{"seen": PATH}]}, r"sequence gradients name \['seen'\]"),
    ({"sequence_gradients": [{"path": PATH[0]}]}, r"feature 'path': gradients have the shape \(2, 2\); expected \(2, "),
    ({"step": 0}, "step is 0"),
    ({"lrs": {"item": -1.0}}, "table 'item': lr is -1.0; expected a number of at least 0"),
    ({"lrs": {"user": 0.0}}, r"table 'user': lr is 0\.0; expected a number above 0"),
    ({"lrs": {"path": 1.0}}, r"lrs names \['path'\]; expected names of tables"),
    ({"lrs": [1.0]}, "lrs is a list; expected a dict"),
    ({"scale": 0.0}, r"scale is 0\.0; expected a number above 0"),
    ({"scale": -1}, "scale is -1; expected"),
    ({"scale": float("nan")}, "scale is nan"),
    ({"scale": float("inf")}, "scale is inf"),
    ({"scale": 1e-60}, "scale is 1e-60; expected a number above 0 that float32 can hold"),
    ({"scale": "1"}, r"scale is '1' \(str\)"),
    ({"scale": True}, "scale is True"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), BAD_UPDATES)
def test_bad_updates(options: Any, words: str) -> None:
    worker: Any = local_worker(FEATURES)
    looked = worker.lookup(GOOD)
    before = worker_contents(worker, as_ids(range(12)), left_out=())
    good: dict[str, Any] = {
        "tickets": [looked.ticket],
        "block_gradients": [BLOCK],
        "sequence_gradients": [{"path": PATH}],
    }
    with pytest.raises(InputError, match=words):
        worker.update(**good | options)
    assert worker_contents(worker, as_ids(range(12)), left_out=()) == before
    worker.update(**good)  # the ticket is still good
    assert worker_contents(worker, as_ids(range(12)), left_out=()) != before


def test_nonfinite_gradients_are_named() -> None:
    worker: Any = local_worker(FEATURES)
    looked = worker.lookup(GOOD)
    before = worker_contents(worker, as_ids(range(12)), left_out=())
    for bad, words in (
        ((1, 0), "table 'item': the gradient of id 2 in sample 1 of feature 'item' holds nan; .* on_nonfinite='skip'"),
        ((0, 3), "the gradient of id 3 in sample 0 of feature 'seen' holds nan"),
        ((1, 6), "table 'user': the gradient of id 9 in sample 1 of feature 'user' holds nan"),
    ):
        gradients = BLOCK.copy()
        gradients[bad] = np.nan
        with pytest.raises(NonFiniteError, match=words):
            update(worker, looked, gradients)
    path = PATH.copy()
    path[0, 1, 0] = np.inf
    with pytest.raises(NonFiniteError, match="the gradient of id 7 in sample 0 of feature 'path' holds inf"):
        update(worker, looked, BLOCK, {"path": path})
    assert worker_contents(worker, as_ids(range(12)), left_out=()) == before
    update(worker, looked, BLOCK)  # the ticket was not used


def test_nonfinite_gradients_can_be_skipped() -> None:
    table = replace(ITEM, on_nonfinite="skip")
    worker: Any = local_worker(Features({"item": table, "seen": table.bag("mean")}))
    looked = worker.lookup(
        Inputs(names=("item", "seen"), values=as_ids([1, 2, 3]), offsets=offsets(0, 1, 3), batch_size=1)
    )
    update(worker, looked, np.array([[-1, -1, np.nan, 0]], np.float32))
    assert worker.tables["item"].read(as_ids([1, 2, 3])).values.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert worker.tables["item"].stats()["skipped"] == 2


# -- tickets -----------------------------------------------------------------------------------------------------------


def test_tickets_are_used_once_and_by_their_owner() -> None:
    worker, other = local_worker(FEATURES), local_worker(FEATURES)
    looked = [worker.lookup(GOOD) for _ in range(3)]
    first, second, third = [each.ticket for each in looked if each.ticket]
    assert worker.lookup(GOOD, train=False).ticket is None
    gradients: dict[str, Any] = {"block_gradients": [BLOCK], "sequence_gradients": [{"path": PATH}]}
    with pytest.raises(TicketError, match="another store"):
        other.update([first], **gradients)
    with pytest.raises(TicketError, match="another store"):
        other.drop(first)
    with pytest.raises(TicketError, match="used already"):
        worker.update([first, second, first], [BLOCK] * 3)
    worker.drop(third)
    with pytest.raises(TicketError, match="used already"):
        worker.drop(third)
    with pytest.raises(TicketError, match="used already"):
        worker.update([third], [BLOCK])
    with pytest.raises(InputError, match="ticket is a int"):
        worker.drop(3)  # type: ignore[arg-type]
    worker.update([first, second], [BLOCK, BLOCK])
    with pytest.raises(TicketError, match="used already"):
        worker.update([second], **gradients)
    store: Any = worker.tables["item"]
    flat = store.lookup_for_update(as_ids([1]))[1]
    with pytest.raises(TicketError, match="another store"):
        worker.update([flat], [BLOCK])


def test_a_ticket_of_bags_is_not_for_a_flat_update() -> None:
    worker: Any = local_worker(Features({"item": ITEM}))
    looked = worker.lookup(Inputs(names=("item",), values=as_ids([1]), batch_size=1))
    assert isinstance(looked.ticket, Ticket)
    with pytest.raises(TicketError, match="this ticket came from a lookup of bags"):
        worker.tables["item"].update(looked.ticket, looked.block)
    with pytest.raises(TicketError, match="this ticket came from a lookup of bags"):
        worker.tables.update(looked.ticket, looked.block.reshape(-1))
    worker.update([looked.ticket], [looked.block])


def test_learning_rates_and_scale() -> None:
    one, two = (Table(name, dim=1, optimizer=SGD(lr=0.5), initial=Constant(0.0)) for name in ("one", "two"))
    worker: Any = local_worker(Features({"a": one, "b": two}))
    worker.tables["two"].set_lr(2.0)
    for lrs, wanted in ((None, [-0.5, -2.0]), ({"one": 1.0}, [-1.0, -2.0]), ({"two": 0.0, "one": 3.0}, [-3.0, 0.0])):
        before = worker.lookup(Inputs(names=("a", "b"), values=as_ids([1, 1]), batch_size=1))
        update(worker, before, np.full((1, 2), 4, np.float32), lrs=lrs, scale=0.25)
        after = worker.lookup(Inputs(names=("a", "b"), values=as_ids([1, 1]), batch_size=1), train=False)
        assert (after.block - before.block).tolist() == [wanted]
    assert worker.tables["two"].lr == 2.0


# -- shapes and memory -------------------------------------------------------------------------------------------------


def test_memory_of_the_caller_and_memory_of_the_engine() -> None:
    table = Table("t", dim=16)
    worker: Any = local_worker(Features({"a": table, "b": table.bag("mean")}))
    inputs = Inputs(names=("a", "b"), values=as_ids(range(60_000)), batch_size=30_000)
    own = worker.lookup(inputs).block
    assert own.ctypes.data % 64 == 0
    at = own.ctypes.data
    del own
    assert worker.lookup(inputs).block.ctypes.data == at, "its memory is reused"
    for start in (0, 1, 8):
        mine = np.full(30_000 * 32 + start, np.nan, np.float32)[start:].reshape(30_000, 32)
        looked = worker.lookup(inputs, block=mine, train=False)
        assert looked.block is mine
        np.testing.assert_array_equal(mine, worker.lookup(inputs, train=False).block)
    tensor = torch.empty(30_000, 32)
    worker.lookup(inputs, block=tensor, train=False)
    np.testing.assert_array_equal(tensor.numpy(), mine)


def test_gradients_may_be_tensors_and_strided() -> None:
    worker, other = local_worker(FEATURES), local_worker(FEATURES)
    block: Any = torch.arange(14.0).reshape(7, 2).T
    path: Any = torch.arange(8.0).reshape(2, 2, 2)
    update(worker, worker.lookup(GOOD), block, {"path": path})
    update(other, other.lookup(GOOD), block.numpy().copy(), {"path": path.numpy()})
    assert worker_contents(worker, as_ids(range(12)), left_out=()) == worker_contents(
        other, as_ids(range(12)), left_out=()
    )


# -- threads and cost --------------------------------------------------------------------------------------------------


def test_lookups_and_updates_at_the_same_time(rng: np.random.Generator) -> None:
    """One thread looks up, two update and one only reads: every gradient is applied once, by any thread. Rows count the
    updates of their elements."""
    table = Table("t", dim=8, optimizer=SGD(lr=1.0), initial=Constant(0.0))
    worker: Any = local_worker(Features({"a": table, "b": table.bag("sum"), "c": table.sequence(2)}), num_threads=2)
    waiting: Queue[list[LookupResult]] = Queue()
    done = threading.Event()

    def draw() -> Inputs:
        lengths = np.stack([np.ones(300, np.int64), rng.integers(0, 4, 300), rng.integers(0, 3, 300)])
        ends = np.concatenate([[0], np.cumsum(lengths.reshape(-1))]).astype(np.int64)
        values = rng.integers(400, size=ends[-1]).astype(np.uint64)
        return Inputs(names=("a", "b", "c"), values=values, offsets=ends, batch_size=300)

    def look_up() -> int:
        num_gradients = 0
        try:
            for i in range(40):
                looked = [worker.lookup(draw()) for _ in range(1 + i % 2)]
                assert all(np.array_equal(each.block, np.floor(each.block)) for each in looked)
                num_gradients += sum(each.ticket.n for each in looked if isinstance(each.ticket, Ticket))
                waiting.put(looked)
        finally:
            done.set()
            waiting.put([])
            waiting.put([])
        return num_gradients

    def bring_back() -> None:
        while looked := waiting.get(timeout=DEADLINE_SECONDS):
            worker.update(
                [each.ticket for each in looked if each.ticket],
                [-np.ones_like(each.block) for each in looked],
                [{"c": -np.ones_like(each.sequences["c"])} for each in looked],
            )

    def peek() -> None:
        inputs = Inputs(names=("a", "b", "c"), values=as_ids(range(30)), batch_size=10)
        while not done.is_set():
            rows = worker.lookup(inputs, train=False).block.reshape(10, 2, 8)
            assert np.array_equal(rows, np.repeat(rows[:, :, :1], 8, axis=2)), "a row was seen half-written"

    pool = ThreadPoolExecutor(4)
    try:
        threads = [pool.submit(each) for each in (look_up, bring_back, bring_back, peek)]
        num_gradients, *_ = [each.result(DEADLINE_SECONDS) for each in threads]
    finally:
        pool.shutdown(wait=False)
    total = worker.tables["t"].read(np.arange(400, dtype=np.uint64)).values
    np.testing.assert_array_equal(total, np.repeat(total[:, :1], 8, axis=1))
    assert total[:, 0].sum() == num_gradients


def calls_of(work: Callable[[], Any]) -> int:
    """Return how many functions Python calls meanwhile, its own and native ones."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # garbage of other tests must not be counted
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_python_work_does_not_grow_with_features() -> None:
    def cost(num_features: int, with_offsets: bool) -> int:
        tables = [Table(f"t{i}", dim=4, optimizer=Adagrad(), num_buckets=1) for i in range(num_features // 2)]
        features = Features({f"f{i}": tables[i // 2].bag("mean") for i in range(num_features)})
        worker = local_worker(features, num_threads=1)
        inputs = Inputs(
            names=features.names,
            values=np.arange(8 * num_features, dtype=np.uint64),
            offsets=np.arange(8 * num_features + 1) if with_offsets else None,
            batch_size=8,
        )
        gradients = np.ones((8, features.total_dim), np.float32)

        def step() -> None:
            update(worker, worker.lookup(inputs), gradients)

        step()
        return calls_of(step)

    for with_offsets in (True, False):
        assert cost(4, with_offsets) == cost(400, with_offsets) < 150
