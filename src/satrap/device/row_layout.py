"""What the rows of a memory have in common: dtype, dim and the size of their state."""

from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The layout of a row on a device, and at home."""

    dtype: str
    dim: int
    state_dim: int
    first: int = 0
    """The element of a whole row that comes first: random draws are those of whole rows."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of values."""
        return DTYPES[self.dtype]

    @property
    def value_bytes(self) -> int:
        """Size of a row's values."""
        return self.dim * self.torch_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Size of a row's state."""
        return self.state_dim * 4

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return self.value_bytes + self.state_bytes
