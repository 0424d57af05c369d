"""Moves buckets between servers while training goes on. Needs nothing but calls to the servers, and is killed safely.

`Migration(now, wanted).run()` makes the servers at `wanted` those that own everything, each as much as any other, and
takes the others out. It goes through maps whose versions follow one another; each but the first and the last gives some
buckets of one server (the source) to another (the target):

 1. the source freezes the buckets: calls that would change them are refused, and made again by whoever made them
 2. the target makes room; rows and sightings are copied
 3. the source changes to the next map: from here on these buckets are nobody's that answers, so no older call is late
 4. windows, counters and oldest open steps are copied: what the source has done is known
 5. the target changes to that map, then all others
 6. the source forgets the buckets

Before 3 it is as if nothing had happened: the source owns them, and thaws them if the mover is not heard of any more.
After 3 the rows stay where they were until 6, so 2 to 5 can be done again; what the target held before 5 counts for
nothing. So whoever dies, a source, a target or the mover, 1 to 6 are done again from the newest map that any server
knows, and each step that was done already does nothing. What no call may see half done, a server does while none runs.

There is one mover at a time: before it asks how far the one before came, it begins a turn at all servers, and whoever
is of an earlier turn is refused from then on.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from satrap.config.job import Job
from satrap.config.validation import check_number
from satrap.errors import AttemptError, DeadlineError, NotReadyError
from satrap.rpc import Client, Keys, Origin
from satrap.server.protocol import Numbers, ServerCalls
from satrap.sharding.shard_map import NO_MEMBER, ShardMap, check_addresses

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # before something is done again


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """What a run has done."""

    buckets: int
    rows: int
    bytes: int
    """Of their values and state."""
    seconds: float
    longest_frozen_seconds: float
    """For which calls that touch a bucket have waited, at most."""
    version: int
    """Of the map in the end."""


class Migration:
    """See the file's docstring."""

    def __init__(
        self,
        now: Sequence[str],
        wanted: Sequence[str],
        *,
        keys: Keys | None = None,
        deadline: float = 120.0,
        group_bytes: int = 8 << 20,
        breath: float = 1.0,
    ) -> None:
        """now: addresses of all servers of the job. wanted: of all that there are to be, by number; new ones run and
        belong to no job.

        keys: the client's.
        deadline: seconds after which a server that does not answer, or is not ready, is an error; run again then.
        group_bytes: of the rows that are frozen at a time, about.
        breath: for how long training goes on undisturbed after each group, in times of what the group took.
        """
        check_addresses(now)
        check_addresses(wanted)
        self._now, self._wanted = tuple(now), tuple(wanted)
        self._keys, self._deadline, self._group_bytes = keys, deadline, group_bytes
        self._breath = check_number("Migration", "breath", breath, 0.0)
        self._clients: dict[str, Client[ServerCalls]] = {}
        self._turn = 0
        self._num_buckets = self._num_rows = self._num_bytes = 0
        self._longest = 0.0

    def run(self) -> MigrationResult:
        """Returns when it is done. Raises if a server does not answer, and may be run again."""
        began = time.monotonic()
        with ExitStack() as self._open:
            job, members = self._begin()
            self._settle(job, members)  # what an earlier run has begun
            new = [address for address in self._wanted if address not in members.addresses]
            if new:
                members = self._settle(job, members.joined(new), members)
            servers = [members.addresses.index(address) for address in self._wanted]
            to = {bucket: members.addresses[server] for bucket, server in members.bucket_map.spread(servers).items()}
            for group in self._groups(members, to):
                at = time.monotonic()
                members = self._settle(job, members.moved({bucket: to[bucket] for bucket in group}), members)
                time.sleep(self._breath * (time.monotonic() - at))
            if members.addresses != self._wanted:
                members = self._settle(job, members.only(self._wanted), members)
            self._clients.clear()
        seconds = time.monotonic() - began
        return MigrationResult(
            self._num_buckets, self._num_rows, self._num_bytes, seconds, self._longest, members.version
        )

    def _call(self, address: str) -> ServerCalls:
        if address not in self._clients:
            client = Client(ServerCalls, address, keys=self._keys, deadline=self._deadline)
            self._clients[address] = self._open.enter_context(client)
        return self._clients[address].call

    def _begin(self) -> tuple[Job, ShardMap]:
        """Begins a turn at all servers: those of now, and those that an earlier run has added. Returns the newest that
        they know then, which nobody else changes any more."""
        _, _, found = self._newest()
        self._turn, mover = 1 + max(answer["turn"] for answer in found.values()), 1 + secrets.randbits(62)
        told: list[str] = []
        while new := [address for address in found if address not in told]:
            for address in new:
                self._call(address).begin_turn(self._origin(), mover)
            told += new
            job, members, found = self._newest()
        return job, members

    def _newest(self) -> tuple[Job, ShardMap, dict[str, Any]]:
        """What the servers answered, of all that any of them knows."""
        found: dict[str, Any] = {}
        new = list(dict.fromkeys((*self._now, *self._wanted)))
        while new:
            found |= {address: self._call(address).members(Origin(), 0) for address in new}
            newest = max(found.values(), key=lambda answer: int(answer["version"]))
            if newest["version"] == 0:
                raise NotReadyError(f"none of {', '.join(self._now)} has a job yet: a trainer's hello gives them one")
            members = ShardMap.from_dict(newest["members"])
            new = [address for address in members.addresses if address not in found]
        return Job.from_dict(newest["job"]), members, found

    def _origin(self, map_version: int = 0) -> Origin:
        return Origin(step=self._turn, map_version=map_version)

    def _groups(self, members: ShardMap, to: Mapping[int, str]) -> Iterator[list[int]]:
        """Buckets that move together: of one server to one other, and not too large."""
        owners = members.owner()
        pairs: dict[tuple[str, str], list[int]] = {}
        for bucket, target in to.items():
            pairs.setdefault((owners[bucket], target), []).append(bucket)
        for (source, _), buckets in pairs.items():
            used = self._patiently("the load", partial(self._used, source))
            most = max(1, self._group_bytes * owners.count(source) // max(1, used))
            for at in range(0, len(buckets), most):
                yield buckets[at : at + most]

    def _used(self, address: str) -> int:
        self._known(address)
        return int(self._call(address).load(Origin())["bytes"])

    def _settle(self, job: Job, after: ShardMap, before: ShardMap | None = None) -> ShardMap:
        """Until all servers are of these. before: None if an earlier run began this, and some may know."""
        self._patiently(f"map {after.version}", partial(self._once, job, after, before))
        return after

    def _patiently(self, what: str, do: Callable[[], T]) -> T:
        """What was interrupted is done again, from its start."""
        until, pause = time.monotonic() + self._deadline, _FIRST_PAUSE
        while True:
            try:
                return do()
            except (NotReadyError, AttemptError) as error:
                if time.monotonic() > until:
                    raise DeadlineError(f"{what} did not come about in {self._deadline:g} s: {error}") from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    # -- one change of the map ---------------------------------------------------------------------------------------

    def _once(self, job: Job, after: ShardMap, before: ShardMap | None) -> None:
        """One try at 1 to 6."""
        known = {address: self._known(address) for address in (*self._now, *self._wanted, *after.addresses)}
        if before is None:
            older = [each.members for each in known.values() if each.version and each.version == after.version - 1]
            before = older[-1] if older else after
        for address in before.addresses:
            known.setdefault(address, self._known(address))
        self._welcome(job, known, [address for address in after.addresses if address not in before.addresses], after)
        behind = [
            address for address in known if address in before.addresses and known[address].version < after.version
        ]
        began = time.monotonic()
        move = 1 + secrets.randbits(62)
        moves = {pair: np.array(b, np.uint32) for pair, b in before.changes(after).items() if pair[1] in behind}
        for (source, target), buckets in moves.items():
            self._copy(before, after, source, target, buckets, move, frozen=source in behind)
        for source in dict.fromkeys(source for source, _ in moves):
            self._tell(source, after, move)
        for (source, target), buckets in moves.items():
            trainers, windows, counters, oldest = self._call(source).companions_out(Origin(), buckets)
            self._call(target).companions_in(Origin(), move, trainers, windows, counters, oldest)
        targets = [target for _, target in moves]
        for address in dict.fromkeys((*targets, *behind)):
            self._tell(address, after, move)
        if moves:
            self._longest = max(self._longest, time.monotonic() - began)
            self._num_buckets += sum(map(len, moves.values()))
        for address in known:
            if address in before.addresses:
                self._call(address).forget(self._origin(after.version))

    def _copy(
        self, before: ShardMap, after: ShardMap, source: str, target: str, buckets: Numbers, move: int, *, frozen: bool
    ) -> None:
        """1 and 2."""
        if frozen:
            self._call(source).freeze(self._origin(before.version), move, buckets)
        state = self._call(source).members(Origin(), 0)["state"]
        self._call(target).receive(self._origin(), move, buckets, state)
        for table in range(len(state["versions"])):
            begin, total = 0, 1
            while begin < total:
                ids, steps, values, floats, seen, seen_at, counts, total = self._call(source).copy_out(
                    Origin(), buckets, table, begin
                )
                self._call(target).copy_in(Origin(), move, table, ids, steps, values, floats, seen, seen_at, counts)
                begin += max(1, len(ids))
                self._num_rows += len(ids)
                self._num_bytes += values.nbytes + floats.nbytes

    def _known(self, address: str) -> "_Known":
        """What a server knows; one of the job that was started again is told that it goes on."""
        answer = self._call(address).members(Origin(), 0)
        if not answer["version"]:
            return _Known(0, None, {})
        members = ShardMap.from_dict(answer["members"])
        number = members.number(address)
        if not answer["greeted"] and number is not None:
            self._call(address).hello(self._origin(), answer["job"], answer["members"], number, True)
        return _Known(members.version, members, answer["state"])

    def _welcome(self, job: Job, known: "Mapping[str, _Known]", new: list[str], after: ShardMap) -> None:
        """Those that join are told what job this is, and of which attempt."""
        state = next(each.state for address, each in known.items() if each.version and address not in new)
        for address in new:
            number = after.addresses.index(address)
            answer = self._call(address).hello(self._origin(), job.to_dict(), after.to_dict(), number, True)
            if answer["attempt"] < state["attempt"]:
                self._call(address).begin_attempt(Origin(attempt=state["attempt"]))
            for table, lr in enumerate(state["lrs"]):
                self._call(address).set_lr(
                    Origin(attempt=state["attempt"], map_version=after.version), table, float(lr)
                )

    def _tell(self, address: str, after: ShardMap, move: int) -> None:
        number = after.number(address)
        self._call(address).change(self._origin(), after.to_dict(), NO_MEMBER if number is None else number, move)


@dataclass(frozen=True, slots=True)
class _Known:
    """What a server answered; version 0: it has no job."""

    version: int
    found: ShardMap | None
    state: dict[str, Any]

    @property
    def members(self) -> ShardMap:
        assert self.found is not None
        return self.found
