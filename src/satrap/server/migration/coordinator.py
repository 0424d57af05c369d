"""Migrates buckets between servers while training continues. Makes only calls to the servers, and may be killed
anytime.

`Migration(current, target).run()` makes the servers at `target` the owners of all buckets, in equal shares, and removes
the others. It passes through shard maps of consecutive versions. Each of them, except the first and the last, transfers
some buckets of one server (the source) to another (the target):

 1. the source freezes the buckets: it refuses calls that would change them, and their callers retry
 2. the target makes room; rows and sightings are copied
 3. the source changes to the next map: from now on no server answers for these buckets, so no earlier call can be late
 4. windows, counters and oldest open steps are copied: they record what the source has applied
 5. the target changes to that map, then all others
 6. the source discards the buckets

Before 3 the migration has had no effect: the source owns the buckets, and thaws them if the coordinator falls silent.
After 3 the rows stay at the source until 6, so 2 to 5 can be repeated; what the target received before 5 does not
count. So if a source, a target or the coordinator is killed, 1 to 6 are repeated from the newest map that any server
knows, and each step that was completed has no effect. A server makes changes that must look atomic while no call runs.

Only one coordinator is active at a time: before it looks how far the previous one came, it takes a new fencing token at
all servers, which refuse calls under older tokens from then on.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from satrap.config.job import Job
from satrap.config.validation import check_number
from satrap.errors import AttemptError, DeadlineError, NotReadyError, SatrapError
from satrap.rpc import Backoff, Client, Keys, Origin
from satrap.rpc.release import require_same_release
from satrap.server.protocol import Numbers, ServerCalls
from satrap.sharding.shard_map import NO_MEMBER, ShardMap, check_addresses
from satrap.transfer import Transfer

T = TypeVar("T")

_LOG = logging.getLogger("satrap.server")

_PAUSES = 0.01, 0.5  # between retries: the first and the longest
_ASK_SECONDS = 2.0


class NoJobError(NotReadyError):
    """No trainer has called the servers yet, so they have no buckets to migrate."""


def ask_status(address: str, keys: Keys | None) -> dict[str, Any]:
    """Return the status of another server, as `ServerCalls.status`; empty if it does not answer soon."""
    with suppress(SatrapError), Client(ServerCalls, address, keys=keys, deadline=_ASK_SECONDS) as client:
        return client.call.status(Origin())
    return {}


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """The figures of a migration."""

    buckets: int
    rows: int
    bytes: int
    """Bytes of the rows' values and state."""
    seconds: float
    longest_frozen_seconds: float
    """The longest time for which calls to a bucket had to wait."""
    version: int
    """Version of the final map."""


