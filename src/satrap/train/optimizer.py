"""One optimizer for both halves of a model, which steps the dense parameters and sends the gradients of the embeddings.

`HybridOptimizer` is a `torch.optim.Optimizer`, so schedulers, GradScaler, clipping and logging work with it:

- `param_groups` are those of the dense optimizer, then one per table with its name and lr. A scheduler that sets the lr
of a table's group sets it for the next update of the table. Other options that schedulers read (betas, momentum) have
the dense optimizer's values and no effect on tables.
- The leaves of batches that wait for their step are the params of the first table's group, so that GradScaler checks
their gradients for overflow and clipping over all groups includes them.
- `step()` takes every waiting batch that a backward pass has reached: several batches make one update, summed per id.
- `zero_grad()` without a step drops those batches: they are counted, and nothing is applied.

Dense parameters on the servers (`satrap.train.async_dense`) are stepped there: their gradients are sent with those of
the embeddings, and the dense optimizer only defines the update. Trainers then do not communicate at all, not even about
an overflow.

GradScaler reads `_step_supports_amp_scaling` and then always calls step(), with the scale and whether it found an
overflow: an overflowed step changes neither half, and its batches are dropped and counted.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from satrap.config.features import Features
from satrap.errors import ConfigError, StreamError
from satrap.interrupts import Uninterrupted
from satrap.train.async_dense import DenseParameters
from satrap.train.process_group import ProcessGroup


class Trained(Protocol):
    """The part of `Embeddings` that the optimizer uses."""

    features: Features
    trainers: ProcessGroup

    def update(self, lrs: Mapping[str, float], scale: float) -> None:
        """Send the collected gradients to the tables."""

    def drop_batches_with_gradients(self, cause: str) -> None:
        """Drop the batches that a backward pass has reached."""

    def get_extra_state(self) -> Tensor:
        """Return a state that identifies the current rows."""
        ...

    def require_rows(self, state: Any) -> None:
        """Raise StreamError if the state identifies other rows."""


class HybridOptimizer(torch.optim.Optimizer):
    """An optimizer that steps the dense parameters and the tables together; created by `Embeddings.optimizer`.

    It is a `torch.optim.Optimizer`, so schedulers, GradScaler, clipping and logging work with it. Its `param_groups`
    are those of the dense optimizer, then one per table.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, dense: torch.optim.Optimizer, embeddings: Trained, at_servers: DenseParameters | None = None
    ) -> None:
        """at_servers: the dense parameters, if they are on the servers."""
        if isinstance(dense, HybridOptimizer | torch.optim.LBFGS):
            raise ConfigError(
                f"the dense optimizer is {type(dense).__name__}; expected a torch optimizer that steps once per call"
            )
        super().__init__(dense.param_groups, dense.defaults)  # the same dicts: a scheduler's lr reaches both
        self.dense = dense
        self.state = dense.state
        self._embeddings, self._at_servers = embeddings, at_servers
        self._gradients_checked = at_servers is not None
        self._weight_hooks: list[RemovableHandle] = []
        cycled = {name: dense.defaults[name] for name in ("betas", "momentum") if name in dense.defaults}
        self._tables: list[dict[str, Any]] = [
            {"params": [], "lr": table.optimizer.lr, "table": table.name} | cycled
            for table in embeddings.features.tables
        ]
        self.param_groups.extend(self._tables)

    def __repr__(self) -> str:
        tables = ", ".join(f"{group['table']}: lr={group['lr']:g}" for group in self._tables)
        return f"HybridOptimizer({self.dense!r}, tables: {tables})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of dense parameters."""
        if not hasattr(self, "dense"):  # called by the base class, for the dense optimizer's groups
            super().add_param_group(param_group)
            return
        if self._at_servers is not None:
            raise ConfigError("dense='async': cannot add a param group after optimizer(...); add it before")
        self.dense.add_param_group(param_group)
        self.param_groups.insert(len(self.param_groups) - len(self._tables), self.dense.param_groups[-1])

    def hold(self, leaves: list[Tensor]) -> None:
        """Replace the leaves that wait for a step by `leaves`."""
        self._tables[0]["params"] = leaves

    def weigh(self, weight: float) -> None:
        """Multiply the dense gradients of the following backward passes by `weight`, before DDP averages them."""
        for handle in self._weight_hooks:
            handle.remove()
        self._weight_hooks = []
        if weight == 1.0:
            return

        def weigh_gradient(gradient: Tensor) -> Tensor:
            return gradient * weight if weight else torch.zeros_like(gradient)

        parameters = [each for group in self.dense.param_groups for each in group["params"] if each.requires_grad]
        self._weight_hooks = [each.register_hook(weigh_gradient) for each in parameters]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the tables with the gradients of the waiting batches, and the dense parameters with theirs."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is not None and self._overflowed(found.item() != 0):
            self._embeddings.drop_batches_with_gradients("overflow")
            return loss
        scale: Tensor | None = getattr(self, "grad_scale", None)
        inverse = 1.0 if scale is None else 1.0 / float(scale.item())
        if not self._gradients_checked:
            self._embeddings.trainers.require_same_gradients(
                p for group in self.dense.param_groups for p in group["params"]
            )
            self._gradients_checked = True
        # First, so that a gradient refused in this call leaves the dense half unchanged; threads refuse it later.
        self._embeddings.update({group["table"]: float(group["lr"]) for group in self._tables}, inverse)
        if self._at_servers is not None:
            return loss
        if inverse != 1.0:
            grads = [p.grad for group in self.dense.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(grads, inverse)
        with Uninterrupted():  # all parameters are stepped, or none
            self.dense.step()
        return loss

    def _overflowed(self, overflowed: bool) -> bool:
        """Return whether a GradScaler found an overflow here; raise StreamError if only some trainers found one, since
        their scales and dense parameters would diverge. DDP spreads an overflow of a dense gradient, but not of an
        embedding's."""
        if self._at_servers is None:
            trainers = self._embeddings.trainers
            count = trainers.count(overflowed)
            if 0 < count < trainers.world_size:
                raise StreamError(
                    f"{count} of {trainers.world_size} trainers found an overflow in the gradients of their "
                    "embeddings, but the GradScalers of the other trainers did not: use torch.distributed.fsdp."
                    "sharded_grad_scaler.ShardedGradScaler, and call its unscale_(optimizer) before its step(optimizer)"
                )
        return overflowed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the dense gradients. Batches that a backward pass has reached and no step took are dropped."""
        self.dense.zero_grad(set_to_none)
        self._embeddings.drop_batches_with_gradients("zero_grad")

    def state_dict(self) -> dict[str, Any]:
        """Return the dense optimizer's state and the tables' learning rates. Rows are saved by a `Checkpoint`; the
        state only identifies them, and loading it with other rows is an error."""
        lrs = {group["table"]: group["lr"] for group in self._tables}
        own = {} if self._at_servers is None else {"start": self._at_servers.start}
        rows = self._embeddings.get_extra_state()
        return {"type": type(self.dense).__name__, "dense": self.dense.state_dict(), "lr": lrs, "rows": rows} | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raise ConfigError if it has other tables."""
        names = [group["table"] for group in self._tables]
        expected = {"type", "dense", "lr"} if self._at_servers is None else {"type", "dense", "lr", "start"}
        if set(state_dict) - {"rows"} != expected or set(state_dict["lr"]) != set(names):
            raise ConfigError(
                f"the optimizer's state has {sorted(state_dict)} for tables {sorted(state_dict.get('lr', ()))}; "
                f"expected {sorted(expected)} for tables {sorted(names)}"
            )
        if state_dict["type"] != type(self.dense).__name__:
            raise ConfigError(
                f"the state is of a dense optimizer {state_dict['type']}; expected {type(self.dense).__name__}: create "
                "the same optimizer as before, or use another folder"
            )
        if "rows" in state_dict:  # a checkpoint leaves them out and restores the rows itself
            self._embeddings.require_rows(state_dict["rows"])
        if self._at_servers is not None:
            self._at_servers.set_start(state_dict["start"])
        self.dense.load_state_dict(state_dict["dense"])
        self.param_groups[:] = [*self.dense.param_groups, *self._tables]
        self.state = self.dense.state
        for group in self._tables:
            group["lr"] = state_dict["lr"][group["table"]]
