"""The planner's benchmark: its predictions. `python -m benchmarks.plan --quick` runs all of it."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.harness.case import Case
from benchmarks.plan import job, runs
from benchmarks.plan.__main__ import CASES, SUITE

from satrap.data.synthetic import Clicks
from satrap.planning.coefficients import DEFAULTS


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.kind))
def test_a_prediction(case: Case, tmp_path: Path) -> None:
    (run,) = SUITE.kinds[case.kind].plan([case], 0, tmp_path)
    assert run.job == {**asdict(case), "module": "benchmarks.plan.runs", "data": str(tmp_path)}
    path = tmp_path / "clicks.txt"
    path.write_bytes(bytes(240 * runs.SAMPLES))
    clicks = Clicks(num_samples=runs.SAMPLES, cardinalities=100_000)
    held = dict.fromkeys(job.tables_of(16), 100)
    predicted = runs.predict(run.job, path, clicks, DEFAULTS, held)
    assert predicted["samples_per_s"] * predicted["cpu_seconds"] <= 1.001 * len(os.sched_getaffinity(0))
    values_and_state = 8 * case.dim
    assert values_and_state + 24 <= predicted["row_bytes"] < 30 * values_and_state  # small tables are half empty
