"""Reading rows that another process trains: a Reader changes nothing, and does not replace a trainer by accident."""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bag_oracle import draw_bags
from child_processes import silent_server
from cluster import features, running_servers, server_processes
from contents import IDS, bits
from loop import NUM_IDS, batches, job, tables, train, train_step
from satrap import (
    AttemptError,
    Checkpoint,
    CheckpointError,
    ConfigError,
    DeadlineError,
    Deployment,
    Embeddings,
    InputError,
    NotReadyError,
    Reader,
    SatrapError,
    Store,
    StreamError,
    Table,
)
from satrap.config.features import Features
from satrap.config.job import Job
from satrap.server.lease import LEASE_SECONDS, Leases
from satrap.server.migration.coordinator import Migration
from satrap.worker.reader_servers import ReaderServers
from satrap.worker.server_group import ServerGroup
from waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
EVERY = np.arange(NUM_IDS + 5, dtype=np.uint64)  # some of the ids have no row


@contextmanager
def trained(num_servers: int, path: Path) -> Iterator[tuple[Embeddings, list[str] | None]]:
    """Yield embeddings with every kind of pooling, after some steps and a save."""
    with ExitStack() as stack:
        addresses = (
            [each.address for each in stack.enter_context(running_servers(num_servers))] if num_servers else None
        )
        embeddings = stack.enter_context(Embeddings(dict(features()), num_threads=1, deployment=Deployment(addresses)))
        width = embeddings.features.total_dim
        model = torch.nn.Linear(width, 1)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        rng = np.random.default_rng(0)
        for batch in embeddings.stream([draw_bags(rng, embeddings.features, 9).inputs() for _ in range(5)]):
            (model(batch.embeddings).sum() + batch["path"].values.sum()).backward()
            optimizer.step()
        Checkpoint(path / "run", model, optimizer, embeddings).save()
        yield embeddings, addresses


@pytest.mark.parametrize(
    ("opened", "num_servers"), [("servers", 2), *((opened, n) for opened in ("folder", "url") for n in (0, 2))]
)
def test_it_reads_all_rows_and_changes_nothing(num_servers: int, opened: str, tmp_path: Path) -> None:
    with trained(num_servers, tmp_path) as (embeddings, addresses):
        before = {name: table.stats() for name, table in embeddings.tables.items()}
        # Another order of the tables.
        of = dict(sorted(features().items(), key=lambda each: each[1].table.name, reverse=True))
        path = {"servers": None, "folder": str(tmp_path / "run"), "url": f"local://{tmp_path}/run"}[opened]
        servers = addresses[1:] if opened == "servers" and addresses else None
        with Reader(path, of, servers=servers, num_threads=2) as reader:
            assert reader.features is not None and reader.features.names == embeddings.features.names
            assert list(reader.tables) == list(embeddings.tables) and reader.step == 5
            for name, table in embeddings.tables.items():
                found = reader.tables[name]
                assert (found.table, len(found), found.dim) == (table.table, len(table), table.table.dim)
                ids = np.arange(100, dtype=np.uint64)
                np.testing.assert_array_equal(reader.lookup(name, ids), table.lookup(ids, train=False))
                for part, expected in zip(found.read(IDS), table.read(IDS), strict=True):
                    np.testing.assert_array_equal(part, expected)
            assert reader.version == max(table.version for table in embeddings.tables.values())
            inputs = draw_bags(np.random.default_rng(1), embeddings.features, 7).inputs()
            mine, theirs = reader(inputs), embeddings(inputs)
            assert torch.equal(mine.embeddings, theirs.embeddings) and not mine.embeddings.requires_grad
            assert torch.equal(mine["path"].values, theirs["path"].values)
            (streamed,) = reader.stream([inputs], overlap=True)
            assert torch.equal(streamed.embeddings, mine.embeddings)
            assert {name: each["rows"] for name, each in reader.stats().items()} == {
                name: each["rows"] for name, each in before.items()
            }
        assert {name: table.stats() for name, table in embeddings.tables.items()} == before


