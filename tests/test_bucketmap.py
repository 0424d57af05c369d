"""The bucket map and the job: pure values that travel as JSON and are compared field by field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.bucketmap import BucketMap
from satrap.config import SGD, Adagrad, Ftrl, Table, Zeros
from satrap.errors import ConfigError
from satrap.job import Job

powers = st.integers(0, 10).map(lambda k: 1 << k)


@given(st.lists(powers, min_size=1, max_size=8), st.integers(1, 70))
def test_an_even_map_gives_each_bucket_one_owner_and_each_server_its_share(buckets: list[int], servers: int) -> None:
    bucket_map = BucketMap.even(buckets, servers)
    assert [len(owners) for owners in bucket_map.owners] == buckets
    for owners in bucket_map.owners:
        counts = [owners.count(server) for server in range(servers)]
        assert max(counts) - min(counts) <= 1
    assert BucketMap.from_dict(json.loads(json.dumps(bucket_map.to_dict()))) == bucket_map


def test_small_tables_are_spread_over_the_servers() -> None:
    bucket_map = BucketMap.even([1] * 26, 4)
    loads = [sum(owners.count(server) for owners in bucket_map.owners) for server in range(4)]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"version": 0}, "version is 0"),
        ({"num_servers": 0}, "num_servers is 0"),
        ({"owners": [[0, 2]]}, "table 0 names server 2"),
        ({"owners": [[0, -1]]}, "table 0 names server -1"),
        ({"owners": [[]]}, "table 0 names no bucket"),
        ({"owners": 3}, "owners is a int"),
        ({"owners": [[0.5]]}, "owners is a list; wanted a list of lists"),
        ({"owner": []}, "unknown key 'owner'"),
    ],
)
def test_a_map_that_is_none_is_refused(changes: dict[str, Any], found: str) -> None:
    data = BucketMap.even([2], 2).to_dict() | changes
    with pytest.raises(ConfigError, match=found):
        BucketMap.from_dict(data)


TABLES = (Table("user", dim=4), Table("item", dim=8, optimizer=Adagrad(lr=0.5)))


def test_a_job_travels_as_json() -> None:
    job = Job(tables=TABLES, seed=7)
    again = Job.from_dict(json.loads(json.dumps(job.to_dict())))
    assert again == job and not again.differences(job)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Job(tables=TABLES, seed=8), ["seed: 7 here, 8 there"]),
        (Job(tables=TABLES[::-1], seed=7), ["tables, in their order: ['user', 'item'] here, ['item', 'user'] there"]),
        (
            Job(tables=(Table("user", dim=5, initial=Zeros()), TABLES[1]), seed=7),
            ["table 'user', dim: 4 here, 5 there"],
        ),
        (Job(tables=(TABLES[0], Table("item", dim=8, optimizer=Adagrad(lr=0.9))), seed=7), []),
        (
            Job(tables=(TABLES[0], Table("item", dim=8, optimizer=SGD())), seed=7),
            ["table 'item', optimizer.type: 'Adagrad' here, 'SGD' there"],
        ),
    ],
)
def test_differences_name_each_field(other: Job, told: list[str]) -> None:
    found = Job(tables=TABLES, seed=7).differences(other)
    assert set(told) <= set(found) and bool(told) == bool(found)


def test_the_learning_rate_that_ftrl_begins_with_counts() -> None:
    one, other = (Job(tables=(Table("t", dim=1, optimizer=Ftrl(lr=lr)),)) for lr in (0.1, 0.2))
    assert one.differences(other) == ["table 't', optimizer.lr: 0.1 here, 0.2 there"]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Job(tables=()), "tables are \\[\\]"),
        (lambda: Job(tables=(TABLES[0], TABLES[0])), "each of a name of its own"),
        (lambda: Job(tables=TABLES, seed=-1), "seed is -1"),
        (lambda: Job.from_dict({"tables": {}, "seed": 1}), "tables is a dict"),
        (lambda: Job.from_dict({"seed": 1}), "the key 'tables' is missing"),
    ],
)
def test_a_job_that_is_none_is_refused(make: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        make()
