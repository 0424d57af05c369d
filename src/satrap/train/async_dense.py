"""The dense parameters of a model as tables on the servers, for trainers that wait for nobody: `dense="async"`.

Each param group of the dense optimizer is a table, "dense.0", "dense.1", ..., whose optimizer is the group's twin. Each
parameter is flattened and cut into rows of its own, the last filled up with zeros, so that one without a gradient has
its rows left alone. Rows begin at 0, and

    parameter = start + row

with the start that the first trainer had: servers need not be told values, and a table's rows are a function of its
updates alone. They cross as float32, whatever the wire is. Around one step, in the threads of the stream:

    look_up    with the step's first batch: all rows, and so bound by the gate as the embeddings are
    hand_over  as the batch is first used: they become the parameters
    gradients  at optimizer.step(): a copy, since the next backward pass writes over them
    update     before the embeddings' own: under the step's number, so that each bucket applies it once
"""

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap import _core
from satrap.config.tables import LAST_STEP, Table, Zeros
from satrap.errors import ConfigError, MovedError, NonFiniteError, StreamError
from satrap.train.async_optimizer import twin
from satrap.train.process_group import ProcessGroup

if TYPE_CHECKING:
    from satrap.worker.server_group import ServerGroup, Topology

DIM = 1024
"""Numbers of a row: measured, docs/design/003-cluster.md."""
_PREFIX = "dense."


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """What one optimizer step has for the servers."""

    rows: NDArray[np.int64]
    """Of the parameters that have a gradient."""
    values: Tensor
    """[all rows, DIM], where the parameters are."""
    lrs: list[float]
    """Of each group."""


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """The rows that one server owns."""

    rows: NDArray[np.int64]
    ids: NDArray[np.uint64]
    offsets: NDArray[np.int64]


