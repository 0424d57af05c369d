"""The supervisor's decisions: against a model of a machine on which any process may exit at any time, and rule by rule.

No processes, no clock.
"""

from __future__ import annotations

import random
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.errors import ConfigError
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
    ProcessExited,
    ProcessReady,
    Role,
    ScaleRequested,
    StartProcess,
    StopProcess,
    StopRequested,
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
        self.launches: dict[int, int] = {}
        self.migrating: tuple[str, ...] | None = None
        self.last_address: dict[tuple[Role, int], str] = {}
        self.relocations = dict[tuple[Role, int], int]()
        self.pauses: list[float] = []
        self.trainers_know: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # addresses of servers and workers
        self.with_rows = set[int]()  # servers that own buckets
        self.execute(self.supervisor.start(self.now))

    def execute(self, commands: list[Command]) -> None:
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


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
def test_the_run_continues_or_ends_after_any_events(
    draw: random.Random, servers: int, workers: int, trainers: int
) -> None:
    machine = Machine(RunConfig(servers=servers, workers=workers, trainers=trainers, restarts=draw.randrange(4)))
    for _ in range(draw.randrange(60)):
        machine.now += draw.choice([0.0, 1.0, 100.0, 1000.0])
        chance = draw.random()
        starting = [each for each in machine.running - machine.ready if each.role is not Role.TRAINER]
        if machine.exit_status is not None:
            break
        if starting and chance < 0.5:
            one = draw.choice(sorted(starting, key=str))
            event = (
                ProcessReady(one, machine.address_of(one)) if draw.random() < 0.9 else PlacementFailed(one, "no room")
            )
            machine.handle(event)
        elif chance < 0.6:
            if machine.migrating is not None and draw.random() < 0.7:
                failure = draw.choice([None, None, "a server does not answer"])
                machine.handle(MigrationEnded(failure, failure is not None and draw.random() < 0.5))
            else:
                either: list[Event] = [ScaleRequested(draw.randrange(0, 6), "at random"), MigrationDue()]
                either += [MachineStopping(each) for each in machine.running if each.role is Role.SERVER]
                machine.handle(draw.choice(either))
        elif chance < 0.95 and machine.running:
            one = draw.choice(sorted(machine.running, key=str))
            if draw.random() < 0.3:
                machine.relocate(one.role, one.number)
            machine.handle(ProcessExited(one, draw.choice([0, 1, -9, -15])))
        else:
            machine.handle(StopRequested("SIGINT"))
    if machine.exit_status is None:
        machine.handle(StopRequested("SIGINT"))
        machine.execute_stops()
    assert machine.exit_status is not None
    done = machine.launches.get(max(machine.launches, default=0), 0)
    assert machine.exit_status != 0 or done == trainers, "status 0 only if a whole launch started"


