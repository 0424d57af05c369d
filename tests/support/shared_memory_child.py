"""A process that table/test_shared_memory.py kills: it writes to a table in a shared-memory file and reports each
finished call.

    python shared_memory_child.py JOB PATH [SEED]

It prints one line after each call that returned, in one write(2), so the call of a line that arrived has finished.
Jobs:
    count   creates or attaches the table of equal rows; every update gives every row the same gradient
    churn   creates or attaches a small table; random batches are looked up (inserting, evicting) and updated
    grow    creates or attaches an unbounded table; each lookup inserts the next ids
    hold    attaches and waits for the end of its standard input
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from satrap.config.optimizers import SGD, Adam
from satrap.config.tables import Constant, Table
from satrap.table.store import Store

EQUAL = Table("equal", dim=24, optimizer=Adam(lr=0.01), initial=Constant(0.5), num_buckets=8)
EQUAL_IDS = np.arange(4000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
GROW = Table("grow", dim=12, num_buckets=4)
GROW_IDS = 300  # in each lookup
CHURN = Table("churn", dim=8, optimizer=SGD(lr=1.0), initial=Constant(0.0), capacity=1000, num_buckets=4)


def open_table(path: Path, table: Table) -> Store:
    if path.exists():
        return Store.attach(path, num_threads=2)
    return Store(table, shared=path, num_threads=2)


def say(*words: Any) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def count(path: Path) -> None:
    """Print how many updates every row has had."""
    store = open_table(path, EQUAL)
    store.lookup(EQUAL_IDS, step=1)
    gradients = np.full((len(EQUAL_IDS), EQUAL.dim), 0.25, np.float32)
    say("ready")
    while True:
        store.update(EQUAL_IDS, gradients, step=store.latest_step + 1)
        say("done", store.latest_step)


def churn(path: Path, seed: int) -> None:
    store = open_table(path, CHURN)
    rng = np.random.default_rng(seed)
    say("ready")
    for i in range(1 << 30):
        ids = np.unique(rng.integers(5000, size=150)).astype(np.uint64)
        store.lookup(ids)
        store.update(ids, -np.ones((len(ids), CHURN.dim), np.float32))
        say("done", i, store.latest_step)


def grow(path: Path) -> None:
    """Print the first of the ids that now have rows. A step that was started is never started again."""
    store = open_table(path, GROW)
    say("ready")
    while True:
        begin = store.latest_step * GROW_IDS
        store.lookup(np.arange(begin, begin + GROW_IDS, dtype=np.uint64))
        say("done", begin)


def main() -> None:
    job, path = sys.argv[1], Path(sys.argv[2])
    if job == "count":
        count(path)
    elif job == "grow":
        grow(path)
    elif job == "churn":
        churn(path, int(sys.argv[3]))
    else:
        store = Store.attach(path, num_threads=1)
        say("ready", len(store))
        sys.stdin.read()


if __name__ == "__main__":
    main()
