"""What to start, end, and start again. Pure: events and the time in, orders out; `run` carries them out.

    servers ──all ready──> workers ──all ready──> a launch of the trainers ──all ended well──> ending ──> Finish
                                                    │            ▲
                                            one fails: the others are ended; once all are gone, the next launch

A server or worker that ends is started again at its address: a server finds its rows in shared memory, trainers wait
for it. One that listens elsewhere then (its machine was lost) has no rows, and trainers do not know it: their launch
ends. The other servers still name the lost one, and buckets may have moved, so all servers begin empty before the next
launch: what they hold was to be replaced by the checkpoint anyway. A trainer that ends badly takes its launch with it,
too, because the trainers' dense halves must stay alike: the next launch resumes the last checkpoint, once all servers
and workers listen. Launches are counted, on disk before they begin; the servers refuse an older one's calls, so a
process that was paused, or cut off, cannot write any more.

While trainers run, there may be more servers or fewer: new ones are started, then buckets are moved, then those that
own none any more are ended.
"""

import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Literal

from satrap.config.validation import check_integer
from satrap.launch.run_state import RunState

MOST_PROCESSES = 65535


class Role(StrEnum):
    """What a process is there for."""

    SERVER = "server"
    WORKER = "worker"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class Process:
    """One start of one process. A second start of the same is another Process."""

    role: Role
    number: int
    start: int
    """Counts the starts of this role and number, from 1; of a trainer it is the launch."""

    def __str__(self) -> str:
        return f"{self.role} {self.number}"


@dataclass(frozen=True, slots=True)
class Ready:
    """An event: a server or worker listens."""

    process: Process
    address: str


@dataclass(frozen=True, slots=True)
class Ended:
    """An event: a process is gone."""

    process: Process
    status: int
    """As subprocess has it: below 0 the signal that ended it. One that did not end when it was told to, and was killed
    then, counts as ended by SIGTERM."""


@dataclass(frozen=True, slots=True)
class NoPlace:
    """An event: no machine has room for a process, which did not begin."""

    process: Process
    why: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """An event: there should be as many servers."""

    servers: int
    why: str


@dataclass(frozen=True, slots=True)
class Moved:
    """An event: the order `Move` was carried out, or failed and may be tried again."""

    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """An event: somebody wants the run to end. The second time processes are killed."""

    why: str


@dataclass(frozen=True, slots=True)
class Start:
    """An order: start this process."""

    process: Process
    address: str | None = None
    """Where it was, and listens again if what it had is still there. None: a new one, which finds nothing."""


How = Literal["interrupt", "terminate", "kill"]


@dataclass(frozen=True, slots=True)
class End:
    """An order: end this process; one that does not within its time is killed."""

    process: Process
    how: How
    for_good: bool = False
    """It is not started again while the run goes on: its place and its rows are given back."""


@dataclass(frozen=True, slots=True)
class Move:
    """An order: move the buckets of these servers to those; a `Moved` follows."""

    now: tuple[str, ...]
    wanted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Say:
    """An order: tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """An order, the last one: nothing runs any more."""

    status: int


Event = Ready | Ended | NoPlace | Wanted | Moved | Stop
Order = Start | End | Move | Say | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the user asked for."""

    servers: int
    workers: int
    trainers: int
    restarts: int = 3
    """How often in a row a process is started again that lived for less than `settled_seconds`."""
    settled_seconds: float = 300.0
    max_servers: int | None = None
    """To which the run's figures, or the user, may raise their number; None: to any."""
    early_seconds: float = 60.0
    """A launch that ends by itself within them is not tried again: it is the script, most likely."""

    def __post_init__(self) -> None:
        for name, low in (("servers", 1), ("workers", 0), ("trainers", 1), ("restarts", 0)):
            check_integer("run", name, getattr(self, name), low, MOST_PROCESSES)
        if self.max_servers is not None:
            check_integer("run", "max_servers", self.max_servers, self.servers, MOST_PROCESSES)


class _Phase(Enum):
    STARTING = "servers and workers are starting"
    TRAINING = "the trainers run"
    REGROUPING = "a launch failed; it is being ended"
    EMPTYING = "servers are being ended, to begin empty"
    ENDING = "the run is ending"


@dataclass(slots=True)
class _Alive:
    process: Process
    since: float
    address: str | None = None
    """Where it was before."""
    ready: bool = False