def test_a_run_without_failures() -> None:
    machine = training_machine()
    assert machine.supervisor.run_state == RunState(
        name="test",
        launch=1,
        servers=("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),
        workers=("tcp://127.0.0.1:1001",),
    )
    machine.exit(Role.TRAINER, 1, 0)
    assert not machine.stopped, "the others may finish"
    machine.exit(Role.TRAINER, 0, 0)
    machine.execute_stops()
    assert machine.exit_status == 0


@pytest.mark.parametrize("role", [Role.SERVER, Role.WORKER])
def test_a_server_or_worker_restarts_at_its_address(role: Role) -> None:
    machine = training_machine()
    trainers = machine.trainers()
    for start in (2, 3, 4, 5, 6):
        machine.exit(role, 0, -9)
        assert machine.started[-1] == Process(role, 0, start)
        machine.make_all_ready()
    assert machine.trainers() == trainers, "trainers continue"
    for _ in range(4):
        machine.exit(role, 0, 1, after=1.0)
    machine.execute_stops()
    assert machine.exit_status == 1
    assert machine.log[-1] == f"{role} 0 exited with status 1, 4 times soon after it started; giving up"


@pytest.mark.parametrize("role", [Role.SERVER, Role.WORKER])
def test_a_process_that_comes_back_at_another_address_starts_a_new_launch(role: Role) -> None:
    machine = training_machine(restarts=1)
    machine.relocate(role, 0)
    machine.exit(role, 0, -9, after=5.0)
    assert not machine.stopped, "it may come back at its address"
    machine.make_all_ready()
    assert (
        machine.stopped == {each for each in machine.started if each.role is Role.TRAINER}
        and machine.exit_status is None
    )
    machine.restart_all()
    assert [each.incarnation for each in machine.trainers()] == [2, 2], "the early end was not the script's fault"
    assert f"{role} 0 came back at another address; restarting the trainers from the last checkpoint" in machine.log
    assert ("a server's rows are lost; restarting all servers empty" in machine.log) == (role is Role.SERVER)
    assert machine.addresses()[role is Role.WORKER][0] == machine.address_of(Process(role, 0, 2))
    machine.relocate(role, 0)
    machine.exit(role, 0, -9)
    machine.make_all_ready()
    machine.restart_all()
    assert [each.incarnation for each in machine.trainers()] == [3, 3]


def test_a_machine_lost_with_a_server_and_a_trainer() -> None:
    machine = training_machine()
    machine.relocate(Role.SERVER, 1)
    machine.exit(Role.TRAINER, 0, -9)
    machine.exit(Role.SERVER, 1, -9)
    machine.execute_stops()
    assert not machine.trainers(), "a launch waits for the new address of the server"
    machine.make_all_ready()
    machine.restart_all()
    assert [each.incarnation for each in machine.trainers()] == [2, 2]


def test_trainers_restart_together_once_all_have_exited() -> None:
    machine = training_machine(trainers=3)
    machine.exit(Role.TRAINER, 0, 0)
    machine.exit(Role.TRAINER, 1, -9)
    assert {each.number for each in machine.stopped} == {2} and max(machine.launches) == 1
    machine.handle(ProcessExited(Process(Role.TRAINER, 2, 1), 1))  # it lost the connection to the other
    assert [each.incarnation for each in machine.trainers()] == [2, 2, 2]
    stopped = (
        "trainer 1 was killed by signal 9, trainer 2 exited with status 1, after trainer 0 had exited with status 0; "
    )
    assert stopped in machine.log[-2]
    machine.handle(ProcessExited(Process(Role.TRAINER, 1, 1), 0))  # an event of the launch before
    assert len(machine.trainers()) == 3


def test_a_script_that_fails_early_is_not_retried() -> None:
    machine = training_machine()
    machine.exit(Role.TRAINER, 0, 3, after=5.0)
    machine.execute_stops()
    assert machine.exit_status == 3 and max(machine.launches) == 1


def test_servers_that_hang_end_the_run() -> None:
    """Trainers wait a minute for servers, so a launch fails neither early nor settled."""
    machine = training_machine(restarts=2)
    for _ in range(3):
        machine.exit(Role.TRAINER, 0, 1, after=65.0)
        machine.execute_stops()
    assert machine.exit_status == 1 and max(machine.launches) == 3


def test_a_launch_that_is_killed_early_repeatedly_ends_the_run() -> None:
    machine = training_machine(restarts=2)
    for _ in range(3):
        machine.exit(Role.TRAINER, 0, -9, after=5.0)
        machine.execute_stops()
    assert machine.exit_status == 137 and max(machine.launches) == 3
    assert machine.log[-1] == "trainer 0 was killed by signal 9, 3 times soon after it started; giving up"


def test_a_long_launch_resets_the_count_of_early_exits() -> None:
    machine = training_machine(restarts=1)
    for launch in range(1, 6):
        machine.exit(Role.TRAINER, 0, -9, after=5.0 if launch % 2 else 1000.0)
        machine.handle(ProcessExited(Process(Role.TRAINER, 1, launch), -signal.SIGTERM))
    assert machine.exit_status is None and max(machine.launches) == 6


def test_scaling_up_and_down_while_trainers_run() -> None:
    machine = training_machine(servers=2, workers=0)
    machine.handle(ScaleRequested(4, "requested"))
    assert [each.number for each in machine.started[-2:]] == [2, 3] and machine.migrating is None
    machine.handle(ProcessExited(machine.started[-1], -9))  # before it was ready
    machine.make_all_ready()
    assert machine.migrating == tuple(f"tcp://127.0.0.1:{n}" for n in (1, 2, 3, 4))
    machine.handle(ScaleRequested(3, "too soon"))
    assert "refused: buckets are being moved; retry later" in machine.log[-1]
    assert machine.fail_migration() == 2
    assert machine.migrating is not None and machine.supervisor.run_state.servers == machine.migrating[:2]
    machine.handle(MigrationEnded())
    assert len(machine.supervisor.run_state.servers) == 4 and not machine.stopped
    machine.handle(ScaleRequested(1, "requested"))
    machine.exit(Role.SERVER, 3, -9)
    machine.make_all_ready()
    machine.handle(MigrationEnded())
    assert machine.supervisor.run_state.servers == ("tcp://127.0.0.1:1",)
    assert sorted(each.number for each in machine.stopped) == [1, 2, 3]
    machine.execute_stops()
    assert machine.exit_status is None and len(machine.running) == 3
    machine.handle(ScaleRequested(2, "requested"))
    assert machine.started[-1] == Process(Role.SERVER, 4, 1), "numbers are not reused"
    machine.make_all_ready()
    pauses = [machine.fail_migration() for _ in range(9)]
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60, 60], "a migration that fails never ends the run"
    machine.handle(MigrationEnded())
    assert len(machine.supervisor.run_state.servers) == 2 and machine.exit_status is None


