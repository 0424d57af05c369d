"""Calls of a live service: values, errors, deadlines, duplicates, Futures, threads, forks and shutdown."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forks import in_fork
from logged import logged
from rpc_parts import (
    ANYWHERE,
    INTS,
    JSON,
    REALS,
    Calls,
    Served,
    arrays,
    raw_peer,
    received,
    request,
    same,
    server_process,
)
from satrap import errors
from satrap.errors import ConfigError, DeadlineError, ForkError, InputError, NonFiniteError, RpcError
from satrap.rpc import Client, Limits, Origin, Service
from satrap.rpc.header import Kind
from waiting import DEADLINE_SECONDS, wait_until


@pytest.fixture(scope="module")
def shared() -> Iterator[Client[Calls]]:
    """A client of a service that all tests of this file share."""
    with Service(Served(), Calls, ANYWHERE) as service, Client(Calls, service.address, deadline=60) as client:
        yield client


@given(
    st.builds(Origin, attempt=st.integers(0, 2**32 - 1), step=st.integers(0, 9)),
    st.tuples(arrays(np.uint64), st.none() | arrays(np.float32), arrays(np.bool_), arrays(np.uint32)),
    st.tuples(arrays(np.int64), arrays(np.uint8)),
    st.tuples(INTS, REALS, st.booleans(), st.text(), st.none() | st.text(), st.none() | st.lists(INTS, max_size=3)),
    st.none() | st.dictionaries(st.text(), JSON, max_size=3),
)
def test_every_type_makes_a_round_trip(
    shared: Client[Calls], origin: Origin, some: Any, more: Any, plain: Any, options: Any
) -> None:
    fields, *values, back = shared.call.echo(origin, *some, *more, *plain, options=options)
    assert Origin(**fields) == origin
    assert all(map(same, values, (*some, *more, *plain)))
    assert same(back, options)


def test_a_client_interrupted_while_it_connects_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(address: str) -> bool:
        raise KeyboardInterrupt

    with Service(Served(), Calls, ANYWHERE) as service:
        client = Client(Calls, service.address)
        monkeypatch.setattr("satrap.rpc.channel.is_unix", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:  # its frames refer to the half-created client
            client.call.nothing()
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(DEADLINE_SECONDS)
        assert not closing.is_alive() and caught.value is not None


def test_large_arrays_are_read_only_views(shared: Client[Calls]) -> None:
    ids = np.random.default_rng(1).integers(0, 2**64, 500_000, dtype=np.uint64)
    doubled = shared.call.double(ids)
    assert np.array_equal(doubled, 2 * ids) and doubled.base is not None
    with pytest.raises(ValueError, match="read-only"):
        doubled[0] = 1


def test_exceptions_keep_their_class_at_the_caller(shared: Client[Calls]) -> None:
    for name in sorted(name for name, value in vars(errors).items() if isinstance(value, type)):
        with pytest.raises(getattr(errors, name), match="item: id 7") as caught:
            shared.call.fail(name, "item: id 7")
        assert type(caught.value) is getattr(errors, name)
        assert caught.value.__notes__ == [f"raised by Calls.fail at {shared.address}"]
    assert issubclass(NonFiniteError, InputError)
    for name in ("KeyError", "SystemExit"):
        with pytest.raises(RpcError, match=rf"^Calls\.fail at {shared.address} failed with {name}: .*gone") as caught:
            shared.call.fail(name, "gone")
        assert type(caught.value) is RpcError


def test_arguments_that_cannot_be_sent_fail_at_the_caller(shared: Client[Calls]) -> None:
    with pytest.raises(InputError, match=r"Calls\.double: ids is int64 of shape \(2,\); expected uint64\[\]"):
        shared.call.double(np.zeros(2, np.int64))
    with pytest.raises(InputError, match="no method 'duble'; the nearest known one is 'double'"):
        shared.start("duble")
    for seconds in (0.0, 1e9):
        with pytest.raises(ConfigError, match=r"deadline is .*; expected 0\.001 to 4294967 seconds"):
            shared.with_deadline(seconds)


def test_one_thread_starts_many_calls_and_collects_their_results() -> None:
    with (
        Service(Served(3), Calls, ANYWHERE) as one,
        Service(Served(), Calls, ANYWHERE) as two,
        Client(Calls, one.address) as first,
        Client(Calls, two.address) as second,
    ):
        meeting = [first.start("meet", number, deadline=DEADLINE_SECONDS) for number in range(3)]
        others = [second.start("add", 1, deadline=DEADLINE_SECONDS) for _ in range(50)]
        assert sorted(each.result() for each in reversed(others)) == list(range(1, 51))
        assert len({each.result() for each in meeting}) == 1
        assert meeting[0].result() == meeting[1].result(), "a result can be read again"
        assert one.counts()["arrived"] == 3


# -- time --------------------------------------------------------------------------------------------------------------


def test_the_error_of_a_deadline_without_a_connection() -> None:
    with Service(Served(), Calls, ANYWHERE) as service:
        address = service.address
    with Client(Calls, address) as client, pytest.raises(DeadlineError) as caught:
        client.with_deadline(0.2).add(1)
    assert str(caught.value).startswith(f"add at {address}: no connection within 0.2 s; is a server running")


def test_a_long_wait_for_a_connection_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.rpc.channel._WARN_SECONDS", 0.1)
    monkeypatch.setattr("satrap.rpc.client._CONNECT_SECONDS", 0.1)
    with Service(Served(), Calls, ANYWHERE) as service:
        address = service.address
    message = r"no connection within 0\.1 s; is a server running there, .* It is waited for until 0\.5 s have passed"
    with (
        Client(Calls, address) as client,
        logged("satrap.rpc", match=message) as warned,
        pytest.raises(DeadlineError, match=r"no connection within 0\.5 s"),
    ):
        client.with_deadline(0.5).add(1)
    assert len(warned) == 1


def test_a_connection_lost_during_a_call_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.rpc.channel._WARN_SECONDS", 0.2)
    with server_process(ANYWHERE) as (process, address), Client(Calls, address, retry_seconds=0.05) as client:
        pending = client.start("wait", 1, deadline=3.0)
        assert not pending.wait(0.2)
        process.kill()
        message = f"wait at {address}: the connection was lost. A new one is waited for until 3 s have passed"
        with logged("satrap.rpc", match=message) as warned, pytest.raises(DeadlineError, match="was a connection"):
            pending.result()
        assert len(warned) == 1


def test_a_peer_that_answers_again_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.rpc.channel._WARN_SECONDS", 0.2)
    with server_process(ANYWHERE) as (process, address), Client(Calls, address, retry_seconds=0.05) as client:
        pending = client.start("wait", 1, deadline=DEADLINE_SECONDS)
        assert not pending.wait(0.2)
        process.kill()
        with logged("satrap.rpc", match=f"{address} answers again", level=logging.INFO) as records:
            wait_until(lambda: not pending.wait(0.1) and records)
            served = Served()
            served.go.set()
            with Service(served, Calls, address):
                assert pending.result() == 1
        assert [each.event for each in records] == ["peer_lost", "peer_back"]  # type: ignore[attr-defined]


def test_the_error_of_a_deadline_with_a_connection() -> None:
    served = Served()
    with Service(served, Calls, ANYWHERE, num_threads=1) as service, Client(Calls, service.address) as client:
        assert client.with_deadline(DEADLINE_SECONDS).add(0) == 0
        running = client.start("wait", 5, deadline=DEADLINE_SECONDS)
        wait_until(lambda: service.counts()["running"] == 1)
        with pytest.raises(
            DeadlineError,
            match=r"there was a connection, but no answer within 0\.1 s \(sent 1 times\); see in its log what",
        ):
            client.with_deadline(0.1).add(100)
        wait_until(lambda: service.counts()["queued"] == 1)  # its deadline counts from here
        expired = time.monotonic() + 0.1
        wait_until(lambda: time.monotonic() > expired)
        served.go.set()
        assert running.result() == 5
        wait_until(lambda: service.counts()["expired"] == 1)
        assert served.total == 0, "its deadline had passed"


def test_a_patient_call_waits_while_the_server_reports_it_as_running() -> None:
    """Its deadline passes many times while the server reports it as running. A killed server ends it."""
    with (
        server_process(ANYWHERE) as (process, address),
        Client(Calls, address, deadline=DEADLINE_SECONDS, retry_seconds=0.05) as client,
    ):
        assert client.call.add(1) == 1
        began = time.monotonic()
        working = client.start("wait", 1, deadline=1.5, patient=True)
        assert not working.wait(4.0) and time.monotonic() - began > 2 * 1.5
        process.kill()
        with pytest.raises(
            DeadlineError, match=rf"wait at {address}: .*nothing was received for 1\.5 s .*reported as running"
        ):
            working.result()
        impatient = client.start("wait", 1, deadline=0.2)
        assert impatient.wait(DEADLINE_SECONDS)
        with pytest.raises(DeadlineError, match=r"within 0\.2 s"):
            impatient.result()


def test_a_patient_call_that_is_answered() -> None:
    served = Served()
    with (
        Service(served, Calls, ANYWHERE) as service,
        Client(Calls, service.address, deadline=1.0, retry_seconds=0.05) as client,
    ):
        pending = client.start("wait", 7, patient=True)
        assert not pending.wait(1.5)
        served.go.set()
        assert pending.wait(DEADLINE_SECONDS) and pending.result() == 7
        assert served.num_runs == 1


def test_a_server_that_starts_late_and_one_that_was_killed() -> None:
    """The server is killed while the call runs, and another one at the same address answers it."""
    with (
        server_process(ANYWHERE) as (first, address),
        Client(Calls, address, deadline=DEADLINE_SECONDS, retry_seconds=0.2) as client,
    ):
        assert client.call.add(1) == 1
        lost = client.start("wait", 7)
        first.kill()
        first.wait(DEADLINE_SECONDS)
        served = Served()
        served.go.set()
        with Service(served, Calls, address):
            assert lost.result() == 7
            assert client.call.add(1) == 1


# -- at least once -----------------------------------------------------------------------------------------------------


def test_a_duplicate_of_an_open_call_runs_once_and_is_answered_on_its_newest_route() -> None:
    served = Served()
    with (
        Service(served, Calls, ANYWHERE, num_threads=1) as service,
        raw_peer(service.address) as old,
        raw_peer(service.address) as new,
    ):
        for call in (1, 2):  # the first runs, the second is queued
            old.send_multipart(request("wait", call, client=9, call=call))
        wait_until(lambda: (service.counts()["running"], service.counts()["queued"]) == (1, 1))
        for call in (1, 2, 2, 1):
            new.send_multipart(request("wait", call, client=9, call=call))
        for call in (1, 2, 2, 1):  # each duplicate gets the reply "working"
            header, frames = received(new)
            assert (header.kind, header.call, frames) == (Kind.WORKING, call, [])
        assert service.counts()["duplicates"] == 4
        served.go.set()
        for call in (1, 2):
            header, frames = received(new)
            assert (header.call, frames) == (call, [b"[%d]" % call])
        assert served.num_runs == 2
        assert not old.poll(0)
        new.send_multipart(request("wait", 1, client=9, call=1))
        assert received(new)[0].kind == Kind.REPLY
        assert served.num_runs == 3, "answered calls are forgotten"


def test_a_call_that_is_retried_gets_one_answer() -> None:
    served = Served()
    with (
        Service(served, Calls, ANYWHERE) as service,
        Client(Calls, service.address, deadline=DEADLINE_SECONDS, retry_seconds=0.02) as client,
    ):
        pending = client.start("wait", 3)

        def let_go() -> None:
            wait_until(lambda: service.counts()["duplicates"] >= 3)
            served.go.set()

        helper = threading.Thread(target=let_go)
        helper.start()
        assert pending.result() == 3
        helper.join()
        assert served.num_runs == 1
        for _ in range(20):  # late answers are ignored
            client.call.nothing()


def test_no_thread_waits_for_a_future() -> None:
    served = Served(num_meeting=40)
    with (
        Service(served, Calls, ANYWHERE, num_threads=1) as service,
        Client(Calls, service.address, deadline=DEADLINE_SECONDS, retry_seconds=0.05) as client,
    ):
        waiting = [client.start("meet", 1) for _ in range(39)]
        assert client.call.add(1) == 1
        wait_until(lambda: service.counts()["running"] == 39)
        assert client.call.meet(2) == 2
        assert {each.result() for each in waiting} == {2}


@pytest.mark.parametrize("how", ["raises", "cancelled", "wrong", "done"])
def test_futures_that_fail(how: str) -> None:
    class Ends(Served):
        def meet(self, number: int) -> Future[int]:
            future: Future[Any] = Future()
            if how == "cancelled":
                future.cancel()
            elif how == "raises":
                future.set_exception(errors.CapacityError("full"))
            else:
                future.set_result("x" if how == "wrong" else 4)
            return future

    with Service(Ends(), Calls, ANYWHERE) as service, Client(Calls, service.address) as client:
        if how == "done":
            assert client.call.meet(1) == 4
        else:
            error = {"raises": errors.CapacityError, "cancelled": RpcError, "wrong": RpcError}[how]
            with pytest.raises(error, match=r"full|was cancelled|the result is 'x' \(str\); expected int"):
                client.call.meet(1)


# -- threads and processes ---------------------------------------------------------------------------------------------


def test_many_threads_share_one_client() -> None:
    served = Served()
    with (
        Service(served, Calls, ANYWHERE, num_threads=4) as service,
        Client(Calls, service.address, deadline=DEADLINE_SECONDS) as client,
    ):

        def work(number: int) -> None:
            ids = np.arange(number * 1000, dtype=np.uint64)
            for _ in range(20):
                assert np.array_equal(client.call.double(ids), 2 * ids)
                client.call.add(1)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        assert served.total == 320
        wait_until(lambda: not client._channels._open)  # the channels of ended threads are closed


@pytest.mark.parametrize("num_threads", [1, 3])
def test_no_call_is_overlooked(num_threads: int) -> None:
    """In any order of requests, ends of methods and ends of Futures, no call has to be sent again."""
    settlers = ThreadPoolExecutor(2)

    class Mixed(Served):
        def meet(self, amount: int) -> Future[int]:
            return settlers.submit(lambda: amount)

    with (
        settlers,
        Service(Mixed(), Calls, ANYWHERE, num_threads=num_threads) as service,
        Client(Calls, service.address, deadline=30, retry_seconds=60) as client,
    ):

        def work(number: int) -> None:
            for i in range(60):
                pending = [client.start("meet" if (i + k) % 3 else "add", k) for k in range(number % 4 + 1)]
                for each in pending:
                    each.result()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        counts = service.counts()
        assert counts["arrived"] == counts["replied"] == 60 * 2 * (1 + 2 + 3 + 4)


def test_a_pending_call_stays_in_its_thread(shared: Client[Calls]) -> None:
    pending = shared.start("nothing")
    with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="another thread than start"):
        pool.submit(pending.result).result()
    assert pending.result() is None


def test_a_fork_cannot_use_a_client_and_the_parent_continues() -> None:
    with Service(Served(), Calls, ANYWHERE) as service, Client(Calls, service.address) as client:
        pending = client.start("add", 1)

        def body() -> None:
            with pytest.raises(ForkError, match="its fork"):
                client.call.add(1)
            with pytest.raises(ForkError, match="its fork"):
                pending.result()
            client.close()
            service.close()
            with Client(Calls, service.address) as own:
                assert own.with_deadline(DEADLINE_SECONDS).add(1) > 0

        in_fork(body)
        assert pending.result() > 0
        assert client.call.add(1) == 3


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_closed_client() -> None:
    served = Served()
    with Service(served, Calls, ANYWHERE) as service:
        client = Client(Calls, service.address, deadline=DEADLINE_SECONDS)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(client.call.wait, 1)
            wait_until(lambda: service.counts()["running"] == 1)
            client.close()
            with pytest.raises(RpcError, match="is closed; create another"):
                waits.result()
        client.close()
        with pytest.raises(RpcError, match="is closed; create another"):
            client.call.add(1)
        served.go.set()


def test_close_finishes_running_calls_and_drops_the_others() -> None:
    served = Served()
    service = Service(served, Calls, ANYWHERE, num_threads=1)
    with Client(Calls, service.address, deadline=DEADLINE_SECONDS, retry_seconds=0.2) as client:
        running, queued = client.start("wait", 1), client.start("add", 1)
        wait_until(lambda: (service.counts()["running"], service.counts()["queued"]) == (1, 1))
        closing = threading.Thread(target=service.close)
        closing.start()
        wait_until(lambda: service.counts()["dropped"] == 1)
        served.go.set()
        closing.join()
        counts = service.counts()
        assert (counts["replied"], counts["dropped"], served.total) == (1, 1, 0)
        again = Service(served, Calls, service.address)
        assert running.result() == 1
        assert queued.result() == 1, "the next server answers it"
        again.close()
        again.close()


def test_close_does_not_wait_for_a_future() -> None:
    service = Service(Served(), Calls, ANYWHERE)
    with Client(Calls, service.address) as client:
        pending = client.start("meet", 1, deadline=0.5)
        wait_until(lambda: service.counts()["running"] == 1)
        service.close()
        assert service.counts()["dropped"] == 1
        with pytest.raises(DeadlineError):
            pending.result()


def test_close_reports_a_method_that_does_not_end() -> None:
    served, before = Served(), set(threading.enumerate())
    service = Service(served, Calls, ANYWHERE, close_seconds=0.05)
    with Client(Calls, service.address) as client:
        pending = client.start("wait", 1, deadline=DEADLINE_SECONDS)
        wait_until(lambda: service.counts()["running"] == 1)
        with pytest.raises(RpcError, match=r"1 methods still ran 0\.05 s after close\(\)"):
            service.close()
        del pending
    served.go.set()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_an_object_that_lacks_a_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="object has no method add, double, echo, fail, meet, nothing, wait"):
        Service(object(), Calls, ANYWHERE)
    with pytest.raises(ConfigError, match="num_threads is 0"):
        Service(Served(), Calls, ANYWHERE, num_threads=0)


def test_the_limits_of_a_call() -> None:
    with (
        Service(Served(), Calls, ANYWHERE, limits=Limits(max_bytes=1000)) as service,
        Client(Calls, service.address) as client,
    ):
        with pytest.raises(RpcError, match="a request has 8006 bytes; this server accepts at most 1000"):
            client.call.double(np.zeros(1000, np.uint64))
        assert client.call.double(np.zeros(100, np.uint64)).size == 100


def test_close_leaves_no_open_sockets() -> None:
    with Service(Served(), Calls, ANYWHERE) as service, Client(Calls, service.address) as client:
        assert client.call.add(1) == 1
        (channel,) = client._channels._open
    assert channel.socket.closed and service._context.closed
