"""Calibration: each measurement runs, and finds a possible cost. One of them is drawn, since they take seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from satrap.planning import calibration
from satrap.planning.coefficients import DEFAULTS, Cost


def servers(folder: Path) -> list[float]:
    found = calibration._with_servers(DEFAULTS, folder)
    assert found.call < 0.1 and 1e7 < found.server_bytes < 1e9
    return [found.client.seconds(1000, 1e5), found.server.seconds(1000, 1e5), found.start]


def reduces(folder: Path) -> list[float]:
    step, byte = calibration._reduce_seconds(folder)
    assert byte >= 0
    return [step]


def this_process(folder: Path) -> list[float]:
    flops = calibration._flops_per_second()
    assert 1e8 < flops < 1e13
    cost: Cost = calibration.fit_cost([calibration._loop(shape)[0] for shape in calibration._SHAPES])
    return [cost.seconds(1000, 1e5), *calibration._checkpoint_seconds(folder), calibration._read_seconds(folder)]


@pytest.mark.cluster  # two of three measurements start processes
@pytest.mark.draw(1)
@pytest.mark.parametrize("measure", [servers, reduces, this_process])
def test_a_measurement(measure: Callable[[Path], list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SECONDS", 0.02)
    monkeypatch.setattr(calibration, "_SHAPES", ((16, 4), (256, 4), (256, 32)))
    with tempfile.TemporaryDirectory() as folder:  # sockets have short paths
        assert all(0 < each < 60 for each in measure(Path(folder)))
