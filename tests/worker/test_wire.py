"""Rows as scaled fp16 between workers and servers: the bound of core/kernels/fp16_codec.hpp, what is exact, what is
refused; and that training over such a wire stays close to training over one that does not round.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

import satrap.server.server
from bag_oracle import draw_bags, update
from cluster import batch, features, one_table, running_servers, sharded_worker, step_both
from contents import IDS, contents
from loop import DIM, Net, batches, job, rows, train
from satrap import Deployment, Embeddings, _core
from satrap.config.job import Job
from satrap.config.optimizers import Adagrad
from satrap.config.tables import Table
from satrap.errors import ConfigError, InputError
from satrap.rpc import Client, Origin
from satrap.server.protocol import ServerCalls
from satrap.table.engine import native_config
from satrap.table.table_group import TableGroup
from satrap.worker import sharded_rows
from satrap.worker.local_rows import local_worker
from satrap.worker.server_group import ServerGroup
from waiting import DEADLINE_SECONDS

F32 = NDArray[np.float32]
FLOAT16_MOST = 2.0**15  # the halves of a row are at most this large
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def make_split(dims: list[int], *, num_threads: int = 1, simd: str = "auto") -> _core.Split:
    tables = [native_config(Table(f"t{t}", dim=dim, num_buckets=1)) for t, dim in enumerate(dims)]
    return _core.Split(tables, [("f", 0, "sum", False, 0, False, None, False)], num_threads, simd)


def through(dims: list[int], offsets: Any, floats: F32, **options: Any) -> tuple[NDArray[np.uint8], F32]:
    """Return (message, decoded floats)."""
    split = make_split(dims, **options)
    message = np.asarray(split.encode_rows(np.asarray(offsets), floats))
    return message, np.asarray(split.decode_rows(np.asarray(offsets), message))


def parts(message: NDArray[np.uint8], num_rows: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Return exponents and halves, by the layout in core/kernels/fp16_codec.hpp."""
    return message[:num_rows].view(np.int8), message[num_rows + num_rows % 2 :].view(np.float16)


# -- one row -----------------------------------------------------------------------------------------------------------


@given(row=st.lists(finite, min_size=1, max_size=40))
@example(row=[0.0, -0.0])
@example(row=[3.4028234663852886e38, 1.0, -3.4028234663852886e38])
@example(row=[1.401298464324817e-45, -1.1754943508222875e-38])
@example(row=[3e38, 1e-45, 2.0**88])
def test_the_error_of_a_row_is_bounded(row: list[float]) -> None:
    """|decoded - v| <= max(2^-11 |v|, 2^-39 m), so at most 2^-11 m, with m the row's largest magnitude; signs stay.

    The exponent e is floor(log2 m) - 14, or -126 if that is more, so |v| 2^-e < 2^15 for all v, and the scaling is a
    product without rounding where it matters. fp16 has 11 bits down to 2^-14: what is above is off by half of the last,
    2^-11 of itself. Below, numbers are 2^-24 apart, so off by at most 2^-25, which stands for 2^(e - 25) <= 2^-39 m;
    where e is -126, floats are multiples of 2^-23 here, and exact. A largest one that would be rounded to 2^128 is
    rounded down, by less than 2^-11 of itself.
    """
    given = np.array(row, np.float32)
    message, found = through([len(given)], [0, 1], given)
    exponents, halves = parts(message, 1)
    wide, most = given.astype(np.float64), float(np.abs(given).max())
    assert (np.abs(found - wide) <= np.maximum(2.0**-11 * np.abs(wide), 2.0**-39 * most)).all()
    assert (np.signbit(found) == np.signbit(given)).all() and np.isfinite(found).all()
    expected = max(int(np.floor(np.log2(most))) - 14, -126) if most > 0 else -126
    assert exponents.tolist() == [expected] and np.abs(halves).max() <= FLOAT16_MOST
    assert np.array_equal(halves.astype(np.float64) * 2.0**expected, found)


@given(
    halves=st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    power=st.integers(-126, 112),
)
def test_fp16_values_are_exact(halves: list[float], power: int) -> None:
    """A row of fp16 numbers times one power of two is unchanged: they have 11 bits, and the row's exponent gives each
    of them no fewer than fp16 had. An exception is a number that a float cannot hold."""
    wide = np.array(halves, np.float64) * 2.0**power
    assume(np.abs(wide).max() <= float(np.finfo(np.float32).max))
    given = wide.astype(np.float32)
    assume(np.array_equal(given, wide))
    # another scale than the row's may hold values that the row's rounds to 0: those of 2^-39 m and less
    assume(all(x == 0 or abs(x) >= 2.0**-28 * np.abs(wide).max() for x in wide))
    assert through([len(given)], [0, 1], given)[1].tobytes() == given.tobytes()


