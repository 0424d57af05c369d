"""A worker over servers has the bits of a worker over local tables, for any number of servers; and faults between them
are reported or repaired, and nothing is applied twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bag_oracle import draw_bags, update
from cluster import ANYWHERE, batch, features, one_table, running_servers, sharded_worker, step_both
from contents import IDS, contents, counters
from satrap.config.job import Job
from satrap.errors import (
    AttemptError,
    CapacityError,
    ChangesError,
    ConfigError,
    InputError,
    NonFiniteError,
    SnapshotError,
    TicketError,
)
from satrap.rpc import Client, Origin, PendingCall, Service
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.table.engine import open_engine
from satrap.table.snapshot.saved_table import checksum_of
from satrap.worker.local_rows import local_worker
from satrap.worker.server_group import ServerGroup


@pytest.fixture(params=[1, 2, 3])
def worker(request: pytest.FixtureRequest) -> Iterator[Any]:
    with (
        running_servers(request.param) as services,
        sharded_worker(features(), [each.address for each in services]) as worker,
    ):
        yield worker


def test_it_has_the_bits_of_a_local_worker(worker: Any, rng: np.random.Generator) -> None:
    """Rows, counters, and evaluation; with a batch that is dropped and gradients that are missing."""
    local = local_worker(features(), num_threads=1)
    for step in range(1, 6):
        step_both([local, worker], rng, [draw_bags(rng, local.features, 9) for _ in range(1 + step % 2)], step)
    dropped = draw_bags(rng, local.features, 4).inputs()
    half = draw_bags(rng, local.features, 4).inputs()
    for each in (local, worker):
        looked = each.lookup(dropped, step=6)
        assert looked.ticket
        each.drop(looked.ticket)
        with pytest.raises(TicketError, match="used already"):
            each.update([looked.ticket], [looked.block])
        looked = each.lookup(half, step=7)
        update(each, looked, None, {"path": np.ones_like(looked.sequences["path"])})
    assert contents(worker) == contents(local)
    for name, table in worker.tables.items():
        assert counters(table) == counters(local.tables[name])
    evaluated = [each.lookup(half, train=False) for each in (local, worker)]
    np.testing.assert_array_equal(evaluated[0].block, evaluated[1].block)
    assert evaluated[1].ticket is None
    assert worker.truncated == local.truncated


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_a_trainer_without_ids_at_a_server_pins_no_rows_there(pads: bool, wire: str) -> None:
    """Two trainers share a bounded table; the second uses two ids for ever, or pads."""
    with running_servers(3) as services, ExitStack() as stack:
        addresses = [service.address for service in services]
        first = stack.enter_context(sharded_worker(one_table(capacity=64), addresses, wire=wire))
        options: dict[str, Any] = {"trainer": 1, "attempt": first.servers.attempt, "wire": wire}
        second = stack.enter_context(sharded_worker(one_table(capacity=64), addresses, **options))
        for step in range(1, 40):
            if pads and step > 1:
                second.pad(step, step)
            else:
                looked = second.lookup(batch([0, 1] if step > 1 else range(8)), step=step)
                update(second, looked, looked.block, step=step)
            looked = first.lookup(batch(range(step * 8, step * 8 + 8)), step=step)
            update(first, looked, looked.block, step=step)
        assert 32 < len(first.tables["t"]) <= 64
        first.tables["t"].check()


def test_steps_are_numbered_by_default(worker: Any, rng: np.random.Generator) -> None:
    local = local_worker(features(), num_threads=1)
    for _ in range(3):
        inputs = draw_bags(rng, local.features, 5).inputs()
        for each in (local, worker):
            looked = each.lookup(inputs)
            update(each, looked, np.ones_like(looked.block))
    assert contents(worker) == contents(local)
    assert worker.rows.latest_step == local.rows.latest_step == 3


def test_empty_batches_and_empty_reads(worker: Any, rng: np.random.Generator) -> None:
    looked = worker.lookup(draw_bags(rng, worker.features, 0).inputs(), step=1)
    assert looked.block.shape == (0, worker.features.total_dim)
    update(worker, looked, looked.block, step=1)
    assert worker.tables["item"].read(IDS[:0]).values.shape == (0, 5)
    assert len(worker.tables["item"]) == 0


def test_learning_rates(worker: Any, rng: np.random.Generator) -> None:
    """First the table's, then that of set_lr, and that of an update before both."""
    local = local_worker(features(), num_threads=1)
    for step, lrs in ((1, None), (2, None), (3, {"item": 0.5})):
        if step == 2:
            worker.tables["user"].set_lr(0.25)
            local.tables["user"].set_lr(0.25)
            assert worker.tables["user"].lr == 0.25
        inputs = draw_bags(rng, local.features, 5).inputs()
        for each in (local, worker):
            looked = each.lookup(inputs, step=step)
            update(each, looked, np.ones_like(looked.block), step=step, lrs=lrs)
    assert contents(worker) == contents(local)


