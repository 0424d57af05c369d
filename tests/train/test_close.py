"""Closing and garbage collection of embeddings and clients: nothing hangs, and no thread, socket or descriptor
leaks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import satrap.run_context
from cluster import ANYWHERE, features, running_servers, sharded_worker
from forks import in_fork
from logged import logged
from loop import batches, job, tables, train_step
from remote_worker_parts import Net, source, working, write
from rpc_parts import Calls, Served
from satrap import Deployment, Embeddings, InputError, Inputs, SnapshotError, StreamError
from satrap.config.features import Features
from satrap.data.skipped_rows import SkippedRows
from satrap.errors import ForkError, RpcError
from satrap.rpc import Client, Service
from satrap.run_context import RunContext
from satrap.train.embeddings import session_of
from waiting import DEADLINE_SECONDS, wait_until

SECONDS = 2.5  # for each round; one that hangs takes ten
OWN_THREADS = {"satrap-lease", "satrap-read", "satrap-tables", "satrap-lookups", "satrap-updates"}


def num_resources() -> tuple[int, int]:
    """Return how many threads, Python's and others, and file descriptors this process has."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def collect() -> bool:
    """Collect garbage, also of threads that have exited."""
    gc.collect()
    return True


def train_some_steps(way: str, overlap: bool, **options: Any) -> None:
    """Train a few steps, then return with a live stream or without, closed or not."""
    embeddings, model, optimizer = job(**options)
    if options.get("servers"):
        embeddings.tables.clear()  # type: ignore[union-attr]
    stream = embeddings.stream(batches(8), overlap=overlap)
    for batch in stream:
        train_step(model, optimizer, batch)
        if batch.step == 3 and way != "dropped after":
            break
    if way == "closed":
        embeddings.close()


WAYS = ("closed", "dropped in the middle", "dropped after")


@pytest.mark.parametrize(
    ("where", "num_made"),
    [("here", 6), ("shared", 6), ("servers", 12), pytest.param("servers", 50, marks=pytest.mark.draw(0))],
)
def test_many_embeddings_leak_nothing(where: str, num_made: int, tmp_path: Path) -> None:
    """Alternates with and without threads, closed, dropped at the end, or dropped with a live stream."""
    with ExitStack() as stack:
        options: dict[str, Any] = {"staleness": 2}
        if where == "servers":
            options["servers"] = [each.address for each in stack.enter_context(running_servers(2))]
        train_some_steps("closed", overlap=True, **options)  # what a process creates once
        gc.collect()
        before, began = num_resources(), time.monotonic()
        for n in range(num_made):
            if where == "shared":
                options["shared"] = tmp_path / str(n)
            train_some_steps(WAYS[n % 3], overlap=n % 2 == 0, **options)
            if n % 10 == 9:
                gc.collect()
        wait_until(lambda: collect() and num_resources() <= before)  # servers notice that callers disconnected
        assert time.monotonic() - began < SECONDS * num_made


@pytest.mark.parametrize("closes", [True, False])
def test_a_worker_stops_reading_for_a_trainer_that_exits_early(tmp_path: Path, closes: bool) -> None:
    path = write(tmp_path / "a.parquet", 12)
    with running_servers(1) as services, working() as workers:
        of = features()
        where = Deployment([services[0].address], workers=[workers[0].address])
        embeddings = Embeddings(dict(of), staleness=1, num_threads=1, deployment=where)
        model = Net(of)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in embeddings.stream(source(path)):
            model(batch).sum().backward()
            optimizer.step()
            if batch.step == 3:
                break
        (session,) = workers[0].host._sessions.values()
        assert session.readers
        del batch
        if closes:
            embeddings.close()
        del embeddings, model, optimizer
        gc.collect()
        wait_until(lambda: not session.readers)
        wait_until(lambda: collect() and not [each for each in threading.enumerate() if each.name in OWN_THREADS])


NOTEBOOK = """
import gc, sys
sys.path.insert(0, {tests!r})
from loop import batches, job, train_step

def cell(steps):
    global embeddings, model, optimizer, stream
    embeddings, model, optimizer = job(servers=sys.argv[1:], staleness=2)
    embeddings.tables.clear()
    stream = embeddings.stream(batches(20), overlap=True)
    for batch in stream:
        train_step(model, optimizer, batch)
        if batch.step == steps:
            break

cell(10)
cell(5)  # run again
del embeddings, model, optimizer, stream
gc.collect()
cell(10)  # in the middle of which the process ends
print("done", flush=True)
"""


def test_a_notebook_with_repeated_cells_exits() -> None:
    program = NOTEBOOK.format(tests=str(Path(__file__).parents[1] / "support"))
    with running_servers(1) as services:
        command = [sys.executable, "-W", "error", "-c", program, services[0].address]
        run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlap"])
