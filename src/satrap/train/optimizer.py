"""One optimizer for both halves of a model, which steps the dense parameters and sends the gradients of the embeddings.

`HybridOptimizer` is a `torch.optim.Optimizer`, so schedulers, GradScaler, clipping and logging work with it:

- `param_groups` are those of the dense optimizer, then one per table with its name and lr. A scheduler that sets the lr
of a table's group sets it for the next update of the table. Other options that schedulers read (betas, momentum) have
the dense optimizer's values and no effect on tables.
- The leaves of batches that wait for their step are the params of the first table's group, so that GradScaler checks
their gradients for overflow and clipping over all groups includes them.
- `step()` takes every waiting batch that a backward pass has reached: several batches make one update, summed per id.
- `zero_grad()` without a step drops those batches: they are counted, and nothing is applied.

Who steps the dense parameters is a `DenseStrategy`: this process, or the servers, which get their gradients with those
of the embeddings.

GradScaler reads `_step_supports_amp_scaling` and then always calls step(), with the scale and whether it found an
overflow: an overflowed step changes neither half, and its batches are dropped and counted.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor

from satrap.device.device_stream import to_host
from satrap.errors import ConfigError, NonFiniteError
from satrap.hidden_names import internal
from satrap.train.dense_strategy import DenseStrategy
from satrap.train.session import TrainingSession


@internal("hold")
class HybridOptimizer(torch.optim.Optimizer):
    """An optimizer that steps the dense parameters and the tables together; created by `Embeddings.optimizer`.

    It is a `torch.optim.Optimizer`, so schedulers, GradScaler, clipping and logging work with it. Its `param_groups`
    are the groups of the dense optimizer, then one per table.
    """

    _step_supports_amp_scaling = True

    def __init__(self, dense: torch.optim.Optimizer, session: TrainingSession, strategy: DenseStrategy) -> None:
        if isinstance(dense, HybridOptimizer | torch.optim.LBFGS):
            raise ConfigError(
                f"the dense optimizer is {type(dense).__name__}; expected a torch optimizer that steps once per call"
            )
        super().__init__(dense.param_groups, dense.defaults)  # the same dicts: a scheduler's lr reaches both
        self.dense = dense
        self.state: defaultdict[Tensor, Any] = dense.state
        self._session, self._strategy, own = session, strategy, weakref.ref(self)
        dense.register_step_post_hook(lambda *_: None if (me := own()) is None else me._note_dense_step())
        cycled = {name: dense.defaults[name] for name in ("betas", "momentum") if name in dense.defaults}
        self._tables: list[dict[str, Any]] = [
            {"params": [], "lr": table.optimizer.lr, "table": table.name} | cycled for table in session.features.tables
        ]
        self.param_groups.extend(self._tables)
        session.figures.groups = self.param_groups

    def __repr__(self) -> str:
        lrs = ", ".join(dict.fromkeys(f"{group['lr']:g}" for group in self.dense.param_groups))
        tables = ", ".join(f"{group['table']}: lr={group['lr']:g}" for group in self._tables)
        return f"HybridOptimizer({type(self.dense).__name__}: lr={lrs}, tables: {tables})"

    def __reduce_ex__(self, _: object) -> Never:
        raise TypeError(
            "an optimizer of embeddings can be neither copied nor pickled, because it updates their rows: save its "
            "state_dict(), or the whole run with satrap.Checkpoint"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of dense parameters."""
        if not hasattr(self, "dense"):  # called by the base class, for the dense optimizer's groups
            super().add_param_group(param_group)
            return
        self._strategy.add_param_group(param_group)
        self.param_groups.insert(len(self.param_groups) - len(self._tables), self.dense.param_groups[-1])

    def hold(self, leaves: list[Tensor]) -> None:
        """Replace the leaves that wait for a step by `leaves`."""
        self._tables[0]["params"] = leaves

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the tables with the gradients of the waiting batches, and the dense parameters with theirs."""
        try:
            return self._step(closure)
        except BaseException:  # a GradScaler would multiply the scale that it finds here by that of the next step
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise
        finally:
            self._session.watch.note_joint_step()

    def _note_dense_step(self) -> None:
        waiting = self._tables[0]["params"]
        self._session.watch.note_dense_step(lambda: any(leaf.grad is not None for leaf in waiting))

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._session.join_step(waits=hasattr(self, "found_inf"))  # trainers compare overflows
        overflowed, inverse = self._read_scaler()
        if overflowed:
            self._session.drop_batches_with_gradients("overflow")
            return loss
        self._strategy.require_same_gradients()
        # First, so that a gradient refused in this call leaves the dense half unchanged; threads refuse it later.
        try:
            self._session.update({group["table"]: float(group["lr"]) for group in self._tables}, inverse)
        except NonFiniteError as error:
            raise error.with_traceback(None) from None  # the message says what the frames below would not
        self._session.figures.measure(inverse)
        self._strategy.step(inverse)
        return loss

    def _read_scaler(self) -> tuple[bool, float]:
        """Return whether a GradScaler found an overflow, and the factor of the gradients. Waits for the device once,
        for these numbers and for the largest gradient, which the update needs too."""
        overflows: Tensor | int | None = getattr(self, "found_inf", None)  # 0, not a tensor, if nothing has a gradient
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if overflows is None and scale is None:
            return False, 1.0
        given = [number.reshape(()).float() for number in (overflows, scale) if isinstance(number, Tensor)]
        self._session.measure(are_checked=scale is not None)  # it is None if scaler.unscale_ checked them earlier
        numbers = iter(to_host(torch.stack(given)).tolist() if given else ())
        overflowed = isinstance(overflows, Tensor) and next(numbers) != 0
        if overflows is not None:
            self._strategy.require_same_overflow(overflowed)
        return overflowed, 1.0 if scale is None else 1.0 / next(numbers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the dense gradients. Batches that a backward pass has reached and no step took are dropped."""
        self.dense.zero_grad(set_to_none)
        self._session.drop_batches_with_gradients("zero_grad")

    def state_dict(self) -> dict[str, Any]:
        """Return the dense optimizer's state and the tables' learning rates. Rows are saved by a `Checkpoint`; the
        state only identifies them, and loading it with other rows is an error."""
        lrs = {group["table"]: group["lr"] for group in self._tables}
        rows = self._session.rows_state()
        own = {"type": type(self.dense).__name__, "dense": self.dense.state_dict(), "lr": lrs, "rows": rows}
        return own | self._strategy.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raise ConfigError if it has other tables."""
        names = [group["table"] for group in self._tables]
        expected = {"type", "dense", "lr", *self._strategy.state_dict()}
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
            self._session.require_rows(state_dict["rows"])
        self._strategy.load_state_dict(state_dict)
        self.dense.load_state_dict(state_dict["dense"])
        self.param_groups[:] = [*self.dense.param_groups, *self._tables]
        self.state = self.dense.state
        for group in self._tables:
            group["lr"] = state_dict["lr"][group["table"]]
