"""A model of a machine for tests of the supervisor: it executes commands, and any process of it may exit at any time.

No processes, no clock.
"""

from __future__ import annotations

import signal

from satrap.launch.run_events import (
    Command,
    Event,
    ExitRun,
    LogMessage,
    MigrateBuckets,
    MigrationDue,
    MigrationEnded,
    PauseMigration,
    PlacementFailed,
    Process,
    ProcessExited,
    ProcessReady,
    Role,
    StartProcess,
    StopProcess,
)
from satrap.launch.run_state import RunState
from satrap.launch.supervisor import RunConfig, Supervisor

RUN_STATE = RunState(name="test")


class Machine:
    """Executes commands, checks that each one is allowed, and creates events."""

    def __init__(self, run_config: RunConfig, run_state: RunState = RUN_STATE) -> None:
        self.run_config, self.supervisor = run_config, Supervisor(run_config, run_state)
        self.now, self.running, self.ready = 0.0, set[Process](), set[Process]()
        self.stopped, self.log, self.started = set[Process](), list[str](), list[Process]()
        self.exit_status: int | None = None
        self.commands: list[Command] = []  # that the last event led to
        self.launches: dict[int, int] = {}
        self.migrating: tuple[str, ...] | None = None
        self.last_address: dict[tuple[Role, int], str] = {}
        self.relocations = dict[tuple[Role, int], int]()
        self.pauses: list[float] = []
        self.trainers_know: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # addresses of servers and workers
        self.with_rows = set[int]()  # servers that own buckets
        self.execute(self.supervisor.start(self.now))

    def execute(self, commands: list[Command]) -> None:
        self.commands = commands
        for command in commands:
            assert self.exit_status is None, "no command follows ExitRun"
            match command:
                case StartProcess(process, address):
                    self._start(process, address)
                case StopProcess(process, _):
                    self.stopped.add(process)
                case MigrateBuckets(current, target, _):
                    self.with_rows |= self.numbers_of(target)
                    assert self.migrating is None and current == self.supervisor.run_state.servers and current != target
                    assert {*current, *target} <= set(self.last_address.values())
                    self.migrating = target
                case PauseMigration(seconds):
                    assert self.migrating is None
                    self.pauses.append(seconds)
                case LogMessage(text):
                    self.log.append(text)
                case ExitRun(status):
                    assert not self.running, "no process is left behind"
                    self.exit_status = status

    def _start(self, process: Process, address: str | None) -> None:
        assert not any((each.role, each.number) == (process.role, process.number) for each in self.running)
        assert process not in self.started, "each start has a new incarnation"
        self.started.append(process)
        if process.role is Role.TRAINER:
            ready = {self.last_address[each.role, each.number] for each in self.ready}
            assert (
                self.supervisor.run_state.servers and len(self.supervisor.run_state.workers) == self.run_config.workers
            )
            assert {*self.supervisor.run_state.servers, *self.supervisor.run_state.workers} <= ready, (
                "all of them are ready"
            )
            self.trainers_know = self.addresses()
            assert process.incarnation == self.supervisor.run_state.launch, "the state has the launch before it starts"
            assert process.incarnation == max(self.launches, default=process.incarnation - 1) + (
                process.incarnation not in self.launches
            )
            assert all(each.incarnation == process.incarnation for each in self.running if each.role is Role.TRAINER)
            self.launches[process.incarnation] = self.launches.get(process.incarnation, 0) + 1
            servers = self.numbers_of(self.trainers_know[0])
            assert servers <= self.with_rows or not servers & self.with_rows, (
                "all servers have the rows of the launch before, or none has"
            )
            self.with_rows |= servers
        elif address is not None:
            assert address == self.last_address[process.role, process.number], "it restarts at its address"
        elif process.role is Role.SERVER:
            self.with_rows.discard(process.number)
        self.running.add(process)

    def address_of(self, process: Process) -> str:
        machine = self.relocations.get((process.role, process.number), 0) + 1
        return f"tcp://127.0.0.{machine}:{1000 * (process.role is Role.WORKER) + process.number + 1}"

    def numbers_of(self, servers: tuple[str, ...]) -> set[int]:
        return {number for (role, number), at in self.last_address.items() if role is Role.SERVER and at in servers}

    def addresses(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.supervisor.run_state.servers, self.supervisor.run_state.workers

    def relocate(self, role: Role, number: int) -> None:
        """Has a process restart on another machine, without its rows."""
        if role is Role.SERVER:
            self.with_rows.discard(number)
        self.relocations[role, number] = self.relocations.get((role, number), 0) + 1

    def handle(self, event: Event) -> None:
        if isinstance(event, ProcessReady):
            self.ready.add(event.process)
            self.last_address[event.process.role, event.process.number] = event.address
        elif isinstance(event, MigrationEnded):
            self.migrating = None
        elif isinstance(event, ProcessExited | PlacementFailed):
            self.running.discard(event.process)
            self.ready.discard(event.process)
        self.execute(self.supervisor.handle(event, self.now))
        if isinstance(event, MigrationEnded):  # trainers learn the new servers from the old ones
            self.trainers_know = self.addresses()
        if self.exit_status is None and any(each not in self.stopped for each in self.trainers()):
            assert self.trainers_know == self.addresses(), "no trainer keeps addresses that are out of date"

    def stops(self) -> dict[str, tuple[str, bool]]:
        """Returns how the last event stopped each process, and whether its place was released."""
        return {str(each.process): (each.mode, each.release) for each in self.commands if isinstance(each, StopProcess)}

    def fail_migration(self, has_no_job: bool = False, resume: bool = True) -> float:
        """Fails the migration in progress, and returns the pause before the next one, which starts if `resume`."""
        assert self.migrating is not None
        self.handle(MigrationEnded("a server does not answer", has_no_job))
        assert self.migrating is None
        if resume:
            self.handle(MigrationDue())
        return self.pauses[-1]

    def make_all_ready(self) -> None:
        """Makes servers and workers ready until the trainers run."""
        while starting := sorted(
            (each for each in self.running - self.ready if each.role is not Role.TRAINER), key=lambda each: each.role
        ):
            self.handle(ProcessReady(starting[0], self.address_of(starting[0])))

    def exit(self, role: Role, number: int, status: int, after: float = 1000.0) -> None:
        self.now += after
        found = next(each for each in self.running if (each.role, each.number) == (role, number))
        self.handle(ProcessExited(found, status))

    def execute_stops(self) -> None:
        """Lets the processes exit that were stopped."""
        while due := sorted(self.stopped & self.running, key=str):
            self.handle(ProcessExited(due[0], -signal.SIGTERM))

    def restart_all(self) -> None:
        """Lets the stopped processes exit, and makes their successors ready."""
        self.execute_stops()
        self.make_all_ready()

    def trainers(self) -> list[Process]:
        return sorted((each for each in self.running if each.role is Role.TRAINER), key=lambda each: each.number)


def training_machine(**options: int) -> Machine:
    """Returns a machine whose trainers run."""
    run_config = RunConfig(**{"servers": 2, "workers": 1, "trainers": 2} | options)
    machine = Machine(run_config)
    machine.make_all_ready()
    assert len(machine.trainers()) == run_config.trainers
    return machine
