"""The GPU benchmark on the CPU: what a run leaves in its folder, however it ends, and that a wrong kernel is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.gpu import bandwidth, devices, kernels, roofline, training
from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.child import Job, OutOfTimeError
from benchmarks.gpu.results import Results

import satrap
from child_processes import child_process
from satrap.config.features import Features
from satrap.data.inputs import Inputs
from satrap.device import home_memory, reference
from satrap.device.device_worker import device_worker
from torch_calls import CountedBytes, IdleKernels
from waiting import DEADLINE_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
TINY = replace(
    devices.SMALL, samples=8, checked_samples=8, rows=26 * 60, checked_rows=260, moved_rows=40, copied_bytes=1 << 14
)
EXTRAS = ("zmq", "pyarrow", "obstore", "safetensors", "fsspec", "hypothesis", "pytest")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would measure that"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch.compile
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # torch.compile
]


@contextmanager
def started(out: Path, minutes: float, *options: str, modules: dict[str, str] | None = None) -> Iterator[Any]:
    """Start a run, to which some modules with these texts are importable. It is killed when the context ends."""
    folder = out.with_name("modules")
    folder.mkdir(exist_ok=True)
    for name, text in (modules or {}).items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "benchmarks.gpu", "--minutes", str(minutes), "--out", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with child_process(command, cwd=ROOT, env=environment, text=True, **pipes) as process:
        yield process


def run(out: Path, minutes: float, *options: str, modules: dict[str, str] | None = None) -> tuple[int, str]:
    """Return the status of a run, and what it printed."""
    with started(out, minutes, *options, modules=modules) as process:
        printed, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, printed


def records(out: Path) -> list[dict[str, Any]]:
    text = (out / "results.jsonl").read_text() if (out / "results.jsonl").exists() else ""
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_needs_little_and_ends_in_time(tmp_path: Path) -> None:
    """Without what only tests and servers need. Each part says what it measured, or that its time was over."""
    blocker = f"""
import sys
class Without:
    def __init__(self, finders):
        self.finders = finders
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS}:
            return None
        found = (each.find_spec(name, path, target) for each in self.finders)
        return next((spec for spec in found if spec is not None), None)
sys.meta_path[:] = [Without(list(sys.meta_path))]
"""
    out, start = tmp_path / "out", time.monotonic()
    status, printed = run(out, 0.8, modules={"sitecustomize": blocker})
    assert time.monotonic() - start < 48 + 20, "it took longer than its minutes"
    found = records(out)
    assert status == 0, printed
    assert list(dict.fromkeys(each["part"] for each in found)) == list(PARTS)
    (tests,) = [each for each in found if each["part"] == "tests"]
    assert tests["status"] == "left out" and "No module named 'hypothesis'" in tests["error"]
    assert {each["status"] for each in found} <= {"ok", "left out", "cut"}
    software = found[0]
    assert software["item"] == "software" and "zmq" not in software["imports"] and software["torch"]
    assert {"pool/one id/float32", "update/SGD/float32"} <= {each["item"] for each in found if each["status"] == "ok"}
    names = {each.name for each in out.iterdir()}
    assert {"results.jsonl", "summary.txt"} <= names and len(names) <= 8
    assert all(path.is_file() and path.stat().st_size < 16 << 20 for path in out.iterdir())
    summary = (out / "summary.txt").read_text()
    assert printed.endswith(summary) and "after tiers" in summary and "0 failed" in summary


def test_a_run_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(out, 10, "--parts", "environment", "kernels") as process:
        wait_until(lambda: len(records(out)) >= 6, process)
        process.kill()
        process.wait()
    found = records(out)
    assert [each["item"] for each in found[:4]] == ["software", "device", "copies", "pool/one id/float32"]
    assert all(each["status"] == "ok" for each in found)
    assert "after environment" in (out / "summary.txt").read_text()
    wait_until(lambda: not children_of(out), otherwise=lambda: "a process outlives the run")


def children_of(out: Path) -> list[Path]:
    """Return the processes that write into the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(out).encode() in path.read_bytes():
                found.append(path)
        except OSError:
            continue
    return found


