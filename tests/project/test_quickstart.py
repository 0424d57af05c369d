"""The example that `make demo` runs, and what it installs. The code of the pages is run by test_docs.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
