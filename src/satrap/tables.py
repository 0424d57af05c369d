"""Many tables in one engine: one native call looks up, or updates, the ids of all of them.

A batch brings one array of ids and the offsets where each table's begin, so its cost in Python does not grow with the
number of tables. Rows come back in one flat array, because tables differ in dim; `split` shows it table by table.
Whatever concerns one table alone (reading, learning rate, statistics, saving) is on its `Store`, `tables["item"]`:
every table of the engine has one, and a Store made by hand is the only one of an engine of its own. So the two faces
share all code but that of the batch, and neither calls through the other.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap import arrays
from satrap._core import Ticket
from satrap.config import Table
from satrap.engine import Place, attach_engine, open_engine, open_step
from satrap.errors import ConfigError, InputError, TicketError
from satrap.store import Store

_PathLike = str | os.PathLike[str]


class Tables(Mapping[str, Store]):
    """Tables by name, in one engine: one memory, one set of threads, one count of steps."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        seed: int = 0,
        num_threads: int | None = None,
        simd: str = "auto",
        shared: _PathLike | None = None,
    ) -> None:
        """Empty tables, in the order in which every batch brings their ids. The options are those of `Store`."""
        names = [table.name for table in tables if isinstance(table, Table)]
        if not tables or len(set(names)) != len(names):
            raise ConfigError(f"tables are called {names}; wanted at least one table, each with a name of its own")
        self._begin(open_engine(tables, seed=seed, num_threads=num_threads, simd=simd, shared=shared))

    @classmethod
    def attach(cls, path: _PathLike, *, num_threads: int | None = None, simd: str = "auto") -> Self:
        """The tables in the shared-memory file of a process that has ended, killed or not."""
        tables = cls.__new__(cls)
        tables._begin(attach_engine(path, num_threads=num_threads, simd=simd))
        return tables

    def _begin(self, places: list[Place]) -> None:
        self._engine = places[0].engine
        self._stores = {place.table.name: Store.in_engine(place) for place in places}
        self._dims = [place.table.dim for place in places]
        self._optimizers = [place.table.optimizer for place in places]
        self._where = f"tables {', '.join(map(repr, self._stores))}" if len(places) < 5 else f"{len(places)} tables"

    def __getitem__(self, name: str) -> Store:
        return self._stores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stores)

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def latest_step(self) -> int:
        """The largest step of any training lookup or update so far; 0 before the first."""
        return self._engine.latest_step

    @overload
    def lookup(
        self,
        ids: ArrayLike,
        offsets: ArrayLike,
        *,
        train: bool = True,
        step: int | None = None,
        oldest_open: int | None = None,
        out: NDArray[np.float32] | None = None,
        with_ticket: Literal[False] = False,
    ) -> NDArray[np.float32]: ...

    @overload
    def lookup(
        self,
        ids: ArrayLike,
        offsets: ArrayLike,
        *,
        train: bool = True,
        step: int | None = None,
        oldest_open: int | None = None,
        out: NDArray[np.float32] | None = None,
        with_ticket: Literal[True],
    ) -> tuple[NDArray[np.float32], Ticket]: ...

    def lookup(
        self,
        ids: ArrayLike,
        offsets: ArrayLike,
        *,
        train: bool = True,
        step: int | None = None,
        oldest_open: int | None = None,
        out: NDArray[np.float32] | None = None,
        with_ticket: bool = False,
    ) -> NDArray[np.float32] | tuple[NDArray[np.float32], Ticket]:
        """The values of the ids' rows of all tables, table after table, in one flat float32 array.

        ids: as in `Store.lookup`; those of table t are ids[offsets[t]:offsets[t + 1]].
        offsets: int64 [tables + 1], rising from 0 to the number of ids.
        The other options are those of `Store.lookup`; `out` is flat too.
        """
        id_array = arrays.as_ids(self._where, ids)
        offset_array = arrays.as_offsets(self._where, offsets, len(self), len(id_array))
        for name, value in (("train", train), ("with_ticket", with_ticket)):
            if not isinstance(value, bool):
                raise InputError(f"{self._where}: {name} is {value!r} ({type(value).__name__}); wanted True or False")
        if with_ticket and not train:
            raise InputError(f"{self._where}: with_ticket=True and train=False; such a batch is never updated")
        size = int(np.dot(np.diff(offset_array), self._dims))
        if out is not None:
            rows = arrays.as_out(self._where, out, (size,))
        else:
            rows = np.asarray(self._engine.empty(1, size)).reshape(-1)
        at = open_step(self._where, self._engine, step, oldest_open) if train else (0, 0)
        ticket = self._engine.lookup(id_array, offset_array, *at, train, rows, with_ticket)
        result = rows if out is None else out
        if not with_ticket:
            return result
        assert ticket is not None
        return result, ticket

    def prepare(self, ids: ArrayLike, offsets: ArrayLike) -> Ticket:
        """A ticket for an update of ids that were not looked up with one."""
        id_array = arrays.as_ids(self._where, ids)
        return self._engine.prepare(id_array, arrays.as_offsets(self._where, offsets, len(self), len(id_array)))

    def update(
        self,
        ticket: Ticket,
        gradients: ArrayLike,
        *,
        step: int | None = None,
        lrs: Mapping[str, float] | None = None,
    ) -> None:
        """Applies each table's optimizer to the rows of a looked-up batch, once per id; see `Store.update`.

        gradients: flat float32, as long as what the lookup returned.
        lrs: learning rates of this update by table; tables not named use their own.
        """
        if not isinstance(ticket, Ticket):
            raise InputError(f"{self._where}: ticket is a {type(ticket).__name__}; wanted one from lookup or prepare")
        if ticket.used:
            raise TicketError(f"{self._where}: this ticket was used already; a batch is updated once, look it up again")
        gradient_array = arrays.as_gradients(self._where, gradients, None)
        at = max(1, self.latest_step) if step is None else arrays.as_step(self._where, "step", step)
        self._engine.update(ticket, gradient_array, at, self._lrs({} if lrs is None else lrs))

    def _lrs(self, given: Mapping[str, float]) -> list[float]:
        unknown = given.keys() - self._stores.keys()
        if unknown:
            raise InputError(f"{self._where}: lrs names {sorted(unknown)}, which are no tables here")
        return [
            arrays.as_lr(f"table {name!r}", given[name], optimizer) if name in given else self._engine.lr(i)
            for i, (name, optimizer) in enumerate(zip(self._stores, self._optimizers, strict=True))
        ]

    def split(self, flat: NDArray[np.float32], offsets: ArrayLike) -> list[NDArray[np.float32]]:
        """Each table's part of a lookup's result, or of gradients like it, as a view [n, dim]."""
        counts = np.diff(np.asarray(offsets))
        ends = np.cumsum(counts * self._dims)
        parts = np.split(flat, ends[:-1])
        return [part.reshape(-1, dim) for part, dim in zip(parts, self._dims, strict=True)]
