"""The rows that the tables hold, and whether a run at some step may train them."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from satrap.errors import StreamError
from satrap.run_context import current_context
from satrap.train.process_group import ProcessGroup
from satrap.worker.worker import Worker

_LOG = logging.getLogger("satrap.train")


def rows_state(worker: Worker, step: int) -> Tensor:
    """Return the step and the version of each table. A tensor, since every file format takes one."""
    return torch.tensor([step, *(store.version for store in worker.tables.values())])


def require_rows(worker: Worker, step: int, state: Any) -> None:
    """Raise StreamError if `state`, from `rows_state`, identifies other rows than the current ones."""
    expected, current = state.tolist(), rows_state(worker, step).tolist()
    if expected != current:
        raise StreamError(
            f"load_state_dict was given the state of {_shown(expected)}, but the tables are at {_shown(current)}: "
            "a state_dict has no rows, and neither has what Accelerate's save_state or Lightning's checkpoints "
            "write; save and resume both with satrap.Checkpoint"
        )


def _shown(rows: list[int]) -> str:
    return f"step {rows[0]}, table versions {rows[1:]}"


def require_own_rows(worker: Worker, trainers: ProcessGroup, step: int, join_attempt: Callable[[], None]) -> None:
    """Raise StreamError if the servers hold rows of an earlier run; remove those of a launch that left no checkpoint.
    All trainers call this."""
    if worker.servers is None:
        return
    context, latest = current_context(), worker.servers.latest_step
    if context is not None and context.launch > context.first_launch and step == 0:
        _LOG.warning(
            "launch %d starts at step 0: found no checkpoint to resume, so all training since launch %d is lost",
            context.launch,
            context.first_launch,
        )
    if latest > step == 0 and context is not None and (context.launch or context.clear):
        # An earlier launch ended without a checkpoint: the run starts again.
        if not context.launch:
            _LOG.warning("starts at step 0: found no checkpoint to resume; removes rows of step %s", f"{latest:,}")
        tables: Any = worker.tables  # on servers
        trainers.run_first(tables.clear, StreamError)
        join_attempt()
    elif latest > step:
        option = "" if context is None or context.launch else " or satrap trainer --clear"
        raise StreamError(
            f"the servers hold rows of an earlier run, trained up to step {latest}, and this run is at step {step}: "
            f"resume the earlier run's checkpoint, or remove its rows with embeddings.tables.clear(){option}"
        )
