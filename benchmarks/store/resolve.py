"""The core's part of a step of rows on a device, in turn with a store's lookup of the same ids. It needs no device.

resolve   `lookup_frames`: the frame of each id
update    `update_frames`: the runs of a batch's gradients, for a ticket of `resolve`
lookup    `lookup(train=True)` of a store with rows of the same dim in memory
"""

from typing import Any

import numpy as np

from benchmarks.contenders.satrap_table import FEATURES, SatrapTable
from benchmarks.harness.clock import time_steps
from benchmarks.harness.ranks import use_threads
from benchmarks.workload import BATCH_IDS, SAMPLES, hashed_ids, row_numbers, total_rows
from satrap import _core
from satrap.config.features import Features
from satrap.table.engine import native_config
from satrap.worker.rows import native_features

TURN = 10
"""Steps of one contender before the other's."""


class Directory:
    """The core's part of rows on a device: which frame each id has, and which gradients each frame gets."""

    def __init__(self, store: SatrapTable, rows: int, num_threads: int) -> None:
        features = Features(dict.fromkeys(FEATURES, store.store.table))
        self.engine = _core.Engine([native_config(store.store.table, 0)], 1, num_threads)
        self.bags = _core.Bags(self.engine, native_features(features, features.tables))
        self.frames = np.empty(BATCH_IDS, np.int32)
        self.tickets: list[_core.Ticket] = []
        count = total_rows(rows)
        for begin in range(0, count, BATCH_IDS):
            self.resolve(hashed_ids(np.arange(begin, begin + BATCH_IDS) % count))
            self.engine.drop(self.tickets.pop())

    def resolve(self, ids: Any) -> None:
        """Find the frames of a batch, and keep its ticket."""
        found = self.engine.lookup_frames(self.bags, ids, None, None, SAMPLES, 0, 0, True, self.frames)
        self.engine.take_inserted()
        self.tickets.append(found["ticket"])

    def update(self, _: Any) -> None:
        """Order the gradients of the oldest batch that waits."""
        self.engine.update_frames([self.tickets.pop(0)], [(True, [])], 1, False)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Time all in turn, on tables with all rows."""
    use_threads(job["num_threads"])
    store = SatrapTable(rows=job["rows"], dim=job["dim"], optimizer="adagrad", num_threads=job["num_threads"])
    directory = Directory(store, job["rows"], job["num_threads"])
    num_steps = job["num_warmup"] + job["num_steps"]
    batches = [hashed_ids(batch) for batch in row_numbers(job["rows"], job["ids"], num_steps, job["part"])]
    steps = {"resolve": directory.resolve, "update": directory.update, "lookup": store.lookup}
    streams: dict[str, list[Any]] = {label: [] for label in steps}
    for begin in range(job["num_warmup"], num_steps, TURN):
        part = batches[max(0, begin - job["num_warmup"]) : begin + TURN]
        warmup = len(part) - min(TURN, num_steps - begin)
        for label, step in steps.items():
            streams[label].append(time_steps(step, part, num_warmup=warmup, ids_per_step=BATCH_IDS))
    return {"streams": {f"{job['ids']}:{label}": _together(turns) for label, turns in streams.items()}}


def _together(turns: list[Any]) -> dict[str, Any]:
    """Return the median turn, noisy if any turn was."""
    middle = sorted(turns, key=lambda turn: turn["rows_per_s"])[len(turns) // 2]
    return {**middle, "noisy": any(turn["noisy"] for turn in turns)}