# -- faults ----------------------------------------------------------------------------------------------------------


def test_a_refused_gradient_has_the_local_error_and_changes_nothing() -> None:
    wrong = np.ones((4, 2), np.float32)
    wrong[2, 1] = np.nan
    told = []
    with running_servers(2) as services, sharded_worker(one_table(), [each.address for each in services]) as worker:
        for each in (local_worker(one_table()), worker):
            looked = each.lookup(batch([5, 6, 7, 8]), step=1)
            before = contents(each)
            with pytest.raises(NonFiniteError) as caught:
                update(each, looked, wrong)
            told.append(str(caught.value))
            assert contents(each) == before
            update(each, looked, np.ones((4, 2), np.float32))  # the ticket was not used
    assert told[0] == told[1] and "sample 2 of feature 'id'" in told[0]


def test_skipped_gradients_are_counted_as_locally() -> None:
    wrong = np.ones((4, 2), np.float32)
    wrong[1, 0] = np.inf
    found = []
    skipping = one_table(on_nonfinite="skip")
    with running_servers(2) as services, sharded_worker(skipping, [each.address for each in services]) as worker:
        for each in (local_worker(skipping), worker):
            looked = each.lookup(batch([5, 6, 7, 5]), step=1)
            update(each, looked, wrong, step=1)
            stats = each.tables["t"].stats()
            found.append((contents(each), stats["skipped"], stats["updated"]))
    assert found[0] == found[1] and found[0][1] == 1


def test_a_server_error_is_raised_with_its_address() -> None:
    full = one_table(capacity=8, on_full="raise")
    with running_servers(1) as services, sharded_worker(full, [services[0].address]) as worker:
        with pytest.raises(CapacityError, match="table 't' is full") as caught:
            worker.lookup(batch(range(100)))
        assert any(services[0].address in note for note in caught.value.__notes__)
        assert worker.lookup(batch([1]), train=False).block.shape == (1, 2)


def test_a_server_of_another_job_is_refused_field_by_field() -> None:
    with running_servers(2) as services:
        addresses = [service.address for service in services]
        with sharded_worker(one_table(), addresses):
            pass
        with pytest.raises(ConfigError, match=r"table 't', num_buckets: 16 here, 8 there.*seed|seed.*num_buckets: 16"):
            ServerGroup(Job(tables=one_table(num_buckets=16).tables, seed=1), addresses)
        with pytest.raises(ConfigError, match="server: number 0 of 2 here, 1 of 2 there"):
            ServerGroup(Job(tables=one_table().tables), addresses[::-1])
        with pytest.raises(ConfigError, match="server: number 0 of 1 here, 0 of 2 there"):
            ServerGroup(Job(tables=one_table().tables), addresses[:1])


