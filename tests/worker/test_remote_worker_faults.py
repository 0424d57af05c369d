"""Workers that are killed, refused and replaced, and faulty networks: every batch trains once, none is lost.

The oracle is a run with a local worker: the rows must be equal bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import satrap.worker.remote.service
from cluster import ANYWHERE, features, one_table, running_servers
from faults import killed_at_random
from logged import logged
from loop import deployed
from remote_worker_parts import (
    KillableWorker,
    drained_bits,
    dying,
    ending,
    evaluate,
    running,
    send_through,
    serving,
    source,
    train_and_note,
    working,
    write,
)
from rpc_parts import FrameProxy
from satrap import CSV, Checkpoint, Embeddings, IdColumn, LabelColumn
from satrap.cli.main import main
from satrap.config.features import Features
from satrap.config.job import Job
from satrap.errors import AttemptError, ConfigError, DeadlineError, NotReadyError, SourceError
from satrap.rpc import Service
from satrap.rpc.keys import Keys, create_keys
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.train.embeddings import session_of
from satrap.worker.remote.client import RemoteRows, WorkerConnection, remote_worker
from satrap.worker.server_group import ServerGroup

pytestmark = pytest.mark.draw(5)
each_way = pytest.mark.parametrize(
    ("overlap", "how"),
    [(False, {}), (True, {}), (True, {"staleness": 3, "deterministic": True})],
    ids=["inline", "sync", "stale"],
)


@pytest.mark.draw(1)
@each_way
def test_a_worker_killed_at_random_moments(
    tmp_path: Path, seed: int, overlap: bool, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handshakes, handshake = [], WorkerConnection.handshake

    def counted(at: WorkerConnection) -> None:
        handshakes.append(at)
        handshake(at)

    monkeypatch.setattr(WorkerConnection, "handshake", counted)
    data = source(write(tmp_path / "a.parquet", 40), shuffle=True, shuffle_blocks=2, epochs=12)
    test = source(write(tmp_path / "b.parquet", 40, seed=1))
    with running(**how) as job:
        wanted = (
            train_and_note(job, data, overlap=overlap),
            evaluate(job, test),
            drained_bits(job),
            job[0].counters().lost,
        )
    worker = KillableWorker()
    with running_servers(2) as services, ending([worker]), ExitStack() as faults:
        over: list[threading.Event] = []

        def at(now: str, number: int) -> None:
            if (now, number) == ("updated", 3):
                over.append(faults.enter_context(dying([worker], seed, 5)))

        where = {"servers": [each.address for each in services], "workers": [worker.address]}
        with running(**where, **how) as job:
            seen = train_and_note(job, data, at, overlap=overlap)
            assert len(handshakes) > 1, "it was never killed during training"
            found = seen, evaluate(job, test), drained_bits(job), job[0].counters().lost
            while not over[0].is_set():
                assert evaluate(job, test) == found[1]
            for table in job[0].tables.values():
                table.check()
    assert found == wanted


def test_servers_and_their_worker_are_killed(tmp_path: Path, seed: int) -> None:
    data = source(write(tmp_path / "a.parquet", 40), epochs=10)
    with running(staleness=2, deterministic=True) as job:
        wanted = train_and_note(job, data), drained_bits(job), job[0].counters().lost
    worker = KillableWorker()
    with killed_at_random(tmp_path, seed, 4) as (servers, _), dying([worker], seed, 3):
        where = {"servers": [each.address for each in servers], "workers": [worker.address]}
        with running(staleness=2, deterministic=True, **where) as job:
            assert (train_and_note(job, data), drained_bits(job), job[0].counters().lost) == wanted


@pytest.mark.draw(4)
@each_way
@pytest.mark.parametrize("moment", ["looked up", "updated"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_restarted_worker(tmp_path: Path, moment: str, overlap: bool, how: dict[str, Any], accumulate: int) -> None:
    """After many batches, at one moment of the trainer's loop."""
    data = source(write(tmp_path / "a.parquet", 12), shuffle=True, shuffle_blocks=2, epochs=2)
    with running(**how) as job:
        wanted = (
            train_and_note(job, data, overlap=overlap, accumulate=accumulate),
            drained_bits(job),
            job[0].counters().lost,
        )
    with running_servers(2) as services, working() as (worker,):

        def at(now: str, number: int) -> None:
            if now == moment and number % 5 in (0, 1):
                worker.restart()

        with running(servers=[each.address for each in services], **how) as job:
            send_through(job[0], worker.address)
            found = (
                train_and_note(job, data, at, overlap=overlap, accumulate=accumulate),
                drained_bits(job),
                job[0].counters().lost,
            )
    assert found == wanted


