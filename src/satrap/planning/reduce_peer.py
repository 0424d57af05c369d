"""The CPU time of all-reduces between two processes: this one and a child that joins it.

Run as a program, it is the child.
"""

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SMALL, _LARGE = 4, 4 << 20  # bytes
_ROUNDS = 30
_PER_STEP = 3  # gradients; whether all trainers have a batch; whether their gradients agree
_TIMEOUT = timedelta(minutes=10)


def reduce_seconds(folder: Path) -> tuple[float, float]:
    """Return the CPU time of one process for the all-reduces of a step, however small, and for each byte that it
    sends."""
    store = folder / "reduce"
    with subprocess.Popen([sys.executable, "-m", "satrap.planning.reduce_peer", str(store)]) as child:
        try:
            small, large = _measure(store, 0)
        except BaseException:
            child.kill()
            raise
        child.wait(_TIMEOUT.total_seconds())
    # A ring of two processes sends each byte once.
    return _PER_STEP * small, max(0.0, large - small) / _LARGE


def _measure(store: Path, rank: int) -> tuple[float, float]:
    group: Any = dist.ProcessGroupGloo(dist.FileStore(str(store), 2), rank, 2, _TIMEOUT)  # type: ignore[attr-defined]
    return _reduce(group, _SMALL), _reduce(group, _LARGE)


def _reduce(group: Any, size: int) -> float:
    tensor = torch.zeros(size // 4)
    group.allreduce([tensor]).wait()
    begin = time.process_time()
    for _ in range(_ROUNDS):
        group.allreduce([tensor]).wait()
    return (time.process_time() - begin) / _ROUNDS


if __name__ == "__main__":
    torch.set_num_threads(1)
    _measure(Path(sys.argv[1]), 1)