def test_the_number_of_buckets_is_that_of_the_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Many servers have more buckets, and a checkpoint of fewer resumes there; who comes later takes their number."""
    table, ids = one_table(num_buckets=None), batch(range(60))
    local = local_worker(table, num_threads=1)
    update(local, looked := local.lookup(ids, step=1), looked.block)
    local.tables["t"].save(tmp_path)
    with running_servers(3) as services:
        addresses = [service.address for service in services]
        with monkeypatch.context() as patch:
            patch.setattr("satrap.config.job._BUCKETS_PER_SERVER", 200)  # as of some eighty servers
            with sharded_worker(table, addresses) as worker:
                worker.tables.restore({"t": [tmp_path]})
                assert contents(worker) == contents(local)
        with sharded_worker(table, addresses) as worker:
            assert worker.servers.job.tables[0].num_buckets == 1024
            assert contents(worker) == contents(local)
            step_both([local, worker], np.random.default_rng(0), [draw_bags(np.random.default_rng(1), table, 9)], 2)
            assert contents(worker) == contents(local)


def test_a_refusal_by_one_server_leaves_the_others_free() -> None:
    with running_servers(2) as services:
        other, mine = (each.address for each in services)
        with sharded_worker(one_table(dim=3), [other]):
            pass
        with pytest.raises(ConfigError, match="table 't', dim: 2 here, 3 there"):
            ServerGroup(Job(tables=one_table().tables), [mine, other])
        with pytest.raises(ConfigError, match="expected each server once"):
            ServerGroup(Job(tables=one_table().tables), [mine, mine])
        with sharded_worker(one_table(), [mine]) as worker:
            assert len(worker.tables["t"]) == 0


def test_an_interrupted_update_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    local = local_worker(one_table(), num_threads=1)
    with running_servers(2) as services, sharded_worker(one_table(), [each.address for each in services]) as worker:
        looked = [each.lookup(batch(range(20)), step=1) for each in (local, worker)]
        waited = PendingCall.result

        def interrupted(self: PendingCall) -> None:
            waited(self)
            monkeypatch.setattr(PendingCall, "result", waited)
            raise KeyboardInterrupt

        monkeypatch.setattr(PendingCall, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            update(worker, looked[1], looked[1].block, step=1)
        for each, one in zip((local, worker), looked, strict=True):
            update(each, one, one.block, step=1)
        assert contents(worker) == contents(local)


def test_each_save_of_a_table_has_a_version(tmp_path: Path) -> None:
    with running_servers(2) as services, sharded_worker(one_table(), [each.address for each in services]) as worker:
        worker.lookup(batch(range(20)), step=1)
        table = worker.tables["t"]
        first = table.save(tmp_path / "a")
        assert table.version == first
        assert table.save_changes(tmp_path / "b", since=first) == first + 1
        assert table.save(tmp_path / "a") == first + 2, "a second save by the user is another one"
        with pytest.raises(ChangesError, match=r"do not know all changes since version 9: .*, or save the whole table"):
            table.save_changes(tmp_path / "c", since=9)
        assert table.version == first + 3


def test_a_replaced_process_cannot_write() -> None:
    with running_servers(2) as services:
        addresses = [service.address for service in services]
        with sharded_worker(one_table(), addresses) as old:
            looked = old.lookup(batch(range(20)))
            with sharded_worker(one_table(), addresses) as new:
                before = contents(new)
                with pytest.raises(
                    AttemptError, match="of attempt 1; expected the server's, 2: this process was replaced"
                ):
                    update(old, looked, looked.block)
                with pytest.raises(AttemptError):
                    old.lookup(batch(range(40)))
                assert contents(new) == before
                again = new.lookup(batch(range(20)), step=1)
                update(new, again, again.block, step=1)
                assert contents(new) != before, "step 1 of the new attempt is no duplicate of the old one's"


@pytest.mark.parametrize("with_ticket", [False, True])
def test_a_duplicate_update_is_applied_once(with_ticket: bool) -> None:
    job = Job(tables=one_table().tables)
    with running_servers(1) as services:
        servers = ServerGroup(job, [services[0].address])
        with Client(ServerCalls, services[0].address) as client:
            at = [Origin(attempt=1, trainer=trainer, step=3, map_version=1) for trainer in (0, 1)]
            ids, cuts, ones = np.arange(20, dtype=np.uint64), np.array([0, 20]), np.ones(40, np.float32)
            client.call.lookup(at[0], ids, cuts, 3, True, 7)
            if with_ticket:
                client.call.update(at[0], 7, ids[:0], cuts[:0], ones, [0.1], 0)
                with pytest.raises(TicketError, match="trainer 0 has no ticket 7 here: send the ids"):
                    client.call.update(at[0], 7, ids[:0], cuts[:0], ones, [0.1], 0)
            else:
                client.call.update(at[0], 0, ids, cuts, ones, [0.1], 0)
            once = client.call.read(at[0], 0, ids)[0].tobytes()
            client.call.update(at[0], 0, ids, cuts, ones, [0.1], 0)
            assert client.call.read(at[0], 0, ids)[0].tobytes() == once
            assert client.call.stats(at[0], 0)["repeated"] == 20
            client.call.update(at[1], 0, ids, cuts, ones, [0.1], 0)
            assert client.call.read(at[0], 0, ids)[0].tobytes() != once, "another trainer's step 3 is another step"
        servers.close()


def test_a_step_too_far_behind_is_refused_whole() -> None:
    with running_servers(1) as services, sharded_worker(one_table(), [services[0].address]) as worker:
        looked = {step: worker.lookup(batch(range(64)), step=step) for step in (1, 2, 40)}
        update(worker, looked[40], looked[40].block, step=40)
        before = contents(worker)
        with pytest.raises(InputError, match="step 2 of trainer 0 is too far behind its step 40: at most 32"):
            update(worker, looked[2], looked[2].block, step=2)
        assert contents(worker) == before


def test_an_attempt_that_was_restored_is_not_the_next_one() -> None:
    """A duplicate of a restore has no effect; after another attempt has started, it is a new restore."""
    ids, offsets = np.arange(4, dtype=np.uint64), np.array([0, 4])
    with (
        running_servers(1) as services,
        sharded_worker(one_table(), [services[0].address]) as worker,
        Client(ServerCalls, services[0].address) as client,
    ):
        at = [Origin(attempt=attempt, step=1, map_version=1) for attempt in range(5)]
        client.call.restore(at[2], [], [])
        client.call.lookup(at[2], ids, offsets, 1, True, 0)
        assert client.call.restore(at[2], [], []) is True
        assert client.call.stats(at[2], 0)["rows"] == 4, "it was a duplicate"
        client.call.begin_attempt(at[3])
        with pytest.raises(AttemptError):
            client.call.restore(at[3], [], [])
        assert client.call.restore(at[4], [], []) is True
        assert client.call.stats(at[4], 0)["rows"] == 0
        with pytest.raises(AttemptError, match="this process was replaced"):
            worker.tables["t"].stats()


def test_a_restore_that_fails_leaves_a_server_that_can_be_restored(tmp_path: Path) -> None:
    with (
        Service(Server(shared=tmp_path / "rows", checkpoints=["/"]), ServerCalls, ANYWHERE) as service,
        sharded_worker(one_table(), [service.address]) as worker,
    ):
        worker.tables["t"].save(tmp_path / "a")
        next((tmp_path / "a").rglob("part-*.arrow")).write_bytes(b"")
        worker.servers.attempt += 1
        with pytest.raises(SnapshotError, match="has 0 bytes"):
            worker.servers.call_all("restore", [[str(tmp_path / "a")]], [[checksum_of(tmp_path / "a")]])
        worker.tables.clear()
        worker.lookup(batch(range(4)), step=1)
        assert len(worker.tables["t"]) == 4


def test_a_server_killed_in_its_first_handshake_starts_empty(tmp_path: Path) -> None:
    note = {"server": 0, "num_servers": 1}
    open_engine(one_table().tables, seed=0, num_threads=1, shared=tmp_path / "rows", note=note)  # no shard map yet
    with (
        Service(Server(shared=tmp_path / "rows", checkpoints=["/"]), ServerCalls, ANYWHERE) as service,
        sharded_worker(one_table(), [service.address]) as worker,
    ):
        worker.lookup(batch(range(4)), step=1)
        assert len(worker.tables["t"]) == 4


def test_a_server_without_its_rows_is_detected() -> None:
    with running_servers(1) as services, sharded_worker(one_table(), [services[0].address]) as worker:
        worker.lookup(batch(range(4)), step=1)
        services[0].close()
        told = "of attempt 1; expected the server's, 0: the server was restarted without its rows; start"
        with Service(Server(), ServerCalls, services[0].address), pytest.raises(AttemptError, match=told):
            worker.lookup(batch(range(4)), step=2)


def test_invalid_calls_are_refused() -> None:
    with (
        running_servers(1) as services,
        sharded_worker(one_table(), [services[0].address]),
        Client(ServerCalls, services[0].address) as client,
    ):
        at = Origin(attempt=1, step=1, map_version=1)
        ids = np.arange(4, dtype=np.uint64)
        for cuts in ([0, 3], [0, 5], [1, 4], [0], [0, 2, 4], [4, 0]):
            with pytest.raises(InputError, match=r"offsets (run from . to .; expected 0 to .*, 4|holds . elements)"):
                client.call.lookup(at, ids, np.array(cuts), 1, True, 0)
        with pytest.raises(InputError, match="3 gradients of 4 ids; expected their rows"):
            client.call.update(at, 0, ids, np.array([0, 4]), np.ones(3, np.float32), [0.1], 0)
        with pytest.raises(InputError, match="lrs holds 2 elements, expected 1"):
            client.call.update(at, 0, ids, np.array([0, 4]), np.ones(8, np.float32), [0.1, 0.1], 0)
        with pytest.raises(InputError, match="table is 1; expected an integer from 0 to 0"):
            client.call.read(at, 1, ids)
        assert client.call.stats(at, 0)["updated"] == 0


def test_a_server_runs_without_torch() -> None:
    import subprocess
    import sys

    program = "import sys, satrap.server.server, satrap.rpc.service, satrap.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "False"
