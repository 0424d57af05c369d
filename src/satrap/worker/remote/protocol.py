"""The calls that a remote worker answers: the protocol between trainers and workers.

`satrap.worker.remote.service.WorkerService` implements the calls and `satrap.rpc` carries them. A call may arrive
twice, and be repeated after the worker was killed and restarted: its `Origin` names the attempt and the trainer, and
its arguments the batch, which its stream numbers from 1. A worker that does not know the trainer or the stream answers
with NotReadyError. The trainer then repeats the handshake, reopens its streams at their oldest batch in flight, and
repeats the call. `settled` says that all batches below that number were updated or dropped.

Arrays cross flat: a block [batch_size, total_dim], then each sequence [batch_size, max_length, dim], or jagged
[rows, dim], in feature order; as float32, or coded as the trainer's wire is.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.features import Features
from satrap.config.optional_deps import pyarrow_for
from satrap.errors import InputError
from satrap.rpc import Origin

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Ids = NDArray[np.uint64]
Jagged = Mapping[str, NDArray[np.int64]]
"""The offsets of jagged sequences; see `satrap.worker.worker.LookupResult`."""


class WorkerCalls(Protocol):
    """The calls of a remote worker."""

    def hello(self, origin: Origin, assignment: dict[str, Any], frozen: Ids) -> None:
        """Handshake: start a session for the trainer in the origin's attempt; sessions of older attempts end.

        frozen: `WorkerSpec.frozen_ids` of the assignment."""

    def open(self, origin: Origin, stream: int, source: dict[str, Any], start: dict[str, Any]) -> None:
        """Start reading a source. Does nothing if the stream is open."""

    def read(
        self, origin: Origin, stream: int, number: int, settled: int
    ) -> tuple[dict[str, Any], Floats | None, Floats | None, Bytes | None]:
        """Return what the trainer needs of a batch: a dict that describes it, dense features, labels, extra columns.

        The dict's "found" is "batch", "end", or "nothing" if the source has not yielded the batch yet. Its "jagged" has
        the lengths of the samples of each jagged sequence.
        """

    def length(self, origin: Origin, stream: int) -> dict[str, Any]:
        """Return the stream's number of batches from its first one on as "batches"; or as "why" the reason that it is
        not known, and as "about" an estimate if there is one."""

    def lookup(
        self, origin: Origin, stream: int, number: int, settled: int, oldest_open: int, train: bool
    ) -> tuple[Floats | None, Floats | None, Bytes | None, Flags, list[int]]:
        """Return the block and the sequences, or both coded (`satrap.worker.remote.protocol`); the masks; and for each
        sequence the number of ids beyond its length."""

    def send_gradients(
        self,
        origin: Origin,
        stream: int,
        number: int,
        present: list[bool],
        gradients: Floats | None,
        coded: Bytes | None = None,
    ) -> None:
        """Keep the gradients of a batch, in one of the two forms, until the update that ends with a later batch."""

    def update(
        self,
        origin: Origin,
        stream: int,
        numbers: list[int],
        present: list[bool],
        gradients: Floats | None,
        lrs: dict[str, float],
        scale: float,
        coded: Bytes | None = None,
        ids: Ids | None = None,
        id_counts: list[int] | None = None,
        id_gradients: Floats | None = None,
    ) -> list[int]:
        """Apply one optimizer step with these batches. The gradients are those of the last batch;
        `send_gradients` sent those of the others.

        ids: ids that modules of the trainer have looked up, table by table: as many of each of the features' tables as
            `id_counts` says, with their gradients.
        present: whether there is a gradient for the block and for each sequence.
        Returns for each table how many gradients were not finite and were left out.
        """

    def drop(self, origin: Origin, stream: int, number: int) -> None:
        """Give up a batch, which will not be updated."""

    def close_stream(self, origin: Origin, stream: int) -> None:
        """Stop reading."""

    def signature(self, origin: Origin, source: dict[str, Any]) -> dict[str, Any]:
        """Return `Source.signature` of the files as the worker sees them."""

    def status(self, origin: Origin) -> dict[str, Any]:
        """Return `where` this process runs, `not_ready` (why it has no work; "" if it has), `memory`, `attempt`, and
        the ranks of its `trainers`. Needs no session and waits for no other call."""


def as_one(arrays: Sequence[NDArray[Any] | None], dtype: type) -> NDArray[Any]:
    """Concatenate the arrays that are not None, flat."""
    there = [np.ascontiguousarray(array).reshape(-1) for array in arrays if array is not None]
    return there[0] if len(there) == 1 else np.concatenate(there) if there else np.zeros(0, dtype)


def split_one(flat: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
    """Split a flat array into arrays of these shapes, as views: the inverse of `as_one`."""
    parts = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes], dtype=np.int64))
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=False)]


def columns_as_bytes(columns: Mapping[str, Any]) -> Bytes | None:
    """Encode Arrow arrays by name as an Arrow stream."""
    if not columns:
        return None
    arrow = pyarrow_for("further columns")
    table, sink = arrow.table(dict(columns)), arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return np.frombuffer(sink.getvalue(), np.uint8)


def columns_from_bytes(data: Bytes | None) -> dict[str, Any]:
    """Decode what `columns_as_bytes` returned."""
    if data is None:
        return {}
    arrow = pyarrow_for("further columns")
    table = arrow.ipc.open_stream(arrow.py_buffer(data)).read_all()
    return {name: table.column(name).combine_chunks() for name in table.column_names}


class PooledCodec:
    """Encodes what crosses between a worker process and its trainer. `flat` holds a block [batch_size, total_dim], then
    each sequence [batch_size, max_length, dim], or jagged [rows, dim], as far as they are present."""

    def __init__(self, features: Features, split: _core.Split, wire: str) -> None:
        """split: encodes and decodes. wire: "float32" or "float16"."""
        self._split, self.is_coded = split, wire == "float16"
        self._pooled = _runs_of(features.pooled.values())
        self._sequences = [
            (name, feature.table.dim, feature.padded_length)
            for name, feature in features.items()
            if feature.pooling == "none"
        ]
        self._layout = lru_cache(maxsize=8)(self._runs)

    def encode(
        self, flat: Floats, batch_size: int, present: Sequence[bool], jagged: Jagged
    ) -> tuple[Floats | None, Bytes | None]:
        """Return the floats in one of the two forms; the other one is None.

        present: whether the block, and each sequence, is in `flat`.
        jagged: the offsets of jagged sequences."""
        if not self.is_coded:
            return flat, None
        dims, offsets = self._layout(batch_size, tuple(present), _num_rows(jagged))
        return None, np.asarray(self._split.encode_runs(dims, offsets, flat))

    def decode(
        self, flat: Floats | None, coded: Bytes | None, batch_size: int, present: Sequence[bool], jagged: Jagged
    ) -> Floats:
        """Return the floats, from whichever form was received."""
        if (flat is None) == (coded is None):
            raise InputError("expected rows or gradients in one of the two forms, found both or none")
        if coded is None:
            assert flat is not None
            return flat
        dims, offsets = self._layout(batch_size, tuple(present), _num_rows(jagged))
        return np.asarray(self._split.decode_runs(dims, offsets, coded))

    def _runs(
        self, batch_size: int, present: tuple[bool, ...], num_rows: tuple[tuple[str, int], ...]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return runs of rows of one dim: their dims, and where the rows of each begin, and where the last ones end."""
        if len(present) != 1 + len(self._sequences):
            raise InputError(f"found {len(present)} parts; expected a block and {len(self._sequences)} sequences")
        dims, counts = (list(numbers) for numbers in zip(*self._pooled, strict=True)) if self._pooled else ([], [])
        if not present[0]:
            dims, counts = [], []
        elif len(dims) == 1:
            counts = [counts[0] * batch_size]
        else:
            dims, counts = dims * batch_size, counts * batch_size
        rows_of = dict(num_rows)
        for (name, dim, padded_length), is_present in zip(self._sequences, present[1:], strict=True):
            dims += [dim] * is_present
            counts += [rows_of[name] if padded_length is None else batch_size * padded_length] * is_present
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        return np.array(dims, np.uint32), offsets


def _num_rows(jagged: Jagged) -> tuple[tuple[str, int], ...]:
    return tuple((name, int(offsets[-1])) for name, offsets in jagged.items())


def _runs_of(dims: Iterable[int]) -> list[tuple[int, int]]:
    """Return neighbours of one dim as (dim, number)."""
    runs: list[tuple[int, int]] = []
    for dim in dims:
        if runs and runs[-1][0] == dim:
            runs[-1] = dim, runs[-1][1] + 1
        else:
            runs.append((dim, 1))
    return runs