class Migration:
    """One change of the servers of a job."""

    def __init__(
        self,
        current: Sequence[str],
        target: Sequence[str],
        *,
        keys: Keys | None = None,
        deadline: float = 120.0,
        group_bytes: int = 8 << 20,
        pause_ratio: float = 1.0,
    ) -> None:
        """current: addresses of all current servers of the job.
        target: addresses of all servers after the migration, in order; new ones are running and have no job.
        keys: the client's.
        deadline: seconds after which a server that does not answer, or is not ready, is an error; run again then.
        group_bytes: approximate size of the rows that are frozen at a time.
        pause_ratio: how long to pause after each group of buckets, as a multiple of the time that the group took.
        """
        check_addresses(current)
        check_addresses(target)
        self._current, self._target = tuple(current), tuple(target)
        self._keys, self._deadline, self._group_bytes = keys, deadline, group_bytes
        self._pause_ratio = check_number("Migration", "pause_ratio", pause_ratio, 0.0)
        self._clients: dict[str, Client[ServerCalls]] = {}
        self._fencing_token = 0
        self._num_buckets = self._num_rows = self._num_bytes = self._num_moves = 0
        self._longest_freeze = 0.0

    @property
    def progress(self) -> tuple[int, int]:
        """Number of buckets moved so far, and of those to move; 0 of 0 until that is known."""
        return self._num_buckets, max(self._num_buckets, self._num_moves)

    def run(self) -> MigrationResult:
        """Migrate, and return the figures. Raises if a server does not answer; may be run again."""
        start_time = time.monotonic()
        with ExitStack() as self._open:
            job, shard_map = self._take_fencing_token()
            self._apply_map(job, shard_map)  # completes a change that an earlier run started
            new = [address for address in self._target if address not in shard_map.addresses]
            if new:
                shard_map = self._apply_map(job, shard_map.with_servers((*shard_map.addresses, *new)), shard_map)
            servers = [shard_map.addresses.index(address) for address in self._target]
            moves = shard_map.bucket_map.spread(servers)
            self._num_moves = self._num_buckets + len(moves)
            to = {bucket: shard_map.addresses[server] for bucket, server in moves.items()}
            moved = 0
            what = f"move of {len(to)} buckets from {len(self._current)} to {len(self._target)} servers"
            with Transfer(_LOG, "move", what, total=len(to)) as transfer:
                for group in self._groups(shard_map, to):
                    at = time.monotonic()
                    after = shard_map.with_owners({bucket: to[bucket] for bucket in group})
                    shard_map = self._apply_map(job, after, shard_map)
                    moved += len(group)
                    transfer.reach(moved, len(to), self._num_bytes)
                    time.sleep(self._pause_ratio * (time.monotonic() - at))
            if shard_map.addresses != self._target:
                shard_map = self._apply_map(job, shard_map.with_servers(self._target), shard_map)
            self._clients.clear()
        seconds = time.monotonic() - start_time
        return MigrationResult(
            self._num_buckets, self._num_rows, self._num_bytes, seconds, self._longest_freeze, shard_map.version
        )

    def _call(self, address: str) -> ServerCalls:
        if address not in self._clients:
            client = Client(ServerCalls, address, keys=self._keys, deadline=self._deadline)
            self._clients[address] = self._open.enter_context(client)
        return self._clients[address].call

    def _take_fencing_token(self) -> tuple[Job, ShardMap]:
        """Take a new fencing token at all servers, including those that an earlier run added. Returns the newest shard
        map known then, which no other coordinator can change any more."""
        _, _, answers = self._query_all()
        self._fencing_token, holder = (
            1 + max(answer["fencing_token"] for answer in answers.values()),
            1 + secrets.randbits(62),
        )
        fenced: list[str] = []
        while new := [address for address in answers if address not in fenced]:
            for address in new:
                self._call(address).take_fencing_token(self._origin(), holder)
            fenced += new
            job, shard_map, answers = self._query_all()
        return job, shard_map

    def _query_all(self) -> tuple[Job, ShardMap, dict[str, Any]]:
        """Ask the servers of both lists, and those that their newest shard map names. Return the newest job and shard
        map, and the answer of each server."""
        answers: dict[str, Any] = {}
        new = list(dict.fromkeys((*self._current, *self._target)))
        while new:
            answers |= {address: self._shard_map_of(address) for address in new}
            newest = max(answers.values(), key=lambda answer: int(answer["version"]))
            if newest["version"] == 0:
                raise NoJobError(
                    f"none of the servers at {', '.join(self._current)} has a job: start a trainer on them first"
                )
            shard_map = ShardMap.from_dict(newest["shard_map"])
            new = [address for address in shard_map.addresses if address not in answers]
        return Job.from_dict(newest["job"]), shard_map, answers

    def _origin(self, map_version: int = 0) -> Origin:
        return Origin(step=self._fencing_token, map_version=map_version)

    def _groups(self, shard_map: ShardMap, to: Mapping[int, str]) -> Iterator[list[int]]:
        """Yield groups of buckets that migrate together: each from one server to one other, of a bounded size."""
        owners = shard_map.owner()
        pairs: dict[tuple[str, str], list[int]] = {}
        for bucket, target in to.items():
            pairs.setdefault((owners[bucket], target), []).append(bucket)
        for (source, _), buckets in pairs.items():
            used = self._retry("the load", partial(self._used_bytes, source))
            most = max(1, self._group_bytes * owners.count(source) // max(1, used))
            for at in range(0, len(buckets), most):
                yield buckets[at : at + most]

    def _used_bytes(self, address: str) -> int:
        self._query(address)
        return int(self._call(address).load(Origin())["bytes"])

    def _apply_map(self, job: Job, after: ShardMap, before: ShardMap | None = None) -> ShardMap:
        """Bring all servers to `after`. before: None if an earlier run started this change, and some may have it."""
        self._retry(f"map {after.version}", partial(self._try_apply, job, after, before))
        return after

    def _retry(self, what: str, do: Callable[[], T]) -> T:
        """Retry `do` from the start whenever a server was not ready or was replaced, until the deadline."""
        until, backoff = time.monotonic() + self._deadline, Backoff(*_PAUSES)
        while True:
            try:
                return do()
            except (NotReadyError, AttemptError) as error:
                if time.monotonic() > until:
                    raise DeadlineError(
                        f"{what} was not reached within {self._deadline:g} s, the deadline ({error}): run the "
                        "migration again"
                    ) from error
            time.sleep(backoff.next_pause())

    # -- one change of the map ---------------------------------------------------------------------------------------

    def _try_apply(self, job: Job, after: ShardMap, before: ShardMap | None) -> None:
        """Try 1 to 6 once."""
        answers = {address: self._query(address) for address in (*self._current, *self._target, *after.addresses)}
        if before is None:
            older = [answer["shard_map"] for answer in answers.values() if 0 < answer["version"] == after.version - 1]
            before = ShardMap.from_dict(older[-1]) if older else after
        for address in before.addresses:
            answers.setdefault(address, self._query(address))
        self._add_servers(
            job, answers, [address for address in after.addresses if address not in before.addresses], after
        )
        behind = [address for address in before.addresses if answers[address]["version"] < after.version]
        start_time = time.monotonic()
        migration = 1 + secrets.randbits(62)
        moves = {pair: np.array(b, np.uint32) for pair, b in before.changes(after).items() if pair[1] in behind}
        for (source, target), buckets in moves.items():
            if source in behind:
                self._call(source).freeze(self._origin(before.version), migration, buckets)
            self._copy_rows(source, target, buckets, migration)
        for source in dict.fromkeys(source for source, _ in moves):
            self._install_map(source, after, migration)
        for (source, target), buckets in moves.items():
            trainers, windows, counters, oldest = self._call(source).export_metadata(Origin(), buckets)
            self._call(target).import_metadata(Origin(), migration, trainers, windows, counters, oldest)
        targets = [target for _, target in moves]
        for address in dict.fromkeys((*targets, *behind)):
            self._install_map(address, after, migration)
        if moves:
            self._longest_freeze = max(self._longest_freeze, time.monotonic() - start_time)
            self._num_buckets += sum(map(len, moves.values()))
        for address in before.addresses:
            self._call(address).discard_buckets(self._origin(after.version))

    def _copy_rows(self, source: str, target: str, buckets: Numbers, migration: int) -> None:
        """Do 2."""
        state = self._call(source).get_shard_map(Origin(), 0).get("state")
        if state is None:
            raise NotReadyError(f"the server at {source} has no job any more: it was restarted without its rows")
        self._call(target).expect_buckets(self._origin(), migration, buckets, state)
        for table in range(len(state["versions"])):
            begin, total = 0, 1
            while begin < total:
                answer = self._call(source).export_rows(Origin(), buckets, table, begin)
                ids, _, values, floats, *_, total = answer
                self._call(target).import_rows(Origin(), migration, table, *answer[:-1])
                begin += max(1, len(ids))
                self._num_rows += len(ids)
                self._num_bytes += values.nbytes + floats.nbytes

    def _shard_map_of(self, address: str) -> dict[str, Any]:
        answer = self._call(address).get_shard_map(Origin(), 0)
        require_same_release(answer.get("release"), f"the server at {address}")
        return answer

    def _query(self, address: str) -> dict[str, Any]:
        """Return a server's answer to `get_shard_map`. Repeats the handshake with a restarted server of the job."""
        answer = self._shard_map_of(address)
        if answer["version"] and not answer["has_handshake"]:
            number = ShardMap.from_dict(answer["shard_map"]).number(address)
            if number != NO_MEMBER:
                self._call(address).hello(self._origin(), answer["job"], answer["shard_map"], number, True)
        return answer

    def _add_servers(self, job: Job, answers: Mapping[str, Any], new: list[str], after: ShardMap) -> None:
        """Give servers that join the job, its attempt and its learning rates."""
        states = [answer["state"] for address, answer in answers.items() if answer["version"] and address not in new]
        if not states:
            raise NotReadyError(
                f"no server at {', '.join(answers)} has a job any more: all were restarted without rows"
            )
        state = states[0]
        for address in new:
            number = after.addresses.index(address)
            answer = self._call(address).hello(self._origin(), job.to_dict(), after.to_dict(), number, True)
            if answer["attempt"] < state["attempt"]:
                self._call(address).begin_attempt(Origin(attempt=state["attempt"]))
            for table, lr in enumerate(state["lrs"]):
                self._call(address).set_lr(
                    Origin(attempt=state["attempt"], map_version=after.version), table, float(lr)
                )

    def _install_map(self, address: str, after: ShardMap, migration: int) -> None:
        self._call(address).install_map(self._origin(), after.to_dict(), after.number(address), migration)
