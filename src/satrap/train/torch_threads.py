"""Whose cores are whose: how many torch leaves free, and how table work runs on torch's own threads between operators.

torch's threads spin for a while after each operator, in wait for the next. On threads of its own the core would share
the cores with them just then, so what runs in the user's thread borrows torch's (core/base/borrowed_openmp.hpp).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from satrap import _core


def spare_cores() -> int:
    """Cores of this process that torch's own threads leave free."""
    return max(0, len(os.sched_getaffinity(0)) - torch.get_num_threads())


@contextmanager
def torch_threads() -> Iterator[None]:
    """Calls into the core inside run on torch's threads, where torch has GNU's OpenMP."""
    library = _openmp()
    _core.borrow_threads(library)
    try:
        yield
    finally:
        _core.borrow_threads(None)


@cache
def _openmp() -> str | None:
    """The library that torch brought along, or that its build linked."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    found = sorted({line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line})
    ours = [path for path in found if path.startswith(str(Path(torch.__file__).parent.parent))]
    return next(iter(ours or found), None)
