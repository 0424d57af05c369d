"""Bad input for every parameter of every public call of `Store`: the error says what was found and expected, the table
stays.

Each case names the call, what it is given, and words that the message must hold. After each the store is compared
with what it was before: rows, state, counters, steps, invariants.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from oracle import as_ids
from satrap.config.optimizers import SGD, Adam, Ftrl
from satrap.config.tables import Constant, MinCount, Normal, Table, Uniform
from satrap.errors import (
    ConfigError,
    InputError,
    NonFiniteError,
    SatrapError,
    TicketError,
)
from satrap.table.store import Store
from satrap.table.table_group import TableGroup

IDS = as_ids([1, 2, 3])
GOOD = np.ones((3, 4), np.float32)
TABLE = Table("item", dim=4, optimizer=Adam(), capacity=64, admission=MinCount(2), num_buckets=2)


def visible(store: Store) -> Any:
    """Returns everything observable of a store."""
    read = [part.tolist() for part in store.read(as_ids(range(100)))]
    return store.stats(), store.latest_step, store.lr, store.version, len(store), read


@pytest.fixture
def store() -> Iterator[Store]:
    """A used table, which no test here may change."""
    store = Store(TABLE, seed=3, num_threads=2)
    rng = np.random.default_rng(0)
    for step in range(1, 12):
        ids = rng.integers(90, size=30).astype(np.uint64)
        store.lookup(ids, step=step)
        store.update(ids, rng.normal(size=(30, 4)).astype(np.float32), step=step)
    before = visible(store)
    yield store
    store.check()
    assert visible(store) == before, "a refused call changed the table"


@contextmanager
def refused(error: type[SatrapError], *words: str) -> Iterator[None]:
    """Checks that the block raises the error, with all of these words."""
    with pytest.raises(error) as raised:
        yield
    for word in words:
        assert word in str(raised.value)


def sparse() -> Any:
    """A tensor without memory that could be read as an array; torch warns of its invariants unless they are checked."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        return torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1]), (3,))


class Unreadable:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ValueError("not today")


BAD_IDS: list[tuple[Any, list[str]]] = [
    ([1, 2, 3.0], ["ids[2] is 3.0 (float)", "an integer from -2**63 to 2**64 - 1"]),
    ((1, True), ["ids[1] is True (bool)", "an integer"]),
    (7, ["an int", "uint64"]),
    (None, ["a NoneType", "uint64"]),
    ("item", ["a str", "uint64"]),
    ({1, 2}, ["a set", "uint64"]),
    (Unreadable(), ["an Unreadable", "not today"]),
    *(
        (np.array([1, 2, 3], dtype), [np.dtype(dtype).name, "uint64", "ids.astype(numpy.uint64)"])
        for dtype in ("i4", "u4", "i2", "u1", "?")
    ),
    *(
        (np.array([1, 2, 3], dtype), [f"{np.dtype(dtype).name} cannot hold all ids: read them as integers"])
        for dtype in ("f2", "f4", "f8", "c16")
    ),
    (np.array([1, 2, 3], ">u8"), [">u8", "uint64"]),
    (np.array([1, 2, 3], dtype=object), ["object", "uint64"]),
    (np.array(["1", "2"]), ["uint64"]),
    (np.array([1, 2], "datetime64[s]"), ["datetime64", "uint64"]),
    (np.array(3, np.uint64), ["()", "one dimension"]),
    (np.array([[1, 2, 3]], np.uint64), ["(1, 3)", "one dimension"]),
    (np.zeros((0, 2), np.uint64), ["(0, 2)", "one dimension"]),
    (np.ma.masked_array(IDS, mask=[False, True, False]), ["mask"]),
    (torch.tensor([1.0]), ["float32 cannot hold all ids"]),
    (torch.tensor([1], dtype=torch.int32), ["int32", "uint64", "ids.to(torch.int64)"]),
    (sparse(), ["a Tensor"]),
]


@pytest.mark.parametrize(("ids", "words"), BAD_IDS)
@pytest.mark.parametrize("call", ["lookup", "evaluate", "update", "read"])
def test_ids(store: Store, call: str, ids: Any, words: list[str]) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "lookup": lambda: store.lookup(ids),
        "evaluate": lambda: store.lookup(ids, train=False),
        "update": lambda: store.update(ids, GOOD),
        "read": lambda: store.read(ids),
    }
    with refused(InputError, "table 'item'", "ids", *words):
        calls[call]()


