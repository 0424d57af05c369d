"""The calls of a split: what it refuses and how, that a refused call changes nothing, tickets, memory, threads, forks.

Its results are the subject of worker/test_split.py.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from forks import expect_refusal, in_fork
from satrap import _core
from satrap.config.tables import Table
from satrap.data.inputs import Inputs
from satrap.errors import InputError, NonFiniteError, TicketError
from satrap.table.engine import native_config
from satrap.worker.local_rows import local_worker
from satrap.worker.rows import id_features, native_features
from splits import (
    BIG_FEATURES,
    BLOCK,
    F32,
    FEATURES,
    GOOD,
    PATH,
    SEED,
    WHERE,
    Given,
    big_inputs,
    draw_owners,
    floats_for,
    make_split,
    rows_for,
)
from waiting import DEADLINE_SECONDS


def test_unchanged_owners_and_whole_gradients_need_no_ids() -> None:
    split = make_split(FEATURES)
    whole: list[Given] = [(BLOCK, [PATH])]
    assert split.sums([split.lookup(**GOOD)], whole, 1.0, **WHERE).same_ids
    assert not split.sums([split.lookup(**GOOD)], [(BLOCK, [None])], 1.0, **WHERE).same_ids
    assert not split.sums([split.lookup(**GOOD)], [(None, [PATH])], 1.0, **WHERE).same_ids
    assert not split.sums([split.lookup(**GOOD), split.lookup(**GOOD)], whole * 2, 1.0, **WHERE).same_ids
    for changed in ({"owners": GOOD["owners"][::-1].copy()}, {"num_servers": 4}):
        ticket = split.lookup(**GOOD)
        sums = split.sums([ticket], whole, 1.0, **WHERE | changed)
        assert not sums.same_ids and sums.num_servers == changed.get("num_servers", 3)
        parts = [sums.ids(s) for s in range(sums.num_servers)]
        assert sorted(np.concatenate(parts)) == sorted(np.concatenate([ticket.ids(s) for s in range(3)]))


def test_no_gradient_at_all() -> None:
    split = make_split(FEATURES)
    sums = split.sums([split.lookup(**GOOD)], [(None, [None])], 1.0, **WHERE)
    assert [len(sums.ids(s)) for s in range(3)] == [0, 0, 0] and sums.skipped == [0, 0]
    assert sums.offsets(1).tolist() == [0, 0, 0] and sums.num_floats(1) == len(sums.gradients(1)) == 0


def test_sums_of_a_whole_batch_are_ordered_ahead() -> None:
    """They consist of the gradients of the update's runs, and are in the lines of their ids."""
    split, groups = make_split(BIG_FEATURES), np.zeros(len(BIG_FEATURES.tables), np.uint32)
    inputs = big_inputs(np.random.default_rng(SEED))
    owners: dict[str, Any] = {"owners": draw_owners(np.random.default_rng(SEED), BIG_FEATURES, 3), "num_servers": 3}
    given = inputs.values, inputs.offsets, inputs.weights, inputs.batch_size
    ticket = split.lookup(*given, **owners, with_indexes=True)
    ordered, lines = split.order(ticket, groups), split.lines(ticket, groups)["lines"]
    assert not ticket.used and set(lines.tolist()) == set(ordered["frames"].tolist())
    sequences = [True for feature in BIG_FEATURES.values() if feature.pooling == "none"]
    _, runs = split.runs([ticket], [(True, sequences)], **owners, groups=groups)
    for name, array in runs.items():
        np.testing.assert_array_equal(ordered[name], array, err_msg=name)
    with pytest.raises(TicketError, match="used already"):
        split.order(ticket, groups)


# -- what is refused ---------------------------------------------------------------------------------------------------

