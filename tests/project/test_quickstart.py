"""A new user's first runs: the README's training loop as written, and the example that `make demo` runs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

ROOT = Path(__file__).parents[2]


def write_clicks(folder: Path, num: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    user = rng.integers(0, 50, num)
    columns = {
        "user_id": user,
        "item_id": rng.integers(0, 100, num),
        "history": [rng.integers(0, 100, rng.integers(0, 4)) for _ in range(num)],
        "age": rng.random(num),
        "price": rng.random(num),
        "click": (user % 2).astype(np.int64),
    }
    pq.write_table(pa.table(columns), folder / "part.parquet")


def test_the_quickstart_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_clicks(tmp_path / "clicks/train", 20_000, seed=0)
    write_clicks(tmp_path / "clicks/test", 2_000, seed=1)
    section = (ROOT / "README.md").read_text().partition("## Train")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert 0.4 < float(capsys.readouterr().out) <= 1.0


def test_the_guide_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_clicks(tmp_path / "clicks/train", 20_000, seed=0)
    write_clicks(tmp_path / "clicks/test", 2_000, seed=1)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    assert len(blocks) == 6
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/training.md", "exec"), namespace)
    shown = capsys.readouterr()
    assert "step 80 | 40k samples in" in shown.err
    assert shown.out.startswith("AUC ")
    assert torch.export.load(tmp_path / "model.pt2").module()(torch.zeros(7, 2), torch.zeros(7, 24)).shape == (7,)
    assert float(shown.out.split()[-1]) == namespace["found"].auc()  # a Reader of the checkpoint's


def test_nothing_is_installed_by_a_name_that_is_not_registered() -> None:
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "src").rglob("*.py"),
    ]
    found = [str(file) for file in files if re.search(r"pip install ['\"]?satrap", file.read_text())]
    assert found == [], "until the name satrap is registered at PyPI, docs say `pip install .`"


# Packages of other extras than [train], which `make demo` does not install.
OTHERS = ("duckdb", "hypothesis", "mypy", "onnx", "pandas", "polars", "pytest", "ray", "tensorboard", "zmq")


def test_the_adult_example_reaches_its_auc_with_the_packages_of_the_demo_alone() -> None:
    script = ROOT / "examples/adult.py"
    hide = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({OTHERS})); sys.argv = {[str(script), '--epochs', '1']}"
    )
    command = [sys.executable, "-c", f"{hide}; runpy.run_path({str(script)!r}, run_name='__main__')"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.89


def test_make_demo_installs_what_training_needs_and_says_what_to_try_next() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "demo"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installed = [line.partition("constraints.txt ")[2] for line in lines if " install " in line and "echo" not in line]
    assert installed == ["scikit-build-core nanobind cmake ninja", "--no-build-isolation -e '.[train]'"]
    assert "satrap run examples/adult.py --servers 2 --trainers 2" in lines[-1]
