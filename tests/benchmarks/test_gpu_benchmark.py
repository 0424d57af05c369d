"""The GPU benchmark at its smallest: every kind runs on the CPU, and full cases want a GPU."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import cases, plan
from benchmarks.harness.case import Case
from benchmarks.harness.record import make_record

QUICK = cases.quick_cases()


def measure(case: Case) -> dict[str, Any]:
    """Run the processes of one round here, one after another, and return the record."""
    results: dict[str, list[dict[str, Any] | None]] = {}
    for run in plan.plan([case], 0, Path()):
        job = {**run.job, "samples": 64, "device": "cpu", "num_threads": 1}
        done = importlib.import_module(job["module"]).measure(job)
        results[run.label] = [{"peak_resident_bytes": 1, "versions": {}, **done}]
    return make_record(case, results, plan.KINDS[case.kind].record)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_a_case_runs(case: Case) -> None:
    rows = min(case.rows, 39_000 if case.kind == "tiers" else 110_000)
    record = measure(replace(case, rows=rows, num_warmup=1, num_steps=2))
    figures = {name: figure["median"] for name, figure in record["figures"].items()}
    wanted = {
        "resolve": {"ratio"},
        "kernels": {f"{name}_gb_per_s" for name in ("copy", "pool", "update")} | {"pool_share", "update_share"},
        "train": {"samples_per_s", "ratio"},
        "tiers": {"half", "tenth"},
    }
    assert figures.keys() == wanted[case.kind] and all(value >= 0 for value in figures.values())  # rounded


def test_both_contenders_train() -> None:
    """The loss falls, and is about the same at first."""
    case = replace(QUICK[-2], rows=2_600, num_warmup=1, num_steps=25)
    losses = measure(case)["loss"]
    (first, last), (of_torch, last_of_torch) = losses["satrap"][0], losses["torch"][0]
    assert abs(first - of_torch) < 0.1 and last < first and last_of_torch < of_torch


def test_full_cases_of_a_device_need_a_gpu() -> None:
    for case in cases.full_cases():
        needs = {run.needs for run in plan.plan([case], 0, Path())}
        assert needs == {() if case.kind == "resolve" else (plan.NEEDS_GPU,)}
