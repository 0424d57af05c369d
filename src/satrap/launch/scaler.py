"""Changes how many servers a run has while it trains: moves buckets, and hears what is wanted.

Who wants it is the user (`satrap scale` leaves the number in a file of the run's folder) or, within bounds, the figures
that servers and trainers show (`satrap.sharding.autoscaler`). Servers may take long to answer, so all of it is done in
threads; what happened is an event.
"""

import fcntl
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from satrap.errors import ConfigError, SatrapError
from satrap.launch.supervisor import Event, Moved, Wanted
from satrap.rpc import Client, Keys, Origin
from satrap.server.migration.coordinator import Migration
from satrap.server.protocol import ServerCalls
from satrap.sharding.autoscaler import ScaleHistory, ScaleLimits, ServerLoad, decide

_REQUEST = "servers-wanted"
_WINDOW_SECONDS = 10.0
_LOAD_SECONDS = 5.0  # a server that does not tell its load within them is left out of this window


class Scaler:
    """See the file's docstring."""

    def __init__(
        self,
        folder: Path,
        keys: Keys | None = None,
        bounds: ScaleLimits | None = None,
        limit_bytes: float | None = None,
    ) -> None:
        """folder: the run's. bounds: None: only the user says how many. limit_bytes: of one server's rows."""
        self._folder, self._keys, self._bounds, self._limit_bytes = folder, keys, bounds, limit_bytes
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()
        (folder / _REQUEST).unlink(missing_ok=True)

    def watch(self, servers: Callable[[], Sequence[str]]) -> None:
        """From now on the load of these servers, asked for at each turn, may want other numbers of them."""
        if self._bounds is not None:
            self._watcher = threading.Thread(target=self._watch, args=(servers, self._bounds), daemon=True)
            self._watcher.start()

    def move(self, now: Sequence[str], wanted: Sequence[str]) -> None:
        """Begins to move the buckets of these servers to those."""
        threading.Thread(target=self._move, args=(now, wanted), daemon=True).start()

    def events(self) -> list[Event]:
        """What happened since the last call."""
        found = [self._events.get_nowait() for _ in range(self._events.qsize())]
        taken = self._folder / f".{_REQUEST}-taken"
        with suppress(OSError, ValueError):
            os.replace(self._folder / _REQUEST, taken)  # so that one that comes now is the next
            found.append(Wanted(int(taken.read_text()), "asked for by satrap scale"))
        return found

    def close(self) -> None:
        """Ends watching. A move that is under way ends with the process: it can be cut off at any moment."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()

    def _move(self, now: Sequence[str], wanted: Sequence[str]) -> None:
        failure = None
        try:
            Migration(now, wanted, keys=self._keys).run()
        except SatrapError as error:
            failure = str(error)
        self._events.put(Moved(failure))

    def _watch(self, servers: Callable[[], Sequence[str]], bounds: ScaleLimits) -> None:
        past, before, at = ScaleHistory(), dict[str, dict[str, float]](), time.monotonic()
        while not self._closed.wait(_WINDOW_SECONDS):
            addresses, now = servers(), time.monotonic()
            after = self._loads(addresses)
            known = [address for address in addresses if address in before and address in after]
            if len(known) == len(addresses) > 0:
                figures = [ServerLoad.between(each, before[each], after[each], self._limit_bytes) for each in known]
                num_steps = max(after[each]["latest_step"] - before[each]["latest_step"] for each in known)
                step_seconds = (now - at) / num_steps if num_steps > 0 else 0.0
                decision, past = decide(figures, step_seconds, bounds, past, now)
                if decision.change:
                    self._events.put(Wanted(len(addresses) + decision.change, decision.why))
            before, at = after, now

    def _loads(self, addresses: Sequence[str]) -> dict[str, dict[str, float]]:
        found = {}
        for address in addresses:
            if self._closed.is_set():
                break
            client = Client(ServerCalls, address, keys=self._keys, deadline=_LOAD_SECONDS)
            with suppress(SatrapError), client:
                found[address] = client.call.load(Origin())
        return found


def _is_free(folder: Path) -> bool:
    """Whether no run is in it now; see `satrap.launch.run_loop.folder_of_one_run`."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def ask_for(folder: Path, servers: int) -> None:
    """Asks the run that is at work in the folder for as many servers."""
    if not (folder / "run.json").exists():
        raise ConfigError(f"there is no run in {str(folder)!r}; wanted the --folder of one")
    if _is_free(folder):
        raise ConfigError(
            f"the run in {str(folder)!r} has ended: start it again with --servers {servers}, or name the --folder of "
            "the one that you meant"
        )
    new = folder / f".{_REQUEST}-{secrets.token_hex(4)}"
    try:
        new.write_text(str(servers))
        new.replace(folder / _REQUEST)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"{str(folder)!r} cannot be written ({error.strerror}): nothing was asked for") from error
