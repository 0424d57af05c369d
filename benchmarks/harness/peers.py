"""The virtual environments of the peers, and the interpreter of each contender.

Peers share no environment with Satrap or each other: FBGEMM's CPU build belongs to one release of torch, PaddlePaddle
to an old numpy. None of them is needed to develop Satrap.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

HOME = Path("~/.cache/satrap-peers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """A virtual environment under the peers' home."""

    name: str
    """Its folder."""
    packages: tuple[str, ...]
    bare_packages: str = ""
    """Installed without their dependencies, which their tables do not import."""
    module: str
    """Imports only if the installation is complete."""


# FBGEMM is also called without TorchRec. `torch==2.13.0` is a CPU build if the index has one.
TORCHREC = Environment(
    name="torchrec",
    packages=("torch==2.13.0", f"numpy=={np.__version__}"),
    bare_packages="fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0 cloudpickle==3.1.2 importlib_metadata==10.2.0 iopath==0.1.10 "
    "lightning-utilities==0.15.3 mypy-extensions==1.2.0 orjson==3.13.0 packaging==26.3 portalocker==4.4.2 "
    "pyre-extensions==0.0.32 pyvers==0.2.3 tensordict==0.15.3 torchmetrics==1.9.0 tqdm==4.70.1 "
    "typing-inspect==0.9.0 zipp==4.1.2",
    module="torchrec.modules.fused_embedding_modules",
)
# The last release but one with a parameter server; newer decorators and protobufs break its fleet.
PADDLE = Environment(
    name="paddle",
    packages=("paddlepaddle==2.6.2", "numpy==1.26.4", "setuptools==65.5.0", "protobuf==4.25.8", "decorator==5.1.1"),
    module="paddle.static",
)


ENVIRONMENTS = {"torchrec": TORCHREC, "fbgemm": TORCHREC, "paddle": PADDLE}


def environments_of(contenders: Sequence[str]) -> list[Environment]:
    """Return the environments that these contenders need."""
    needed = [ENVIRONMENTS.get(name) for name in contenders]
    return [environment for environment in (TORCHREC, PADDLE) if environment in needed]


@cache
def find_python(contender: str) -> Path | None:
    """Return the interpreter of a contender: this one where it suffices, else its environment's; None without it."""
    here = Path(sys.executable)
    if contender.startswith("satrap"):
        return here if imports(here, "satrap.table.store") else None
    if contender not in ENVIRONMENTS and imports(here, "torch"):
        return here
    return peers_python(ENVIRONMENTS.get(contender, TORCHREC))


def peers_python(environment: Environment) -> Path | None:
    """Return the interpreter of a peer's environment, None if it is not installed."""
    python = _python(environment)
    return python if python.exists() and imports(python, environment.module) else None


def make_peers(environment: Environment) -> Path:
    """Install the environment unless it is there and works; return its interpreter. Needs the network, about 1 GB."""
    if installed := peers_python(environment):
        return installed
    python = _python(environment)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(python.parent.parent)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, *environment.packages], check=True)
    if environment.bare_packages:
        subprocess.run([*install, "--no-deps", *environment.bare_packages.split()], check=True)
    if not imports(python, environment.module):
        raise RuntimeError(
            f"{environment.name} was installed under {HOME} but {environment.module} does not import; "
            f"run `{python} -c 'import {environment.module}'` to see why"
        )
    return python


def imports(python: Path, module: str) -> bool:
    """Return whether an interpreter has a module that works; tried in another process, so nothing is imported here."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([str(python), "-c", f"import {module}"], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def _python(environment: Environment) -> Path:
    return HOME.expanduser() / environment.name / "bin" / "python"
