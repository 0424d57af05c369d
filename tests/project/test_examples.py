"""The examples as a user runs them, on files of the format that they take."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from satrap.data.synthetic import Clicks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DOCS = "".join((ROOT / name).read_text() for name in ("README.md", "docs/cluster.md", "Makefile"))
RUNS = sorted(set(re.findall(r"satrap run \S+\.py ((?:--(?:server|worker)s \d+ )+--trainers \d+)", DOCS)))


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / arguments[0]), *map(str, arguments[1:])]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1"
    }  # small layers: two threads wait for each other where cores are busy
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.fixture(scope="module")
def criteo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("criteo")
    clicks = Clicks(num_samples=40_000, cardinalities=20_000, seed=1)
    clicks.write_criteo(folder / "day_0.gz")
    clicks.following(8_000).write_criteo(folder / "test.txt")
    return folder


@pytest.mark.draw(2, of="whole runs")
def test_criteo_trains_resumes_and_tests(criteo: Path, tmp_path: Path) -> None:
    options = ("--samples", "40000", "--test", criteo / "test.txt", "--run", tmp_path / "run")
    first = run("criteo.py", criteo / "day_0.gz", *options)
    assert first.returncode == 0, first.stderr
    assert "batches of 128 samples, bottom (64,), top (128, 64, 1)" in first.stdout
    assert re.search(r"step 313 \| 40k samples .* AUC 0\.\d+ NE", first.stderr), first.stderr
    auc = float(re.search(r"test AUC (0\.\d+)", first.stdout).group(1))  # type: ignore[union-attr]
    best = Clicks(num_samples=40_000, cardinalities=20_000, seed=1).following(8_000).best_auc()
    print(f"AUC {auc} of at most {best:.4f}")
    assert (auc - 0.5) / (best - 0.5) > 0.75  # 0.29 with the batch size and the layers for a thousand times the data
    again = run("criteo.py", criteo / "day_0.gz", *options)
    assert "continues after step 313" in again.stdout
    assert float(re.search(r"test AUC (0\.\d+)", again.stdout).group(1)) == auc  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("samples", "batch_size", "top"),
    [(10, 64, 128), (20_000, 64, 128), (300_000, 512, 128), (2_000_000, 4096, 512), (4_000_000_000, 4096, 1024)],
)
def test_criteo_settings_fit_the_number_of_samples(samples: int, batch_size: int, top: int) -> None:
    settings = runpy.run_path(str(EXAMPLES / "criteo.py"))["Settings"].of(samples)
    assert (settings.batch_size, settings.top[0]) == (batch_size, top)


def test_criteo_estimates_the_number_of_samples(criteo: Path) -> None:
    estimate = runpy.run_path(str(EXAMPLES / "criteo.py"))["num_samples"]
    assert estimate(str(criteo / "test.txt")) == pytest.approx(8_000, rel=0.3)
    assert estimate(str(criteo / "*.gz")) == pytest.approx(40_000, rel=0.5)
    assert estimate(criteo.as_uri()) == estimate(str(criteo / "day_*")) + estimate(str(criteo / "test.txt"))


def test_the_error_names_a_path_that_does_not_exist(tmp_path: Path) -> None:
    done = run("criteo.py", tmp_path / "nothing")
    assert done.returncode != 0
    assert str(tmp_path / "nothing") in done.stderr.splitlines()[-1]


@pytest.mark.draw(2, of="whole runs")
@pytest.mark.draw(1)
@pytest.mark.parametrize(("script", "options"), list(zip(("adult.py", "criteo.py"), RUNS, strict=True)))
def test_it_runs_as_the_docs_say(options: str, script: str, criteo: Path, tmp_path: Path) -> None:
    own = ("--epochs", "1") if script == "adult.py" else (criteo / "test.txt", "--test", criteo / "test.txt")
    command = [
        sys.executable,
        "-m",
        "satrap",
        "run",
        EXAMPLES / script,
        *options.split(),
        "--memory",
        tmp_path,
        "--",
        *own,
    ]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (auc,) = re.findall(r"(?:test|validation) AUC (0\.\d+)", done.stdout)
    assert float(auc) > (0.88 if script == "adult.py" else 0.5)
    for log in (tmp_path / "satrap-run/logs").glob("trainer-[1-9]*"):
        assert "AUC" not in log.read_text(), "another trainer than the first prints"
