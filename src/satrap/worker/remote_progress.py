"""The progress of work that servers do for this process, which queries it while it waits for their answers."""

import time
from collections.abc import Sequence
from contextlib import suppress

from satrap.errors import SatrapError
from satrap.rpc import Client, Origin, PendingCall
from satrap.server.protocol import ServerCalls
from satrap.transfer import current_transfer

_QUERY_SECONDS = 2.0
_DEADLINE_SECONDS = 5.0  # for a query; the next one follows then


class RemoteProgress:
    """Queries servers every two seconds for the transfer in progress, if there is one."""

    def __init__(self, clients: Sequence[Client[ServerCalls]]) -> None:
        self._clients, self._transfer = clients, current_transfer()
        self._calls: list[PendingCall] = []
        self._figures: list[dict[str, int]] = []
        self._due = time.monotonic() + _QUERY_SECONDS

    def poll(self) -> None:
        """Collect answers that have arrived, and start the next query when it is due. Does not wait."""
        if self._transfer is None:
            return
        if not self._calls and time.monotonic() >= self._due:
            self._figures, self._due = [], time.monotonic() + _QUERY_SECONDS
            with suppress(SatrapError):
                self._calls = [
                    client.start("progress", Origin(), deadline=_DEADLINE_SECONDS) for client in self._clients
                ]
        for call in list(self._calls):
            if call.wait(0.0):
                self._calls.remove(call)
                with suppress(SatrapError):
                    self._figures.append(call.result())
                if not self._calls and len(self._figures) == len(self._clients):
                    self._transfer.observe(self._figures)

    def end(self) -> None:
        """Forget what the servers reported: the caller counts their work once it is complete."""
        if self._transfer is not None:
            self._transfer.observe([])
