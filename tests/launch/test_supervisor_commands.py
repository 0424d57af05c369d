"""The details of the supervisor's commands: how a process is stopped, what is printed, and what counts as early.

No processes, no clock.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.errors import ConfigError
from satrap.launch.run_events import (
    LogMessage,
    MachineStopping,
    MigrateBuckets,
    MigrationEnded,
    Process,
    ProcessExited,
    ProcessReady,
    Role,
    ScaleRequested,
    StartProcess,
    StopRequested,
)
from satrap.launch.supervisor import RunConfig, describe_exit
from supervised_machine import Machine, training_machine

SERVERS_AND_WORKER = dict.fromkeys(("server 0", "server 1", "worker 0"), ("terminate", True))


def test_how_processes_are_stopped_at_the_end_of_a_run() -> None:
    """Scripts get Ctrl-C, since they may save; servers and workers end after them, and their rows go with them."""
    machine = training_machine(trainers=2)
    machine.handle(StopRequested("SIGINT"))
    assert machine.stops() == {"trainer 0": ("interrupt", False), "trainer 1": ("interrupt", False)}
    assert machine.log[-1] == "SIGINT: stopping the run; the same command resumes the last checkpoint, if there is one"
    machine.exit(Role.TRAINER, 0, -2)
    assert not machine.stops()
    machine.exit(Role.TRAINER, 1, -2)
    assert machine.stops() == SERVERS_AND_WORKER
    machine.handle(StopRequested("SIGINT"))
    assert machine.stops() == dict.fromkeys(SERVERS_AND_WORKER, ("kill", True))


def test_how_a_launch_that_failed_is_stopped() -> None:
    machine = training_machine(trainers=3)
    machine.exit(Role.TRAINER, 1, -9)
    assert machine.stops() == {"trainer 0": ("terminate", False), "trainer 2": ("terminate", False)}
    machine.handle(StopRequested("SIGTERM"))
    assert machine.stops() == {"trainer 0": ("interrupt", False), "trainer 2": ("interrupt", False)}


def test_how_servers_are_stopped_that_own_no_buckets() -> None:
    machine = training_machine(workers=0)
    machine.handle(ScaleRequested(1, "requested"))
    machine.handle(MigrationEnded())
    assert machine.stops() == {"server 1": ("terminate", True)}
    assert machine.log[-1] == "buckets moved: the run has 1 server"


def test_servers_that_restart_empty_keep_their_places() -> None:
    """Only the place of a server that is not needed any more is released."""
    machine = training_machine(servers=3, workers=0, trainers=1)
    machine.handle(ScaleRequested(2, "requested"))
    machine.relocate(Role.SERVER, 0)
    machine.exit(Role.SERVER, 0, -9)
    machine.handle(ProcessReady(Process(Role.SERVER, 0, 2), machine.address_of(Process(Role.SERVER, 0, 2))))
    machine.handle(ProcessExited(machine.trainers()[0], -15))
    assert machine.stops() == {f"server {number}": ("kill", number == 2) for number in range(3)}
    assert "a server's rows are lost; restarting all servers empty" in machine.log


@pytest.mark.parametrize("leaves", [False, True])
def test_buckets_move_without_pauses_only_from_a_machine_that_will_stop(leaves: bool) -> None:
    machine = training_machine(servers=2, workers=0)
    server = next(each for each in machine.started if each.number == 1)
    machine.handle(MachineStopping(server) if leaves else ScaleRequested(1, "requested"))
    moves = [each for each in machine.commands if isinstance(each, MigrateBuckets)]
    assert [each.is_urgent for each in moves] == [leaves]
    machine.handle(MigrationEnded())
    assert not [each for each in machine.commands if isinstance(each, MigrateBuckets)]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_server_that_has_restarted_does_not_leave(restarts: bool) -> None:
    """Its machine will stop, which is known before the launch starts; the next incarnation has another machine."""
    machine = Machine(RunConfig(servers=2, workers=0, trainers=1))
    machine.handle(MachineStopping(machine.started[1]))
    assert not machine.commands, "nothing moves before the launch"
    if restarts:
        machine.exit(Role.SERVER, 1, -15)
        machine.handle(MachineStopping(Process(Role.SERVER, 1, 1)))  # about the incarnation before
    machine.make_all_ready()
    assert machine.trainers() and (machine.migrating is None) == restarts


@given(st.floats(0.0, 130.0))
def test_a_script_that_fails_within_a_minute_is_not_retried(seconds: float) -> None:
    machine = training_machine(trainers=1)
    machine.exit(Role.TRAINER, 0, 3, after=seconds)
    if seconds < 60.0:
        assert machine.log[-1] == (
            "trainer 0 exited with status 3, soon after it started; stopping the run (see the error above)"
        )
        machine.execute_stops()
        assert machine.exit_status == 3
    else:
        assert isinstance(machine.commands[-1], StartProcess) and len(machine.trainers()) == 1


@pytest.mark.parametrize(("seconds", "launches"), [(299.0, 2), (300.0, 6)])
def test_a_launch_of_five_minutes_has_settled(seconds: float, launches: int) -> None:
    machine = training_machine(trainers=1, restarts=1)
    for _ in range(5):
        if machine.trainers():
            machine.exit(Role.TRAINER, 0, -9, after=seconds)
    assert max(machine.launches) == launches
    assert (machine.log[-1] == "trainer 0 was killed by signal 9, 2 times soon after it started; giving up") == (
        launches == 2
    )


@pytest.mark.parametrize(
    ("statuses", "status"), [((3, 4), 3), ((3, -9), 137), ((-9, 3), 137), ((3, 0), 3), ((3, -15), 3), ((-11, -9), 137)]
)
def test_the_status_of_a_run_whose_script_fails(statuses: tuple[int, int], status: int) -> None:
    """That of the first failure, or of a later one by a signal; trainers that were stopped do not count."""
    machine = training_machine(restarts=0)
    for number, each in enumerate(statuses):
        machine.exit(Role.TRAINER, number, each, after=1.0)
    machine.execute_stops()
    assert machine.exit_status == status
    last = next(each for each in reversed(machine.log) if each.startswith("trainer"))
    assert (f"trainer 1 {describe_exit(statuses[1])}" in last) == (statuses[1] not in (0, -15))


@pytest.mark.parametrize("trainers", [1, 2])
def test_what_a_run_prints(trainers: int) -> None:
    machine = training_machine(servers=1, workers=1, trainers=trainers)
    assert machine.log == [
        "server 0: listening at tcp://127.0.0.1:1",
        "worker 0: listening at tcp://127.0.0.1:1001",
        f"launch 1: starting {trainers} trainer{'s' * (trainers > 1)}",
    ]
    machine.exit(Role.SERVER, 0, 7)
    assert machine.commands == [
        LogMessage("server 0 exited with status 7; restarting it"),
        StartProcess(Process(Role.SERVER, 0, 2), "tcp://127.0.0.1:1"),
    ]
    machine.handle(ScaleRequested(2, "the servers are full"))
    assert machine.log[-1] == "scaling to 2 servers from 1: the servers are full"


@given(st.integers(-1, 5))
def test_requests_for_another_number_of_servers(requested: int) -> None:
    machine = training_machine(servers=2, workers=0, max_servers=3)
    machine.handle(ScaleRequested(requested, "requested"))
    noun = f"{requested} server{'s' * (requested != 1)}"
    if requested > 3:
        assert machine.log[-1] == f"request for {noun} refused: the maximum is 3"
    elif requested in (1, 3):
        assert machine.log[-1] == f"scaling to {noun} from 2: requested"
        assert (machine.migrating is not None) == (requested == 1), "a new server must listen first"
    else:
        assert machine.log[-1] == f"request for {noun} ignored: the run has 2"
    assert [each.number for each in machine.running if each.role is Role.SERVER and each.number > 1] == (
        [2] if requested == 3 else []
    )


def test_the_phase_of_a_run() -> None:
    machine = Machine(RunConfig(servers=1, workers=0, trainers=2))
    assert machine.supervisor.phase == "servers and workers are starting"
    machine.handle(ScaleRequested(2, "requested"))
    assert machine.log[-1] == "request for 2 servers refused: servers and workers are starting"
    machine.make_all_ready()
    assert machine.supervisor.phase == "trainers are running"
    machine.relocate(Role.SERVER, 0)
    machine.exit(Role.SERVER, 0, -9)
    machine.make_all_ready()
    assert machine.supervisor.phase == "a failed launch is being stopped"
    machine.handle(ProcessExited(machine.trainers()[0], -15))
    assert machine.supervisor.phase == "a failed launch is being stopped"
    machine.handle(ProcessExited(machine.trainers()[0], -15))
    assert machine.supervisor.phase == "servers are being restarted empty"
    machine.handle(StopRequested("SIGINT"))
    assert machine.supervisor.phase == "the run is stopping"


@pytest.mark.parametrize(
    ("option", "value", "low"),
    [
        ("servers", 65536, 1),
        ("workers", 65536, 0),
        ("trainers", 65536, 1),
        ("restarts", 65536, 0),
        ("max_servers", 1, 2),
        ("max_servers", 65536, 2),
    ],
)
def test_the_limits_of_a_run(option: str, value: int, low: int) -> None:
    with pytest.raises(ConfigError, match=f"run: {option} is {value}; expected .*{low}.*65535"):
        RunConfig(**{"servers": 2, "workers": 0, "trainers": 1} | {option: value})
    most = {"servers": 65535, "workers": 65535, "trainers": 65535, "restarts": 65535, "max_servers": 65535}
    assert RunConfig(**most).counts == {Role.SERVER: 65535, Role.WORKER: 65535, Role.TRAINER: 65535}
    assert RunConfig(servers=2, workers=0, trainers=1, max_servers=2, restarts=0).restarts == 0