BAD_GRADIENTS: list[tuple[Any, list[str]]] = [
    (GOOD.tolist(), ["a list", "float32", "numpy.asarray(gradients, dtype=numpy.float32)"]),
    (None, ["is None", "float32", "requires_grad_()", "backward()"]),
    (1.0, ["float", "float32"]),
    *(
        (GOOD.astype(dtype), [np.dtype(dtype).name, "gradients.astype(numpy.float32)"])
        for dtype in ("f8", "f2", "i4", "u8", "?", "c8")
    ),
    (GOOD.astype(">f4"), [">f4", "float32"]),
    (GOOD[:2], ["(2, 4)", "(3, 4)"]),
    (GOOD[:, :3], ["(3, 3)", "(3, 4)"]),
    (GOOD.reshape(-1), ["(12,)", "(3, 4)"]),
    (GOOD[None], ["(1, 3, 4)", "(3, 4)"]),
    (np.zeros((0, 4), np.float32), ["(0, 4)", "(3, 4)"]),
    (np.zeros((4, 3), np.float32), ["(4, 3)", "(3, 4)"]),
    (np.broadcast_to(np.float32(1), (1 << 40, 4)), [str(1 << 40), "(3, 4)"]),
    (torch.ones(3, 4, requires_grad=True), ["grad", "detach"]),
    (torch.ones(3, 4, dtype=torch.bfloat16), ["float32", ".float()"]),
    (torch.ones(3, 4, dtype=torch.float16), ["float16", "gradients.float()"]),
    (torch.ones(3, 4, dtype=torch.float64), ["float64", "gradients.float()"]),
    (sparse(), ["Tensor"]),
    (torch.ones(3, 4, device="meta"), ["Tensor"]),
    (np.ma.masked_array(GOOD, mask=GOOD > 0), ["mask"]),
]


@pytest.mark.parametrize(("gradients", "words"), BAD_GRADIENTS)
def test_gradients(store: Store, gradients: Any, words: list[str]) -> None:
    with refused(InputError, "table 'item'", "gradients", *words):
        store.update(IDS, gradients)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("element", [0, 3])
def test_non_finite_gradients(store: Store, value: float, position: int, element: int) -> None:
    gradients = GOOD.copy()
    gradients[position, element] = value
    id_ = [10, 2**64 - 1, 3][position]
    with refused(NonFiniteError, "table 'item'", f"id {id_} ", f"position {position}", "on_nonfinite"):
        store.update(as_ids([10, 2**64 - 1, 3]), gradients)


def test_the_first_of_several_non_finite_gradients_is_named(store: Store, rng: np.random.Generator) -> None:
    """In a batch large enough for every thread, and for the tail of every vector."""
    for num in (1, 7, 16, 33, 5000):
        ids = rng.integers(50, size=num).astype(np.uint64)
        gradients = np.ones((num, 4), np.float32)
        bad = np.unique(rng.integers(num, size=5))
        gradients[bad, rng.integers(4, size=len(bad))] = np.nan
        with pytest.raises(NonFiniteError, match=rf"id {ids[bad[0]]} .*position {bad[0]}\b"):
            store.update(ids, gradients)


def test_finite_gradients_whose_sum_is_not(open_store: Callable[..., Store]) -> None:
    """Each is finite, but summed for their id they overflow: such a row must not become infinite in silence."""
    store = open_store(Table("t", dim=4, optimizer=SGD(lr=1.0), initial=Constant(0.0)))
    store.lookup(IDS)
    ids, huge = as_ids([1, 2, 2]), np.full((3, 4), 3e38, np.float32)
    with pytest.raises(NonFiniteError, match="id 2 "):
        store.update(ids, huge)
    assert np.all(store.read(IDS).values == 0)
    skipping = open_store(Table("t", dim=4, optimizer=SGD(lr=1.0), initial=Constant(0.0), on_nonfinite="skip"))
    skipping.lookup(IDS)
    skipping.update(ids, huge)
    np.testing.assert_array_equal(skipping.read(IDS).values[:, 0], [np.float32(-3e38), 0, 0])
    stats = skipping.stats()
    assert (stats["updated"], stats["skipped"], stats["not_applied_absent"]) == (1, 2, 0)