def test_a_subset_of_the_features(tmp_path: Path) -> None:
    with trained(0, tmp_path) as (embeddings, _):
        inputs = draw_bags(np.random.default_rng(1), embeddings.features, 7).inputs()
        expected = embeddings(inputs)
        at = list(embeddings.features.names).index("tiny")
        assert inputs.offsets is not None
        begin, end = inputs.offsets[7 * at], inputs.offsets[7 * at + 7]
        part = type(inputs)(
            names=("tiny",),
            batch_size=7,
            values=inputs.values[begin:end],
            offsets=inputs.offsets[7 * at : 7 * at + 8] - begin,
        )
        with Reader(tmp_path / "run", {"tiny": features()["tiny"]}) as reader:
            assert torch.equal(reader(part).embeddings, expected["tiny"])


def test_a_snapshot_of_one_table(tmp_path: Path) -> None:
    table = Table("t", dim=3, absent="zeros")
    store = Store(table, num_threads=1)
    rows = store.lookup(EVERY[:10])
    store.save(tmp_path / "t")
    with Reader(tmp_path / "t") as reader:
        np.testing.assert_array_equal(reader.lookup("t", EVERY[:10]), rows)
        with pytest.raises(ConfigError, match="is the snapshot of a table; expected the folder of a run"):
            reader.load_model(torch.nn.Linear(1, 1))
        assert not reader.lookup("t", EVERY[10:]).any() and len(reader.tables["t"]) == 10


def train_until(embeddings: Embeddings, model: Any, optimizer: Any, data: Any, last: int) -> None:
    for batch in embeddings.stream(data):
        train_step(model, optimizer, batch)
        if batch.step == last:
            break


def check_reads(reader: Reader | None, embeddings: Embeddings, data: Any) -> None:
    """Check that the reader sees what the trainer sees."""
    if reader is not None:
        for name, table in embeddings.tables.items():
            np.testing.assert_array_equal(reader.lookup(name, EVERY), table.lookup(EVERY, train=False))
        assert torch.equal(reader(data[0]).embeddings, embeddings(data[0]).embeddings)


def test_it_follows_a_run_through_restarts_migrations_and_resumes(tmp_path: Path) -> None:
    """A server is killed and restarted, buckets migrate, the run resumes its checkpoint; and the reader does not change
    the trainer's result."""
    data, found = batches(12), []
    for with_reader in (False, True):
        with server_processes(tmp_path, 3) as servers, ExitStack() as stack:
            addresses = [each.address for each in servers]
            embeddings, model, optimizer = trainer = job(servers=addresses[:2])
            stack.enter_context(embeddings)
            run = Checkpoint(tmp_path / str(with_reader), model, optimizer, embeddings, data)
            train_until(*trainer, data, 3)
            run.save()
            reader = stack.enter_context(Reader(None, tables(), servers=addresses[:1])) if with_reader else None
            check_reads(reader, embeddings, data)
            servers[1].kill()
            servers[1].restart()
            if reader is not None:
                reader.lookup("item", EVERY)  # no client has called that server since its restart
            check_reads(reader, embeddings, data)
            Migration(addresses[:2], addresses[1:], pause_ratio=0.0).run()
            check_reads(reader, embeddings, data)
            train_until(*trainer, data, 6)
            check_reads(reader, embeddings, data)
            assert run.resume()
            check_reads(reader, embeddings, data)
            assert embeddings.step == 3 and (reader is None or reader.step == 3)
            train_until(*trainer, data, 8)
            check_reads(reader, embeddings, data)
            found.append(bits(embeddings, model))
    assert found[0] == found[1]


def run_second_process(what: str, address: str, pipe: Any) -> None:
    """Run a second process with the same script."""
    try:
        embeddings, model, optimizer = job(servers=[address], take_over=what == "take over")
        if what == "look":
            embeddings.eval()
            for batch in embeddings.stream(batches(3)):
                model(batch.dense, batch.embeddings)
            pipe.send(f"saw {len(embeddings.tables['item'])}")
        else:
            embeddings.tables.clear()  # type: ignore[union-attr]
            train(embeddings, model, optimizer, batches(3))
            pipe.send("trained")
        pipe.recv()
        embeddings.close()
    except SatrapError as error:
        pipe.send(f"{type(error).__name__} {error}")


class SecondProcess:
    """A forked process that runs `run_second_process`."""

    def __init__(self, what: str, address: str) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=run_second_process, args=(what, address, theirs))
        self.process.start()

    def __enter__(self) -> SecondProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_SECONDS)

    def end(self) -> None:
        """Make the process close its embeddings and exit."""
        self.pipe.send("end")
        self.process.join(DEADLINE_SECONDS)
        assert self.process.exitcode == 0

    def message(self) -> str:
        assert self.pipe.poll(DEADLINE_SECONDS)
        return str(self.pipe.recv())


