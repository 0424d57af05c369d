"""Job files of `satrap deploy render`: defaults, changes, and what is refused with which words."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from satrap.cli.main import main
from satrap.deploy.job_file import DeployJob, Image, Role, Storage, parse_job
from satrap.errors import ConfigError

ROOT = Path(__file__).parents[2]
JOB = """
name = "clicks"
script = "/app/train.py"
[image]
cpu = "satrap:1"
[servers]
count = 4
memory = "100GiB"
"""
PLAN = """
[servers]
count = 2
cpus = 8

[trainers]
count = 8
gpus = 1
"""


def test_the_defaults() -> None:
    job = parse_job([("deploy.toml", JOB)])
    assert (job.servers.count, job.trainers.count, job.workers.count) == (4, 1, 0)
    assert job.servers.rows_bytes == 90 << 30 and job.trainer_image == "satrap:1"
    assert f"ray=={job.ray_version}" in (ROOT / "constraints.txt").read_text().split()


def test_the_page_describes_every_key() -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    keys = {key for cell in cells for key in re.findall(r"`\[?(\w+)\]?`", cell)}
    tables = {"head", "servers", "workers", "trainers"}
    found = {field.name for kind in (DeployJob, Image, Storage, Role) for field in fields(kind)}
    assert found - tables <= keys and all(f"`[{each}]`" in page for each in tables)


def test_later_files_and_changes_replace_values() -> None:
    job = parse_job(
        [("deploy.toml", JOB), ("plan.toml", PLAN)], ["trainers.per_pod=4", "image.gpu=satrap-gpu:1", "zone=b"]
    )
    assert (job.servers.count, job.servers.cpus, job.servers.memory) == (2, 8, "100GiB")
    assert (job.trainers.pods, job.trainer_image, job.zone) == (2, "satrap-gpu:1", "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "name=Clicks",
            r"deploy.toml, --set name=Clicks: name is 'Clicks' \(str\); expected 1 to 40 lower-case letters",
        ),
        ("script=train.py", r"script is 'train.py' \(str\); expected a path in the image, such as '/app/train.py'"),
        ("script=/app/../train.py", r"script is .*; expected a path in the image"),
        ("arguments=[3]", r"arguments is \(3,\) \(tuple\); expected a list of strings"),
        (
            "image.cpu=a b",
            r"deploy.toml, --set image.cpu=a b: \[image\]: cpu is 'a b' \(str\); expected the name of an image",
        ),
        ("servers.cont=3", r"deploy.toml, --set servers.cont=3: \[servers\]: unknown key 'cont'; .*count"),
        ("servers.count=0", r"servers: count is 0; expected"),
        ("servers.gpus=1", r"servers: gpus is 1; only trainers use GPUs: remove it"),
        ("servers.memory=100G", r"\[servers\]: memory is '100G' \(str\); expected bytes as an integer"),
        ("servers.memory=1GiB", r"\[servers\]: memory is '1GiB'; expected at least 2GiB"),
        ("servers.rows=100GiB", r"rows is '100GiB' and memory '100GiB'; expected at least 1GiB beside the rows"),
        ("servers.per_pod=2", r"servers: per_pod is 2; only trainers share pods: remove it"),
        ("servers.on_stop=wait", r"on_stop is 'wait' \(str\); expected 'move' or 'keep'"),
        ("trainers.on_stop=keep", r"trainers: on_stop is 'keep'; only servers hold rows: remove it"),
        ("trainers.rows=1GiB", r"trainers: rows is '1GiB'; only servers hold rows: remove it"),
        ("trainers.per_pod=2", r"count is 1 and per_pod 2; expected a count that is a multiple of it"),
        ("trainers.grace_seconds=5", r"grace_seconds is 5; expected"),
        ("trainers.machine=3", r"machine is 3 \(int\); expected a machine type"),
        ("queue=My Queue", r"queue is 'My Queue' \(str\); expected the name of an object of Kubernetes"),
        ("ray_version=2", r"ray_version is 2 \(int\); expected a version, such as '2.60.0'"),
        ("zone=3", r"zone is 3 \(int\); expected a zone"),
        ("working_dir=/train", r"working_dir is '/train' \(str\); expected a URL"),
        ("storage.data=[3]", r"\[storage\]: data is \(3,\) \(tuple\); expected a list of folders and URLs"),
        (
            'storage.data=["/data"]',
            r"\[storage\]: data has '/data', a folder of one pod; expected a URL, or a folder",
        ),
        ("trainers.tolerations=spot", r"tolerations is 'spot' \(str\); expected a list"),
        ('trainers.tolerations=["spot"]', r"tolerations is .*; expected a list of taints as kubectl writes them"),
        ("trainers.node_labels.a=b c", r"node_labels.a is 'b c' \(str\); expected a text that Kubernetes permits"),
        ("servers.env.A=3", r"env.A is 3 \(int\); expected a text that Kubernetes permits"),
        ("env.1A=3", r"job: env has the name '1A' \(str\); expected one that Kubernetes permits"),
        ("labels=a", r"job: labels is 'a' \(str\); expected a table of texts"),
        ('labels={"ray.io/x"="a"}', r"job: labels has 'ray.io/x', which Satrap sets; choose another name"),
        (
            'trainers.node_labels={"cloud.google.com/gke-accelerator"="l4"}',
            r"\[trainers\]: node_labels has 'cloud.google.com/gke-accelerator', .* and gpus is 0; set gpus, or remove",
        ),
        ("network_policy=1", r"job: network_policy is 1 \(int\); expected True or False"),
        ("pull_secrets=a", r"pull_secrets is 'a' \(str\); expected a list"),
        ('pull_secrets=["A b"]', r"pull_secrets is .*; expected a list of names of Secrets"),
        ("servers.disk=0", r"disk is 0 \(int\); expected a size"),
        ("name.x=1", r"--set is 'name.x=1', but name is not a table"),
        ("servers", r"--set is 'servers'; expected KEY=VALUE, such as servers.count=8"),
    ],
)
def test_what_is_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_job([("deploy.toml", JOB)], [change])


def test_directories_are_below_the_volume() -> None:
    changes = ["storage.volume=runs", 'storage.checkpoints=["/shared/runs"]']
    assert parse_job([("deploy.toml", JOB)], changes).storage.checkpoints == ("/shared/runs",)
    for path in ("/sharedruns", "/shared/../runs", "runs"):
        with pytest.raises(ConfigError, match=r"expected a URL, or a folder below /shared, where the volume is"):
            parse_job([("deploy.toml", JOB)], ["storage.volume=runs", f'storage.data=["{path}"]'])


def test_the_command_writes_what_kubectl_applies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deploy.toml").write_text(JOB)
    folder = tmp_path / "manifests"
    command = ["deploy", "render", str(tmp_path / "deploy.toml"), "--output", str(folder), "--set", "servers.count=3"]
    assert main(command) == 0
    assert f"start the run with: kubectl apply -k {folder}" in capsys.readouterr().out
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted([*names, "kustomization.yaml"]) == sorted(path.name for path in folder.iterdir())
    assert "--servers 3" in (folder / "rayjob.yaml").read_text()
    (folder / "mine.yaml").write_text("kept")
    capsys.readouterr()
    assert main([*command, "--target", "kubernetes"]) == 0
    assert (folder / "mine.yaml").read_text() == "kept"
    assert f"{folder / 'rayjob.yaml'}: removed; an earlier rendering wrote it" in capsys.readouterr().out
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted([*names, "kustomization.yaml", "mine.yaml"]) == sorted(path.name for path in folder.iterdir())


def test_the_command_replaces_no_file_of_another_author(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deploy.toml").write_text(JOB)
    (tmp_path / "kustomization.yaml").write_text("resources: []\n")
    assert main(["deploy", "render", str(tmp_path / "deploy.toml"), "--output", str(tmp_path)]) == 1
    assert "kustomization.yaml exists and was not rendered" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["deploy.toml", "kustomization.yaml"]
    assert main(["deploy", "render", str(tmp_path / "none.toml"), "--output", str(tmp_path / "new")]) == 1
    assert "the job file cannot be read" in capsys.readouterr().err
    (tmp_path / "bad.toml").write_text("name =")
    assert main(["deploy", "render", str(tmp_path / "bad.toml"), "--output", str(tmp_path / "new")]) == 1
    assert "bad.toml is not TOML" in capsys.readouterr().err and not (tmp_path / "new").exists()
