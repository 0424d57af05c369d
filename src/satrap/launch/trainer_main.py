"""The main program of a trainer: sets the process up, joins the other trainers, and runs the script.

`satrap run` passes the whole context; of trainers that torchrun started, ranks come from torch.distributed.
"""

import logging
import os
import runpy
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from satrap.errors import StreamError
from satrap.event_log import describe_process, event
from satrap.run_context import COLLECTIVE_TIMEOUT, RunContext, enter_context, run_exit_hooks

_LOG = logging.getLogger("satrap.train")
_SETTLE_SECONDS = 0.5


def join_torchrun() -> tuple[int, int, int, str | None]:
    """Join the other trainers that torchrun started; without torchrun there are none. Returns this trainer's rank, the
    world size, its rank on this machine, and the rendezvous."""
    if not dist.is_torchelastic_launched():
        return 0, 1, 0, None
    _init_process_group("env://")
    return dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank(), "env://"


def run_trainer(
    context: RunContext, script: str, arguments: Sequence[str], listener: int | None = None, record: int | None = None
) -> None:
    """Run the script as Python would, in this context. Several trainers form a torch.distributed group first, unless
    they have one.

    listener: file descriptor that already listens at the rendezvous; given to the first trainer if it hosts the
        rendezvous.
    record: file descriptor of the pipe for this trainer's record of training.
    """
    if record is not None:
        os.set_inheritable(record, False)
        os.set_blocking(record, False)  # a run that is suspended does not suspend training
    if context.num_threads is not None:
        torch.set_num_threads(min(context.num_threads, torch.get_num_threads()))  # the user may have chosen fewer
    if context.world_size > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(context.rank % torch.cuda.device_count())
        if not dist.is_initialized():
            assert context.rendezvous is not None
            store = _rendezvous_store(context, context.rendezvous, listener)
            _init_process_group(rank=context.rank, world_size=context.world_size, store=store)
        world_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    enter_context(context, record)
    describe_process("trainer", number=context.rank)
    text = "started: process %d, trainer %d of %d, launch %d, script %s"
    began = event("started", pid=os.getpid(), world_size=context.world_size, launch=context.launch)
    _LOG.info(text, os.getpid(), context.rank, context.world_size, context.launch, script, extra=began)
    if record is not None:
        with suppress(OSError):  # the run has ended
            os.write(record, b"\n")  # an empty line: the script starts now
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    try:
        _run_script(script)
        if context.world_size == 1 or dist.is_initialized():
            run_exit_hooks()
        if context.world_size > 1 and dist.is_initialized():
            _wait_for_others(world_group)
    except KeyboardInterrupt:  # the run is stopping and reports that itself, so the traceback is of no interest
        raise SystemExit(130) from None
    finally:
        # torch's threads release tensors under the GIL. A thread that requests the GIL after the interpreter has shut
        # down aborts the process, as of torch 2.13.
        time.sleep(_SETTLE_SECONDS if context.world_size > 1 else 0.0)


def _init_process_group(init_method: str | None = None, **group: Any) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method, **group)


def _run_script(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        if exit.code not in (None, 0):
            raise


def _wait_for_others(group: Any) -> None:
    """Wait until all trainers are at the end of their scripts, since they may still need this one."""
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except RuntimeError as error:
        run_exit_hooks()  # raise what that one raised, if this trainer had left a loop before it
        raise StreamError(
            "this trainer is at the end of its script, and another one failed: its own error says why"
        ) from error


def _rendezvous_store(context: RunContext, rendezvous: str, listener: int | None) -> Any:
    """Return the store at which the trainers find each other. A port was bound before its number was passed on, so no
    other process can take it. A file is given by its path: a URL would lose what follows a # or ?, and another run
    might use the same file."""
    if rendezvous.startswith("file://"):
        store = dist.FileStore(rendezvous.removeprefix("file://"), context.world_size)  # type: ignore[attr-defined]
        store.set_timeout(dist.default_pg_timeout)
        return store
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    first: dict[str, Any] = {} if listener is None else {"is_master": True, "master_listen_fd": listener}
    return dist.TCPStore(host, int(port), context.world_size, **first)  # type: ignore[attr-defined]
