"""The public names of Satrap, and nothing else: each comes from the file that owns it.

Importing this package costs little on purpose: it needs numpy and the native core, never torch or pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from satrap.columns import DenseColumn, IdColumn, LabelColumn
from satrap.config import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Always,
    Constant,
    Feature,
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
    AttemptError,
    CapacityError,
    ChangesError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    ForkError,
    InputError,
    MovedError,
    NonFiniteError,
    NotReadyError,
    RpcError,
    SatrapError,
    SharedMemoryError,
    SnapshotError,
    SourceError,
    StreamError,
    TicketError,
)
from satrap.inputs import Inputs, Position
from satrap.progress import Progress
from satrap.sinks import JsonLines, Screen, TensorBoard
from satrap.sources import CSV, Arrow, Criteo, Frame, Iterable, Parquet
from satrap.store import Store

if TYPE_CHECKING:
    from satrap import models, synthetic
    from satrap.batch import Batch
    from satrap.checkpoint import Checkpoint
    from satrap.embeddings import Embeddings
    from satrap.evaluation import auc, evaluate
    from satrap.reader import Reader

_LATER = {
    "Batch": "batch",
    "Checkpoint": "checkpoint",
    "Embeddings": "embeddings",
    "Reader": "reader",
    "auc": "evaluation",
    "evaluate": "evaluation",
}
"""Names that come with torch: their files are imported when they are first asked for."""


def __getattr__(name: str) -> object:
    if name in ("models", "synthetic"):
        return import_module(f"satrap.{name}")
    if name in _LATER:
        return getattr(import_module(f"satrap.{_LATER[name]}"), name)
    raise AttributeError(f"module 'satrap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__version__ = "0.1.0.dev0"

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Always",
    "Arrow",
    "AttemptError",
    "Batch",
    "CSV",
    "CapacityError",
    "ChangesError",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Constant",
    "Criteo",
    "DeadlineError",
    "DenseColumn",
    "Embeddings",
    "Feature",
    "ForkError",
    "Frame",
    "Ftrl",
    "IdColumn",
    "InputError",
    "Inputs",
    "Iterable",
    "JsonLines",
    "LabelColumn",
    "MinCount",
    "MovedError",
    "NonFiniteError",
    "Normal",
    "NotReadyError",
    "Parquet",
    "Position",
    "Probability",
    "Progress",
    "Reader",
    "RowWiseAdagrad",
    "RpcError",
    "SGD",
    "SatrapError",
    "ScaledUniform",
    "Screen",
    "SharedMemoryError",
    "SnapshotError",
    "SourceError",
    "Store",
    "StreamError",
    "Table",
    "TensorBoard",
    "TicketError",
    "Uniform",
    "Zeros",
    "__version__",
    "auc",
    "evaluate",
    "models",
    "synthetic",
]