@each_way
def test_a_stream_closed_while_it_is_read_is_reopened(tmp_path: Path, overlap: bool, how: dict[str, Any]) -> None:
    data = source(write(tmp_path / "a.parquet", 40))
    with running(**how) as job:
        wanted = train_and_note(job, data, overlap=overlap), drained_bits(job)
    with serving(2) as (where, (worker,)):

        def at(now: str, number: int) -> None:
            for session in worker.host._sessions.values():
                for stream, reader in list(session.readers.items()) if number % 4 == 0 and number < 30 else ():
                    reader.close()
                    with pytest.raises(NotReadyError, match="closed here"):
                        reader.batch(1000)
                    del session.readers[stream]

        with running(**where, **how) as job:
            assert (train_and_note(job, data, at, overlap=overlap), drained_bits(job)) == wanted


@pytest.mark.parametrize("server", [0, 1])
def test_a_worker_killed_during_an_update(tmp_path: Path, server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was applied, and after everything was: the update is retried, with batches read again."""
    data = source(write(tmp_path / "a.parquet", 10))
    with running() as job:
        wanted = train_and_note(job, data, accumulate=2), drained_bits(job)
    update, died = satrap.worker.remote.service._update, []
    with serving(2) as (where, (worker,)):

        def dies(remote: Any, batches: Any, step: int, *rest: Any) -> None:
            first = step not in died
            died.append(step)
            if not first or server:
                update(remote, batches, step, *rest)
            if first:
                sessions = worker.host._sessions.values()
                for session in sessions:
                    for reader in session.readers.values():
                        reader.close()
                    session.readers.clear()
                raise NotReadyError("killed")

        monkeypatch.setattr(satrap.worker.remote.service, "_update", dies)
        with running(**where) as job:
            assert (train_and_note(job, data, accumulate=2), drained_bits(job)) == wanted
            repeated = sum(table.stats()["repeated"] for table in job[0].tables.values())
    assert len(died) == 2 * len(set(died)) and (repeated > 0) == bool(server)


def test_a_worker_that_does_not_return(tmp_path: Path) -> None:
    """The waiting call fails with the worker's address; the checkpoint is resumed with another worker."""
    data = source(write(tmp_path / "a.parquet", 16), shuffle=True, shuffle_blocks=2)
    with running() as job:
        wanted = train_and_note(job, data), drained_bits(job)
    seen: list[Any] = []
    with running_servers(2) as services, working(2) as workers:
        for worker in workers:
            with running(servers=[each.address for each in services]) as job:
                send_through(job[0], worker.address, 1.0)
                run = Checkpoint(tmp_path / "run", job[1], job[2], job[0], data)
                if run.resume():
                    seen += train_and_note(job, data, first=7)
                    assert seen == wanted[0][6:]
                    assert drained_bits(job) == wanted[1]
                    break

                def at(now: str, number: int, run: Any = run, worker: Any = worker) -> None:
                    if (now, number) == ("updated", 6):
                        run.save()
                    if (now, number) == ("looked up", 9):
                        worker.close()

                with pytest.raises(DeadlineError, match=f"at {worker.address}: "):
                    train_and_note(job, data, at, overlap=False)
    assert len(seen) == 10


@pytest.mark.parametrize(
    ("drop", "repeat", "hold"), [(0.1, 0.0, 0.0), (0.0, 0.5, 0.5), (0.05, 0.2, 0.2)], ids=["lossy", "doubling", "bad"]
)
def test_a_faulty_network_between_trainer_and_worker(
    tmp_path: Path, seed: int, drop: float, repeat: float, hold: float
) -> None:
    data = source(write(tmp_path / "a.parquet", 12), shuffle=True, shuffle_blocks=2, epochs=3)
    with running(staleness=2, deterministic=True) as job:
        wanted = train_and_note(job, data, accumulate=2), drained_bits(job), job[0].counters().lost
    with ExitStack() as stack:
        services = stack.enter_context(running_servers(2))
        (worker,) = stack.enter_context(working())
        proxy = stack.enter_context(FrameProxy(worker.address, seed, drop, repeat, hold))
        job = stack.enter_context(running(staleness=2, deterministic=True, servers=[each.address for each in services]))
        send_through(job[0], proxy.address)
        assert (train_and_note(job, data, accumulate=2), drained_bits(job), job[0].counters().lost) == wanted


def test_rows_that_are_left_out_are_counted_once(tmp_path: Path) -> None:
    """Independently of how often they are read."""
    path = tmp_path / "a.csv"
    labels = ["x" if i % 11 == 0 else "" if i % 13 == 0 else "7" if i % 17 == 0 else "1" for i in range(400)]
    lines = [f"{i % 50},{i % 3},{label}" for i, label in enumerate(labels)]
    path.write_text("\n".join(["id,age,click", *lines]))
    data = CSV(
        str(path),
        dense="age",
        label=LabelColumn("click", missing="drop"),
        ids={"id": IdColumn(kind="integer")},
        batch_size=16,
        block_bytes=500,
        max_bad_rows=100,
        drop_last=True,
        epochs=2,
    )
    malformed, no_label = labels.count("x") + labels.count("7"), labels.count("")
    left_over = 2 * ((len(labels) - malformed - no_label) % 16)
    found = []
    with serving() as (addresses, (worker,)):
        for where in ({}, addresses):
            embeddings = Embeddings(dict(one_table()), num_threads=1, **deployed(where))
            model = torch.nn.Linear(3, 1)
            optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            seen = []
            with (
                logged("satrap.train", match=f"samples of the source were not trained on: .*{left_over} in short last"),
                embeddings.stream(data, overlap=False) as stream,
            ):
                for number, batch in enumerate(stream):
                    model(torch.cat([batch.dense, batch.embeddings], 1)).sum().backward()
                    if where and number % 4 == 1:
                        worker.restart()
                    optimizer.step()
                    if where and number % 4 == 3:
                        worker.restart()
                    seen.append((batch.position, embeddings.counters().lost))
            found.append((seen, embeddings.counters().lost))
        assert isinstance(embeddings.worker.rows, RemoteRows)
        embeddings.worker.close()
    assert found[0] == found[1], "a label of 7 is malformed, with a remote worker, too"
    assert found[0][1] == {"rows/malformed": 2 * malformed, "rows/no_label": 2 * no_label, "rows/short": left_over}


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_file_that_the_worker_does_not_have(tmp_path: Path) -> None:
    with serving() as (where, (worker,)), running(**where) as job:
        message = f"^the worker at {worker.address} cannot read the source: {tmp_path}/none.parquet.* no such file"
        with pytest.raises(SourceError, match=message):
            train_and_note(job, source(tmp_path / "none.parquet"))
        run = Checkpoint(tmp_path / "run", job[1], job[2], job[0], source(tmp_path / "none.parquet"))
        with pytest.raises(SourceError, match=message):
            run.save()
        path = write(tmp_path / "a.parquet", 8)
        with pytest.raises(
            SourceError, match=f"the worker at {worker.address} cannot read the source: .*has no column"
        ):
            job[0].stream(source(path).replace(dense="height"))
        assert len(train_and_note(job, source(path))) == 8

        def cut(_: str, number: int) -> None:
            if number == 1:
                worker.restart()
                path.write_bytes(b"PAR1")

        with pytest.raises(SourceError, match=f"^the worker at {worker.address} cannot read the source: {path}"):
            train_and_note(job, source(path), cut)


def test_another_job_is_refused_field_by_field() -> None:
    of = one_table()
    bag, wide = Features({"id": of.tables[0].bag("mean")}), one_table(dim=3)
    with ExitStack() as stack:
        (service,) = stack.enter_context(running_servers(1))
        (other,) = stack.enter_context(running_servers(1))
        (worker,) = stack.enter_context(working())
        first = stack.enter_context(far(of, service, worker))
        attempt = first.servers.attempt
        for features, at, told in (
            (bag, service, "feature 'id', pooling: 'mean' here, 'sum' there"),
            (of, other, f"servers: .'{other.address}'.* here, .'{service.address}'.* there"),
        ):
            with pytest.raises(ConfigError, match=f"the worker belongs to another job: {told}"):
                stack.enter_context(far(features, at, worker, attempt=attempt))
        with pytest.raises(ConfigError, match="table 't', dim: 3 here, 2 there"):
            stack.enter_context(far(wide, other, worker, attempt=attempt + 1))
        with pytest.raises(ConfigError, match="seed: 1 here, 0 there"):
            stack.enter_context(far(of, other, worker, attempt=attempt + 1, seed=1))
        first.connection.handshake()  # the first trainer's session still exists
        stack.enter_context(far(bag, other, worker, attempt=attempt + 1))
        with pytest.raises(AttemptError, match=f"attempt {attempt}; expected the worker.s, {attempt + 1}"):
            first.connection.handshake()


@contextmanager
def far(of: Features, service: Any, worker: Any, seed: int = 0, **options: Any) -> Iterator[Any]:
    servers = ServerGroup(Job(tables=of.tables, seed=seed), [service.address], **options)
    try:
        rows: Any = remote_worker(of, servers, worker.address, num_threads=1).rows
        yield rows
        rows.connection.close()
    finally:
        servers.close()


def test_a_replaced_trainer_reads_no_more(tmp_path: Path) -> None:
    """A trainer that starts a new attempt, by a restore, continues."""
    data = source(write(tmp_path / "a.parquet", 12))
    with serving() as (where, (worker,)), running(**where) as old, running(**where) as new:
        seen = train_and_note(new, data)
        with pytest.raises(AttemptError, match="this process was replaced"):
            train_and_note(old, data)
        new[0].tables.clear()  # type: ignore[union-attr]
        session_of(new[0]).resume_at(0, data, None)
        with running() as alone:
            assert len(seen) == len(train_and_note(new, data)) == len(train_and_note(alone, data))
        assert len(worker.host._sessions) == 1 and not worker.host._sessions[0].readers


def test_servers_that_were_started_empty(tmp_path: Path) -> None:
    """At the same address: their attempts start at 1, and the worker has seen later ones."""
    data = source(write(tmp_path / "a.parquet", 4))
    with working() as (worker,):
        address, numbers = ANYWHERE, []
        for times in (3, 1):
            with Service(Server(num_threads=1), ServerCalls, address) as service:
                address = service.address
                for _ in range(times):
                    with running(servers=[address], workers=[worker.address]) as job:
                        assert isinstance(job[0].worker.rows, RemoteRows)
                        job[0].tables.clear()  # type: ignore[union-attr]
                        assert len(train_and_note(job, data)) == 4
                numbers.append(worker.host._attempt)
    assert numbers == [6, 2]


def test_a_worker_that_was_suspended_and_replaced(tmp_path: Path) -> None:
    """It resumes with an update of the older attempt in flight, which the servers refuse."""
    data = source(write(tmp_path / "a.parquet", 12))
    worker = KillableWorker()
    with (
        ending([worker]),
        running_servers(1) as services,
        working() as (replacing,),
        running(servers=[services[0].address], workers=[worker.address]) as old,
        ThreadPoolExecutor(1) as pool,
    ):
        stream = old[0].stream(data, overlap=False)
        old[1](next(stream)).sum().backward()
        worker.stop()
        stepping = pool.submit(old[2].step)
        with running(servers=[services[0].address], workers=[replacing.address]) as new, running() as alone:
            new[0].tables.clear()  # type: ignore[union-attr]
            found = train_and_note(new, data), drained_bits(new)
            worker.resume()
            assert isinstance(stepping.exception(), AttemptError)
            assert found == (train_and_note(alone, data), drained_bits(alone)) and drained_bits(new) == found[1]
        stream.close()
        assert stream.counters().lost == {"batches/failed": 1}, "and step() has said so"


# -- the command -------------------------------------------------------------------------------------------------------


def test_keys(tmp_path: Path) -> None:
    """A worker is a server for trainers, and a client of servers."""
    create_keys(tmp_path / "keys")
    create_keys(tmp_path / "others")
    data = source(write(tmp_path / "a.parquet", 4))
    key = tmp_path / "keys" / "server.key"
    worker, client = KillableWorker("--keys", str(key)), tmp_path / "keys" / "client.key"
    with (
        ending([worker]),
        Service(Server(num_threads=1), ServerCalls, "tcp://127.0.0.1:0", Keys.read(key)) as service,
    ):
        with running(servers=[service.address], workers=[worker.address], keys=client) as job:
            assert len(train_and_note(job, data)) == 4
        of, others = features(), Keys.read(tmp_path / "others" / "client.key")
        servers = ServerGroup(Job(tables=of.tables), [service.address], keys=Keys.read(client))
        with pytest.raises(DeadlineError, match="no connection"):
            remote_worker(of, servers, worker.address, keys=others, deadline=1.0)
        servers.close()


def test_a_worker_without_the_other_key_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_keys(tmp_path)
    (tmp_path / "client.key").unlink()
    assert main(["worker", "--listen", "tcp://127.0.0.1:0", "--keys", str(tmp_path / "server.key")]) == 1
    assert f"{tmp_path / 'client.key'}: the key cannot be read" in capsys.readouterr().err
