"""Random call sequences of rows on a device against the dictionary model of oracle.py: see store_machine.py.

A device has no calls of flat ids, so a batch of one feature stands for them. What a device saves is loaded here too."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from numpy.typing import NDArray

from device_workers import as_tensors
from satrap.config.features import Features
from satrap.config.tables import Table
from satrap.data.inputs import Inputs
from satrap.device import device_ids
from satrap.device.device_worker import device_worker
from satrap.device.home_memory import RowLayout
from satrap.errors import CapacityError
from satrap.table.engine import native_config
from satrap.table.store import Store
from store_machine import StoreMachine, tables

pytestmark = pytest.mark.draw(2)


class DeviceStore:
    """The methods of a Store over one table on a device."""

    def __init__(self, table: Table, seed: int, num_threads: int, **options: Any) -> None:
        self.worker = device_worker(Features({"id": table}), "cpu", seed=seed, num_threads=num_threads, **options)
        self.store: Any = self.worker.tables[table.name]

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


class SortingStore(DeviceStore):
    """The same with ids in tensors, which are sorted as on a GPU."""

    def _inputs(self, ids: NDArray[np.uint64]) -> Inputs:
        return as_tensors(super()._inputs(ids))

    def lookup_for_update(self, ids: NDArray[np.uint64], **step: Any) -> tuple[Any, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(device_ids.SORTS_IDS, "cpu", True)
            return super().lookup_for_update(ids, **step)


class DeviceMachine(StoreMachine):
    has_cuts = False
    updates_ids = False
    position = "sample"

    store_type: type[DeviceStore] = DeviceStore

    def create(self, table: Table, seed: int, num_threads: int) -> DeviceStore:
        return self.store_type(table, seed, num_threads, device_memory=self.device_memory(table))

    def device_memory(self, table: Table) -> Any:
        return None

    def load(self, path: Path, num_threads: int) -> DeviceStore:
        here = Store.load(path, num_threads=1)  # and from there on
        here.save(path.with_name(path.name + "-here"))
        loaded = self.create(self.oracle.table, here.seed, num_threads)
        loaded.worker.tables.restore({here.table.name: [path]})
        return loaded


TestDevice = DeviceMachine.TestCase
TestDevice.settings = settings(max_examples=settings().max_examples // 5)


class SortingMachine(DeviceMachine):
    store_type = SortingStore


TestSorting = SortingMachine.TestCase
TestSorting.settings = settings(max_examples=settings().max_examples // 6)


class TieredMachine(DeviceMachine):
    """With most rows at home: every batch fits on the device, but not with all steps that are open."""

    @initialize(
        table=tables(),
        seed=st.sampled_from([0, 1, 2**64 - 1]),
        num_threads=st.sampled_from([1, 3]),
        frames=st.sampled_from([0, 9, 9, 10, 14, 20]),
    )
    def start(self, table: Table, seed: int, num_threads: int, frames: int = 0) -> None:
        self.frames = frames
        super().start(table=table, seed=seed, num_threads=num_threads)

    def device_memory(self, table: Table) -> Any:
        row_bytes = RowLayout(table.dtype, table.dim, native_config(table).state_dim).row_bytes
        return {table.name: self.frames * row_bytes if self.frames else "none"}

    def _lookup(self, ids: list[int], move: int | None, open_move: int | None) -> Any:
        self.before = deepcopy(self.oracle)
        self.before.latest_step += move is None  # the number of the next step is taken first
        try:
            return super()._lookup(ids, move, open_move)
        except CapacityError as error:
            assert "device_memory" in str(error) and self.frames
            event("no room on the device")
            if "the batch has" in str(error):  # it was refused before anything was changed
                self.oracle = self.before
            return None  # else it has inserted and stamped its rows, as the model has

    def _adopt(self, refused: CapacityError) -> None:
        if "the batch has" in str(refused):
            self.oracle = self.before
        else:
            super()._adopt(refused)

    @invariant()
    def tiers_add_up(self) -> None:
        if hasattr(self, "store"):
            stats = self.store.stats()
            if "on_device" in stats:
                assert stats["on_device"] <= self.frames
                assert stats["on_device"] + stats["at_home"] == stats["rows"]
                event("rows at home" if stats["at_home"] else "all rows fit")


TestTiers = TieredMachine.TestCase
TestTiers.settings = settings(max_examples=settings().max_examples // 6)


class SortingTieredMachine(TieredMachine):
    store_type = SortingStore


TestSortingTiers = SortingTieredMachine.TestCase
TestSortingTiers.settings = settings(max_examples=settings().max_examples // 6)