def test_a_server_leaves_its_machine_before_that_stops() -> None:
    machine = training_machine(servers=3, workers=0)
    first = machine.supervisor.run_state.servers
    stopping = [each for each in machine.started if each.role is Role.SERVER][:2]
    for each in stopping:
        machine.handle(MachineStopping(each))
    assert "the machine of server 0 will stop: moving its buckets to 2 servers" in machine.log
    machine.handle(MigrationEnded())
    assert machine.stopped == {stopping[0]} and machine.migrating == first[2:], "then the buckets of the second"
    machine.handle(MigrationEnded())
    machine.execute_stops()
    assert [each.number for each in machine.started[-2:]] == [3, 4], "others take their place"
    machine.make_all_ready()
    machine.handle(MigrationEnded())
    assert len(machine.supervisor.run_state.servers) == 3 and max(machine.launches) == 1


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_machine_that_stops_too_early_costs_its_rows(when: str) -> None:
    """The run has as many servers again."""
    machine = training_machine(servers=2, workers=0)
    if when == "before":
        machine.handle(ScaleRequested(3, "requested"))
    for each in [each for each in machine.started if each.role is Role.SERVER and each.number == 1]:
        machine.handle(MachineStopping(each))
    if when == "before":
        assert machine.migrating is None, "a server is joining"
    machine.relocate(Role.SERVER, 1)
    machine.exit(Role.SERVER, 1, -9)
    machine.make_all_ready()
    machine.restart_all()
    machine.restart_all()
    assert max(machine.launches) == 2 and len(machine.trainers()) == 2
    assert len(machine.supervisor.run_state.servers) == 2 + (when == "before")


def test_no_buckets_move_if_all_machines_stop() -> None:
    machine = training_machine(servers=2, workers=0)
    first, second = (each for each in machine.started if each.role is Role.SERVER)
    machine.handle(MachineStopping(first))
    machine.handle(MachineStopping(second))
    assert machine.migrating is not None
    machine.handle(MigrationEnded())
    assert machine.migrating is None and machine.stopped == {first}


def test_a_scaling_before_the_first_trainer_has_called_waits() -> None:
    machine = training_machine(servers=1, workers=0)
    machine.handle(ScaleRequested(2, "requested"))
    machine.make_all_ready()
    assert [machine.fail_migration(has_no_job=True) for _ in range(20)] == [1.0] * 20
    assert sum("once a trainer has created its embeddings" in line for line in machine.log) == 1
    machine.handle(ScaleRequested(3, "too soon"))
    assert "refused: buckets are being moved; retry later" in machine.log[-1]
    machine.handle(MigrationEnded())
    assert len(machine.supervisor.run_state.servers) == 2 and max(machine.launches) == 1


@pytest.mark.parametrize("moved", [False, True])
def test_a_joining_server_that_keeps_failing_does_not_end_the_run(moved: bool) -> None:
    """If buckets may have moved to it, the run goes back to the checkpoint with the servers that it had."""
    machine = training_machine(servers=1, workers=0)
    machine.handle(ScaleRequested(2, "requested"))
    machine.make_all_ready()
    machine.fail_migration(has_no_job=not moved)
    for _ in range(4):
        machine.make_all_ready()
        if machine.migrating:
            machine.fail_migration(has_no_job=not moved, resume=False)
        machine.exit(Role.SERVER, 1, -9, after=1.0)
    assert "continuing with 1 server" in "\n".join(machine.log)
    machine.restart_all()
    machine.restart_all()
    assert machine.exit_status is None and len(machine.supervisor.run_state.servers) == 1
    assert max(machine.launches) == 1 + moved and len(machine.trainers()) == 2
    machine.handle(MigrationDue())
    assert machine.migrating is None, "the scaling was cancelled"


