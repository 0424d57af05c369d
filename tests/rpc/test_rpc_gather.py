"""Several calls at once: a thread's `Gather` serves one use after another, and survives closed clients and errors."""

import gc

import numpy as np
import pytest

from rpc_parts import ANYWHERE, Calls, Served
from satrap.rpc import Client, Gathers, Service, send_all
from waiting import DEADLINE_SECONDS


def doubled(gathers: Gathers, clients: list[Client[Calls]], number: int) -> list[int]:
    calls = [
        client.prepare("double", np.array([number + i], np.uint64), deadline=DEADLINE_SECONDS)
        for i, client in enumerate(clients)
    ]
    send_all(calls)
    found: dict[int, int] = {}
    with gathers.waiting_for(calls) as gather:
        while len(found) < len(calls):
            found |= {calls.index(call): int(call.result()[0]) for call in gather.wait(DEADLINE_SECONDS)}
    return [found[i] for i in range(len(calls))]


def test_a_gather_is_used_again_after_clients_were_closed() -> None:
    gathers = Gathers()
    with Service(Served(), Calls, ANYWHERE) as first, Service(Served(), Calls, ANYWHERE) as second:
        for _ in range(3):
            addresses = first.address, second.address, first.address
            clients = [Client(Calls, address, deadline=DEADLINE_SECONDS) for address in addresses]
            for number in range(20):
                used = gathers._idle
                assert doubled(gathers, clients, number) == [2 * number, 2 * number + 2, 2 * number + 4]
                assert used in (None, gathers._idle) and gathers._idle is not None and not gathers._idle._calls
            for client in clients:
                client.close()


def test_after_an_error_a_thread_waits_with_another_gather() -> None:
    gathers = Gathers()
    with Service(Served(), Calls, ANYWHERE) as service, Client(Calls, service.address) as client:
        call = client.start("add", 1, deadline=DEADLINE_SECONDS)
        with pytest.raises(KeyboardInterrupt), gathers.waiting_for([call]) as gather:
            raise KeyboardInterrupt
        assert gathers._idle is None and call in gather._calls
        assert doubled(gathers, [client], 1) == [2]
        assert gathers._idle is not gather


def test_an_abandoned_call_is_forgotten() -> None:
    with Service(Served(), Calls, ANYWHERE) as service, Client(Calls, service.address) as client:
        call = client.start("add", 1, deadline=DEADLINE_SECONDS)
        waiting = call.channel.waiting
        assert list(waiting) == [call.number]
        del call
        gc.collect()
        assert not waiting
        assert client.with_deadline(DEADLINE_SECONDS).add(1)
