"""The exchange of rows between the ranks of a peer: every rank looks up its features for the samples of all ranks.

TorchRec does the same with table-wise sharding: one all-to-all brings rows to the rank of their samples, and another
brings the gradients back. No ids are exchanged: every rank gets those of its features. A rank's gradients are those of
a mean over its samples, and a step's those of a mean over all samples, so they are divided by the number of ranks.
"""

from typing import Any

import torch
import torch.distributed
from torch import Tensor


def exchange(block: Tensor, num_ranks: int) -> Tensor:
    """Return all features of this rank's samples, given this rank's features of all samples."""
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
