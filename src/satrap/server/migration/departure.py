"""Moves the buckets of a server that was asked to stop to the other servers, while training continues.

Several servers of a job may be asked at the same time. Each asks all others whether they leave, too. The first of those
that leave, by its number, moves the buckets of all of them to the servers that stay; the others wait for it, or take
over if it did not finish. If no server stays, because the whole job ends, none of them moves anything.

`next_action` decides; `Departure` asks, migrates and keeps the time.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from satrap.errors import SatrapError
from satrap.event_log import event
from satrap.rpc import Keys, Origin
from satrap.server.migration.coordinator import Migration, ask_status

Answer = Literal["leaves", "stays", "silent"]
Action = Literal["end", "move", "wait"]

_LOG = logging.getLogger("satrap.server")
_PAUSE_SECONDS = 0.2  # between questions while another server moves the buckets


class LeavingServer(Protocol):
    """What a departure needs of its server."""

    leaves: bool
    """Whether the server tells others that it leaves."""

    def status(self, origin: Origin) -> dict[str, Any]:
        """Return what `ServerCalls.status` returns."""


def next_action(addresses: Sequence[str], own: str | None, answers: Mapping[str, Answer]) -> Action:
    """Return what a server that leaves does next.

    addresses: of the job's servers, in order. own: its address; None: it is none of them any more. answers: of the
    others, by address."""
    if own is None or "stays" not in answers.values():
        return "end"  # its rows have moved, or no other server could take them
    if "silent" in answers.values():
        return "wait"  # a migration needs all servers; this one may be restarting
    leaving = [address for address in addresses if address == own or answers[address] == "leaves"]
    return "move" if leaving[0] == own else "wait"


class Departure:
    """The departure of one server."""

    def __init__(self, server: LeavingServer, keys: Keys | None, seconds: float) -> None:
        """keys: the client's. seconds: the time that it may take."""
        self._server, self._keys, self._seconds = server, keys, seconds
        self._thread: threading.Thread | None = None

    def start(self, on_end: Callable[[], None]) -> None:
        """Start to move this server's buckets in a thread, which calls `on_end` at its end. A process that exits first
        interrupts the migration, which is safe at any point."""
        self._server.leaves = True
        self._thread = threading.Thread(target=self._run, args=(on_end,), name="satrap-departure", daemon=True)
        self._thread.start()

    def report(self) -> None:
        """Log whether the server could leave without any buckets."""
        status = self._server.status(Origin())
        if own_address(status) is None:
            _LOG.info("this server's buckets have moved to other servers", extra=event("left"))
            return
        owned = status["buckets"]["owned"]
        text = (
            "this server ends with %d buckets, which did not move to other servers within %g s or had none to move to"
        )
        _LOG.warning(text, owned, self._seconds, extra=event("left", buckets=owned))

    def _run(self, on_end: Callable[[], None]) -> None:
        until = time.monotonic() + self._seconds
        try:
            while (left := until - time.monotonic()) > 0:
                status = self._server.status(Origin())
                own, addresses = own_address(status), status.get("addresses", [])
                answers = {address: self._ask(address) for address in addresses if own is not None and address != own}
                action = next_action(addresses, own, answers)
                if action == "end":
                    return
                if action == "wait":
                    time.sleep(min(_PAUSE_SECONDS, left))
                    continue
                stay = [address for address in addresses if answers.get(address) == "stays"]
                try:
                    Migration(addresses, stay, keys=self._keys, deadline=left, pause_ratio=0.0).run()
                except SatrapError as error:  # another coordinator is active, or a server has gone: look again
                    _LOG.warning("moving this server's buckets: %s", error)
                    time.sleep(min(_PAUSE_SECONDS, left))
        finally:
            on_end()

    def _ask(self, address: str) -> Answer:
        status = ask_status(address, self._keys)
        return "silent" if not status else "leaves" if status["leaves"] else "stays"


def own_address(status: Mapping[str, Any]) -> str | None:
    """Return the address of the server that has this status, as its job knows it; None if it is not in a job."""
    number = status.get("number", -1)
    return None if number < 0 else str(status["addresses"][number])