BAD_LOOKUPS: list[tuple[dict[str, Any], str]] = [
    ({"owners": GOOD["owners"][1:]}, "owners holds 5 elements, expected 6"),
    ({"num_servers": 2}, "bucket 4 is owned by server 2 of 2"),
    ({"num_servers": 0}, r"num_servers=0, expected 1\.\.65535"),
    ({"num_servers": 65536}, r"num_servers=65536, expected 1\.\.65535"),
    ({"batch_size": 3}, "offsets holds 9 elements, expected 13"),
    ({"weights": None}, "feature 'seen' is weighted and there are no weights"),
    ({"weights": np.full(9, np.nan, np.float32)}, "the weight of id 3 in sample 0 of feature 'seen' is nan"),
    ({"values": GOOD["values"][1:]}, "offsets run from 0 to 9; expected 0 to the number of ids, 8"),
    ({"offsets": np.array([0, 1, 2, 4, 3, 7, 7, 8, 9])}, "offsets fall from 4 to 3 at sample 1 of feature 'seen'"),
    ({"offsets": None}, "9 ids without offsets; expected 8, one for each"),
]


@pytest.mark.parametrize(("options", "words"), BAD_LOOKUPS)
def test_bad_lookups(options: dict[str, Any], words: str) -> None:
    split = make_split(FEATURES)
    with pytest.raises(InputError, match=words):
        split.lookup(**GOOD | options)
    assert split.truncated == [0]


def test_bad_descriptions() -> None:
    plain: Any = [("a", 0, "sum", False, 0, False, None, False)]
    table = [native_config(Table("t", dim=4))]
    for tables, features, words in (
        ([], plain, "no table was given"),
        (table, [], "no feature was given"),
        (table, [("a", 1, "sum", False, 0, False, None, False)], "feature 'a': table 1 of 1"),
    ):
        with pytest.raises(InputError, match=words):
            _core.Split(tables, features, 1)
    with pytest.raises(InputError, match="num_threads=0"):
        _core.Split(table, plain, 0)
    with pytest.raises(InputError, match="simd='mmx' is not available"):
        _core.Split(table, plain, 1, "mmx")


def test_bad_rows_leave_the_ticket_unchanged() -> None:
    split, other = make_split(FEATURES), make_split(FEATURES)
    ticket = split.lookup(**GOOD)
    rows = rows_for(ticket)
    block, sequences = floats_for()
    bad: list[tuple[Any, Any, Any, str]] = [
        (rows[:2], block, sequences, "rows holds 2 elements, expected 3"),
        ([rows[0], rows[1][1:], rows[2]], block, sequences, "the rows of server 1 holds .* elements, expected"),
        (rows, block[:1], sequences, "block holds 7 elements, expected 14"),
        (rows, block, [], "sequences holds 0 elements, expected 1"),
        (rows, block, [sequences[0][:1]], "a sequence holds 4 elements, expected 8"),
    ]
    for *arguments, words in bad:
        with pytest.raises(InputError, match=words):
            split.fill(ticket, *arguments)
    with pytest.raises(TicketError, match="another store"):
        other.fill(ticket, rows, block, sequences)
    assert not block.any() and not ticket.used
    for wrong in (3, 2**40):
        with pytest.raises(InputError, match=f"server {wrong} of 3"):
            ticket.ids(wrong)
    split.fill(ticket, [np.frombuffer(each.tobytes(), np.float32) for each in rows], block, sequences)  # read-only
    assert block[0].all() and not ticket.used
    with pytest.raises(TicketError, match="already filled"):
        split.fill(ticket, rows, block, sequences)
    split.sums([ticket], [(BLOCK, [PATH])], 1.0, **WHERE)


def test_an_update_may_have_tickets_of_other_features_of_the_tables() -> None:
    split, other = make_split(FEATURES), make_split(FEATURES)
    bags = split.bags(native_features(id_features(FEATURES), FEATURES.tables))
    given: tuple[Any, ...] = np.array([1, 1, 9], np.uint64), np.array([0, 2, 3]), None, 1
    with_bags: dict[str, Any] = {**WHERE, "bags": bags}
    first, second = split.lookup(**GOOD), split.lookup(*given, **with_bags)
    ones = [np.ones((2, FEATURES.tables[0].dim), np.float32), np.ones((1, FEATURES.tables[1].dim), np.float32)]
    sums = split.sums([first, second], [(None, [PATH]), (None, ones)], 1.0, **WHERE)
    summed = {
        (table, int(number))
        for server in range(3)
        for table in range(2)
        for number in sums.ids(server)[sums.offsets(server)[table] : sums.offsets(server)[table + 1]]
    }
    assert {(0, 1), (1, 9)} <= summed and first.used and second.used
    total = sum(float(sums.gradients(server).sum()) for server in range(3))
    assert total == 2 * FEATURES.tables[0].dim + sum(each.sum() for each in ones)  # two ids of the path are kept
    with pytest.raises(InputError, match="these bags describe the tables of another split"):
        other.lookup(*given, **with_bags)