def test_closing_applies_submitted_updates(overlap: bool, tmp_path: Path) -> None:
    """Closes in the middle of a stream, whose last updates wait for lookups that will not come."""
    found = []
    for closes in (True, False):
        with running_servers(2) as services:
            addresses = [service.address for service in services]
            embeddings, model, optimizer = job(servers=addresses, staleness=3, deterministic=True)
            with embeddings:
                for batch in embeddings.stream(batches(9), overlap=overlap):
                    train_step(model, optimizer, batch)
                    if batch.step == 4:
                        break
                if not closes:
                    embeddings.drain()
            assert embeddings.step == 4
            with sharded_worker(Features(tables()), addresses) as looking:
                found.append([table.stats()["updated"] for table in looking.tables.values()])
    assert found[0] == found[1] and all(found[0])


def test_closed_objects_raise() -> None:
    with running_servers(1) as services:
        embeddings, _, _ = kept = job(servers=[services[0].address])
        data = batches(3)
        looking = embeddings.eval().stream(data, overlap=True)
        next(looking)
        stream = embeddings.train().stream(data)
        next(stream)
        embeddings.close()
        embeddings.close()
        for call in (lambda: embeddings.tables, lambda: embeddings(data[0]), embeddings.counters):
            with pytest.raises(StreamError, match="are closed: create new ones"):
                call()
        with pytest.raises(StreamError, match="are closed: create new ones"):
            embeddings.stream(data)
        with pytest.raises(StreamError, match="ended when the embeddings were closed"):
            next(stream)
        with pytest.raises(StreamError, match="was closed"):
            next(looking)
    del kept


def test_the_users_own_error_is_raised() -> None:
    def fail() -> None:
        raise SnapshotError("in closing")

    for raises, error in ((True, InputError), (False, SnapshotError)):
        with pytest.raises(error), job()[0] as embeddings:
            embeddings.worker.close = fail  # type: ignore[method-assign]
            if raises:
                raise InputError("the user's")


