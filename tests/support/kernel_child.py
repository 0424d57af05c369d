"""A program that compiles the kernels of rows on a device for a CUDA target, where there is no device: it calls the
launching functions of `satrap.device` with tensors in CPU memory, and Triton only compiles.

    python tests/support/kernel_child.py CAPABILITY

Reads lines of JSON: a list of launches, or ["variants"]. Answers each line with one: for each launch its kernels with
what ptxas and the disassembler say of them, or the error; for "variants", how many of each kernel a job compiles.
`compiled_kernels.py` starts it. Needs only Triton: its wheel carries ptxas, cuobjdump and nvdisasm.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from compiled_kernels import Launch
from one_row import state_dim
from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, RowWiseAdagrad
from satrap.config.tables import Constant, Normal, Table, Uniform
from satrap.device import triton_initial
from satrap.device import triton_kernels as kernels
from satrap.device.home_memory import HomeMemory, RowLayout
from satrap.device.initial_values import InitialValues
from satrap.device.runs import PooledFeatures, RowUpdate, Runs

OPTIMIZERS: dict[str, Any] = {
    "SGD": SGD(lr=0.1),
    "momentum": SGD(lr=0.1, momentum=0.9),
    "Nesterov": SGD(lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": Adagrad(lr=0.1),
    "RowWiseAdagrad": RowWiseAdagrad(lr=0.1),
    "Adam": Adam(lr=0.1),
    "AdamW": AdamW(lr=0.1),
    "Ftrl": Ftrl(lr=0.1),
}
INITIAL: dict[str, Any] = {"uniform": Uniform(-0.1, 0.1), "normal": Normal(std=0.1), "constant": Constant(0.5)}
_SAMPLES, _FEATURES, _FRAMES = 64, 26, 100


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def launch_pool(launch: Launch, samples: int = _SAMPLES) -> None:
    """Pool 26 features of one memory; options: "bags", "weighted", and the dtype of the block."""
    dim, ids = launch.dim, samples * _FEATURES
    at = torch.arange(_FEATURES, dtype=torch.int32)
    features = PooledFeatures(at, at * dim, int32(_FEATURES), int32(_FEATURES), launch.alignment)
    offsets = torch.arange(ids + 1) if "bags" in launch.options else None
    weights = torch.ones(ids) if "weighted" in launch.options else None
    rows = (values_of(launch), torch.empty(0, dim), int32(ids), offsets, weights)
    kernels.pool(*rows, features, samples, torch.empty(samples, _FEATURES * dim, dtype=block_dtype(launch)))


def launch_sequence(launch: Launch, samples: int = _SAMPLES, feature: int = 3) -> None:
    """Copy the sequences of one feature; options: "bags", and the dtype of the copies."""
    ids = samples * _FEATURES
    offsets = torch.arange(ids + 1) if "bags" in launch.options else None
    rows = (values_of(launch), torch.empty(0, launch.dim), int32(ids), offsets)
    kernels.copy_sequence(*rows, feature, torch.empty(samples, 10, launch.dim, dtype=block_dtype(launch)))


def launch_update(launch: Launch, runs: Runs | None = None, lr: float = 0.1, step: int = 7) -> None:
    """Update rows; options: "factors", "scaled", "skip", and the dtype of the gradients."""
    optimizer = OPTIMIZERS[launch.optimizer]
    kernels.update(
        values_of(launch),
        torch.zeros(_FRAMES, state_dim(optimizer, launch.dim)),
        runs or runs_of(launch, _FRAMES),
        torch.zeros(_SAMPLES * _FEATURES * launch.dim, dtype=block_dtype(launch)),
        RowUpdate(
            optimizer=optimizer,
            lr=lr,
            scale=0.5 if "scaled" in launch.options else 1.0,
            step=step,
            skip_nonfinite="skip" in launch.options,
        ),
    )


def launch_exchange(launch: Launch, rows: int = 10, first: int = 0) -> None:
    """Copy rows between the device and home, with the state of an optimizer."""
    values, num_state = values_of(launch), state_dim(OPTIMIZERS[launch.optimizer], launch.dim)
    home = HomeMemory(RowLayout(launch.dtype, launch.dim, num_state), torch.device("cpu"))
    home.addresses = torch.zeros(3, dtype=torch.int64)
    at = int32(first + rows)[first:]
    kernels.exchange(values, torch.zeros(_FRAMES, num_state), home, at, at, at)


def launch_initialise(launch: Launch, rows: int = 10, first: int = 0) -> None:
    """Write the first values and states of rows; option: "uniform", "normal" or "constant"."""
    optimizer = OPTIMIZERS[launch.optimizer]
    dtype: Any = launch.dtype
    table = Table("t", dim=launch.dim, optimizer=optimizer, dtype=dtype, initial=INITIAL[launch.options[0]])
    num_state, at = state_dim(optimizer, launch.dim), int32(first + rows)[first:]
    triton_initial.initialise(
        values_of(launch),
        torch.zeros(_FRAMES, num_state),
        at,
        at.to(torch.int64),
        InitialValues.of(table, 0, torch.device("cpu")),
        RowLayout(launch.dtype, launch.dim, num_state),
    )


LAUNCHERS: dict[str, Callable[[Launch], None]] = {
    "pool": launch_pool,
    "sequence": launch_sequence,
    "update": launch_update,
    "exchange": launch_exchange,
    "initialise": launch_initialise,
}
"""What a launch may name. A new kernel has a line here and its launches in tests/device/test_compiled.py."""


def block_dtype(launch: Launch) -> torch.dtype:
    return getattr(torch, launch.block)  # type: ignore[no-any-return]


def values_of(launch: Launch) -> torch.Tensor:
    return torch.zeros(_FRAMES, launch.dim, dtype=getattr(torch, launch.dtype))


def runs_of(launch: Launch, runs: int, tables: tuple[int, ...] = ()) -> Runs:
    """Return runs of two gradients each."""
    ends = 2 * torch.arange(1, runs + 1, dtype=torch.int32)
    return Runs(
        frames=int32(runs),
        begin=ends - 2,
        end=ends,
        places=int32(2 * runs),
        factors=torch.ones(2 * runs, 2) if "factors" in launch.options else None,
        keys=torch.zeros(runs, dtype=torch.int64),
        tables=(0, *tables, runs),
        alignment=launch.alignment,
    )


def launch_a_job() -> None:
    """Launch what a job launches: several tables, batches of several sizes, the last one of a single sample."""
    pool, bags = (Launch("pool", "float32", 16, options=each) for each in ((), ("bags",)))
    update, exchange = Launch("update", "bfloat16", 16, "Adagrad"), Launch("exchange", "float32", 16)
    initialise = Launch("initialise", "float32", 16, options=("uniform",))
    for samples in (512, 500, 1):
        launch_pool(pool, samples)
        launch_pool(bags, samples)
        for feature in range(3):
            launch_sequence(pool, samples, feature)
        for first in range(3):
            launch_exchange(exchange, samples, first)
            launch_initialise(initialise, samples, first)
    for step, tables in enumerate([(16, 49, 55), (1, 2, 3), (3, 8, 80)]):
        runs = runs_of(update, 96, tables)
        for table in range(4):
            launch_update(update, runs.of_tables(range(table, table + 1)), lr=[0.1, 1.0, 0.0][step], step=step)


# -- compiling without a device ----------------------------------------------------------------------------------------


class Target:
    """A driver of Triton for a device that does not exist."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compiled:
    """Compiles each launch of a kernel instead of running it, and keeps the kernels."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.kernels: list[tuple[str, dict[str, Any], Any]] = []
        driver.set_active(Target(capability))
        compile_for, found = JITFunction.run, self.kernels

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            found.append((self.__name__, options, compile_for(self, *args, grid=grid, warmup=True, **options)))
            return found[-1][2]

        JITFunction.run = run

    def of(self, launch: Launch) -> dict[str, Any]:
        """Return the kernels of a launch, or its error."""
        self.kernels.clear()
        try:
            LAUNCHERS[launch.launcher](launch)
        except Exception as error:  # Triton's own errors have many types
            causes = [error]
            while causes[-1].__cause__ is not None:
                causes.append(causes[-1].__cause__)  # type: ignore[arg-type]
            return {"error": " / ".join(f"{type(each).__name__}: {each}" for each in causes)[-2000:], "kernels": []}
        return {"error": None, "kernels": [self._measured(*kernel) for kernel in self.kernels]}

    def variants(self) -> dict[str, int]:
        """Return how many variants of each kernel a job has compiled."""
        self.kernels.clear()
        launch_a_job()
        different = {(name, kernel.hash) for name, _, kernel in self.kernels}
        return Counter(name for name, _ in different)

    def _measured(self, name: str, options: dict[str, Any], kernel: Any) -> dict[str, Any]:
        cubin, ptx = kernel.asm["cubin"], kernel.asm["ptx"]
        warps = kernel.metadata.num_warps
        return {
            "name": name,
            "rows": options.get("ROWS", 1),
            "numbers": options.get("ROWS", 1) * options["BLOCK"] // (32 * warps),
            "warps": warps,
            "ptx": Counter(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.]*)\s", ptx, re.MULTILINE)),
            **self._disassembled(cubin),
        }

    def _disassembled(self, cubin: bytes) -> dict[str, Any]:
        """Return the registers, local memory and instructions of a kernel. Kept beside Triton's own cache."""
        kept = Path(os.environ["TRITON_CACHE_DIR"]) / f"{hashlib.sha256(cubin).hexdigest()}.json"
        if kept.exists():
            found: dict[str, Any] = json.loads(kept.read_text())
            return found
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            program = Path(get_ptxas(self.capability).path).with_name("cuobjdump")
            told = subprocess.run(
                [program, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        usage = {name.lower(): int(size) for name, size in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", told)}
        found = {**usage, "sass": _main_path(told)}
        kept.parent.mkdir(parents=True, exist_ok=True)
        written = kept.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(found))
        written.rename(kept)
        return found


def _main_path(disassembly: str) -> dict[str, int]:
    """Count the instructions of each kind, without padding, and without what divisions and square roots call for the
    few numbers that need it: that comes behind the last exit."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", disassembly)
    last_exit = max(int(at, 16) for at, name, _ in lines if name == "EXIT")
    called = [re.search(r"0x([0-9a-f]+)", rest) for _, name, rest in lines if name.startswith("CALL")]
    end = min((int(at[1], 16) for at in called if at and int(at[1], 16) > last_exit), default=sys.maxsize)
    return Counter(name for at, name, _ in lines if int(at, 16) < end and name != "NOP")


def main() -> None:
    compiled = Compiled(int(sys.argv[1]))
    print(json.dumps({"triton": triton.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked == ["variants"]:
            answer: Any = compiled.variants()
        else:
            answer = [compiled.of(Launch.of(each)) for each in asked]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
