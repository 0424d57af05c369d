"""The face of the package: its public names, what importing costs, and the shipped stub."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import satrap
from satrap import _core, errors

ROOT = Path(__file__).parents[2]


def test_all_is_sorted_and_complete() -> None:
    assert list(satrap.__all__) == sorted(satrap.__all__)
    for name in satrap.__all__:
        assert hasattr(satrap, name), name
    every_error = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert every_error - set(satrap.__all__) == {"MovedError"}, "which the caller of a server handles"


def test_the_errors_are_one_tree_and_drawn() -> None:
    drawing = errors.__doc__ or ""
    for name, value in vars(errors).items():
        if isinstance(value, type):
            assert issubclass(value, errors.SatrapError)
            line = next(line for line in drawing.splitlines() if f"── {name} " in line)
            for builtin in {ValueError, RuntimeError} & set(value.__bases__):
                assert f"also a {builtin.__name__}" in line


def test_importing_costs_little() -> None:
    """No torch, no pyarrow, nothing of a cluster: a server starts without them. Checked in a fresh interpreter."""
    for module in ("satrap", "satrap.table.table_group"):
        program = f"import sys, {module}; print(*sorted({{'torch', 'pyarrow', 'ray', 'zmq'}} & set(sys.modules)))"
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
        assert (run.stdout.split(), run.stderr) == ([], ""), module


def test_what_needs_zeromq_says_so() -> None:
    """Checked in a fresh interpreter in which it is not installed."""
    program = "import sys; sys.modules['zmq'] = None; from satrap.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "server", "--listen", "tcp://127.0.0.1:0", "--insecure"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1 and run.stdout == ""
    assert re.fullmatch(r"satrap: .*: pip install 'satrap\[cluster\]'\n", run.stderr), run.stderr


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("satrap.Embeddings", "Embeddings"),
        ("from satrap.models import DLRM", "models"),
        ("from satrap import models", "models"),
        ("import satrap.nn", "nn"),
    ],
)
def test_what_needs_torch_says_so(statement: str, name: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import satrap; print(satrap.Table); {statement}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.stdout and f"\nImportError: satrap.{name} needs torch: pip install 'satrap[train]'\n" in run.stderr


@pytest.mark.parametrize(
    "command",
    [
        "plan train.py --machines machines.toml",
        "plan --calibrate --coefficients costs.json",
        "run train.py",
        "train clicks.parquet",
        "trainer train.py --servers tcp://127.0.0.1:1",
    ],
)
def test_a_command_that_needs_torch_says_so(command: str) -> None:
    program = "import sys; sys.modules['torch'] = None; from satrap.cli.main import main; sys.exit(main(sys.argv[1:]))"
    run = subprocess.run([sys.executable, "-c", program, *command.split()], capture_output=True, text=True, timeout=300)
    message = f"satrap: satrap {command.split()[0]} needs torch: pip install 'satrap[train]'\n"
    assert (run.returncode, run.stdout, run.stderr) == (1, "", message)


def test_the_version_is_the_installed_one() -> None:
    assert satrap.__version__ == importlib.metadata.version("satrap")


def test_the_committed_stub_is_the_generated_one() -> None:
    """The build generates the stub beside the module; `make stub` copies it into the source tree."""
    assert _core.__file__ is not None
    generated = Path(_core.__file__).with_name("_core.pyi").read_text()
    committed = (ROOT / "src/satrap/_core.pyi").read_text()
    assert committed == generated, "the bindings changed: run `make stub` and commit src/satrap/_core.pyi"


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src/satrap/py.typed").is_file()
