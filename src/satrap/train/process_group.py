"""Who trains: this process alone, or several under torch.distributed, which the user's script has set up (torchrun).

What the trainers must agree on beside the dense gradients, which are DDP's: the attempt that the first of them begins
at the servers, how many samples each has for a step, whether one met an overflow. It goes through gloo groups of its
own, so it never meets the user's collectives.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from satrap.errors import ConfigError, StreamError
from satrap.run_context import PATIENCE
from satrap.train.joint_step import JointStep

Compress = Literal["float16", "bfloat16"]
_HOOKS = {"float16": default_hooks.fp16_compress_hook, "bfloat16": default_hooks.bf16_compress_hook}


class ProcessGroup:
    """This process among the trainers of its job."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        if not together and dist.is_available() and dist.is_torchelastic_launched():
            warnings.warn(
                "torchrun began this process, and it trains alone: for one of several trainers call "
                "torch.distributed.init_process_group(...) before satrap.Embeddings",
                stacklevel=3,
            )
        self.rank = dist.get_rank() if together else 0
        self.world = dist.get_world_size() if together else 1
        several = self.world > 1
        self._group = dist.new_group(backend="gloo") if several else None
        self._patient = dist.new_group(backend="gloo", timeout=PATIENCE) if several else None

    def from_first(self, value: int, group: dist.ProcessGroup | None = None) -> int:
        """What the first of them was given."""
        if self._group is not None:
            told = torch.tensor([value], dtype=torch.int64)
            dist.broadcast(told, 0, group=group or self._group)
            value = int(told.item())
        return value

    def take_first(self, values: torch.Tensor) -> None:
        """Fills it with what the first of them has in it."""
        if self._group is not None:
            dist.broadcast(values, 0, group=self._group)

    def first_does(self, work: Callable[[], None], error: type[Exception]) -> None:
        """The first of them does it, for as long as it takes, while the others wait. If it fails, it raises there, and
        `error` at the others."""
        self.all(True)  # none of them still calls what it changes
        caught: BaseException | None = None
        if self.rank == 0:
            try:
                work()
            except BaseException as each:
                caught = each
        if not self.from_first(int(caught is None), self._patient):
            raise caught or error("the first trainer could not do it; its own error says why")

    def count(self, flag: bool) -> int:
        """At how many of them it is so."""
        told = torch.tensor([int(flag)])
        if self._group is not None:
            dist.all_reduce(told, group=self._group)
        return int(told.item())

    def all(self, flag: bool) -> bool:
        """Whether it is so at each of them."""
        return self.count(flag) == self.world

    def joint_step(self, batch: Sequence[int]) -> JointStep:
        """The step that this trainer's batch, as `described`, makes together with the others'."""
        own = torch.tensor(batch, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(found, own, group=self._group)
        return JointStep.of([each.tolist() for each in found], self.rank)

    def gather(self, data: bytes, *, patient: bool = False) -> list[bytes]:
        """What each of them gave, in the order of their ranks. patient: one may come much later than another."""
        if self._group is None:
            return [data]
        group = self._patient if patient else self._group
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        most = int(max(size.item() for size in sizes))
        own = torch.zeros(most, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(found, own, group=group)
        return [each[: int(size.item())].numpy().tobytes() for each, size in zip(found, sizes, strict=True)]

    def parallel(self, model: nn.Module, compress: Compress | None) -> nn.Module:
        """The model, of which several trainers average the gradients; compress: as what these cross the network."""
        if compress is not None and compress not in _HOOKS:
            raise ConfigError(f"compress is {compress!r}; wanted one of {', '.join(map(repr, _HOOKS))}, or None")
        if compress == "bfloat16" and any(each.device.type == "cpu" for each in model.parameters()):
            raise ConfigError(
                "compress is 'bfloat16', which torch's hook has for GPUs alone; on the CPU take 'float16'"
            )
        if self.world == 1:
            return model
        parallel = DistributedDataParallel(model)
        if compress is not None:
            parallel.register_comm_hook(None, _HOOKS[compress])
        return parallel

    def require_same(self, parameters: Iterable[Tensor]) -> None:
        """Raises unless the parameters have the same gradients at all of them, as they must before each steps alone."""
        if self._group is None:
            return
        gradients = [each.grad for each in parameters if each.grad is not None]
        norms = torch.stack(
            [grad.double().norm().cpu() for grad in gradients] or [torch.zeros((), dtype=torch.float64)]
        )
        if len(set(self.gather(norms.numpy().tobytes()))) > 1:
            raise StreamError(
                "the trainers have different gradients for the dense parameters, so their models would part: wrap the "
                "model before the optimizer is made: model = embeddings.parallel(model); and clip model.parameters() "
                "alone, since the gradients of batch.embeddings are each trainer's own"
            )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, if it is wrapped for several trainers."""
    return model.module if isinstance(model, DistributedDataParallel) else model