class DenseParameters:
    """See the file's docstring. Made by `Embeddings.optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """optimizer: a new one. ConfigError if a table cannot do what it does."""
        self._optimizer = optimizer
        self._twins = [twin(optimizer, group) for group in optimizer.param_groups]
        self.tables = tuple(
            Table(f"{_PREFIX}{number}", dim=DIM, optimizer=each, initial=Zeros())
            for number, each in enumerate(self._twins)
        )
        self._parameters: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        for number, each in enumerate(self._parameters):
            if each.dtype != torch.float32:
                raise ConfigError(f"dense='async': parameter {number} is {each.dtype}; wanted torch.float32")
        if any(float(state.get("step", 0)) > 0 or "momentum_buffer" in state for state in optimizer.state.values()):
            raise ConfigError(f"dense='async': this {type(optimizer).__name__} has stepped already; wanted a new one")
        counts = [-(-each.numel() // DIM) for each in self._parameters]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # row of each parameter
        groups = np.cumsum([0, *(len(group["params"]) for group in optimizer.param_groups)])
        self._group_first = self._first[groups]
        self._start: Tensor | None = None  # [rows, DIM], on the CPU
        self._versions: list[int] | None = None  # of the parameters, as torch counts their changes
        self._ahead: dict[int, Tensor] = {}  # by step: looked up, not handed over
        self._step = 0  # the last that was looked up

    def connect(self, servers: "ServerGroup", trainers: ProcessGroup) -> None:
        """servers: of a job whose last tables are these."""
        self._servers, self._trainers = servers, trainers

    # -- beginning ---------------------------------------------------------------------------------------------------

    @property
    def start(self) -> Tensor | None:
        """Where the parameters began, the same for all trainers; None before the first training stream."""
        return self._start

    def start_at(self, start: Tensor | None) -> None:
        """That of a checkpoint, whose tables have the rows. The parameters follow at the next lookup."""
        if start is not None and start.shape != (self._first[-1], DIM):
            raise ConfigError(f"the start of the dense parameters is {tuple(start.shape)}; wanted as many rows as here")
        self._start, self._versions = start, None

    def begin(self) -> None:
        """Before a training stream. All trainers call it for the first one: they take what the first of them has."""
        self._ahead.clear()
        self._step = 0
        if self._start is not None:
            return
        _require_not_reduced(self._parameters)
        shapes = json.dumps([list(each.shape) for each in self._parameters]).encode()
        different = [rank for rank, told in enumerate(self._trainers.gather(shapes)) if told != shapes]
        if different:
            raise ConfigError(f"dense='async': trainers {different} have parameters of other shapes than this one's")
        flat = torch.zeros(int(self._first[-1]), DIM)
        torch._foreach_copy_(self._views(flat), [each.detach() for each in self._parameters])
        self._trainers.take_first(flat)
        self._start = flat

    # -- the road of a step ------------------------------------------------------------------------------------------

    def look_up(self, step: int, oldest_open: int, place: Callable[[NDArray[Any]], Tensor]) -> None:
        """The parameters for a step, once; place: brings them to the device."""
        if step != self._step:
            self._ahead[step] = place(self._looked_up(step, oldest_open, train=True))
            self._step = step

    def hand_over(self, step: int) -> None:
        """The step's lookup becomes the parameters."""
        values = self._ahead.pop(step, None)
        if values is not None:
            if values.is_cuda:
                values.record_stream(torch.cuda.current_stream(values.device))
            self._write(values)

    def forget(self, step: int) -> None:
        """No batch of the step will be used."""
        self._ahead.pop(step, None)

    @torch.no_grad()
    def gradients(self, scale: float) -> Gradients:
        """Those that the parameters have now, times `scale`."""
        now = [twin(self._optimizer, group) for group in self._optimizer.param_groups]
        for number, (was, is_) in enumerate(zip(self._twins, now, strict=True)):
            if _without_lr(was) != _without_lr(is_):
                raise ConfigError(f"dense='async': param group {number} was {was} and is {is_}; only lr may change")
        given = [(i, each.grad) for i, each in enumerate(self._parameters) if each.grad is not None]
        sparse = [i for i, gradient in given if gradient.layout != torch.strided]
        if sparse:
            raise ConfigError(f"dense='async': parameter {sparse[0]} has a sparse gradient; wanted a dense one")
        device = given[0][1].device if given else torch.device("cpu")
        values = torch.zeros(int(self._first[-1]), DIM, device=device)
        if given:
            views = self._views(values)
            torch._foreach_copy_([views[i] for i, _ in given], [gradient for _, gradient in given])
        if scale != 1.0:
            values *= scale
        rows = [np.arange(self._first[i], self._first[i + 1]) for i, _ in given]
        return Gradients(np.concatenate([np.zeros(0, np.int64), *rows]), values, [each.lr for each in now])

    def has_gradients(self) -> bool:
        """Whether any parameter has one."""
        return any(each.grad is not None for each in self._parameters)

    def update(self, gradients: Gradients, values: NDArray[np.float32], step: int) -> None:
        """Sends them; values: theirs, on the CPU. Sent again, they are applied once all the same."""
        wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(wrong):
            number = np.searchsorted(self._first, wrong[0], side="right") - 1
            raise NonFiniteError(f"step {step}: the gradient of dense parameter {number} holds NaN or infinity")
        lrs = [*self._servers.lrs[: -len(self.tables)], *gradients.lrs]

        def arguments(share: _Share) -> tuple[Any, ...]:
            return 0, share.ids, share.offsets, values[share.rows].reshape(-1), lrs, 0

        self._asked("update", step, gradients.rows, arguments)

    def refresh(self) -> None:
        """The parameters are what the servers have now."""
        if self._start is not None:
            self._write(torch.from_numpy(self._looked_up(0, 0, train=False)))

    def rest(self) -> None:
        """This trainer's stream has ended: it keeps no row of any table from eviction. Others may go on for long."""
        if self._step:
            nothing = (np.zeros(0, np.uint64), np.zeros(len(self._servers.job.tables) + 1, np.int64))
            self._servers.all("lookup", *nothing, LAST_STEP, True, 0, step=self._step)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _looked_up(self, step: int, oldest_open: int, *, train: bool) -> NDArray[np.float32]:
        """Start and rows, summed."""
        assert self._start is not None

        def arguments(share: _Share) -> tuple[Any, ...]:
            return share.ids, share.offsets, oldest_open, train, 0

        values = np.empty(self._start.shape, np.float32)
        for share, found in self._asked("lookup", step, np.arange(self._first[-1]), arguments):
            values[share.rows] = found[0].reshape(-1, DIM)
        values += self._start.numpy()
        return values

    def _asked(
        self, method: str, step: int, rows: NDArray[np.int64], arguments: Callable[[_Share], tuple[Any, ...]]
    ) -> list[tuple[_Share, Any]]:
        """Of each owner of some of the rows its share, and what it answers."""
        while True:
            view = self._servers.view
            shares = self._shares(rows, view)
            asked = {server: arguments(share) for server, share in shares.items()}
            try:
                found = self._servers.each(method, step, asked, view=view)
            except MovedError:
                continue  # there is a newer view
            return [(share, found[server]) for server, share in shares.items()]

    @torch.no_grad()
    def _write(self, values: Tensor) -> None:
        found = [each._version for each in self._parameters]
        if self._versions is not None and found != self._versions:
            changed = next(i for i, version in enumerate(found) if version != self._versions[i])
            raise StreamError(
                f"dense='async': parameter {changed} was changed here, and the servers hold it: change parameters "
                "before the first training stream, or resume a checkpoint"
            )
        torch._foreach_copy_(self._parameters, self._views(values))
        self._versions = [each._version for each in self._parameters]

    def _views(self, values: Tensor) -> list[Tensor]:
        """Each parameter's place in [rows, DIM]."""
        flat = values.view(-1)
        return [
            flat[first * DIM : first * DIM + each.numel()].view(each.shape)
            for first, each in zip(self._first.tolist(), self._parameters, strict=False)
        ]

    def _shares(self, rows: NDArray[np.int64], view: "Topology") -> dict[int, _Share]:
        """Rows, rising, by their owners. A row's id is its number."""
        ids, job = rows.astype(np.uint64), self._servers.job.tables
        ends = np.searchsorted(rows, self._group_first)
        owners = np.empty(len(rows), np.int64)
        num_others = len(job) - len(self.tables)
        for table, (begin, end) in enumerate(pairwise(ends), num_others):
            buckets = _core.bucket_of(ids[begin:end], job[table].resolved_num_buckets)
            owners[begin:end] = np.array(view.members.bucket_map.owners[table])[buckets]
        shares = {}
        for server in np.unique(owners).tolist():
            mine = rows[owners == server]
            offsets = np.concatenate([np.zeros(num_others, np.int64), np.searchsorted(mine, self._group_first)])
            shares[server] = _Share(mine, mine.astype(np.uint64), offsets.astype(np.int64))
        return shares


def require_free_names(tables: Sequence[Table]) -> None:
    """ConfigError if a table of the user's has a name that a param group's would have."""
    taken = [each.name for each in tables if each.name.startswith(_PREFIX)]
    if taken:
        raise ConfigError(f"table {taken[0]!r}: with dense='async' names that begin with {_PREFIX!r} are taken")


def _without_lr(optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = optimizer.to_dict()
    return {name: value for name, value in found.items() if name != "lr"}


def _require_not_reduced(parameters: Sequence[Tensor]) -> None:
    """ConfigError if DDP averages their gradients: its trainers wait for each other. Nothing in a parameter says so, so
    all objects are looked through, once."""
    own = set(map(id, parameters))
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.parallel.DistributedDataParallel) and own.intersection(
            map(id, each.parameters())
        ):
            raise ConfigError(
                "dense='async': the model is in a DistributedDataParallel, whose trainers wait for each other: leave "
                "it out, or say dense='sync'"
            )
