"""The servers of a job, as one process of it sees them: greeted once, then called together.

A call goes to all servers that it concerns before the first answer is waited for, and all answers are waited for in
turn. What fails, fails with the server named; `satrap.rpc` has tried until the deadline then.

Servers come and go, and buckets with them, while all this goes on. A `Topology` is what is known of that at one moment;
whoever is refused as of an older one finds the newest in `ServerGroup.view`, and does what it did with that.
"""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.collected import close_when_collected
from satrap.config.job import Job
from satrap.config.validation import check_choice
from satrap.errors import AttemptError, DeadlineError, InputError, MovedError, NotReadyError, SatrapError, TicketError
from satrap.interrupts import Uninterrupted
from satrap.rpc import Client, Keys, Origin, Pending
from satrap.server.lease import LEASE_SECONDS, Lease, process_id
from satrap.server.protocol import NO_ATTEMPT, WIRES, ServerCalls
from satrap.sharding.shard_map import ShardMap, check_addresses

LAUNCH_ATTEMPTS = 1 << 16
"""Each launch of the trainers has as many attempts of its own: a restore begins one."""
_CLAIMS = 2 * _core.WINDOW_STEPS  # steps whose update is remembered: older ones the servers refuse themselves
_MOST_GREETINGS = 8  # of one server in one call: each time it was started again
_TURN_SECONDS = 0.1
_FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # between two questions whether buckets have arrived
_ELSEWHERE = (
    "{where} trains on these servers, and would be replaced: look at its rows with satrap.Reader(servers=...), wait "
    "until it has ended, or say satrap.Embeddings(..., take_over=True) to end its training"
)


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """The servers as they are known at one moment."""

    members: ShardMap
    clients: tuple[Client[ServerCalls], ...]
    owners: NDArray[np.uint32]
    """Of every bucket, of one table after the other."""

    def __len__(self) -> int:
        return len(self.clients)


@dataclass(slots=True)
class ServerFailure:
    """What one call met at one server."""

    until: float
    """When it is given up."""
    pause: float = _FIRST_PAUSE
    greetings: int = 0


