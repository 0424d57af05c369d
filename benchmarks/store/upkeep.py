"""Measuring bytes per row, growth, snapshots and saves beside training, which an array of fixed size does not have.
Satrap only.

Each function builds a store, does its work once and returns numbers. Ids are hashed row numbers.
"""

import itertools
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import satrap
from benchmarks.harness.clock import noise_between, read_cpu, resident_bytes
from benchmarks.workload import BATCH_IDS, Ids, gradients, hashed_ids, row_numbers
from satrap.table.store import Store
from satrap.table.table_group import TableGroup

FLOAT_BYTES = 4
FILL_IDS = 16384  # small batches: the lookup's own buffers should not show in the memory of a small table
OVERFILL = 1.1
NUM_COMPARED = 1000
NUM_SAVES = 5
NUM_BATCHES = 30


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one kind as the stream of a run."""
    kinds = {
        "memory": measure_memory,
        "growth": measure_growth,
        "snapshot": measure_snapshot,
        "save_beside": measure_save_beside,
    }
    return {"streams": {f"{job['kind']}:satrap": kinds[job["kind"]](job)}}


def _table(job: dict[str, Any], **options: Any) -> Any:
    optimizers: dict[str, Any] = {
        "sgd": satrap.SGD(lr=0.02),
        "momentum": satrap.SGD(lr=0.02, momentum=0.9),
        "adagrad": satrap.Adagrad(lr=0.02),
        "rowwise": satrap.RowWiseAdagrad(lr=0.02),
        "adam": satrap.Adam(),
        "adamw": satrap.AdamW(),
        "ftrl": satrap.Ftrl(),
    }
    return satrap.Table("bench", dim=job["dim"], optimizer=optimizers[job["optimizer"]], **options)


def _batches(rows: int, size: int) -> Iterator[Ids]:
    """Yield the ids of `rows` different rows, `size` at a time."""
    for begin in range(0, rows, size):
        yield hashed_ids(np.arange(begin, min(begin + size, rows), dtype=np.int64))


def _filled(
    job: dict[str, Any], rows: int, size: int, **options: Any
) -> tuple[dict[str, Any], list[float], list[float]]:
    """Insert rows, `size` at a time; return bytes of a row beyond its values and state, by the table's count and by the
    growth of the process, and the wall and the CPU seconds (of all threads) of each batch."""
    table, dim, num_threads = _table(job, **options), job["dim"], job["num_threads"]
    out = np.zeros((size, dim), np.float32)
    # Code pages and first-time costs of Python are not the table's; the small store stays, so none of it is reused.
    small = Store(table, seed=1, num_threads=num_threads)
    small.lookup(next(_batches(size, size)), out=out)
    before, wall, cpu = resident_bytes(), [], []
    store = Store(table, seed=1, num_threads=num_threads)
    for ids in _batches(rows, size):
        start, start_cpu = time.perf_counter(), time.process_time()
        store.lookup(ids, out=out[: len(ids)])
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    resident = resident_bytes() - before
    raw, held, stats = FLOAT_BYTES * (dim + store.state_dim), len(store), store.stats()
    figures = {
        "rows_held": held,
        "evicted": stats["evicted"],
        "raw_bytes_per_row": raw,
        "overhead_bytes_per_row": round(stats["bytes"] / held - raw, 2),
        "resident_overhead_bytes_per_row": round(resident / held - raw, 2),
    }
    return figures, wall, cpu


def measure_memory(job: dict[str, Any]) -> dict[str, Any]:
    """Fill a table with 1.1 times its capacity of ids; return the bytes of a row beyond its values and state."""
    rows = job["rows"]
    return _filled(job, int(rows * OVERFILL), FILL_IDS, capacity=rows, on_full="evict")[0]


def measure_growth(job: dict[str, Any]) -> dict[str, Any]:
    """Insert new rows into a table without a capacity; return by how much the longest batch exceeds the median. CPU
    time tells a stall of the table from one of the machine."""
    noise = read_cpu()
    figures, wall, cpu = _filled(job, job["rows"], BATCH_IDS, on_full="grow")
    return {
        **figures,
        "inserted_rows_per_s": round(job["rows"] / sum(wall)),
        "median_batch_ms": round(1e3 * statistics.median(wall), 3),
        "longest_batch_ms": round(1e3 * max(wall), 3),
        "stall_ms": round(1e3 * (max(wall) - statistics.median(wall)), 3),
        "cpu_stall_ms": round(1e3 * (max(cpu) - statistics.median(cpu)), 3),
        **noise_between(noise, read_cpu()),
    }


def measure_snapshot(job: dict[str, Any]) -> dict[str, Any]:
    """Save a table into memory-backed files and load it; return bytes of the files over wall time, in GB/s.

    `plain_write` and `plain_read` are the rates of one thread that only copies, in the same folder.
    """
    rows, num_threads, folder = job["rows"], job["num_threads"], Path(job["folder"])
    store = Store(_table(job, capacity=int(rows * 1.05)), seed=1, num_threads=num_threads)
    for ids in _batches(rows, BATCH_IDS):
        store.lookup(ids)
    compared = next(_batches(NUM_COMPARED, NUM_COMPARED))
    expected = store.lookup(compared, train=False)
    plain = _plain_copy(folder / "plain", min(1 << 30, FLOAT_BYTES * rows * job["dim"]))
    noise = read_cpu()
    start = time.perf_counter()
    store.save(folder / "snapshot")
    save_seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in (folder / "snapshot").rglob("*") if file.is_file())
    del store  # the loaded table takes its place in memory
    start = time.perf_counter()
    loaded = Store.load(folder / "snapshot", num_threads=num_threads)
    load_seconds = time.perf_counter() - start
    after = noise_between(noise, read_cpu())
    if len(loaded) != rows or not np.array_equal(loaded.lookup(compared, train=False), expected):
        raise RuntimeError("the loaded table differs from the saved one")
    rates = {"save_gb_per_s": size / save_seconds, "load_gb_per_s": size / load_seconds, **plain}
    return {"file_bytes": size, **{name: round(rate / 1e9, 3) for name, rate in rates.items()}, **after}


def measure_save_beside(job: dict[str, Any]) -> dict[str, Any]:
    """Train a table while a thread saves it five times; return by how much the longest step during a save exceeds the
    median step without one, and the rate of training meanwhile over that without a save. The writer has a core to
    itself if the table's threads leave one."""
    rows, folder = job["rows"], Path(job["folder"])
    group = TableGroup([_table(job, capacity=int(rows * 1.05))], seed=1, num_threads=job["num_threads"])
    store = group["bench"]
    for ids in _batches(rows, BATCH_IDS):
        store.lookup(ids)
    batches = [hashed_ids(numbers) for numbers in row_numbers(rows, "zipf", NUM_BATCHES, 0)]
    gradient, out = gradients(job["dim"]), np.zeros((BATCH_IDS, job["dim"]), np.float32)
    numbers = itertools.count()

    def step() -> float:
        """Train one step; return its seconds."""
        start = time.perf_counter()
        _, ticket = store.lookup_for_update(batches[next(numbers) % NUM_BATCHES], out=out)
        store.update(ticket, gradient)
        return time.perf_counter() - start

    stalls, stalls_alone, cuts, seconds, peaks, rates = [], [], [], [], [], []
    noise = read_cpu()
    for number in range(NUM_SAVES):
        alone = [step() for _ in range(NUM_BATCHES)]
        start = time.perf_counter()
        cut = group.take_cut()
        cuts.append(time.perf_counter() - start)
        writer = threading.Thread(target=cut.write, args=({"bench": folder / str(number)},), kwargs={"is_full": True})
        writer.start()
        beside = [cuts[-1] + step()]
        while writer.is_alive():
            beside.append(step())
        seconds.append(time.perf_counter() - start)
        stalls.append(max(beside) - statistics.median(alone))
        stalls_alone.append(max(alone) - statistics.median(alone))
        rates.append(statistics.fmean(alone) / statistics.fmean(beside))
        peaks.append(cut.figures()["peak"])
        shutil.rmtree(folder / str(number))
    return {
        "stall_ms": round(1e3 * statistics.median(stalls), 3),
        "longest_stall_ms": round(1e3 * max(stalls), 3),
        "stall_alone_ms": round(1e3 * statistics.median(stalls_alone), 3),
        "cut_ms": round(1e3 * statistics.median(cuts), 3),
        "save_seconds": round(statistics.median(seconds), 3),
        "rate_meanwhile": round(statistics.median(rates), 3),
        "median_step_ms": round(1e3 * statistics.median(alone), 3),
        "old_rows_mb": round(max(peaks) / 1e6, 1),
        "waits": cut.figures()["waits"],
        **noise_between(noise, read_cpu()),
    }


def _plain_copy(path: Path, size: int) -> dict[str, float]:
    """Write and read a file; return bytes per second."""
    block = bytearray(os.urandom(1 << 20) * 16)
    num_blocks = max(1, size // len(block))
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(num_blocks):
            file.write(block)
    middle = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass
    end = time.perf_counter()
    path.unlink()
    copied = num_blocks * len(block)
    return {"plain_write_gb_per_s": copied / (middle - start), "plain_read_gb_per_s": copied / (end - middle)}
