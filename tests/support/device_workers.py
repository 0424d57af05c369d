"""Workers with rows on a device, by default the CPU, beside workers with rows in the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bag_oracle import UNIVERSE
from satrap.config.features import Features
from satrap.data.inputs import Inputs
from satrap.device.device_worker import device_worker
from satrap.worker.local_rows import local_worker
from satrap.worker.worker import LookupResult

TIERS = ("on_device", "at_home", "moved_in", "moved_out")
"""Counters of where rows are."""


class ArrayWorker:
    """A worker on a device that takes and returns arrays, as the other workers do."""

    def __init__(self, declared: Features, device: str, **options: Any) -> None:
        self.worker = device_worker(declared, device, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def lookup(self, *args: Any, **options: Any) -> LookupResult:
        found: LookupResult = self.worker.lookup(*args, **options)
        sequences = {name: rows.cpu().numpy() for name, rows in found.sequences.items()}
        return replace(found, block=found.block.cpu().numpy(), sequences=sequences)

    def update(self, tickets: Any, block_gradients: Any, sequence_gradients: Any = None, **options: Any) -> None:
        device = self.worker.device
        blocks = [None if block is None else torch.from_numpy(block).to(device) for block in block_gradients]
        if sequence_gradients is not None:
            sequence_gradients = [
                {name: torch.from_numpy(rows).to(device) for name, rows in each.items()} for each in sequence_gradients
            ]
        self.worker.update(tickets, blocks, sequence_gradients, **options)


def as_tensors(inputs: Inputs) -> Inputs:
    """Return the batch with tensors in place of arrays, on the CPU."""
    parts: Any = {
        name: None if (array := getattr(inputs, name)) is None else torch.from_numpy(array)
        for name in ("values", "offsets", "weights", "dense", "label")
    }
    return replace(inputs, **parts)


class SortingWorker(ArrayWorker):
    """The same with ids in tensors, which are sorted as on a GPU where a test says so: `SORTS_IDS`."""

    def lookup(self, inputs: Inputs, **options: Any) -> LookupResult:
        found = super().lookup(as_tensors(inputs), **options)
        return replace(found, masks={name: np.asarray(mask) for name, mask in found.masks.items()})


def pair(declared: Features, seed: int = 3, device: str = "cpu") -> list[Any]:
    return [
        local_worker(declared, seed=seed, num_threads=2),
        ArrayWorker(declared, device, seed=seed, num_threads=2),
    ]


def contents(worker: Any, ids: NDArray[np.uint64] = UNIVERSE) -> Any:
    found = []
    for store in worker.tables.values():
        store.check()
        stats = store.stats()
        assert stats.get("on_device", 0) + stats.get("at_home", 0) == (stats["rows"] if "on_device" in stats else 0)
        counts = {name: count for name, count in stats.items() if name not in ("bytes", *TIERS)}
        found.append((counts, [part.tobytes() for part in store.read(ids)]))
    return found, worker.truncated, worker.tables.latest_step


def assert_equal(workers: Sequence[Any]) -> None:
    expected, *others = [contents(worker) for worker in workers]
    for found in others:
        assert found == expected
