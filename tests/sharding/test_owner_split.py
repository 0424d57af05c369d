"""Ids split by owner, against a loop over the ids."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from satrap import _core
from satrap.config.tables import Table
from satrap.sharding.owner_split import split_by_owner


@given(st.data())
def test_each_server_gets_the_ids_that_it_owns(data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.tuples(st.sampled_from([1, 4, 16]), st.booleans()), min_size=1, max_size=4), "tables")
    declared = [Table("t", dim=1, num_buckets=n, num_rows=2**31 if direct else None) for n, direct in drawn]
    total = sum(buckets for buckets, _ in drawn)
    servers = st.lists(st.integers(0, 3), min_size=total, max_size=total)
    owners = np.array(data.draw(servers, "owners"), np.uint32)
    tables = [data.draw(st.lists(st.integers(0, (each.num_rows or 2**64) - 1), max_size=9), "ids") for each in declared]
    offsets = np.cumsum([0, *map(len, tables)])

    expected: dict[int, list[tuple[int, int, int]]] = {}
    position = first_bucket = 0
    for table, (ids, there) in enumerate(zip(tables, declared, strict=True)):
        for each in ids:
            bucket = int(_core.bucket_of(np.array([each], np.uint64), there.resolved_num_buckets, there.is_direct)[0])
            expected.setdefault(int(owners[first_bucket + bucket]), []).append((table, each, position))
            position += 1
        first_bucket += there.resolved_num_buckets

    found = split_by_owner(np.array([*chain(*tables)], np.uint64), offsets, owners, declared)
    parts = {}
    for server, part in found.items():
        assert len(part.offsets) == len(offsets) and part.offsets[0] == 0 and part.offsets[-1] == len(part.ids)
        tables_of_ids = np.repeat(np.arange(len(tables)), np.diff(part.offsets)).tolist()
        parts[server] = list(zip(tables_of_ids, part.ids.tolist(), part.positions.tolist(), strict=True))
    assert parts == (expected or {0: []}) and list(found) == sorted(found)
