"""deploy/Dockerfile and deploy/Dockerfile.gpu. There may be no container engine where tests run, so their pip steps run
in a fresh environment instead: with SATRAP_FULL_SIZE=1, since they build the core and install torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from satrap.deploy import pods

ROOT = Path(__file__).parents[2]
FILES = ("Dockerfile", "Dockerfile.gpu")
FULL_SIZE = pytest.mark.skipif("SATRAP_FULL_SIZE" not in os.environ, reason="needs SATRAP_FULL_SIZE=1: minutes of CPU")
each_file = pytest.mark.parametrize("name", FILES)


def instructions(name: str) -> list[tuple[str, str]]:
    text = (ROOT / "deploy" / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def pip_steps(name: str) -> list[str]:
    return [text for word, text in instructions(name) if word == "RUN" and text.startswith("pip ")]


@each_file
def test_the_image_has_what_the_manifests_use(name: str) -> None:
    found = instructions(name)
    assert ("USER", "satrap") in found and f"useradd --uid {pods.USER} " in dict(found)["RUN"]
    steps = " ".join(pip_steps(name))
    extras = re.findall(r"\[([\w,]+)\]", steps)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [set(each.split(",")) for each in extras] == [{"cluster", "metrics", "ray", "train"}]
    assert set(extras[0].split(",")) <= set(project)
    assert "openssl" in " ".join(text for word, text in found if word == "RUN")
    pinned = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and f" {pinned[0]}" in steps


@each_file
def test_what_is_copied_exists_and_is_all_that_a_build_needs(name: str) -> None:
    copied = [text.split()[:-1] for word, text in instructions(name) if word == "COPY" and "--from" not in text]
    sources = {source for each in copied for source in each}
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {project["readme"], *(each.partition("/")[0] for each in project["license-files"])}
    assert {"pyproject.toml", "CMakeLists.txt", "constraints.txt", "core", "src", *needed} == sources


def test_the_images_differ_in_what_gpus_need_only() -> None:
    plain, gpu = (instructions(name) for name in FILES)
    assert plain.index(("FROM", "python:3.11-slim-bookworm")) == gpu.index(("FROM", "python:3.11-slim-bookworm"))
    added, removed = ([each for each in one if each not in other] for one, other in ((gpu, plain), (plain, gpu)))
    assert [word for word, _ in added] == ["RUN", "RUN", "ENV", "ENV"] and "gcc" in added[0][1]
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib64 " in added[3][1], "where GKE mounts the driver"
    assert [word for word, _ in removed] == ["RUN", "ARG", "RUN"]
    assert removed[2][1].replace('${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ', "") == added[1][1]


@FULL_SIZE
def test_the_pip_steps_make_an_environment_that_runs_satrap(tmp_path: Path) -> None:
    """The steps of the two images are the same here, since TORCH_INDEX is not set."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    binaries = tmp_path / "venv/bin"
    work = tmp_path / "satrap"
    work.mkdir()
    for word, text in instructions("Dockerfile"):
        if word == "COPY" and "--from" not in text:
            for source in text.split()[:-1]:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, work / source)
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "http"))}
    for number, step in enumerate(pip_steps("Dockerfile")):
        constraints = {"PIP_CONSTRAINT": str(work / "constraints.txt")} if number == 0 else {}
        subprocess.run(["bash", "-ec", step], cwd=work, env=environment | constraints, check=True, timeout=3600)
    (tmp_path / "app").mkdir()
    for command in ("satrap doctor --no-run", "satrap run --help", "ray --version", "torchrun --help"):
        subprocess.run(command.split(), cwd=tmp_path / "app", env=environment, check=True, timeout=600)
    imports = "import satrap, zmq, ray, torch, obstore, prometheus_client; print(satrap.__file__)"
    done = subprocess.run(
        [str(binaries / "python"), "-c", imports], cwd=tmp_path / "app", env=environment, capture_output=True, text=True
    )
    assert str(tmp_path) in done.stdout, done.stderr
