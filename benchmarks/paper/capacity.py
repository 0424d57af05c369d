"""The capacity ladder: 6.25 to 100 trillion parameters of dim 128, and more and more of the memory filled.

A rung has ids from its whole range, 100 T / 128 = 781 billion of them on the last one, and fills a share of `--memory`
that doubles from rung to rung: page tables, TLB and index grow along the ladder, which a range alone would not show.
Rows are float16, memory is bounded by the capacity, and rows of the least recently used step are evicted. Each rung
runs in a process that has nothing else.

    equal    every id is in the table: the same hit rate on all rungs, by construction; uniform, and Zipf's
    unequal  a tenth of the ids are new, so rows are evicted and others created

Beside it, one table of dim 16 that grows to 1M ... 100M rows: ids of all its rows, and of a few that the cache holds,
which differ by cache misses alone; and the rate at which the table grew.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import satrap
from benchmarks.harness.clock import available_bytes, noise_between, read_cpu, resident_bytes
from benchmarks.harness.machine import ROOT
from benchmarks.harness.record import interval
from benchmarks.paper.cell import CannotRunError, Cell, Done, Figures
from benchmarks.paper.convergence import Data, tuned
from benchmarks.paper.training import train
from benchmarks.workload import hashed_ids
from satrap.table.store import Store

RUNGS = (6.25, 12.5, 25.0, 50.0, 100.0)
"""Trillions of parameters."""
DIM, BATCH_IDS = 128, 26 * 1024
ROW_BYTES = 2 * DIM + 4 + 40
"""Values, state, and about what the index and eviction take."""
SIZES, SIZE_DIM, HOT_ROWS, SIZE_ROW_BYTES = (1, 4, 16, 100), 16, 50_000, 110
"""Millions of rows of the tables of dim 16, how many rows are few, and about the bytes of a row."""
SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)
"""Shares of the training part's ids that a table may hold."""


def cells(memory_gib: float, *, full: bool) -> list[Cell]:
    """Return the rungs, the tables by size, the AUC by capacity, and the planner's machines."""
    rungs, steps = [], 60 if full else 20
    for at, rung in enumerate(RUNGS):
        gib = memory_gib / 2 ** (len(RUNGS) - 1 - at)
        run = partial(in_process, gib, ("rung", rung, gib, steps))
        rungs.append(Cell(f"capacity/rung/{rung:g}T", 6 + 5 * memory_gib / 2**at, "measured", run))
    for size in SIZES:
        run = partial(in_process, size * 1e6 * SIZE_ROW_BYTES / 2**30, ("size", size, 10 * steps))
        rungs.append(Cell(f"capacity/size/{size}M", 2 + size / 3, "measured", run))
    rungs += [Cell(f"capacity/auc/{share:g}", 8, "measured", partial(auc_at, share, full)) for share in SHARES]
    return [*rungs, Cell("capacity/plan", 3, "computed", plan)]


def in_process(gib: float, arguments: Sequence[str | float], done: Done) -> Figures:
    """Measure a rung or a size, whose rows take so much memory, in a new process with these arguments."""
    if gib * 2**30 * 1.3 > available_bytes():
        raise CannotRunError(
            f"{gib:g} GiB of rows need {1.3 * gib:.1f} GiB of memory; {available_bytes() / 2**30:.1f} GiB are free"
        )
    command = [sys.executable, "-m", "benchmarks.paper.capacity", *map(str, arguments)]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: Figures = json.loads(output)
    return figures


