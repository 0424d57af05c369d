"""Tables with `num_rows` on a device, if there is too little memory for their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from device_workers import ArrayWorker
from satrap import Table
from satrap.config.features import Features
from satrap.data.inputs import Inputs
from satrap.device import home_memory
from satrap.device.direct_heads import DirectHeads
from satrap.device.home_memory import HomeMemory
from satrap.device.row_memory import RowMemory
from satrap.errors import CapacityError

NUM_ROWS = 60
IDS = np.arange(NUM_ROWS, dtype=np.uint64)


NO_MEMORY: dict[str, tuple[Any, str, str]] = {
    "rows": (
        (RowMemory, "_empty"),
        "all",
        "cpu has no memory for 60 rows: expected 1,920 bytes. A table with num_rows",
    ),
    "heads": (
        (DirectHeads, "_empty"),
        "all",
        "cpu has no memory for the stamps and versions of 60 rows: expected 480 bytes. A table with num_rows",
    ),
    "home": (
        (HomeMemory, "_allocate"),
        "none",
        "this process has no memory for 60 rows at home: expected 2,048 bytes beside the 0 that it holds. A table with "
        "num_rows",
    ),
}


@pytest.mark.parametrize("what", NO_MEMORY)
def test_a_device_without_memory_for_all_rows(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call tries again."""
    monkeypatch.setattr(home_memory, "SEGMENT_BYTES", 512)
    (owner, method), share, expected = NO_MEMORY[what]
    item = Table("item", dim=4, num_rows=NUM_ROWS)
    worker = ArrayWorker(Features({"item": item}), "cpu", device_memory={"item": share})
    inputs = Inputs(names=("item",), values=IDS[:5], batch_size=5)
    with monkeypatch.context() as short, pytest.raises(CapacityError) as raised:
        short.setattr(owner, method, lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        worker.lookup(inputs)
    assert f"'item': {expected}" in str(raised.value)
    assert len(worker.tables["item"]) == 0
    assert worker.lookup(inputs).block.any()
    assert worker.tables["item"].stats()["bytes"] > NUM_ROWS * (4 * 4 * 2 + 8)


def test_more_rows_at_home_than_the_machine_has_memory_for_are_refused_before_they_are_allocated() -> None:
    item = Table("item", dim=4096, num_rows=2**31 - 2)
    worker = ArrayWorker(Features({"item": item}), "cpu", device_memory={"item": "none"})
    with pytest.raises(CapacityError, match=r"'item': this process has no memory for .* bytes .*, of [\d,]+ free ones"):
        worker.lookup(Inputs(names=("item",), values=IDS[:5], batch_size=5))
    assert len(worker.tables["item"]) == 0
