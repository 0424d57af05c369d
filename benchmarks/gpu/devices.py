"""The device of a run: what it is, what its data sheet says, how large its measurements are, how fast it copies."""

import importlib.util
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import satrap
from benchmarks.harness.machine import describe_commit, describe_machine

SMI = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,pcie.link.gen.max"
PACKAGES = ("triton", "pytest", "hypothesis", "zmq", "pyarrow", "safetensors")
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the measurements are."""

    samples: int
    """Samples of a batch, each with an id of every feature."""
    rows: int
    """Rows of all tables together."""
    checked_samples: int
    """Samples of a batch on which kernels are checked: fewer, since the reference computes on the CPU."""
    checked_rows: int
    moved_rows: int
    """Rows that change places at a time."""
    copied_bytes: int
    num_calls: int
    """Timed calls of a kernel, and steps, of one round."""


LARGE = Sizes(65_536, 33_000_000, 16_384, 500_000, 1 << 18, 1 << 30, 10)
SMALL = Sizes(64, 26_000, 64, 2_600, 256, 1 << 22, 2)


@dataclass(frozen=True, slots=True)
class DataSheet:
    """What the maker of a device says about it. Nothing here was measured."""

    memory_bytes_per_s: float
    bus_bytes_per_s: float
    """In one direction."""
    flops: float
    """The rate of dense products in half precision, without sparsity."""


SHEETS = {
    "B200": DataSheet(8.0e12, 64e9, 2250e12),
    "H200": DataSheet(4.8e12, 64e9, 989e12),
    "H100 80GB HBM3": DataSheet(3.35e12, 64e9, 989e12),
    "A100-SXM4-80GB": DataSheet(2.04e12, 32e9, 312e12),
}
"""By a part of the name that torch reports."""


def sheet_of(name: str) -> DataSheet | None:
    """Return the data sheet of a device by its name, None for one that is not known here."""
    return next((sheet for part, sheet in SHEETS.items() if re.search(rf"\b{re.escape(part)}\b", name)), None)


def device() -> torch.device:
    """Return the device that this machine measures on."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def sizes() -> Sizes:
    """Return the sizes for this machine's device."""
    return LARGE if device().type == "cuda" else SMALL


def finish() -> None:
    """Wait until the device has done what is on its queue."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object], num_calls: int) -> float:
    """Return the seconds of a call: the median of some rounds, each a queue of calls. The first call is not timed."""
    call()
    rounds = []
    for _ in range(ROUNDS):
        finish()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        finish()
        rounds.append((time.perf_counter() - start) / num_calls)
    return statistics.median(rounds)


def bandwidths() -> dict[str, float]:
    """Return the GB/s of a copy on the device, which reads and writes, and of a copy to it from pinned memory."""
    size = sizes()
    generator = torch.Generator(device()).manual_seed(1)
    one, other = (
        torch.randint(0, 256, (size.copied_bytes,), dtype=torch.uint8, device=device(), generator=generator)
        for _ in range(2)
    )
    host = one.to("cpu", copy=True)
    if device().type == "cuda":
        host = host.pin_memory()
    copied = seconds_of(lambda: other.copy_(one), size.num_calls)
    sent = seconds_of(lambda: one.copy_(host, non_blocking=True), size.num_calls)
    rates = {"copy_gb_per_s": 2 * size.copied_bytes / copied, "bus_gb_per_s": size.copied_bytes / sent}
    return {name: round(rate / 1e9, 2) for name, rate in rates.items()}


class Environment:
    """The part that says where all other figures come from."""

    def __init__(self, job: Any) -> None:
        self.names = ["software", "device", "copies"]

    def measure(self, name: str) -> dict[str, Any]:
        """Return the facts of one kind."""
        return {"software": _software, "device": _device, "copies": bandwidths}[name]()


def _software() -> dict[str, Any]:
    header = Path(sysconfig.get_path("include"), "Python.h")
    return {
        "commit": describe_commit(),
        **describe_machine(),
        "executable": sys.executable,
        "satrap": f"{satrap.__version__} at {Path(satrap.__file__).parent}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        # Triton builds the code that launches kernels with a C compiler, once.
        "c_compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "python_header": header.exists(),
        "imports": [name for name in PACKAGES if _is_importable(name)],
    }


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _device() -> dict[str, Any]:
    if device().type != "cuda":
        return {"device": "cpu", "note": "a dry run: no figure says anything about a device"}
    import triton

    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    smi = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
    try:
        described = subprocess.run(smi, capture_output=True, text=True, check=False, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        described = [str(error)]
    return {
        "device": properties.name,
        "devices": torch.cuda.device_count(),
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "free_bytes": free,
        "total_bytes": total,
        "triton": triton.__version__,
        "nccl": torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None,
        "nvidia_smi": dict(zip(SMI.split(","), (described or [""])[0].split(", "), strict=False)),
    }
