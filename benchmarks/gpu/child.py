"""A process of the GPU benchmark, which measures the items of one part: `python -m benchmarks.gpu.child JOB`.

It prints a JSON line when an item begins and one when it ends, so that the parent knows what a crash interrupted. What
libraries print goes to stderr. An item that hangs ends the process, with the stacks of all threads on stderr; an error
on the device ends it, too, since nothing works on that device afterwards.
"""

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PARTS = {
    "environment": "benchmarks.gpu.devices:Environment",
    "kernels": "benchmarks.gpu.kernels:Kernels",
    "bandwidth": "benchmarks.gpu.bandwidth:Bandwidth",
    "steps": "benchmarks.gpu.training:Steps",
    "profile": "benchmarks.gpu.training:Profile",
    "tiers": "benchmarks.gpu.training:Tiers",
}
ITEM_SECONDS = 100.0
"""How long an item may take; less if the part ends earlier."""
TRACEBACK_CHARACTERS = 3000


class OutOfTimeError(Exception):
    """An item is left out, since too little time is left for it."""


class Part(Protocol):
    """What measures the items of a part. It is created with the job."""

    names: list[str]

    def measure(self, name: str) -> dict[str, Any]:
        """Return the record of an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process measures."""

    part: str
    until: float
    """The time at which the part ends, on the monotonic clock of this machine."""
    out: Path
    """The folder of the results."""
    kernels: str | None = None
    """The module of the kernels; None: those of the device."""
    first: int = 0
    """The first item that it measures."""
    every: int = 1
    """It measures every so many-th item from there on."""

    def seconds_left(self) -> float:
        """Return how long the part may still take."""
        return self.until - time.monotonic()

    def require_seconds(self, seconds: float) -> None:
        """Raise OutOfTimeError if fewer seconds are left."""
        if self.seconds_left() < seconds:
            raise OutOfTimeError(f"{self.seconds_left():.0f} s are left, and it needs {seconds:.0f}")

    def to_json(self) -> str:
        """Return it as an argument of this module."""
        names = ("part", "until", "out", "kernels", "first", "every")
        return json.dumps({name: getattr(self, name) for name in names}, default=str)

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Return the job of such an argument."""
        fields = json.loads(text)
        return cls(**fields | {"out": Path(fields["out"])})


def main(argument: str) -> None:
    """Measure the items."""
    end_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**line: Any) -> None:
        print(json.dumps(line), file=out, flush=True)

    job = Job.from_json(argument)
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # small operations, perhaps beside other work
    module, _, name = PARTS[job.part].partition(":")
    faulthandler.dump_traceback_later(max(1.0, job.seconds_left()), exit=True)
    part: Part = getattr(importlib.import_module(module), name)(job)
    say(items=len(part.names))
    for number in range(job.first, len(part.names), job.every):
        if job.seconds_left() <= 0:
            break
        say(begins=number, item=part.names[number])
        say(ends=number, record=outcome(job, part, part.names[number]))
        faulthandler.cancel_dump_traceback_later()
        free_memory()
    os._exit(0)  # whatever a library's threads do


def outcome(job: Job, part: Part, name: str) -> dict[str, Any]:
    """Return the record of an item, or of its failure."""
    start = time.perf_counter()
    faulthandler.dump_traceback_later(max(1.0, min(ITEM_SECONDS, job.seconds_left())), exit=True)
    try:
        record = {"status": "ok", **part.measure(name)}
    except OutOfTimeError as error:
        record = {"status": "left out", "error": str(error)}
    except Exception as error:
        root = error
        while root.__cause__ is not None and isinstance(root.__cause__, Exception):
            root = root.__cause__
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        record = {"status": "failed", "error": f"{type(root).__name__}: {root}"[:TRACEBACK_CHARACTERS]}
        record["traceback"] = text[-TRACEBACK_CHARACTERS:]
    return record | {"seconds": round(time.perf_counter() - start, 3)}


def free_memory() -> None:
    """Return unused memory to the device, for the next item. Ends the process after an error on the device."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def end_with_parent() -> None:
    """Have the kernel end this process when its parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1])
