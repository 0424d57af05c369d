"""What a trainer's process does before the script: it takes its place, and joins the other trainers."""

import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from satrap.run_context import PATIENCE, RunContext, end, enter

_SETTLE_SECONDS = 0.5


def train(place: RunContext, script: str, arguments: Sequence[str], listener: int | None = None) -> None:
    """Runs the script as Python would, in this place. Several trainers are a torch.distributed group then.

    listener: a file descriptor that listens at the meeting; of the first trainer, where the meeting is its own.
    """
    if place.num_threads is not None:
        torch.set_num_threads(place.num_threads)
    if place.world > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(place.rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        assert place.meeting is not None
        store = _store(place, place.meeting, listener)
        dist.init_process_group(backend, rank=place.rank, world_size=place.world, store=store)
        everybody = dist.new_group(backend="gloo", timeout=PATIENCE)
    enter(place)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    try:
        _run(script)
        if place.world > 1 and dist.is_initialized():
            end()
            dist.all_reduce(torch.zeros(1), group=everybody)  # who is done first stays until nobody needs it
    except KeyboardInterrupt:  # the run's end, which says so itself; where the script was is of no interest
        raise SystemExit(130) from None
    finally:
        # torch's threads let go of a tensor with Python's lock in hand; one that asks for it after Python has ended
        # aborts the process, as of torch 2.13.
        time.sleep(_SETTLE_SECONDS if place.world > 1 else 0.0)


def _run(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        if exit.code not in (None, 0):
            raise


def _store(place: RunContext, meeting: str, listener: int | None) -> Any:
    """Where the trainers find each other. A port was bound before anybody was told of it: nobody else can take it. A
    file is named as it is: in a URL what follows a # or ? would be lost, and another run might meet there, too."""
    if meeting.startswith("file://"):
        store = dist.FileStore(meeting.removeprefix("file://"), place.world)  # type: ignore[attr-defined]
        store.set_timeout(dist.default_pg_timeout)
        return store
    host, _, port = meeting.removeprefix("tcp://").rpartition(":")
    first: dict[str, Any] = {} if listener is None else {"is_master": True, "master_listen_fd": listener}
    return dist.TCPStore(host, int(port), place.world, **first)  # type: ignore[attr-defined]