class ServerGroup:
    """The servers of a job, as one process of it calls them."""

    def __init__(
        self,
        job: Job,
        addresses: Sequence[str],
        *,
        trainer: int = 0,
        together: int = 0,
        attempt: int | None = None,
        begin: bool = True,
        launch: int = 0,
        take_over: bool = False,
        relays: bool = False,
        keys: Keys | None = None,
        wire: str = "float32",
        deadline: float = 60.0,
        retry_seconds: float = 2.0,
    ) -> None:
        """Greets them all; raises if one is of another job.

        addresses: of server 0, 1, ... If they were told of others since, those are the servers.
        keys: the client's, of `satrap keys`; without them servers are on this machine.
        trainer: which of them this process is.
        together: how many trainers' updates make one step; 0: each is a step of its own.
        wire: how rows and gradients cross the network. "float32": as they are. "float16": scaled by row and rounded, in
            half the bytes; each by at most 2^-11 of the largest magnitude of its row (core/kernels/fp16_codec.hpp).
        attempt: of the run, if somebody else began it. None: this process begins the next, now, or if it is not to
            `begin`, when it is asked to; until then it may read.
        launch: how often a supervisor has started the trainers. Its attempts lie above those of all launches before;
            0: there is no supervisor.
        take_over: an attempt may be begun though another process trains in the one before.
        relays: this is a worker, which sends on what its trainer has numbered.
        deadline: seconds after which a call that got no answer is an error.
        retry_seconds: after which it is sent again.
        """
        check_addresses(addresses)
        check_choice("Servers", "wire", wire, WIRES)
        self.job, self.trainer, self.together, self.wire = job, trainer, together, wire
        self.skipped = [0] * len(job.tables)
        """Of each table: gradients of this process that were not finite and were left out."""
        self._how: dict[str, Any] = {"keys": keys, "deadline": deadline, "retry_seconds": retry_seconds}
        self._deadline = deadline
        self._relays = relays
        self._claims: OrderedDict[tuple[int, int], weakref.ref[Any]] = OrderedDict()  # by attempt and step
        self._lock = threading.Lock()  # of what follows
        self._clients: dict[str, Client[ServerCalls]] = {}
        first = ShardMap.first([table.resolved_num_buckets for table in job.tables], addresses)
        self.view = self._view_of(first)
        """As of now: whoever makes several calls that belong together takes it once."""
        self.attempt = NO_ATTEMPT if attempt is None else attempt
        self._launch, self._take_over = launch, take_over
        self._lease: Lease | None = None
        try:
            self._greet_all()
            if attempt is None and begin:
                self.begin()
        except BaseException:
            self.close()
            raise

    def _greet_all(self) -> None:
        while any(self._learn(self.view, server) for server in range(len(self.view))):
            pass  # there may be fewer in the newer view
        self.reach()  # all of them, before one is this job's
        self._know(self._greeted())

    def _know(self, found: list[dict[str, Any]]) -> None:
        self.latest_step: int = max(each["latest_step"] for each in found)
        """Of an earlier run, whose rows are still there."""
        self.lrs: list[float] = list(found[0]["lrs"])
        self.newest_attempt: int = max(each["attempt"] for each in found)
        """That had begun when they were greeted."""

    def begin(self) -> None:
        """Begins the next attempt, unless this process is of one. AttemptError if another process trains in the newest,
        which it is refused from then on; but a later launch replaces an earlier one."""
        if self.attempt != NO_ATTEMPT:
            return
        found = self._greeted(commit=False)
        self._know(found)
        newest, launch = self.newest_attempt, self._launch
        if launch and newest >= (launch + 1) * LAUNCH_ATTEMPTS:
            raise AttemptError(f"launch {newest // LAUNCH_ATTEMPTS} has begun: this process is of launch {launch}")
        if not self._take_over and not (launch and newest < launch * LAUNCH_ATTEMPTS):
            self._wait_for_others(found)
        self.attempt = 1 + max(newest, launch * LAUNCH_ATTEMPTS)
        try:
            self.all("begin_attempt")
        except BaseException:
            self.attempt = NO_ATTEMPT
            raise
        self._lease = Lease(self.view.clients, self.origin(0))
        close_when_collected(self, self._lease.end)

    def begin_next(self) -> None:
        """The attempt that a restore begins follows this process's own."""
        self.begin()
        self.attempt += 1
        if self._lease is not None:
            self._lease.origin = self.origin(0)

    def _wait_for_others(self, found: list[dict[str, Any]]) -> None:
        """Returns once no other process has a lease; raises if one renews its own meanwhile. found: by now."""
        before: dict[str, float] = {}
        while True:
            left: dict[str, float] = {}
            for each in found:
                for process, (where, seconds) in each["leases"].items():
                    if process != process_id():
                        left[process] = max(seconds, left.get(process, 0.0))
                        if seconds > before.get(process, LEASE_SECONDS):
                            raise AttemptError(_ELSEWHERE.format(where=where))
            if not left:
                return
            before = left
            time.sleep(_TURN_SECONDS)
            found = self._greeted(commit=False)

    def reach(self) -> None:
        """Raises unless every server answers within a call's deadline, and is this job's."""
        self._greeted(commit=False)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of now."""
        return self.view.members.addresses

    def origin(self, step: int, view: Topology | None = None) -> Origin:
        """Of a call of ours."""
        version = (view or self.view).members.version
        return Origin(attempt=self.attempt, trainer=self.trainer, step=step, map_version=version)

    def claim(self, step: int, ticket: object) -> None:
        """Notes that the step's update is this ticket's, before it is sent; InputError if another's was sent before.

        Servers know an update by its step alone: they would take this one for the other, sent again, and answer that it
        is applied. No number crosses the network for it: step numbers of an attempt are given by this process only, and
        what it remembers outlives a server that is started again."""
        if self._relays:
            return
        with Uninterrupted(), self._lock:
            known = self._claims.setdefault((self.attempt, step), weakref.ref(ticket))
            if known() is not ticket:
                raise InputError(
                    f"step {step} of trainer {self.trainer}: the update of another batch was sent under this number "
                    "before, and servers apply one update of each step; give this one a step of its own. Nothing of it "
                    "was sent"
                )
            while len(self._claims) > _CLAIMS:
                self._claims.popitem(last=False)

    def each(
        self,
        method: str,
        step: int,
        arguments: Mapping[int, tuple[Any, ...]],
        *,
        view: Topology,
        patient: bool = False,
    ) -> dict[int, Any]:
        """Calls the servers named, all at once, and returns what each answered. One that was restarted meanwhile is
        greeted and called again, and one whose buckets are on the move when they may be called; a ticket that it does
        not know any more comes back as the TicketError. Any other error is raised once all have answered, so that none
        works on, or one has not within its deadline.

        step: 0: the call belongs to none.
        view: that the call was made for. MovedError: there is a newer one, and all is to be done again with that. What
            some servers have done, they do not do twice.
        patient: they may take as long as they need; only silence of a call's deadline is an error, and errors name
            their servers.
        """
        origin = self.origin(step, view)

        def begin(server: int) -> Pending:
            return view.clients[server].begin(method, origin, *arguments[server], patient=patient)

        pending = {server: begin(server) for server in arguments}
        trouble = {server: ServerFailure(time.monotonic() + self._deadline) for server in arguments}
        found: dict[int, Any] = {}
        failed: dict[int, SatrapError] = {}
        while pending:
            for server, call in list(pending.items()):
                if not call.wait(_TURN_SECONDS / len(pending)):
                    continue
                del pending[server]
                try:
                    if self._answered(view, server, call, trouble[server], found):
                        continue
                    pending[server] = begin(server)
                except SatrapError as error:
                    failed[server] = error
                    if isinstance(error, DeadlineError) or (isinstance(error, MovedError) and not patient):
                        pending.clear()  # the others may take long
                        break
        if failed:
            raise self._failure(view, failed, patient)
        return found

    def all(self, method: str, *arguments: Any, step: int = 0, patient: bool = False) -> list[Any]:
        """What each server answers; of one map, all of them. See `each`."""
        while True:
            view = self.view
            asked = dict.fromkeys(range(len(view)), arguments)
            try:
                found = self.each(method, step, asked, view=view, patient=patient)
            except MovedError:
                continue  # there is a newer view
            return [found[server] for server in asked]

    def close(self) -> None:
        """Ends the connections."""
        if self._lease is not None:
            self._lease.end()
        for client in self._clients.values():
            client.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _answered(
        self, view: Topology, server: int, call: Pending, trouble: ServerFailure, found: dict[int, Any]
    ) -> bool:
        """Notes what a server answered; False if it is to be called again."""
        try:
            found[server] = call.result()
        except TicketError as error:
            found[server] = error
        except MovedError as error:
            self._wait_for_move(view, server, error, trouble)
            return False
        except NotReadyError as error:
            self._revive(view, server, error, trouble)
            return False
        except DeadlineError as error:
            self._ask_others(view, server, error)
            raise
        return True

    def _revive(self, view: Topology, server: int, error: NotReadyError, trouble: ServerFailure) -> None:
        """One that was started again is greeted."""
        trouble.greetings += 1
        if trouble.greetings > _MOST_GREETINGS:
            raise error
        self._greet(view, server)

    def _failure(self, view: Topology, failed: Mapping[int, SatrapError], patient: bool) -> SatrapError:
        """What to raise of these."""
        own = {server: error for server, error in failed.items() if not isinstance(error, MovedError)} or failed
        first = next(iter(own.values()))
        if not patient or isinstance(first, MovedError):
            return first
        told = type(first)("; ".join(f"{view.members.addresses[server]}: {each}" for server, each in own.items()))
        told.__cause__ = first
        return told

    def _wait_for_move(self, view: Topology, server: int, error: MovedError, trouble: ServerFailure) -> None:
        """A while, longer each time; raises the error if there is a newer view."""
        if self._learn(view, server):
            raise error
        if time.monotonic() > trouble.until:
            raise DeadlineError(
                f"{view.clients[server].address}: buckets were on the move for {self._deadline:g} s ({error}): the "
                "process that moves buckets may have stopped: run `satrap move` again with the same lists"
            ) from error
        time.sleep(trouble.pause)
        trouble.pause = min(2 * trouble.pause, LONGEST_PAUSE)

    def _learn(self, view: Topology, server: int) -> bool:
        """Whether there is a newer view than this one; asks the server."""
        if view is not self.view:
            return True
        found = view.clients[server].call.members(Origin(), max(1, view.members.version))
        if found["version"] <= max(1, view.members.version):
            return False
        newest = ShardMap.from_dict(found["members"])
        with self._lock:
            if self.view.members.version < newest.version:
                self._take(newest)
        return True

    def _take(self, members: ShardMap) -> None:
        self.view = self._view_of(members)
        if self._lease is not None:
            self._lease.clients = self.view.clients

    def _ask_others(self, view: Topology, silent: int, error: DeadlineError) -> None:
        """A server that does not answer may have been taken away: raises MovedError if another knows of that."""
        for server in range(len(view)):
            with suppress(DeadlineError):
                if server != silent and self._learn(view, server):
                    raise MovedError(f"a server is silent, and the others are of a newer map ({error})") from error

    def _view_of(self, members: ShardMap) -> Topology:
        for address in members.addresses:
            if address not in self._clients:
                self._clients[address] = Client(ServerCalls, address, **self._how)
        clients = tuple(self._clients[address] for address in members.addresses)
        return Topology(members, clients, np.array(members.bucket_map.flat(), np.uint32))

    def _greeted(self, *, commit: bool = True) -> list[dict[str, Any]]:
        """What each server of one view answers to hello."""
        while True:
            view = self.view
            try:
                return [self._greet(view, server, commit=commit) for server in range(len(view))]
            except MovedError:
                continue

    def _greet(self, view: Topology, server: int, *, commit: bool = True) -> dict[str, Any]:
        job, members = self.job.to_dict(), view.members.to_dict()
        trouble = ServerFailure(time.monotonic() + self._deadline)
        while True:
            try:
                return view.clients[server].call.hello(Origin(), job, members, server, commit)
            except MovedError as error:
                self._wait_for_move(view, server, error, trouble)
