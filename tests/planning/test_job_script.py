"""A job read from its script: what the steps have is found exactly, and nothing of the script runs after them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runs import is_running
from satrap.errors import ConfigError
from satrap.planning import job_script
from satrap.planning.job_script import assumptions_of, observe_script
from waiting import DEADLINE_SECONDS, wait_until

SCRIPT = Path(__file__).parents[1] / "support/planned_job.py"


def test_a_script_is_observed(tmp_path: Path) -> None:
    found = observe_script(SCRIPT, [str(tmp_path / "end")], 4)
    inputs = 3 + 8 + 4 + 5 * 4
    assert found["training"] == {
        "batch_size": 64,
        # The input has gradients but for its dense features, so the backward pass takes two products.
        "dense_flops": pytest.approx(2 * inputs),
        "dense_parameters": inputs + 1,
        "dense_features": 3 + 1,
        "staleness": 2,
    }
    tables = {each["name"]: each for each in found["tables"]}
    assert (tables["user"]["ids_per_sample"], tables["item"]["ids_per_sample"]) == (1.0, 3.0)
    assert (tables["user"]["vectors_per_sample"], tables["item"]["vectors_per_sample"]) == (1.0, 6.0)
    assert tables["user"]["unique_share"] == pytest.approx(1 / 4)
    assert tables["item"]["unique_share"] == pytest.approx(1 / 3)
    assert tables["user"]["capacity"] == 1 << 20
    assert not (tmp_path / "end").exists()
    assert assumptions_of(found, 4)[1] == "tables with a capacity become full: user"


SAVES = """
import sys
import torch
import satrap

table = satrap.Table("item", dim=4)
embeddings = satrap.Embeddings({"item": table})
model = torch.nn.Linear(4, 1)
optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
data = satrap.Frame({"item": list(range(640)), "label": [0.0, 1.0] * 320}, label="label", batch_size=64)
run = satrap.Checkpoint(sys.argv[1] + "/run", model, optimizer, embeddings, data)
resumed = run.resume()
lines = satrap.JsonLines(sys.argv[1] + "/lines")
progress = satrap.Progress(embeddings, [lines], every_seconds=1e-9, record=sys.argv[1])
for batch in embeddings.stream(data):
    loss = model(batch.embeddings).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    progress.step(batch, loss=loss)
    run.save(every_steps=1)
"""


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_script_that_is_observed_leaves_its_folders_as_they_are(tmp_path: Path) -> None:
    """Whether its run has ended, trains meanwhile or is still to begin."""
    (script := tmp_path / "script.py").write_text(SAVES)
    (ended := tmp_path / "ended").mkdir()
    (begins := tmp_path / "begins").mkdir()
    subprocess.run([sys.executable, str(script), str(ended)], check=True, timeout=DEADLINE_SECONDS)
    before = files_of(ended)
    assert any(path.name == "lines" and text for path, text in before.items()) and len(before) > 10
    for folder in (ended, begins):
        assert observe_script(script, [str(folder)], 4)["training"]["batch_size"] == 64
    assert files_of(ended) == before
    assert list(files_of(begins).values()) == [b""]  # the file of JsonLines, which is created with the object


def test_a_script_that_fails_is_an_error_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exited with status 1 before 4 steps(.|\n)*the script's own error"):
        observe_script(SCRIPT, [str(tmp_path / "end"), "fail"], 4)


def test_processes_of_a_script_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have its output open, and it ends without a chance to stop them."""
    monkeypatch.setattr(job_script, "_SECONDS", 120.0)
    (script := tmp_path / "script.py").write_text(
        "import runpy, subprocess, sys\n"
        "process = subprocess.Popen(['sleep', '900'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(process.pid))\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    assert observe_script(script, [str(tmp_path / "end")], 4)["training"]["batch_size"] == 64
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_a_script_that_takes_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_script, "_SECONDS", 0.2)
    (script := tmp_path / "script.py").write_text("import time\ntime.sleep(900)\n")
    with pytest.raises(ConfigError, match="took more than 0 s for 4 steps"):
        observe_script(script, [], 4)


def test_a_script_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file '.*none\.py'"):
        observe_script(tmp_path / "none.py", [], 4)
