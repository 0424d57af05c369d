"""What the tests of a cluster share: servers in this process behind real sockets, and server processes to kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rpc_parts import ANYWHERE as ANYWHERE
from satrap.config.features import Features
from satrap.config.job import Job
from satrap.config.optimizers import SGD, Adagrad, RowWiseAdagrad
from satrap.config.tables import Feature, Normal, Table
from satrap.data.inputs import Inputs
from satrap.rpc import Service
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.worker import sharded_rows
from satrap.worker.server_group import ServerGroup
from satrap.worker.worker import Worker
from waiting import DEADLINE_SECONDS, wait_until


def features() -> Features:
    """Two tables of several buckets and one of a single one, with every kind of pooling."""
    item = Table("item", dim=5, optimizer=Adagrad(lr=0.1), initial=Normal(std=0.5), num_buckets=16)
    user = Table("user", dim=8, optimizer=RowWiseAdagrad(lr=0.1), initial=Normal(std=0.5), num_buckets=4)
    tiny = Table("tiny", dim=3, optimizer=SGD(lr=0.1), initial=Normal(std=0.5), num_buckets=1)
    return Features(
        {
            "bag": Feature(item, "mean"),
            "item": Feature(item),
            "user": Feature(user, "sum", weighted=True),
            "tiny": Feature(tiny, "sqrtn"),
            "path": item.sequence(3),
            "padded": item.sequence(2, keep="first", padding_id=4),
            "padded bag": Feature(user, "mean", weighted=True, padding_id=5),
            "jagged": item.sequence(padding_id=4),
            "jagged last": user.sequence(2, jagged=True),
        }
    )


def one_table(**options: Any) -> Features:
    given: dict[str, Any] = {"dim": 2, "optimizer": Adagrad(lr=0.1), "num_buckets": 8}
    return Features({"id": Table("t", **given | options)})


def batch(ids: Any) -> Inputs:
    return Inputs(names=("id",), values=np.asarray(ids, np.uint64), batch_size=len(ids))


@contextmanager
def running_servers(num_servers: int, **options: Any) -> Iterator[list[Service]]:
    """Start empty servers in this process."""
    given: dict[str, Any] = {"num_threads": 2, "checkpoints": ["/"]} | options
    with ExitStack() as stack:
        yield [stack.enter_context(Service(Server(**given), ServerCalls, ANYWHERE)) for _ in range(num_servers)]


@contextmanager
def sharded_worker(of: Features, addresses: list[str], *, seed: int = 0, **options: Any) -> Iterator[Any]:
    options = {"deadline": DEADLINE_SECONDS} | options
    servers = ServerGroup(Job(tables=of.tables, seed=seed), addresses, **options)
    try:
        yield sharded_rows.sharded_worker(of, servers, num_threads=2)
    finally:
        servers.close()


def step_both(workers: list[Worker], rng: np.random.Generator, bags: list[Any], step: int) -> None:
    """Make the same lookups and one update on each worker; the looked-up rows must be the same bits."""
    looked = [[worker.lookup(each.inputs(), step=step) for each in bags] for worker in workers]
    seen = [
        [[each.block.tobytes(), *(rows.tobytes() for rows in each.sequences.values())] for each in of_worker]
        for of_worker in looked
    ]
    assert all(each == seen[0] for each in seen)
    blocks = [rng.normal(size=each.block.shape).astype(np.float32) for each in looked[0]]
    sequences = [
        {name: rng.normal(size=rows.shape).astype(np.float32) for name, rows in each.sequences.items()}
        for each in looked[0]
    ]
    for worker, of_worker in zip(workers, looked, strict=True):
        worker.update([each.ticket for each in of_worker if each.ticket], blocks, sequences, step=step, scale=0.5)


def suspend(process: int) -> None:
    """Send SIGSTOP, and return when no thread of the process runs any more: until its first thread has seen the signal,
    the others continue."""
    os.kill(process, signal.SIGSTOP)

    def stands() -> bool:
        with suppress(OSError):  # a thread has ended meanwhile
            found = [path.read_text().rpartition(")")[2].split()[0] for path in tasks.glob("*/stat")]
            return set(found) == {"T"}
        return False

    tasks = Path(f"/proc/{process}/task")
    wait_until(stands)


class ServerProcess:
    """A server process whose rows are in shared memory, and which can be restarted at the same address."""

    def __init__(
        self,
        shared: Path,
        listen: str = ANYWHERE,
        options: Sequence[str] = (),
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
        most_seconds: float = 0.0,
    ) -> None:
        """inside: the context to start it in, for example a network namespace. most_seconds: added to the time after
        which the process is killed, for a test that takes longer than most."""
        self._options, self._inside, self._most_seconds = options, inside, 4 * DEADLINE_SECONDS + most_seconds
        self.shared = shared
        self.program = [str(Path(sys.executable).with_name("satrap"))]
        self.address = self._start(listen)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _command(self) -> list[str]:
        return ["server", "--shared", str(self.shared), "--checkpoints", "/", *self._options]

    def _start(self, address: str) -> str:
        """Start the process, and return where it listens."""
        command = [*self.program, *self._command(), "--listen", address, "--threads", "1"]
        with self._inside():
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._timer = threading.Timer(self._most_seconds, self._process.kill)
        self._timer.start()
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()[-1]

    def kill(self) -> None:
        """Send SIGKILL, and return when the process has exited."""
        os.kill(self._process.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Return when the process has exited."""
        self._process.communicate(timeout=DEADLINE_SECONDS)
        self._timer.cancel()
        self._timer.join()

    def restart(self) -> None:
        """Start it again, and return when it listens."""
        assert self._start(self.address) == self.address

    def stop(self) -> None:
        """Send SIGSTOP: the process is suspended until `resume`."""
        suspend(self.pid)

    def resume(self) -> None:
        """Send SIGCONT."""
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        """Send SIGTERM; the process must exit with 0."""
        self._process.terminate()
        self.wait()
        assert self._process.returncode == 0


@contextmanager
def server_processes(tmp_path: Path, num_servers: int = 2, *how: Any) -> Iterator[list[ServerProcess]]:
    """Start server processes, which must be alive when the test ends."""
    shm = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    files = [shm / f"satrap-test-{os.getpid()}-{tmp_path.name}-{number}" for number in range(num_servers)]
    servers: list[ServerProcess] = []
    try:
        for file in files:
            servers.append(ServerProcess(file, *how))
        yield servers
    finally:
        for each in servers:
            each.end()
        for file in files:
            file.unlink(missing_ok=True)
