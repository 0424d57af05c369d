"""The trainers of a job: this process alone, or several under torch.distributed, which the user's script has
initialized.

Trainers exchange what they must agree on beside the dense gradients, which DDP averages: the attempt that trainer 0
starts at the servers, how many samples each has for a step, whether one found an overflow. They use gloo groups of
their own, so that these collectives cannot mix with the user's.
"""

import socket
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DistError
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from satrap.errors import ConfigError, SatrapError, StreamError
from satrap.hidden_names import internal
from satrap.run_context import COLLECTIVE_TIMEOUT

if TYPE_CHECKING:
    from satrap.device.exchange import LaunchOrder

Compress = Literal["float16", "bfloat16"]
_HOOKS = {"float16": default_hooks.fp16_compress_hook, "bfloat16": default_hooks.bf16_compress_hook}
_EXCHANGE_TIMEOUT = timedelta(minutes=30)  # torch's default
_UNMATCHED: dict[int, Any] = {}
"""The exchanges that another trainer may not have joined, with their groups. torch's destructor of a group waits for
them, so it must not run: after an error the garbage collector would hang."""
_ENDING_SECONDS, _PAUSE_SECONDS = 2.0, 0.05  # an ending process closes its connections one after another


@internal("all count forward_waits run_first broadcast_int gather exchange require_same_gradients wrap broadcast_")
class ProcessGroup:
    """The trainers of a job, and this process's rank among them."""

    def __init__(self) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        if not is_distributed and dist.is_available() and dist.is_torchelastic_launched():
            warnings.warn(
                "torchrun started this process, but it trains alone: to be one of several trainers, call "
                "torch.distributed.init_process_group(...) before satrap.Embeddings",
                stacklevel=4,
            )
        self.rank: int = dist.get_rank() if is_distributed else 0
        """This trainer's number, from 0."""
        self.world_size: int = dist.get_world_size() if is_distributed else 1
        """The number of trainers."""
        self.forward_waits = True
        """Whether a forward pass may wait for other trainers: for buffers, or in a model that `wrap` does not know."""
        self._wrapped: list[nn.Module] = []
        has_peers = self.world_size > 1
        self._group = dist.new_group(backend="gloo") if has_peers else None
        self._exchange_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if has_peers else None
        self._patient_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if has_peers else None

    def __repr__(self) -> str:
        return f"ProcessGroup(rank={self.rank}, world_size={self.world_size})"

    def broadcast_int(self, value: int, group: dist.ProcessGroup | None = None) -> int:
        """Broadcast trainer 0's value."""
        if self._group is not None:
            tensor = torch.tensor([value], dtype=torch.int64)
            dist.broadcast(tensor, 0, group=group or self._group)
            value = int(tensor.item())
        return value

    def broadcast_(self, values: torch.Tensor) -> None:
        """Fill the tensor with trainer 0's values."""
        if self._group is not None:
            dist.broadcast(values, 0, group=self._group)

    def run_first(self, work: Callable[[], None], error: type[Exception], *, patient: bool = False) -> None:
        """Run `work` on trainer 0, for as long as it takes, while the others wait. If it fails, trainer 0 raises its
        exception and the others raise `error`. patient: allow a trainer to come much later than another."""
        self.all(True, patient=patient)  # no trainer still uses what `work` changes
        caught: BaseException | None = None
        if self.rank == 0:
            try:
                work()
            except BaseException as each:
                caught = each
        if not self.broadcast_int(int(caught is None), self._patient_group):
            raise caught or error("trainer 0 failed; its own error says why")

    def count(self, flag: bool, *, patient: bool = False) -> int:
        """Return on how many trainers the flag is true. patient: allow a trainer to come much later than another."""
        if self._group is None:
            return int(flag)
        tensor = torch.tensor([int(flag)])
        dist.all_reduce(tensor, group=self._patient_group if patient else self._group)
        return int(tensor.item())

    def all(self, flag: bool, *, patient: bool = False) -> bool:
        """Return whether the flag is true on all trainers."""
        return self.count(flag, patient=patient) == self.world_size

    def exchange(self, numbers: Sequence[int], *, patient: bool) -> Callable[[], list[list[int]]]:
        """Send the numbers to all trainers, each of which sends as many; return a function that waits for those of all
        trainers and returns them. In another group than all other collectives: a trainer that calls one of these by
        mistake then does not mix with those that call this.

        patient: allow a trainer to come much later than another."""
        own = torch.tensor([list(numbers)] * self.world_size)
        received = torch.empty_like(own)
        work = dist.all_to_all_single(received, own, group=self._exchange_group, async_op=True)
        _UNMATCHED[id(work)] = work, self._exchange_group

        def receive() -> list[list[int]]:
            work.wait() if patient else work.wait(_EXCHANGE_TIMEOUT)
            _UNMATCHED.pop(id(work), None)
            return received.tolist()

        return receive

    def gather(self, data: bytes, *, patient: bool = False) -> list[bytes]:
        """Return each trainer's data, in the order of ranks. patient: allow a trainer to come much later than
        another."""
        if self._group is None:
            return [data]
        group = self._patient_group if patient else self._group
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        max_size = int(max(size.item() for size in sizes))
        own = torch.zeros(max_size, dtype=torch.uint8)
        own[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(gathered, own, group=group)
        return [padded[: int(size.item())].numpy().tobytes() for padded, size in zip(gathered, sizes, strict=True)]

    def wrap(
        self, model: nn.Module, compress: Compress | None, launches: "Callable[[], LaunchOrder] | None" = None
    ) -> nn.Module:
        """Wrap the model so that several trainers average its gradients, if it has any.

        compress: the dtype in which they are sent.
        launches: returns the order in which the trainers' devices are given collectives; None: there are no others.
        """
        if compress is not None and compress not in _HOOKS:
            raise ConfigError(f"compress is {compress!r}; expected one of {', '.join(map(repr, _HOOKS))}, or None")
        if compress == "bfloat16" and any(parameter.device.type == "cpu" for parameter in model.parameters()):
            raise ConfigError(
                "compress is 'bfloat16', which torch's hook supports only on GPUs; on the CPU use 'float16'"
            )
        if self.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        average = default_hooks.allreduce_hook if compress is None else _HOOKS[compress]
        if launches is not None:
            return _wrap_in_order(model, average, launches)
        self._wrapped.append(model)
        self.forward_waits = any(True for wrapped in self._wrapped for _ in wrapped.buffers())
        parallel = DistributedDataParallel(model)
        if compress is not None:
            parallel.register_comm_hook(None, average)
        return parallel

    def require_same_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Raise StreamError unless all trainers have the same gradients, as they must before each steps its own
        copy."""
        if self._group is None:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms = torch.stack(
            [grad.double().norm().cpu() for grad in gradients] or [torch.zeros((), dtype=torch.float64)]
        )
        if len(set(self.gather(norms.numpy().tobytes()))) > 1:
            raise StreamError(
                "the trainers have different gradients for the dense parameters, so their models would diverge: wrap "
                "the model before creating the optimizer: model = embeddings.parallel(model); and clip only "
                "model.parameters(), since the gradients of batch.embeddings differ between trainers"
            )


def _wrap_in_order(
    model: nn.Module, average: Callable[..., torch.futures.Future[Tensor]], launches: "Callable[[], LaunchOrder]"
) -> nn.Module:
    """Wrap the model so that its gradients and buffers are sent in the order of `launches`. What DDP itself sends, as
    when it regroups its gradients after the first step, goes between CPUs."""
    parallel = DistributedDataParallel(
        model, process_group=dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT), broadcast_buffers=False
    )

    def average_in_order(
        _: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP accepts no other annotation
    ) -> torch.futures.Future[Tensor]:
        order = launches()
        with order.in_order(order.agree()):
            return average(order.group, bucket)

    def broadcast_buffers(*_: object) -> None:
        """Give the buffers of trainer 0, as of BatchNorm, to the others, when DDP would."""
        buffers = list(model.buffers())
        if buffers and parallel.require_forward_param_sync:
            order = launches()
            with order.in_order(order.agree()):
                for buffer in buffers:
                    dist.broadcast(
                        buffer.data, 0, group=order.group
                    )  # an earlier forward pass may still need its backward

    parallel.register_comm_hook(None, average_in_order)
    parallel.register_forward_pre_hook(torch.compiler.disable(broadcast_buffers))
    return parallel


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model itself, without DistributedDataParallel."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def missing_trainer(addresses: Sequence[str], error: Exception) -> Exception:
    """Return the error to raise in place of one of an exchange between trainers. addresses: of their servers."""
    if isinstance(error, SatrapError):
        return error
    until = time.monotonic() + _ENDING_SECONDS
    while not (ended := ended_trainers(addresses)) and time.monotonic() < until:
        time.sleep(_PAUSE_SECONDS)
    if not ended:
        failure = StreamError(f"an exchange with the other trainers failed: {error}")
    else:
        failure = StreamError(
            f"{_named(ended)} has ended, and the others cannot continue without its rows: its own output says why. "
            "Start all trainers again: a script with satrap.Checkpoint resumes from the last checkpoint"
        )
    failure.__cause__ = error
    return failure


def note_missing_trainer(addresses: Sequence[str], error: BaseException) -> None:
    """Add a note to an error of torch.distributed that names the trainers that have ended, if they are its cause."""
    if isinstance(error, RuntimeError) and ("peer" in str(error) or isinstance(error, DistError)):
        cause = missing_trainer(addresses, error)
        if cause is not error:
            error.add_note(str(cause))


def ended_trainers(addresses: Sequence[str]) -> list[int]:
    """Return the trainers whose servers accept no connection."""
    return [rank for rank, address in enumerate(addresses) if not _accepts(address)]


def _accepts(address: str) -> bool:
    from satrap.rpc.address import is_unix, split_address, unix_path  # which need pyzmq

    with suppress(OSError):
        if not is_unix(address):
            socket.create_connection(split_address(address), _ENDING_SECONDS).close()
            return True
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_ENDING_SECONDS)
            probe.connect(str(unix_path(address)))
            return True
    return False


def _named(ranks: Sequence[int]) -> str:
    return f"trainer {ranks[0]}" if len(ranks) == 1 else f"each of trainers {', '.join(map(str, ranks))}"
