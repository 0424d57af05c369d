"""What a worker in a process of its own answers: the calls that cross the network between trainers and workers.

`satrap.worker.remote.service.Host` does them; `satrap.rpc` carries them. Each may come twice, and again after the
worker was killed and started anew: it is of an attempt and a trainer (in its `Origin`), and of a batch, which its
stream numbers from 1. A worker that does not know the trainer or the stream says NotReadyError; the trainer says hello,
opens its streams again where their oldest batch under way begins, and calls again. `settled` says that all batches
below it are updated or dropped.

Arrays cross flat: a block [batch_size, total_dim], then each sequence [batch_size, max_length, dim] in the order of the
features.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from satrap.config.optional_deps import pyarrow_for
from satrap.rpc import Origin

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Bytes = NDArray[np.uint8]


class WorkerCalls(Protocol):
    """See the file's docstring."""

    def hello(self, origin: Origin, assignment: dict[str, Any]) -> None:
        """Makes the worker the trainer's in the origin's attempt; those of older attempts are forgotten."""
        ...

    def open(self, origin: Origin, stream: int, source: dict[str, Any], start: dict[str, Any]) -> None:
        """Begins to read. Does nothing if the stream is open."""
        ...

    def read(
        self, origin: Origin, stream: int, number: int, settled: int
    ) -> tuple[dict[str, Any], Floats | None, Floats | None, Bytes | None]:
        """What the trainer needs of a batch: a dict that says what came, dense numbers, labels, further columns.

        The dict's "found" is "batch", "end", or "nothing" if the source has given nothing yet.
        """
        ...

    def length(self, origin: Origin, stream: int) -> dict[str, Any]:
        """How many batches the stream has from its first one on, as "batches"; or "why" that is not known."""
        ...

    def lookup(
        self, origin: Origin, stream: int, number: int, settled: int, oldest_open: int, train: bool
    ) -> tuple[Floats, Floats, Flags, list[int]]:
        """The block, the sequences, their masks, and of each sequence how many ids were beyond its length."""
        ...

    def bring(self, origin: Origin, stream: int, number: int, present: list[bool], gradients: Floats) -> None:
        """The gradients of a batch that is not the last of its update."""
        ...

    def update(
        self,
        origin: Origin,
        stream: int,
        numbers: list[int],
        present: list[bool],
        gradients: Floats,
        lrs: dict[str, float],
        scale: float,
    ) -> list[int]:
        """One optimizer step with these batches; the gradients are the last one's, the others' were brought.

        present: whether there is a gradient of the block and of each sequence. Returns of each table how many gradients
            were not finite and were left out.
        """
        ...

    def drop(self, origin: Origin, stream: int, number: int) -> None:
        """This batch will not be updated."""
        ...

    def close_stream(self, origin: Origin, stream: int) -> None:
        """Ends the reading."""
        ...

    def signature(self, origin: Origin, source: dict[str, Any]) -> dict[str, Any]:
        """As `Source.signature`, of the files as the worker sees them."""
        ...


def as_one(arrays: Sequence[NDArray[Any] | None], dtype: type) -> NDArray[Any]:
    """Those that are there, flat and one after the other."""
    there = [np.ascontiguousarray(each).reshape(-1) for each in arrays if each is not None]
    return there[0] if len(there) == 1 else np.concatenate(there) if there else np.zeros(0, dtype)


def columns_as_bytes(columns: Mapping[str, Any]) -> Bytes | None:
    """Arrow arrays by name, as an Arrow stream."""
    if not columns:
        return None
    arrow = pyarrow_for("further columns")
    table, sink = arrow.table(dict(columns)), arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return np.frombuffer(sink.getvalue(), np.uint8)


def columns_from_bytes(data: Bytes | None) -> dict[str, Any]:
    """The columns that `columns_as_bytes` was given."""
    if data is None:
        return {}
    arrow = pyarrow_for("further columns")
    table = arrow.ipc.open_stream(arrow.py_buffer(data)).read_all()
    return {name: table.column(name).combine_chunks() for name in table.column_names}
