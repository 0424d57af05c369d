"""The batches of a loader whose ids were named ahead of their step, and the rows that were looked up for them.

`Embeddings.prefetch` makes `NamedInputs` of what the loader yields, and a stream looks their ids up, of all tables in
one call. A module then finds its rows here, by id. A table's gradients need no ids if modules have asked for exactly
what was named: then the update takes the ticket of that lookup.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satrap.config.array_args import as_ids
from satrap.config.validation import kind_of, suggest
from satrap.data.inputs import Inputs, Position
from satrap.errors import InputError
from satrap.train.step_lookups import Lookup, StepLookups
from satrap.worker.rows import Ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class NamedInputs(Inputs):
    """A batch of a loader, as one sample whose features are tables."""

    item: Any
    """What the loader yielded."""
    chunks: Mapping[str, list[Ids]] = field(default_factory=dict)
    """For each table the arrays of ids that were named, in their order."""

    @classmethod
    def of(
        cls, item: Any, ids: object, tables: Mapping[str, int | None], position: Position | None = None
    ) -> "NamedInputs":
        """Return the batch for what the loader yielded. ids: by table, a tensor, an array or a list of these, of
        any shape. tables: for each table its padding id, which is left out; None: it has none."""
        if not isinstance(ids, Mapping):
            raise InputError(f"prefetch: ids returned {kind_of(ids)}; expected a dict from a table's name to ids")
        for name in ids:
            if name not in tables:
                raise InputError(f"prefetch: ids named {name!r}, which is no table; {suggest(str(name), list(tables))}")
        given = {name: _chunks(name, ids.get(name, ()), padding) for name, padding in tables.items()}
        flat = [chunk for of_table in given.values() for chunk in of_table]
        values = np.concatenate([*flat, np.zeros(0, np.uint64)])
        parts = iter(np.split(values, np.cumsum([len(chunk) for chunk in flat])))  # the loader may reuse its memory
        chunks = {name: [next(parts) for _ in of_table] for name, of_table in given.items()}
        offsets = np.cumsum([0, *(sum(map(len, of_table)) for of_table in given.values())], dtype=np.int64)
        of_ids: dict[str, Any] = {"values": values, "offsets": offsets, "chunks": chunks}
        return cls(names=tuple(tables), batch_size=1, item=item, position=position, **of_ids)


def _chunks(table: str, given: Any, padding: int | None) -> list[Ids]:
    arrays = given if isinstance(given, list | tuple) else [given]
    flat = []
    for array in arrays:
        ids = array.detach().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
        if ids.dtype == np.int32:
            ids = ids.astype(np.int64)
        of_chunk = as_ids(f"prefetch: table {table!r}", ids.reshape(-1))
        flat.append(of_chunk if padding is None else of_chunk[of_chunk != padding])
    return flat


class AheadRows:
    """The rows that were looked up ahead for one batch."""

    def __init__(self, inputs: NamedInputs, values: Mapping[str, Tensor]) -> None:
        """values: of each table, the rows of its chunks."""
        self._chunks = inputs.chunks
        self._values = values
        self._left: dict[str, list[Tensor | None]] = {}
        """The rows of each chunk of the tables that modules have asked for, until a module takes them."""
        self._taken: dict[str, list[Tensor]] = {name: [] for name in self._chunks}
        """The rows that modules have taken, detached: their version counters tell whether a model has changed them."""
        self._next = dict.fromkeys(self._chunks, 0)  # the chunk after the last one taken: models ask in order
        self._sorted: dict[str, tuple[Ids, Any]] = {}

    def take(self, table: str, ids: Ids, lookups: StepLookups) -> Tensor | None:
        """Return the rows of the table's chunk that has exactly these ids. Each chunk is taken once; None: none is
        left."""
        chunks, first = self._chunks[table], self._next[table]
        for number in chain(range(first, len(chunks)), range(first)):
            if len(chunks[number]) == len(ids) and not np.count_nonzero(chunks[number] != ids):
                if table not in self._left:
                    self._left[table] = [*lookups.add_chunks(table, chunks, self._values[table])]
                rows: Tensor | None = self._left[table][number]
                if rows is not None:
                    self._left[table][number] = None
                    self._taken[table].append(rows.detach())
                    self._next[table] = number + 1
                    return rows
        return None

    def _lines(self, table: str, ids: Ids) -> Any:
        """Return for each id its line among the table's rows; -1 if it was not looked up, or if a model may have
        changed the row in place."""
        if any(rows._version for rows in self._taken[table]):
            return np.full(len(ids), -1)
        if table not in self._sorted:
            flat = np.concatenate(self._chunks[table] or [np.zeros(0, np.uint64)])
            self._sorted[table] = np.unique(flat, return_index=True)
        known, first = self._sorted[table]
        if not len(known):
            return np.full(len(ids), -1)
        at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return np.where(known[at] == ids, first[at], -1)

    def find(
        self, ids: Mapping[str, Ids], device: torch.device, read: Callable[[Mapping[str, Ids]], Mapping[str, Tensor]]
    ) -> tuple[dict[str, Tensor], int]:
        """Return copies of the rows of some tables' ids on the model's device, and how many ids were not looked up
        ahead. read: looks those up."""
        lines = {table: self._lines(table, of_table) for table, of_table in ids.items()}
        missing = {table: ids[table][of_table < 0] for table, of_table in lines.items() if (of_table < 0).any()}
        now = read(missing) if missing else {}
        copies = {}
        for table, of_table in lines.items():
            is_missing = of_table < 0
            if len(of_table) and is_missing.all():
                copies[table] = now[table]
                continue
            values = self._values[table].detach()
            rows = values[torch.from_numpy(np.maximum(of_table, 0)).to(values.device)].to(device)
            if table in now:
                rows[torch.from_numpy(is_missing).to(device)] = now[table]
            copies[table] = rows
        return copies, sum(map(len, missing.values()))

    def whole_tables(self, lookups: list[Lookup]) -> dict[str, Lookup]:
        """Return the lookup of each table whose gradients are those of all its chunks and of no other lookup: its
        update can take the ticket of the lookup ahead."""
        by_table: dict[str, list[Lookup]] = {}
        for lookup in lookups:
            by_table.setdefault(lookup.table, []).append(lookup)
        return {
            name: given[0]
            for name, given in by_table.items()
            if len(given) == 1 and given[0].chunks is self._chunks[name] and given[0].is_whole
        }


def rows_of(
    ahead: AheadRows | None,
    lookups: StepLookups,
    ids: Mapping[str, Ids],
    device: torch.device,
    read: Callable[[Mapping[str, Ids]], Mapping[str, Tensor]],
) -> tuple[dict[str, Tensor], int]:
    """Return the rows of ids by table for a model, and how many ids were not looked up ahead. read: looks those up."""
    if ahead is None:
        rows = read(ids)
        return {table: lookups.add(table, ids[table], rows[table]) for table in ids}, sum(map(len, ids.values()))
    given = {table: ahead.take(table, of_table, lookups) for table, of_table in ids.items()}
    taken = {table: rows.to(device) for table, rows in given.items() if rows is not None}
    if len(taken) == len(ids):
        return taken, 0
    others = {table: of_table for table, of_table in ids.items() if table not in taken}
    copies, num_now = ahead.find(others, device, read)
    return taken | {table: lookups.add(table, others[table], copies[table]) for table in others}, num_now
