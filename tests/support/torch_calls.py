"""What a step asks of torch: its operations, and the tensors that the host reads."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "nonzero", "unique")
"""Methods of a tensor that wait for the device."""


class CountedCalls(TorchDispatchMode):
    """Counts the operations of torch, as many as a device would be given."""

    count = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return call(*args, **(kwargs or {}))


class CountedBytes(TorchDispatchMode):
    """Counts the bytes that operations of torch read and write: each operand and each result once, and of a tensor that
    is read or written at some places the different ones. What sorts, searches and views take is left out."""

    count = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = call(*args, **(kwargs or {}))
        name = call.overloadpacket.__name__
        if call.is_view or name in ("sort", "searchsorted", "empty", "new_empty", "empty_like"):
            return done
        given, at = list(args), None
        if name in ("index", "index_put_"):
            at = args[1][-1]
        elif name == "scatter_":
            at = args[2]
        if at is not None:
            self.count += len(at.unique()) * given.pop(0).element_size()
        elif name == "copy_":
            given.pop(0)  # is written only
        written = [] if at is not None and name.endswith("_") else [done]
        self.count += sum(part.nbytes for part in tree_leaves([given, written]) if isinstance(part, torch.Tensor))
        return done


class IdleKernels:
    """Kernels that do nothing, instead of the reference's, which wait."""

    @staticmethod
    def pool(*args: Any) -> None:
        """Pool nothing."""

    @staticmethod
    def update(*args: Any) -> None:
        """Update nothing."""