def test_tickets_are_used_once_and_by_their_owner() -> None:
    split, other = make_split(FEATURES), make_split(FEATURES)
    first, second, third = (split.lookup(**GOOD) for _ in range(3))
    whole: list[Given] = [(BLOCK, [PATH])]
    with pytest.raises(TicketError, match="another store"):
        other.sums([first], whole, 1.0, **WHERE)
    with pytest.raises(TicketError, match="another store"):
        other.drop(first)
    with pytest.raises(TicketError, match="used already"):
        split.sums([first, second, first], whole * 3, 1.0, **WHERE)
    split.drop(third)
    for call in (
        lambda: split.drop(third),
        lambda: split.sums([second, third], whole * 2, 1.0, **WHERE),
        lambda: split.fill(third, rows_for(third), *floats_for()),
    ):
        with pytest.raises(TicketError, match="used already"):
            call()
    bad: list[tuple[Any, Any, Any, str]] = [
        ([], [], 1.0, "no ticket was given"),
        ([None], whole, 1.0, "a ticket is None"),
        ([first], [], 1.0, "gradients holds 0 elements, expected 1"),
        ([first], [(BLOCK[:1], [PATH])], 1.0, "block gradients holds 7 elements, expected 14"),
        ([first], [(BLOCK, [])], 1.0, "sequence gradients holds 0 elements, expected 1"),
        ([first], whole, 0.0, "scale=0.*, expected a number above 0"),
        ([first], whole, 1e-60, "expected a number above 0 that float32 can hold"),
    ]
    for tickets, gradients, scale, words in bad:
        with pytest.raises(InputError, match=words):
            split.sums(tickets, gradients, scale, **WHERE)
    assert (first.used, second.used, third.used) == (False, False, True)
    assert split.sums([first, second], whole * 2, 1.0, **WHERE).skipped == [0, 0]
    assert first.used and second.used


def test_nonfinite_gradients_have_the_error_of_a_worker() -> None:
    worker, split = local_worker(FEATURES, seed=SEED), make_split(FEATURES, num_threads=2)
    inputs = Inputs(names=FEATURES.names, **{k: GOOD[k] for k in ("values", "offsets", "weights", "batch_size")})
    theirs = [worker.lookup(inputs).ticket for _ in range(2)]
    tickets = [split.lookup(**GOOD) for _ in range(2)]
    cases = [((1, 0), np.nan, 1.0), ((0, 3), -np.inf, 1.0), ((1, 6), np.nan, 1.0), ((0, 0), 3e38, 2.0)]
    for which in (0, 1):
        for at, value, scale in cases:
            blocks = [BLOCK.copy(), BLOCK.copy()]
            blocks[which][at] = value
            with pytest.raises(NonFiniteError) as wanted:
                worker.update([each for each in theirs if each], blocks, [{"path": PATH}] * 2, scale=scale)
            with pytest.raises(NonFiniteError) as found:
                split.sums(tickets, [(block, [PATH]) for block in blocks], scale, **WHERE)
            assert str(found.value) == str(wanted.value) and f"(batch {which + 1} of 2)" in str(found.value)
    large: F32 = np.full_like(BLOCK, 3e38)  # each gradient is finite, the sum of two is not
    with pytest.raises(NonFiniteError) as wanted:
        worker.update([each for each in theirs if each], [large] * 2, [{"path": PATH}] * 2)
    with pytest.raises(NonFiniteError) as found:
        split.sums(tickets, [(large, [PATH])] * 2, 1.0, **WHERE)
    assert str(found.value) == str(wanted.value) and "sum to inf" in str(found.value)
    assert not any(ticket.used for ticket in tickets)
    split.sums(tickets, [(BLOCK, [PATH])] * 2, 1.0, **WHERE)


# -- memory, threads, forks --------------------------------------------------------------------------------------------


