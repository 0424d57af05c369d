"""Leases tell which processes train on the servers: each renews its lease there every second while it lives.

The lease of a killed process expires after `LEASE_SECONDS`; a process that exits normally releases it; one that was
replaced cannot renew it. `Lease` is the thread in the trainer that started the attempt, and `Leases` is a server's
record. Neither decides anything: `satrap.worker.server_group` refuses to replace a trainer that keeps renewing its
lease.
"""

import logging
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from satrap.errors import SatrapError
from satrap.event_log import event, place_of_process

if TYPE_CHECKING:
    from satrap.rpc import Client, Origin, PendingCall
    from satrap.server.protocol import ServerCalls

_LOG = logging.getLogger("satrap.server")
LEASE_SECONDS = 5.0
_RENEW_SECONDS = 1.0
_RELEASE_SECONDS = 1.0
_WATCH_SECONDS = 0.5

_process = (0, "")


def process_id() -> str:
    """Return an id of this process that is unique across machines. A fork gets another one."""
    global _process
    if _process[0] != os.getpid():
        _process = os.getpid(), secrets.token_hex(8)
    return _process[1]


class Lease:
    """Renews this process's lease until `end`. Holds no reference to the owner, so that it can be collected."""

    def __init__(self, clients: "Sequence[Client[ServerCalls]]", origin: "Origin") -> None:
        """clients: of the servers. origin: of the attempt. Both may be replaced later."""
        self.clients, self.origin = clients, origin
        self._process = os.getpid()
        self._calls: dict[Client[ServerCalls], PendingCall] = {}
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # `put` is reentrant: the collector may call `end`
        self._thread = threading.Thread(target=self._run, name="satrap-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the lease, at all servers that answer within a second."""
        if os.getpid() != self._process:
            return
        self._ended.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(3 * _RELEASE_SECONDS)

    def _run(self) -> None:
        while True:
            self._renew(LEASE_SECONDS, 0.1)
            with suppress(queue.Empty):
                self._ended.get(timeout=_RENEW_SECONDS)
                break
        self._calls.clear()
        self._renew(0.0, _RELEASE_SECONDS)

    def _renew(self, seconds: float, wait_seconds: float) -> None:
        """Renew at each server that has answered the previous renewal: more calls to a busy server would only queue up,
        and a late one could arrive after another process's."""
        where = place_of_process()
        for client in self.clients:
            if client not in self._calls:
                with suppress(SatrapError):
                    self._calls[client] = client.start("renew_lease", self.origin, process_id(), where, seconds)
        until = time.monotonic() + wait_seconds
        for client, call in list(self._calls.items()):
            with suppress(SatrapError):
                if not call.wait(max(0.0, until - time.monotonic())):
                    continue
            del self._calls[client]


class Leases:
    """The leases that a server has recorded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt = 0
        self._until: dict[str, tuple[str, float]] = {}
        self._is_watched = False

    def renew(self, attempt: int, process: str, where: str, seconds: float) -> None:
        """Hold the process's lease of this attempt for `seconds` from now on, unless a newer attempt replaced it."""
        with self._lock:
            if attempt >= self._attempt:
                self._attempt = attempt
                if seconds:
                    self._until[process] = where, time.monotonic() + seconds
                else:
                    self._until.pop(process, None)
            if self._until and not self._is_watched:
                self._is_watched = True
                threading.Thread(target=_watch, args=(weakref.ref(self),), name="satrap-leases", daemon=True).start()

    def remove_expired(self) -> bool:
        """Log the leases that have expired, and remove them. Return whether there are others."""
        with self._lock:
            now = time.monotonic()
            for process, (where, until) in list(self._until.items()):
                if until <= now:
                    del self._until[process]
                    lost = event("peer_lost", peer=where, attempt=self._attempt)
                    _LOG.warning("%s is lost, or was replaced: its lease has expired", where, extra=lost)
            self._is_watched = bool(self._until)
            return self._is_watched

    def remaining(self) -> dict[str, list[str | float]]:
        """Return for each process its location and the seconds until its lease expires."""
        now = time.monotonic()
        with self._lock:
            return {holder: [where, until - now] for holder, (where, until) in self._until.items() if until > now}


def _watch(leases: weakref.ref[Leases]) -> None:
    """Remove expired leases until there are none, or until they are collected with their server."""
    while (alive := leases()) is not None and alive.remove_expired():
        del alive
        time.sleep(_WATCH_SECONDS)
