"""A cut of servers: it stays as it was while rows are trained and other servers take over buckets; who may give it up,
and what a duplicate of each call gets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bag_oracle import update
from cluster import ANYWHERE, batch, one_table, running_servers, sharded_worker
from contents import bits, contents
from loop import batches, job, train_step
from satrap import Checkpoint
from satrap.config.features import Features
from satrap.config.optimizers import Adagrad
from satrap.config.tables import MinCount, Normal, Table
from satrap.errors import AttemptError, ChangesError, DeadlineError, MovedError, SatrapError, SnapshotError
from satrap.rpc import Service
from satrap.server import state
from satrap.server.migration.coordinator import Migration
from satrap.server.protocol import ServerCalls
from satrap.server.save_calls import SaveCalls
from satrap.server.server import Server
from satrap.server.state import ServerState
from satrap.storage.folder import Folder
from satrap.table.group_cut import GroupCut
from satrap.worker.local_rows import local_worker
from satrap.worker.server_group import ServerGroup
from tour import Tour

UNIVERSE = np.arange(2000, dtype=np.uint64)


def life() -> Features:
    options: dict[str, Any] = {"capacity": 256, "admission": MinCount(n=2, window=512), "expire_after": 30}
    return Features({"id": Table("t", dim=2, num_buckets=16, initial=Normal(), optimizer=Adagrad(lr=0.1), **options)})


def step_all(workers: list[Any], rng: np.random.Generator, step: int) -> None:
    ids = rng.zipf(1.2, size=60) % 2000
    for each in workers:
        looked = each.lookup(batch(ids), step=step)
        update(each, looked, looked.block + 1, step=step)


def restored(folder: Path) -> dict[str, list[bytes]]:
    worker = local_worker(life(), num_threads=1)
    worker.tables.restore({"t": [folder]})
    worker.tables["t"].check()
    return contents(worker, UNIVERSE)


def test_rows_expire_on_servers_that_a_batch_leaves_alone(tmp_path: Path) -> None:
    """Each batch is one id, so one of the two servers gets no ids; its rows expire as those of a local worker do."""
    local = local_worker(one_table(expire_after=3), num_threads=1)
    with ExitStack() as stack:
        servers = [Server(num_threads=2, checkpoints=["/"]) for _ in range(2)]
        addresses = [stack.enter_context(Service(each, ServerCalls, ANYWHERE)).address for each in servers]
        worker = stack.enter_context(sharded_worker(one_table(expire_after=3), addresses))
        for step, number in enumerate([*range(40), *[0] * 8], start=1):
            for each in (local, worker):
                looked = each.lookup(batch([number]), step=step)
                update(each, looked, looked.block + 1, step=step)
            assert contents(worker) == contents(local)
            assert len(worker.tables["t"]) == len(local.tables["t"])
        cut = worker.tables.take_cut()
        assert cut.write({"t": tmp_path / "t"}, is_full=True) == {"t": 1}
        states = [each._fence.state for each in servers]
        assert not any(kept for each in states if each for kept in each.tickets.values()), (
            "a lookup without ids leaves no ticket"
        )


def test_cuts_stay_as_they_were_while_rows_are_trained_and_migrate(rng: np.random.Generator, tmp_path: Path) -> None:
    """The oracle is a local worker that gets the same batches."""
    local, step, saved = local_worker(life(), num_threads=1), 0, 0
    writers = ThreadPoolExecutor(1)
    with running_servers(3) as services, sharded_worker(life(), [services[0].address]) as worker, writers:
        with Tour([each.address for each in services], group_bytes=1000) as tour:
            while not tour.over() or saved < 3:
                step += 1
                step_all([local, worker], rng, step)
                if step % 4:
                    continue
                cut, expected, rows = worker.tables.take_cut(), contents(local, UNIVERSE), len(local.tables["t"])
                folder = tmp_path / str(step)
                writer = writers.submit(cut.write, {"t": folder}, is_full=True)
                while not writer.done():
                    step += 1
                    step_all([local, worker], rng, step)
                assert writer.result() == {"t": rows}
                assert restored(folder) == expected
                saved += 1
        assert contents(worker, UNIVERSE) == contents(local, UNIVERSE)


@contextmanager
def two_servers() -> Iterator[tuple[list[Service], Any]]:
    with running_servers(3) as services:
        addresses = [service.address for service in services]
        with sharded_worker(one_table(), addresses[:2]) as worker:
            looked = worker.lookup(batch(range(40)), step=1)
            update(worker, looked, looked.block, step=1)
            yield services, worker


def test_a_migration_waits_for_the_cut(tmp_path: Path) -> None:
    with two_servers() as (services, worker):
        addresses = [service.address for service in services]
        cut = worker.tables.take_cut()
        with pytest.raises(DeadlineError, match="a checkpoint of this server's buckets is being saved"):
            Migration(addresses[:2], addresses, deadline=0.5).run()
        assert cut.write({"t": tmp_path / "t"}, is_full=True) == {"t": 40}
        assert Migration(addresses[:2], addresses, deadline=60.0).run().buckets > 0
        cut = worker.tables.take_cut()
        cut.release()
        assert Migration(addresses, addresses[:2], deadline=60.0).run().buckets > 0


def test_a_cut_that_one_server_refuses_keeps_no_migration_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server answers that its buckets have moved when the other has taken the cut, so the cut is taken again."""
    call, refused = ServerGroup.call_servers, list[str]()

    def refuse_once(group: ServerGroup, method: str, *arguments: Any, **options: Any) -> dict[int, Any]:
        if method == "versions" and refused == ["take_cut"]:
            refused.append(method)
            Migration(addresses[:2], addresses, deadline=10.0).run()
        answers = call(group, method, *arguments, **options)
        if method == "take_cut" and not refused:
            refused.append(method)
            raise MovedError("take_cut: refused by the test")
        return answers

    with two_servers() as (services, worker):
        addresses = [service.address for service in services]
        monkeypatch.setattr(ServerGroup, "call_servers", refuse_once)
        cut = worker.tables.take_cut()
        assert refused == ["take_cut", "versions"]
        assert cut.write({"t": tmp_path / "t"}, is_full=True) == {"t": 40}


