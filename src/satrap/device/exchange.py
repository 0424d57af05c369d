"""One kind of exchange between all trainers: of headers and ids between their CPUs, of rows between their devices.

Every trainer calls the same methods in the same order. Lookups and updates each have an exchange, so a lookup never
waits for an update of another trainer, nor an update for a lookup.
"""

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from satrap.errors import StreamError
from satrap.interrupts import SLICE_SECONDS
from satrap.run_context import COLLECTIVE_TIMEOUT

_SLICE = timedelta(seconds=SLICE_SECONDS)


class Exchange:
    """Process groups of all trainers."""

    def __init__(self, device: torch.device) -> None:
        """All trainers call this together, in the same order."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._host = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self.is_abandoned = False
        """Whether a call that waits for another trainer fails."""
        self._device = (
            dist.new_group(backend="nccl", timeout=COLLECTIVE_TIMEOUT) if device.type == "cuda" else self._host
        )

    def headers(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        """Send line r to trainer r, and return each trainer's line for this one."""
        received = torch.empty(own.shape, dtype=torch.int64)
        self._all_to_all(received, torch.from_numpy(np.ascontiguousarray(own)), None, None, self._host)
        return received.numpy()

    def barrier(self) -> None:
        """Return once all trainers have called this."""
        self.headers(np.zeros((self.world_size, 1), np.int64))

    def ids(self, parts: Sequence[NDArray[np.uint64]], counts: Sequence[int]) -> NDArray[np.uint64]:
        """Send part r to trainer r; return what all sent to this one, in the order of the ranks. counts: of each."""
        sent = torch.from_numpy(np.concatenate(parts).view(np.int64))
        received = torch.empty(sum(counts), dtype=torch.int64)
        self._all_to_all(received, sent, list(counts), [len(part) for part in parts], self._host)
        return received.numpy().view(np.uint64)

    def rows(self, sent: Tensor, sent_counts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Send the first lines to trainer 0, the next ones to trainer 1, and so on; return what all sent to this one.
        sent: [lines, dim]."""
        received = torch.empty((sum(counts), sent.shape[1]), dtype=sent.dtype, device=sent.device)
        self._all_to_all(_bytes_of(received), _bytes_of(sent), list(counts), list(sent_counts), self._device)
        return received

    def _all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        counts: list[int] | None,
        sent_counts: list[int] | None,
        group: dist.ProcessGroup,
    ) -> None:
        """Exchange the tensors. On CPUs it waits in slices: a thread that is inside torch when the process exits would
        abort it."""
        work = dist.all_to_all_single(received, sent, counts, sent_counts, group=group, async_op=True)
        while True:
            try:
                if group is self._host:
                    work.wait(_SLICE)
                else:
                    work.wait()  # the device's queue waits, and this thread does not
                return
            except RuntimeError:
                if group is not self._host:
                    raise
                if work.is_completed():  # with an error, which this raises; or since the slice ended
                    work.wait()
                    return
                if self.is_abandoned:
                    raise StreamError("the embeddings were closed before all trainers had joined a step") from None


def _bytes_of(rows: Tensor) -> Tensor:
    """Return the rows in a form that every backend takes."""
    return rows if rows.dtype == torch.float32 else rows.view(torch.uint8)