def test_nonfinite_values_stay_and_affect_no_neighbour() -> None:
    given = np.array([np.inf, -np.inf, np.nan, 1.5, -0.0, 1000.0], np.float32)
    message, found = through([6], [0, 1], given)
    assert np.array_equal(found, given, equal_nan=True) and np.signbit(found[4])
    assert parts(message, 1)[0].tolist() == [9 - 14], "that of the largest finite value"


def test_a_caller_that_flushes_subnormal_numbers_changes_nothing() -> None:
    given = np.ldexp(np.linspace(-1, 1, 1200, dtype=np.float32), -130)
    wanted = [each.tobytes() for each in through([3], [0, 400], given)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine flushes nothing")
    try:
        found = [each.tobytes() for each in through([3], [0, 400], given)]
    finally:
        torch.set_flush_denormal(False)
    assert found == wanted and wanted[1] != bytes(len(wanted[1]))


# -- messages ----------------------------------------------------------------------------------------------------------


@given(
    tables=st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0, 1, 2, 7, 300, 600])), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_paths_and_threads_agree_bit_for_bit(tables: list[tuple[int, int]], seed: int) -> None:
    """An engine's messages equal a split's, too; the size is n + n % 2 + 2 for each value."""
    rng = np.random.default_rng(seed)
    dims, counts = [dim for dim, _ in tables], [count for _, count in tables]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    num_floats = sum(dim * count for dim, count in tables)
    floats = rng.integers(0, 2**32, num_floats, dtype=np.uint32).view(np.float32)  # any bits
    found = [
        tuple(each.tobytes() for each in through(dims, offsets, floats, num_threads=threads, simd=simd))
        for simd in _core.simd_paths()
        for threads in (1, 3)
    ]
    places = TableGroup([Table(f"t{t}", dim=dim) for t, dim in enumerate(dims)], num_threads=2)
    engine = next(iter(places.values()))._engine
    message = np.asarray(engine.encode_rows(offsets, floats))
    found.append((message.tobytes(), np.asarray(engine.decode_rows(offsets, message)).tobytes()))
    assert all(each == found[0] for each in found)
    assert len(message) == offsets[-1] + offsets[-1] % 2 + 2 * num_floats
    apart = np.concatenate([np.zeros(1, np.uint8), message])[1:]  # at an odd address
    assert np.asarray(engine.decode_rows(offsets, apart)).tobytes() == found[0][1]


def test_other_sizes_offsets_and_exponents_are_refused() -> None:
    split = make_split([2, 3])
    offsets, floats = np.array([0, 2, 3]), np.ones(7, np.float32)
    message = np.asarray(split.encode_rows(offsets, floats))
    assert len(message) == 4 + 14 and message[3] == 0
    for bad in (message[:-1], message[:-2], np.concatenate([message, message[:1]]), message[:0]):
        with pytest.raises(InputError, match=f"message holds {len(bad)} elements, expected 18"):
            split.decode_rows(offsets, bad)
    with pytest.raises(InputError, match="rows holds 6 elements, expected 7"):
        split.encode_rows(offsets, floats[1:])
    for cuts, words in (
        ([0, 3], "offsets holds 2 elements, expected 3"),
        ([1, 2, 3], "offsets run from 1 to 3; expected 0 to the number of ids, 3"),
        ([0, 3, 2], "offsets fall from 3 to 2 at table 1"),
        ([0, 0, 2**30], "a call of 1073741824 ids"),
    ):
        with pytest.raises(InputError, match=words):
            split.decode_rows(np.array(cuts), message)
    for exponent in (-128, -127, 114):
        wrong = message.copy()
        wrong[1] = np.uint8(exponent % 256)
        with pytest.raises(InputError, match=rf"row 1 of 3 has the exponent {exponent}, expected -126\.\.113"):
            split.decode_rows(offsets, wrong)


