"""What the supervisor decides: against a model of a machine on which anything may end at any moment, and rule by rule.

No process, no clock.
"""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.errors import ConfigError
from satrap.launch.run_state import RunState
from satrap.launch.supervisor import (
    End,
    Ended,
    Event,
    Finish,
    Move,
    Moved,
    NoPlace,
    Order,
    Plan,
    Process,
    Ready,
    Role,
    Say,
    Start,
    Stop,
    Supervisor,
    Wanted,
)

MEMBERSHIP = RunState(name="test")


class Machine:
    """Obeys orders, checks that each may be given, and lets things happen."""

    def __init__(self, plan: Plan, membership: RunState = MEMBERSHIP) -> None:
        self.plan, self.supervisor = plan, Supervisor(plan, membership)
        self.now, self.alive, self.ready = 0.0, set[Process](), set[Process]()
        self.told, self.said, self.started = set[Process](), list[str](), list[Process]()
        self.finished: int | None = None
        self.launches: dict[int, int] = {}
        self.moving: tuple[str, ...] | None = None
        self.was_at: dict[tuple[Role, int], str] = {}
        self.moves = dict[tuple[Role, int], int]()
        self.known: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # to the trainers
        self.rows = set[int]()  # the servers that have their share of them
        self.obey(self.supervisor.begin(self.now))

    def obey(self, orders: list[Order]) -> None:
        for order in orders:
            assert self.finished is None, "nothing after the last order"
            match order:
                case Start(process, address):
                    self._start(process, address)
                case End(process, _):
                    self.told.add(process)
                case Move(now, wanted):
                    self.rows |= self.numbers(wanted)
                    assert self.moving is None and now == self.supervisor.membership.servers and now != wanted
                    assert {*now, *wanted} <= set(self.was_at.values())
                    self.moving = wanted
                case Say(text):
                    self.said.append(text)
                case Finish(status):
                    assert not self.alive, "nothing is left behind"
                    self.finished = status

    def _start(self, process: Process, address: str | None) -> None:
        assert not any((each.role, each.number) == (process.role, process.number) for each in self.alive)
        assert process not in self.started, "each start is another process"
        self.started.append(process)
        if process.role is Role.TRAINER:
            ready = {self.was_at[each.role, each.number] for each in self.ready}
            assert self.supervisor.membership.servers and len(self.supervisor.membership.workers) == self.plan.workers
            assert {*self.supervisor.membership.servers, *self.supervisor.membership.workers} <= ready, "all are there"
            self.known = self.addresses()
            assert process.start == self.supervisor.membership.launch, "a launch is known before it begins"
            assert process.start == max(self.launches, default=process.start - 1) + (process.start not in self.launches)
            assert all(each.start == process.start for each in self.alive if each.role is Role.TRAINER)
            self.launches[process.start] = self.launches.get(process.start, 0) + 1
            servers = self.numbers(self.known[0])
            assert servers <= self.rows or not servers & self.rows, "all have what the launch before left, or none"
            self.rows |= servers
        elif address is not None:
            assert address == self.was_at[process.role, process.number], "where callers know it"
        elif process.role is Role.SERVER:
            self.rows.discard(process.number)
        self.alive.add(process)

    def address(self, process: Process) -> str:
        machine = self.moves.get((process.role, process.number), 0) + 1
        return f"tcp://127.0.0.{machine}:{1000 * (process.role is Role.WORKER) + process.number + 1}"

    def numbers(self, servers: tuple[str, ...]) -> set[int]:
        return {number for (role, number), at in self.was_at.items() if role is Role.SERVER and at in servers}

    def addresses(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.supervisor.membership.servers, self.supervisor.membership.workers

    def move(self, role: Role, number: int) -> None:
        """Its next start is on another machine, where its rows are not."""
        if role is Role.SERVER:
            self.rows.discard(number)
        self.moves[role, number] = self.moves.get((role, number), 0) + 1

    def happen(self, event: Event) -> None:
        if isinstance(event, Ready):
            self.ready.add(event.process)
            self.was_at[event.process.role, event.process.number] = event.address
        elif isinstance(event, Moved):
            self.moving = None
        elif isinstance(event, Ended | NoPlace):
            self.alive.discard(event.process)
            self.ready.discard(event.process)
        self.obey(self.supervisor.handle(event, self.now))
        if isinstance(event, Moved):  # which trainers learn from the servers
            self.known = self.addresses()
        if self.finished is None and any(each not in self.told for each in self.trainers()):
            assert self.known == self.addresses(), "they are not left to call those that are elsewhere"

    def all_ready(self) -> None:
        """Servers and workers, until the trainers run."""
        while waiting := sorted(
            (each for each in self.alive - self.ready if each.role is not Role.TRAINER), key=lambda each: each.role
        ):
            self.happen(Ready(waiting[0], self.address(waiting[0])))

    def end(self, role: Role, number: int, status: int, after: float = 1000.0) -> None:
        self.now += after
        found = next(each for each in self.alive if (each.role, each.number) == (role, number))
        self.happen(Ended(found, status))

    def obeyed(self) -> None:
        """Those that were told to end do."""
        while due := sorted(self.told & self.alive, key=str):
            self.happen(Ended(due[0], -signal.SIGTERM))

    def all_begin_again(self) -> None:
        """Trainers end, servers too if they must begin empty, and all are there again."""
        self.obeyed()
        self.all_ready()

    def trainers(self) -> list[Process]:
        return sorted((each for each in self.alive if each.role is Role.TRAINER), key=lambda each: each.number)


def training(**plan: int) -> Machine:
    whole = Plan(**{"servers": 2, "workers": 1, "trainers": 2} | plan)
    machine = Machine(whole)
    machine.all_ready()
    assert len(machine.trainers()) == whole.trainers
    return machine


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
def test_whatever_happens_the_run_goes_on_or_ends(
    draw: random.Random, servers: int, workers: int, trainers: int
) -> None:
    machine = Machine(Plan(servers=servers, workers=workers, trainers=trainers, restarts=draw.randrange(4)))
    for _ in range(draw.randrange(60)):
        machine.now += draw.choice([0.0, 1.0, 100.0, 1000.0])
        chance = draw.random()
        waiting = [each for each in machine.alive - machine.ready if each.role is not Role.TRAINER]
        if machine.finished is not None:
            break
        if waiting and chance < 0.5:
            one = draw.choice(sorted(waiting, key=str))
            found = Ready(one, machine.address(one)) if draw.random() < 0.9 else NoPlace(one, "no room")
            machine.happen(found)
        elif chance < 0.6:
            if machine.moving is not None and draw.random() < 0.7:
                machine.happen(Moved(draw.choice([None, None, "a server is silent"])))
            else:
                machine.happen(Wanted(draw.randrange(0, 6), "drawn"))
        elif chance < 0.95 and machine.alive:
            one = draw.choice(sorted(machine.alive, key=str))
            if draw.random() < 0.3:
                machine.move(one.role, one.number)
            machine.happen(Ended(one, draw.choice([0, 1, -9, -15])))
        else:
            machine.happen(Stop("SIGINT"))
    if machine.finished is None:
        machine.happen(Stop("SIGINT"))
        machine.obeyed()
    assert machine.finished is not None
    done = machine.launches.get(max(machine.launches, default=0), 0)
    assert machine.finished != 0 or done == trainers, "well only if a whole launch began"


def test_a_run_that_goes_well() -> None:
    machine = training()
    assert machine.supervisor.membership == RunState(
        name="test",
        launch=1,
        servers=("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"),
        workers=("tcp://127.0.0.1:1001",),
    )
    machine.end(Role.TRAINER, 1, 0)
    assert not machine.told, "the others have time"
    machine.end(Role.TRAINER, 0, 0)
    machine.obeyed()
    assert machine.finished == 0


@pytest.mark.parametrize("role", [Role.SERVER, Role.WORKER])
def test_a_server_or_worker_is_started_again_where_it_was(role: Role) -> None:
    machine = training()
    trainers = machine.trainers()
    for start in (2, 3, 4, 5, 6):
        machine.end(role, 0, -9)
        assert machine.started[-1] == Process(role, 0, start)
        machine.all_ready()
    assert machine.trainers() == trainers, "trainers go on"
    for _ in range(4):
        machine.end(role, 0, 1, after=1.0)
    machine.obeyed()
    assert machine.finished == 1
    assert machine.said[-1] == f"{role} 0 ended with status 1, 4 times soon after it began: giving up"


@pytest.mark.parametrize("role", [Role.SERVER, Role.WORKER])
def test_one_that_comes_back_elsewhere_begins_a_new_launch(role: Role) -> None:
    machine = training(restarts=1)
    machine.move(role, 0)
    machine.end(role, 0, -9, after=5.0)
    assert not machine.told, "it may come back where it was"
    machine.all_ready()
    assert machine.told == {each for each in machine.started if each.role is Role.TRAINER} and machine.finished is None
    machine.all_begin_again()
    assert [each.start for each in machine.trainers()] == [2, 2], "however soon it was: it was not the script"
    assert f"{role} 0 is no longer where it was: the trainers start again from the last checkpoint" in machine.said
    assert ("rows of a server are lost: all servers begin empty" in machine.said) == (role is Role.SERVER)
    assert machine.addresses()[role is Role.WORKER][0] == machine.address(Process(role, 0, 2))
    machine.move(role, 0)
    machine.end(role, 0, -9)
    machine.all_ready()
    machine.all_begin_again()
    assert [each.start for each in machine.trainers()] == [3, 3]


def test_a_machine_lost_with_a_server_and_a_trainer() -> None:
    machine = training()
    machine.move(Role.SERVER, 1)
    machine.end(Role.TRAINER, 0, -9)
    machine.end(Role.SERVER, 1, -9)
    machine.obeyed()
    assert not machine.trainers(), "they wait for the server, whose address they would not know"
    machine.all_ready()
    machine.all_begin_again()
    assert [each.start for each in machine.trainers()] == [2, 2]


def test_trainers_start_again_together_once_all_are_gone() -> None:
    machine = training(trainers=3)
    machine.end(Role.TRAINER, 0, 0)
    machine.end(Role.TRAINER, 1, -9)
    assert {each.number for each in machine.told} == {2} and max(machine.launches) == 1
    machine.happen(Ended(Process(Role.TRAINER, 2, 1), 1))  # it missed the other first
    assert [each.start for each in machine.trainers()] == [2, 2, 2]
    told = "trainer 1 was ended by signal 9, trainer 2 ended with status 1, after trainer 0 had ended with status 0: "
    assert told in machine.said[-2]
    machine.happen(Ended(Process(Role.TRAINER, 1, 1), 0))  # of the launch before
    assert len(machine.trainers()) == 3


def test_a_script_that_fails_by_itself_soon_is_not_tried_again() -> None:
    machine = training()
    machine.end(Role.TRAINER, 0, 3, after=5.0)
    machine.obeyed()
    assert machine.finished == 3 and max(machine.launches) == 1


def test_servers_that_hang_end_the_run_at_last() -> None:
    """Trainers wait a minute for them, so a launch is not early, and not settled."""
    machine = training(restarts=2)
    for _ in range(3):
        machine.end(Role.TRAINER, 0, 1, after=65.0)
        machine.obeyed()
    assert machine.finished == 1 and max(machine.launches) == 3


def test_a_launch_that_is_killed_soon_again_and_again_ends_the_run() -> None:
    machine = training(restarts=2)
    for _ in range(3):
        machine.end(Role.TRAINER, 0, -9, after=5.0)
        machine.obeyed()
    assert machine.finished == 137 and max(machine.launches) == 3
    assert machine.said[-1] == "trainer 0 was ended by signal 9, 3 times soon after it began: giving up"


def test_a_long_launch_clears_the_count() -> None:
    machine = training(restarts=1)
    for launch in range(1, 6):
        machine.end(Role.TRAINER, 0, -9, after=5.0 if launch % 2 else 1000.0)
        machine.happen(Ended(Process(Role.TRAINER, 1, launch), -signal.SIGTERM))
    assert machine.finished is None and max(machine.launches) == 6


def test_more_servers_and_fewer_while_trainers_run() -> None:
    machine = training(servers=2, workers=0)
    machine.happen(Wanted(4, "asked for"))
    assert [each.number for each in machine.started[-2:]] == [2, 3] and machine.moving is None
    machine.happen(Ended(machine.started[-1], -9))  # before it was there
    machine.all_ready()
    assert machine.moving == tuple(f"tcp://127.0.0.1:{n}" for n in (1, 2, 3, 4))
    machine.happen(Wanted(3, "too soon"))
    assert "refused, buckets are being moved; ask again" in machine.said[-1]
    machine.happen(Moved("a server is silent"))
    assert machine.moving is not None and machine.supervisor.membership.servers == machine.moving[:2]
    machine.happen(Moved())
    assert len(machine.supervisor.membership.servers) == 4 and not machine.told
    machine.happen(Wanted(1, "asked for"))
    machine.end(Role.SERVER, 3, -9)
    machine.all_ready()
    machine.happen(Moved())
    assert machine.supervisor.membership.servers == ("tcp://127.0.0.1:1",)
    assert sorted(each.number for each in machine.told) == [1, 2, 3]
    machine.obeyed()
    assert machine.finished is None and len(machine.alive) == 3
    machine.happen(Wanted(2, "asked for"))
    assert machine.started[-1] == Process(Role.SERVER, 4, 1), "a number is one server's for ever"
    for _ in range(4):
        machine.all_ready()
        machine.happen(Moved("a server is silent"))
    machine.obeyed()
    assert machine.finished == 1 and "giving up" in machine.said[-1]


def test_no_more_servers_than_there_may_be() -> None:
    machine = training(servers=2, workers=0, max_servers=3)
    machine.happen(Wanted(4, "asked for"))
    assert "4 servers wanted: refused, there may be 3 at most" in machine.said[-1] and machine.moving is None
    machine.happen(Wanted(3, "asked for"))
    machine.all_ready()
    assert machine.moving is not None and len(machine.moving) == 3


def test_a_machine_that_is_lost_while_buckets_move() -> None:
    """All begin empty, as many as were wanted; the move that was under way has nothing to do any more."""
    machine = training(servers=2, workers=0)
    machine.happen(Wanted(3, "asked for"))
    machine.all_ready()
    assert machine.moving is not None
    machine.move(Role.SERVER, 1)
    machine.end(Role.SERVER, 1, -9)
    machine.all_ready()
    machine.obeyed()
    starts = [each for each in machine.started[-3:] if each.role is Role.SERVER]
    assert [each.number for each in starts] == [0, 1, 2] and not machine.rows
    machine.all_ready()
    assert len(machine.supervisor.membership.servers) == 3 and max(machine.launches) == 2
    machine.happen(Wanted(2, "asked for"))
    assert "refused, buckets are being moved" in machine.said[-1], "the one before must give up first"
    machine.happen(Moved("a server is silent"))
    machine.happen(Wanted(2, "asked for"))
    machine.happen(Moved())
    assert len(machine.supervisor.membership.servers) == 2 and machine.finished is None


def test_a_server_that_is_lost_before_anybody_used_it() -> None:
    machine = Machine(Plan(servers=2, workers=1, trainers=1))
    server = machine.started[0]
    machine.happen(Ready(server, machine.address(server)))
    machine.move(Role.SERVER, 0)
    machine.end(Role.SERVER, 0, -9)
    machine.all_ready()
    assert len(machine.trainers()) == 1 and not machine.told


def test_a_server_that_finds_no_place() -> None:
    machine = training(servers=1, workers=0)
    machine.happen(Wanted(3, "asked for"))
    first, second = machine.started[-2:]
    machine.happen(Ready(first, machine.address(first)))
    machine.happen(NoPlace(second, "no room for server 2"))
    assert machine.said[-1] == "no room for server 2; it goes on with 1 server"
    assert machine.told == {first} and machine.moving is None
    machine.obeyed()
    machine.happen(Wanted(2, "asked for"))
    machine.all_ready()
    machine.move(Role.SERVER, 3)
    machine.end(Role.SERVER, 3, -9)
    machine.happen(NoPlace(machine.started[-1], "no room for server 3"))  # which had rows already
    machine.obeyed()
    machine.all_ready()
    assert [each.start for each in machine.trainers()] == [2, 2] and len(machine.supervisor.membership.servers) == 1
    machine.end(Role.SERVER, 0, -9)
    machine.happen(NoPlace(machine.started[-1], "no room for server 0"))
    machine.obeyed()
    assert machine.finished == 1 and machine.said[-1] == "no room for server 0"


def test_stopping_twice_kills() -> None:
    machine = training()
    machine.happen(Stop("SIGINT"))
    assert machine.told == set(machine.trainers()), "servers serve while the scripts end"
    machine.happen(Stop("SIGINT"))
    assert machine.told == machine.alive
    machine.obeyed()
    assert machine.finished == 130


def test_a_run_goes_on_from_the_launches_before_it() -> None:
    machine = Machine(Plan(servers=1, workers=0, trainers=1), RunState(name="test", launch=7))
    machine.all_ready()
    assert [each.start for each in machine.trainers()] == [8]


@pytest.mark.parametrize(("option", "value"), [("servers", 0), ("trainers", 0), ("workers", -1), ("restarts", 1.5)])
def test_impossible_plans_are_refused(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"run: {option} is {value}"):
        replace(Plan(servers=1, workers=0, trainers=1), **{option: value})


def test_the_file_is_whole_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert RunState.read(file) is None
    known = replace(MEMBERSHIP, servers=("", "tcp://127.0.0.1:2")).next_launch()
    known.write(file)
    assert RunState.read(file) == known
    for text in ("{", "[]", '{"name": "../x"}', '{"name": "a", "launch": -1}', '{"name": "a", "color": 1}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"run\.json is no run's"):
            RunState.read(file)
