"""The servers of a job, as one process of it sees them: greeted once, then called together.

A call goes to all servers that it concerns before the first answer is waited for, and all answers are waited for in
turn. What fails, fails with the server named; `satrap.rpc` has tried until the deadline then.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from satrap.bucketmap import BucketMap
from satrap.calls import WIRES, ServerCalls
from satrap.checks import check_choice
from satrap.errors import AttemptError, ConfigError, DeadlineError, NotReadyError, SatrapError, TicketError
from satrap.job import Job
from satrap.rpc import Origin
from satrap.rpc.client import Client, Pending
from satrap.rpc.keys import Keys

_MOST_GREETINGS = 8  # of one server in one call: each time it was started again
_TURN_SECONDS = 0.1
LAUNCH_ATTEMPTS = 1 << 16
"""Each launch of the trainers has as many attempts of its own: a restore begins one."""


class Servers:
    """The servers of a job, as one process of it calls them."""

    def __init__(
        self,
        job: Job,
        addresses: Sequence[str],
        *,
        trainer: int = 0,
        together: int = 0,
        attempt: int | None = None,
        launch: int = 0,
        keys: Keys | None = None,
        wire: str = "float32",
        deadline: float = 60.0,
        retry_seconds: float = 2.0,
    ) -> None:
        """Greets them all; raises if one is of another job.

        addresses: of server 0, 1, ...: "tcp://host:port".
        keys: the client's, of `satrap keys`; without them servers are on this machine.
        trainer: which of them this process is.
        together: how many trainers' updates make one step; 0: each is a step of its own.
        wire: how rows and gradients cross the network. "float32": as they are. "float16": scaled by row and rounded, in
            half the bytes; each by at most 2^-11 of the largest magnitude of its row (core/wire.hpp).
        attempt: of the run, if somebody else began it. None: this process begins the next.
        launch: how often a supervisor has started the trainers. Its attempts lie above those of all launches before;
            0: there is no supervisor.
        deadline: seconds after which a call that got no answer is an error.
        retry_seconds: after which it is sent again.
        """
        if not isinstance(addresses, list | tuple) or not addresses or not all(isinstance(a, str) for a in addresses):
            raise ConfigError(f"addresses is {addresses!r}; wanted a list of at least one 'tcp://host:port'")
        if len(set(addresses)) < len(addresses):
            raise ConfigError(f"addresses is {list(addresses)}; wanted each server once")
        self.job, self.trainer, self.together, self.addresses = job, trainer, together, tuple(addresses)
        check_choice("Servers", "wire", wire, WIRES)
        self.wire = wire
        self.skipped = [0] * len(job.tables)
        """Of each table: gradients of this process that were not finite and were left out."""
        self.bucket_map = BucketMap.even([table.resolved_num_buckets for table in job.tables], len(addresses))
        how: dict[str, Any] = {"keys": keys, "deadline": deadline, "retry_seconds": retry_seconds}
        self._clients = [Client(ServerCalls, each, **how) for each in addresses]
        self.attempt = 0 if attempt is None else attempt
        try:
            self._begin(first=attempt is None, launch=launch)
        except BaseException:
            self.close()
            raise

    def _begin(self, *, first: bool, launch: int) -> None:
        self.reach()  # all of them, before one is this job's
        found = [self._greet(server) for server in range(len(self))]
        self.latest_step: int = max(each["latest_step"] for each in found)
        """Of an earlier run, whose rows are still there."""
        self.lrs: list[float] = list(found[0]["lrs"])
        newest: int = max(each["attempt"] for each in found)
        self.newest_attempt = newest
        """That had begun when they were greeted."""
        if first:
            if launch and newest >= (launch + 1) * LAUNCH_ATTEMPTS:
                raise AttemptError(f"launch {newest // LAUNCH_ATTEMPTS} has begun: this process is of launch {launch}")
            self.attempt = 1 + max(newest, launch * LAUNCH_ATTEMPTS)
            for client in self._clients:
                client.call.begin(self.origin(0))

    def reach(self) -> None:
        """Raises unless every server answers within a call's deadline, and is this job's."""
        for server in range(len(self)):
            self._greet(server, commit=False)

    def __len__(self) -> int:
        return len(self._clients)

    def origin(self, step: int) -> Origin:
        """Of a call of ours."""
        return Origin(attempt=self.attempt, trainer=self.trainer, step=step, map_version=self.bucket_map.version)

    def each(
        self, method: str, origin: Origin, arguments: Mapping[int, tuple[Any, ...]], patient: bool = False
    ) -> dict[int, Any]:
        """Calls the servers named, all at once, and returns what each answered. One that was restarted meanwhile is
        greeted and called again; a ticket that it does not know any more comes back as the TicketError. Any other error
        is raised once all have answered, so that none works on, or one has not within its deadline.

        patient: they may take as long as they need; only silence of a call's deadline is an error, and errors name
        their servers."""

        def begin(server: int) -> Pending:
            return self._clients[server].begin(method, origin, *arguments[server], patient=patient)

        pending = {server: begin(server) for server in arguments}
        greetings = dict.fromkeys(arguments, 0)
        found: dict[int, Any] = {}
        failed: dict[int, SatrapError] = {}
        while pending:
            for server, call in list(pending.items()):
                if not call.wait(_TURN_SECONDS / len(pending)):
                    continue
                del pending[server]
                try:
                    found[server] = call.result()
                except NotReadyError:
                    greetings[server] += 1
                    if greetings[server] > _MOST_GREETINGS:
                        raise
                    self._greet(server)
                    pending[server] = begin(server)
                except TicketError as error:
                    found[server] = error
                except SatrapError as error:
                    failed[server] = error
                    if isinstance(error, DeadlineError):  # the others may take long
                        pending.clear()
                        break
        if failed:
            first = next(iter(failed.values()))
            if not patient:
                raise first
            told = "; ".join(f"{self.addresses[server]}: {each}" for server, each in failed.items())
            raise type(first)(told) from first
        return found

    def all(self, method: str, *arguments: Any, patient: bool = False) -> list[Any]:
        """What each server answers to a call that belongs to no step."""
        found = self.each(method, self.origin(0), dict.fromkeys(range(len(self)), arguments), patient)
        return [found[server] for server in range(len(self))]

    def close(self) -> None:
        """Ends the connections."""
        for client in self._clients:
            client.close()

    def _greet(self, server: int, *, commit: bool = True) -> dict[str, Any]:
        job, bucket_map = self.job.to_dict(), self.bucket_map.to_dict()
        return self._clients[server].call.hello(Origin(), job, bucket_map, server, commit)
