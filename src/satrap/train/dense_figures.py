"""What a record shows of an optimizer: its learning rates, and the norm of the dense gradients of some steps.

A norm is computed only in the first step after it was read, and read at the next report, so it costs nothing in other
steps and never makes one of them wait for a GPU.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class DenseFigures:
    """The figures of one optimizer; none until there is one."""

    def __init__(self) -> None:
        self.groups: Sequence[Mapping[str, Any]] = ()
        """The optimizer's `param_groups`; those of tables have a `table`."""
        self._norm: Tensor | None = None
        self._inverse = 1.0
        self._is_due = True

    def measure(self, inverse_scale: float) -> None:
        """Compute the norm if it is due, from the gradients of this step. Does not wait for a device."""
        if not self._is_due:
            return
        params = [param for group in self.groups if "table" not in group for param in group["params"]]
        gradients = [param.grad for param in params if param.grad is not None and not param.grad.is_sparse]
        if gradients:
            self._norm, self._inverse = torch.nn.utils.get_total_norm(gradients), inverse_scale
            self._is_due = False

    def read_norm(self) -> float | None:
        """Return the last norm that was computed, None if there is none; the next step computes another one."""
        self._is_due = True
        return None if self._norm is None else float(self._norm) * self._inverse

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each dense group, and of each table, or of all together if they have one."""
        dense = [float(group["lr"]) for group in self.groups if "table" not in group]
        tables = {group["table"]: float(group["lr"]) for group in self.groups if "table" in group}
        names = ["dense"] if len(dense) == 1 else [f"dense group {number}" for number in range(len(dense))]
        if len(set(tables.values())) == 1:
            tables = {"tables": next(iter(tables.values()))}
        rates = {**dict(zip(names, dense, strict=True)), **tables}
        return {name: rate for name, rate in rates.items() if math.isfinite(rate)}


def device_bytes() -> int | None:
    """Return how much memory of GPUs torch holds for this process; None if it uses none."""
    if not torch.cuda.is_initialized():
        return None
    return sum(torch.cuda.memory_reserved(number) for number in range(torch.cuda.device_count()))