def test_it_waits_for_a_server_that_lost_its_job(tmp_path: Path) -> None:
    with server_processes(tmp_path, 2) as servers, ExitStack() as stack:
        addresses = [each.address for each in servers]
        embeddings, model, optimizer = job(servers=addresses)
        stack.enter_context(embeddings)
        train_until(embeddings, model, optimizer, batches(3), 3)
        reader = stack.enter_context(Reader(servers=addresses))
        impatient = ReaderServers(addresses, deadline=0.5)
        stack.callback(impatient.close)
        servers[1].kill()
        servers[1].shared.unlink()
        servers[1].restart()
        with pytest.raises(NotReadyError, match=f"{addresses[1]} was restarted, and no trainer has given it"):
            _ = impatient.newest_step
        later = stack.enter_context(ThreadPoolExecutor(1)).submit(lambda: reader.step)
        assert wait([later], 0.2).not_done
        with pytest.raises(AttemptError, match="restarted without its rows"):
            embeddings.tables["item"].stats()
        assert later.result(DEADLINE_SECONDS) == 3


def test_one_of_several_servers_may_not_reply() -> None:
    with running_servers(2) as services, ExitStack() as stack:
        known, empty = (each.address for each in services)
        (_, first), (_, second) = (stack.enter_context(silent_server()) for _ in range(2))
        embeddings, model, optimizer = job(servers=[known])
        stack.enter_context(embeddings)
        train_until(embeddings, model, optimizer, batches(2), 2)
        reading = ReaderServers([first, empty, known], deadline=1.5)
        stack.callback(reading.close)
        assert (reading.addresses, reading.newest_step) == ((known,), 2)
        with pytest.raises(DeadlineError, match=f"{first}: .*; {empty} has no job yet; .*{second}: "):
            ReaderServers([first, empty, second], deadline=1.5)


@pytest.mark.parametrize("opened", ["servers", "folder"])
def test_closing_a_reader_closes_its_streams(opened: str, tmp_path: Path) -> None:
    with trained(1, tmp_path) as (embeddings, addresses):
        path, servers = (None, addresses) if opened == "servers" else (tmp_path / "run", None)
        reader = Reader(path, features(), servers=servers)
        inputs = [draw_bags(np.random.default_rng(n), embeddings.features, 7).inputs() for n in range(9)]
        streams = [reader.stream(inputs, overlap=overlap) for overlap in (False, True)]
        for each in streams:
            next(each)
        reader.close()
        for each in streams:
            with pytest.raises(StreamError, match="ended when its Reader was closed"):
                next(each)
        assert not [each.name for each in threading.enumerate() if each.name.startswith("satrap-read")]
        for call in (lambda: reader.step, lambda: reader.version, reader.stats):
            with pytest.raises(StreamError, match="this Reader is closed"):
                call()


def test_a_second_process_may_read_and_trains_only_with_take_over() -> None:
    with running_servers(1) as services, ExitStack() as stack:
        address = services[0].address
        embeddings, model, optimizer = job(servers=[address])
        stack.enter_context(embeddings)
        train(embeddings, model, optimizer, batches(5))
        assert stack.enter_context(SecondProcess("look", address)).message() == "saw 30"
        refused = r"AttemptError process \d+ on .* is training on these servers.*satrap\.Reader.*take_over=True"
        assert re.match(refused, stack.enter_context(SecondProcess("train", address)).message())
        train(embeddings, model, optimizer, batches(5))
        with Reader(servers=[address]) as reader:
            assert stack.enter_context(SecondProcess("take over", address)).message() == "trained"
            with pytest.raises(AttemptError, match="this process was replaced"):
                train(embeddings, model, optimizer, batches(5))
            assert reader.step == 3 and len(reader.lookup("item", EVERY)) == len(EVERY)


def test_a_killed_trainer_is_replaced_within_seconds_and_a_closed_one_at_once() -> None:
    with running_servers(1) as services:
        seconds = []
        for ending in (SecondProcess.kill, SecondProcess.end, SecondProcess.end):
            began = time.monotonic()
            with SecondProcess("train", services[0].address) as trainer:
                assert trainer.message() == "trained"
                seconds.append(time.monotonic() - began)
                ending(trainer)
        assert seconds[1] > LEASE_SECONDS / 2  # it waited for the first trainer's lease to expire
        assert seconds[1] - seconds[2] > LEASE_SECONDS / 2


