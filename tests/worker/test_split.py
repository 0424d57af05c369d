"""A split with several servers against one worker that has all rows: the same bits in lookups, and in every row after.

Refusals, tickets, memory and threads are the subject of worker/test_split_calls.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from bag_oracle import UNIVERSE, draw_bags, draw_gradients
from satrap import _core
from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adam, RowWiseAdagrad
from satrap.config.tables import Feature, Normal, Table
from satrap.worker.local_rows import local_worker
from satrap.worker.worker import LookupResult
from splits import BIG_FEATURES, F32, SEED, Cluster, big_inputs, draw_owners, given_gradients


def assert_same_rows(cluster: Cluster, worker: Any, ids: NDArray[np.uint64]) -> None:
    """Assert that every row is only at its owner, and equals the worker's."""
    begin = 0
    for t, (name, store) in enumerate(worker.tables.items()):
        table = store.table
        wanted, owners = store.read(ids), cluster.owners[begin : begin + table.resolved_num_buckets]
        owner = owners[_core.bucket_of(ids, table.resolved_num_buckets)]
        begin += table.resolved_num_buckets
        counted = dict.fromkeys(("rows", "lookups", "hits", "inserted", "updated", "not_applied_absent"), 0)
        for s, server in enumerate(cluster.servers):
            found, own = server[name].read(ids), owner == s
            assert np.array_equal(found.present, wanted.present & own)
            assert found.values[own].tobytes() == wanted.values[own].tobytes()
            assert found.state[own].tobytes() == wanted.state[own].tobytes()
            server[name].check()
            stats = server[name].stats()
            assert stats["skipped"] == 0
            counted = {key: count + stats[key] for key, count in counted.items()}
        stats = store.stats()
        assert counted == {key: stats[key] for key in counted}
        assert cluster.skipped[t] == stats["skipped"]


def assert_same_lookup(looked: LookupResult, block: F32, sequences: list[F32]) -> None:
    assert looked.block.tobytes() == block.tobytes()
    for wanted, found in zip(looked.sequences.values(), sequences, strict=True):
        assert wanted.tobytes() == found.tobytes()


poolings = st.sampled_from(["sum", "mean", "sqrtn"])
some_tables = [
    Table("a", dim=3, optimizer=SGD(lr=0.5, momentum=0.9), initial=Normal(std=0.5), num_buckets=2),
    Table("b", dim=16, optimizer=Adam(), initial=Normal(std=0.5), num_buckets=4, frozen=[0, 3, 7, 2**63]),
    Table("c", dim=9, optimizer=RowWiseAdagrad(), initial=Normal(std=0.5), num_buckets=1, dtype="float16"),
    Table("d", dim=4, optimizer=Adam(), initial=Normal(std=0.5), num_buckets=2, frozen=range(2, 2**63)),
    Table("e", dim=4, initial=Normal(std=0.5), num_buckets=2, frozen=True),
]
some_features = st.one_of(
    st.builds(Feature, st.sampled_from(some_tables), poolings, weighted=st.booleans()),
    st.builds(Table.sequence, st.sampled_from(some_tables), st.integers(1, 4)),
)


