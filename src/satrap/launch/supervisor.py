"""The supervisor of a run: decides which processes to start, stop and restart. A pure state machine: events and the
time in, commands out. `run_loop` executes the commands.

    servers ──all ready──> workers ──all ready──> launch of the trainers ──all exit with 0──> shutdown ──> ExitRun
                                                    │            ▲
                            one fails: the others are stopped; once all have exited, the next launch starts

A server or worker that exits is restarted at its address. The server finds its rows in shared memory; trainers wait for
it. If it then listens at another address, its machine was lost: it has no rows, and the trainers do not know the new
address, so their launch is stopped. The surviving servers still name the lost one, and buckets may have moved, so all
servers restart empty before the next launch: the checkpoint would have replaced their rows anyway. A trainer that fails
also ends its launch, because the trainers' dense parameters must stay equal. The next launch resumes the last
checkpoint as soon as all servers and workers listen. Launches are numbered, and the number is on disk before the launch
starts. Servers refuse calls of an older launch, so a process that was suspended or disconnected can no longer write.

While trainers run, servers can be added or removed: new ones start, buckets migrate, then servers that own no buckets
any more stop. A server whose machine will stop is removed in the same way, and then another one is added.
"""

import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from satrap.config.validation import check_integer
from satrap.launch.run_events import (
    Command,
    Event,
    ExitRun,
    LogMessage,
    MachineStopping,
    MigrateBuckets,
    MigrationDue,
    MigrationEnded,
    PauseMigration,
    PlacementFailed,
    Process,
    ProcessReady,
    Role,
    ScaleRequested,
    ScriptStarted,
    StartProcess,
    StopProcess,
    StopRequested,
)
from satrap.launch.run_state import RunState

MAX_PROCESSES = 65535
_SETTLED_SECONDS = 300.0
_EARLY_SECONDS = 60.0
"""A launch whose script fails by itself within this time is not retried: most likely the script is wrong."""
_NO_JOB_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 60.0  # between two attempts to migrate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The sizes and limits of a run, as the user set them."""

    servers: int
    workers: int
    trainers: int
    restarts: int = 3
    """Number of consecutive restarts of a process that each time lived for less than `_SETTLED_SECONDS`."""
    max_servers: int | None = None
    """Upper limit for the autoscaler and for the user's requests; None: no limit."""

    def __post_init__(self) -> None:
        for name, low in (("servers", 1), ("workers", 0), ("trainers", 1), ("restarts", 0)):
            check_integer("run", name, getattr(self, name), low, MAX_PROCESSES)
        if self.max_servers is not None:
            check_integer("run", "max_servers", self.max_servers, self.servers, MAX_PROCESSES)

    @property
    def counts(self) -> dict[Role, int]:
        """Number of processes of each role, at the start of the run."""
        return {Role.SERVER: self.servers, Role.WORKER: self.workers, Role.TRAINER: self.trainers}


class _Phase(Enum):
    STARTING = "servers and workers are starting"
    TRAINING = "trainers are running"
    STOPPING_TRAINERS = "a failed launch is being stopped"
    RESETTING_SERVERS = "servers are being restarted empty"
    SHUTTING_DOWN = "the run is stopping"


@dataclass(slots=True)
class _RunningProcess:
    process: Process
    started_at: float
    """When it started; for a trainer, when the last trainer of the launch started the script. Until then they import,
    which may take a minute on a busy machine."""
    address: str | None = None
    """Address of its previous incarnation."""
    is_ready: bool = False


@dataclass(slots=True)
class _LaunchFailure:
    """Why a launch failed."""

    causes: list[str] = field(default_factory=list)
    status: int = 1
    is_script_error: bool = True
    """Whether every trainer that failed exited by itself: no signal, no lost machine."""
    finished: list[str] = field(default_factory=list)
    """Trainers that had exited with status 0 before; the others may have failed for lack of them."""


