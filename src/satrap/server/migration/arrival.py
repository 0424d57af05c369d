"""Takes a share of the buckets for a server that starts without a job while the other servers train.

So a server that left (`departure`) returns by itself, as in a rolling restart of pods. It asks one of the others each
second. If they have a job without this server, it migrates an equal share of their buckets to itself. It stops asking
once a trainer has given it a job, or if the job already lists it: then its rows are lost, and the trainers resume.

`next_action` decides; `Arrival` asks and migrates.
"""

import logging
import random
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from satrap.errors import SatrapError
from satrap.event_log import event
from satrap.rpc import Client, Keys, Origin
from satrap.server.migration.coordinator import Migration
from satrap.server.protocol import ServerCalls

Action = Literal["end", "join", "wait"]

_LOG = logging.getLogger("satrap.server")
_ASK_SECONDS = 2.0  # for another server to answer
_PAUSE_SECONDS = 1.0  # between questions
_DEADLINE_SECONDS = 30.0  # short, since another coordinator may be active


class ArrivingServer(Protocol):
    """What an arrival needs of its server."""

    def status(self, origin: Origin) -> dict[str, Any]:
        """Return what `ServerCalls.status` returns."""


def next_action(own: str, own_status: Mapping[str, Any], other_status: Mapping[str, Any]) -> Action:
    """Return what a server that has started does next.

    own: its address. other_status: of another server; empty if it does not answer."""
    if own_status.get("number", -1) >= 0:
        return "end"
    if other_status.get("number", -1) < 0 or other_status["leaves"]:
        return "wait"  # it has no job either, or is about to have none
    return "end" if own in other_status["addresses"] else "join"


class Arrival:
    """The arrival of one server."""

    def __init__(self, server: ArrivingServer, own: str, others: Sequence[str], keys: Keys | None) -> None:
        """own: the server's address. others: addresses of servers that its job may have. keys: the client's."""
        self._server, self._own, self._keys = server, own, keys
        self._others = [other for other in others if other != own]
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="satrap-arrival", daemon=True)

    def start(self) -> None:
        """Start polling the other servers, in a thread."""
        if self._others:
            self._thread.start()

    def close(self) -> None:
        """Stop polling. A migration in progress ends with the process: it may be interrupted at any point."""
        self._is_closed.set()

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._is_closed.wait(_PAUSE_SECONDS * random.uniform(0.5, 1.5)):
            status = self._ask(random.choice(self._others))
            action = next_action(self._own, self._server.status(Origin()), status)
            if action == "end":
                return
            if action == "join":
                self._join_job(status["addresses"])

    def _ask(self, address: str) -> dict[str, Any]:
        with suppress(SatrapError), Client(ServerCalls, address, keys=self._keys, deadline=_ASK_SECONDS) as client:
            return client.call.status(Origin())
        return {}

    def _join_job(self, addresses: Sequence[str]) -> None:
        try:
            target = (*addresses, self._own)
            moved = Migration(addresses, target, keys=self._keys, deadline=_DEADLINE_SECONDS).run()
        except SatrapError as error:  # another coordinator is active, or a server has gone: look again
            _LOG.warning("taking a share of the buckets: %s; retrying", error, extra=event("join_failed"))
            return
        text = "this server has taken %d buckets of the job's %d other servers"
        _LOG.info(text, moved.buckets, len(addresses), extra=event("joined", buckets=moved.buckets))
