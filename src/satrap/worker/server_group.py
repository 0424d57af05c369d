"""The servers of a job, as one process of it calls them: a handshake with each, then calls to several at once.

A call is sent to all servers that it concerns before the first answer is waited for. An error names its server;
`satrap.rpc` has retried until the deadline then.

Servers join and leave, and buckets move between them, while calls are in flight. A `Topology` is what is known at one
moment. Calls that are refused because their topology is outdated are repeated for the newest one: `ServerGroup.follow`.
"""

import logging
import threading
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.collected import close_when_collected
from satrap.config.job import Job
from satrap.config.validation import check_choice
from satrap.errors import AttemptError, DeadlineError, InputError, MovedError, NotReadyError, SatrapError, TicketError
from satrap.event_log import event
from satrap.interrupts import Uninterrupted
from satrap.rpc import Backoff, Client, Gathers, Keys, Origin, PendingCall, send_all
from satrap.rpc.open_files import FILES_PER_CONNECTION, require_files
from satrap.rpc.release import require_same_release
from satrap.server.lease import LEASE_SECONDS, Lease, process_id
from satrap.server.protocol import NO_ATTEMPT, WIRES, ServerCalls
from satrap.sharding.owner_split import OwnedIds, split_by_owner
from satrap.sharding.shard_map import ShardMap, check_addresses
from satrap.worker.remote_progress import RemoteProgress

_LOG = logging.getLogger("satrap.worker")
LAUNCH_ATTEMPTS = 1 << 16
"""Number of attempts reserved for each launch of the trainers: every restore starts another attempt."""
_CLAIMS = 2 * _core.WINDOW_STEPS  # steps whose update is remembered; the servers refuse older ones themselves
_MAX_HANDSHAKES = 8  # handshakes with one server in one call: one for each restart
_POLL_SECONDS = 0.1
_CALL_AGAIN = object()
_PAUSES = 0.001, 0.05  # the first and the longest between two questions whether buckets have arrived
_LEASE_HELD = (
    "{where} is training on these servers and would be replaced: read its rows with satrap.Reader(servers=...), wait "
    "until it has ended, or pass satrap.Deployment(..., take_over=True) to end its training"
)
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """The servers of a job as they are known at one moment."""

    shard_map: ShardMap
    clients: tuple[Client[ServerCalls], ...]
    owners: NDArray[np.uint32]
    """The owner of every bucket, one table after the other."""

    def __len__(self) -> int:
        return len(self.clients)


@dataclass(slots=True)
class RetryState:
    """The retries of one call to one server."""

    until: float
    """When to give up."""
    handshakes: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(*_PAUSES))


