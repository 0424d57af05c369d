"""What a trainer's process does before the script: it takes its place, and joins the other trainers."""

import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from satrap.place import Place, stand


def train(place: Place, script: str, arguments: Sequence[str]) -> None:
    """Runs the script as Python would, in this place. Several trainers are a torch.distributed group then."""
    if place.num_threads is not None:
        torch.set_num_threads(place.num_threads)
    if place.world > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(place.rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=place.meeting, rank=place.rank, world_size=place.world)
    stand(place)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    try:
        runpy.run_path(script, run_name="__main__")
        if place.world > 1 and dist.is_initialized():
            dist.all_reduce(torch.zeros(1))  # who is done first stays until nobody needs it
    finally:
        # torch's threads let go of a tensor with Python's lock in hand; one that asks for it after Python has ended
        # aborts the process, as of torch 2.13.
        time.sleep(_SETTLE_SECONDS if place.world > 1 else 0.0)


_SETTLE_SECONDS = 0.5
