"""One optimizer for both halves of a model: steps the dense parameters and sends the embeddings' gradients home.

It is a `torch.optim.Optimizer`, so schedulers, GradScaler, clipping and logging take it as such:

- `param_groups` are the dense optimizer's own, then one per table with its name and lr. A scheduler that sets a group's
  lr sets the table's; it travels with the next update. Other options that a scheduler looks for (betas, momentum) are
  there as the dense optimizer has them, and mean nothing for a table.
- The leaves of batches that wait for their step are the params of the first table's group, so that GradScaler looks for
  overflow in their gradients and a clip over all groups' params includes them.
- `step()` takes every waiting batch that a backward pass has reached: several make one update, summed per id.
- `zero_grad()` without a step drops those batches: counted, nothing applied.

Dense parameters that are on the servers (`satrap.train.async_dense`) are stepped there: their gradients go with the
embeddings', and the dense optimizer only says how. No trainer asks another then, not even whether it overflowed.

GradScaler asks for `_step_supports_amp_scaling` and then calls step() always, with the scale and what it found: an
overflowed step touches neither half, and its batches are dropped and counted.
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
    """What the optimizer knows of `Embeddings`."""

    features: Features
    trainers: ProcessGroup

    def update(self, lrs: Mapping[str, float], scale: float) -> None:
        """Sends the gradients that wait to the tables."""

    def drop_reached(self, cause: str) -> None:
        """The gradients that wait are not sent."""

    def get_extra_state(self) -> Tensor:
        """Which rows there are."""
        ...

    def require_rows(self, state: Any) -> None:
        """Raises if there are other rows."""


class HybridOptimizer(torch.optim.Optimizer):
    """See the file's docstring. Made by `Embeddings.optimizer`."""

    _step_supports_amp_scaling = True

    def __init__(
        self, dense: torch.optim.Optimizer, embeddings: Trained, at_servers: DenseParameters | None = None
    ) -> None:
        """at_servers: the dense parameters, if they are stepped there."""
        if isinstance(dense, HybridOptimizer | torch.optim.LBFGS):
            raise ConfigError(
                f"the dense optimizer is {type(dense).__name__}; wanted a torch optimizer that steps once per call"
            )
        super().__init__(dense.param_groups, dense.defaults)  # the same dicts: a scheduler's lr reaches both
        self.dense = dense
        self.state = dense.state
        self._embeddings, self._at_servers = embeddings, at_servers
        self._known_same = at_servers is not None
        self._weighing: list[RemovableHandle] = []
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
        """A group of dense parameters."""
        if not hasattr(self, "dense"):  # called by the base class, for the dense optimizer's groups
            super().add_param_group(param_group)
            return
        if self._at_servers is not None:
            raise ConfigError("dense='async': the servers have a table for each param group there was; add them before")
        self.dense.add_param_group(param_group)
        self.param_groups.insert(len(self.param_groups) - len(self._tables), self.dense.param_groups[-1])

    def hold(self, leaves: list[Tensor]) -> None:
        """These leaves wait for a step: all others go."""
        self._tables[0]["params"] = leaves

    def weigh(self, weight: float) -> None:
        """What the dense gradients of coming backward passes are multiplied by, before DDP averages them."""
        for handle in self._weighing:
            handle.remove()
        self._weighing = []
        if weight == 1.0:
            return

        def weighed(gradient: Tensor) -> Tensor:
            return gradient * weight if weight else torch.zeros_like(gradient)

        parameters = [each for group in self.dense.param_groups for each in group["params"] if each.requires_grad]
        self._weighing = [each.register_hook(weighed) for each in parameters]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the tables with the gradients of the waiting batches, and the dense parameters with theirs."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is not None and self._overflowed(found.item() != 0):
            self._embeddings.drop_reached("overflow")
            return loss
        scale: Tensor | None = getattr(self, "grad_scale", None)
        inverse = 1.0 if scale is None else 1.0 / float(scale.item())
        if not self._known_same:
            self._embeddings.trainers.require_same(p for group in self.dense.param_groups for p in group["params"])
            self._known_same = True
        # First, so that a gradient refused here and now leaves the dense half as it was; threads refuse it later.
        self._embeddings.update({group["table"]: float(group["lr"]) for group in self._tables}, inverse)
        if self._at_servers is not None:
            return loss
        if inverse != 1.0:
            grads = [p.grad for group in self.dense.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(grads, inverse)
        with Uninterrupted():  # parameters are stepped all or none
            self.dense.step()
        return loss

    def _overflowed(self, here: bool) -> bool:
        """Whether a GradScaler found that, which all trainers must know together: their scales and dense halves would
        part. DDP tells them of a dense gradient, but not of one of the embeddings."""
        if self._at_servers is None:
            trainers = self._embeddings.trainers
            count = trainers.count(here)
            if 0 < count < trainers.world:
                raise StreamError(
                    f"{count} of {trainers.world} trainers found an overflow in the gradients of their "
                    "embeddings, and the GradScalers of the others do not know: use torch.distributed.fsdp."
                    "sharded_grad_scaler.ShardedGradScaler, and call its unscale_(optimizer) before its step(optimizer)"
                )
        return here

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the dense gradients. Batches that a backward pass has reached and no step took are dropped."""
        self.dense.zero_grad(set_to_none)
        self._embeddings.drop_reached("zero_grad")

    def state_dict(self) -> dict[str, Any]:
        """The dense optimizer's state and the tables' learning rates. Rows are in a `Checkpoint`; this only names them:
        to load it beside other rows is an error."""
        lrs = {group["table"]: group["lr"] for group in self._tables}
        own = {} if self._at_servers is None else {"start": self._at_servers.start}
        rows = self._embeddings.get_extra_state()
        return {"type": type(self.dense).__name__, "dense": self.dense.state_dict(), "lr": lrs, "rows": rows} | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; refused if it is of other tables."""
        names = [group["table"] for group in self._tables]
        wanted = {"type", "dense", "lr"} if self._at_servers is None else {"type", "dense", "lr", "start"}
        if set(state_dict) - {"rows"} != wanted or set(state_dict["lr"]) != set(names):
            raise ConfigError(
                f"the optimizer's state has {sorted(state_dict)} and is of tables {sorted(state_dict.get('lr', ()))}; "
                f"wanted {sorted(wanted)} of tables {sorted(names)}"
            )
        if state_dict["type"] != type(self.dense).__name__:
            raise ConfigError(
                f"the dense optimizer was {state_dict['type']} and is {type(self.dense).__name__} here: make it as it "
                "was, or name another folder"
            )
        if "rows" in state_dict:  # not from a checkpoint, which brings its own
            self._embeddings.require_rows(state_dict["rows"])
        if self._at_servers is not None:
            self._at_servers.start_at(state_dict["start"])
        self.dense.load_state_dict(state_dict["dense"])
        self.param_groups[:] = [*self.dense.param_groups, *self._tables]
        self.state = self.dense.state
        for group in self._tables:
            group["lr"] = state_dict["lr"][group["table"]]