class ServerGroup:
    """The servers of a job, as one process of it calls them."""

    def __init__(
        self,
        job: Job,
        addresses: Sequence[str],
        *,
        trainer: int = 0,
        barrier_size: int = 0,
        attempt: int | None = None,
        begin: bool = True,
        launch: int = 0,
        take_over: bool = False,
        is_relay: bool = False,
        keys: Keys | None = None,
        wire: str = "float32",
        deadline: float = 60.0,
        retry_seconds: float = 2.0,
    ) -> None:
        """Make a handshake with all servers; raise if one belongs to another job.

        addresses: of server 0, 1, ... If the servers know a newer shard map, its addresses replace these.
        keys: the client's, from `satrap keys`; without keys the servers must be on this machine.
        trainer: the rank of this process.
        barrier_size: how many trainers' updates form one step; 0: each update is a step.
        wire: how rows and gradients cross the network. "float32": unchanged. "float16": scaled by row and rounded, in
            half the bytes, with an error of at most 2^-11 of the row's largest magnitude (core/kernels/fp16_codec.hpp).
        attempt: the run's, if another process started it. None: this process starts the next one, now or, without
            `begin`, when `begin_attempt` is called; until then it may only read.
        launch: how often a supervisor has launched the trainers. Its attempts are higher than those of all earlier
            launches. 0: there is no supervisor.
        take_over: whether an attempt may start while another process trains in the previous one.
        is_relay: this process is a worker, which forwards steps that its trainer has numbered.
        deadline: seconds after which a call without an answer is an error.
        retry_seconds: seconds after which a call without an answer is sent again.
        """
        check_addresses(addresses)
        check_choice("ServerGroup", "wire", wire, WIRES)
        self.trainer, self.barrier_size, self.wire = trainer, barrier_size, wire
        self.num_skipped = [0] * len(job.tables)
        """For each table, the number of this process's gradients that were not finite and were left out."""
        self._client_options: dict[str, Any] = {"keys": keys, "deadline": deadline, "retry_seconds": retry_seconds}
        self._deadline, self._relays = deadline, is_relay
        self._claims: OrderedDict[tuple[int, int], weakref.ref[Any]] = OrderedDict()  # by attempt and step
        self._lock, self._writes, self._num_writes = threading.Lock(), threading.Lock(), 0
        self._clients, self._gathers = dict[str, Client[ServerCalls]](), Gathers()  # under the lock, as what follows
        self.attempt = NO_ATTEMPT if attempt is None else attempt
        self._launch, self._take_over = launch, take_over
        self._lease: Lease | None = None
        try:
            self.job = job.on_servers(len(addresses), self._job_there(addresses))
            """The job, with the number of buckets that each table has on these servers."""
            self._num_buckets = [table.resolved_num_buckets for table in self.job.tables]
            self.topology = self._topology_of(self._first_map(addresses))
            """The current topology. Calls that belong together must use the same one."""
            self._connect()
            if attempt is None and begin:
                self.begin_attempt()
        except BaseException:
            self.close()
            raise

    def _first_map(self, addresses: Sequence[str]) -> ShardMap:
        whole = [number for number, table in enumerate(self.job.tables) if table.shard == "table"]
        return ShardMap.first(self._num_buckets, addresses, whole)

    def _job_there(self, addresses: Sequence[str]) -> Job | None:
        """Return the job of the first server that has one."""
        for client in self._clients_of(addresses):
            answer = client.call.get_shard_map(Origin(), 0)
            require_same_release(answer.get("release"), f"the server at {client.address}")
            if "job" in answer:
                return Job.from_dict(answer["job"])
        return None

    def _connect(self) -> None:
        while any(self._refresh(self.topology, server) for server in range(len(self.topology))):
            pass  # the newer map may have fewer servers
        self.require_reachable()  # all servers, before one is assigned to this job
        self._record(self._handshake_all())

    def _record(self, answers: list[dict[str, Any]]) -> None:
        self.latest_step: int = max(answer["latest_step"] for answer in answers)
        """The latest step of an earlier run whose rows the servers still hold."""
        self.lrs: list[float] = list(answers[0]["lrs"])
        self.newest_attempt: int = max(answer["attempt"] for answer in answers)
        """The newest attempt as of the handshake."""

    def begin_attempt(self) -> None:
        """Start the next attempt, unless this process is in one; the servers refuse the newest one's trainer from then
        on. AttemptError if that trainer holds a lease, unless this launch is later."""
        if self.attempt != NO_ATTEMPT:
            return
        answers = self._handshake_all(commit=False)
        self._record(answers)
        newest, launch = self.newest_attempt, self._launch
        if launch and newest >= (launch + 1) * LAUNCH_ATTEMPTS:
            raise AttemptError(
                f"launch {newest // LAUNCH_ATTEMPTS} has started: this process, of launch {launch}, was replaced"
            )
        if not self._take_over and not (launch and newest < launch * LAUNCH_ATTEMPTS):
            self._wait_for_leases(answers)
        self.attempt = 1 + max(newest, launch * LAUNCH_ATTEMPTS)
        try:
            self.call_all("begin_attempt")
        except BaseException:
            self.attempt = NO_ATTEMPT
            raise
        _LOG.info("attempt %d started", self.attempt, extra=event("attempt", attempt=self.attempt, previous=newest))
        self._lease = Lease(self.topology.clients, self.origin(0))
        close_when_collected(self, self._lease.release)

    def begin_next_attempt(self) -> None:
        """Advance to the next attempt, which a restore starts."""
        self.begin_attempt()
        self.attempt += 1
        if self._lease is not None:
            self._lease.origin = self.origin(0)

    def _wait_for_leases(self, answers: list[dict[str, Any]]) -> None:
        """Return once no other process holds a lease. AttemptError if one is renewed meanwhile. answers: handshakes."""
        previous: dict[str, float] = {}
        while True:
            remaining: dict[str, float] = {}
            for answer in answers:
                for process, (where, seconds) in answer["leases"].items():
                    if process != process_id():
                        remaining[process] = max(seconds, remaining.get(process, 0.0))
                        if seconds > previous.get(process, LEASE_SECONDS):
                            raise AttemptError(_LEASE_HELD.format(where=where))
            if not remaining:
                return
            previous = remaining
            time.sleep(_POLL_SECONDS)
            answers = self._handshake_all(commit=False)

    def require_reachable(self) -> None:
        """Raise unless every server answers within a call's deadline and belongs to this job."""
        self._handshake_all(commit=False)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the servers in the current topology."""
        return self.topology.shard_map.addresses

    def origin(self, step: int, topology: Topology | None = None) -> Origin:
        """Return the origin of a call by this process."""
        version = (topology or self.topology).shard_map.version
        return Origin(attempt=self.attempt, trainer=self.trainer, step=step, map_version=version)

    def add_skipped(self, counts: Sequence[int]) -> None:
        with self._lock:
            self.num_skipped = [sum(numbers) for numbers in zip(self.num_skipped, counts, strict=True)]

    def claim(self, step: int, ticket: object) -> None:
        """Reserve the step's update for this ticket, before it is sent; InputError if another ticket's was sent before.

        Servers know an update by its step alone: they would take this one for a duplicate of the other, and acknowledge
        it without applying it. Only this process numbers the steps of its attempt, and its memory outlives a restarted
        server, so nothing needs to cross the network for it."""
        if self._relays:
            return
        with Uninterrupted(), self._lock:
            known = self._claims.setdefault((self.attempt, step), weakref.ref(ticket))
            if known() is not ticket:
                raise InputError(
                    f"step {step} of trainer {self.trainer}: the update of another batch was sent under this number "
                    "before, and servers apply one update of each step; give this one another step. Nothing of it was "
                    "sent"
                )
            while len(self._claims) > _CLAIMS:
                self._claims.popitem(last=False)

    @contextmanager
    def next_write(self) -> Iterator[int]:
        """Return the number of a write of rows, for which servers tell a duplicate; one write at a time."""
        with self._writes:
            self._num_writes += 1
            yield self._num_writes

    def follow(self, work: Callable[[Topology], _R]) -> _R:
        """Return the result of `work` for the current topology; repeat it for the newer one after a MovedError. What a
        server has done already, it does not do twice."""
        while True:
            try:
                return work(self.topology)
            except MovedError:
                continue

    def call_owners(
        self,
        method: str,
        step: int,
        ids: NDArray[np.uint64],
        offsets: NDArray[np.int64],
        arguments: Callable[[OwnedIds], tuple[Any, ...]],
    ) -> list[tuple[OwnedIds, Any]]:
        """Call each server that owns some of the ids, and return its ids and its answer. See `split_by_owner`.

        arguments: returns the arguments of the call to the owner of these ids."""

        def call(topology: Topology) -> list[tuple[OwnedIds, Any]]:
            parts = split_by_owner(ids, offsets, topology.owners, self.job.tables)
            calls = {server: arguments(part) for server, part in parts.items()}
            answers = self.call_servers(method, step, calls, topology=topology)
            return [(part, answers[server]) for server, part in parts.items()]

        return self.follow(call)

    def call_all(self, method: str, *arguments: Any, step: int = 0, patient: bool = False) -> list[Any]:
        """Return the answers of all servers, under one map. See `call_servers`."""

        def call(topology: Topology) -> list[Any]:
            calls = dict.fromkeys(range(len(topology)), arguments)
            answers = self.call_servers(method, step, calls, topology=topology, patient=patient)
            return [answers[server] for server in calls]

        return self.follow(call)

    def call_servers(
        self,
        method: str,
        step: int,
        arguments: Mapping[int, tuple[Any, ...]],
        *,
        topology: Topology,
        patient: bool = False,
    ) -> dict[int, Any]:
        """Call the named servers concurrently, and return the answer of each.

        A restarted server gets another handshake and the call again; so does one whose buckets are migrating, once they
        may be used. A server that has no such ticket answers with the TicketError. Any other error is raised once all
        servers have answered, so that none is still working, or once one of them has exceeded its deadline.

        step: 0 if the call belongs to none.
        topology: that for which the arguments were computed. MovedError if there is a newer one; see `follow`.
        patient: servers may take any time, and only silence for a call's deadline is an error; errors name their
            servers.
        """
        origin = self.origin(step, topology)

        def prepare(server: int) -> PendingCall:
            return topology.clients[server].prepare(method, origin, *arguments[server], patient=patient)

        pending = {prepare(server): server for server in arguments}
        until = time.monotonic() + self._deadline
        retries: defaultdict[int, RetryState] = defaultdict(lambda: RetryState(until))
        answers: dict[int, Any] = {}
        failed: dict[int, SatrapError] = {}
        progress = RemoteProgress(topology.clients) if patient else None
        send_all(pending)
        with self._gathers.waiting_for(pending) as gather:
            while pending:
                if progress is not None:
                    progress.poll()
                for call in gather.wait(_POLL_SECONDS):
                    server = pending.pop(call)
                    try:
                        answer = self._answer(topology, server, call, retries)
                        if answer is _CALL_AGAIN:
                            again = prepare(server)
                            again.send()
                            pending[again] = server
                            gather.add(again)
                        else:
                            answers[server] = answer
                    except SatrapError as error:
                        failed[server] = error
                        if isinstance(error, DeadlineError) or (isinstance(error, MovedError) and not patient):
                            pending.clear()  # the other servers may take long
                            break
        if progress is not None:
            progress.end()
        if failed:
            raise self._failure(topology, failed, patient)
        return answers

    def close(self) -> None:
        """Release the lease and close the connections."""
        if self._lease is not None:
            self._lease.release()
        for client in self._clients.values():
            client.close()

    # -- internals ---------------------------------------------------------------------------------------------------

    def _answer(self, topology: Topology, server: int, call: PendingCall, retries: defaultdict[int, RetryState]) -> Any:
        """Return a server's answer, or `_CALL_AGAIN`."""
        try:
            return call.result()
        except TicketError as error:
            return error
        except MovedError as error:
            self._wait_for_migration(topology, server, error, retries[server])
        except NotReadyError as error:
            self._handshake_again(topology, server, error, retries[server])
        except DeadlineError as error:
            self._ask_other_servers(topology, server, error)
            raise
        return _CALL_AGAIN

    def _handshake_again(self, topology: Topology, server: int, error: NotReadyError, retries: RetryState) -> None:
        """Make another handshake with a restarted server."""
        retries.handshakes += 1
        if retries.handshakes > _MAX_HANDSHAKES:
            raise error
        self._handshake(topology, server)

    def _failure(self, topology: Topology, failed: Mapping[int, SatrapError], patient: bool) -> SatrapError:
        own = {server: error for server, error in failed.items() if not isinstance(error, MovedError)} or failed
        first = next(iter(own.values()))
        if not patient or isinstance(first, MovedError):
            return first
        combined = type(first)(
            "; ".join(f"{topology.shard_map.addresses[server]}: {error}" for server, error in own.items())
        )
        combined.__cause__ = first
        return combined

    def _wait_for_migration(self, topology: Topology, server: int, error: MovedError, retries: RetryState) -> None:
        late = DeadlineError(
            f"{topology.clients[server].address}: buckets were migrating for {self._deadline:g} s ({error}): the "
            "process that migrates them may have stopped: run `satrap migrate` again with the same lists"
        )
        self._pause(topology, server, late, retries)

    def _pause(self, topology: Topology, server: int, late: SatrapError, retries: RetryState) -> None:
        """Pause before a retry, longer each time. MovedError if there is a newer topology, `late` after the
        deadline."""
        if self._refresh(topology, server):
            raise MovedError(f"there is a newer bucket map than {topology.shard_map.version}: take it and call again")
        if time.monotonic() > retries.until:
            raise late
        time.sleep(retries.backoff.next_pause())

    def _refresh(self, topology: Topology, server: int) -> bool:
        """Ask the server for its shard map, and return whether there is a newer topology than `topology`."""
        if topology is not self.topology:
            return True
        client = topology.clients[server]
        answer = client.call.get_shard_map(Origin(), max(1, topology.shard_map.version))
        require_same_release(answer.get("release"), f"the server at {client.address}")
        if answer["version"] <= max(1, topology.shard_map.version):
            return False
        newest = ShardMap.from_dict(answer["shard_map"])
        with self._lock:
            if self.topology.shard_map.version < newest.version:
                self._adopt(newest)
        return True

    def _adopt(self, shard_map: ShardMap) -> None:
        self.topology = self._topology_of(shard_map)
        if self._lease is not None:
            self._lease.clients = self.topology.clients

    def _ask_other_servers(self, topology: Topology, silent: int, error: DeadlineError) -> None:
        """Raise MovedError if another server knows a newer map: the silent one may have been removed."""
        for server in range(len(topology)):
            with suppress(DeadlineError):
                if server != silent and self._refresh(topology, server):
                    raise MovedError(f"a server is silent, and the others have a newer map ({error})") from error

    def _clients_of(self, addresses: Sequence[str]) -> tuple[Client[ServerCalls], ...]:
        added = [address for address in addresses if address not in self._clients]
        # Two threads at least: this one, and that of the lease.
        require_files(2 * FILES_PER_CONNECTION * len(added), f"connections to {len(added)} servers")
        for address in added:
            self._clients[address] = Client(ServerCalls, address, **self._client_options)
        return tuple(self._clients[address] for address in addresses)

    def _topology_of(self, shard_map: ShardMap) -> Topology:
        clients = self._clients_of(shard_map.addresses)
        return Topology(shard_map, clients, np.array(shard_map.bucket_map.flat(), np.uint32))

    def _handshake_all(self, *, commit: bool = True) -> list[dict[str, Any]]:
        """Make a handshake with each server of one topology, and return the answers."""
        return self.follow(
            lambda topology: [self._handshake(topology, server, commit=commit) for server in range(len(topology))]
        )

    def _handshake(self, topology: Topology, server: int, *, commit: bool = True) -> dict[str, Any]:
        job, shard_map = self.job.to_dict(), topology.shard_map.to_dict()
        retries = RetryState(time.monotonic() + self._deadline)
        while True:
            try:
                return topology.clients[server].call.hello(Origin(), job, shard_map, server, commit)
            except MovedError as error:
                self._wait_for_migration(topology, server, error, retries)
