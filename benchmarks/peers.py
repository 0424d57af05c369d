"""The environment with the peers in it: made on request, found again by its folder.

FBGEMM's CPU build must match torch's release, and nobody who develops Satrap should have to install it; so it lives in
a virtual environment of its own, with the same torch that runs the plain PyTorch peer. Nothing here is measured.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

DEFAULT_HOME = "~/.cache/satrap-peers"
# torch 2.13.0 spelled like this is a CPU build where the index has one. FBGEMM's metadata asks for packages that its
# tables do not import, hence --no-deps.
WITH_DEPENDENCIES = ("torch==2.13.0", f"numpy=={np.__version__}")
WITHOUT_DEPENDENCIES = ("fbgemm-gpu-cpu==1.8.0",)


def peers_python(home: Path) -> Path | None:
    """The interpreter of the peers' environment, or None if it has not been made."""
    python = _python(home)
    return python if python.exists() and _works(python) else None


def make_peers(home: Path) -> Path:
    """Make the environment if it is not there and works; return its interpreter. Needs the network, about 1 GB."""
    python = _python(home)
    if python.exists() and _works(python):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(python.parent.parent)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, *WITH_DEPENDENCIES], check=True)
    subprocess.run([*install, "--no-deps", *WITHOUT_DEPENDENCIES], check=True)
    if not _works(python):
        raise RuntimeError(f"FBGEMM was installed under {home} but does not import; try it with {python}")
    return python


def imports(python: Path, module: str) -> bool:
    """Whether an interpreter has a module that works; asked in a process of its own, so nothing is imported here."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([str(python), "-c", f"import {module}"], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def _python(home: Path) -> Path:
    return home.expanduser() / "fbgemm" / "bin" / "python"


def _works(python: Path) -> bool:
    return imports(python, "fbgemm_gpu.split_table_batched_embeddings_ops_training")
