"""Writes the files of a build that every later build must read.

    .venv/bin/python tests/support/golden.py tests/fixtures/golden

writes it once; tests/table/test_golden.py reads it. Each table is saved whole, then its changes; what it held is
recorded beside it, and what it held after one more step, so that a later build must not only read but go on alike.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint_job import Job
from satrap import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Constant,
    Ftrl,
    MinCount,
    Normal,
    Probability,
    RowWiseAdagrad,
    ScaledUniform,
    Store,
    Table,
    Uniform,
    Zeros,
)
from satrap.launch.run_state import RunState
from satrap.rpc.methods import methods_of
from satrap.server.protocol import ServerCalls
from satrap.table.snapshot import writer
from satrap.worker.remote.protocol import WorkerCalls

NUM_IDS = 40
SEED = 11
STEPS, MORE_STEPS = 6, 3
TABLES = [
    Table("sgd", dim=3, optimizer=SGD(lr=0.1, momentum=0.9, nesterov=True), initial=Zeros(), num_buckets=2),
    Table("adagrad", dim=8, optimizer=Adagrad(lr=0.1), initial=Uniform(low=-0.5, high=0.5), capacity=32, num_buckets=2),
    Table("rowwise", dim=5, optimizer=RowWiseAdagrad(lr=0.2), dtype="float16", expire_after=4, num_buckets=2),
    Table("adam", dim=4, optimizer=Adam(lr=0.01), initial=Normal(std=0.1), admission=MinCount(2, window=64)),
    Table("adamw", dim=4, optimizer=AdamW(lr=0.01), initial=ScaledUniform(), dtype="bfloat16", on_nonfinite="skip"),
    Table("ftrl", dim=2, optimizer=Ftrl(l1=0.1), initial=Constant(0.3), admission=Probability(0.6), absent="zeros"),
]


def take_steps(store: Store, first: int, last: int) -> None:
    """Runs the steps `first` to `last` - 1; each is a function of its number alone."""
    for step in range(first, last):
        rng = np.random.default_rng([SEED, step])
        ids = rng.integers(0, NUM_IDS, 16).astype(np.uint64)
        _, ticket = store.lookup_for_update(ids, step=step)
        store.update(ticket, rng.standard_normal((len(ids), store.table.dim)).astype(np.float32), step=step)


def state(store: Store) -> dict[str, np.ndarray]:
    """Returns the rows' content and their number."""
    store.check()
    found = store.read(np.arange(NUM_IDS, dtype=np.uint64))
    counts = {name: np.array(store.stats()[name]) for name in ("rows", "sightings")}
    return {**found._asdict(), **counts}


def method_numbers() -> dict[str, dict[str, int]]:
    """Returns the numbers by which requests name their methods."""
    protocols: dict[str, Any] = {"ServerCalls": ServerCalls, "WorkerCalls": WorkerCalls}
    return {
        name: {method.name.partition(".")[2]: method.number for method in methods_of(protocol).values()}
        for name, protocol in protocols.items()
    }


def recorded(folder: Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}.npz") as found:
        return dict(found)


def make(folder: Path, scratch: Path) -> Iterator[str]:
    writer.TARGET_BYTES = 1  # a record batch for each bucket
    for table in TABLES:
        place = folder / table.name
        store = Store(table, seed=SEED, num_threads=1, shared=scratch / table.name)
        take_steps(store, 1, STEPS)
        version = store.save(place / "full")
        np.savez_compressed(place / "full.npz", **state(store))  # type: ignore[arg-type]
        take_steps(store, STEPS, STEPS + MORE_STEPS)
        store.save_changes(place / "changes", since=version)
        np.savez_compressed(place / "changes.npz", **state(store))  # type: ignore[arg-type]
        with open(scratch / table.name, "rb") as file, gzip.open(place / "shared.gz", "wb") as packed:
            shutil.copyfileobj(file, packed)
        take_steps(store, STEPS + MORE_STEPS, STEPS + MORE_STEPS + 1)
        np.savez_compressed(place / "next.npz", **state(store))  # type: ignore[arg-type]
        yield table.name
    job = Job(str(folder / "run"), 4, full_every=3)
    job.train()
    np.savez_compressed(folder / "run.npz", **job.state())
    yield "run"
    state_file = RunState(name="golden", launch=3, first_launch=2, servers=("ipc:///a/b", "tcp://h:1"), workers=())
    state_file.write(folder / "run_state.json")
    (folder / "methods.json").write_text(json.dumps(method_numbers(), indent=1, sort_keys=True) + "\n")
    yield "run_state.json, methods.json"


if __name__ == "__main__":
    import tempfile

    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    for each in TABLES:
        (target / each.name).mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for line in make(target, Path(memory)):
            print(line)