@pytest.mark.parametrize(
    ("raised", "num_pending"),
    [(None, 0), (SystemExit(0), 0), (SystemExit(), 0), (SystemExit(1), 1), (InputError("the"), 1)],
)
def test_before_close_runs_while_connections_are_open(
    raised: BaseException | None, num_pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work runs while there are connections, but not after a block that failed: then at the end of the script."""
    rows: list[int] = []
    with running_servers(1) as services, suppress(InputError, SystemExit):
        embeddings, _, _ = job(servers=[services[0].address])
        monkeypatch.setattr(
            satrap.run_context, "_here", RunContext(rank=0, world_size=1, launch=1, servers=(services[0].address,))
        )
        monkeypatch.setattr(satrap.run_context, "_before_end", [])
        with embeddings:
            session_of(embeddings).run_before_close(lambda: rows.append(len(embeddings.tables["item"])))
            if raised is not None:
                raise raised
    assert len(rows) == 1 - num_pending
    with pytest.raises(StreamError, match="closed") if num_pending else nullcontext():
        satrap.run_context.run_exit_hooks()
    assert len(rows) == 1 - num_pending


def test_a_stream_collected_inside_a_lock_that_its_threads_need_closes() -> None:
    """A lease thread that is connecting may happen to collect an earlier stream."""
    read = threading.Event()

    def source() -> Iterator[Inputs]:
        assert read.wait(DEADLINE_SECONDS)
        yield from batches(4)

    with running_servers(1) as services:
        streams: list[Any] = [job(servers=[services[0].address], staleness=2)[0].stream(source(), overlap=True)]
        streams[0].itself = streams[0]
        (client,) = streams[0]._worker.servers.topology.clients
        with client._channels._lock:
            read.set()
            wait_until(lambda: streams[0]._pipeline._running)  # a lookup whose thread has no connection yet
            began = time.monotonic()
            streams.clear()
            gc.collect()
            assert time.monotonic() - began < 5.0
        wait_until(lambda: collect() and not [each for each in threading.enumerate() if each.name in OWN_THREADS])


def test_a_stream_collected_by_its_own_thread_closes() -> None:
    """Python collects in any thread."""
    streams: list[Any] = []
    came, closed = threading.Event(), threading.Event()

    def read() -> Iterator[Inputs]:
        try:
            yield from batches(2)
            came.wait(DEADLINE_SECONDS)
            began = time.monotonic()
            streams.clear()
            gc.collect()
            assert time.monotonic() - began < 5.0
            yield from batches(2)
        finally:
            closed.set()

    streams.append(job(staleness=2)[0].stream(read(), overlap=True))
    came.set()
    assert closed.wait(DEADLINE_SECONDS)
    wait_until(lambda: not [each.name for each in threading.enumerate() if each.name in OWN_THREADS])


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(Served(), Calls, ANYWHERE) as service:
        yield service


def test_a_call_outlives_the_callers_reference_to_its_client(service: Service) -> None:
    pending = Client(Calls, service.address).start("double", np.arange(3, dtype=np.uint64))
    gc.collect()
    np.testing.assert_array_equal(pending.result(), [0, 2, 4])
    del pending
    gc.collect()


def test_a_client_is_collected_with_its_last_call(service: Service) -> None:
    """The traceback of an error keeps both alive; no other object has the connection, whose thread has exited."""
    before = num_resources()

    def call() -> None:
        pending = Client(Calls, service.address).start("nothing")
        pending.result()
        cycle: list[object] = [pending]
        cycle.append(cycle)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    gc.collect()
    wait_until(lambda: num_resources() <= before)


def test_a_client_is_collected_with_connections_of_several_threads(service: Service) -> None:
    before = num_resources()
    clients, called, ended = [Client(Calls, service.address)], threading.Barrier(4), threading.Event()

    def call() -> None:
        clients[0].call.nothing()
        called.wait(DEADLINE_SECONDS)
        ended.wait(DEADLINE_SECONDS)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    called.wait(DEADLINE_SECONDS)
    clients.clear()
    gc.collect()
    ended.set()
    for thread in threads:
        thread.join()
    wait_until(lambda: num_resources() <= before)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_collection_in_a_fork_does_not_affect_the_parent(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork that waited for threads, which it does not have, would be killed."""
    monkeypatch.setattr("satrap.train.prefetch_pipeline._CLOSE_SECONDS", 1e6)
    kept = [Client(Calls, service.address)]
    kept[0].call.nothing()
    embeddings, _, _ = job(staleness=2)
    stream = [embeddings.stream(batches(9), overlap=True)]
    next(stream[0])

    def body() -> None:
        for call in (lambda: next(stream[0]), stream[0].drain):
            with pytest.raises(ForkError, match="started in process"):
                call()
        kept.clear()
        stream.clear()
        gc.collect()

    in_fork(body)
    kept[0].call.nothing()
    next(stream[0])
    embeddings.close()
    kept[0].close()
    with pytest.raises(RpcError, match="closed"):
        kept[0].call.nothing()


def test_a_process_exits_while_its_threads_call(tmp_path: Path) -> None:
    """The process closes the clients at its end while threads use them, which would make ZeroMQ abort."""
    (tmp_path / "sockets").mkdir(mode=0o700)
    code = (
        "import contextlib, sys, threading, warnings\n"
        "from satrap.rpc import Client\n"
        "from satrap.server.protocol import ServerCalls\n"
        "from satrap.rpc.header import Origin\n"
        "warnings.simplefilter('ignore')\n"
        "def ask():\n"
        "    with contextlib.ExitStack() as stack:\n"
        "        clients = [stack.enter_context(Client(ServerCalls, sys.argv[1])) for _ in range(8)]\n"
        "        clients[0].start('get_shard_map', Origin(), 0, deadline=0.3).wait(0)\n"
        "        began.release()\n"
        "        clients[0].call.get_shard_map(Origin(), 0)\n"
        "began = threading.Semaphore(0)\n"
        "for _ in range(8):\n"
        "    threading.Thread(target=ask, daemon=True).start()\n"
        "for _ in range(8):\n"
        "    began.acquire()\n"
    )
    for _ in range(3):
        command = [sys.executable, "-c", code, f"ipc://{tmp_path}/sockets/none"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
        assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("end", ["break", "error", "close"])
def test_rows_that_were_left_out_are_logged_when_a_loop_stops_early(end: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("user,label\n" + "1,0\n1,x\n" * 100)
    embeddings = Embeddings({"user": satrap.Table("user", dim=2)}, num_threads=1)
    embeddings.optimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
    data = satrap.CSV(str(path), label="label", batch_size=4, block_bytes=40, max_bad_rows=50)
    with logged("satrap.train", match=r"^\d+ samples? .* not trained on: \d+ malformed") as records:
        stream = embeddings.stream(data)
        with suppress(satrap.SourceError):
            for _ in stream:
                if end != "error":
                    break
        if end == "close":
            stream.close()
        del stream
        embeddings.close()
    assert len(records) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            SkippedRows(malformed=3),
            "3 samples of the source were not trained on: 3 malformed (max_bad_rows); in all passes together",
        ),
        (
            SkippedRows(no_label=1),
            "1 sample of the source was not trained on: 1 without a label; in all passes together",
        ),
    ],
)
def test_what_is_logged_of_rows_that_were_left_out(rows: SkippedRows, message: str) -> None:
    """Passes count the same rows again, so the sum may be above the file's number of rows."""
    assert str(rows) == message
