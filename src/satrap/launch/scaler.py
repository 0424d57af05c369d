"""Changes the number of servers of a run while it trains: collects requests and migrates buckets.

Requests come from the user (`satrap scale` writes the number to a file in the run's folder) and, within limits, from
the load that the servers report (`satrap.sharding.autoscaler`). Servers may take long to answer, so threads do all of
this, and its results are events.
"""

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from satrap.config.regular_file import read_regular
from satrap.errors import ConfigError, SatrapError
from satrap.launch.run_events import Event, MigrationDue, MigrationEnded, ScaleRequested
from satrap.launch.run_state import is_live
from satrap.rpc import Client, Keys, Origin
from satrap.server.migration.coordinator import Migration, NoJobError
from satrap.server.protocol import ServerCalls
from satrap.sharding.autoscaler import ScaleHistory, ScaleLimits, ServerLoad, decide

_LOG = logging.getLogger("satrap.launch")
_REQUEST = "servers-wanted"
_MAX_REQUEST_BYTES = 32
_WINDOW_SECONDS = 10.0
_LOAD_SECONDS = 5.0  # timeout of a server's load; without it the server is left out of this window


class Scaler:
    """The scaling requests and the migrations of one run."""

    def __init__(
        self,
        folder: Path,
        keys: Keys | None = None,
        limits: ScaleLimits | None = None,
        server_bytes: float | None = None,
    ) -> None:
        """folder: the run's folder. limits: of the autoscaler; None: no autoscaling. server_bytes: memory for rows
        in each server."""
        self._folder, self._keys, self._limits, self._server_bytes = folder, keys, limits, server_bytes
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._migration: Migration | None = None
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()
        (folder / _REQUEST).unlink(missing_ok=True)

    def watch(self, servers: Callable[[], Sequence[str]]) -> None:
        """Start autoscaling, if it has limits. `servers` returns the current servers' addresses."""
        if self._limits is not None:
            self._watcher = threading.Thread(target=self._watch, args=(servers, self._limits), daemon=True)
            self._watcher.start()

    def migrate(self, current: Sequence[str], target: Sequence[str], is_urgent: bool) -> None:
        """Start to migrate the buckets of the current servers to the target servers. is_urgent: without pauses."""
        threading.Thread(target=self._migrate, args=(current, target, is_urgent), daemon=True).start()

    @property
    def progress(self) -> tuple[int, int] | None:
        """How many buckets the migration in progress has moved, and how many it moves; None if there is none."""
        migration = self._migration
        return None if migration is None else migration.progress

    def pause(self, seconds: float) -> None:
        """Cause a `MigrationDue` event after so many seconds."""
        timer = threading.Timer(seconds, self._events.put, (MigrationDue(),))
        timer.daemon = True
        timer.start()

    def poll(self) -> list[Event]:
        """Return the events since the last call."""
        events = [self._events.get_nowait() for _ in range(self._events.qsize())]
        taken = self._folder / f".{_REQUEST}-taken"
        with suppress(OSError, ValueError):
            os.replace(self._folder / _REQUEST, taken)  # a request that is written now is the next one
            num_servers = int(read_regular(taken, _MAX_REQUEST_BYTES))
            events.append(ScaleRequested(num_servers, "requested by satrap scale", waits=True))
        return events

    def close(self) -> None:
        """Stop autoscaling. A migration in progress ends with the process: it may be interrupted at any point."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()

    def _migrate(self, current: Sequence[str], target: Sequence[str], is_urgent: bool) -> None:
        failure, has_no_job = None, False
        try:
            pause_ratio = 0.0 if is_urgent else 1.0
            self._migration = Migration(current, target, keys=self._keys, pause_ratio=pause_ratio)
            self._migration.run()
        except SatrapError as error:
            failure, has_no_job = str(error), isinstance(error, NoJobError)
        except Exception as error:  # without its end, the run would never scale again
            failure = f"{type(error).__name__}: {error}"
            _LOG.warning("the migration failed with an unexpected error", exc_info=True)
        finally:
            self._migration = None
        self._events.put(MigrationEnded(failure, has_no_job))

    def _watch(self, servers: Callable[[], Sequence[str]], limits: ScaleLimits) -> None:
        history, before, window_start = ScaleHistory(), dict[str, dict[str, float]](), time.monotonic()
        while not self._closed.wait(_WINDOW_SECONDS):
            addresses, now = servers(), time.monotonic()
            after = self._read_loads(addresses)
            known = [address for address in addresses if address in before and address in after]
            if len(known) == len(addresses) > 0:
                loads = [
                    ServerLoad.between(server, before[server], after[server], self._server_bytes) for server in known
                ]
                num_steps = max(after[server]["latest_step"] - before[server]["latest_step"] for server in known)
                step_seconds = (now - window_start) / num_steps if num_steps > 0 else 0.0
                decision, history = decide(loads, step_seconds, limits, history, now)
                if decision.change:
                    self._events.put(ScaleRequested(len(addresses) + decision.change, decision.reason))
            before, window_start = after, now

    def _read_loads(self, addresses: Sequence[str]) -> dict[str, dict[str, float]]:
        loads = {}
        for address in addresses:
            if self._closed.is_set():
                break
            # A server that has not listened yet has no address, which the constructor refuses.
            with suppress(SatrapError), Client(ServerCalls, address, keys=self._keys, deadline=_LOAD_SECONDS) as client:
                loads[address] = client.call.load(Origin())
        return loads


def request_servers(folder: Path, servers: int) -> None:
    """Request this number of servers from the live run in the folder."""
    if is_live(folder) is False:
        raise ConfigError(
            f"the run in {str(folder)!r} has ended; start it again with --servers {servers}, or give the --folder of a "
            "live run"
        )
    new = folder / f".{_REQUEST}-{secrets.token_hex(4)}"
    try:
        new.write_text(str(servers))
        new.replace(folder / _REQUEST)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(
            f"folder {str(folder)!r} cannot be written ({error.strerror}); the request was not sent"
        ) from error