def test_arrays_live_as_long_as_they_are_referenced(rng: np.random.Generator) -> None:
    split = make_split(BIG_FEATURES, num_threads=2)
    where: Any = {"owners": draw_owners(rng, BIG_FEATURES, 2), "num_servers": 2}

    def look_up(split: _core.Split) -> tuple[_core.SplitTicket, Given]:
        inputs = big_inputs(rng, 40_000)
        ticket = split.lookup(inputs.values, inputs.offsets, inputs.weights, inputs.batch_size, **where)
        size = inputs.batch_size
        return ticket, (np.ones((size, BIG_FEATURES.total_dim), np.float32), [np.ones((size, 48), np.float32)])

    gc.disable()
    try:
        ticket, gradients = look_up(split)
        sums = split.sums([ticket], [gradients], 1.0, **where)
        views: list[NDArray[Any]] = [
            array for each in (ticket, sums) for s in range(2) for array in (each.ids(s), each.offsets(s))
        ]
        views += [sums.gradients(s) for s in range(2)]
        copies = [view.copy() for view in views]
        assert all(view.ctypes.data % 8 == 0 and not view.flags.writeable for view in views)
        assert all(sums.gradients(s).ctypes.data % 64 == 0 for s in range(2))
        del ticket, sums
        for _ in range(3):  # new arrays from the pool must not share their memory
            again, gradients = look_up(split)
            split.sums([again], [gradients], 1.0, **where)
        del split, again
        assert all(np.array_equal(view, copy) for view, copy in zip(views, copies, strict=True))
        references = [weakref.ref(view) for view in views]
        del views
        assert not any(reference() is not None for reference in references), "a cycle keeps an array"
    finally:
        gc.enable()


