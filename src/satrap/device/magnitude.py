"""The largest magnitude of some gradients, which decides whether a sum of them could overflow.

It is computed on the device's queue behind the backward pass, and copied to pinned memory there. The host reads it
after it has waited for the gradients anyway, so reading it is no further wait.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Magnitude:
    """A number that the device computes: the largest magnitude among gradients, a NaN if there is one."""

    def __init__(self, weighted: Iterable[tuple[Tensor, float]]) -> None:
        """weighted: gradients with the factor by which each is multiplied later. Called in the order of the device's
        queue in which they are computed."""
        parts = [_largest(gradient) * abs(weight) for gradient, weight in weighted if gradient.numel()]
        self._ready: torch.cuda.Event | None = None
        self._number = torch.stack(parts).max() if parts else torch.zeros((), device="cpu")
        if self._number.is_cuda:
            there = self._number
            pinned = torch.empty((), dtype=there.dtype, device="cpu", pin_memory=True)
            self._number = pinned.copy_(there, non_blocking=True)
            self._ready = torch.cuda.current_stream(there.device).record_event()

    def __float__(self) -> float:
        """Return the number. Waits for the device, unless it has computed the gradients."""
        if self._ready is not None:
            self._ready.synchronize()
        return float(self._number)


def _largest(gradient: Tensor) -> Tensor:
    low, high = torch.aminmax(gradient.detach())  # one pass, and a NaN is both
    return torch.maximum(-low, high).float()
