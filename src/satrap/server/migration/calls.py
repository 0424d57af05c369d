"""The calls of a server that a mover makes; see `satrap.server.migration.coordinator` for their order,
`satrap.server.migration.participant` for what they do."""

import os
import time
from typing import Any

import numpy as np

from satrap.errors import ConfigError, InputError, MovedError, NotReadyError
from satrap.rpc import Origin
from satrap.server.call_fence import CallFence
from satrap.server.migration.participant import BucketChunk, Companions
from satrap.server.protocol import Coded, Floats, Ids, Numbers
from satrap.server.state import FencingToken
from satrap.sharding.shard_map import ShardMap


class MigrationCalls(CallFence):
    """The part of `satrap.server.protocol.ServerCalls` that moves buckets."""

    def begin_turn(self, origin: Origin, mover: int) -> None:
        """See ServerCalls."""
        turn = FencingToken(origin.step, mover)
        with self._pause():
            self._require_turn(origin)
            if turn.number == self._turn.number and turn != self._turn:
                raise ConfigError(f"another mover is at work: it has begun turn {turn.number}, too")
            if (served := self._served) is not None:
                served.follow(served.members, served.number, turn)
            self._turn = turn

    def freeze(self, origin: Origin, move: int, buckets: Numbers) -> None:
        """See ServerCalls."""
        with self._pause():
            served = self._ready()
            self._require_turn(origin)
            self._require_map(served, origin)
            served.moving.check(buckets)
            if not served.owned()[buckets].all():
                raise InputError("freeze: some of these buckets are not this server's")
            served.moving.freeze(move, buckets, time.monotonic())

    def copy_out(
        self, origin: Origin, buckets: Numbers, table: int, begin: int
    ) -> tuple[Ids, Numbers, Coded, Floats, Ids, Numbers, Numbers, int]:
        """See ServerCalls."""
        with self._working(None) as served:
            served.moving.check(buckets)
            served.store(table)
            still = buckets[served.owned()[buckets]]
            if not np.isin(still, served.moving.leaving).all():
                raise NotReadyError("copy_out: some of these buckets are in use here: freeze them")
            served.moving.renew(time.monotonic())
            parcel, total = served.moving.parcel(buckets, table, begin)
        return *parcel, total

    def companions_out(self, origin: Origin, buckets: Numbers) -> tuple[Numbers, Ids, Ids, Numbers]:
        """See ServerCalls."""
        with self._changed:
            served = self._ready()
            served.moving.check(buckets)
            if served.owned()[buckets].any():
                raise NotReadyError("companions_out: some of these buckets are this server's still")
            found = served.moving.companions(buckets, served.oldest_open)
        oldest = [number for pair in found.oldest_open.items() for number in pair]
        return np.array(found.trainers, np.uint32), found.windows, found.counters, np.array(oldest, np.uint32)

    def receive(self, origin: Origin, move: int, buckets: Numbers, state: dict[str, Any]) -> None:
        """See ServerCalls."""
        with self._changed:
            served = self._ready()
            self._require_turn(origin)
            served.moving.check(buckets)
            if served.owned()[buckets].any():
                raise InputError("receive: some of these buckets are this server's already")
            if served.owns_nothing:
                if state["attempt"] > served.engine.attempt:
                    served.engine.begin_attempt(state["attempt"])
                if served.restored is None and state["restored"]:
                    served.restored = 0, False  # by the same restore, which may come here yet
            served.moving.receive(move, buckets, state["attempt"])
            served.engine.reach_step(state["latest_step"])
            for t, (version, line) in enumerate(zip(state["versions"], state["expire_before"], strict=True)):
                served.engine.reach_table(t, version, line)

    def copy_in(
        self,
        origin: Origin,
        move: int,
        table: int,
        ids: Ids,
        steps: Numbers,
        values: Coded,
        state: Floats,
        sighted: Ids,
        sighted_at: Numbers,
        counts: Numbers,
    ) -> None:
        """See ServerCalls."""
        with self._working(None) as served:  # so the map does not change meanwhile
            served.store(table)
            served.moving.require(move)
            served.moving.take(table, BucketChunk(ids, steps, values, state, sighted, sighted_at, counts))

    def companions_in(
        self, origin: Origin, move: int, trainers: Numbers, windows: Ids, counters: Ids, oldest_open: Numbers
    ) -> None:
        """See ServerCalls."""
        pairs = dict(zip(oldest_open[::2].tolist(), oldest_open[1::2].tolist(), strict=True))
        with self._changed:
            served = self._ready()
            served.moving.require(move)
            served.moving.accompany(Companions(trainers.tolist(), windows, counters, pairs), served.oldest_open)

    def change(self, origin: Origin, members: dict[str, Any], server: int, move: int) -> None:
        """See ServerCalls."""
        after = ShardMap.from_dict(members)
        with self._pause():
            served = self._ready()
            self._require_turn(origin)
            before = served.members
            if after == before and server == served.number:
                return  # it came again
            if after.version != before.version + 1:
                raise NotReadyError(f"change: to map {after.version}; this server is at {before.version}")
            owned, will = served.owned(), np.array(after.bucket_map.flat()) == server
            leaving, coming = (np.flatnonzero(each).astype(np.uint32) for each in (owned & ~will, will & ~owned))
            served.moving.require_ready(move, leaving, coming)
            served.engine.hand_over(leaving)
            served.engine.take_over(coming, not owned.any())
            served.follow(after, server, self._turn)
            served.moving.end()
            served.meeting.refuse(lambda: MovedError(f"map {after.version} has begun: ask for it, and call again"))

    def forget(self, origin: Origin) -> None:
        """See ServerCalls."""
        with self._changed:
            buckets = np.flatnonzero(~self._ready().owned()).astype(np.uint32)
        for bucket in buckets.reshape(-1, 1):  # one at a time: others may call meanwhile
            with self._changed:
                served = self._ready()
                self._require_turn(origin)
                if origin.map_version != served.members.version or served.moving.coming_move:
                    return  # it came late
                served.engine.forget(bucket)

    def load(self, origin: Origin) -> dict[str, float]:
        """See ServerCalls."""
        with self._working(None) as served:
            stats = [table.stats() for table in served.tables.values()]
            return {
                "rows": sum(each["rows"] for each in stats),
                "bytes": sum(each["bytes"] for each in stats),
                "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
                "calls": self._running - 1,
                "work_seconds": self._work_seconds,
                "latest_step": served.engine.latest_step,
            }
