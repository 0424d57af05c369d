"""What a step asks of torch: its operations, and the tensors that the host reads."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

READS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "nonzero", "unique")
"""Methods of a tensor that wait for the device."""


class CountedCalls(TorchDispatchMode):
    """Counts the operations of torch, as many as a device would be given."""

    count = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return call(*args, **(kwargs or {}))


class IdleKernels:
    """Kernels that do nothing, instead of the reference's, which wait."""

    @staticmethod
    def pool(*args: Any) -> None:
        """Pool nothing."""

    @staticmethod
    def update(*args: Any) -> None:
        """Update nothing."""
