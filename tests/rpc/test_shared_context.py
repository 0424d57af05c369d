"""The ZeroMQ context that all clients of a process share."""

from __future__ import annotations

from forks import in_fork
from satrap.rpc.channels import SharedContext, context_of_clients


def test_the_context_of_clients_ends_with_its_last_borrower() -> None:
    shared = SharedContext()
    for _ in range(2):
        context = shared.borrow()
        assert shared.borrow() is context
        shared.give_back()
        assert not context.closed
        shared.give_back()
        assert context.closed


def test_a_fork_has_a_context_and_leaves_its_parents_open() -> None:
    shared = context_of_clients()
    context = shared.borrow()

    def body() -> None:
        own = context_of_clients()
        assert own is not shared and own.borrow() is not context
        own.give_back()

    in_fork(body)
    assert not context.closed
    shared.give_back()
