"""Trains PyTorch ranking models whose embeddings outgrow one machine.

Declare each `Table`, give the features to `Embeddings`, and train on the batches of `embeddings.stream(data)`. Data are
a `Parquet`, a `CSV` or their like. `help(satrap.Embeddings)` says more, and docs/index.md leads on.

This file defines nothing: it has the public names, each from the file that defines it. Importing it needs numpy and the
native core, never torch or pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from satrap.config.columns import DenseColumn, IdColumn, LabelColumn
from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, RowWiseAdagrad
from satrap.config.tables import (
    Always,
    Constant,
    Feature,
    MinCount,
    Normal,
    Probability,
    ScaledUniform,
    Table,
    Uniform,
    Zeros,
)
from satrap.data.arrow import Arrow
from satrap.data.criteo import Criteo
from satrap.data.delimited import CSV
from satrap.data.frame import Frame
from satrap.data.inputs import Inputs, Position
from satrap.data.iterable import IterableSource
from satrap.data.json_lines import JSON
from satrap.data.parquet import Parquet
from satrap.data.source import Source
from satrap.data.tfrecord import TFRecord
from satrap.data.vectors import read_vectors
from satrap.errors import (
    AttemptError,
    CapacityError,
    ChangesError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    ForkError,
    InputError,
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
from satrap.monitor.progress import Progress
from satrap.monitor.sinks import JsonLines, Screen, TensorBoard
from satrap.table.store import Store, StoredRows
from satrap.train.deployment import Deployment

if TYPE_CHECKING:
    from satrap import models, nn
    from satrap.checkpoint.checkpoint import Checkpoint
    from satrap.data import synthetic
    from satrap.monitor.metrics import Evaluation
    from satrap.monitor.report import Counters, Report
    from satrap.nn.convert import convert
    from satrap.serving.reader import Reader, ReaderTable
    from satrap.table.table_group import TableGroup
    from satrap.train import negatives
    from satrap.train.batch import Batch
    from satrap.train.embeddings import Embeddings
    from satrap.train.evaluation import auc, evaluate
    from satrap.train.optimizer import HybridOptimizer
    from satrap.train.process_group import ProcessGroup
    from satrap.train.retrieval import full_softmax, topk
    from satrap.train.sequence import JaggedSequence, Sequence
    from satrap.train.stream import Stream
    from satrap.train.validation import Validation
    from satrap.worker.sharded_tables import ShardedTable, ShardedTables

_LATER = {
    "Batch": "train.batch",
    "Checkpoint": "checkpoint.checkpoint",
    "Counters": "monitor.report",
    "Embeddings": "train.embeddings",
    "Evaluation": "monitor.metrics",
    "HybridOptimizer": "train.optimizer",
    "JaggedSequence": "train.sequence",
    "PrefetchedBatches": "train.prefetched_batches",
    "ProcessGroup": "train.process_group",
    "Reader": "serving.reader",
    "ReaderTable": "serving.reader",
    "Report": "monitor.report",
    "Sequence": "train.sequence",
    "ShardedTable": "worker.sharded_tables",
    "ShardedTables": "worker.sharded_tables",
    "Stream": "train.stream",
    "TableGroup": "table.table_group",
    "Validation": "train.validation",
    "auc": "train.evaluation",
    "convert": "nn.convert",
    "evaluate": "train.evaluation",
    "full_softmax": "train.retrieval",
    "topk": "train.retrieval",
}
"""Names that come with torch, and types of results: their files are imported at the first use of the name."""
_MODULES = {"models": "models", "nn": "nn", "negatives": "train.negatives", "synthetic": "data.synthetic"}


def __getattr__(name: str) -> object:
    path = _MODULES.get(name) or _LATER.get(name)
    if path is None:
        raise AttributeError(f"module 'satrap' has no attribute {name!r}")
    try:
        module = import_module(f"satrap.{path}")
    except ModuleNotFoundError as error:
        if (error.name or "satrap").startswith("satrap"):
            raise
        raise ImportError(f"satrap.{name} needs {error.name}: pip install 'satrap[train]'", name=error.name) from error
    return module if name in _MODULES else getattr(module, name)


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
    "Counters",
    "Criteo",
    "DeadlineError",
    "DenseColumn",
    "Deployment",
    "Embeddings",
    "Evaluation",
    "Feature",
    "Features",
    "ForkError",
    "Frame",
    "Ftrl",
    "HybridOptimizer",
    "IdColumn",
    "InputError",
    "Inputs",
    "IterableSource",
    "JSON",
    "JaggedSequence",
    "JsonLines",
    "LabelColumn",
    "MinCount",
    "NonFiniteError",
    "Normal",
    "NotReadyError",
    "Parquet",
    "Position",
    "PrefetchedBatches",
    "Probability",
    "ProcessGroup",
    "Progress",
    "Reader",
    "ReaderTable",
    "Report",
    "RowWiseAdagrad",
    "RpcError",
    "SGD",
    "SatrapError",
    "ScaledUniform",
    "Screen",
    "Sequence",
    "ShardedTable",
    "ShardedTables",
    "SharedMemoryError",
    "SnapshotError",
    "Source",
    "SourceError",
    "Store",
    "StoredRows",
    "Stream",
    "StreamError",
    "TFRecord",
    "Table",
    "TableGroup",
    "TensorBoard",
    "TicketError",
    "Uniform",
    "Validation",
    "Zeros",
    "__version__",
    "auc",
    "convert",
    "evaluate",
    "full_softmax",
    "models",
    "negatives",
    "nn",
    "read_vectors",
    "synthetic",
    "topk",
]