@dataclass(slots=True)
class _Trouble:
    """How a launch failed."""

    lines: list[str] = field(default_factory=list)
    status: int = 1
    own: bool = True
    """Each that failed ended by itself: no signal, no machine."""
    done: list[str] = field(default_factory=list)
    """Those that had ended well before: the others may have missed them."""


class Supervisor:
    """See the file's docstring."""

    def __init__(self, plan: Plan, membership: RunState) -> None:
        """membership: of the run before this one in the same folder, or a new one."""
        self.membership = membership
        """What is decided, to be on disk before the orders that came with it are carried out."""
        self._plan = plan
        self._phase = _Phase.STARTING
        self._alive: dict[tuple[Role, int], _Alive] = {}
        self._addresses: dict[tuple[Role, int], str] = {}
        self._members = list(range(plan.servers))  # servers by their numbers, in the order that trainers know
        self._future: list[int] | None = None  # what they are to be, while that is being done
        self._moving = False  # that was ordered
        self._used = False  # servers have been given rows since they began empty
        self._lost = False  # and one has come back without
        self._failures = 0  # of moves, in a row
        self._starts: Counter[tuple[Role, int]] = Counter()
        self._short: Counter[tuple[Role, int]] = Counter()  # short lives in a row
        self._trouble = _Trouble()
        self._status = 0
        self._stopped = False

    def begin(self, now: float) -> list[Order]:
        """The first orders."""
        return [self._start(Role.SERVER, number, now) for number in range(self._plan.servers)]

    def handle(self, event: Event, now: float) -> list[Order]:
        """What an event makes necessary."""
        if isinstance(event, Stop):
            return self._stop(event.why)
        if isinstance(event, Wanted):
            return self._resize(event, now)
        if isinstance(event, Moved):
            return self._moved(event.failure)
        alive = self._alive.get((event.process.role, event.process.number))
        if alive is None or alive.process != event.process:
            return []  # of an earlier start
        if isinstance(event, Ready):
            return self._ready(alive, event.address, now)
        del self._alive[event.process.role, event.process.number]
        if self._phase is _Phase.ENDING:
            return self._wind_down()
        if self._phase is _Phase.EMPTYING and event.process.role is Role.SERVER:
            return self._begin_empty(now)
        if isinstance(event, NoPlace):
            return self._no_place(event, now)
        if event.process.role is Role.TRAINER:
            return self._trainer_ended(alive, event.status, now)
        if event.process.role is Role.SERVER and event.process.number not in (*self._members, *(self._future or ())):
            return []  # it owned nothing any more
        return self._restart(alive, event.status, now)

    # -- servers and workers ------------------------------------------------------------------------------------------

    def _ready(self, alive: _Alive, address: str, now: float) -> list[Order]:
        alive.ready = True
        process, elsewhere = alive.process, alive.address not in (None, address)
        self._addresses[process.role, process.number] = address
        self._know_members()
        orders: list[Order] = [Say(f"{process} listens at {address}")]
        if elsewhere and (process.role is Role.WORKER or process.number in self._members or self._moving):
            self._lost |= process.role is Role.SERVER and self._used
            orders += self._part(f"{process} is no longer where it was", now)
        elif self._phase is _Phase.STARTING:
            orders += self._go_on(now)
        if self._phase is not _Phase.ENDING and self._future is not None and not self._moving:
            orders += self._move()
        return orders

    def _part(self, why: str, now: float) -> list[Order]:
        """Trainers cannot go on with the servers and workers that they know."""
        if self._phase is _Phase.STARTING:
            return self._go_on(now)
        if self._phase is not _Phase.TRAINING:
            return []
        self._trouble = _Trouble([why], own=False)
        return self._regroup()

    def _know_members(self) -> None:
        """What the trainers of the next launch are to know."""
        known = {
            role: tuple(self._addresses.get((role, number), "") for number in numbers)
            for role, numbers in ((Role.SERVER, self._members), (Role.WORKER, range(self._plan.workers)))
        }
        self.membership = replace(self.membership, servers=known[Role.SERVER], workers=known[Role.WORKER])

    def _go_on(self, now: float) -> list[Order]:
        """What servers and workers that are ready make possible."""
        if self._lost:
            return self._empty()
        if not self._all_ready(Role.SERVER, self._members):
            return []
        started = {number for role, number in self._alive if role is Role.WORKER}
        orders = [self._start(Role.WORKER, each, now) for each in range(self._plan.workers) if each not in started]
        return list(orders) or (self._launch(now) if self._all_ready(Role.WORKER, range(self._plan.workers)) else [])

    def _empty(self) -> list[Order]:
        """Ends all servers. As many as were wanted begin then: there is nothing to be moved."""
        self._phase, self._failures = _Phase.EMPTYING, 0
        self._members, self._future = self._future or self._members, None
        orders = [
            End(alive.process, "kill", for_good=alive.process.number not in self._members)
            for alive in self._of(Role.SERVER)
        ]
        return [Say("rows of a server are lost: all servers begin empty"), *orders]

    def _begin_empty(self, now: float) -> list[Order]:
        """Once all are gone."""
        if any(self._of(Role.SERVER)):
            return []
        self._phase, self._used, self._lost = _Phase.STARTING, False, False
        return [self._start(Role.SERVER, number, now) for number in self._members]

    def _all_ready(self, role: Role, numbers: Iterable[int]) -> bool:
        return all((role, each) in self._alive and self._alive[role, each].ready for each in numbers)

    def _restart(self, alive: _Alive, status: int, now: float) -> list[Order]:
        role, number = alive.process.role, alive.process.number
        told = f"{alive.process} {_ending(status)}"
        if self._gave_up(role, number, alive.since, now):
            return self._fail(f"{told}, {self._short[role, number]} times soon after it began: giving up", 1)
        address = self._addresses.get((role, number))
        return [Say(f"{told}: it is started again"), self._start(role, number, now, address)]

    def _gave_up(self, role: Role, number: int, since: float, now: float) -> bool:
        """Counts a life that ended."""
        key = role, number
        self._short[key] = self._short[key] + 1 if now - since < self._plan.settled_seconds else 0
        return self._short[key] > self._plan.restarts

    def _start(self, role: Role, number: int, now: float, address: str | None = None) -> Start:
        self._starts[role, number] += 1
        process = Process(role, number, self._starts[role, number])
        self._alive[role, number] = _Alive(process, now, address)
        return Start(process, address)

    # -- more servers, or fewer ---------------------------------------------------------------------------------------

    def _resize(self, wanted: Wanted, now: float) -> list[Order]:
        have = len(self._members)
        if self._phase is not _Phase.TRAINING or self._future is not None or self._moving:
            return [Say(f"{_count(wanted.servers, 'server')} wanted: refused, {self._busy()}; ask again after that")]
        if wanted.servers > (most := self._plan.max_servers or MOST_PROCESSES):
            return [Say(f"{_count(wanted.servers, 'server')} wanted: refused, there may be {most} at most")]
        if not 1 <= wanted.servers <= MOST_PROCESSES or wanted.servers == have:
            return [Say(f"{_count(wanted.servers, 'server')} wanted, and there are {have}: nothing is done")]
        number = max(each for role, each in self._starts if role is Role.SERVER) + 1
        new = list(range(number, number + wanted.servers - have))
        self._future = [*self._members, *new][: wanted.servers]
        said = Say(f"{_count(wanted.servers, 'server')} instead of {have}: {wanted.why}")
        return [said, *(self._start(Role.SERVER, each, now) for each in new), *([] if new else self._move())]

    def _busy(self) -> str:
        return "buckets are being moved" if self._future is not None or self._moving else self._phase.value

    def _move(self) -> list[Order]:
        """Once all that take part are there."""
        assert self._future is not None
        if self._lost or not all((Role.SERVER, each) in self._addresses for each in self._future):
            return []
        now, wanted = (
            tuple(self._addresses[Role.SERVER, each] for each in numbers) for numbers in (self._members, self._future)
        )
        self._moving = True
        return [Move(now, wanted)]

    def _moved(self, failure: str | None) -> list[Order]:
        self._moving = False
        if self._phase is _Phase.ENDING or self._future is None or (failure is not None and self._lost):
            return []
        if failure is not None:
            self._failures += 1
            if self._failures > self._plan.restarts:
                return self._fail(f"buckets could not be moved ({failure}): giving up", 1)
            return [Say(f"buckets could not be moved ({failure}): it is tried again"), *self._move()]
        gone = [each for each in self._members if each not in self._future]
        self._members, self._future, self._failures = self._future, None, 0
        self._know_members()
        ended = [self._alive[Role.SERVER, each].process for each in gone if (Role.SERVER, each) in self._alive]
        return [
            Say(f"buckets are moved: {_count(len(self._members), 'server')}"),
            *(End(process, "terminate", for_good=True) for process in ended),
        ]

    def _no_place(self, event: NoPlace, now: float) -> list[Order]:
        """A server that was to come does not: training goes on without."""
        if event.process.role is not Role.SERVER or event.process.number in self._members:
            return self._fail(event.why, 1)
        self._future = None
        left = [alive.process for alive in self._of(Role.SERVER) if alive.process.number not in self._members]
        stay = Say(f"{event.why}; it goes on with {_count(len(self._members), 'server')}")
        orders: list[Order] = [stay, *(End(process, "terminate", for_good=True) for process in left)]
        if self._moving:  # it was there, and has taken rows with it
            self._lost = True
            orders += self._part(f"{event.process} is gone", now)
        return orders

    # -- trainers -----------------------------------------------------------------------------------------------------

    def _launch(self, now: float) -> list[Order]:
        self._phase, self._trouble, self._used = _Phase.TRAINING, _Trouble(), True
        self.membership = self.membership.next_launch()
        launch, orders = self.membership.launch, list[Order]()
        for number in range(self._plan.trainers):
            process = Process(Role.TRAINER, number, launch)
            self._alive[Role.TRAINER, number] = _Alive(process, now)
            orders.append(Start(process))
        return [Say(f"launch {launch}: {_count(self._plan.trainers, 'trainer')}"), *orders]

    def _trainer_ended(self, alive: _Alive, status: int, now: float) -> list[Order]:
        left = [each.process for each in self._of(Role.TRAINER)]
        orders: list[Order] = []
        if self._phase is _Phase.TRAINING:
            if status == 0:
                self._trouble.done.append(f"after {alive.process} had ended with status 0")
                return [] if left else self._end(0)
            self._note(alive, status)
            orders = self._regroup()
        elif status not in (0, -signal.SIGTERM):
            self._note(alive, status)  # by itself, just before it was told to
        return orders if left else [*orders, *self._relaunch(alive.since, now)]

    def _regroup(self) -> list[Order]:
        self._phase = _Phase.REGROUPING
        return [End(alive.process, "terminate") for alive in self._of(Role.TRAINER)]

    def _note(self, alive: _Alive, status: int) -> None:
        if not self._trouble.lines or status < 0:
            self._trouble.status = status if status > 0 else 128 - status
        self._trouble.own &= status > 0
        self._trouble.lines.append(f"{alive.process} {_ending(status)}")

    def _relaunch(self, since: float, now: float) -> list[Order]:
        told = ", ".join([*self._trouble.lines, *self._trouble.done])
        if self._trouble.own and now - since < self._plan.early_seconds:
            return self._fail(f"{told}, soon after it began: see above; the run ends", self._trouble.status)
        if self._gave_up(Role.TRAINER, 0, since, now):
            times = self._short[Role.TRAINER, 0]
            return self._fail(f"{told}, {times} times soon after it began: giving up", self._trouble.status)
        self._phase = _Phase.STARTING
        return [Say(f"{told}: the trainers start again from the last checkpoint"), *self._go_on(now)]

    # -- the end ------------------------------------------------------------------------------------------------------

    def _stop(self, why: str) -> list[Order]:
        if self._stopped:
            return [End(alive.process, "kill") for alive in self._alive.values()]
        self._stopped = True
        return self._fail(f"{why}: the run ends; the same command goes on from what the script saved", 130)

    def _fail(self, why: str, status: int) -> list[Order]:
        return [Say(why), *self._end(status)]

    def _end(self, status: int) -> list[Order]:
        self._phase, self._status = _Phase.ENDING, status
        trainers = [End(alive.process, "interrupt") for alive in self._of(Role.TRAINER)]
        return list(trainers) or self._wind_down()

    def _wind_down(self) -> list[Order]:
        """Those that are called by others end after them."""
        if not self._alive:
            return [Finish(self._status)]
        if any(self._of(Role.TRAINER)):
            return []
        return [End(alive.process, "terminate") for alive in self._alive.values()]

    def _of(self, role: Role) -> Iterable[_Alive]:
        return [alive for (each, _), alive in self._alive.items() if each is role]


def _ending(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
