"""How a model's dense parameters are trained: by each trainer, in step with the others, or by the servers.

`SyncDense` keeps a replica in each trainer: DDP averages the gradients, all trainers take each step together, and the
user's torch optimizer steps. `AsyncDense` (`satrap.train.async_dense`) keeps the parameters in tables on the servers.
A `HybridOptimizer` has one of the two, and the streams that it trains use the same one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from satrap.config.features import Features
from satrap.config.tables import Table
from satrap.data.inputs import Inputs
from satrap.errors import ConfigError, StreamError
from satrap.interrupts import Uninterrupted
from satrap.train.joint_batches import JointBatches
from satrap.train.joint_calls import Call, Padding
from satrap.train.process_group import ProcessGroup

if TYPE_CHECKING:
    from satrap.worker.server_group import ServerGroup


class DenseStrategy:
    """What a stream and an optimizer do with dense parameters. The methods of this class do nothing: an evaluation,
    which trains no parameters, uses it as it is."""

    is_joint: ClassVar[bool] = False
    """Whether all trainers take each step together."""
    tables: tuple[Table, ...] = ()
    """Tables on the servers that hold the parameters."""

    @classmethod
    def require_possible(cls, features: Features, *, has_servers: bool) -> None:
        """Raise ConfigError if a job with these features cannot train in this way."""

    def connect(self, servers: "ServerGroup") -> None:
        """Use `servers`; the last tables of their job are `self.tables`, which hold the dense parameters."""

    # -- for the optimizer ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the dense optimizer."""

    def require_same_gradients(self) -> None:
        """Raise StreamError if trainers that step their replicas have different gradients. Checked in the first
        step."""

    def require_same_overflow(self, overflowed: bool) -> None:
        """Raise StreamError if a GradScaler found an overflow on some of the trainers only."""

    def step(self, inverse_scale: float) -> None:
        """Step the parameters by their gradients times `inverse_scale`, after the update of the tables."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint saves besides the dense optimizer's state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""

    # -- for the streams -----------------------------------------------------------------------------------------------

    @property
    def joins_attempt(self) -> bool:
        """Whether all trainers start the next stream together, and join the attempt of trainer 0 for it."""
        return True

    def begin(self) -> None:
        """Prepare a training stream. All trainers call this before their first stream."""

    def refresh(self) -> None:
        """Set the parameters to their latest values."""

    def batches(
        self,
        inputs: Iterator[Inputs],
        features: tuple[str, ...],
        unawaited: Collection[Call] = (),
        padding: Callable[[], Padding] | None = None,
    ) -> Iterator[Inputs]:
        """Return the batches of a training stream, which joint steps extend by padding.

        unawaited: calls of the loop in which no trainer waits for another. padding: see `JointBatches`.
        """
        return inputs

    def look_up(self, step: int, oldest_open: int, place: Callable[[NDArray[Any]], Tensor]) -> None:
        """Look up the parameters of a step, once. `place` copies an array to the device."""

    def hand_over(self, step: int) -> None:
        """Set the parameters to what was looked up for the step, before the first use of a batch."""

    def forget(self, step: int) -> None:
        """Discard the lookup of a step of which no batch will be used."""

    def update_with(self, scale: float) -> Callable[[int], None]:
        """Copy the gradients, since the next backward pass overwrites them. Return a function that sends them, for a
        step; any thread may call it."""
        return lambda step: None

    def finish(self) -> None:
        """Fetch the latest parameters after the last update of a stream."""


class SyncDense(DenseStrategy):
    """A replica of the dense parameters in each trainer, which the user's torch optimizer steps."""

    is_joint = True

    def __init__(self, optimizer: torch.optim.Optimizer, trainers: ProcessGroup, lr_scale: float = 1.0) -> None:
        if lr_scale != 1.0:
            raise ConfigError(
                f"optimizer: lr_scale is {lr_scale!r} with dense='sync', where the torch optimizer steps the dense "
                "parameters: set its lr, or dense='async'"
            )
        self._optimizer, self._trainers = optimizer, trainers
        self._is_checked = False
        self._weight_hooks: list[RemovableHandle] = []

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._optimizer.add_param_group(param_group)

    def require_same_gradients(self) -> None:
        if not self._is_checked:
            self._trainers.require_same_gradients(self._parameters())
            self._is_checked = True

    def require_same_overflow(self, overflowed: bool) -> None:
        """Scale and replicas would diverge. DDP spreads an overflow of a dense gradient, but not of an embedding's."""
        count, world_size = self._trainers.count(overflowed), self._trainers.world_size
        if 0 < count < world_size:
            raise StreamError(
                f"{count} of {world_size} trainers found an overflow in the gradients of their embeddings, but the "
                "GradScalers of the other trainers did not: use torch.distributed.fsdp.sharded_grad_scaler."
                "ShardedGradScaler, and call its unscale_(optimizer) before its step(optimizer)"
            )

    def step(self, inverse_scale: float) -> None:
        scaled = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        with Uninterrupted():  # all parameters are stepped, or none
            if inverse_scale != 1.0 and scaled:
                torch._foreach_mul_(scaled, inverse_scale)
            self._optimizer.step()

    def batches(
        self,
        inputs: Iterator[Inputs],
        features: tuple[str, ...],
        unawaited: Collection[Call] = (),
        padding: Callable[[], Padding] | None = None,
    ) -> Iterator[Inputs]:
        trainers = self._trainers
        if trainers.world_size == 1:
            return inputs
        return JointBatches(inputs, features, trainers.exchange, trainers.rank, self.set_weight, unawaited, padding)

    def set_weight(self, weight: float) -> None:
        """Multiply the gradients of the following backward passes by `weight`, before DDP averages them."""
        for handle in self._weight_hooks:
            handle.remove()
        self._weight_hooks = []
        if weight == 1.0:
            return

        def weigh_gradient(gradient: Tensor) -> Tensor:
            return gradient * weight if weight else torch.zeros_like(gradient)

        self._weight_hooks = [
            parameter.register_hook(weigh_gradient) for parameter in self._parameters() if parameter.requires_grad
        ]