def in_threads(*works: Callable[[], object]) -> list[object]:
    """Run each in a thread, and return their results or errors."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> object:
        barrier.wait(DEADLINE_SECONDS)
        try:
            return work()
        except Exception as error:
            return error

    pool = ThreadPoolExecutor(len(works))
    try:
        return list(pool.map(run, works, timeout=DEADLINE_SECONDS))
    finally:
        pool.shutdown(wait=False)


def test_several_threads_of_one_split(seed: int) -> None:
    """Each call returns what it returns alone, whatever other threads call meanwhile."""
    split = make_split(BIG_FEATURES, num_threads=2)
    where: Any = {"owners": draw_owners(np.random.default_rng(seed), BIG_FEATURES, 3), "num_servers": 3}

    def work(which: int) -> list[bytes]:
        rng = np.random.default_rng([seed, which])
        seen = []
        for _ in range(8):
            inputs = big_inputs(rng, 700)
            ticket = split.lookup(inputs.values, inputs.offsets, inputs.weights, inputs.batch_size, **where)
            rows = [rng.normal(size=ticket.num_floats(s)).astype(np.float32) for s in range(3)]
            block, path = split.empty(700, BIG_FEATURES.total_dim), split.empty(700, 48)
            split.fill(ticket, rows, block, [path])
            sums = split.sums([ticket], [(block, [path])], 1.0, **where)
            seen += [block.tobytes(), path.tobytes()]
            seen += [array.tobytes() for s in range(3) for array in (sums.ids(s), sums.gradients(s))]
        return seen

    wanted = [work(which) for which in range(4)]
    for _ in range(3):
        assert in_threads(*[partial(work, which) for which in range(4)]) == wanted


def test_a_split_for_other_owners_is_the_same(rng: np.random.Generator) -> None:
    """Ids and sums are the same for any owners; a ticket continues as if its lookup had been for the new ones."""
    split = make_split(BIG_FEATURES, num_threads=2)
    inputs = big_inputs(rng, 500)
    given = inputs.values, inputs.offsets, inputs.weights, 500
    block = rng.normal(size=(500, BIG_FEATURES.total_dim)).astype(np.float32)
    path = rng.normal(size=(500, 48)).astype(np.float32)
    for num_servers in (1, 2, 5):
        first, then = draw_owners(rng, BIG_FEATURES, 3), draw_owners(rng, BIG_FEATURES, num_servers)
        wanted, ticket = split.lookup(*given, then, num_servers), split.lookup(*given, first, 3)
        split.reshard(ticket, then, num_servers)
        for s in range(num_servers):
            assert np.array_equal(ticket.ids(s), wanted.ids(s))
            assert np.array_equal(ticket.offsets(s), wanted.offsets(s))
        sums = [
            split.sums([each], [(block, [path])], 1.0, *to)
            for each, to in ((ticket, (first, 3)), (wanted, (then, num_servers)))
        ]
        again = split.reshard_sums(sums[0], then, num_servers)
        assert sums[1].same_ids and not again.same_ids
        for s in range(num_servers):
            assert np.array_equal(again.ids(s), sums[1].ids(s))
            assert np.array_equal(again.gradients(s), sums[1].gradients(s))
            assert np.array_equal(again.offsets(s), sums[1].offsets(s))
    with pytest.raises(TicketError, match="used already"):
        split.reshard(ticket, then, num_servers)
    with pytest.raises(InputError, match="owned by server 2 of 2"):
        split.reshard_sums(again, np.full(len(then), 2, np.uint32), 2)


def test_only_one_of_several_threads_uses_a_ticket() -> None:
    split = make_split(FEATURES, num_threads=2)
    for ticket in [split.lookup(**GOOD) for _ in range(50)]:
        update = partial(split.sums, [ticket], [(BLOCK, [PATH])], 1.0, **WHERE)
        found = in_threads(update, update, partial(split.fill, ticket, rows_for(ticket), *floats_for()))
        assert all(each is None or isinstance(each, _core.Sums | TicketError) for each in found)
        assert sum(isinstance(each, _core.Sums) for each in found[:2]) <= 1
        assert ticket.used == any(isinstance(each, _core.Sums) for each in found[:2])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_every_call_is_refused_in_a_fork() -> None:
    split, home = make_split(FEATURES, num_threads=2), os.getpid()
    ticket = split.lookup(**GOOD)
    held: list[Any] = [split.lookup(**GOOD), split.empty(2000, 400)]
    other = split.lookup(**GOOD)
    split.fill(other, rows_for(other), *floats_for())
    sums = split.sums([other], [(BLOCK, [PATH])], 1.0, **WHERE)
    no_rows = np.zeros(3, np.int64)
    no_dims, no_runs = np.zeros(0, np.uint32), np.zeros(1, np.int64)
    groups = np.zeros(2, np.uint32)
    calls: dict[str, Callable[[], object]] = {
        "empty": lambda: split.empty(1, 1),
        "lookup": lambda: split.lookup(**GOOD),
        "bags": lambda: split.bags(native_features(FEATURES, FEATURES.tables)),
        "fill": lambda: split.fill(ticket, rows_for(ticket), *floats_for()),
        "sums": lambda: split.sums([ticket], [(BLOCK, [PATH])], 1.0, **WHERE),
        "reshard_sums": lambda: split.reshard_sums(sums, **WHERE),
        "reshard": lambda: split.reshard(ticket, **WHERE),
        "drop": lambda: split.drop(ticket),
        "encode_rows": lambda: split.encode_rows(no_rows, np.zeros(0, np.float32)),
        "decode_rows": lambda: split.decode_rows(no_rows, np.zeros(0, np.uint8)),
        "encode_runs": lambda: split.encode_runs(no_dims, no_runs, np.zeros(0, np.float32)),
        "decode_runs": lambda: split.decode_runs(no_dims, no_runs, np.zeros(0, np.uint8)),
        "lines": lambda: split.lines(ticket, groups),
        "order": lambda: split.order(ticket, groups),
        "runs": lambda: split.runs([ticket], [(True, [True])], **WHERE, groups=groups),
    }
    of_no_rows = {"num_threads", "simd", "num_buckets", "total_dim", "truncated", "made"}
    assert {name for name in dir(split) if not name.startswith("_")} - of_no_rows == set(calls)

    def body() -> None:
        for call in calls.values():
            expect_refusal(home, call)
        held.extend([ticket.ids(0), ticket.offsets(1)])
        held.clear()
        gc.collect()

    in_fork(body)
    assert not ticket.used
    split.fill(ticket, rows_for(ticket), *floats_for())
    split.sums([ticket], [(BLOCK, [PATH])], 1.0, **WHERE)


def test_a_fork_frees_its_copies_without_hanging() -> None:
    everything: list[Any] = [make_split(FEATURES, num_threads=2)]
    in_fork(everything.clear)
