"""Takes a share of the buckets for a server that starts without a job while the other servers train.

So a server that left (`departure`) returns by itself, as in a rolling restart of pods. It asks one of the others each
second. If they have a job without this server, it migrates an equal share of their buckets to itself. It stops asking
once a trainer has given it a job, or if the job already lists it: then its rows are lost, and the trainers resume.

`next_action` decides; `Arrival` asks and migrates.
"""

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from satrap.errors import SatrapError
from satrap.event_log import event
from satrap.rpc import Keys, Origin
from satrap.server.migration.coordinator import Migration, ask_status

Action = Literal["end", "join", "wait"]
Status = Callable[[Origin], dict[str, Any]]

_LOG = logging.getLogger("satrap.server")
_PAUSE_SECONDS = 1.0  # between questions
_DEADLINE_SECONDS = 30.0  # short, since another coordinator may be active


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

    def __init__(self, status: Status, own: str, others: Sequence[str], keys: Keys | None) -> None:
        """status: of the server, as `ServerCalls.status`. own: its address. others: addresses of servers that its job
        may have. keys: the client's."""
        self._status, self._own, self._keys = status, own, keys
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
            status = ask_status(random.choice(self._others), self._keys)
            action = next_action(self._own, self._status(Origin()), status)
            if action == "end":
                return
            if action == "join":
                self._join_job(status["addresses"])

    def _join_job(self, addresses: Sequence[str]) -> None:
        try:
            target = (*addresses, self._own)
            moved = Migration(addresses, target, keys=self._keys, deadline=_DEADLINE_SECONDS).run()
        except SatrapError as error:  # another coordinator is active, or a server has gone: look again
            _LOG.warning("taking a share of the buckets: %s; retrying", error, extra=event("join_failed"))
            return
        text = "this server has taken %d buckets of the job's %d other servers"
        _LOG.info(text, moved.buckets, len(addresses), extra=event("joined", buckets=moved.buckets))