@pytest.mark.parametrize("launches", [(1, 2), (0, 1)])
def test_a_later_launch_replaces_an_earlier_one_at_once(launches: tuple[int, int]) -> None:
    def open_(launch: int) -> ServerGroup:
        return ServerGroup(Job(tables=Features(tables()).tables), [services[0].address], launch=launch)

    with running_servers(1) as services:
        parent, child = multiprocessing.Pipe()

        def hold() -> None:
            servers = open_(launches[0])
            child.send("started")
            child.recv()
            servers.close()

        process = multiprocessing.get_context("fork").Process(target=hold)
        process.start()
        try:
            assert parent.poll(DEADLINE_SECONDS)
            began = time.monotonic()
            open_(launches[1]).close()
            assert time.monotonic() - began < LEASE_SECONDS / 2
        finally:
            process.kill()
            process.join(DEADLINE_SECONDS)


def test_the_same_process_replaces_itself() -> None:
    """A notebook cell runs again while its variables still refer to the earlier objects."""
    with running_servers(1) as services:
        kept = []
        for _ in range(2):
            kept.append(job(servers=[services[0].address]))
            kept[-1][0].tables.clear()  # type: ignore[union-attr]
            train(*kept[-1], batches(2))
        with pytest.raises(AttemptError, match="this process was replaced"):
            train(*kept[0], batches(2))
        for embeddings, _, _ in kept:
            embeddings.close()


def test_leases() -> None:
    leases = Leases()
    leases.renew(3, "a", "here", 50.0)
    leases.renew(3, "b", "there", 0.0)
    assert leases.remaining().keys() == {"a"} and leases.remaining()["a"][0] == "here"
    leases.renew(5, "c", "there", 50.0)
    leases.renew(3, "a", "here", 500.0)  # a replaced trainer
    assert float(leases.remaining()["a"][1]) <= 50.0
    leases.renew(5, "c", "there", 0.0)
    assert leases.remaining().keys() == {"a"}


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    wrong = {"item": Table("item", dim=6)}
    with pytest.raises(ConfigError, match="either the path of a folder or servers"):
        Reader()
    with pytest.raises(ConfigError, match="either the path of a folder or servers"):
        Reader(tmp_path, servers=["tcp://127.0.0.1:1"])
    with pytest.raises(ConfigError, match=r"Reader: path is '' \(str\); expected a path or a URL"):
        Reader("")
    with pytest.raises(ConfigError, match="keys are for servers"):
        Reader(tmp_path, keys="client.key")
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a snapshot"):
        Reader(tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        Reader(tmp_path / "none")
    with (
        running_servers(1) as services,
        pytest.raises(NotReadyError, match="has a job yet: start a trainer on them first"),
    ):
        Reader(servers=[services[0].address])
    with trained(2, tmp_path) as (embeddings, addresses):
        assert addresses is not None
        for path, servers in ((tmp_path / "run", None), (None, addresses)):
            with pytest.raises(ConfigError, match="configured differently: table 'item', dim: 6 here, 5 there"):
                Reader(path, wrong, servers=servers)
            with pytest.raises(ConfigError, match="no table 'itme' here; the nearest known one is 'item'"):
                Reader(path, {"item": Table("itme", dim=5)}, servers=servers)
            reader = Reader(path, servers=servers)
            if servers:
                with pytest.raises(
                    ConfigError, match=r"have rows only; the dense parameters are in the run's checkpoints"
                ):
                    reader.load_model(torch.nn.Linear(1, 1))
            inputs = draw_bags(np.random.default_rng(1), embeddings.features, 7).inputs()
            with pytest.raises(ConfigError, match="has no features"):
                reader(inputs)
            with pytest.raises(InputError, match=r"no table 'itme' in .*; the nearest known one is 'item'"):
                reader.lookup("itme", IDS)
            reader.close()
            reader.close()
            with pytest.raises(StreamError, match="is closed: create a new one"):
                reader(inputs)
            with pytest.raises(StreamError, match="is closed: create a new one"):
                reader.lookup("item", IDS)