def test_runs_of_every_dim_that_a_table_may_have() -> None:
    split, offsets = make_split([2]), np.array([0, 2])
    rows = np.ones(2 * 65536, np.float32)
    dims = np.array([65536], np.uint32)
    message = np.asarray(split.encode_runs(dims, offsets, rows))
    np.testing.assert_array_equal(split.decode_runs(dims, offsets, message), rows)
    for dim in (0, 65537):
        with pytest.raises(InputError, match=f"dims has {dim}; expected 1 to 65536"):
            split.encode_runs(np.array([dim], np.uint32), offsets, rows)


# -- servers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_lookup_is_rounded_and_a_read_is_exact(num_servers: int, rng: np.random.Generator) -> None:
    """In training and in evaluation, pooled and not; `read` never rounds."""
    local = local_worker(features(), num_threads=1)
    with running_servers(num_servers) as services:
        addresses = [service.address for service in services]
        with sharded_worker(features(), addresses, wire="float16") as worker:
            inputs = draw_bags(rng, local.features, 50).inputs()
            for options in ({"step": 1}, {"train": False}):
                exact, near = (each.lookup(inputs, **options) for each in (local, worker))
                assert not np.array_equal(exact.block, near.block)
                np.testing.assert_allclose(near.block, exact.block, rtol=0, atol=0.05)
                for name, found in near.sequences.items():
                    most = np.abs(exact.sequences[name]).max(axis=-1, keepdims=True)
                    assert (np.abs(found - exact.sequences[name]) <= 2.0**-11 * most).all()
            assert contents(worker) == contents(local), "a lookup changes nothing, and read does not round"
            for name, table in worker.tables.items():
                stored = table.read(IDS)
                found = table.lookup(IDS, train=False)[stored.present]
                assert np.array_equal(found, stored.values[stored.present]), name


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_ids_replace_a_ticket_that_the_server_dropped(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of few bits are exact on both wires: the rows equal those of a local worker."""
    monkeypatch.setattr(satrap.server.server, "MAX_TICKETS", 1)
    local = local_worker(one_table(), num_threads=1)
    with (
        running_servers(2) as services,
        sharded_worker(one_table(), [each.address for each in services], wire=wire) as worker,
    ):
        for each in (local, worker):
            looked = [each.lookup(batch(range(k, k + 20)), step=k) for k in (1, 2, 3)]
            for k, one in enumerate(looked, 1):
                gradients = (np.arange(40, dtype=np.float32) - 20).reshape(20, 2) * np.float32(0.125)
                update(each, one, gradients, step=k)
        assert contents(worker) == contents(local)


def test_the_number_of_servers_changes_no_bit(rng: np.random.Generator) -> None:
    """Rows do not depend on one another."""
    with (
        running_servers(1) as one,
        running_servers(3) as three,
        sharded_worker(features(), [each.address for each in one], wire="float16") as first,
        sharded_worker(features(), [each.address for each in three], wire="float16") as second,
    ):
        for step in range(1, 5):
            step_both([first, second], rng, [draw_bags(rng, first.features, 30) for _ in range(1 + step % 2)], step)
        assert contents(first) == contents(second)


def test_each_trainer_has_the_wire_that_it_chose() -> None:
    """Two trainers of one server alternate; the rounding of one does not affect the other."""
    with running_servers(1) as services, sharded_worker(one_table(), [services[0].address]) as plain:
        halves = ServerGroup(
            plain.servers.job, plain.servers.addresses, trainer=1, attempt=plain.servers.attempt, wire="float16"
        )
        coded = sharded_rows.sharded_worker(one_table(), halves, num_threads=1)
        looked = [each.lookup(batch(range(20)), step=1) for each in (plain, coded)]
        exact = plain.tables["t"].read(np.arange(20)).values
        assert np.array_equal(looked[0].block, exact) and not np.array_equal(looked[1].block, exact)
        for each, one in zip((plain, coded), looked, strict=True):
            update(each, one, np.ones((20, 2), np.float32), step=1)
        assert plain.tables["t"].stats()["updated"] == 40
        halves.close()


def test_trainers_of_one_step_may_differ_in_their_wires() -> None:
    """Parts are decoded before they are summed: with gradients of few bits, the result equals one local worker's."""
    local = local_worker(one_table(), num_threads=1)
    inputs = [batch(range(k, k + 20)) for k in (0, 10)]
    gradients = [(np.arange(40, dtype=np.float32) - k).reshape(20, 2) * np.float32(0.125) for k in (20, 3)]
    looked = [local.lookup(each, step=1) for each in inputs]
    local.update([each.ticket for each in looked if each.ticket], gradients, step=1)
    with running_servers(2) as services:
        addresses = [service.address for service in services]
        with (
            sharded_worker(one_table(), addresses, barrier_size=2) as plain,
            sharded_worker(
                one_table(), addresses, barrier_size=2, trainer=1, attempt=plain.servers.attempt, wire="float16"
            ) as coded,
        ):
            looked = [each.lookup(one, step=1) for each, one in zip((plain, coded), inputs, strict=True)]
            with ThreadPoolExecutor(1) as other:  # the first part is answered when the second has arrived
                waits = other.submit(update, coded, looked[1], gradients[1], step=1)
                update(plain, looked[0], gradients[0], step=1)
                waits.result(DEADLINE_SECONDS)
            assert contents(plain) == contents(local)


def test_invalid_wire_calls_are_refused() -> None:
    with (
        running_servers(1) as services,
        sharded_worker(one_table(), [services[0].address]),
        Client(ServerCalls, services[0].address) as client,
    ):
        at, cuts = Origin(attempt=1, step=1, map_version=1), np.array([0, 4])
        ids, ones, coded = np.arange(4, dtype=np.uint64), np.ones(8, np.float32), np.zeros(20, np.uint8)
        with pytest.raises(ConfigError, match=r"wire is 'bfloat16'.*expected one of 'float32', 'float16'"):
            client.call.lookup(at, ids, cuts, 1, True, 0, "bfloat16")
        for gradients, also in ((ones, coded), (None, None)):
            with pytest.raises(InputError, match="one of the two forms, found both or none"):
                client.call.update(at, 0, ids, cuts, gradients, [0.1], 0, also)
        for bad in (coded[1:], np.append(coded, coded[:1])):
            with pytest.raises(InputError, match=f"message holds {len(bad)} elements, expected 20"):
                client.call.update(at, 0, ids, cuts, None, [0.1], 0, bad)
        with pytest.raises(InputError):
            client.call.update(at, 0, ids, np.array([0, 3]), None, [0.1], 0, coded[:16])
        client.call.lookup(at, ids, cuts, 1, True, 7, "float16")
        with pytest.raises(InputError, match="message holds 18 elements, expected 20"):
            client.call.update(at, 7, ids[:0], cuts[:0], None, [0.1], 0, coded[2:])
        assert client.call.stats(at, 0)["updated"] == 0


@pytest.mark.parametrize("wire", ["fp16", "FLOAT16", "", None, 16])
def test_other_wires_are_refused(wire: Any) -> None:
    with pytest.raises(ConfigError, match=r"ServerGroup: wire is .*; expected one of 'float32', 'float16'"):
        ServerGroup(Job(tables=one_table().tables), ["tcp://127.0.0.1:1"], wire=wire)
    with pytest.raises(ConfigError, match="no servers"):
        job(wire="float16")


# -- training ----------------------------------------------------------------------------------------------------------


def trained(wire: Literal["float32", "float16"], **options: Any) -> tuple[list[float], dict[str, F32]]:
    """Return (losses, rows) of a run whose labels can be memorized."""
    torch.manual_seed(0)
    item = Table("item", dim=DIM, optimizer=Adagrad(lr=0.1))
    user = Table("user", dim=DIM, optimizer=Adagrad(lr=0.1))
    with running_servers(2) as services:
        embeddings = Embeddings(
            {"user": user, "item": item, "history": item.bag("mean")},
            deployment=Deployment([each.address for each in services], wire=wire),
            **options,
        )
        model = Net()
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            losses = train(embeddings, model, optimizer, batches(4) * 40)
            embeddings.drain()
            return losses, rows(embeddings)
        finally:
            assert embeddings.worker.servers is not None
            embeddings.worker.servers.close()


@pytest.mark.parametrize("options", [{}, {"staleness": 2, "deterministic": True}], ids=["sync", "stale"])
def test_a_run_stays_close_to_one_that_does_not_round(options: dict[str, Any]) -> None:
    """Each step rounds rows and gradients by at most 2^-11 of their rows' largest value; what 160 steps of descent
    leave of that is at most one such rounding (a fifth of one when this was written)."""
    exact_losses, exact = trained("float32", **options)
    losses, found = trained("float16", **options)
    assert losses != exact_losses
    assert np.abs(np.array(losses) - exact_losses).max() < 1e-3
    for name, values in exact.items():
        assert np.abs(values - found[name]).max() <= 2.0**-11 * np.abs(values).max(), name
    assert np.mean(losses[-4:]) < 0.2 * np.mean(losses[:4])
