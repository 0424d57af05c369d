"""Sharing cores with torch: how many cores torch leaves free, and how table work runs on torch's threads between
operators.

After each operator torch's threads spin for a while in wait for the next. Separate threads of the core would compete
with them at that time, so work in the user's thread borrows torch's threads (core/base/borrowed_openmp.hpp).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from satrap import _core
from satrap.config.cores import num_cores


def spare_cores() -> int:
    """Return how many cores of this process torch's threads leave free."""
    return max(0, num_cores() - torch.get_num_threads())


def leave_cores_free() -> None:
    """Take threads from torch for table work beside the dense network: a quarter of the cores, and at least one. Does
    nothing where the user chose fewer threads than cores, by OMP_NUM_THREADS or torch.set_num_threads. On a single core
    table work runs between the steps.

    torch's threads spin while they wait for each other, so with one on each core any other work, such as a server of
    `satrap run` on the same machine, stops all of them.
    """
    cores = num_cores()
    if cores > 1 and torch.get_num_threads() >= cores:
        torch.set_num_threads(cores - max(1, cores // 4))


@contextmanager
def torch_threads() -> Iterator[None]:
    """Run the calls into the core inside this context on torch's threads, where torch uses GNU OpenMP."""
    library = _openmp()
    _core.borrow_threads(library)
    try:
        yield
    finally:
        _core.borrow_threads(None)


@cache
def _openmp() -> str | None:
    """Return the path of the OpenMP library that torch ships or was linked with."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    loaded = sorted({line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line})
    shipped_with_torch = [path for path in loaded if path.startswith(str(Path(torch.__file__).parent.parent))]
    return next(iter(shipped_with_torch or loaded), None)