def test_a_cut_that_nothing_writes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_servers() as (services, worker):
        addresses = [service.address for service in services]
        monkeypatch.setattr(state, "CUT_SECONDS", 0.0)
        cut = worker.tables.take_cut()
        assert Migration(addresses[:2], addresses, deadline=60.0).run().buckets > 0
        with pytest.raises(ChangesError):
            cut.write({"t": tmp_path / "t"}, is_full=True)


def test_a_save_whose_cut_is_given_up_while_it_is_written_takes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server gives its cut up when it takes a newer bucket map."""
    write = GroupCut.write
    given_up: list[GroupCut] = []

    def give_up_once(cut: GroupCut, *args: Any, **options: Any) -> dict[str, int]:
        if not given_up:
            given_up.append(cut)
            cut.cancel()
        return write(cut, *args, **options)

    with running_servers(2) as services:
        embeddings, model, optimizer = job(servers=[service.address for service in services])
        with embeddings.stream(batches(3)) as stream:
            for inputs in stream:
                train_step(model, optimizer, inputs)
        expected = bits(embeddings, model)
        monkeypatch.setattr(GroupCut, "write", give_up_once)
        run = Checkpoint(tmp_path / "run", model, optimizer, embeddings)
        assert run.save() and given_up
        embeddings.close()
    embeddings, model, optimizer = job()
    assert Checkpoint(tmp_path / "run", model, optimizer, embeddings).resume() and embeddings.step == 3
    assert bits(embeddings, model) == expected


def test_a_later_attempt_gives_the_cut_up(tmp_path: Path) -> None:
    with two_servers() as (services, worker):
        cut = worker.tables.take_cut()
        with sharded_worker(one_table(), [each.address for each in services][:2], take_over=True) as other:
            looked = other.lookup(batch(range(40)), step=2)
            update(other, looked, looked.block, step=2)
            with pytest.raises(AttemptError):
                cut.write({"t": tmp_path / "t"}, is_full=True)
            assert other.tables.take_cut().write({"t": tmp_path / "t"}, is_full=True) == {"t": 40}


def test_duplicates_of_calls(tmp_path: Path) -> None:
    with two_servers() as (_, worker):
        servers = worker.servers
        arguments = (77, [0], [2], None, 1 << 30)
        assert servers.call_all("take_cut", *arguments) == [False, False]
        assert servers.call_all("take_cut", *arguments) == [False, False]
        first = servers.call_all("write_cut", 77, [str(tmp_path / "t")], True, True)
        files = sorted((tmp_path / "t").rglob("*"))
        assert servers.call_all("write_cut", 77, [str(tmp_path / "t")], True, True) == first
        assert sum(rows for ((rows,), _) in first) == 40
        ids = [snapshot_id for _, (snapshot_id,) in first]
        assert len(set(ids)) == 2
        assert sorted((tmp_path / "t").rglob("*")) == files, "nothing was written twice"
        servers.call_all("release_cut", 77)
        assert servers.call_all("versions") == [[2], [2]]
        with pytest.raises(ChangesError, match="no longer has the cut"):
            servers.call_all("write_cut", 78, [str(tmp_path / "t")], True, True)
        with pytest.raises(SatrapError, match="found 2 versions; expected one of each table"):
            servers.call_all("take_cut", 79, [0], [2, 3], None, 1 << 30)
        with pytest.raises(ChangesError, match="has this version already"):
            servers.call_all("take_cut", 80, [0], [2], None, 1 << 30)


def test_parts_that_the_trainer_does_not_see_are_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = SaveCalls._part

    def elsewhere(server: SaveCalls, state: ServerState, folder: str) -> Folder:
        return part(server, state, folder.replace("here", "elsewhere"))

    with two_servers() as (_, worker):
        monkeypatch.setattr(SaveCalls, "_part", elsewhere)
        refused = "the servers wrote their parts to .*/here/t and this process does not see them: name a folder"
        with pytest.raises(SnapshotError, match=refused):
            worker.tables["t"].save(tmp_path / "here" / "t")
        with pytest.raises(SnapshotError, match=refused):
            worker.tables.take_cut().write({"t": tmp_path / "here" / "t"}, is_full=True)
        assert sorted(each.name for each in (tmp_path / "elsewhere" / "t").iterdir()) == ["0-of-2", "1-of-2"]


def test_changes_since_an_unknown_version_are_written_in_full(tmp_path: Path) -> None:
    with two_servers() as (_, worker):
        cut = worker.tables.take_cut({"t": 9})
        assert not cut.changes_known
        cut.write({"t": tmp_path / "t"}, is_full=True)
        cut = worker.tables.take_cut(cut.versions)
        assert cut.changes_known
        assert cut.write({"t": tmp_path / "changes"}, is_full=False) == {"t": 40}