@pytest.mark.parametrize(
    "step", [0, -1, -(2**63), 2**32 - 1, 2**32, 2**64, 1.0, 1.5, "1", None, True, np.nan, Fraction(1)]
)
@pytest.mark.parametrize("call", ["lookup", "update", "oldest_open"])
def test_steps(store: Store, call: str, step: Any) -> None:
    if step is None:
        step = [1]
    calls: dict[str, Callable[[], Any]] = {
        "lookup": lambda: store.lookup(IDS, step=step),
        "update": lambda: store.update(IDS, GOOD, step=step),
        "oldest_open": lambda: store.lookup(IDS, oldest_open=step),
    }
    with refused(InputError, "table 'item'", "oldest_open" if call == "oldest_open" else "step", "expected", "1"):
        calls[call]()


def test_oldest_open_after_the_step(store: Store) -> None:
    with pytest.raises(InputError, match="oldest_open"):
        store.lookup(IDS, step=20, oldest_open=21)
    with pytest.raises(InputError, match="oldest_open"):
        store.lookup(IDS, oldest_open=13)  # the store's own next step is 12


def test_integers_of_numpy_are_integers(open_store: Callable[..., Store]) -> None:
    store = open_store(TABLE)
    given: dict[str, Any] = {"step": np.int32(5), "oldest_open": np.uint8(5)}
    store.lookup(IDS, **given)
    given = {"step": np.uint64(6), "lr": np.float32(0.5)}
    store.update(IDS, GOOD, **given)
    assert store.latest_step == 6


BAD_OUT: list[tuple[Any, list[str]]] = [
    (np.zeros((2, 4), np.float32), ["(2, 4)", "(3, 4)"]),
    (np.zeros((3, 5), np.float32), ["(3, 5)", "(3, 4)"]),
    (np.zeros(12, np.float32), ["(12,)", "(3, 4)"]),
    (np.zeros((3, 4), np.float64), ["float64", "float32"]),
    (np.zeros((3, 4), ">f4"), [">f4", "float32"]),
    (np.zeros((4, 3), np.float32).T, ["contiguous"]),
    (np.zeros((3, 8), np.float32)[:, ::2], ["contiguous"]),
    (np.zeros((3, 4), np.float32)[::-1], ["contiguous"]),
    (np.zeros(49, np.uint8)[1:].view(np.float32).reshape(3, 4), ["aligned"]),
    (np.frombuffer(bytes(48), np.float32).reshape(3, 4), ["read-only"]),
    ([[0.0] * 4] * 3, ["a list", "float32"]),
    (torch.zeros(3, 4, requires_grad=True), ["out"]),
    (3, ["an int", "float32"]),
]


@pytest.mark.parametrize(("out", "words"), BAD_OUT)
@pytest.mark.parametrize("train", [True, False])
def test_out(store: Store, out: Any, words: list[str], train: bool) -> None:
    with pytest.raises(InputError) as raised:
        store.lookup(IDS, out=out, train=train)
    for word in ["table 'item'", "out", *words]:
        assert word in str(raised.value)
    assert "asarray" not in str(raised.value), "what is written into a copy is lost"


@pytest.mark.parametrize("lr", [np.nan, np.inf, -np.inf, -0.1, -1, 1e39, "0.1", True, [0.1], 1j, None])
@pytest.mark.parametrize("call", ["update", "set_lr"])
def test_lr(store: Store, call: str, lr: Any) -> None:
    """1e39 is a number, but not in float32, in which rows are computed."""
    if call == "update" and lr is None:
        return
    with refused(InputError, "table 'item'", "lr", "expected"):
        store.set_lr(lr) if call == "set_lr" else store.update(IDS, GOOD, lr=lr)


