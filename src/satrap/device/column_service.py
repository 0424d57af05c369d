"""The columns of rows that trainers read from each other, for tables that are divided by columns.

A lookup without training, a read or a save calls the server of a bucket's owner, which needs the whole rows. Each
trainer serves its columns beside its server, in other threads: two servers may ask each other at the same time.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from satrap.device.device_engine import DeviceEngine
from satrap.device.table_shards import ReadPart
from satrap.rpc import Client, Keys

_IDS = 1 << 16  # ids that one call sends


class ColumnCalls(Protocol):
    """What trainers ask each other."""

    def read(
        self, table: int, ids: NDArray[np.uint64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint8], NDArray[np.float32]]:
        """Return for each id whether it has a row, and the values, as bytes, and states of the columns here."""
        ...


class ServedColumns:
    """The columns of this trainer. Implements `ColumnCalls`."""

    def __init__(self, engine: Callable[[], DeviceEngine]) -> None:
        self._engine = engine

    def read(
        self, table: int, ids: NDArray[np.uint64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint8], NDArray[np.float32]]:
        present, (values, state) = self._engine().read_columns(table, ids)
        return present, np.ascontiguousarray(values).reshape(-1).view(np.uint8), state.reshape(-1)


class OtherColumns:
    """The columns of the other trainers: a `ReadColumns`."""

    def __init__(self, addresses: Sequence[str], rank: int, keys: Keys | None) -> None:
        """addresses: of all trainers' columns."""
        self._clients = {
            other: Client[ColumnCalls](ColumnCalls, address, keys, deadline=60.0)
            for other, address in enumerate(addresses)
            if other != rank
        }

    def __call__(self, table: int, ids: NDArray[np.uint64]) -> Iterator[ReadPart]:
        for rank, client in self._clients.items():
            parts = [client.call.read(table, ids[at : at + _IDS]) for at in range(0, len(ids), _IDS)]
            present, values, state = (np.concatenate(column) for column in zip(*parts, strict=True))
            yield rank, present, values, state

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for client in self._clients.values():
            client.close()
