"""The bucket map and the job: pure values that travel as JSON and are compared field by field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.config.job import Job
from satrap.config.optimizers import SGD, Adagrad, Ftrl
from satrap.config.tables import Table, Zeros
from satrap.errors import ConfigError
from satrap.sharding.bucket_map import BucketMap
from satrap.sharding.shard_map import NO_MEMBER, ShardMap

powers = st.integers(0, 10).map(lambda k: 1 << k)


@given(st.lists(powers, min_size=1, max_size=8), st.integers(1, 70))
def test_an_even_map_gives_each_bucket_one_owner_and_each_server_its_share(buckets: list[int], servers: int) -> None:
    bucket_map = BucketMap.even(buckets, servers)
    assert [len(owners) for owners in bucket_map.owners] == buckets
    for owners in bucket_map.owners:
        counts = [owners.count(server) for server in range(servers)]
        assert max(counts) - min(counts) <= 1
    assert BucketMap.from_dict(json.loads(json.dumps(bucket_map.to_dict()))) == bucket_map


@given(st.lists(st.tuples(powers, st.booleans()), min_size=1, max_size=12), st.integers(1, 5))
def test_a_whole_table_has_one_owner_and_servers_have_equal_numbers_of_them(
    tables: list[tuple[int, bool]], servers: int
) -> None:
    buckets, whole = [each for each, _ in tables], [number for number, (_, is_whole) in enumerate(tables) if is_whole]
    bucket_map = BucketMap.even(buckets, servers, whole)
    assert [len(owners) for owners in bucket_map.owners] == buckets
    assert all(len(set(bucket_map.owners[number])) == 1 for number in whole)
    counts = [sum(bucket_map.owners[number][0] == server for number in whole) for server in range(servers)]
    assert max(counts) - min(counts) <= 1
    divided = [number for number in range(len(tables)) if number not in whole]
    expected = BucketMap.even([buckets[number] for number in divided] or [1], servers).owners
    assert not divided or tuple(bucket_map.owners[number] for number in divided) == expected


@pytest.mark.parametrize(
    ("buckets", "servers", "owners"),
    [
        ([8], 3, ((0, 0, 0, 1, 1, 1, 2, 2),)),
        ([4, 2], 2, ((0, 0, 1, 1), (0, 1))),
        ([1, 1, 2], 3, ((0,), (1,), (2, 0))),
    ],
)
def test_owners_are_runs_of_buckets_and_tables_start_at_different_servers(
    buckets: list[int], servers: int, owners: tuple[tuple[int, ...], ...]
) -> None:
    assert BucketMap.even(buckets, servers).owners == owners


small = st.integers(0, 5).map(lambda k: 1 << k)


@st.composite
def maps(draw: st.DrawFn) -> BucketMap:
    """Draw any map, also an uneven one."""
    num_servers = draw(st.integers(1, 6))
    owner = st.integers(0, num_servers - 1)
    tables = draw(st.lists(small, min_size=1, max_size=6))
    owners = tuple(tuple(draw(st.lists(owner, min_size=n, max_size=n))) for n in tables)
    return BucketMap(version=1, num_servers=num_servers, owners=owners)


def even(counts: list[int]) -> bool:
    return max(counts) - min(counts) <= 1


@given(maps(), st.data())
def test_spread_is_even_and_moves_no_more_than_necessary(before: BucketMap, data: st.DataObject) -> None:
    every = st.integers(0, before.num_servers - 1)
    servers = data.draw(st.lists(every, min_size=1, unique=True))
    moves = before.spread(servers)
    after = before.with_owners(moves)
    assert after.version == 2 and after.num_servers == before.num_servers
    for was, now in zip(before.owners, after.owners, strict=True):
        counts = [now.count(server) for server in servers]
        assert sum(counts) == len(now) and even(counts), "other servers own nothing"
        num_moved = sum(a != b for a, b in zip(was, now, strict=True))
        gained = [max(0, now.count(server) - was.count(server)) for server in servers]
        assert num_moved == sum(gained), "no server both gives and takes"
    assert even([after.flat().count(server) for server in servers]), "over all tables together, too"
    assert all(before.flat()[bucket] != owner for bucket, owner in moves.items())
    assert after.spread(servers) == {}, "an even map stays"


@given(small, st.integers(1, 5), st.integers(1, 5))
def test_one_table_moves_the_minimum(buckets: int, was: int, now: int) -> None:
    """From an even map: the buckets of servers that leave, or those that new servers get."""
    both = max(was, now)
    before = BucketMap.even([buckets], was).renumbered({server: server for server in range(was)}, both)
    moved = len(before.spread(range(now)))
    counts = [before.owners[0].count(server) for server in range(both)]
    if now >= was:
        assert moved <= sum(-(-buckets // now) for _ in range(now - was))
    else:
        assert moved == sum(counts[now:])


def test_a_spread_over_no_servers_is_refused() -> None:
    for servers in ([], [0, 0], [2], [0, 2]):
        with pytest.raises(ConfigError, match=r"servers are .* expected some of 0\.\.1, each once"):
            BucketMap.even([4], 2).spread(servers)


def test_servers_join_and_leave_and_are_renumbered() -> None:
    first = ShardMap.first([4, 1], ["tcp://a:1"])
    joined = first.with_servers(["tcp://a:1", "tcp://b:1", "tcp://c:1"])
    assert joined.version == 2 and set(joined.owner()) == {"tcp://a:1"}
    moved = joined.with_owners({0: "tcp://c:1", 4: "tcp://b:1"})
    assert moved.owner() == ["tcp://c:1", "tcp://a:1", "tcp://a:1", "tcp://a:1", "tcp://b:1"]
    assert joined.changes(moved) == {("tcp://a:1", "tcp://c:1"): [0], ("tcp://a:1", "tcp://b:1"): [4]}
    emptied = moved.with_owners({4: "tcp://c:1"})
    left = emptied.with_servers(["tcp://c:1", "tcp://a:1"])
    assert left.addresses == ("tcp://c:1", "tcp://a:1") and left.version == 5
    assert left.owner() == emptied.owner() and left.number("tcp://b:1") == NO_MEMBER and left.number("tcp://a:1") == 1
    assert ShardMap.from_dict(json.loads(json.dumps(left.to_dict()))) == left


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"addresses": "tcp://a:1"}, "addresses is 'tcp://a:1'"),
        ({"addresses": []}, "expected a list of at least one"),
        ({"addresses": ["tcp://a:1", 1]}, "expected a list of at least one"),
        ({"addresses": ["tcp://a:1", "tcp://a:1"]}, "expected each server once"),
        ({"addresses": ["tcp://a:1", "tcp://b:1"]}, "2 addresses; expected one for each of the bucket map's 1 servers"),
        ({"bucket_map": 3}, "bucket_map"),
        ({"more": 3}, "unknown key 'more'"),
    ],
)
def test_invalid_shard_maps_are_refused(changes: dict[str, Any], found: str) -> None:
    data = ShardMap.first([4], ["tcp://a:1"]).to_dict() | changes
    with pytest.raises(ConfigError, match=found):
        ShardMap.from_dict(data)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"version": 0}, "version is 0"),
        ({"version": 2**32}, "version is 4294967296"),
        ({"num_servers": 65536}, "num_servers is 65536"),
        ({"owners": [[0], ["0"]]}, r"table 1 names server '0'; expected servers 0\.\.1"),
        ({"num_servers": 0}, "num_servers is 0"),
        ({"owners": [[0, 2]]}, r"table 0 names server 2; expected servers 0\.\.1"),
        ({"owners": [[0, -1]]}, "table 0 names server -1"),
        ({"owners": [[]]}, "table 0 names no bucket"),
        ({"owners": 3}, r"owners is 3 \(int\); expected a list"),
        ({"owners": [3]}, r"owners is 3 \(int\); expected a list"),
        ({"owners": [[0.5]]}, r"table 0 names server 0\.5; expected servers 0\.\.1"),
        ({"owner": []}, "unknown key 'owner'"),
    ],
)
def test_invalid_bucket_maps_are_refused(changes: dict[str, Any], found: str) -> None:
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


def test_the_initial_learning_rate_of_ftrl_must_agree() -> None:
    one, other = (Job(tables=(Table("t", dim=1, optimizer=Ftrl(lr=lr)),)) for lr in (0.1, 0.2))
    assert one.differences(other) == ["table 't', optimizer.lr: 0.1 here, 0.2 there"]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Job(tables=()), "tables are \\[\\]"),
        (lambda: Job(tables=(TABLES[0], TABLES[0])), "each with its own name"),
        (lambda: Job(tables=TABLES, seed=-1), "seed is -1"),
        (lambda: Job.from_dict({"tables": {}, "seed": 1}), r"tables is {} \(dict\); expected a list$"),
        (lambda: Job.from_dict({"seed": 1}), "the key 'tables' is missing"),
    ],
)
def test_invalid_jobs_are_refused(make: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        make()
