"""The kind `fan_out`: CPU time of a step by the number of servers, at the trainer and at the servers.

A trainer looks up and updates batches of 26 features x 512 ids over 1, 8, 64 and 120 servers, which are objects in two
processes, each with its own port. `step_ms/N` is the CPU time of all threads of the trainer for a step over N servers;
`fan_out_ms/N` is what of it a step over one server does not have. `call_ms/N` is the CPU time of the servers for one
call, and `files/N` the descriptors that the trainer has open for the servers. CPU time of other processes does not
count, so the figures need no idle machine.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.cluster.processes import ANYWHERE, Process, receive, send, talking
from benchmarks.harness.case import Case
from benchmarks.harness.clock import noise_between, read_cpu
from benchmarks.harness.record import Rounds
from benchmarks.workload import row_numbers

SERVERS = 1, 8, 64, 120
PROCESSES = 2
SAMPLES = 512
BUCKETS = 256  # some for each server, which a table of so few rows would not have
CALLS = 2  # of a step to each server: a lookup and an update


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure steps over each number of servers."""
    figures: dict[str, float] = {}
    before = read_cpu()
    for count in SERVERS:
        with hosts(count) as (processes, addresses):
            found = measure_steps(job, processes, addresses)
        figures |= {f"{name}/{count}": value for name, value in found.items()}
    figures |= {f"fan_out_ms/{n}": round(figures[f"step_ms/{n}"] - figures["step_ms/1"], 3) for n in SERVERS[1:]}
    return {"streams": {"fan_out:steps": {**figures, **noise_between(before, read_cpu())}}}


def measure_steps(job: Mapping[str, Any], processes: Sequence[Process], addresses: Sequence[str]) -> dict[str, float]:
    from benchmarks.cluster import tables
    from benchmarks.contenders.satrap_table import inputs_of
    from satrap.config.features import Features

    rows, num_warmup, num_steps = (int(job[key]) for key in ("rows", "num_warmup", "num_steps"))
    declared = tables.one_table(rows, int(job["dim"]))
    features = Features({name: replace(table, num_buckets=BUCKETS) for name, table in declared.items()})
    numbers = row_numbers(rows, "zipf", num_warmup + num_steps, int(job["part"]), SAMPLES)
    batches = [inputs_of(each) for each in numbers]
    gradient = np.full((SAMPLES, features.total_dim), 1e-3, np.float32)
    files = num_files()
    with tables.connected(features, addresses, int(job["num_threads"])) as worker:

        def run(begin: int, end: int) -> None:
            for step in range(begin, end):
                lookup = worker.lookup(batches[step], step=1 + step)
                assert lookup.ticket is not None
                worker.update([lookup.ticket], [gradient], step=1 + step)

        run(0, num_warmup)
        files = num_files() - files
        served, spent = cpu_seconds(processes), time.process_time()
        run(num_warmup, num_warmup + num_steps)
        spent, served = time.process_time() - spent, cpu_seconds(processes) - served
    return {
        "step_ms": round(1e3 * spent / num_steps, 3),
        "call_ms": round(1e3 * served / (num_steps * CALLS * len(addresses)), 4),
        "files": files,
    }


def num_files() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def hosts(count: int) -> Iterator[tuple[list[Process], list[str]]]:
    """Start the processes of so many servers; yield them and the addresses of the servers."""
    with ExitStack() as stack:
        processes, addresses = [], []
        for part in np.array_split(np.arange(count), min(count, PROCESSES)):
            command = [sys.executable, "-m", "benchmarks.cluster.fan_out", str(len(part))]
            processes.append(stack.enter_context(talking(command)))
        for process in processes:
            addresses += receive(process)
        yield processes, addresses


def cpu_seconds(processes: Sequence[Process]) -> float:
    """Return the CPU time of the servers' processes so far."""
    for process in processes:
        send(process, "cpu")
    return sum(float(receive(process)) for process in processes)


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    return {"figures": rounds.figures_of("steps")}


def main() -> None:
    """Serve so many servers as the argument says, and answer each line with the CPU time, until stdin ends."""
    from satrap.rpc import Service
    from satrap.server.protocol import ServerCalls
    from satrap.server.server import Server

    with ExitStack() as stack:
        services = [
            stack.enter_context(Service(Server(num_threads=1), ServerCalls, ANYWHERE, insecure=True))
            for _ in range(int(sys.argv[1]))
        ]
        print(json.dumps([service.address for service in services]), flush=True)
        for _ in sys.stdin:
            print(json.dumps(time.process_time()), flush=True)


if __name__ == "__main__":
    main()
