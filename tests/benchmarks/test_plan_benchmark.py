"""The planner's benchmark: its pure parts. `python -m benchmarks.plan --quick` runs all of it."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.harness.case import Case
from benchmarks.harness.record import complaints, make_record
from benchmarks.plan import job, runs
from benchmarks.plan.__main__ import KIND, SUITE, plan
from benchmarks.plan.cases import PROCESSES, WITHIN, full_cases

from satrap.data.synthetic import Clicks
from satrap.planning.coefficients import DEFAULTS


def test_every_kind_has_a_run_with_the_targets_of_the_issue() -> None:
    cases = full_cases()
    assert [case.kind for case in cases] == list(PROCESSES) == list(SUITE.kinds)
    for case in cases:
        assert {(target.at_least, target.at_most) for target in case.targets} == {(1 - WITHIN, 1 + WITHIN)}
        (run,) = plan([case], 0, Path("folder"))
        assert run.job["module"] == "benchmarks.plan.runs"


@pytest.mark.parametrize("case", full_cases(), ids=lambda case: str(case.kind))
def test_a_prediction(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "clicks.txt"
    path.write_bytes(bytes(240 * runs.SAMPLES))
    clicks = Clicks(num_samples=runs.SAMPLES, cardinalities=100_000)
    held = dict.fromkeys(job.tables_of(16), 100)
    found = runs.predict(asdict(case), path, clicks, DEFAULTS, held)
    assert found["samples_per_s"] * found["cpu_seconds"] <= 1.001 * len(os.sched_getaffinity(0))
    values_and_state = 8 * case.dim
    assert values_and_state + 24 <= found["row_bytes"] < 30 * values_and_state  # buckets of small tables are half empty


def test_a_prediction_that_is_too_far_off_is_a_complaint() -> None:
    case = full_cases()[0]
    figures = {"cpu": 1.1, "rate": 1.3, "memory": 1.0, "noisy": False}
    result = {"streams": {f"{case.kind}:run": figures}, "peak_resident_bytes": 1, "versions": {}}
    (line,) = complaints(make_record(case, {"run": [result]}, KIND.record))
    assert "rate is 1.3, expected 0.75 to 1.25" in line
