"""`satrap plan`: the plan of a model and of a script, its files, its exit status and its errors."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from deploy_jobs import pods_of, rendered
from satrap.cli.main import main
from satrap.deploy.job_file import parse_job
from satrap.planning.coefficients import DEFAULTS
from satrap.planning.input_files import write_coefficients

ROOT = Path(__file__).parents[2]
MODEL, MACHINES = (str(ROOT / "examples/planning" / name) for name in ("clicks.toml", "machines.toml"))
SCRIPT = str(ROOT / "tests/support/planned_job.py")
FEW = [
    word
    for kind in ("m2-ultramem-208", "a2-highgpu-8g", "c2-standard-30")
    for word in ("--set", f"machines.{kind}.available=0")
]
"""Fewer kinds of machines take less time."""
Capture = pytest.CaptureFixture[str]


def test_the_plan_of_a_model(tmp_path: Path, capsys: Capture) -> None:
    deploy, costs = tmp_path / "plan.toml", tmp_path / "costs.json"
    write_coefficients(costs, DEFAULTS)
    files = ["--deploy", str(deploy), "--coefficients", str(costs)]
    assert main(["plan", MODEL, "--machines", MACHINES, *files]) == 0
    text = capsys.readouterr().out
    for words in ("bound by", "head room", "buckets", "descriptors", "saves", "resume", "link", "satrap run train.py"):
        assert words in text
    assert tomllib.loads(deploy.read_text())["servers"]["count"] > 0
    # The trainers of this plan have no GPUs, unlike those of the job file.
    paths = [ROOT / "deploy/gke/deploy.toml", deploy]
    job = parse_job([(str(path), path.read_text()) for path in paths])
    for _, pod in pods_of(rendered(job, "kuberay")).values():
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert "nvidia.com/gpu" in limits or not any("accelerator" in label for label in pod["spec"]["nodeSelector"])


def test_prices_have_a_date_and_can_be_replaced(capsys: Capture) -> None:
    change = ["--set", "machines.*.price_per_hour=0.5", "--set", "training.staleness=2"]
    assert main(["plan", MODEL, "--machines", MACHINES, *change, *FEW]) == 0
    text = capsys.readouterr().out
    assert "\nprices   Google Cloud, europe-west4, April 2023, with the discount for sustained use" in text
    machines = sum(int(found) for found in re.findall(r" (\d+) x ", text.partition("\ntable")[0]))
    assert f"\nprice    {machines / 2:,.2f} $/h" in text


def test_a_rate_out_of_reach_has_its_own_status(capsys: Capture) -> None:
    options = ["--samples-per-second", "1e12", "--set", "machines.*.available=2", "--json"]
    assert main(["plan", MODEL, "--machines", MACHINES, *options, *FEW]) == 3
    content = json.loads(capsys.readouterr().out)
    assert content["meets"] is False and content["requested_samples_per_second"] == 1e12


def test_the_plan_of_a_script(tmp_path: Path, capsys: Capture) -> None:
    options = ["--samples-per-second", "1e3", "--set", "tables.item.rows=1e6", "--steps", "3", "--json"]
    assert main(["plan", SCRIPT, "--machines", MACHINES, *options, *FEW, "--", str(tmp_path / "end")]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["tables"]["user"]["rows"] == 1 << 20 and content["tables"]["item"]["rows"] == 10**6
    assert content["command"] == f"python {SCRIPT} {tmp_path / 'end'}"
    assert "the 3 observed steps" in content["assumptions"][0]
    assert content["meets"] and content["bounds"][0]["samples_per_second"] == content["samples_per_second"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machines", MACHINES], "no job was given"),
        ([MODEL], "--machines is missing"),
        (["--calibrate"], "--calibrate without a job needs --coefficients FILE"),
        ([MODEL, "--machines", MACHINES, "--steps", "0"], "steps is 0"),
        ([MODEL, "--machines", "none.toml"], "none.toml: cannot be read"),
        ([MODEL, "--machines", MACHINES, "--", "x"], "arguments after -- are for a script"),
        (["none.py", "--machines", MACHINES], "there is no file 'none.py'"),
        ([MODEL, "--machines", MACHINES, *FEW, "--deploy", "/proc/no/deploy.toml"], "cannot be written"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["plan", *arguments]) == 1
    found = capsys.readouterr()
    assert message in found.err and found.err.startswith("satrap: ") and found.out == ""
