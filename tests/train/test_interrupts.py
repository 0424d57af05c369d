"""Signals at every moment of a training loop that then continues, as in a notebook: every batch that a backward pass
has reached is applied exactly once or counted as lost; nothing hangs, and every error has a message. The signal is
Ctrl-C, or another one with a handler that raises: a timeout, or a scheduler that ends the job.

Rows are counted: each batch has its own ids, gradients of 1 and SGD with lr 1, so a row is minus the number of its
updates. The test tries each moment of each call, one after another, in one job that continues throughout.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cluster import ANYWHERE, batch, one_table, running_servers, sharded_worker
from contents import contents
from interrupts import Interrupts, no_hang, raising
from loop import batches, job, train_step
from remote_worker_parts import send_through, working
from rpc_parts import Calls, Served
from satrap import SGD, Deployment, Embeddings, Parquet, Table, Zeros
from satrap.errors import InputError, StreamError
from satrap.interrupts import Uninterrupted
from satrap.rpc import Client, Service
from satrap.train import training_watch
from satrap.train.embeddings import session_of
from waiting import DEADLINE_SECONDS

BATCH, NUM_BATCHES = 4, 5
CALLS = ("next", "step", "drop", "drain", "pause", "close")


class Stop(BaseException):
    """Raised by a handler; no code of a library expects it."""


SIGNALS: dict[int, BaseException] = {
    signal.SIGINT: KeyboardInterrupt(),
    signal.SIGALRM: TimeoutError("too late"),  # an OSError, too
    signal.SIGTERM: SystemExit(3),
    signal.SIGUSR1: Stop(),
    signal.SIGRTMAX: InputError("stop"),  # as if an update was refused
}
each_signal = pytest.mark.parametrize("number", SIGNALS, ids=lambda each: signal.Signals(each).name)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of batches that share no ids; a column identifies the batch of a row."""
    file = tmp_path_factory.mktemp("interrupts") / "rows.parquet"
    ids = np.arange(BATCH * NUM_BATCHES, dtype=np.uint64)
    pq.write_table(pa.table({"id": ids, "batch": ids // BATCH}), file)
    return file


@contextmanager
def embeddings_over(rows: str, staleness: int) -> Iterator[Embeddings]:
    """Return embeddings with rows here, on two servers, or on servers behind a worker in another process."""
    table = Table("t", dim=2, optimizer=SGD(lr=1.0), initial=Zeros(), num_buckets=8)
    with ExitStack() as stack:
        how: dict[str, Any] = {"staleness": staleness, "num_threads": 1}
        if rows != "local":
            how["deployment"] = Deployment([each.address for each in stack.enter_context(running_servers(2))])
        made = Embeddings({"id": table}, **how)
        if rows == "worker":
            send_through(made, stack.enter_context(working())[0].address)
        stack.callback(made.worker.close)
        yield made


_ENDED = (
    "interrupted while its source read",
    "was closed",
    "another training stream started",  # its start was interrupted, so the loop has the earlier one
)


class Loop:
    """A notebook's loop: an interrupted call is retried, its batch is dropped, or a new stream is started."""

    def __init__(
        self, embeddings: Embeddings, path: Path, overlap: bool, rng: np.random.Generator, number: int = signal.SIGINT
    ) -> None:
        self._embeddings, self._overlap, self._rng, self._number = embeddings, overlap, rng, number
        self._source = Parquet(str(path), batch_size=BATCH, extra="batch", num_threads=1)
        self._optimizer = embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
        self._seen = np.zeros(NUM_BATCHES, np.int64)  # how often a backward pass reached each batch
        self._unseen = 0  # interrupts of next(): its batch may be looked up but never reach the user
        self._at, self._which = 0, ""
        self._came: bool | None = None
        self._begin()

    def round(self, which: str, at: int) -> bool | None:
        """Run one step with an interrupt at the n-th moment of the call of that name; return whether it came, or None
        if there was no such call in this round."""
        self._which, self._at, self._came = which, at, None
        self.step()
        self.check(self._unseen)
        return self._came

    def step(self) -> None:
        """Run one step as a cell that is run again does, whatever call was interrupted before."""
        self._do("zero_grad", self._optimizer.zero_grad)
        batch = self._do("next", self._next)
        if batch is None:
            self._do("close", self._stream.close)
            self._begin()
            batch = self._next()
        number = int(batch.inputs.extra["batch"][0].as_py())
        try:
            loss = batch.embeddings.sum()
        except StreamError as error:  # the traceback still holds the batch of an interrupted round
            assert "its batch cannot be used yet" in str(error)
            self._begin()
            return
        with Uninterrupted():  # else the test could not tell whether a loss reached it
            loss.backward()
            self._seen[number] += 1
        if self._which == "drop" or self._seen.sum() % 7 == 0:
            self._do("drop", self._optimizer.zero_grad)
        else:
            self._do("step", self._optimizer.step)
        self._do("drain", self._embeddings.drain)
        self._do("pause", self._pause)

    def end(self) -> None:
        self._stream.close()

    def _begin(self) -> None:
        self._stream = self._embeddings.stream(self._source, overlap=self._overlap)

    def _pause(self) -> None:
        """Do what a checkpoint does around its save."""
        with session_of(self._embeddings).pause():
            pass

    def _next(self) -> Any:
        try:
            return next(self._stream, None)
        except StreamError as error:
            assert any(why in str(error) for why in _ENDED), error
            return None

    def _do(self, name: str, call: Callable[[], Any]) -> Any:
        """Return what the call returns, and interrupt it."""
        if name != self._which or self._came is not None:
            return call()
        interrupts, error = Interrupts(self._at, self._number), SIGNALS[self._number]
        try:
            with raising(self._number, error), interrupts:
                return call()
        except type(error) as raised:
            assert raised is error
            self._unseen += name == "next"
            again = int(self._rng.integers(3))
            if again == 0:
                self._optimizer.zero_grad()
            elif again == 1:
                self._begin()
            return call() if again == 2 or name == "next" else None
        finally:
            self._came = interrupts.came

    def check(self, unseen: int) -> None:
        """Check that every batch with a loss was applied once or counted as lost. unseen: how many batches may be
        counted in addition, because they were looked up and an interrupt kept them from the user."""
        self._embeddings.drain()
        rows = self._embeddings.tables["t"].read(np.arange(BATCH * NUM_BATCHES, dtype=np.uint64)).values
        applied = -rows.reshape(NUM_BATCHES, -1)
        assert (applied == applied[:, :1]).all(), f"batches that are partly applied: {applied}"
        missing = self._seen - applied[:, 0]
        lost = self._embeddings.counters().lost
        assert (missing >= 0).all(), f"applied more often than stepped: {-missing}"
        assert missing.sum() <= sum(lost.values()) <= missing.sum() + unseen, f"missing {missing}, lost {lost}"


@pytest.mark.draw(6)
@pytest.mark.faults
@each_signal
@pytest.mark.parametrize("overlap", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("rows", ["local", "remote", "worker"])
def test_interrupts_at_moments_of_a_loop(
    rows: str,
    overlap: bool,
    number: int,
    path: Path,
    rng: np.random.Generator,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tries a sample of the moments; with `--faults-seconds 60` or more, all of them."""
    monkeypatch.setattr(training_watch, "_STEPS", 1 << 30)  # many steps in a row drop their batches on request
    gap = 1 if request.config.getoption("--faults-seconds") >= 60 else 40
    with embeddings_over(rows, 2 if overlap else 0) as embeddings:
        loop = Loop(embeddings, path, overlap, rng, number)
        for call in CALLS:
            at, hits, misses = int(rng.integers(1, gap + 1)), 0, 0  # calls differ in length
            while misses < 3:
                try:
                    with no_hang(DEADLINE_SECONDS):
                        came = loop.round(call, at)
                except BaseException as error:
                    error.add_note(f"interrupted: moment {at} of {call}")
                    raise
                if came is not None:
                    hits, misses = hits + came, 0 if came else misses + 1
                    at += int(rng.integers(1, 2 * gap)) if came or hits == 0 else 0
                    at = at if hits else 1
            assert hits
        loop.end()


@contextmanager
def interrupted_steps(number: int) -> Iterator[None]:
    """Let a signal interrupt the steps of a loop, and not the test around them, which could not catch two in a row."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not Loop.step.__code__:
            frame = frame.f_back
        if frame is not None:
            raise SIGNALS[number].with_traceback(None)

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


# A signal that is pending while pyzmq frees a Frame is swallowed, with this warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("rows", ["remote", "worker"])
def test_signals_at_any_time(rows: str, path: Path, rng: np.random.Generator) -> None:
    """Sends real signals, which wake a wait for a server or a lock, also while another signal is handled."""
    import_module("tracemalloc")  # else pytest imports it while it handles such a warning, which a signal may interrupt
    number = int(rng.choice([each for each in SIGNALS if each != signal.SIGALRM]))  # SIGALRM is that of no_hang
    with embeddings_over(rows, 0) as embeddings, no_hang(DEADLINE_SECONDS), interrupted_steps(number):
        loop, hits, until = Loop(embeddings, path, False, rng), 0, time.monotonic() + 2.0
        over = threading.Event()

        def press() -> None:
            while not over.wait(rng.uniform(0.0, 0.02)):
                signal.pthread_kill(threading.main_thread().ident or 0, number)

        thread = threading.Thread(target=press)
        thread.start()
        try:
            while time.monotonic() < until:
                try:
                    loop.step()
                except type(SIGNALS[number]):
                    hits += 1
        finally:
            over.set()
            thread.join()
        loop.check(unseen=hits)
        loop.end()
        assert hits > 5


def test_a_second_update_of_a_step_is_refused() -> None:
    """Servers identify an update by its step, and would take the second for a retry of the first."""
    ones = np.ones((4, 2), np.float32)
    with running_servers(2) as services, sharded_worker(one_table(), [each.address for each in services]) as worker:
        first, second = (worker.lookup(batch(range(4)), step=1).ticket for _ in range(2))
        assert first and second
        worker.update([first], [ones], step=1)
        before = contents(worker)
        with pytest.raises(InputError, match="step 1 of trainer 0: the update of another batch was sent"):
            worker.update([second], [ones], step=1)
        assert contents(worker) == before and not second.used
        worker.update([second], [ones], step=2)
        assert contents(worker) != before


@pytest.mark.draw(5)
@each_signal
@pytest.mark.parametrize("connected", [True, False])
def test_interrupts_at_every_moment_of_a_remote_call(connected: bool, number: int) -> None:
    """The connection works for the next call: no part of a message is left over."""
    ids = np.arange(100, dtype=np.uint64)
    with ExitStack() as stack, no_hang(DEADLINE_SECONDS):
        service = stack.enter_context(Service(Served(), Calls, ANYWHERE))
        client, at, came = stack.enter_context(Client(Calls, service.address, deadline=5.0)), 1, True
        while came:
            if not connected:
                client = stack.enter_context(Client(Calls, service.address, deadline=5.0))
            interrupts, error = Interrupts(at, number), SIGNALS[number]
            with suppress(type(error)), raising(number, error), interrupts:
                client.call.double(ids)
            assert np.array_equal(client.call.double(2 * ids), 4 * ids), f"after moment {at}"
            came, at = interrupts.came, at + (1 if connected else 7)
        assert at > 50


@pytest.mark.draw(3)
@each_signal
def test_a_checkpoint_after_an_interrupted_next(number: int, path: Path, rng: np.random.Generator) -> None:
    """Where the order is fixed, an update waits for lookups that wait for the batch that never reached the user."""
    table = Table("t", dim=2, optimizer=SGD(lr=1.0), initial=Zeros())
    embeddings = Embeddings({"id": table}, staleness=1, deterministic=True, num_threads=1)
    optimizer = embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    data = [batch(range(4 * i, 4 * i + 4)) for i in range(6)]
    for at in range(1, 2000, 9):
        with no_hang(DEADLINE_SECONDS), embeddings.stream(data, overlap=False) as stream:
            next(stream).embeddings.sum().backward()
            interrupts, error = Interrupts(at, number), SIGNALS[number]
            with suppress(type(error)), raising(number, error), interrupts:
                next(stream)
            with suppress(StreamError):  # the source was interrupted
                optimizer.step()
            embeddings.drain()
        before = embeddings.step
        if not interrupts.came:
            break
    assert before > 10 and not interrupts.came


@each_signal
def test_an_interrupted_end_of_a_stream_is_finished_by_the_next_close(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings, model, optimizer = job()
    stream, finished = embeddings.stream(batches(2)), list[int]()

    def finish() -> None:
        finished.append(len(finished))
        if len(finished) == 1:
            signal.raise_signal(number)

    monkeypatch.setattr(session_of(embeddings).dense, "finish", finish)
    train_step(model, optimizer, next(stream))
    with raising(number, SIGNALS[number]), pytest.raises(type(SIGNALS[number])):
        stream.close()
    stream.close()
    stream.close()
    assert finished == [0, 1]
