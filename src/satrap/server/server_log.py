"""What a server logs: the rows that it found, its job, attempts, handshakes that it refused, buckets that moved. Saves
and restores are logged by `satrap.table`, through `satrap.transfer`."""

import logging
import os
from functools import partial
from weakref import ref

from satrap.errors import SatrapError
from satrap.event_log import LimitedLog, describe_process, event
from satrap.rpc import Origin
from satrap.server.call_fence import CallFence
from satrap.server.state import ServerState

_LOG = logging.getLogger("satrap.server")


class ServerLog:
    """The log of one server."""

    def __init__(self, fence: CallFence) -> None:
        """fence: has the server's state."""
        self._fence = fence
        # A caller may retry in a loop, and a migration has thousands of small moves.
        self._log_refusal, self._log_move = LimitedLog(_LOG.warning), LimitedLog(_LOG.info)

    def record_start(self, shared: str | os.PathLike[str] | None) -> None:
        """Log which rows the process found at its start in the shared-memory file."""
        if (state := self._fence.state) is None:
            where = "no --shared file was named" if shared is None else f"{os.fspath(shared)} has none"
            _LOG.info("no rows found, starting empty: %s", where, extra=event("rows_not_found"))
            return
        self._describe(state)
        rows = sum(len(table) for table in state.tables.values())
        attempt, step = state.engine.attempt, state.engine.latest_step
        extra = event("rows_found", rows=rows, tables=len(state.tables), attempt=attempt)
        text = f"found {rows:,} rows of %d tables in %s, of attempt %d, up to step {step:,}"
        _LOG.info(text, len(state.tables), shared, attempt, extra=extra)

    def record_job(self, state: ServerState) -> None:
        """Log the job that the first handshake brought."""
        self._describe(state)
        servers, version, tables = len(state.shard_map.addresses), state.shard_map.version, len(state.job.tables)
        got = event("job", tables=tables, servers=servers, map=version)
        text = "job: %d tables; server %d of %d, under bucket map %d"
        _LOG.info(text, tables, state.number, servers, version, extra=got)

    def record_refusal(self, origin: Origin, error: SatrapError) -> None:
        """Log a handshake that was refused."""
        refused = event("hello_refused", trainer=origin.trainer, attempt=origin.attempt, why=str(error))
        self._log_refusal("hello refused: %s", error, extra=refused)

    def record_attempt(self, state: ServerState, attempt: int, how: str = "") -> None:
        """Log that an attempt replaces the one of the state."""
        started = event("attempt", attempt=attempt, previous=state.engine.attempt)
        _LOG.info("attempt %d replaces attempt %d%s", attempt, state.engine.attempt, how, extra=started)

    def record_move(self, state: ServerState, outgoing: int, incoming: int) -> None:
        """Log that buckets moved to or from this server."""
        self._describe(state)
        owned, buckets = int(state.owned().sum()), len(state.shard_map.bucket_map.flat())
        version = state.shard_map.version
        moved = event("move", outgoing=outgoing, incoming=incoming, owned=owned, buckets=buckets, map=version)
        text = "bucket map %d: %d buckets left and %d arrived; this server owns %d of %d"
        self._log_move(text, version, outgoing, incoming, owned, buckets, extra=moved)

    def _describe(self, state: ServerState) -> None:
        describe_process("server", number=state.number, job=state.job.fingerprint, step=partial(_step, ref(self)))

    def latest_step(self) -> int | None:
        """Return the latest step of the server's rows."""
        state = self._fence.state
        return None if state is None else state.engine.latest_step


def _step(log: ref[ServerLog]) -> int | None:
    return None if (alive := log()) is None else alive.latest_step()
