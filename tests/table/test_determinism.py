"""One result for any number of threads and any SIMD path, bit for bit, down to the saved columns.

A workload of large random batches (with duplicates, eviction, admission, expiry, evaluation, late steps, 16-bit
values) is run once on the portable path with one thread, then with every other combination; everything that can be
seen is digested.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contents import counters
from satrap import _core
from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, RowWiseAdagrad
from satrap.config.tables import MinCount, Normal, Probability, Table, Uniform
from satrap.table.store import Store
from snapshots import as_numpy, manifest, read_file

WAYS = [(threads, simd) for simd in _core.simd_paths() for threads in (1, 2, 3, 5)]

TABLES = [
    Table("sgd", dim=24, optimizer=SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), initial=Normal()),
    Table("adagrad", dim=16, optimizer=Adagrad(lr=0.1), capacity=1800, num_buckets=16),
    Table("adagrad16", dim=17, optimizer=Adagrad(lr=0.1), capacity=1800, num_buckets=4, dtype="float16"),
    Table("rowwise", dim=64, optimizer=RowWiseAdagrad(lr=0.1), initial=Uniform(low=-1, high=1), expire_after=4),
    Table(
        "rowwise_odd", dim=37, optimizer=RowWiseAdagrad(lr=0.1, weight_decay=0.1), capacity=1500, admission=MinCount(2)
    ),
    Table("adam", dim=20, optimizer=Adam(lr=0.01), admission=MinCount(2, window=1500), num_buckets=32),
    Table("adamw16", dim=33, optimizer=AdamW(lr=0.01), dtype="bfloat16", capacity=1800, expire_after=5, num_buckets=8),
    Table("ftrl", dim=9, optimizer=Ftrl(lr=0.1, l1=0.01, l2=0.1), admission=Probability(0.5), initial=Normal(std=0.3)),
    Table("sgd1", dim=1, optimizer=SGD(lr=0.1), capacity=1800, num_buckets=1, on_nonfinite="skip"),
]


def saved_columns(path: Path) -> list[bytes]:
    """Returns every column of every file of a snapshot, in the order of its manifest."""
    columns: dict[tuple[str, str], list[bytes]] = {}
    for file in manifest(path)["files"]:
        table = read_file(path / file["name"])
        for name in table.column_names:
            columns.setdefault((file["kind"], name), []).append(as_numpy(table.column(name)).tobytes())
    return [str(key).encode() + b"".join(columns[key]) for key in sorted(columns)]


def run(table: Table, seed: int, num_threads: int, simd: str, folder: Path) -> dict[str, Any]:
    """Runs the workload; returns its results in a form that can be compared."""
    store = Store(table, seed=seed, num_threads=num_threads, simd=simd)
    assert (store.num_threads, store.simd) == (num_threads, simd)
    rng = np.random.default_rng(seed)
    rows = hashlib.sha256()
    for step in range(1, 9):
        ids = (rng.zipf(1.3, size=3000) % 6000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        gradients = rng.normal(size=(len(ids), table.dim)).astype(np.float32)
        if table.on_nonfinite == "skip":
            gradients[rng.integers(len(ids), size=20), 0] = np.nan
        looked_up, ticket = store.lookup_for_update(ids, step=step)
        rows.update(looked_up.tobytes())
        if step % 2:
            store.update(ticket, gradients, step=step, lr=0.05 * step)
        else:
            store.update(ids, gradients, step=step)
        rows.update(store.lookup(ids[::-1], train=False).tobytes())
        if step == 5:
            store.lookup(ids[:200], step=2, oldest_open=1)
    everything = np.arange(6000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    read = store.read(everything)
    store.save(folder)
    return {
        "rows": rows.hexdigest(),
        "present": read.present.tobytes(),
        "values": read.values.tobytes(),
        "state": read.state.tobytes(),
        "stats": counters(store),
        "saved": saved_columns(folder),
    }


@pytest.mark.draw(4)
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_threads_and_simd_change_nothing(table: Table, seed: int, tmp_path: Path) -> None:
    wanted = run(table, seed, 1, "portable", tmp_path / "wanted")
    assert wanted["stats"]["rows"] > 400, "the workload does nothing"
    for num_threads, simd in WAYS:
        found = run(table, seed, num_threads, simd, tmp_path / f"{simd}-{num_threads}")
        for what in wanted:
            assert found[what] == wanted[what], f"{what} differ with {num_threads} threads on {simd}"


def test_the_workload_evicts_refuses_expires_and_skips(seed: int, tmp_path: Path) -> None:
    """Otherwise the test above would show less than it claims."""
    stats = [run(table, seed, 2, _core.simd_paths()[0], tmp_path / table.name)["stats"] for table in TABLES]
    assert {name for name in stats[0] if not any(each[name] for each in stats)} == {"repeated"}


# -- the caller's float mode -------------------------------------------------------------------------------------------

TINY_IDS = np.arange(4000, dtype=np.uint64)  # enough to wake all threads
TINY = [
    Table("half", dim=8, optimizer=SGD(lr=1.0), initial=Normal(std=1e-6), dtype="float16"),
    Table(
        "brain", dim=8, optimizer=SGD(lr=1.0, momentum=0.5), initial=Uniform(low=-1e-38, high=1e-38), dtype="bfloat16"
    ),
    Table(
        "single",
        dim=24,
        optimizer=Adagrad(lr=1e-25, eps=1e-40, initial_accumulator_value=1e-42),
        initial=Uniform(low=-1e-39, high=1e-39),
    ),
    Table("row", dim=17, optimizer=RowWiseAdagrad(lr=1e-25, eps=1e-40), initial=Normal(std=1e-39)),
    Table("adam", dim=5, optimizer=Adam(lr=1e-39), initial=Normal(std=1e-39)),
    Table("ftrl", dim=8, optimizer=Ftrl(lr=1.0, beta=1e-3, l1=1e-42, l2=1e-41), initial=Normal(std=1e-39)),
]


@contextmanager
def flushed(flush: bool) -> Iterator[None]:
    """Makes this thread, and those that it starts, flush subnormal numbers to 0, as torch allows."""
    if flush and not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def tiny_numbers(table: Table, num_threads: int, *, make: bool, use: bool) -> list[bytes]:
    """Returns everything observable of a table of subnormal numbers, created and used with or without flushing them."""
    rng = np.random.default_rng(1)
    gradients = [(rng.normal(size=(2 * len(TINY_IDS), table.dim)) * 1e-39).astype(np.float32) for _ in range(3)]
    ids = np.concatenate([TINY_IDS, TINY_IDS[::-1]])
    with flushed(make):
        store = Store(table, num_threads=num_threads)
    seen = [store.lookup(TINY_IDS, train=False)]
    with flushed(use):
        for gradient in gradients:
            rows, ticket = store.lookup_for_update(ids)
            store.update(ticket, gradient)
            seen += [rows, store.lookup(TINY_IDS, train=False)]
        seen += [store.lookup(TINY_IDS[:100], train=False), *store.read(TINY_IDS)[:2]]
        mode = np.array([1e-40], np.float32) * np.float32(1.0)
    assert (mode.view(np.uint32)[0] == 0) == use, "a call changed the caller's own mode"
    return [part.tobytes() for part in seen]


@pytest.mark.parametrize("table", TINY, ids=lambda table: table.name)
def test_the_callers_float_mode_changes_nothing(table: Table) -> None:
    """Flushing is a mode of each thread: results would differ between the caller's and the pool's."""
    wanted = tiny_numbers(table, 1, make=False, use=False)
    initial = np.abs(np.frombuffer(wanted[0], np.float32))
    assert np.mean((initial > 0) & (initial < (6.1e-5 if table.dtype == "float16" else 1.17e-38))) > 0.5
    for num_threads in (1, 2):
        for make, use in ((False, False), (True, False), (False, True), (True, True)):
            assert tiny_numbers(table, num_threads, make=make, use=use) == wanted, (num_threads, make, use)
