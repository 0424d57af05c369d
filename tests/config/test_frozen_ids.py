"""The set of frozen ids of a table: one value in any form, short in text, and in order for the core."""

import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap import _core
from satrap.config.id_set import IdSet
from satrap.config.job import Job
from satrap.config.tables import Table
from satrap.errors import ConfigError, InputError


@given(st.sets(st.integers(0, 9) | st.integers(0, 2**64 - 1)))
def test_frozen_ids_are_a_value(ids: set[int]) -> None:
    """They are equal in any form and order, and a copy has them; without a gap they are a range."""
    table = Table("t", dim=4, frozen=ids)
    same = Table("t", dim=4, frozen=np.array([*sorted(ids, reverse=True), *ids], np.uint64).view(np.int64))
    assert table == same and hash(table) == hash(same) and repr(table) == repr(same)
    for copied in (table, same, pickle.loads(pickle.dumps(table)), dataclasses.replace(table, dim=4)):
        assert copied == table and list(np.asarray(sorted(ids), np.uint64)) == list(
            np.arange(copied.frozen.start, copied.frozen.stop, dtype=np.uint64)
            if isinstance(copied.frozen, range)
            else copied.frozen.ids
            if isinstance(copied.frozen, IdSet)
            else []
        )
    assert isinstance(table.frozen, range) == bool(ids and max(ids) - min(ids) == len(ids) - 1)
    assert (table.frozen is False) == (not ids)
    assert table != Table("t", dim=4, frozen=ids ^ {5}) and all(id_ in table.frozen_ids for id_ in ids)


def test_a_declaration_with_many_frozen_ids_stays_short() -> None:
    """It is printed and sent by their number and checksum, which tell two jobs apart."""
    ids = np.arange(0, 200_000, 2)
    table, other = Table("t", dim=4, frozen=ids), Table("t", dim=4, frozen=ids + 1)
    assert "frozen=<100000 ids, sha256 " in repr(table) and len(repr(table)) < 500
    job = Job(tables=(table,))
    assert len(json.dumps(job.to_dict())) < 1000 and Job.from_dict(job.to_dict()) == job
    (difference,) = job.differences(Job(tables=(other,)))
    assert re.fullmatch(
        r"table 't', frozen: '100000 ids, sha256 \w{16}' here, '100000 ids, sha256 \w{16}' there", difference
    )
    assert job.fingerprint != Job(tables=(other,)).fingerprint
    with pytest.raises(ConfigError, match="found no ids in <100000 ids, sha256"):
        _ = 4 in Job.from_dict(job.to_dict()).tables[0].frozen_ids
    assert isinstance(table.frozen, IdSet)
    with pytest.raises(ValueError, match="read-only"):
        table.frozen.ids[0] = 1


def test_the_core_refuses_frozen_ids_that_do_not_rise() -> None:
    fields = Table("t", dim=1).to_dict() | {"num_buckets": 1}
    with pytest.raises(InputError, match="table 't': frozen_ids do not rise; expected each id once, in order"):
        _core.TableConfig(fields, None, np.array([1, 3, 3], np.uint64))
