"""The kind `restart`: how long a server with its rows in shared memory is away when it is killed.

A worker fills the table, updates some rows and looks them up. Then, several times, the server is killed (SIGKILL) and
started again with the same file and port, while the worker, which gets no notice, looks up the same rows again.
`away_s` is the time from the kill until it has them; other bits than before fail the round. `listens_s` is the part
until the new server listens, with all rows. The longest of each round counts.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.processes import ANYWHERE, satrap_server
from benchmarks.cluster.rows import GRADIENT
from benchmarks.harness.case import Case
from benchmarks.harness.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.harness.record import Rounds
from benchmarks.workload import BATCH_IDS, SAMPLES, total_rows


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure `num_steps` kills."""
    from benchmarks.cluster import tables
    from benchmarks.contenders.satrap_table import inputs_of
    from satrap.config.features import Features

    rows, dim, num_threads = (int(job[key]) for key in ("rows", "dim", "num_threads"))
    tables.require_memory(rows, dim, num_tables=1)
    features = Features(tables.one_table(rows, dim))
    numbers = np.random.default_rng(int(job["part"])).integers(0, total_rows(rows), BATCH_IDS)
    batch, gradient = inputs_of(numbers), np.full((SAMPLES, features.total_dim), GRADIENT, np.float32)
    with ExitStack() as stack:
        server = Server(num_threads, Path(job["folder"], "rows"))
        stack.callback(server.stop)
        address = server.start(ANYWHERE)
        worker = stack.enter_context(tables.connected(features, [address], num_threads))
        tables.fill(worker, worker.tables, rows)
        lookup = worker.lookup(batch, step=2)
        assert lookup.ticket is not None
        worker.update([lookup.ticket], [gradient], step=2)
        expected = worker.lookup(batch, train=False).block.tobytes()
        before, kills = read_cpu([server.pid]), []
        for _ in range(int(job["num_steps"])):
            seconds, rows_after = away(server, address, lambda: worker.lookup(batch, train=False).block.tobytes())
            if rows_after != expected:
                raise RuntimeError("the rows of a server that was killed and started again differ from those before")
            kills.append(seconds)
        noise = noise_between(before, read_cpu([server.pid]))
        peak = peak_resident_bytes([server.pid])
    longest = {name: round(max(seconds[name] for seconds in kills), 3) for name in ("away_s", "listens_s")}
    return {
        "streams": {"restart:server": longest | noise},
        "peak_resident_bytes": peak,
    }


class Server:
    """A server whose rows outlive its process."""

    def __init__(self, num_threads: int, file: Path) -> None:
        self._num_threads, self._file = num_threads, file
        self._running = ExitStack()

    def start(self, address: str) -> str:
        """Start it; return its address once it listens."""
        server = satrap_server(self._num_threads, address, ["--shared", str(self._file)])
        bound, self.pid = self._running.enter_context(server)
        return bound

    def kill(self) -> None:
        """Kill it and wait for its exit."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        self._running.close()


def away(server: Server, address: str, look_up: Callable[[], bytes]) -> tuple[dict[str, float], bytes]:
    """Kill the server and start it again; return the seconds since the kill by figure, and the rows looked up."""
    killed = time.perf_counter()
    server.kill()

    def start() -> float:
        server.start(address)
        return time.perf_counter() - killed

    with ThreadPoolExecutor(1) as pool:
        listens = pool.submit(start)
        rows = look_up()
        seconds = time.perf_counter() - killed
    return {"away_s": seconds, "listens_s": listens.result()}, rows


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    return {"figures": rounds.figures_of("server")}
