"""The kind `restart`: how long a server with its rows in shared memory is away when it is killed.

A worker fills the table, updates some rows and looks them up. Then, several times, the server is killed (SIGKILL) and
started again with the same file and port, while the worker, which gets no notice, looks up the same rows again.
`away_s` is the time from the kill until it has them; other bits than before fail the round. `listens_s` is the part
until the new server listens, with all rows. The longest of each round counts.
"""

import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster import tables
from benchmarks.cluster.processes import ANYWHERE, satrap_server
from benchmarks.contenders.satrap_table import inputs_of
from benchmarks.harness.case import Case
from benchmarks.harness.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.harness.record import Rounds
from benchmarks.workload import BATCH_IDS, total_rows
from satrap.config.features import Features


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure `num_steps` kills."""
    rows, threads = job["rows"], job["num_threads"]
    features = Features(tables.one_table(rows, job["dim"]))
    batch = inputs_of(np.random.default_rng(job["part"]).integers(0, total_rows(rows), BATCH_IDS))
    options = ["--shared", str(Path(job["folder"], "rows"))]
    with ExitStack() as stack, ExitStack() as server, ThreadPoolExecutor(1) as pool:

        def start(listen: str) -> tuple[str, int]:
            return server.enter_context(satrap_server(threads, listen, options))

        address, pid = start(ANYWHERE)
        worker = stack.enter_context(tables.connected(features, [address], threads))
        tables.fill(worker, worker.tables, rows)
        tables.step(worker, batch, tables.gradient_of(features), 2)
        expected = worker.lookup(batch, train=False).block.tobytes()
        before, away, listens = read_cpu([pid]), [], []
        for _ in range(job["num_steps"]):
            killed = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            server.close()

            def listen(since: float = killed) -> tuple[int, float]:
                return start(address)[1], time.perf_counter() - since

            started = pool.submit(listen)
            if worker.lookup(batch, train=False).block.tobytes() != expected:
                raise RuntimeError("the rows of a server that was killed and started again differ from those before")
            away.append(time.perf_counter() - killed)
            pid, seconds = started.result()
            listens.append(seconds)
        noise = noise_between(before, read_cpu([pid]))
        peak = peak_resident_bytes([pid])
    longest = {"away_s": round(max(away), 3), "listens_s": round(max(listens), 3)}
    return {"streams": {"restart:server": longest | noise}, "peak_resident_bytes": peak}


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    return {"figures": rounds.figures_of("server")}
