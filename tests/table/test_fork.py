"""A fork()ed process cannot use a store of its parent: it raises at once instead of hanging or writing to its file.

A fork has none of the parent's threads, and whatever locks they held stay locked there. So each call of the native
engine is refused in it. DataLoader's workers are forks by default on Linux.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from forks import expect_refusal, in_fork
from satrap import _core
from satrap.config.optimizers import SGD
from satrap.config.tables import Constant, Table
from satrap.errors import ForkError
from satrap.table.engine import native_config
from satrap.table.store import Store
from waiting import DEADLINE_SECONDS

TABLE = Table("forked", dim=4, optimizer=SGD(lr=1.0), initial=Constant(0.0), num_buckets=8)
IDS = np.arange(5000, dtype=np.uint64)  # more than a call does alone
GRADIENTS = -np.ones((len(IDS), TABLE.dim), np.float32)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(params=["anonymous", "shared"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    shared = tmp_path / "table" if request.param == "shared" else None
    store = Store(TABLE, num_threads=2, shared=shared)
    store.lookup(IDS)
    yield store
    store.check()
    assert store.stats()["updated"] == 0


def test_every_call_of_a_store_is_refused(store: Store, tmp_path: Path) -> None:
    _, ticket = store.lookup_for_update(IDS)
    home, since = os.getpid(), store.save(tmp_path / "first")
    calls: list[Callable[[], object]] = [
        lambda: store.lookup(IDS),
        lambda: store.lookup(IDS, train=False),
        lambda: store.update(IDS, GRADIENTS),
        lambda: store.update(ticket, GRADIENTS),
        lambda: store.read(IDS),
        lambda: store.set_lr(2.0),
        lambda: store.lr,
        lambda: store.version,
        lambda: store.latest_step,
        lambda: len(store),
        lambda: store.stats(),
        lambda: store.check(),
        lambda: store.save(tmp_path / "saved"),
        lambda: store.save_changes(tmp_path / "changes", since=since),
    ]

    def body() -> None:
        for call in calls:
            expect_refusal(home, call)

    in_fork(body)
    assert not (tmp_path / "saved").exists() and not (tmp_path / "changes").exists()
    assert not ticket.used


def test_a_save_that_was_going_on_at_the_fork_is_not_waited_for(store: Store, tmp_path: Path) -> None:
    home, since = os.getpid(), store.save(tmp_path / "first")

    def body() -> None:
        expect_refusal(home, lambda: store.save(tmp_path / "saved"))
        expect_refusal(home, lambda: store.save_changes(tmp_path / "changes", since=since))
        expect_refusal(home, lambda: store.apply_changes(tmp_path / "first"))
        expect_refusal(home, lambda: store.fill([]))

    with store._snapshot_lock:
        in_fork(body)


def engine_calls(engine: _core.Engine) -> dict[str, Callable[[], object]]:
    """Returns a call of each public method, with valid arguments."""
    offsets = np.array([0, len(IDS)], np.int64)
    floats = np.zeros(GRADIENTS.size, np.float32)
    empty, words, values = np.zeros(0, np.float32), np.ones(len(IDS), np.uint32), np.zeros_like(GRADIENTS)
    ticket = engine.prepare(IDS, offsets)
    flags = np.zeros(len(IDS), np.bool_)
    message = np.asarray(engine.encode_rows(offsets, floats))
    bags = _core.Bags(engine, [("a", 0, "sum", False, 0, False, None, False)])
    block = np.zeros(GRADIENTS.size, np.float32)
    of_bags = engine.lookup_bags(bags, IDS, None, None, len(IDS), 1, 1, True, block, [])
    return moving_calls(engine) | {
        "latest_step": lambda: engine.latest_step,
        "attempt": lambda: engine.attempt,
        "begin_attempt": lambda: engine.begin_attempt(1),
        "finished": lambda: engine.finished(0, 1),
        "finish": lambda: engine.finish(0, 1),
        "empty": lambda: engine.empty(3, 4),
        "lookup": lambda: engine.lookup(IDS, offsets, 1, 1, True, floats, False),
        "prepare": lambda: engine.prepare(IDS, offsets),
        "update": lambda: engine.update(ticket, floats, 1, [1.0]),
        "drop": lambda: engine.drop(ticket),
        "bag_ticket": lambda: engine.bag_ticket(bags, IDS, None, None, len(IDS)),
        "read": lambda: engine.read(0, IDS, floats, empty, flags),
        "encode_rows": lambda: engine.encode_rows(offsets, floats),
        "decode_rows": lambda: engine.decode_rows(offsets, message),
        "lr": lambda: engine.lr(0),
        "set_lr": lambda: engine.set_lr(0, 2.0),
        "state_dim": lambda: engine.state_dim(0),
        "num_buckets": lambda: engine.num_buckets(0),
        "num_rows": lambda: engine.num_rows(0),
        "share_buckets": lambda: engine.share_buckets(0),
        "stats": lambda: engine.stats(0),
        "check": lambda: engine.check(0),
        "version": lambda: engine.version(0),
        "begin_version": lambda: engine.begin_version(0),
        "export_rows": lambda: engine.export_rows(0, 0, 8, 0),
        "export_removed": lambda: engine.export_removed(0, 0, 8, 0),
        "begin_cut": lambda: engine.begin_cut([0], 1 << 30, 60.0),
        "export_cut": lambda: engine.export_cut(0, 0, 8, 0),
        "export_cut_sightings": lambda: engine.export_cut_sightings(0, 0, 8),
        "end_cut": lambda: engine.end_cut(0),
        "export_sightings": lambda: engine.export_sightings(0, 0, 8),
        "removed_since": lambda: engine.removed_since(0),
        "rows_with": lambda: engine.rows_with(0, IDS),
        "import_rows": lambda: engine.import_rows(0, IDS, words, values, empty),
        "import_removed": lambda: engine.import_removed(0, IDS),
        "import_sightings": lambda: engine.import_sightings(0, IDS, words, words, True),
        "expire_before": lambda: engine.expire_before(0),
        "restore": lambda: engine.restore(0, 1, 1, 0, 1.0),
        "set_complete": lambda: engine.set_complete(True),
        "lookup_bags": lambda: engine.lookup_bags(bags, IDS, None, None, len(IDS), 1, 1, True, block, []),
        "update_bags": lambda: engine.update_bags([of_bags], [(block, [])], 1, [], 1.0),
    }


def moving_calls(engine: _core.Engine) -> dict[str, Callable[[], object]]:
    """Returns the calls for the migration of buckets."""
    some = np.zeros(8, np.uint32)
    return {
        "set_owners": lambda: engine.set_owners(some, 0),
        "freeze": lambda: engine.freeze(some[:1], True),
        "export_windows": lambda: engine.export_windows(some[:1]),
        "import_windows": lambda: engine.import_windows(some[:1], [0], IDS[:1]),
        "export_counters": lambda: engine.export_counters(some[:1]),
        "import_counters": lambda: engine.import_counters(some[:1], IDS[:10]),
        "hand_over": lambda: engine.hand_over(some[:1]),
        "take_over": lambda: engine.take_over(some[:1], True),
        "forget": lambda: engine.forget(some[:1]),
        "reach_step": lambda: engine.reach_step(1),
        "reach_table": lambda: engine.reach_table(0, 1, 0),
        "note": engine.note,
        "set_note": lambda: engine.set_note(b"note"),
    }


def frame_calls() -> dict[str, Callable[[], object]]:
    """Returns the calls of an engine whose rows are on a device."""
    engine = _core.Engine([native_config(TABLE, 0)], 0, 2)
    bags = _core.Bags(engine, [("a", 0, "sum", False, 0, False, None, False)])
    frames = np.zeros(len(IDS), np.int32)

    def look_up() -> Any:
        return engine.lookup_frames(bags, IDS, None, None, len(IDS), 1, 1, True, frames)["ticket"]

    of_all = np.array([0, len(IDS)], np.int64)
    tickets, values, state = [look_up()], np.zeros_like(GRADIENTS), np.zeros((len(IDS), 0), np.float32)
    ordered, flat = look_up(), engine.lookup_id_frames(IDS, of_all, 1, 1, True, frames, want_ticket=True)["ticket"]
    engine.order_frames(ordered)
    return {
        "lookup_frames": look_up,
        "take_inserted": engine.take_inserted,
        "update_frames": lambda: engine.update_frames(tickets, [(True, [])], 1, False),
        "order_frames": lambda: engine.order_frames(tickets[0]),
        "update_ordered_frames": lambda: engine.update_ordered_frames(ordered, 1, False),
        "order_id_frames": lambda: engine.order_id_frames(flat, frames),
        "settle_frames": lambda: engine.settle_frames(0, IDS, 0, 1),
        "sum_bound": lambda: engine.sum_bound(tickets),
        "check_gradients": lambda: engine.check_gradients(tickets, [(GRADIENTS.reshape(-1), [])], 1.0),
        "lookup_id_frames": lambda: engine.lookup_id_frames(IDS, of_all, 1, 1, True, frames),
        "update_id_frames": lambda: engine.update_id_frames(IDS, of_all, frames, 1, False),
        "check_id_gradients": lambda: engine.check_id_gradients(IDS, of_all, GRADIENTS.reshape(-1)),
        "initial_rows": lambda: engine.initial_rows(0, IDS, values, state),
        "read_frames": lambda: engine.read_frames(0, IDS),
        "import_frames": lambda: engine.import_frames(0, IDS, np.ones(len(IDS), np.uint32)),
        "frames_used": lambda: engine.frames_used(0),
        "frames_free": lambda: engine.frames_free(0),
        "home_used": lambda: engine.home_used(0),
        "home_free": lambda: engine.home_free(0),
        "set_device_frames": lambda: engine.set_device_frames(0, 9),
        "take_moves": engine.take_moves,
        "set_frame_limit": lambda: engine.set_frame_limit(0, 9),
        "check_frames": engine.check_frames,
    }


def test_every_call_of_the_engine_is_refused(store: Store) -> None:
    """A new method must be added to `engine_calls`, unless it works on no rows."""
    engine, home = store._engine, os.getpid()
    calls = engine_calls(engine) | frame_calls()
    of_no_rows = {"attach", "shared_config", "shared_unfinished", "simd", "num_threads", "num_floats"}
    of_no_rows |= {"cut_figures", "shares_buckets"}
    assert {name for name in dir(engine) if not name.startswith("_")} - of_no_rows == set(calls)

    def body() -> None:
        for call in calls.values():
            expect_refusal(home, call)

    in_fork(body)


def test_a_fork_ends_its_copies_without_hanging() -> None:
    """core/tests/test_fork.cpp tests the same for a store with a file."""
    mine = Store(TABLE, num_threads=2)
    everything: list[Any] = [mine, mine.lookup_for_update(IDS)]
    everything.append(mine.lookup(np.arange(200_000, dtype=np.uint64)))  # a block of the engine's pool
    del mine

    def body() -> None:
        everything.clear()
        gc.collect()
        own = Store(TABLE, num_threads=2)
        assert own.lookup(IDS).shape == (len(IDS), TABLE.dim)

    in_fork(body)


class Looked(Dataset[torch.Tensor]):
    """Rows that a data loader's worker looks up while it loads samples."""

    def __init__(self, store: Store | None) -> None:
        self.store = store

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.store is None:
            self.store = Store(TABLE, num_threads=2)
        return torch.from_numpy(self.store.lookup(IDS))


def load(dataset: Looked) -> list[torch.Tensor]:
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="fork", timeout=DEADLINE_SECONDS)
    before = set(threading.enumerate())
    try:
        return list(loader)
    except ForkError as error:
        raise error.with_traceback(None) from None  # whose frames hold the loader's iterator, and so its threads
    finally:
        gc.collect()
        for thread in set(threading.enumerate()) - before:
            thread.join(DEADLINE_SECONDS)


def test_a_loader_whose_worker_uses_the_store_is_told(store: Store) -> None:
    with pytest.raises(ForkError, match="open it here, or start workers with 'spawn'"):
        load(Looked(store))
    assert np.array_equal(store.lookup(IDS), np.zeros_like(GRADIENTS))


def test_a_loader_whose_worker_opens_its_own_works() -> None:
    first, second = load(Looked(None))
    assert first.shape == second.shape == (1, len(IDS), TABLE.dim)
