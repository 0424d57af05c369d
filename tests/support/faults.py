"""Faults that start and end at random moments while a job trains, and the oracle that shows that they had no effect: a
local worker that gets the same batches.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bag_oracle import draw_bags
from cluster import ServerProcess, features, server_processes, sharded_worker, step_both, suspend
from contents import contents
from network import ADDRESSES, SERVER, TRAINER, Network, Weather, network
from satrap.rpc.keys import Keys, create_keys
from satrap.worker.worker import Worker


@dataclass(frozen=True)
class Fault:
    """A fault: how it starts and how it is repaired."""

    name: str
    begin: Callable[[], object]
    end: Callable[[], object]
    most_seconds: float
    """Its longest duration."""


def stop_and_go(process: ServerProcess | subprocess.Popen[str], most_seconds: float) -> Fault:
    """Return the fault of a process that is stopped and resumed."""
    return Fault(
        f"stop {process.pid}",
        lambda: suspend(process.pid),
        lambda: os.kill(process.pid, signal.SIGCONT),
        most_seconds,
    )


def kill(server: ServerProcess) -> Fault:
    return Fault(f"kill {server.address}", server.kill, server.restart, 0.1)


@contextmanager
def random_faults(
    faults: Sequence[Fault], seed: int, *, num: int | None = None, seconds: float | None = None, gap: float = 0.3
) -> Iterator[threading.Event]:
    """Run random faults one after another until there were `num`, or for so many seconds; then all are repaired and the
    yielded event is set. An error meanwhile gets the list of faults as a note."""
    stop, over = threading.Event(), threading.Event()
    story: list[str] = []
    began = time.monotonic()
    until = began + (1e9 if seconds is None else seconds)

    def work() -> None:
        try:
            draw_them(np.random.default_rng(seed))
        finally:
            over.set()

    def draw_them(draw: np.random.Generator) -> None:
        while not stop.wait(draw.uniform(0.0, gap)) and time.monotonic() < until and len(story) != num:
            fault = faults[int(draw.integers(len(faults)))]
            story.append(f"{time.monotonic() - began:.2f} s: {fault.name}")
            fault.begin()
            try:
                stop.wait(draw.uniform(0.0, fault.most_seconds))
            finally:
                fault.end()

    thread = threading.Thread(target=work, name="faults")
    thread.start()
    try:
        yield over
    except BaseException as error:
        error.add_note(f"seed {seed}; faults: {'; '.join(story)}")
        raise
    finally:
        stop.set()
        thread.join()


@contextmanager
def killed_at_random(
    tmp_path: Path, seed: int, num_kills: int, num_servers: int = 2
) -> Iterator[tuple[list[ServerProcess], threading.Event]]:
    """Yield servers that are killed and restarted at random moments, and an event that is set when that is over."""
    with (
        server_processes(tmp_path, num_servers) as servers,
        random_faults([kill(each) for each in servers], seed, num=num_kills, gap=0.2) as over,
    ):
        yield servers, over


def train_both_until(over: threading.Event, local: Worker, worker: Any, rng: np.random.Generator) -> int:
    """Train both on the same batches until `over`; the rows must be equal bit for bit. Returns the number of steps."""
    step = 0
    while not over.is_set() or step < 20:
        step += 1
        step_both([local, worker], rng, [draw_bags(rng, local.features, 30)], step)
    assert contents(worker) == contents(local)
    for table in worker.tables.values():
        table.check()
    return step


BAD = Weather(drop=0.2, repeat=0.05, delay=(0.03, 0.07))


@contextmanager
def networked_cluster(
    tmp_path: Path, seed: int, *, deadline: float = 60.0, most_seconds: float = 0.0
) -> Iterator[tuple[Network, list[ServerProcess], Any]]:
    """Put this thread at the trainer's end of a network and two servers at the other end, with keys.

    most_seconds: added to the time after which the processes are killed, for a test that takes longer than most."""
    server_key, client_key = create_keys(tmp_path / "keys")
    with network(seed) as wire:
        how = (f"tcp://{ADDRESSES[SERVER]}:0", ("--keys", str(server_key)), lambda: wire.inside(SERVER), most_seconds)
        with server_processes(tmp_path, 2, *how) as servers, wire.inside(TRAINER):
            addresses, keys = [each.address for each in servers], Keys.read(client_key)
            with sharded_worker(features(), addresses, keys=keys, deadline=deadline) as worker:
                yield wire, servers, worker