@given(
    features=st.lists(some_features, min_size=1, max_size=6),
    batch_size=st.integers(0, 9),
    num_servers=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    threads=st.integers(1, 2),
    simd=st.sampled_from(_core.simd_paths()),
    missing=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    nonfinite=st.booleans(),
    draw=st.integers(0, 2**32 - 1),
)
def test_equals_one_worker(
    features: list[Feature],
    batch_size: int,
    num_servers: int,
    accumulate: int,
    threads: int,
    simd: str,
    missing: float,
    nonfinite: bool,
    draw: int,
) -> None:
    rng = np.random.default_rng(draw)
    policy: Any = "skip" if nonfinite else "raise"
    tables = {table.name: replace(table, on_nonfinite=policy) for table in some_tables}
    described = Features({f"f{i}": replace(each, table=tables[each.table.name]) for i, each in enumerate(features)})
    worker = local_worker(described, seed=SEED, num_threads=1)
    cluster = Cluster(described, draw_owners(rng, described, num_servers), num_servers, num_threads=threads, simd=simd)
    cut = dict.fromkeys(worker.truncated, 0)
    for step in range(1, 4):
        looked, tickets, gradients = [], [], []
        for _ in range(accumulate):
            single = bool(rng.integers(2))
            bags = draw_bags(rng, described, batch_size, single=single)
            inputs = bags.inputs(offsets=not single)
            looked.append(worker.lookup(inputs, step=step))
            ticket, block, sequences = cluster.lookup(inputs, step, shift=int(rng.integers(2)))
            assert_same_lookup(looked[-1], block, sequences)
            assert not ticket.used and ticket.batch_size == batch_size
            cut = {name: count + cut[name] for name, count in bags.cut().items()}
            tickets.append(ticket)
            of_block, of_sequences = draw_gradients(rng, looked[-1])
            for floats in (of_block, *of_sequences.values()):
                if nonfinite and floats.size and rng.random() < 0.5:
                    floats.flat[rng.integers(floats.size, size=2)] = [np.nan, 3e38]
            kept = {name: each for name, each in of_sequences.items() if rng.random() >= missing}
            gradients.append((of_block if rng.random() >= missing else None, kept))
        scale = float(rng.choice([1.0, 0.3]))
        worker.update(
            [each.ticket for each in looked if each.ticket],
            [block for block, _ in gradients],
            [each for _, each in gradients],
            step=step,
            scale=scale,
        )
        if rng.random() < 0.3:
            cluster.owners = cluster.owners.copy()  # another array with equal owners
        sums = cluster.update(tickets, [given_gradients(described, *each) for each in gradients], scale, step)
        assert all(ticket.used for ticket in tickets)
        if accumulate == 1 and missing == 0.0 and not nonfinite:
            assert sums.same_ids or any(table.frozen for table in described.tables)
        for server in range(num_servers):
            ids, offsets = sums.ids(server).tolist(), sums.offsets(server)
            for t, table in enumerate(described.tables):
                assert not any(id_ in table.frozen_ids for id_ in ids[offsets[t] : offsets[t + 1]])
        assert_same_rows(cluster, worker, UNIVERSE)
    assert dict(zip(cut, cluster.split.truncated, strict=True)) == cut == worker.truncated


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("simd", _core.simd_paths())
def test_big_batches_on_any_path(num_threads: int, simd: str, rng: np.random.Generator) -> None:
    worker = local_worker(BIG_FEATURES, seed=SEED, num_threads=1)
    cluster = Cluster(BIG_FEATURES, draw_owners(rng, BIG_FEATURES, 3), 3, num_threads=num_threads, simd=simd)
    assert (cluster.split.num_threads, cluster.split.simd) == (num_threads, simd)
    everyone = np.arange(20_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for step, accumulate in enumerate((1, 2, 1), start=1):
        inputs = [big_inputs(rng) for _ in range(accumulate)]
        looked = [worker.lookup(each, step=step) for each in inputs]
        found = [cluster.lookup(each, step) for each in inputs]
        for one, (_, block, sequences) in zip(looked, found, strict=True):
            assert_same_lookup(one, block, sequences)
        gradients = [draw_gradients(rng, each) for each in looked]
        tickets = [each.ticket for each in looked if each.ticket]
        worker.update(tickets, [b for b, _ in gradients], [s for _, s in gradients], step=step, scale=0.5)
        given = [given_gradients(BIG_FEATURES, *each) for each in gradients]
        assert cluster.update([ticket for ticket, _, _ in found], given, 0.5, step).same_ids == (accumulate == 1)
        assert_same_rows(cluster, worker, everyone)
