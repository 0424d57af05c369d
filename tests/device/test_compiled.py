"""Every kernel of rows on a device, compiled as it is launched for an A100 (sm_80) and an H100 (sm_90): no device is
needed. Triton's interpreter, in which the other tests run kernels, sees neither what does not compile nor what it costs.

A kernel may not spill, touch local memory, or flush, approximate or contract what the formula does not; rows are read
and written by 16 bytes where their dim allows it; and its instructions have a budget. Each run compiles all kernels for
one dim, which is drawn, and those of the table in docs/design/004-device.md; `make test ALL=1` compiles all, also with
the Triton that torch 2.11 brings. What was compiled before is kept in build/triton.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from compiled_kernels import OLDER, Compilers, Kernel, Launch, compilers

pytest.importorskip("triton")

DTYPES = ("float32", "float16", "bfloat16")
DIMS = (16, 64, 128, 37)
OPTIMIZERS = ("SGD", "momentum", "Nesterov", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "Ftrl")
NOTE = Path(__file__).parents[2] / "docs/design/004-device.md"

TILE = 512  # numbers of a program's rows, for dims up to 512
BUDGETS: dict[str, tuple[int, int, int]] = {
    #                 float32  16 bits  an odd dim, of either
    "pool": (0, 0, 0),
}
"""Warp-instructions of a tile of 512 numbers, which is four rows of dim 128 or 32 of dim 16, without options."""