def test_a_run_that_is_ended_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(out, 10, "--parts", "environment", "kernels") as process:
        wait_until(lambda: len(records(out)) >= 4, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 1
    summary = (out / "summary.txt").read_text()
    assert "pool/one id/float32" in summary and "ended from outside" in summary
    wait_until(lambda: not children_of(out))  # that are killed with the run


WRONG = """
from satrap.config.optimizers import Adagrad
from satrap.device.reference import *
from satrap.device.reference import update as _update

def update(values, state, runs, gradients, how):
    summed = _update(values, state, runs, gradients, how)
    if isinstance(how.optimizer, Adagrad):
        CHANGE
    return summed
"""


def test_a_wrong_kernel_ends_the_run_with_its_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = WRONG.replace("CHANGE", "values[3, 5] += 1.0")
    parts = ("--parts", "kernels", "bandwidth", "--kernels", "wrong")
    status, printed = run(out, 10, *parts, modules={"wrong": text})
    assert status == 1 and "stopped, since a kernel failed: update/Adagrad/float32" in printed
    *right, wrong = records(out)
    assert {each["status"] for each in right} == {"ok"} and {each["part"] for each in right} == {"kernels"}
    assert wrong["item"] == "update/Adagrad/float32" and wrong["status"] == "failed"
    assert "1 of " in wrong["error"] and "numbers of values (plain) differ" in wrong["error"]
    assert "the first is at [3, 5]: found" in wrong["error"]


def test_a_crash_loses_one_item(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts = ("--parts", "kernels", "--kernels", "wrong", "--keep-going")
    crash = "import os, sys; print('gone', file=sys.stderr, flush=True); values.dtype != torch.float32 or os.abort()"
    status, _ = run(out, 10, *parts, modules={"wrong": WRONG.replace("CHANGE", crash)})
    found = records(out)
    (crashed,) = [each for each in found if each["status"] != "ok"]
    assert status == 1 and crashed["status"] == "crashed" and crashed["item"] == "update/Adagrad/float32"
    assert "status -6" in crashed["error"] and "gone" in crashed["stderr"]
    assert "gone" in (out / "errors.txt").read_text()
    assert [each["item"] for each in found] == kernels.Kernels(SimpleNamespace(kernels=None, every=1)).names


def test_device_tests_are_run_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails is named; those that take too long are cut."""
    from benchmarks.gpu import __main__ as command

    text = """
import subprocess
import sys
import pytest

@pytest.mark.parametrize("name", ["a b", "c"])
def test_right(name): pass
def test_wrong(): assert False, "on purpose"
def test_slow():
    deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(MANY)"
    subprocess.run([sys.executable, "-c", deaf])
"""
    for many, seconds in ((0, DEADLINE_SECONDS), (600, 15)):
        (tests := tmp_path / f"test_{many}.py").write_text(text.replace("MANY", str(many)))
        monkeypatch.setattr(command, "CPU_TESTS", (str(tests), "--rootdir", str(tmp_path), "-c", "/dev/null"))
        run = command.Run(command.parse(["--minutes", "9", "--out", str(tmp_path / "out")]))
        run._test(time.monotonic() + seconds)
        (record,) = run.results.records
        if many == 0:
            assert record["status"] == "failed" and record["counts"] == "3 passed 1 failed"
            assert "test_wrong FAILED" in record["error"] and len(record["failed"]) == 1
            assert "test_right[a b]" in (tmp_path / "out/tests.txt").read_text()
        else:  # a slow machine may not come to the test that fails
            assert record["status"] in ("cut", "failed") and record["seconds"] < 60


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of this process, at the smallest size."""
    for module in (devices, kernels, bandwidth, training):
        monkeypatch.setattr(module, "sizes", lambda: TINY)
    monkeypatch.setattr(home_memory, "SEGMENT_BYTES", 1 << 16)
    monkeypatch.setattr(training, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(training, "FILL_SECONDS", 0.5)
    return Job(part="kernels", until=time.monotonic() + DEADLINE_SECONDS, out=tmp_path)


def broken(name: str) -> Any:
    """Return kernels of which one changes a bit of the last number that it writes."""

    def wrong(*args: Any, **options: Any) -> Any:
        done = getattr(reference, name)(*args, **options)
        written = {"pool": 7, "copy_sequence": 5, "update": 0, "exchange": 0}[name]
        kernels.as_integers(args[written]).view(-1)[-1] ^= 1
        return done

    return SimpleNamespace(**{**vars(reference), name: wrong})


@pytest.mark.parametrize("name", ["pool", "update", "copy_sequence", "exchange"])
def test_one_wrong_bit_of_any_kernel_is_found(name: str, job: Job) -> None:
    part = kernels.Kernels(job)
    items = [item for item in part.names if item.startswith(f"{name}/")]
    assert len(items) >= 6
    for item in items:
        assert part.measure(item)
        part.kernels = broken(name)
        with pytest.raises(kernels.WrongKernelError, match=r"^1 of .* numbers of .* differ from the reference"):
            part.measure(item)
        part.kernels = reference


def test_wrong_initial_values_are_found(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    part = kernels.Kernels(job)
    items = [item for item in part.names if item.startswith("initial/")]
    assert len(items) == 9 and all(part.measure(item) for item in items)
    real = torch.Tensor.__setitem__
    monkeypatch.setattr(torch.Tensor, "__setitem__", lambda to, at, rows: real(to, at, rows + 1.0))
    for item in items:
        with pytest.raises(kernels.WrongKernelError, match="numbers of values differ from the reference"):
            part.measure(item)


def test_every_optimizer_and_dtype_is_checked(job: Job) -> None:
    from satrap import config

    names = kernels.Kernels(job).names
    assert {type(each).__name__ for each in kernels.OPTIMIZERS.values()} == {
        "SGD", "RowWiseAdagrad", "Adagrad", "Adam", "AdamW", "Ftrl"
    } <= set(vars(config.optimizers))  # fmt: skip
    for dtype in ("float32", "float16", "bfloat16"):
        assert len([name for name in names if name.startswith("update/") and name.endswith(f"/{dtype}")]) == 8


def test_kernels_are_timed_on_values_that_are_verified(job: Job) -> None:
    part: Any = bandwidth.Bandwidth(job)
    for item in part.names:
        found = part.measure(item)
        assert found["gb_per_s"] > 0 and max(found.get("share_of_copy", 0), found.get("share_of_bus", 0)) >= 0
    column = part.measure(f"update/SGD/float32/{bandwidth.COLUMN}")
    assert column["longest"] >= TINY.samples / 3 and min(column["ms"], column["without_column_ms"]) > 0
    for name, item in (("pool", part.names[0]), ("update", part.names[1]), ("copy_sequence", part.names[-1])):
        part.kernels = broken(name)
        if name == "update":  # only some rows are compared: those of most gradients, and of random runs
            part.kernels.update = lambda values, *args, **options: values.add_(1.0)
        with pytest.raises(kernels.WrongKernelError):
            part.measure(item)
    part.kernels = SimpleNamespace(exchange=lambda *_: None)
    with pytest.raises(kernels.WrongKernelError, match="the flags of moved rows"):
        part.measure("exchange/float32")


def test_steps_are_trained_in_every_setting(job: Job) -> None:
    """The settings that the part names, of which some run here; the losses of both contenders fall alike."""
    part = training.Steps(job)
    settings = training.settings()
    assert len(set(part.names)) == len(part.names) == len(settings)
    assert {each.rows for each in settings} == {"float32", "float16", "bfloat16"}
    assert {each.precision for each in settings} == {"fp32", "amp-fp16", "amp-bf16"}
    assert {(each.compiled, each.staleness) for each in settings} == {(False, 0), (True, 0), (True, 1)}
    assert {(setting.contender, setting.ids) for setting in settings} - {("torch_bags", "zipf")} == {
        (name, ids) for name in ("satrap", "satrap_direct", "torch") for ids in ("zipf", "uniform")
    }
    ways = [(precision, compiled) for precision in ("fp32", "amp-fp16") for compiled in (False, True)]
    trained = {(setting.contender, setting.precision, setting.compiled) for setting in settings}
    for name in ("satrap", "satrap_direct", "torch", "torch_bags"):
        assert {(name, *way) for way in ways} <= trained, "NVIDIA's ablation"
    losses = []
    wanted = ["satrap/float16", "satrap/float32/amp-bf16", "satrap_direct/float32/amp-bf16", "satrap_direct/float16"]
    wanted += ["satrap/float32/fp32/compiled", "torch_bags/float32/fp32/eager", "torch_bags/float32/amp-fp16/compiled"]
    others = (next(name for name in part.names if name.startswith(each)) for each in wanted)
    for item in (*part.names[:4], *others):
        found = part.measure(item)
        json.dumps(found)
        assert found["samples_per_s"] > 0 and found["range"][0] <= found["samples_per_s"] <= found["range"][1]
        assert found["rows"] == TINY.rows and found["samples"] == TINY.samples
        losses.append(found["loss"])
    assert all(abs(first - losses[0][0]) < 0.2 for first, _ in losses)
    with pytest.raises(OutOfTimeError, match="s are left, and it needs"):
        training.Steps(replace(job, until=time.monotonic() + 1)).job.require_seconds(2)


def test_one_bag_and_a_bag_for_each_feature_train_alike(job: Job) -> None:
    part, ends = training.Training(job), []
    one, several = (training.Setting(contender=name, precision="fp32") for name in ("torch", "torch_bags"))
    tables = part.tables_of(one)
    before = tables.bag.weight.detach().clone()
    for setting in (one, several):
        tables.bag.weight.data.copy_(before)
        torch.manual_seed(3)
        steps = part.tables_of(setting).steps(setting, training.draw_batches(TINY.rows, "zipf", TINY.samples))
        losses = torch.stack([next(steps) for _ in range(6)])
        ends.append((losses, tables.bag.weight.detach().clone()))
    (losses, rows), (same_losses, same_rows) = ends
    torch.testing.assert_close(losses, same_losses)
    torch.testing.assert_close(rows, same_rows)
    assert not torch.equal(rows, before)


def test_ten_steps_are_profiled(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    part = training.Profile(job)
    (item,) = part.names
    assert part.measure(item) | {"trace_bytes": 0} == {"steps": 10, "trace_bytes": 0, "kept": True}
    assert "10 steps of satrap_direct/float32" in (job.out / "profile.txt").read_text()
    assert (job.out / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    monkeypatch.setattr(training, "MOST_TRACE_BYTES", 10)
    assert part.measure(item)["kept"] is False and not (job.out / "trace.json.gz").exists()


def test_rows_move_between_two_tiers(job: Job) -> None:
    part = training.Tiers(job)
    assert len(part.names) == 9
    for item in (part.names[4], part.names[-2]):
        found = part.measure(item)
        assert found["moved_rows_per_step"] > 0 and found["rows"] <= part.rows and found["rows_per_s_inserted"] > 0
    for item in (*part.names[:4], part.names[-1]):
        found = part.measure(item)
        assert found["moved_rows_per_step"] == 0
        assert found["rows"] == TINY.rows * (2 if item.endswith("/largest") else 1)


def test_a_file_of_text_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import results

    monkeypatch.setattr(results, "MOST_BYTES", 10)
    written = Results(tmp_path)
    for text in ("12345678", "abcdef"):
        written.append("errors.txt", text)
    assert (tmp_path / "errors.txt").read_text() == "5678abcdef"


def test_the_summary_compares_contenders_and_names_failures(tmp_path: Path) -> None:
    written = Results(tmp_path)
    for item, rate in (("torch/float32", 100), ("satrap/float16", 250), ("satrap_direct/bfloat16", 50)):
        written.add(
            "steps", f"{item}/fp32/eager/staleness {int('16' in item)}/zipf", {"status": "ok", "samples_per_s": rate}
        )
    written.add("steps", "satrap/float32/amp-fp16/eager/staleness 0/zipf", {"status": "ok", "samples_per_s": 7})
    written.add("tiers", "a half", {"status": "crashed", "error": "status -9"})
    lines = written.summarise("done").splitlines()
    shown = [line for line in lines if line.startswith("  satrap")]
    assert ["2.50 of torch" in shown[0], "0.50 of torch" in shown[1], "of torch" in shown[2]] == [True, True, False]
    assert "CRASHED: status -9" in lines[-5] and lines[-3:] == ["5 items, 1 failed", "  tiers: a half", "done"]


def test_the_roofline_counts_a_sample() -> None:
    """By hand: 26 rows of 512 bytes are read and written as a block, their gradients are read to check them and to sum
    them, and each distinct row is read and written. In 16 bits the block and the gradients are half as large, and so is
    what autocast reads and writes of them."""
    sample = roofline.sample_of(128, 26, is_half=False)
    assert sample.rows_bytes == 26 * (512 + 512 + 4) + 26 * 512 + 26 * (512 + 4) + 26 * (1024 + 12)
    assert sample.bus_bytes == 26 * 4 + 14 * 4 + 26 * 4 + 26 * 12
    layers = 13 * 512 + 512 * 256 + 256 * 128 + 479 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    assert sample.flops == 6 * (layers + 27 * 27 * 128)
    wide, narrow = (roofline.sample_of(128, 26, is_half=True, output_bytes=size) for size in (4, 2))
    assert wide.memory_bytes - narrow.memory_bytes == (3 + 2) * 26 * 256 and wide.rows_bytes == sample.rows_bytes
    fewer = roofline.sample_of(128, 10, is_half=True)
    assert fewer.rows_bytes == sample.rows_bytes - 16 * (1024 + 12) and fewer.dense_bytes < sample.dense_bytes
    assert roofline.limits(sample, {"memory": 4.8e12, "bus": None, "host": 26e6})["host"] == 1e6
    assert round(roofline.of_host(52e6, 52e6)) == 1_000_000


def test_the_roofline_counts_a_sample_of_tables_with_num_rows() -> None:
    """By hand: the rows as above, but that nothing checks the gradients, and four bytes of each id over the bus."""
    parts = roofline.direct_parts(128, 26)
    assert parts["rows pooled"] == 26 * (512 + 512 + 4)
    assert parts["ids placed and sorted"] == 26 * (roofline.PLACED + 8 + 4 + 4 * (12 + 12))
    assert parts["rows updated"] - 26 * (512 + 4 + 2 * 512) == 26 * roofline.STEPPED
    sample = roofline.direct_sample_of(128, 26, is_half=True)
    assert sample.rows_bytes == sum(parts.values()) and sample.bus_bytes == 26 * 4 + 14 * 4
    assert sample.dense_bytes == roofline.sample_of(128, 26, is_half=True).dense_bytes
    fewer = roofline.direct_sample_of(128, 10, is_half=True)
    assert sample.rows_bytes - fewer.rows_bytes == 16 * (1024 + 2 * 8 + 7 * 32)
    assert round(roofline.in_turn([20e6, 20e6, 10e6])) == 5_000_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_roofline_counts_what_the_calls_of_a_step_move(dtype: Any) -> None:
    """Steps that differ in their ids, or in their distinct ones. Kernels, the sort and the copy of ids are left out."""
    how: dict[str, Any] = {"dim": 4, "dtype": dtype, "num_rows": 500, "on_nonfinite": "skip"}
    features = Features({f"c{i}": satrap.Table(f"c{i}", optimizer=satrap.SGD(lr=0.1), **how) for i in range(26)})
    worker: Any = device_worker(features, "cpu")
    counts = []
    for samples, distinct in ((200, 200), (400, 400), (400, 1)):
        summed = torch.ones(26 * samples, dtype=torch.int32)
        worker.rows._kernels = SimpleNamespace(pool=IdleKernels.pool, update=lambda *_, summed=summed: summed)
        ids: Any = np.tile(np.arange(samples) % distinct, 26).astype(np.int32)
        inputs = Inputs(names=features.names, values=ids, batch_size=samples)
        gradient = torch.ones(samples, 26 * 4)
        for _ in range(2):  # the first step of a size does more
            calls: Any = CountedBytes()  # type: ignore[no-untyped-call]
            with calls:
                ticket = worker.lookup(inputs).ticket
                worker.update([ticket], [gradient])
        counts.append(calls.count)
    kernels_and_copy = 12 + 8 + 4 + 4 + 4  # runs, those that may be long, two writes of counts; ids
    by_id = roofline.PLACED + roofline.GROUPED + roofline.NOTED + roofline.STEPPED - kernels_and_copy
    by_id += roofline.KEYED - 8 if dtype == "bfloat16" else 0
    by_row = roofline.GROUPED_ROW + roofline.HEADS * 4
    assert (counts[1] - counts[0]) / (26 * 200) == by_id + by_row
    assert counts[1] - counts[2] == (26 * 399 - 1) * by_row  # 1: the place that empty runs have in common


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
    assert (
        "| a sample, `num_rows` | zipf | uniform |" in printed
        and "| bytes: dense network | 131,712 | 131,712 |" in printed
    )
