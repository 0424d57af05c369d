"""Random call sequences of rows on a device against the dictionary model of oracle.py: see store_machine.py.

A device has no calls of flat ids, so a batch of one feature stands for them. What a device saves is loaded here too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from numpy.typing import NDArray

from satrap.config.features import Features
from satrap.config.tables import Table
from satrap.data.inputs import Inputs
from satrap.device.device_worker import DeviceWorker
from satrap.table.store import Store
from store_machine import StoreMachine


class DeviceStore:
    """The methods of a Store over one table of a DeviceWorker."""

    def __init__(self, table: Table, seed: int, num_threads: int) -> None:
        self.worker = DeviceWorker(Features({"id": table}), "cpu", seed=seed, num_threads=num_threads)
        self.store = self.worker.tables[table.name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def __len__(self) -> int:
        return len(self.store)

    def _inputs(self, ids: NDArray[np.uint64]) -> Inputs:
        return Inputs(names=("id",), values=ids, batch_size=len(ids))

    def lookup(
        self, ids: NDArray[np.uint64], *, train: bool = True, out: NDArray[np.float32] | None = None, **step: Any
    ) -> Any:
        if train:
            return self.lookup_for_update(ids, **step)[0]
        rows = self.store.lookup(ids, train=False, out=out)
        block = self.worker.lookup(self._inputs(ids), train=False).block
        np.testing.assert_array_equal(rows, block.numpy())
        return rows

    def lookup_for_update(self, ids: NDArray[np.uint64], **step: Any) -> tuple[Any, Any]:
        looked = self.worker.lookup(self._inputs(ids), **step)
        return looked.block.numpy(), looked.ticket

    def update(
        self, ticket: Any, gradients: NDArray[np.float32], *, step: int | None = None, lr: float | None = None
    ) -> None:
        lrs = None if lr is None else {self.store.table.name: lr}
        self.worker.update([ticket], [torch.from_numpy(gradients)], step=step, lrs=lrs)


class DeviceMachine(StoreMachine):
    has_cuts = False
    updates_ids = False
    position = "sample"

    def create(self, table: Table, seed: int, num_threads: int) -> DeviceStore:
        return DeviceStore(table, seed, num_threads)

    def load(self, path: Path, num_threads: int) -> DeviceStore:
        here = Store.load(path, num_threads=1)  # and from there on
        here.save(path.with_name(path.name + "-here"))
        loaded = DeviceStore(here.table, here.seed, num_threads)
        loaded.worker.tables.restore({here.table.name: [path]})
        return loaded


TestDevice = DeviceMachine.TestCase
TestDevice.settings = settings(max_examples=40)
