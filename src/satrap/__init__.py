"""The public names of Satrap, and nothing else: each comes from the file that owns it.

Importing this package costs little on purpose: it needs numpy and the native core, never torch or pyarrow.
"""

from satrap.config import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Always,
    Constant,
    Ftrl,
    MinCount,
    Normal,
    Probability,
    RowWiseAdagrad,
    ScaledUniform,
    Table,
    Uniform,
    Zeros,
)
from satrap.errors import (
    CapacityError,
    ConfigError,
    InputError,
    NonFiniteError,
    SatrapError,
    SharedMemoryError,
    SnapshotError,
    TicketError,
)
from satrap.store import Store

__version__ = "0.1.0.dev0"

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Always",
    "CapacityError",
    "ConfigError",
    "Constant",
    "Ftrl",
    "InputError",
    "MinCount",
    "NonFiniteError",
    "Normal",
    "Probability",
    "RowWiseAdagrad",
    "SGD",
    "SatrapError",
    "ScaledUniform",
    "SharedMemoryError",
    "SnapshotError",
    "Store",
    "Table",
    "TicketError",
    "Uniform",
    "Zeros",
    "__version__",
]
