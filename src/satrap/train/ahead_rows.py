"""The batches of a loader whose ids were named ahead of their step, and the rows that were looked up for them.

`Embeddings.prefetch` makes `NamedInputs` of what the loader yields, and a stream looks their ids up, of all tables in
one call. A module then finds its rows here, by id. A table's gradients need no ids if modules have asked for exactly
what was named: then the update takes the ticket of that lookup.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satrap.config.array_args import as_ids
from satrap.config.validation import kind_of, suggest
from satrap.data.inputs import Inputs, Position
from satrap.errors import InputError
from satrap.train.step_lookups import Lookup
from satrap.worker.rows import Ids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class NamedInputs(Inputs):
    """A batch of a loader, as one sample whose features are tables."""

    item: Any
    """What the loader yielded."""
    chunks: Mapping[str, list[Ids]] = field(default_factory=dict)
    """The ids of each table, one array after another."""

    @classmethod
    def of(
        cls, item: Any, ids: object, tables: Mapping[str, int | None], position: Position | None = None
    ) -> "NamedInputs":
        """Return the batch for ids by table: for each a tensor or an array of any shape, or a list of them. tables: the
        id of each that stands for none and is left out."""
        if not isinstance(ids, Mapping):
            raise InputError(f"prefetch: ids returned {kind_of(ids)}; expected a dict from a table's name to ids")
        for name in ids:
            if name not in tables:
                raise InputError(f"prefetch: ids named {name!r}, which is no table; {suggest(str(name), list(tables))}")
        chunks = {name: _chunks(name, ids.get(name, ()), padding) for name, padding in tables.items()}
        flat = [chunk for of_table in chunks.values() for chunk in of_table]
        values = np.concatenate(flat) if flat else np.zeros(0, np.uint64)
        offsets = np.cumsum([0, *(sum(map(len, of_table)) for of_table in chunks.values())], dtype=np.int64)
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
        self._next = dict.fromkeys(self._chunks, 0)  # the chunk after the last one found: models ask in order
        self._sorted: dict[str, tuple[Ids, Any]] = {}

    def find(self, table: str, ids: Ids) -> tuple[Tensor, int] | None:
        """Return the rows of one of the table's chunks, and its number; None if the ids are no chunk."""
        chunks, first = self._chunks[table], self._next[table]
        for number in (*range(first, len(chunks)), *range(first)):
            if len(chunks[number]) == len(ids) and np.array_equal(chunks[number], ids):
                self._next[table] = number + 1
                begin = sum(map(len, chunks[:number]))
                return self._values[table][begin : begin + len(ids)], number
        return None

    def lines(self, table: str, ids: Ids) -> Any:
        """Return for each id its line among the table's rows; -1 if it was not looked up."""
        if table not in self._sorted:
            flat = np.concatenate(self._chunks[table] or [np.zeros(0, np.uint64)])
            self._sorted[table] = np.unique(flat, return_index=True)
        known, first = self._sorted[table]
        if not len(known):
            return np.full(len(ids), -1)
        at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return np.where(known[at] == ids, first[at], -1)

    def rows(self, table: str, lines: Any) -> Tensor:
        """Return these lines of the table's rows."""
        return self._values[table][torch.from_numpy(lines).to(self._values[table].device)]

    def whole_tables(self, lookups: list[Lookup]) -> dict[str, list[Lookup]]:
        """Return the lookups of each table of which every chunk was asked for once and no lookup was of a part."""
        by_table: dict[str, list[Lookup]] = {}
        for lookup in lookups:
            by_table.setdefault(lookup.table, []).append(lookup)
        ordered = {name: sorted(given, key=lambda lookup: lookup.chunk) for name, given in by_table.items()}
        return {
            name: given
            for name, given in ordered.items()
            if [lookup.chunk for lookup in given] == list(range(len(self._chunks[name])))
        }


def rows_of(
    ahead: AheadRows | None,
    ids: Mapping[str, Ids],
    device: torch.device,
    read: Callable[[Mapping[str, Ids]], Mapping[str, Tensor]],
) -> tuple[dict[str, tuple[Tensor, int]], int]:
    """Return for each table the rows of its ids on the model's device, and the number of the chunk that they are, or
    -1; and how many ids were not looked up ahead. read: looks those up."""
    if ahead is None:
        return {table: (rows, -1) for table, rows in read(ids).items()}, sum(map(len, ids.values()))
    found = {table: chunk for table, of_table in ids.items() if (chunk := ahead.find(table, of_table)) is not None}
    lines = {table: ahead.lines(table, of_table) for table, of_table in ids.items() if table not in found}
    missing = {table: ids[table][of_table < 0] for table, of_table in lines.items() if (of_table < 0).any()}
    now = read(missing) if missing else {}
    for table, of_table in lines.items():
        is_missing = of_table < 0
        if len(of_table) and is_missing.all():
            found[table] = now[table], -1
            continue
        rows = ahead.rows(table, np.maximum(of_table, 0)).to(device)
        if table in now:
            rows[torch.from_numpy(is_missing).to(device)] = now[table]
        found[table] = rows, -1
    rows_found = {table: (rows.to(device), chunk) for table, (rows, chunk) in found.items()}
    return rows_found, sum(map(len, missing.values()))
