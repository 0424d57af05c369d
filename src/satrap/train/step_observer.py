"""What the steps of a training script ask for, observed while it runs: for the planner, in a process that ends then.

torch calls a hook before each step of an optimizer. Batches that wait for the step have their inputs; a counter of
torch's counts the operations of the dense network.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from satrap.config.features import Features
from satrap.train.optimizer import HybridOptimizer


@dataclass(slots=True, kw_only=True)
class ObservedSteps:
    """Totals over some steps of a trainer."""

    features: Features
    staleness: int
    dense_parameters: int
    dense_features: int = 0
    """Numbers of a sample beside its ids, with its labels."""
    steps: int = 0
    samples: int = 0
    batches: int = 0
    ids: Counter[str] = field(default_factory=Counter)
    """Ids, by table."""
    unique_ids: Counter[str] = field(default_factory=Counter)
    """Different ids of each batch, by table."""
    flops: float = 0.0
    """Operations of the forward and backward passes."""


def observe_steps(num_steps: int, done: Callable[[ObservedSteps], None]) -> None:
    """Observe the steps of the first `HybridOptimizer` that steps, and call `done` before the step after them."""
    observer = _Observer(num_steps, done)
    register_optimizer_step_pre_hook(observer.before_step)


class _Observer:
    def __init__(self, num_steps: int, done: Callable[[ObservedSteps], None]) -> None:
        self._num_steps, self._done = num_steps, done
        self._found: ObservedSteps | None = None
        self._flops = FlopCounterMode(display=False)
        self._flops.__enter__()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not isinstance(optimizer, HybridOptimizer):
            return
        session = optimizer._session  # a part of this package; users have no need of it
        waiting = session.waiting_batches()
        if not waiting:
            return
        observed = self._found
        if observed is None:
            observed = self._found = ObservedSteps(
                features=session.features,
                staleness=session.staleness,
                dense_parameters=sum(
                    parameter.numel() for group in optimizer.dense.param_groups for parameter in group["params"]
                ),
            )
        for batch in waiting:
            _add(observed, batch.inputs)
        observed.steps += 1
        observed.flops = float(self._flops.get_total_flops())
        if observed.steps == self._num_steps:
            self._flops.__exit__(None, None, None)
            self._done(observed)


def _add(observed: ObservedSteps, inputs: Any) -> None:
    size, names = inputs.batch_size, list(inputs.names)
    observed.batches += 1
    observed.samples += size
    dense = 0 if inputs.dense is None else inputs.dense.shape[1]
    label = 0 if inputs.label is None else math.prod(inputs.label.shape[1:])
    observed.dense_features = max(observed.dense_features, dense + label)
    by_table: dict[str, set[int]] = {}
    for number, name in enumerate(names):
        begin, end = (
            (number * size, (number + 1) * size)
            if inputs.offsets is None
            else (int(inputs.offsets[number * size]), int(inputs.offsets[(number + 1) * size]))
        )
        table = observed.features[name].table.name
        observed.ids[table] += end - begin
        by_table.setdefault(table, set()).update(inputs.values[begin:end].tolist())
    for table, ids in by_table.items():
        observed.unique_ids[table] += len(ids)