def measure_rung(rung: float, gib: float, num_steps: float) -> Figures:
    """Fill a table and time steps on it."""
    random, num_rows = np.random.default_rng(0), int(gib * 2**30 / ROW_BYTES)
    id_range = int(rung * 1e12 / DIM)
    stride = id_range // num_rows

    def ids_of(numbers: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the ids of rows: one at a varying place in each of as many parts of the range as there are rows."""
        numbers = numbers.astype(np.uint64)
        return numbers * np.uint64(stride) + (numbers * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(20)) % np.uint64(
            stride
        )

    before, available = resident_bytes(), available_bytes()
    table = satrap.Table("ids", dim=DIM, dtype="float16", optimizer=satrap.RowWiseAdagrad(lr=0.05), capacity=num_rows)
    store = Store(table, seed=1)
    start = time.perf_counter()
    for begin in range(0, num_rows, BATCH_IDS):
        store.lookup(ids_of(np.arange(begin, min(begin + BATCH_IDS, num_rows))))
    filled = time.perf_counter() - start

    def zipf() -> NDArray[Any]:
        return (num_rows ** random.random(BATCH_IDS)).astype(np.int64) - 1

    def with_new() -> NDArray[np.uint64]:
        ids = ids_of(random.integers(0, num_rows, BATCH_IDS))
        ids[: BATCH_IDS // 10] = random.integers(0, id_range, BATCH_IDS // 10, dtype=np.uint64)
        return ids

    counters = read_cpu()
    rates = {
        "uniform": _rows_per_s(store, num_steps, lambda: ids_of(random.integers(0, num_rows, BATCH_IDS))),
        "zipf": _rows_per_s(store, num_steps, lambda: ids_of(zipf())),
    }
    held = len(store)
    rates["unequal"] = _rows_per_s(store, num_steps, with_new)
    resident = resident_bytes() - before
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        store.save(folder)
        saved = time.perf_counter() - start
        sample = ids_of(random.integers(0, num_rows, 1000))
        expected = store.lookup(sample, train=False)
        del store
        start = time.perf_counter()
        loaded = Store.load(folder)
        resumed = time.perf_counter() - start
        if not np.array_equal(expected, loaded.lookup(sample, train=False)):
            raise RuntimeError(f"rung {rung:g} T: the table that was loaded differs from the one that was saved")
    return {
        "ids": id_range, "rows": held, "resident_bytes": resident, "share_of_memory": resident / available,
        "rows_per_s": rates, "fill_rows_per_s": num_rows / filled, "save_seconds": saved, "load_seconds": resumed,
        "noise": noise_between(counters, read_cpu()),
    }  # fmt: skip


def measure_size(millions: float, num_steps: float) -> Figures:
    """Let a table grow to so many rows, and time steps on all of them and on a few."""
    random, num_rows = np.random.default_rng(0), int(millions * 1e6)
    store = Store(satrap.Table("ids", dim=SIZE_DIM, optimizer=satrap.RowWiseAdagrad(lr=0.05)), seed=1)
    counters, start = read_cpu(), time.perf_counter()
    for begin in range(0, num_rows, BATCH_IDS):
        store.lookup(hashed_ids(np.arange(begin, min(begin + BATCH_IDS, num_rows))))
    grown = time.perf_counter() - start
    few = random.integers(0, num_rows, HOT_ROWS)
    rates = {
        "all": _rows_per_s(store, num_steps, lambda: hashed_ids(random.integers(0, num_rows, BATCH_IDS))),
        "few": _rows_per_s(store, num_steps, lambda: hashed_ids(random.choice(few, BATCH_IDS))),
    }
    figures = {"rows": len(store), "rows_per_s": rates, "grown_rows_per_s": num_rows / grown}
    return figures | {"noise": noise_between(counters, read_cpu())}


def _rows_per_s(store: Store, num_steps: float, draw: Callable[[], NDArray[np.uint64]]) -> float:
    """Return the rows that are looked up and updated in a second, by the median step."""
    seconds, gradients = [], np.full((BATCH_IDS, store.table.dim), 1e-4, np.float32)
    for ids in [draw() for _ in range(int(num_steps))]:
        start = time.perf_counter()
        _, ticket = store.lookup_for_update(ids)
        store.update(ticket, gradients)
        seconds.append(time.perf_counter() - start)
    return BATCH_IDS / float(np.median(seconds[2:]))


def auc_at(share: float, full: bool, done: Done) -> Figures:
    """Train the synthetic data with a table that holds a share of the ids."""
    data = Data("synthetic", None, full)
    split = data.split()
    num_ids = len(np.unique(split.train.ids))
    try:
        setting = replace(tuned(done, "synthetic", "sync"), capacity=round(share * num_ids))
    except KeyError:
        raise CannotRunError("the learning rates are missing: run the experiment `convergence` first") from None
    aucs = [train(setting, split, seed)["auc"] for seed in range(5 if full else 3)]
    return {"share": share, "capacity": setting.capacity, "num_ids": num_ids, "auc": interval(aucs)}


def plan(done: Done) -> Figures:
    """Return what `satrap plan` finds for the paper's largest model."""
    folder = ROOT / "examples" / "planning"
    command = [sys.executable, "-m", "satrap", "plan", str(folder / "paper.toml"), "--json"]
    command += ["--machines", str(folder / "machines.toml")]
    output = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    names = ("samples_per_second", "price_per_hour", "price_per_billion_samples", "price_source", "pools")
    return {name: output[name] for name in names}


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    measures: dict[str, Callable[..., Figures]] = {"rung": measure_rung, "size": measure_size}
    print(json.dumps(measures[kind](*map(float, given))))
