"""The kernels of rows on a device, compiled for CUDA targets by processes of their own (`kernel_child.py`): those of
the tests have Triton's interpreter, which replaces the compiler for good when Triton is imported.

What is compiled is kept in build/triton, so that a later run compiles only what has changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_CACHE = _ROOT / "build/triton"
OLDER = _ROOT / "build/triton-3.6.0"
"""Where `make test ALL=1` installs the Triton that torch 2.11 brings."""
TARGETS = (80, 90)
"""Compute capabilities: A100, H100 and H200."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A call of a launching function."""

    launcher: str
    """A name in LAUNCHERS of `kernel_child.py`."""
    dtype: str
    dim: int
    optimizer: str = "SGD"
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, each: dict[str, Any]) -> Launch:
        """Return the launch that was written as JSON."""
        return cls(**{**each, "options": tuple(each["options"])})

    @property
    def alignment(self) -> int:
        """Numbers at whose multiples rows, columns and gradients begin."""
        return 1 if self.dim % 4 else 4 if self.dim % 8 else 8

    @property
    def block(self) -> str:
        """The dtype of what is looked up, or of gradients: an option, or float32."""
        return next((option for option in self.options if option in ("float16", "bfloat16")), "float32")

    def __str__(self) -> str:
        optimizer = [self.optimizer] if self.launcher in ("update", "exchange") else []
        return " ".join([self.launcher, *optimizer, self.dtype, str(self.dim), *self.options])


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that was compiled for a target."""

    launch: Launch
    target: int
    name: str
    rows: int
    """The number of rows that a program has."""
    numbers: int
    """The number of columns of all its rows that a thread has."""
    warps: int
    ptx: dict[str, int]
    """How often each PTX instruction occurs."""
    sass: dict[str, int]
    """How often each machine instruction occurs."""
    reg: int
    stack: int
    local: int
    shared: int

    def __str__(self) -> str:
        return f"sm_{self.target} {self.name} ({self.launch})"

    @property
    def instructions(self) -> int:
        """The warp-instructions of a program: each loop once, as for runs and bags of one entry."""
        return sum(self.sass.values()) * self.warps


class Compilers:
    """A process for each target."""

    def __init__(self, processes: dict[int, subprocess.Popen[str]]) -> None:
        self._processes = processes
        versions = [json.loads(self._read(target))["triton"] for target in processes]
        self.version: str = versions[0]

    def compile(self, launches: Sequence[Launch]) -> tuple[list[Kernel], list[str]]:
        """Return the kernels of the launches on all targets, and what could not be compiled."""
        answers = self._ask([asdict(launch) for launch in launches])
        kernels, errors = [], []
        for target, answer in answers.items():
            for launch, each in zip(launches, answer, strict=True):
                if each["error"] is not None:
                    errors.append(f"sm_{target} {launch} does not compile: {each['error']}")
                kernels += [Kernel(launch=launch, target=target, **kernel) for kernel in each["kernels"]]
        return kernels, errors

    def variants(self) -> dict[int, dict[str, int]]:
        """Return for each target how many variants of each kernel a job compiles."""
        return self._ask(["variants"])

    def _ask(self, asked: Any) -> dict[int, Any]:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        return {target: json.loads(self._read(target)) for target in self._processes}

    def _read(self, target: int) -> str:
        process = self._processes[target]
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the compiler for sm_{target} has ended with status {process.wait()}; its errors are above"
        return line


@contextmanager
def compilers(triton: Path | None = None) -> Iterator[Compilers]:
    """Start compilers. triton: the folder of another Triton than the installed one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(_CACHE)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*([triton] if triton else []), _ROOT / "tests/support"]))
    with ExitStack() as stack:
        processes = {}
        for target in TARGETS:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("kernel_child.py")), str(target)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)  # closes its input, at which it ends, and waits for it
            processes[target] = process
        yield Compilers(processes)
