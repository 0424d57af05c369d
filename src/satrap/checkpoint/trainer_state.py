"""What a checkpoint saves of each trainer beside its position: the state of its random generators, and of its loader.

A loader's state may have tensors, so it is in the file of the state, and the manifest only says that it is there.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from satrap.checkpoint.state_dict_file import state_bytes, state_of
from satrap.data.inputs import Position
from satrap.errors import CheckpointError
from satrap.train.prefetched_batches import LoaderState
from satrap.train.process_group import ProcessGroup

_IN_STATE = "loader"  # in place of the offset of a position in a loader


def divided(position: Position | None) -> tuple[Position | None, Any]:
    """Return a position as the manifest has it, and the state of the loader, which the file of the state has."""
    if position is None or not isinstance(position.offset, LoaderState):
        return position, None
    return replace(position, offset=_IN_STATE), position.offset.state


def gathered_states(trainers: ProcessGroup, loader: Any) -> list[Any]:
    """Return the random state of each trainer, and the state of its loader. All trainers call this. loader: the state
    of this trainer's loader."""
    own, error = b"", None
    try:
        own = state_bytes({"random": random_state(), "loader": loader})
    except CheckpointError as caught:
        error = caught
    states = trainers.gather(own)
    if b"" in states:
        raise error or CheckpointError("another trainer cannot save the state of its loader; its own error says why")
    return [state_of(state) for state in states]


def random_state() -> dict[str, Any]:
    """Return the state of the random generators of Python, NumPy and torch."""
    kind, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002  the user's global generator
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), at, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        # There may be fewer devices now.
        for device, saved in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(saved, device)