def test_scaling_beyond_the_maximum_is_refused() -> None:
    machine = training_machine(servers=2, workers=0, max_servers=3)
    machine.handle(ScaleRequested(4, "requested"))
    assert "request for 4 servers refused: the maximum is 3" in machine.log[-1] and machine.migrating is None
    machine.handle(ScaleRequested(3, "requested"))
    machine.make_all_ready()
    assert machine.migrating is not None and len(machine.migrating) == 3


def test_a_machine_that_is_lost_while_buckets_move() -> None:
    """The target number of servers restarts empty; the migration in progress has nothing left to do."""
    machine = training_machine(servers=2, workers=0)
    machine.handle(ScaleRequested(3, "requested"))
    machine.make_all_ready()
    assert machine.migrating is not None
    machine.relocate(Role.SERVER, 1)
    machine.exit(Role.SERVER, 1, -9)
    machine.make_all_ready()
    machine.execute_stops()
    starts = [each for each in machine.started[-3:] if each.role is Role.SERVER]
    assert [each.number for each in starts] == [0, 1, 2] and not machine.with_rows
    machine.make_all_ready()
    assert len(machine.supervisor.run_state.servers) == 3 and max(machine.launches) == 2
    machine.handle(ScaleRequested(2, "requested"))
    assert "refused: buckets are being moved" in machine.log[-1], "the migration before must end first"
    machine.handle(MigrationEnded("a server does not answer"))
    machine.handle(ScaleRequested(2, "requested"))
    machine.handle(MigrationEnded())
    assert len(machine.supervisor.run_state.servers) == 2 and machine.exit_status is None


def test_a_server_that_is_lost_before_the_first_launch() -> None:
    machine = Machine(RunConfig(servers=2, workers=1, trainers=1))
    server = machine.started[0]
    machine.handle(ProcessReady(server, machine.address_of(server)))
    machine.relocate(Role.SERVER, 0)
    machine.exit(Role.SERVER, 0, -9)
    machine.make_all_ready()
    assert len(machine.trainers()) == 1 and not machine.stopped


def test_a_server_that_cannot_be_placed() -> None:
    machine = training_machine(servers=1, workers=0)
    machine.handle(ScaleRequested(3, "requested"))
    first, second = machine.started[-2:]
    machine.handle(ProcessReady(first, machine.address_of(first)))
    machine.handle(PlacementFailed(second, "no room for server 2"))
    assert machine.log[-1] == "no room for server 2; continuing with 1 server"
    assert machine.stopped == {first} and machine.migrating is None
    machine.execute_stops()
    machine.handle(ScaleRequested(2, "requested"))
    machine.make_all_ready()
    machine.relocate(Role.SERVER, 3)
    machine.exit(Role.SERVER, 3, -9)
    machine.handle(PlacementFailed(machine.started[-1], "no room for server 3"))  # it had rows already
    machine.execute_stops()
    machine.make_all_ready()
    assert [each.incarnation for each in machine.trainers()] == [2, 2] and len(
        machine.supervisor.run_state.servers
    ) == 1
    machine.exit(Role.SERVER, 0, -9)
    machine.handle(PlacementFailed(machine.started[-1], "no room for server 0"))
    machine.execute_stops()
    assert machine.exit_status == 1 and machine.log[-1] == "no room for server 0"


def test_a_second_stop_request_kills() -> None:
    machine = training_machine()
    machine.handle(StopRequested("SIGINT"))
    assert machine.stopped == set(machine.trainers()), "servers run until the scripts have ended"
    machine.handle(StopRequested("SIGINT"))
    assert machine.stopped == machine.running
    machine.execute_stops()
    assert machine.exit_status == 130


def test_a_run_continues_the_count_of_launches() -> None:
    machine = Machine(RunConfig(servers=1, workers=0, trainers=1), RunState(name="test", launch=7))
    machine.make_all_ready()
    assert [each.incarnation for each in machine.trainers()] == [8]


@pytest.mark.parametrize(("option", "value"), [("servers", 0), ("trainers", 0), ("workers", -1), ("restarts", 1.5)])
def test_invalid_run_configs_are_refused(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"run: {option} is {value}"):
        replace(RunConfig(servers=1, workers=0, trainers=1), **{option: value})
