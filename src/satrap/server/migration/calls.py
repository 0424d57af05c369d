"""The calls of a server that a migration makes: `satrap.server.migration.coordinator` defines their order,
`satrap.server.migration.participant` does the work."""

import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.errors import ConfigError, InputError, MovedError, NotReadyError
from satrap.monitor.memory import memory_limit
from satrap.rpc import Origin
from satrap.server.call_fence import CallFence
from satrap.server.migration.participant import BucketChunk
from satrap.server.protocol import Coded, Floats, Ids, Numbers
from satrap.server.server_log import ServerLog
from satrap.server.state import FencingToken
from satrap.sharding.shard_map import ShardMap


class MigrationCalls:
    """The part of `satrap.server.protocol.ServerCalls` that migrates buckets."""

    def __init__(self, fence: CallFence, log: ServerLog, shared: str | os.PathLike[str] | None) -> None:
        """shared: the shared-memory file of the rows, if they are in one."""
        self._fence, self._log, self._shared = fence, log, shared

    def take_fencing_token(self, origin: Origin, holder: int) -> None:
        token = FencingToken(origin.step, holder)
        with self._fence.exclusive():
            self._fence.require_fencing_token(origin)
            if token.number == self._fence.fencing_token.number and token != self._fence.fencing_token:
                raise ConfigError(
                    f"another migration is running: it holds fencing token {token.number}, too; wait until it has "
                    "ended, then run `satrap migrate` again"
                )
            if (server_state := self._fence.state) is not None:
                server_state.adopt(server_state.shard_map, server_state.number, token)
            self._fence.fencing_token = token

    def freeze(self, origin: Origin, migration: int, buckets: Numbers) -> None:
        with self._fence.exclusive():
            server_state = self._fence.require_state()
            self._fence.require_fencing_token(origin)
            self._fence.require_map(server_state, origin)
            server_state.require_no_cut()
            server_state.participant.check_buckets(buckets)
            if not server_state.owned()[buckets].all():
                raise InputError("freeze: expected buckets of this server, found some that another server owns")
            server_state.participant.freeze(migration, buckets, time.monotonic())

    def export_rows(
        self, origin: Origin, buckets: Numbers, table: int, begin: int
    ) -> tuple[Ids, Numbers, Coded, Floats, Ids, Numbers, Numbers, int]:
        with self._fence.admit(None) as server_state:
            server_state.participant.check_buckets(buckets)
            server_state.store(table)
            still = buckets[server_state.owned()[buckets]]
            if not np.isin(still, server_state.participant.outgoing).all():
                raise NotReadyError("export_rows: expected frozen buckets, found some in use: freeze them first")
            server_state.participant.renew(time.monotonic())
            chunk, total = server_state.participant.chunk(buckets, table, begin)
        return *chunk, total

    def export_metadata(self, origin: Origin, buckets: Numbers) -> tuple[Numbers, Ids, Ids, Numbers]:
        with self._fence.condition:
            server_state = self._fence.require_state()
            server_state.participant.check_buckets(buckets)
            if server_state.owned()[buckets].any():
                raise NotReadyError("export_metadata: expected buckets that were handed over, found some owned here")
            trainers, windows = server_state.engine.export_windows(buckets)
            counters = server_state.engine.export_counters(buckets)
            oldest = [number for pair in server_state.oldest_open.items() for number in pair]
        return np.array(trainers, np.uint32), windows, counters, np.array(oldest, np.uint32)

    def expect_buckets(self, origin: Origin, migration: int, buckets: Numbers, state: dict[str, Any]) -> None:
        with self._fence.condition:
            server_state = self._fence.require_state()
            self._fence.require_fencing_token(origin)
            server_state.participant.check_buckets(buckets)
            if server_state.owned()[buckets].any():
                raise InputError("expect_buckets: expected buckets of other servers, found some owned here")
            if server_state.owns_nothing:
                if state["attempt"] > server_state.engine.attempt:
                    server_state.engine.begin_attempt(state["attempt"])
                if server_state.restored is None and state["restored"]:
                    server_state.restored = 0, False  # by the same restore, whose call may still arrive
            server_state.participant.expect_buckets(migration, buckets, state["attempt"])
            server_state.engine.reach_step(state["latest_step"])
            for t, (version, line) in enumerate(zip(state["versions"], state["expire_before"], strict=True)):
                server_state.engine.reach_table(t, version, line)

    def import_rows(self, origin: Origin, migration: int, table: int, *columns: NDArray[Any]) -> None:
        with self._fence.admit(None) as server_state:  # keeps the map from changing meanwhile
            server_state.store(table)
            server_state.participant.require_migration(migration)
            server_state.participant.import_chunk(table, BucketChunk(*columns))

    def import_metadata(
        self, origin: Origin, migration: int, trainers: Numbers, windows: Ids, counters: Ids, oldest_open: Numbers
    ) -> None:
        pairs = oldest_open.reshape(-1, 2).tolist()
        with self._fence.condition:
            server_state = self._fence.require_state()
            server_state.participant.require_migration(migration)
            server_state.participant.import_metadata(trainers.tolist(), windows, counters)
            for trainer, step in pairs:
                server_state.oldest_open[trainer] = max(step, server_state.oldest_open.get(trainer, 0))

    def install_map(self, origin: Origin, shard_map: dict[str, Any], server: int, migration: int) -> None:
        after = ShardMap.from_dict(shard_map)
        with self._fence.exclusive():
            server_state = self._fence.require_state()
            self._fence.require_fencing_token(origin)
            before = server_state.shard_map
            if after == before and server == server_state.number:
                return  # a duplicate
            if migration != server_state.participant.incoming_migration:
                server_state.require_no_cut()  # else a cut here is of a try that the buckets' old owner has refused
            if after.version != before.version + 1:
                raise NotReadyError(
                    f"install_map: found map {after.version}; expected the one after this server's, {before.version}"
                )
            owned, owned_after = server_state.owned(), np.array(after.bucket_map.flat()) == server
            outgoing, incoming = (
                np.flatnonzero(mask).astype(np.uint32) for mask in (owned & ~owned_after, owned_after & ~owned)
            )
            server_state.participant.require_ready(migration, outgoing, incoming)
            server_state.engine.hand_over(outgoing)
            server_state.engine.take_over(incoming, not owned.any())
            server_state.adopt(after, server, self._fence.fencing_token)
            server_state.participant.end()
            if len(outgoing) or len(incoming):
                self._log.record_move(server_state, len(outgoing), len(incoming))
            server_state.barrier.refuse(
                lambda: MovedError(f"the call's bucket map was replaced by map {after.version}: take it and call again")
            )

    def discard_buckets(self, origin: Origin) -> None:
        with self._fence.condition:
            buckets = np.flatnonzero(~self._fence.require_state().owned()).astype(np.uint32)
        for bucket in buckets.reshape(-1, 1):  # one at a time, so that other calls run in between
            with self._fence.condition:
                server_state = self._fence.require_state()
                self._fence.require_fencing_token(origin)
                if origin.map_version != server_state.shard_map.version or server_state.participant.incoming_migration:
                    return  # the call is late: the map has changed since
                server_state.engine.forget(bucket)

    def load(self, origin: Origin) -> dict[str, float]:
        with self._fence.admit(None) as server_state:
            stats = [table.stats() for table in server_state.tables.values()]
            return {
                "rows": sum(counts["rows"] for counts in stats),
                "bytes": sum(counts["bytes"] for counts in stats),
                "memory_bytes": memory_limit(self._shared),
                "work_seconds": self._fence.work_seconds,
                "latest_step": server_state.engine.latest_step,
            }
