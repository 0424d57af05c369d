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
    Event,
    MachineStopping,
    MigrationDue,
    MigrationEnded,
    PlacementFailed,
    Process,
    ProcessExited,
    ProcessReady,
    Role,
    ScaleRequested,
    ScriptStarted,
    StopRequested,
)
from satrap.launch.run_state import RunState
from satrap.launch.supervisor import RunConfig
from supervised_machine import Machine, training_machine


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


def test_a_script_that_fails_early_is_not_retried_although_the_trainer_took_long_to_start_it() -> None:
    """On a busy machine the imports of a trainer take minutes."""
    machine = training_machine(restarts=2)
    machine.now += 120.0
    machine.handle(ScriptStarted(machine.trainers()[0]))
    machine.exit(Role.TRAINER, 0, 1, after=5.0)
    machine.execute_stops()
    assert machine.exit_status == 1 and max(machine.launches) == 1
    assert "trainer 0 exited with status 1, soon after it started; stopping the run" in machine.log[-1]


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
