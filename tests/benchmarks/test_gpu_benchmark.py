"""The GPU benchmark at its smallest: every kind runs on the CPU, and full cases want a GPU."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import cases, devices, plan, roofline, sizes
from benchmarks.gpu.__main__ import SUITE, main
from benchmarks.harness import peers, rounds
from benchmarks.harness.case import Case
from benchmarks.harness.record import complaints, make_record

QUICK = {case.kind: case for case in reversed(cases.quick_cases())}
KERNELS = ("pool", "update", "exchange")
STEPS = {"samples_per_s", "bound", "share"}
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "SMALL_COPY_BYTES", 1 << 16)


def measure(case: Case) -> dict[str, Any]:
    """Run the processes of one round here, one after another, and return the record."""
    results: dict[str, list[dict[str, Any] | None]] = {}
    for run in plan.plan([case], 0, Path()):
        if plan.NEEDS_FBGEMM in run.needs:
            continue
        job = {**run.job, "samples": 64, "device": "cpu", "num_threads": 1}
        done = importlib.import_module(job["module"]).measure(job)
        results[run.label] = [{"peak_resident_bytes": 1, "versions": {}, **done}]
    return make_record(case, results, plan.KINDS[case.kind].record)


@pytest.mark.parametrize("kind", QUICK)
def test_a_case_runs(kind: str) -> None:
    rows = min(QUICK[kind].rows, 39_000 if kind in ("tiers", "largest") else 110_000)
    record = measure(replace(QUICK[kind], rows=rows, num_warmup=1, num_steps=2))
    json.dumps(record)
    figures = {name: figure["median"] for name, figure in record["figures"].items()}
    moved = {f"{name}_gb_per_s" for name in (*KERNELS, "copy", "bus", "to_home", "initialise")}
    wanted = {
        "resolve": {"ratio", "resolve_rows_per_s", "update_rows_per_s"},
        "kernels": moved
        | {f"{name}_share" for name in KERNELS}
        | {"to_home_share_of_bus", "initialise_share_of_bus", "pool_rows_per_s", "step_rows_per_s"}
        | {"pool_ratio_torch", "step_ratio_torch"},
        "train": {"samples_per_s", "ratio"},
        "ablation": {"amp", "fused_tables", "compile"},
        "tiers": {"half", "tenth"},
        "largest": {"samples_per_s", "rows_found", "on_device_share", "moved_rows_per_step"},
    }
    assert figures.keys() == wanted[kind] and all(value >= 0 for value in figures.values())  # rounded
    assert record.get("published") == cases.PUBLISHED.get(kind)
    if kind in ("train", "ablation", "tiers", "largest"):
        found = record["roofline"]
        assert record["roofline"].keys() > STEPS and found["bound"] in ("memory", "bus", "host")
        assert found["share"] > 0 and found["samples_per_s"].keys() == {"memory", "bus", "host"}
        assert "the device is cpu" in record["not_compared"]
    if kind == "largest":
        assert 0 < figures["on_device_share"] < 1 and record["parameters"] == figures["rows_found"] * 16


def test_both_contenders_train() -> None:
    """The loss falls, and is about the same at first."""
    case = replace(QUICK["train"], rows=2_600, num_warmup=1, num_steps=25)
    losses = measure(case)["loss"]
    (first, last), (of_torch, last_of_torch) = losses["satrap"][0], losses["torch"][0]
    assert abs(first - of_torch) < 0.1 and last < first and last_of_torch < of_torch


def test_tables_that_are_not_fused_have_memories_of_their_own() -> None:
    """And the same losses, to the last bit."""
    from benchmarks.gpu.training import SatrapJob

    case = replace(QUICK["ablation"], rows=2_600, precision="fp32")
    jobs = {run.label: {**run.job, "samples": 64} for run in plan.plan([case], 0, Path())}
    for label, memories in (("all", 1), ("no_fused", 26)):
        worker: Any = SatrapJob(jobs[label], torch.device("cpu")).embeddings.worker
        assert len(worker._device_rows._engine.memories) == memories
        assert all(memory.home is None for memory in worker._device_rows._engine.memories)
        assert sum(len(store) for store in worker.tables.values()) == 2_600
    losses = measure(replace(case, num_warmup=1, num_steps=3))["loss"]
    assert losses["all"] == losses["no_fused"] == losses["no_compile"]


def test_full_cases_of_a_device_need_a_gpu() -> None:
    for case in cases.full_cases():
        needs = {plan.NEEDS_GPU in run.needs for run in plan.plan([case], 0, Path())}
        assert needs == {case.kind != "resolve"}


@pytest.mark.parametrize(
    ("name", "is_comparable"),
    [
        ("NVIDIA H200", True),
        ("NVIDIA B200", True),
        ("NVIDIA H100 80GB HBM3", False),
        ("NVIDIA GH200 480GB", False),
        ("cpu", False),
    ],
)
def test_targets_are_those_of_a_class_of_devices(
    name: str, is_comparable: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("plan", "__main__"):
        monkeypatch.setattr(f"benchmarks.gpu.{module}.describe_device", lambda: name)
    options = Namespace(quick=False, check=True, threads=2, warmup=None, steps=None)
    found = {case.kind for case in SUITE.cases(options) if case.targets}
    assert found == ({"resolve", "kernels", "train", "largest"} if is_comparable else {"resolve"})
    printed = capsys.readouterr().err
    assert printed == ("" if is_comparable else f"no target but those of resolve is compared: the device is {name}, "
                       "and the targets are those of a GPU of the H200 class\n")  # fmt: skip
    case = replace(QUICK["train"], targets=(cases.TRAIN,) if is_comparable else ())
    stream = dict.fromkeys(("samples_per_s", "step_ms", "copy_gb_per_s", "bus_gb_per_s", "resolve_ids_per_s"), 1e6)
    stream |= dict.fromkeys(("moved_rows_per_step", "unique_per_sample", "loss_first", "loss_last"), 1.0)
    result = {"streams": {f"{case.stream}satrap": stream}, "peak_resident_bytes": 1, "versions": {}}
    record = make_record(case, {"satrap": [result]}, plan.record_train)
    assert record["moonshot"]["met"] is (False if is_comparable else None)
    assert ("flops" in record["roofline"]["samples_per_s"]) == (devices.sheet_of(name) is not None)
    assert len(complaints(record)) == is_comparable


def test_without_a_gpu_full_cases_are_left_out_and_none_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which would measure them")
    monkeypatch.setattr(rounds, "_start", lambda *_: pytest.fail("a case was started"))
    monkeypatch.setattr(peers, "runs", lambda python, statement: statement != plan.NEEDS_GPU)  # without an interpreter
    assert main(["--case", "train", "largest", "kernels", "ablation", "--check", "--rounds", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and "left out" in printed.err and "no target but those of resolve" in printed.err


def test_the_largest_model_fits() -> None:
    """At any size: a row more would not fit, or all that is wanted is there."""
    row = 256
    for device_rows, host_rows in ((0, 5_000), (900, 5_000), (5_000, 5_000), (20_000, 900), (20_000, 50_000)):
        memory = sizes.Memory(device=device_rows * row, host=host_rows * row)
        found = sizes.largest(10_000, memory, row)
        at_home = found.rows - found.on_device
        frames = found.on_device if at_home else 0
        used = at_home * row + found.rows * sizes.DIRECTORY_BYTES + frames * sizes.FRAME_BYTES
        assert found.on_device <= device_rows and used <= memory.host and found.rows <= 10_000
        assert (found.device_memory(row) is None) == (at_home == 0)
        enough = 27 * (row + sizes.DIRECTORY_BYTES) + device_rows * sizes.FRAME_BYTES
        assert found.rows > 10_000 - 26 or memory.host - used < enough
    with pytest.raises(MemoryError, match="no row of 256 bytes fits"):
        sizes.largest(10_000, sizes.Memory(device=1 << 20, host=20), row)
    parameters = cases.LARGEST_ROWS * 128
    assert parameters >= 113e9


def test_the_roofline_counts_a_sample() -> None:
    """By hand: 26 rows of 512 bytes are read and written as a block, their gradients are read four times and magnitudes
    written once, and each distinct row is read and written."""
    sample = roofline.sample_of(128, 26, is_half=False)
    assert sample.rows_bytes == 26 * (512 + 512 + 4) + 26 * 3 * 512 + 26 * (512 + 4) + 26 * (1024 + 12)
    assert sample.bus_bytes == 26 * 4 + 14 * 4 + 26 * 4 + 26 * 12
    layers = 13 * 512 + 512 * 256 + 256 * 128 + 479 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    assert sample.flops == 6 * (layers + 27 * 27 * 128)
    fewer = roofline.sample_of(128, 10, is_half=True)
    assert fewer.rows_bytes == sample.rows_bytes - 16 * (1024 + 12) and fewer.dense_bytes < sample.dense_bytes
    found = roofline.describe(sample, {"memory": 4.8e12, "bus": None, "host": 26e6, "flops": 1e15}, 5e5, {})
    assert found["bound"] == "host" and found["share"] == 0.5 and "bus" not in found["samples_per_s"]
    on_host = roofline.of_host(52e6, 52e6, 2)
    assert on_host["samples_per_s"] == 1_000_000 and on_host["samples_per_s_on_16_cores"] == 8_000_000
    assert on_host["cores_of_target"] == 18.2 and on_host["cores_of_moonshot"] == 24.0


def test_the_table_of_the_design_note_is_made_from_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rates of a core are those of the run with most threads."""

    def record(ids: str, threads: int, rate: float) -> str:
        rates = {name: {"median": rate} for name in ("resolve", "update", "lookup")}
        return json.dumps({"kind": "resolve", "ids": ids, "num_threads": threads, "rows_per_s": rates})

    path = tmp_path / "gpu.jsonl"
    lines = [
        record("zipf", 2, 100e6),
        record("zipf", 1, 90e6),
        record("uniform", 1, 26e6),
        json.dumps({"kind": "train"}),
    ]
    path.write_text("\n".join(lines))
    roofline.main(str(path))
    printed = capsys.readouterr().out
    assert "| a sample | zipf | uniform |" in printed and "| of the host, 16 cores | 15.4 | 8.0 |" in printed
    assert "| cores for 9.1 M samples/s | 9.5 | 18.2 |" in printed
