"""The calls of a server that a migration makes: `satrap.server.migration.coordinator` defines their order,
`satrap.server.migration.participant` does the work."""

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
    """The part of `satrap.server.protocol.ServerCalls` that migrates buckets."""

    def begin_turn(self, origin: Origin, mover: int) -> None:
        turn = FencingToken(origin.step, mover)
        with self._pause():
            self._require_turn(origin)
            if turn.number == self._turn.number and turn != self._turn:
                raise ConfigError(
                    f"another migration is running: it holds fencing token {turn.number}, too; wait until it has "
                    "ended, then run `satrap move` again"
                )
            if (served := self._served) is not None:
                served.follow(served.members, served.number, turn)
            self._turn = turn

    def freeze(self, origin: Origin, move: int, buckets: Numbers) -> None:
        with self._pause():
            served = self._ready()
            self._require_turn(origin)
            self._require_map(served, origin)
            served.moving.check(buckets)
            if not served.owned()[buckets].all():
                raise InputError("freeze: expected buckets of this server, found some that another server owns")
            served.moving.freeze(move, buckets, time.monotonic())

    def copy_out(
        self, origin: Origin, buckets: Numbers, table: int, begin: int
    ) -> tuple[Ids, Numbers, Coded, Floats, Ids, Numbers, Numbers, int]:
        with self._working(None) as served:
            served.moving.check(buckets)
            served.store(table)
            still = buckets[served.owned()[buckets]]
            if not np.isin(still, served.moving.leaving).all():
                raise NotReadyError("copy_out: expected frozen buckets, found some in use: freeze them first")
            served.moving.renew(time.monotonic())
            parcel, total = served.moving.parcel(buckets, table, begin)
        return *parcel, total

    def companions_out(self, origin: Origin, buckets: Numbers) -> tuple[Numbers, Ids, Ids, Numbers]:
        with self._changed:
            served = self._ready()
            served.moving.check(buckets)
            if served.owned()[buckets].any():
                raise NotReadyError("companions_out: expected buckets that were handed over, found some owned here")
            found = served.moving.companions(buckets, served.oldest_open)
        oldest = [number for pair in found.oldest_open.items() for number in pair]
        return np.array(found.trainers, np.uint32), found.windows, found.counters, np.array(oldest, np.uint32)

    def receive(self, origin: Origin, move: int, buckets: Numbers, state: dict[str, Any]) -> None:
        with self._changed:
            served = self._ready()
            self._require_turn(origin)
            served.moving.check(buckets)
            if served.owned()[buckets].any():
                raise InputError("receive: expected buckets of other servers, found some owned here")
            if served.owns_nothing:
                if state["attempt"] > served.engine.attempt:
                    served.engine.begin_attempt(state["attempt"])
                if served.restored is None and state["restored"]:
                    served.restored = 0, False  # by the same restore, whose call may still arrive
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
        with self._working(None) as served:  # keeps the map from changing meanwhile
            served.store(table)
            served.moving.require(move)
            served.moving.take(table, BucketChunk(ids, steps, values, state, sighted, sighted_at, counts))

    def companions_in(
        self, origin: Origin, move: int, trainers: Numbers, windows: Ids, counters: Ids, oldest_open: Numbers
    ) -> None:
        pairs = dict(zip(oldest_open[::2].tolist(), oldest_open[1::2].tolist(), strict=True))
        with self._changed:
            served = self._ready()
            served.moving.require(move)
            served.moving.accompany(Companions(trainers.tolist(), windows, counters, pairs), served.oldest_open)

    def change(self, origin: Origin, members: dict[str, Any], server: int, move: int) -> None:
        after = ShardMap.from_dict(members)
        with self._pause():
            served = self._ready()
            self._require_turn(origin)
            before = served.members
            if after == before and server == served.number:
                return  # a duplicate
            if after.version != before.version + 1:
                raise NotReadyError(
                    f"change: found map {after.version}; expected the one that follows this server's, {before.version}"
                )
            owned, will = served.owned(), np.array(after.bucket_map.flat()) == server
            leaving, coming = (np.flatnonzero(each).astype(np.uint32) for each in (owned & ~will, will & ~owned))
            served.moving.require_ready(move, leaving, coming)
            served.engine.hand_over(leaving)
            served.engine.take_over(coming, not owned.any())
            served.follow(after, server, self._turn)
            served.moving.end()
            served.meeting.refuse(
                lambda: MovedError(f"the call's bucket map was replaced by {after.version}: take it and call again")
            )

    def forget(self, origin: Origin) -> None:
        with self._changed:
            buckets = np.flatnonzero(~self._ready().owned()).astype(np.uint32)
        for bucket in buckets.reshape(-1, 1):  # one at a time, so that other calls run in between
            with self._changed:
                served = self._ready()
                self._require_turn(origin)
                if origin.map_version != served.members.version or served.moving.coming_move:
                    return  # the call is late: the map has changed since
                served.engine.forget(bucket)

    def load(self, origin: Origin) -> dict[str, float]:
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
