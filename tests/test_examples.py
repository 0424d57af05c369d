"""The examples as a user runs them, on files of the format that they take."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from satrap.synthetic import Clicks

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / arguments[0]), *map(str, arguments[1:])]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def criteo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("criteo")
    clicks = Clicks(num_samples=40_000, cardinalities=20_000, seed=1)
    clicks.write_criteo(folder / "day_0.gz")
    clicks.following(8_000).write_criteo(folder / "test.txt")
    return folder


def test_criteo_trains_goes_on_and_tests(criteo: Path, tmp_path: Path) -> None:
    options = ("--batch-size", "512", "--test", criteo / "test.txt", "--run", tmp_path / "run")
    first = run("criteo.py", criteo / "day_0.gz", *options)
    assert first.returncode == 0, first.stderr
    assert re.search(r"step 79 \| 40k samples .* AUC 0\.\d+ NE", first.stderr), first.stderr
    auc = float(re.search(r"test AUC (0\.\d+)", first.stdout).group(1))  # type: ignore[union-attr]
    assert auc > 0.6
    again = run("criteo.py", criteo / "day_0.gz", *options)
    assert "goes on after step 79" in again.stdout
    assert float(re.search(r"test AUC (0\.\d+)", again.stdout).group(1)) == auc  # type: ignore[union-attr]


def test_a_path_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = run("criteo.py", tmp_path / "nothing")
    assert done.returncode != 0
    assert str(tmp_path / "nothing") in done.stderr.splitlines()[-1]