class Supervisor:
    """State machine of one run."""

    def __init__(self, run_config: RunConfig, run_state: RunState) -> None:
        """run_state: state of the previous run in the same folder, or a new one."""
        self.run_state = run_state
        """State to write to disk before the commands that came with it are executed."""
        self._config = run_config
        self._phase = _Phase.STARTING
        self._running: dict[tuple[Role, int], _RunningProcess] = {}
        self._addresses: dict[tuple[Role, int], str] = {}
        self._servers = list(range(run_config.servers))  # their numbers, in the order that trainers know
        self._targets: list[int] | None = None  # their numbers after the scaling in progress
        self._waiting_request: ScaleRequested | None = None
        self._is_migrating = False
        self._leaving: set[int] = set()  # numbers of the servers whose machines will stop
        self._num_left = 0  # servers that have left, and that others will replace
        self._may_have_moved = False  # an earlier attempt of the scaling in progress may have moved buckets
        self._servers_have_rows = False  # since they last started empty
        self._has_lost_rows = False  # a server restarted without its rows
        self._migration_failures = 0  # consecutive, of any cause
        self._starts: Counter[tuple[Role, int]] = Counter()
        self._early_exits: Counter[tuple[Role, int]] = Counter()  # consecutive
        self._failure = _LaunchFailure()
        self._exit_status = 0
        self._is_stopping = False

    @property
    def phase(self) -> str:
        """What the run is doing, in words."""
        return self._phase.value

    def start(self, now: float) -> list[Command]:
        """Return the first commands."""
        return [self._start_process(Role.SERVER, number, now) for number in range(self._config.servers)]

    def handle(self, event: Event, now: float) -> list[Command]:
        """Return the commands that follow from an event, and those of a request that had to wait until now."""
        commands = self._handle(event, now)
        if self._waiting_request is not None and self._cannot_scale() is None:
            request, self._waiting_request = self._waiting_request, None
            commands += self._on_scale_requested(request, now)
        return commands

    def _handle(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, StopRequested):
            return self._on_stop_requested(event.reason)
        if isinstance(event, ScaleRequested):
            return self._on_scale_requested(event, now)
        if isinstance(event, MigrationEnded):
            return self._on_migration_ended(event, now)
        if isinstance(event, MigrationDue):
            return self._migrate() if self._can_migrate() else []
        running = self._running.get((event.process.role, event.process.number))
        if running is None or running.process != event.process:
            return []  # the event is about an earlier incarnation
        if isinstance(event, ProcessReady):
            return self._on_ready(running, event.address, now)
        if isinstance(event, ScriptStarted):
            for (role, _), other in self._running.items():
                other.started_at = now if role is Role.TRAINER else other.started_at
            return []
        if isinstance(event, MachineStopping):
            self._leaving.add(event.process.number)
            return self._move_from_leaving()
        del self._running[event.process.role, event.process.number]
        if self._phase is _Phase.SHUTTING_DOWN:
            return self._stop_remaining()
        if self._phase is _Phase.RESETTING_SERVERS and event.process.role is Role.SERVER:
            return self._restart_servers_empty(now)
        if isinstance(event, PlacementFailed):
            return self._on_placement_failed(event, now)
        if event.process.role is Role.TRAINER:
            return self._on_trainer_exited(running, event.status, now)
        if event.process.role is Role.SERVER and event.process.number not in (*self._servers, *(self._targets or ())):
            return []  # it owned no buckets any more
        return self._restart(running, event.status, now)

    # -- servers and workers ------------------------------------------------------------------------------------------

    def _on_ready(self, running: _RunningProcess, address: str, now: float) -> list[Command]:
        running.is_ready = True
        process, has_moved = running.process, running.address not in (None, address)
        self._addresses[process.role, process.number] = address
        self._update_run_state()
        commands: list[Command] = [LogMessage(f"{process}: listening at {address}")]
        may_have_rows = process.number in self._servers or self._is_migrating or self._may_have_moved
        if has_moved and (process.role is Role.WORKER or may_have_rows):
            self._has_lost_rows |= process.role is Role.SERVER and self._servers_have_rows
            commands += self._abandon_launch(f"{process} came back at another address", now)
        elif self._phase is _Phase.STARTING:
            commands += self._advance(now)
        return [*commands, *self._migrate()] if self._can_migrate() else commands

    def _abandon_launch(self, reason: str, now: float) -> list[Command]:
        """End the launch, because its trainers know servers and workers that no longer exist."""
        if self._phase is _Phase.STARTING:
            return self._advance(now)
        if self._phase is not _Phase.TRAINING:
            return []
        self._failure = _LaunchFailure([reason], is_script_error=False)
        return self._stop_trainers()

    def _update_run_state(self) -> None:
        """Set the addresses that the trainers of the next launch are given."""
        known = {
            role: tuple(self._addresses.get((role, number), "") for number in numbers)
            for role, numbers in ((Role.SERVER, self._servers), (Role.WORKER, range(self._config.workers)))
        }
        self.run_state = replace(self.run_state, servers=known[Role.SERVER], workers=known[Role.WORKER])

    def _advance(self, now: float) -> list[Command]:
        """Start the workers once all servers are ready, and a launch once all workers are ready, too."""
        if self._has_lost_rows:
            return self._reset_servers()
        if not self._all_ready(Role.SERVER, self._servers):
            return []
        workers = range(self._config.workers)
        if missing := [worker for worker in workers if (Role.WORKER, worker) not in self._running]:
            return [self._start_process(Role.WORKER, number, now) for number in missing]
        return self._start_launch(now) if self._all_ready(Role.WORKER, workers) else []

    def _reset_servers(self) -> list[Command]:
        """Kill all servers. The requested number of servers starts afterwards: no buckets need to migrate."""
        self._phase, self._migration_failures, self._may_have_moved = _Phase.RESETTING_SERVERS, 0, False
        self._servers, self._targets = [*(self._targets or self._servers), *self._new_numbers(self._num_left)], None
        self._num_left = 0
        servers = self._with_role(Role.SERVER)
        return [
            LogMessage("a server's rows are lost; restarting all servers empty"),
            *(StopProcess(server, "kill", release=server.number not in self._servers) for server in servers),
        ]

    def _restart_servers_empty(self, now: float) -> list[Command]:
        """Start all servers once the last one of the old has exited."""
        if self._with_role(Role.SERVER):
            return []
        self._phase, self._servers_have_rows, self._has_lost_rows = _Phase.STARTING, False, False
        return [self._start_process(Role.SERVER, number, now) for number in self._servers]

    def _all_ready(self, role: Role, numbers: Iterable[int]) -> bool:
        return all((role, number) in self._running and self._running[role, number].is_ready for number in numbers)

    def _restart(self, running: _RunningProcess, status: int, now: float) -> list[Command]:
        role, number = running.process.role, running.process.number
        failure = f"{running.process} {describe_exit(status)}"
        if self._exceeds_restarts(role, number, running.started_at, now):
            failure = f"{failure}, {self._early_exits[role, number]} times soon after it started"
            if role is Role.SERVER and number not in self._servers:
                return self._cancel_scaling(running.process, failure, now)
            return self._fail(f"{failure}; giving up", 1)
        address = self._addresses.get((role, number))
        return [LogMessage(f"{failure}; restarting it"), self._start_process(role, number, now, address)]

    def _exceeds_restarts(self, role: Role, number: int, started_at: float, now: float) -> bool:
        """Count an exit. Return whether more consecutive exits were early than restarts are allowed."""
        key = role, number
        self._early_exits[key] = self._early_exits[key] + 1 if now - started_at < _SETTLED_SECONDS else 0
        return self._early_exits[key] > self._config.restarts

    def _start_process(self, role: Role, number: int, now: float, address: str | None = None) -> StartProcess:
        self._starts[role, number] += 1
        if role is Role.SERVER:
            self._leaving.discard(number)
        process = Process(role, number, self._starts[role, number])
        self._running[role, number] = _RunningProcess(process, now, address)
        return StartProcess(process, address)

    # -- scaling ------------------------------------------------------------------------------------------------------

    def _on_scale_requested(self, event: ScaleRequested, now: float) -> list[Command]:
        num_servers, requested = len(self._servers), _count(event.servers, "server")
        max_servers = self._config.max_servers or MAX_PROCESSES
        if event.servers > max_servers:
            return [LogMessage(f"request for {requested} refused: the maximum is {max_servers}")]
        if why := self._cannot_scale():
            if event.waits:
                self._waiting_request = event
            return [LogMessage(f"request for {requested} {'waits' if event.waits else 'refused'}: {why}")]
        if event.servers < 1 or event.servers == num_servers:
            return [LogMessage(f"request for {requested} ignored: the run has {num_servers}")]
        new = self._new_numbers(event.servers - num_servers)
        self._targets = [*self._servers, *new][: event.servers]
        return [
            LogMessage(f"scaling to {requested} from {num_servers}: {event.reason}"),
            *(self._start_process(Role.SERVER, number, now) for number in new),
            *([] if new else self._migrate()),
        ]

    def _cannot_scale(self) -> str | None:
        """Return why the number of servers cannot change now; None if it can."""
        if self._targets is not None or self._is_migrating:
            return "buckets are being moved"
        return None if self._phase is _Phase.TRAINING else self._phase.value

    def _new_numbers(self, count: int) -> list[int]:
        """Return numbers for servers that should join."""
        first = max(number for role, number in self._starts if role is Role.SERVER) + 1
        return list(range(first, first + count))

    def _can_migrate(self) -> bool:
        return self._targets is not None and not self._is_migrating and self._phase is not _Phase.SHUTTING_DOWN

    def _migrate(self) -> list[Command]:
        """Start the migration once all its servers listen."""
        assert self._targets is not None
        if self._has_lost_rows or not all((Role.SERVER, target) in self._addresses for target in self._targets):
            return []
        current, target = (
            tuple(self._addresses[Role.SERVER, number] for number in numbers)
            for numbers in (self._servers, self._targets)
        )
        self._is_migrating = True
        return [MigrateBuckets(current, target, is_urgent=not self._leaving.isdisjoint(self._servers))]

    def _move_from_leaving(self) -> list[Command]:
        """Move the buckets of the servers whose machines will stop to the other servers, if there are any."""
        leaving = [server for server in self._servers if server in self._leaving]
        if len(leaving) in (0, len(self._servers)):
            return []
        postponed = self._postpone_joining()
        if self._cannot_scale():
            return postponed
        self._targets = [server for server in self._servers if server not in leaving]
        self._num_left += len(leaving)
        names = ", ".join(map(str, leaving))
        text = f"the machine of server {names} will stop: moving its buckets to {_count(len(self._targets), 'server')}"
        return [*postponed, LogMessage(text), *self._migrate()]

    def _postpone_joining(self) -> list[Command]:
        """Stop servers that should join and have no buckets yet; others will join once those that leave have left."""
        joining = [number for number in self._targets or () if number not in self._servers]
        if not joining or self._is_migrating or self._may_have_moved or self._phase is not _Phase.TRAINING:
            return []
        self._num_left += len(joining)
        self._targets, self._migration_failures = None, 0
        return self._stop_surplus_servers()

    def _replace_left(self, now: float) -> list[Command]:
        """Add as many servers as have left."""
        if self._cannot_scale() or not self._num_left:
            return []
        num_servers, self._num_left = len(self._servers) + self._num_left, 0
        return self._on_scale_requested(ScaleRequested(num_servers, "in place of those that have left"), now)

    def _on_migration_ended(self, event: MigrationEnded, now: float) -> list[Command]:
        self._is_migrating = False
        if self._phase is _Phase.SHUTTING_DOWN or self._targets is None:
            return []
        if event.failure is not None:
            self._may_have_moved |= not event.has_no_job
            return [] if self._has_lost_rows else self._retry_migration(event)
        self._servers, self._targets = self._targets, None
        self._migration_failures, self._may_have_moved = 0, False
        self._update_run_state()
        moved = [LogMessage(f"buckets moved: the run has {self._num_servers()}"), *self._stop_surplus_servers()]
        return [*moved, *(self._move_from_leaving() or self._replace_left(now))]

    def _retry_migration(self, event: MigrationEnded) -> list[Command]:
        """Retry for as long as the run lasts: training continues with the servers that own the buckets."""
        self._migration_failures += 1
        if event.has_no_job:
            message = [LogMessage("buckets will be moved once a trainer has created its embeddings")]
            return [*(message if self._migration_failures == 1 else []), PauseMigration(_NO_JOB_SECONDS)]
        seconds = min(_MAX_PAUSE_SECONDS, 2.0**self._migration_failures)
        return [
            LogMessage(f"buckets could not be moved ({event.failure}); retrying in {seconds:g} s"),
            PauseMigration(seconds),
        ]

    def _on_placement_failed(self, event: PlacementFailed, now: float) -> list[Command]:
        """Cancel the scaling if the process is a server that should join; otherwise end the run."""
        if event.process.role is not Role.SERVER or event.process.number in self._servers:
            return self._fail(event.reason, 1)
        return self._cancel_scaling(event.process, event.reason, now)

    def _cancel_scaling(self, process: Process, reason: str, now: float) -> list[Command]:
        """Continue without the servers that should join, because one of them cannot."""
        may_have_rows = self._is_migrating or self._may_have_moved
        self._targets, self._migration_failures, self._may_have_moved = None, 0, False
        message = LogMessage(f"{reason}; continuing with {self._num_servers()}")
        commands: list[Command] = [message, *self._stop_surplus_servers()]
        if may_have_rows:  # the server ran before, and its rows went with it
            self._has_lost_rows = True
            return [*commands, *self._abandon_launch(f"{process} is lost", now)]
        return [*commands, *self._move_from_leaving()]

    def _stop_surplus_servers(self) -> list[Command]:
        """Stop the servers that own no buckets."""
        surplus = [process for process in self._with_role(Role.SERVER) if process.number not in self._servers]
        return [StopProcess(process, "terminate", release=True) for process in surplus]

    # -- trainers -----------------------------------------------------------------------------------------------------

    def _start_launch(self, now: float) -> list[Command]:
        self._phase, self._failure, self._servers_have_rows = _Phase.TRAINING, _LaunchFailure(), True
        self.run_state = replace(self.run_state, launch=self.run_state.launch + 1)
        launch, trainers = self.run_state.launch, range(self._config.trainers)
        processes = [Process(Role.TRAINER, number, launch) for number in trainers]
        self._running |= {(Role.TRAINER, process.number): _RunningProcess(process, now) for process in processes}
        message = LogMessage(f"launch {launch}: starting {_count(len(processes), 'trainer')}")
        scaling = self._move_from_leaving() or self._replace_left(now)
        return [message, *(StartProcess(process) for process in processes), *scaling]

    def _on_trainer_exited(self, running: _RunningProcess, status: int, now: float) -> list[Command]:
        remaining = self._with_role(Role.TRAINER)
        commands: list[Command] = []
        if self._phase is _Phase.TRAINING:
            if status == 0:
                self._failure.finished.append(f"after {running.process} had exited with status 0")
                return [] if remaining else self._shut_down(0)
            self._record_exit(running, status)
            commands = self._stop_trainers()
        elif status not in (0, -signal.SIGTERM):
            self._record_exit(running, status)  # it failed by itself, just before it was stopped
        return commands if remaining else [*commands, *self._relaunch(running.started_at, now)]

    def _stop_trainers(self) -> list[Command]:
        self._phase = _Phase.STOPPING_TRAINERS
        return [StopProcess(process, "terminate") for process in self._with_role(Role.TRAINER)]

    def _record_exit(self, running: _RunningProcess, status: int) -> None:
        if not self._failure.causes or status < 0:
            self._failure.status = status if status > 0 else 128 - status
        self._failure.is_script_error &= status > 0
        self._failure.causes.append(f"{running.process} {describe_exit(status)}")

    def _relaunch(self, started_at: float, now: float) -> list[Command]:
        failure = ", ".join([*self._failure.causes, *self._failure.finished])
        if self._failure.is_script_error and now - started_at < _EARLY_SECONDS:
            return self._fail(
                f"{failure}, soon after it started; stopping the run (see the error above)", self._failure.status
            )
        if self._exceeds_restarts(Role.TRAINER, 0, started_at, now):
            times = self._early_exits[Role.TRAINER, 0]
            return self._fail(f"{failure}, {times} times soon after it started; giving up", self._failure.status)
        self._phase = _Phase.STARTING
        return [LogMessage(f"{failure}; restarting the trainers from the last checkpoint"), *self._advance(now)]

    # -- shutdown -----------------------------------------------------------------------------------------------------

    def _on_stop_requested(self, reason: str) -> list[Command]:
        if self._is_stopping:
            return [StopProcess(process, "kill", release=True) for process in self._with_role(*Role)]
        self._is_stopping = True
        return self._fail(
            f"{reason}: stopping the run; the same command resumes the last checkpoint, if there is one", 130
        )

    def _fail(self, reason: str, status: int) -> list[Command]:
        return [LogMessage(reason), *self._shut_down(status)]

    def _shut_down(self, status: int) -> list[Command]:
        self._phase, self._exit_status = _Phase.SHUTTING_DOWN, status
        trainers = self._with_role(Role.TRAINER)
        return [StopProcess(trainer, "interrupt") for trainer in trainers] if trainers else self._stop_remaining()

    def _stop_remaining(self) -> list[Command]:
        """Stop servers and workers after the trainers, which call them. Their rows go with them."""
        if not self._running:
            return [ExitRun(self._exit_status)]
        if self._with_role(Role.TRAINER):
            return []
        return [StopProcess(process, "terminate", release=True) for process in self._with_role(*Role)]

    def _with_role(self, *roles: Role) -> list[Process]:
        return [running.process for (role, _), running in self._running.items() if role in roles]

    def _num_servers(self) -> str:
        return _count(len(self._servers), "server")


def describe_exit(status: int) -> str:
    """Return how a process ended, in words."""
    return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
