"""Dense parameters stored in tables on the servers, for trainers that do not wait for each other (`dense="async"`).

Each param group of the dense optimizer becomes one table, "dense.0", "dense.1", ..., with the equivalent table
optimizer. Each parameter is flattened and cut into rows; its last row is padded with zeros, so a parameter without a
gradient leaves its rows unchanged. Rows are initialized with 0, and

    parameter = initial value + row

where the initial values are those of trainer 0. So the servers need no initial values, and the rows of a table depend
on its updates alone. Dense rows and gradients are always sent as float32, whatever `wire` is. The threads of the stream
make four calls for each step:

    look_up      with the first batch of the step: reads all rows, so the staleness gate bounds dense parameters too
    hand_over    at the first use of the batch: copies the values into the parameters
    update_with  in optimizer.step(): copies the gradients, since the next backward pass overwrites them
    its result   before the update of the embeddings, with the same step number: each bucket applies it once

Trainers do not communicate after the start of their first stream, not even about an overflow.
"""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Optimizer
from satrap.config.tables import Table, Zeros
from satrap.config.validation import LAST_STEP, check_number
from satrap.device.device_stream import current_stream
from satrap.errors import ConfigError, NonFiniteError, StreamError
from satrap.train.dense_strategy import DenseStrategy
from satrap.train.process_group import ProcessGroup

if TYPE_CHECKING:
    from satrap.sharding.owner_split import OwnedIds
    from satrap.worker.server_group import ServerGroup

DIM = 1024
"""Numbers in a row; docs/internals/003-cluster.md has the measurement."""
_PREFIX = "dense."
_TABLE_OPTIMIZERS: dict[type[torch.optim.Optimizer], type[SGD | Adagrad | Adam | AdamW]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}
_REQUIRED = {"weight_decay": 0.0, "dampening": 0.0, "lr_decay": 0.0, "amsgrad": False, "maximize": False}


@dataclass(frozen=True, slots=True, eq=False)
class _Gradients:
    """The dense gradients of one optimizer step."""

    rows: NDArray[np.int64]
    """Numbers of the rows whose parameter has a gradient."""
    values: Tensor
    """Gradients of all rows, [rows, DIM], on the device of the parameters."""
    lrs: list[float]
    """Learning rate of each param group, times `lr_scale`."""


