"""What several processes of a peer exchange in a step: every rank looks its features up for the samples of all ranks.

As TorchRec does it with table-wise sharding: rows go to the rank of their samples by one all-to-all, and gradients come
back by another. No ids are exchanged: every rank is given those of its features. A rank's gradients are those of a mean
over its own samples, and a step is that over all, so they are divided by the number of ranks.
"""

from typing import Any

import torch
import torch.distributed
from torch import Tensor


def exchange(block: Tensor, num_ranks: int) -> Tensor:
    """All features of this rank's samples, from every rank's own features of all samples."""
    if num_ranks == 1:
        return block
    exchanged: Tensor = _Exchange.apply(block, num_ranks)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, block: Tensor, num_ranks: int) -> Tensor:
        context.num_ranks = num_ranks
        return torch.cat(_all_to_all(block).chunk(num_ranks), 1)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = torch.cat(gradients[0].chunk(context.num_ranks, 1)).div_(context.num_ranks)
        return _all_to_all(parts), None


def _all_to_all(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    torch.distributed.all_to_all_single(received, tensor)
    return received
