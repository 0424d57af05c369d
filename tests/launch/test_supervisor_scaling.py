"""The supervisor's decisions about the number of servers: scaling, and servers whose machines will stop.

No processes, no clock.
"""

from __future__ import annotations

import pytest

from satrap.launch.run_events import (
    MachineStopping,
    MigrationDue,
    MigrationEnded,
    Process,
    ProcessExited,
    Role,
    ScaleRequested,
)
from satrap.launch.supervisor import RunConfig
from supervised_machine import Machine, training_machine


def test_scaling_up_and_down_while_trainers_run() -> None:
    machine = training_machine(servers=2, workers=0)
    machine.handle(ScaleRequested(4, "requested"))
    assert [each.number for each in machine.started[-2:]] == [2, 3] and machine.migrating is None
    machine.handle(ProcessExited(machine.started[-1], -9))  # before it was ready
    machine.make_all_ready()
    assert machine.migrating == tuple(f"tcp://127.0.0.1:{n}" for n in (1, 2, 3, 4))
    machine.handle(ScaleRequested(3, "too soon"))
    assert "refused: buckets are being moved" in machine.log[-1]
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


def test_a_request_of_the_user_waits_until_it_can_be_met() -> None:
    """While servers start or buckets move; the newest request counts. One of the autoscaler, from an older load, does
    not wait."""
    machine = Machine(RunConfig(servers=2, workers=0, trainers=1))
    machine.handle(ScaleRequested(4, "user", waits=True))
    assert machine.log[-1] == "request for 4 servers waits: servers and workers are starting"
    machine.handle(ScaleRequested(3, "user", waits=True))
    machine.make_all_ready()
    assert "scaling to 3 servers from 2: user" in machine.log
    machine.make_all_ready()
    machine.handle(ScaleRequested(1, "user", waits=True))
    assert (
        machine.log[-1] == "request for 1 server waits: buckets are being moved" and len(machine.migrating or ()) == 3
    )
    machine.handle(ScaleRequested(5, "autoscaler"))
    machine.handle(MigrationEnded())
    assert "scaling to 1 server from 3: user" in machine.log and len(machine.migrating or ()) == 1
    machine.handle(MigrationEnded())
    assert len(machine.supervisor.run_state.servers) == 1 and "buckets moved: the run has 1 server" in machine.log[-2:]


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


def test_a_server_that_has_not_joined_does_not_delay_one_that_leaves() -> None:
    """Nodes are drained one after the other, and no node has room yet for the server in place of the first."""
    machine = training_machine(servers=3, workers=0)
    first = machine.supervisor.run_state.servers
    stopping = [each for each in machine.started if each.role is Role.SERVER][:2]
    machine.handle(MachineStopping(stopping[0]))
    machine.handle(MigrationEnded())
    joining = machine.started[-1]
    assert joining.number == 3 and machine.migrating is None
    machine.handle(MachineStopping(stopping[1]))
    assert joining in machine.stopped and machine.migrating == first[2:]
    machine.handle(MigrationEnded())
    machine.execute_stops()
    machine.make_all_ready()
    machine.handle(MigrationEnded())
    assert len(machine.supervisor.run_state.servers) == 3 and max(machine.launches) == 1


@pytest.mark.parametrize("by", ["the time is over", "a migration that fails"])
def test_a_machine_that_stops_too_early_costs_its_rows(by: str) -> None:
    """The run has as many servers again."""
    machine = training_machine(servers=2, workers=0)
    machine.handle(MachineStopping(next(each for each in machine.started if each.number == 1)))
    if by == "a migration that fails":
        machine.fail_migration()
    machine.relocate(Role.SERVER, 1)
    machine.exit(Role.SERVER, 1, -9)
    machine.make_all_ready()
    machine.restart_all()
    machine.restart_all()
    assert max(machine.launches) == 2 and len(machine.trainers()) == 2
    assert len(machine.supervisor.run_state.servers) == 2


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
    assert "refused: buckets are being moved" in machine.log[-1]
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