def test_ftrl_divides_by_lr() -> None:
    store = Store(Table("item", dim=4, optimizer=Ftrl()), num_threads=1)
    store.lookup(IDS)
    for lr in (0.0, 1e-39, 1e-320):
        words = ("above 0",) if lr == 0.0 else (f"lr is {lr}", "at least 1.18e-38")
        with refused(InputError, "lr", *words):
            store.set_lr(lr)
        with refused(InputError, "lr", *words):
            store.update(IDS, GOOD, lr=lr)
    assert store.stats()["updated"] == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Ftrl(lr=1e-40), "lr is 1e-40"),
        (lambda: Ftrl(lr=1e-3, beta=3e38), "beta / lr"),
        (lambda: Table("item", dim=2, initial=Uniform(low=-3.4e38, high=3.4e38)), "high - low"),
        (lambda: Table("item", dim=2, initial=Normal(std=3.4e38)), "holds at most"),
        (lambda: Table("item", dim=2, dtype="float16", initial=Normal(std=1e6)), "holds at most 65504"),
    ],
)
def test_numbers_that_float32_cannot_work_with(make: Callable[[], Any], words: str) -> None:
    with refused(ConfigError, words):
        make()


@pytest.mark.parametrize("flag", [1, 0, None, "yes", np.True_])
def test_a_flag(store: Store, flag: Any) -> None:
    with pytest.raises(InputError, match=r"train is .*True or False"):
        store.lookup(IDS, train=flag)


def test_a_ticket_without_training(store: Store) -> None:
    with pytest.raises(InputError, match=r"ticket.*train"):
        store._engine.lookup(IDS, np.array([0, 3]), 0, 0, False, np.zeros((3, 4), np.float32), True)


@pytest.mark.parametrize("name", ["step", "oldest_open"])
@pytest.mark.parametrize("value", [0, 5, "5"])
def test_a_step_without_training(store: Store, name: str, value: Any) -> None:
    """A `step` without training would have no effect."""
    with pytest.raises(InputError, match=rf"table 'item': {name} is {value!r} and train=False; .*leave {name} out"):
        store.lookup(IDS, train=False, **{name: value})


def test_a_ticket_is_used_once(open_store: Callable[..., Store]) -> None:
    store = open_store(Table("item", dim=4, optimizer=SGD(lr=1.0), initial=Constant(0.0)))
    _, ticket = store.lookup_for_update(IDS)
    assert (ticket.n, ticket.used) == (3, False)
    with pytest.raises(InputError, match=r"\(2, 4\)"):
        store.update(ticket, GOOD[:2])
    with pytest.raises(NonFiniteError):
        store.update(ticket, GOOD * np.float32(np.nan))
    assert not ticket.used, "a refused update leaves the ticket good"
    store.update(ticket, GOOD)
    assert ticket.used
    with pytest.raises(TicketError, match=r"table 'item'.*used"):
        store.update(ticket, GOOD)
    assert np.all(store.read(IDS).values == -1)


def test_a_ticket_of_another_store(store: Store) -> None:
    """It outlives its store, because it owns its memory."""
    other = Store(TABLE, num_threads=2)
    first, second = (other.lookup_for_update(IDS)[1] for _ in range(2))
    for ticket in (first, second):
        with pytest.raises(TicketError, match=r"table 'item': .*another store"):
            store.update(ticket, GOOD)
    other.update(first, GOOD)
    del other
    with pytest.raises(TicketError, match="another store"):
        store.update(second, GOOD)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"seed": seed}, ["seed", "integer"]) for seed in (-1, 2**64, 1.0, "0", None, True)),
        *(({"num_threads": threads}, ["num_threads", "integer"]) for threads in (0, -1, 1025, 2**40, 1.5, "2", True)),
        *(({"simd": simd}, ["simd", "portable"]) for simd in ("sse2", "", None, 3, "AVX2")),
        *(({"shared": path}, ["shared", "path"]) for path in (3, "", 1.5, ["x"], "a\0b", "\udcff")),
    ],
)
def test_options_of_a_store(options: dict[str, Any], words: list[str]) -> None:
    with refused(ConfigError, *words):
        Store(TABLE, **options)