class AsyncDense(DenseStrategy):
    """The dense parameters of a model, stored in tables on the servers; created by `Embeddings.optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer, trainers: ProcessGroup, lr_scale: float = 1.0) -> None:
        """Raise ConfigError if a table cannot apply the optimizer's update, or if the optimizer has already stepped.

        lr_scale: factor of the optimizer's learning rates at the servers."""
        self._optimizer, self._trainers = optimizer, trainers
        self._lr_scale = check_number("optimizer", "lr_scale", lr_scale, 0.0)
        self._table_optimizers = [table_optimizer(optimizer, group) for group in optimizer.param_groups]
        self.tables = tuple(
            Table(f"{_PREFIX}{number}", dim=DIM, optimizer=rule, initial=Zeros())
            for number, rule in enumerate(self._table_optimizers)
        )
        self._parameters: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        for number, parameter in enumerate(self._parameters):
            if parameter.dtype != torch.float32:
                raise ConfigError(f"dense='async': parameter {number} is {parameter.dtype}; expected torch.float32")
        if any(float(state.get("step", 0)) > 0 or "momentum_buffer" in state for state in optimizer.state.values()):
            raise ConfigError(f"dense='async': this {type(optimizer).__name__} has already stepped; expected a new one")
        counts = [-(-parameter.numel() // DIM) for parameter in self._parameters]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # the first row of each parameter
        groups = np.cumsum([0, *(len(group["params"]) for group in optimizer.param_groups)])
        self._group_first = self._first[groups]
        self._start: Tensor | None = None  # [rows, DIM], on the CPU
        self._versions: list[int] | None = None  # torch's version counter of each parameter
        self._ahead: dict[int, Tensor] = {}  # by step: looked up, not yet copied into the parameters
        self._step = 0  # the last step looked up
        self._is_sent = False  # whether the gradients of this step were sent

    @classmethod
    def require_possible(cls, features: Features, *, has_servers: bool) -> None:
        taken = [table.name for table in features.tables if table.name.startswith(_PREFIX)]
        if taken:
            raise ConfigError(
                f"table {taken[0]!r}: dense='async' reserves the names that begin with {_PREFIX!r}; rename the table"
            )
        if not has_servers:
            raise ConfigError(
                "dense='async' without servers: pass Deployment(servers=[...]) to hold the dense parameters"
            )

    def connect(self, servers: "ServerGroup") -> None:
        self._servers = servers

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError("dense='async': cannot add a param group after optimizer(...); add it before")

    # -- initial values ----------------------------------------------------------------------------------------------

    @property
    def joins_attempt(self) -> bool:
        """Trainers wait for each other before their first stream only."""
        return self._start is None

    def state_dict(self) -> dict[str, Any]:
        """Return the initial values, equal for all trainers: None before the first training stream."""
        return {"start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the initial values to those of a checkpoint whose rows are restored. The next lookup sets the
        parameters."""
        start = state["start"]
        if start is not None and start.shape != (self._first[-1], DIM):
            raise ConfigError(
                f"the dense parameters in the checkpoint have {tuple(start.shape)} rows and columns; expected those of "
                "this model"
            )
        self._start, self._versions = start, None

    def begin(self) -> None:
        """Take trainer 0's parameters before the first stream."""
        self._ahead.clear()
        self._step = 0
        if self._start is not None:
            return
        _require_not_reduced(self._parameters)
        shapes = json.dumps([list(parameter.shape) for parameter in self._parameters]).encode()
        different = [rank for rank, other in enumerate(self._trainers.gather(shapes)) if other != shapes]
        if different:
            raise ConfigError(
                f"dense='async': trainers {different} have dense parameters of other shapes than this trainer; "
                "expected the same model on all trainers"
            )
        flat = torch.zeros(int(self._first[-1]), DIM)
        torch._foreach_copy_(self._views(flat), [parameter.detach() for parameter in self._parameters])
        self._trainers.broadcast_(flat)
        self._start = flat

    # -- one step -----------------------------------------------------------------------------------------------------

    def look_up(self, step: int, oldest_open: int, place: Callable[[NDArray[Any]], Tensor]) -> None:
        if step != self._step:
            self._ahead[step] = place(self._fetch(step, oldest_open, train=True))
            self._step = step

    def hand_over(self, step: int) -> None:
        values = self._ahead.pop(step, None)
        if values is not None:
            current_stream(values.device).keep([values])
            self._write(values)

    def forget(self, step: int) -> None:
        self._ahead.pop(step, None)

    def update_with(self, scale: float) -> Callable[[int], None]:
        gradients = self._gradients(scale)
        self._is_sent = True
        return lambda step: self._update(gradients, step)

    @torch.no_grad()
    def _gradients(self, scale: float) -> _Gradients:
        """Return a copy of the current gradients, multiplied by `scale`."""
        now = [table_optimizer(self._optimizer, group) for group in self._optimizer.param_groups]
        for number, (was, is_) in enumerate(zip(self._table_optimizers, now, strict=True)):
            if _without_lr(was) != _without_lr(is_):
                raise ConfigError(
                    f"dense='async': param group {number} was {was} and is now {is_}; expected only lr to change"
                )
        given = [(i, parameter.grad) for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
        sparse = [i for i, gradient in given if gradient.layout != torch.strided]
        if sparse:
            raise ConfigError(f"dense='async': parameter {sparse[0]} has a sparse gradient; expected a dense one")
        device = given[0][1].device if given else torch.device("cpu")
        values = torch.zeros(int(self._first[-1]), DIM, device=device)
        if given:
            views = self._views(values)
            torch._foreach_copy_([views[i] for i, _ in given], [gradient for _, gradient in given])
        if scale != 1.0:
            values *= scale
        rows = [np.arange(self._first[i], self._first[i + 1]) for i, _ in given]
        return _Gradients(
            np.concatenate([np.zeros(0, np.int64), *rows]), values, [optimizer.lr * self._lr_scale for optimizer in now]
        )

    def step(self, inverse_scale: float) -> None:
        """Do nothing: the update of the tables has sent the gradients."""
        is_sent, self._is_sent = self._is_sent, False
        if not is_sent and any(parameter.grad is not None for parameter in self._parameters):
            raise StreamError(
                "dense='async': optimizer.step() found gradients of dense parameters, but no batch that a loss has "
                "reached: the servers identify a step by its batches"
            )

    def _update(self, gradients: _Gradients, step: int) -> None:
        """Send the gradients. The call is idempotent: a retry is applied once."""
        values = gradients.values.cpu().numpy()
        wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(wrong):
            number = np.searchsorted(self._first, wrong[0], side="right") - 1
            raise NonFiniteError(
                f"step {step}: the gradient of dense parameter {number} holds NaN or infinity, and was not sent: "
                "clip the "
                "gradients, or use a lower lr"
            )
        lrs = [*self._servers.lrs[: -len(self.tables)], *gradients.lrs]

        def arguments(part: "OwnedIds") -> tuple[Any, ...]:
            return 0, part.ids, part.offsets, values[gradients.rows[part.positions]].reshape(-1), lrs, 0

        self._call_owners("update", step, gradients.rows, arguments)

    def refresh(self) -> None:
        if self._start is not None:
            self._write(torch.from_numpy(self._fetch(0, 0, train=False)))

    def finish(self) -> None:
        """Also let the servers evict rows again: other trainers may continue for long."""
        self.refresh()
        if self._step:
            nothing = (np.zeros(0, np.uint64), np.zeros(len(self._servers.job.tables) + 1, np.int64))
            self._servers.call_all("lookup", *nothing, LAST_STEP, True, 0, step=self._step)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _fetch(self, step: int, oldest_open: int, *, train: bool) -> NDArray[np.float32]:
        """Return the current parameters: initial values plus rows."""
        assert self._start is not None

        def arguments(part: "OwnedIds") -> tuple[Any, ...]:
            return part.ids, part.offsets, oldest_open, train, 0

        values = np.empty(self._start.shape, np.float32)
        for part, answer in self._call_owners("lookup", step, np.arange(self._first[-1]), arguments):
            values[part.positions] = answer[0].reshape(-1, DIM)
        values += self._start.numpy()
        return values

    def _call_owners(
        self, method: str, step: int, rows: NDArray[np.int64], arguments: Callable[["OwnedIds"], tuple[Any, ...]]
    ) -> list[tuple["OwnedIds", Any]]:
        """Call the method on each owner of the rows, in ascending order. The id of a row is its number."""
        num_others = len(self._servers.job.tables) - len(self.tables)
        offsets = np.concatenate([np.zeros(num_others, np.int64), np.searchsorted(rows, self._group_first)])
        return self._servers.call_owners(method, step, rows.astype(np.uint64), offsets, arguments)

    @torch.no_grad()
    def _write(self, values: Tensor) -> None:
        versions = [parameter._version for parameter in self._parameters]
        if self._versions is not None and versions != self._versions:
            changed = next(i for i, version in enumerate(versions) if version != self._versions[i])
            raise StreamError(
                f"dense='async': dense parameter {changed} was changed in this process, but the servers own it: change "
                "parameters before the first training stream, or resume a checkpoint"
            )
        views = self._views(values)
        if self._versions is None and all(
            map(
                torch.equal,
                (view.to(p.device) for p, view in zip(self._parameters, views, strict=True)),
                self._parameters,
            )
        ):
            self._versions = versions  # a model may have begun its forward pass, whose parameters autograd has saved
            return
        torch._foreach_copy_(self._parameters, views)
        self._versions = [parameter._version for parameter in self._parameters]

    def _views(self, values: Tensor) -> list[Tensor]:
        """Return a view of each parameter's part of [rows, DIM]."""
        flat = values.view(-1)
        return [
            flat[first * DIM : first * DIM + parameter.numel()].view(parameter.shape)
            for first, parameter in zip(self._first.tolist(), self._parameters, strict=False)
        ]


def table_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Optimizer:
    """Return the table optimizer that updates a row exactly as torch's updates the parameters of one group; raise
    ConfigError if there is none. Only options whose effect does not depend on a parameter's value have an equivalent,
    since a row is only the change of the parameter: weight decay is refused."""
    kind = type(optimizer)
    if kind not in _TABLE_OPTIMIZERS:
        known = ", ".join(kind.__name__ for kind in _TABLE_OPTIMIZERS)
        raise ConfigError(f"dense='async': tables have no {kind.__name__}; expected one of torch's {known}")
    for name, required in _REQUIRED.items():
        if group.get(name, required) != required:
            raise ConfigError(
                f"dense='async': {kind.__name__} has {name}={group[name]!r}, which tables do not support for dense "
                f"parameters: set {name}={required!r}, or dense='sync'"
            )
    table_kind = _TABLE_OPTIMIZERS[kind]
    return table_kind(**{option.name: _plain(group[option.name]) for option in fields(table_kind)})


def _plain(value: Any) -> Any:
    """Convert tensors to the numbers that they hold, since torch takes both."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, torch.Tensor) else value


def _without_lr(optimizer: Any) -> dict[str, Any]:
    options: dict[str, Any] = optimizer.to_dict()
    return {name: value for name, value in options.items() if name != "lr"}


def _require_not_reduced(parameters: Sequence[Tensor]) -> None:
    """Raise ConfigError if a DistributedDataParallel averages the gradients, since its trainers wait for each other. No
    parameter refers to its DDP, so all objects are searched, once."""
    own = set(map(id, parameters))
    for item in gc.get_objects():
        if issubclass(type(item), torch.nn.parallel.DistributedDataParallel) and own.intersection(
            map(id, item.parameters())
        ):
            raise ConfigError(
                "dense='async': the model is in a DistributedDataParallel, whose trainers wait for each other: do not "
                "wrap it, or set dense='sync'"
            )
