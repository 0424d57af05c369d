"""The example that `make demo` runs, and what it installs. The code of the pages is run by test_docs.py."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_no_page_installs_what_is_not_published_without_saying_so() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    found = [line for line in lines if re.search(r"pip install\s+['\"]?satrap", line) and "published" not in line]
    assert found == [], 'until the name satrap is registered at PyPI, say `pip install .`, or "once it is published"'


# Packages of other extras than [train], which `make demo` does not install.
OTHERS = ("duckdb", "hypothesis", "mypy", "onnx", "pandas", "polars", "pytest", "ray", "tensorboard", "zmq")


def test_the_adult_example_reaches_its_auc_with_the_packages_of_the_demo_alone(tmp_path: Path) -> None:
    script = ROOT / "examples/adult.py"
    arguments = [str(script), "--epochs", "1", "--record", str(tmp_path), "--run", str(tmp_path / "run")]
    hide = f"import runpy, sys; sys.modules.update(dict.fromkeys({OTHERS})); sys.argv = "
    training = f"{hide}{arguments}; runpy.run_path({str(script)!r}, run_name='__main__')"
    trained = python(training)
    auc = float(trained.split()[-1])
    assert auc > 0.89 and trained.endswith(f"; validation AUC {auc:.4f}\n"), "the word of the report"
    reported = python(f"{hide}['satrap', 'report', {str(tmp_path)!r}]; from satrap.cli.main import main; main()")
    assert reported.startswith(f"report: {tmp_path / 'report.html'} (")
    page = (tmp_path / "report.html").read_text()
    assert "Training ended." in page and "Validation: AUC" in page and f"<td>{auc:.4f}" in page
    saved = sorted(tmp_path.glob("run/*"))
    assert python(training).endswith(trained.splitlines()[-1] + "\n"), "a run that had finished is tested again"
    assert sorted(tmp_path.glob("run/*")) == saved, "no step is saved twice"


@pytest.mark.cluster
def test_the_command_of_the_readme_runs_the_script_of_the_readme(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^satrap (run train.py [^#\n]*)", page, re.MULTILINE)
    (tmp_path / "train.py").write_text(code)
    program = Path(sys.executable).with_name("satrap")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [program, *command.split()], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "AUC 0.8" in done.stdout + done.stderr


def python(code: str) -> str:
    """Run the code in another process; return what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_demo_installs_what_training_needs_and_says_what_to_try_next() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "demo"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installed = [line.partition("constraints.txt ")[2] for line in lines if " install " in line and "echo" not in line]
    satrap = "--no-build-isolation --no-deps -C build-dir=build/module -e ."
    assert set(installed) == {"scikit-build-core nanobind cmake ninja", "-r .venv/.train.txt", satrap}
    listed = {line.partition("requirements.py ")[2] for line in lines if "requirements.py" in line}
    assert listed == {"train >.venv/.train.txt"}
    assert any(line.endswith("satrap report build/demo") for line in lines)
    assert "satrap run examples/adult.py --servers 2 --trainers 2 --folder build/demo-run" in lines[-1]


def test_make_demo_uses_what_is_installed_unless_a_source_is_newer(tmp_path: Path) -> None:
    packages = tmp_path / ".venv/lib/python3/site-packages"
    for name in ("CMakeLists.txt", "constraints.txt", "pyproject.toml", "core/base/hash.hpp", "src/satrap/errors.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("obstore", "zmq", "satrap"):
        (packages / name).mkdir(parents=True)
    (packages / "obstore/__init__.py").touch()
    shutil.copy(ROOT / "Makefile", tmp_path)

    def lines() -> str:
        command = ["make", "--dry-run", "demo"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "build_editable" in lines(), "nothing is installed"
    installed = packages / "satrap/__init__.py"
    installed.touch()
    assert "build_editable" not in lines() and "install" not in lines() and "adult.py" in lines()
    os.utime(tmp_path / "src/satrap/errors.py", ns=(0, installed.stat().st_mtime_ns + 10**9))
    assert "build_editable" in lines(), "a source is newer"


def test_a_checkout_may_have_a_blank_in_its_path() -> None:
    """A recipe quotes what begins with the path of the checkout; pip splits the value of PIP_CONSTRAINT at blanks."""
    makefile = (ROOT / "Makefile").read_text()
    assert '"$(CURDIR)/$(bin)/ninja"' in makefile
    unquoted = re.sub(r'"[^"\n]*"', '""', "\n".join(line for line in makefile.splitlines() if line.startswith("\t")))
    assert not re.findall(r"\$\(CURDIR\)|\$\(stub\)", unquoted)
    constraint = re.search(r'PIP_CONSTRAINT="([^"]*)"', (ROOT / ".ci/wheel").read_text())
    assert constraint is not None and constraint[1].startswith("file://$here/")
