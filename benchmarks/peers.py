"""The environments with the peers in them: made on request, found again by their folders.

A peer must not share an environment with Satrap or with each other: FBGEMM's CPU build belongs to one release of torch,
PaddlePaddle to an old numpy. So each has a virtual environment of its own, and nobody who develops Satrap has to
install any. Nothing here is measured.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DEFAULT_HOME = "~/.cache/satrap-peers"
# torch 2.13.0 spelled like this is a CPU build where the index has one.


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """A virtual environment under the peers' home."""

    name: str
    """Its folder."""
    packages: tuple[str, ...]
    bare_packages: tuple[str, ...] = ()
    """Installed without what their metadata asks for, which their tables do not import."""
    module: str
    """Imports only if all is there."""


# FBGEMM is called without TorchRec, too.
TORCHREC = Environment(
    name="torchrec",
    packages=("torch==2.13.0", f"numpy=={np.__version__}"),
    bare_packages=(
        "fbgemm-gpu-cpu==1.8.0",
        "torchrec==1.8.0",
        "cloudpickle==3.1.2",
        "importlib_metadata==10.2.0",
        "iopath==0.1.10",
        "lightning-utilities==0.15.3",
        "mypy-extensions==1.2.0",
        "orjson==3.13.0",
        "packaging==26.3",
        "portalocker==4.4.2",
        "pyre-extensions==0.0.32",
        "pyvers==0.2.3",
        "tensordict==0.15.3",
        "torchmetrics==1.9.0",
        "tqdm==4.70.1",
        "typing-inspect==0.9.0",
        "zipp==4.1.2",
    ),
    module="torchrec.modules.fused_embedding_modules",
)
# The last release but one that has a parameter server; newer decorators and protobufs break its fleet.
PADDLE = Environment(
    name="paddle",
    packages=("paddlepaddle==2.6.2", "numpy==1.26.4", "setuptools==65.5.0", "protobuf==4.25.8", "decorator==5.1.1"),
    module="paddle.static",
)


def peers_python(home: Path, environment: Environment) -> Path | None:
    """The interpreter of a peer's environment, or None if it has not been made."""
    python = _python(home, environment)
    return python if python.exists() and imports(python, environment.module) else None


def find_pythons(home: Path) -> dict[str, Path]:
    """The interpreter for each contender that is installed: this one where it will do, else a peer's environment."""
    here, torchrec, paddle = Path(sys.executable), peers_python(home, TORCHREC), peers_python(home, PADDLE)
    torch = here if imports(here, "torch") else torchrec
    found = {"satrap": here if imports(here, "satrap.table.store") else None, "torch": torch, "index_select": torch}
    found |= {"torchrec": torchrec, "fbgemm": torchrec, "paddle": paddle}
    return {name: python for name, python in found.items() if python is not None}


def make_peers(home: Path, environment: Environment) -> Path:
    """Make the environment if it is not there and works; return its interpreter. Needs the network, about 1 GB."""
    found = peers_python(home, environment)
    if found is not None:
        return found
    python = _python(home, environment)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(python.parent.parent)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, *environment.packages], check=True)
    if environment.bare_packages:
        subprocess.run([*install, "--no-deps", *environment.bare_packages], check=True)
    if not imports(python, environment.module):
        raise RuntimeError(
            f"{environment.name} was installed under {home} but {environment.module} does not import; "
            f"try it with {python}"
        )
    return python


def imports(python: Path, module: str) -> bool:
    """Whether an interpreter has a module that works; asked in a process of its own, so nothing is imported here."""
    return runs(python, f"import {module}")


def runs(python: Path, statement: str) -> bool:
    """Whether an interpreter runs a statement without an error."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([str(python), "-c", statement], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def _python(home: Path, environment: Environment) -> Path:
    return home.expanduser() / environment.name / "bin" / "python"
