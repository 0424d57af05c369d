"""The kind `restart`: how long a server with its rows in shared memory is away when it is killed.

A worker fills the table, updates some rows and looks them up. Then, several times, the server is killed (SIGKILL) and
started again with the same file at the same port, while the worker, which is told nothing, looks the same rows up
again. `away_s` is the time from the kill until it has them, with the right bits or the round fails; `listens_s` the
part of it until the new server listens, with all rows found again. Of each round the longest counts.
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

from benchmarks.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.cluster.cases import ClusterCase
from benchmarks.cluster.command import ANYWHERE, satrap_server
from benchmarks.cluster.rows import GRADIENT
from benchmarks.machine import versions
from benchmarks.records import clean_rounds, each, judge, processes, spread, streams_of, worst_noise
from benchmarks.runs import Results
from benchmarks.workload import BATCH_IDS, SAMPLES, total_rows

FIGURES = ("away_s", "listens_s")


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """One round: `num_steps` kills."""
    from benchmarks.cluster import tables
    from satrap.config.features import Features

    rows, dim, num_threads = (int(job[key]) for key in ("rows", "dim", "num_threads"))
    tables.require_memory(rows, dim, num_tables=1)
    features = Features(tables.one_table(rows, dim))
    numbers = np.random.default_rng(int(job["part"])).integers(0, total_rows(rows), BATCH_IDS)
    batch, gradient = tables.inputs_of(numbers), np.full((SAMPLES, features.total_dim), GRADIENT, np.float32)
    with ExitStack() as stack:
        server = Killable(num_threads, Path(job["tmpfs"], "rows"))
        stack.callback(server.end)
        address = server.start(ANYWHERE)
        worker = stack.enter_context(tables.reached(features, address, num_threads))
        tables.fill(worker, worker.tables, rows)
        looked = worker.lookup(batch, step=2)
        assert looked.ticket is not None
        worker.update([looked.ticket], [gradient], step=2)
        known = worker.lookup(batch, train=False).block.tobytes()
        before, found = read_cpu([server.pid]), []
        for _ in range(int(job["num_steps"])):
            seconds, seen = away(server, address, lambda: worker.lookup(batch, train=False).block.tobytes())
            if seen != known:
                raise RuntimeError("the rows of a server that was killed and started again are others than before")
            found.append(seconds)
        noise = noise_between(before, read_cpu([server.pid]))
        peak = peak_resident_bytes([server.pid])
    longest = {name: round(max(seconds[name] for seconds in found), 3) for name in FIGURES}
    return {
        "streams": {"restart:server": longest | noise},
        "peak_resident_bytes": peak,
        "versions": versions("satrap", "numpy", "pyzmq"),
    }


class Killable:
    """A server whose rows outlive it."""

    def __init__(self, num_threads: int, file: Path) -> None:
        self._num_threads, self._file = num_threads, file
        self._running = ExitStack()

    def start(self, address: str) -> str:
        """Returns once it listens, where it does."""
        server = satrap_server(self._num_threads, address, ["--shared", str(self._file)])
        found, self.pid = self._running.enter_context(server)
        return found

    def kill(self) -> None:
        """Returns when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        self._running.close()


def away(server: Killable, address: str, look_up: Callable[[], bytes]) -> tuple[dict[str, float], bytes]:
    """Kills it and starts it again; by figure the seconds since the kill, and what was looked up meanwhile."""
    killed = time.perf_counter()
    server.kill()

    def start() -> float:
        server.start(address)
        return time.perf_counter() - killed

    with ThreadPoolExecutor(1) as beside:
        listens = beside.submit(start)
        seen = look_up()
        seconds = time.perf_counter() - killed
    return {"away_s": seconds, "listens_s": listens.result()}, seen


def make_record(case: ClusterCase, results: Results) -> dict[str, Any]:
    """The record of one case."""
    timed = streams_of("restart:", results)
    clean = clean_rounds(timed)
    record: dict[str, Any] = {"case": case.name, "kind": case.kind, "rows": case.rows, "dim": case.dim}
    record["num_threads"] = case.num_threads
    record["figures"] = {name: spread(each(timed["server"], name), clean) for name in FIGURES}
    record |= {"targets": judge(case, record), "clean_rounds": clean, "noise": worst_noise(timed)}
    return record | processes(results)