@pytest.mark.parametrize("table", [None, "item", {"name": "item", "dim": 4}, Table, [TABLE]])
def test_a_store_needs_a_table(table: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a satrap\.Table"):
        Store(table)


def test_positional_and_unknown_arguments(store: Store) -> None:
    with pytest.raises(TypeError):
        Store(TABLE, 0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        store.lookup(IDS, True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        store.update(IDS, GOOD, learning_rate=0.1)  # type: ignore[call-arg]


def test_more_memory_than_there_is() -> None:
    """A huge lookup is refused or runs out of memory as an exception, never as a crash."""
    store = Store(Table("item", dim=65536), num_threads=1)
    ids = np.lib.stride_tricks.as_strided(IDS, (1 << 38,), (0,))
    with pytest.raises((SatrapError, MemoryError)):
        store.lookup(ids, train=False)
    assert len(store) == 0
    store.check()


@pytest.mark.parametrize("path", [None, 3, ["x"], "", b"x", "a\0b", "\udcff"])
def test_paths(store: Store, path: Any) -> None:
    for call in (store.save, Store.load, store.apply_changes, lambda p: store.save_changes(p, since=1)):
        with pytest.raises(InputError, match=r"path is .*expected the path of a snapshot's folder"):
            call(path)


@pytest.mark.parametrize("path", [None, 3, ["x"], "", "a\0b"])
def test_paths_of_shared_memory(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"path is .*expected the path of a shared-memory file, of Unicode .*NUL"):
        Store.attach(path)


def test_a_store_is_not_copied(store: Store) -> None:
    tables = TableGroup([TABLE], num_threads=1)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"table 'item': .*save it and Store\.load it"):
            call(store)
        with pytest.raises(TypeError, match=r"tables 'item': .*save each and restore them"):
            call(tables)


# -- and what is not bad -----------------------------------------------------------------------------------------------


def test_what_is_copied_or_taken_as_it_is(open_store: Callable[..., Store], rng: np.random.Generator) -> None:
    """Documented: int64 as bits; non-contiguous, reversed, unaligned, read-only and torch arrays on the CPU."""
    dense = rng.integers(2**64, size=20, dtype=np.uint64)
    gradients = rng.normal(size=(20, 4)).astype(np.float32)
    raw = np.zeros(20 * 8 + 1, np.uint8)
    unaligned = raw[1:].view(np.uint64)
    unaligned[:] = dense
    spread, reverse = np.repeat(dense, 2)[::2], dense[::-1].copy()[::-1]
    frozen = dense.copy()
    frozen.flags.writeable = False
    wanted = None
    for ids in (
        dense,
        dense.view(np.int64),
        spread,
        reverse,
        unaligned,
        frozen,
        torch.from_numpy(dense.view(np.int64)),
    ):
        for given in (
            gradients,
            np.asfortranarray(gradients),
            torch.from_numpy(gradients),
            gradients[::-1].copy()[::-1],
        ):
            store = open_store(Table("item", dim=4, optimizer=SGD(lr=1.0)))
            store.lookup(ids)
            store.update(ids, given)
            found = store.read(ids).values
            wanted = found if wanted is None else wanted
            np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(dense, frozen, "the caller's ids were written to")


def test_out_of_torch(open_store: Callable[..., Store]) -> None:
    store = open_store(Table("item", dim=4, initial=Constant(2.0)))
    out: Any = torch.zeros(3, 4)
    result = store.lookup(IDS, out=out)
    assert result is out
    assert bool((out == 2.0).all())


def test_skipping_counts_positions(open_store: Callable[..., Store]) -> None:
    store = open_store(Table("t", dim=2, optimizer=SGD(lr=1.0), initial=Constant(0.0), on_nonfinite="skip"))
    ids = as_ids([1, 2, 1, 3, 9])
    store.lookup(ids[:4])
    nan, inf = np.nan, np.inf
    store.update(ids, np.array([[1, 1], [nan, 1], [5, 5], [1, -inf], [nan, nan]], np.float32))
    assert store.read(as_ids([1, 2, 3])).values.tolist() == [[-6, -6], [0, 0], [0, 0]]
    stats = store.stats()
    assert (stats["updated"], stats["skipped"], stats["not_applied_absent"]) == (1, 3, 0)
    store.update(ids[:3], np.array([[inf, 1], [1, 1], [2, 2]], np.float32))
    assert store.read(as_ids([1, 2])).values.tolist() == [[-8, -8], [-1, -1]]
    assert store.stats()["skipped"] == 4
