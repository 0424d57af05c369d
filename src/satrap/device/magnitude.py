"""The largest magnitude of some gradients, which decides whether a sum of them could overflow.

It is computed on the device behind the backward pass, and copied to this process there. The update, which needs the
gradients anyway, waits for it: the one wait of a step.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from satrap.device.device_stream import current_stream


class Magnitude:
    """A number that the device computes: the largest magnitude among gradients, a NaN if there is one."""

    def __init__(self, weighted: Iterable[tuple[Tensor, float]]) -> None:
        """weighted: gradients with the factor by which each is multiplied later. Called on the stream on which they are
        computed."""
        parts = [_largest(gradient) * abs(weight) for gradient, weight in weighted if gradient.numel()]
        number = torch.stack(parts).max() if parts else torch.zeros((), device="cpu")
        self._number, self._ready = current_stream(number.device).download(number)

    def __float__(self) -> float:
        """Return the number. Waits for the device, unless it has computed the gradients."""
        self._ready.synchronize()
        return float(self._number)


def _largest(gradient: Tensor) -> Tensor:
    low, high = torch.aminmax(gradient.detach())  # one pass, and a NaN is both
    return torch.maximum(-low, high).float()
