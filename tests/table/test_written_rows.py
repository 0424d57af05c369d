"""Rows that a caller writes into a table on a device or on servers, against one in this process: they are equal bit for
bit whatever else happens to them, and however badly messages are lost or repeated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bag_oracle import UNIVERSE, draw_bags
from cluster import batch, features, one_table, running_servers, sharded_worker, step_both
from contents import contents, row_bytes
from device_workers import pair
from faults import killed_at_random
from one_row import OPTIMIZERS
from rpc_parts import FrameProxy
from satrap import SGD, Adagrad, MinCount, Normal, Reader, Store, Table
from satrap.device.device_worker import device_worker
from satrap.errors import CapacityError, InputError, MovedError, SatrapError
from satrap.worker.local_rows import local_worker

TABLES = list(features().tables)


@contextmanager
def workers(where: str, seed: int) -> Iterator[list[Any]]:
    """Return a worker with rows in this process, and one with rows elsewhere."""
    with ExitStack() as stack:
        if where == "device":
            yield pair(features())
            return
        services = stack.enter_context(running_servers(2))
        proxies = [stack.enter_context(FrameProxy(each.address, seed, 0.1, 0.2, 0.2)) for each in services]
        addresses = [each.address for each in proxies]
        other = stack.enter_context(sharded_worker(features(), addresses, seed=3, retry_seconds=0.05))
        yield [local_worker(features(), seed=3, num_threads=2), other]


def write_both(both: list[Any], rng: np.random.Generator) -> None:
    table = TABLES[int(rng.integers(len(TABLES)))]
    ids = rng.choice(UNIVERSE, int(rng.integers(0, len(UNIVERSE))), replace=False)
    values = rng.normal(size=(len(ids), table.dim)).astype(np.float32)
    shape = both[0].tables[table.name].read(ids).state.shape
    state = None if rng.random() < 0.5 else np.abs(rng.normal(size=shape)).astype(np.float32)
    for each in both:
        each.tables[table.name].write(ids, values, state)
        found = each.tables[table.name].read(ids)
        assert found.present.all()
        np.testing.assert_array_equal(found.values, values)
        if state is not None:
            np.testing.assert_array_equal(found.state, state)


def all_rows(table: Any) -> dict[int, tuple[bytes, bytes]]:
    return {
        int(i): (values.tobytes(), state.tobytes())
        for ids, found in table.rows()
        for i, values, state in zip(ids, found.values, found.state, strict=True)
        if found.present.all()
    }


@pytest.mark.parametrize("where", ["device", "servers"])
def test_writes_between_steps(where: str, seed: int, rng: np.random.Generator) -> None:
    with workers(where, seed) as both:
        for step in range(1, 20):
            if rng.random() < 0.6:
                write_both(both, rng)
            step_both(both, rng, [draw_bags(rng, both[0].features, 6)], step)
        assert contents(both[0], UNIVERSE) == contents(both[1], UNIVERSE)
        for name, table in both[0].tables.items():
            other = both[1].tables[name]
            other.check()
            table.check()
            expected = UNIVERSE[table.read(UNIVERSE).present]
            assert sorted(table.ids()) == sorted(other.ids()) == sorted(expected)
            assert all_rows(table) == all_rows(other) and len(all_rows(table)) == len(expected)


def test_writes_while_servers_are_killed(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    local = local_worker(features(), num_threads=1)
    with killed_at_random(tmp_path, seed, 2) as (servers, over):
        addresses = [each.address for each in servers]
        with sharded_worker(features(), addresses) as worker:
            step = 0
            while not over.is_set() or step < 10:
                step += 1
                write_both([local, worker], rng)
                step_both([local, worker], rng, [draw_bags(rng, local.features, 6)], step)
            assert contents(worker) == contents(local)


def test_a_late_duplicate_of_a_write_does_not_undo_later_ones() -> None:
    """A message that was delayed arrives after the writes and steps that followed."""
    with running_servers(1) as (service,), sharded_worker(one_table(), [service.address]) as worker:
        table, group = worker.tables["t"], worker.servers
        ids = np.arange(9, dtype=np.uint64)
        table.write(ids, np.ones((9, 2), np.float32))
        late = group.origin(1), 0, ids, np.full(18, 7, np.float32), np.zeros(0, np.float32), False
        (client,) = group.topology.clients
        client.call.write(*late)  # with the same number: done already
        assert (table.read(ids).values == 1).all()
        table.write(ids, np.full((9, 2), 3, np.float32))
        table.write(ids, np.full((9, 2), 4, np.float32))
        client.call.write(*late)
        assert (table.read(ids).values == 4).all()


@pytest.mark.parametrize("where", ["process", "device", "servers"])
def test_a_write_without_room_changes_nothing(where: str, seed: int, rng: np.random.Generator) -> None:
    """The capacity that the error names has room, although hashing does not fill the buckets equally."""
    declared = one_table(capacity=64, num_buckets=8)
    ids = rng.choice(10_000, 64, replace=False).astype(np.uint64)
    with ExitStack() as stack:
        if where == "servers":
            services = stack.enter_context(running_servers(2))
            worker = stack.enter_context(sharded_worker(declared, [service.address for service in services]))
        else:
            worker = local_worker(declared) if where == "process" else device_worker(declared, "cpu")
        table = worker.tables["t"]
        table.write(ids[:8], np.ones((8, 2), np.float32))
        before = all_rows(table)
        with pytest.raises(CapacityError, match=r"bucket \d of 8 would have .* or use on_full='grow'") as refused:
            table.write(ids, np.full((64, 2), 5, np.float32))
        assert all_rows(table) == before
        table.check()
    capacity = re.search(r"capacity to at least (\d+) with num_buckets=8", str(refused.value))
    assert capacity is not None
    larger = Store(Table("t", dim=2, capacity=int(capacity[1]), num_buckets=8))
    larger.write(ids, np.ones((64, 2), np.float32))
    assert len(larger) == 64


def test_expired_rows_leave_room() -> None:
    store = Store(Table("t", dim=2, capacity=4, num_buckets=1, expire_after=1))
    store.write([1, 2, 3], np.ones((3, 2), np.float32))
    for _ in range(3):
        store.lookup([9])
    store.write([4, 5, 6], np.ones((3, 2), np.float32))
    assert sorted(store.ids()) == [4, 5, 6, 9]


def test_two_trainers_write_their_parts(rng: np.random.Generator) -> None:
    declared = one_table()
    ids, values = np.arange(60, dtype=np.uint64), rng.normal(size=(60, 2)).astype(np.float32)
    with running_servers(2) as services:
        addresses = [service.address for service in services]
        with sharded_worker(declared, addresses) as first:
            attempt = first.servers.attempt
            with (
                sharded_worker(declared, addresses, trainer=1, attempt=attempt) as second,
                ThreadPoolExecutor(2) as pool,
            ):
                for step in range(0, 60, 10):
                    parts = [slice(step, step + 5), slice(step + 5, step + 10)]
                    writes = [
                        pool.submit(worker.tables["t"].write, ids[part], values[part])
                        for worker, part in zip((first, second), parts, strict=True)
                    ]
                    for each in writes:
                        each.result()
                np.testing.assert_array_equal(second.tables["t"].read(ids).values, values)


def test_rows_that_other_trainers_have_too_are_refused() -> None:
    worker = device_worker(one_table(shard="replicated"), "cpu")
    store: Any = worker.tables["t"]
    store._engine.share_buckets(0)  # as the engine of one of several trainers does
    with pytest.raises(InputError, match="shard is 'replicated', and the other trainers' devices have copies"):
        worker.tables["t"].write([1], np.ones((1, 2), np.float32))


def test_a_bucket_that_migrates_is_not_written() -> None:
    with running_servers(1) as (service,), sharded_worker(one_table(), [service.address]) as worker:
        group = worker.servers
        (client,) = group.topology.clients
        client.call.freeze(group.origin(0), 5, np.arange(8, dtype=np.uint32))
        ids, values = np.arange(9, dtype=np.uint64), np.ones(18, np.float32)
        with pytest.raises(MovedError, match="write: some of the ids' buckets are migrating"):
            client.call.write(group.origin(1), 0, ids, values, np.zeros(0, np.float32), False)
        assert len(worker.tables["t"]) == 0


def test_rows_of_an_earlier_run_are_not_written_over() -> None:
    with running_servers(1) as (service,):
        with sharded_worker(one_table(), [service.address]) as worker:
            worker.lookup(batch(range(5)), step=7)
        with sharded_worker(one_table(), [service.address]) as worker:
            with pytest.raises(InputError, match="trained up to step 7: resume its checkpoint"):
                worker.tables["t"].write([1], np.ones((1, 2), np.float32))
            worker.tables.clear()
            worker.tables["t"].write([1], np.ones((1, 2), np.float32))
            assert worker.tables["t"].ids().tolist() == [1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_a_written_row_starts_as_a_new_one(optimizer: Any, dtype: Any) -> None:
    table = Table("t", dim=5, optimizer=optimizer, initial=Normal(std=0.5), dtype=dtype)
    looked, written = Store(table), Store(table)
    ids = np.arange(30, dtype=np.uint64)
    written.write(ids, looked.lookup(ids))
    assert row_bytes(looked, ids) == row_bytes(written, ids)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_a_state_that_is_accepted_never_makes_a_row_nan(optimizer: Any, rng: np.random.Generator) -> None:
    store = Store(Table("t", dim=2, optimizer=optimizer))
    for column in range(store.state_dim):
        state = np.abs(rng.normal(size=(1, store.state_dim))).astype(np.float32)
        state[0, column] *= -1
        try:
            store.write([1], np.ones((1, 2), np.float32), state)
        except InputError:
            continue
        _, ticket = store.lookup_for_update([1])
        store.update(ticket, np.full((1, 2), 1e-3, np.float32))
        assert np.isfinite(store.read([1]).values).all()
        mean_at = {"SGD": 2, "Adam": 2, "AdamW": 2, "Ftrl": 2}[type(optimizer).__name__]
        assert column < mean_at, "sums of squares and counts of steps are refused"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_round_to_the_nearest(dtype: Any, rng: np.random.Generator) -> None:
    store = Store(Table("t", dim=64, dtype=dtype))
    values = (rng.normal(size=(300, 64)) * 10.0 ** rng.integers(-9, 5, (300, 64))).astype(np.float32)
    store.write(ids := np.arange(300, dtype=np.uint64), values)
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(store.read(ids).values, expected)
    with pytest.raises(InputError, match=f"which {dtype} cannot"):
        store.write([1], np.full((1, 64), 3.4e38, np.float32))


def test_saves_have_written_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    store = Store(Table("t", dim=3, capacity=50, expire_after=5))
    store.write(ids := np.arange(20, dtype=np.uint64), rng.normal(size=(20, 3)).astype(np.float32))
    version = store.save(tmp_path / "full")
    store.write([3, 99], np.ones((2, 3), np.float32))
    store.save_changes(tmp_path / "changes", since=version)
    loaded = Store.load(tmp_path / "full")
    loaded.apply_changes(tmp_path / "changes")
    assert all_rows(loaded) == all_rows(store)
    with Reader(tmp_path / "full") as reader:
        assert sorted(reader.tables["t"].ids()) == ids.tolist()
        assert dict.fromkeys(all_rows(reader.tables["t"])) == dict.fromkeys(ids.tolist())


def test_a_frozen_table_keeps_its_bits(rng: np.random.Generator) -> None:
    """A learning rate of 0 freezes rows, in 16 bits too."""
    for optimizer in (SGD(lr=0.0, weight_decay=0.1), Adagrad(lr=0.0)):
        store = Store(Table("t", dim=8, optimizer=optimizer, dtype="bfloat16"))
        store.write(ids := np.arange(50, dtype=np.uint64), rng.normal(size=(50, 8)).astype(np.float32))
        before = store.read(ids).values.tobytes()
        for _ in range(3):
            _, ticket = store.lookup_for_update(ids)
            store.update(ticket, rng.normal(size=(50, 8)).astype(np.float32))
        assert store.read(ids).values.tobytes() == before


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 1], ONES), "ids hold 1 twice; expected one row for each id"),
        (([1.5, 2], ONES), "ids[0] is 1.5 (float)"),
        (([1, True], ONES), "ids[1] is True (bool)"),
        (([1, 2**64], ONES), "ids[1] is 18446744073709551616"),
        (([1, 2, 3], ONES), "values are float32 of shape (2, 3); expected float32 of shape (3, 3)"),
        (([1, 2], ONES.astype(np.float64)), "values are float64 of shape (2, 3); expected float32"),
        (([1, 2], np.array([[1, 1, 1], [1, np.nan, 1]], np.float32)), "values[1] holds nan, for id 2; expected finite"),
        (([1, 2], ONES, ONES[:1]), "state are float32 of shape (1, 3); expected float32 of shape (2, 3)"),
        (([1, 2], ONES, ONES * -5), "state[0] holds -5.0; expected at least 0 in the sums of squares and counts of"),
        (([1, 2], ONES, ONES * np.inf), "state[0] holds inf, for id 1; expected finite numbers"),
    ],
)
def test_bad_rows_change_nothing(arguments: tuple[Any, ...], message: str) -> None:
    with running_servers(1) as (service,):
        declared = one_table(dim=3)
        with sharded_worker(declared, [service.address]) as worker:
            for table in (worker.tables["t"], local_worker(declared).tables["t"]):
                with pytest.raises(InputError, match=re.escape(f"table 't': {message}")):
                    table.write(*arguments)
                assert len(table) == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"admission": MinCount(3)}, InputError, "1 ids were seen and are not admitted yet"),
        ({"capacity": 4, "num_buckets": 1}, CapacityError, "bucket 0 of 1 would have 5 rows .* to at least 5 with"),
    ],
)
def test_rows_that_a_table_cannot_take(options: dict[str, Any], error: type[SatrapError], message: str) -> None:
    store = Store(Table("t", dim=2, **options))
    store.write([1, 2], np.ones((2, 2), np.float32))
    store.lookup([5])
    with pytest.raises(error, match=message):
        store.write([5, 6, 7], np.ones((3, 2), np.float32))
    store.check()
