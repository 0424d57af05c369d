"""A simulation of training over a network, step by step and message by message: 1 to 64 trainers, 1 to 300 servers.

Its coefficients are those measured with one trainer and one server on emulated links (`network.py`); all other measured
points validate it. Events are handled in order of time. A link, a server and a device each do one thing at a time:

    lookup    trainer's link, server's link, server, the same links back; a step waits for all of its servers
    device    one step after the other, once its rows are there
    reduce    sync and hybrid: all trainers wait for each other; each sends 2 (W - 1) / W of the dense gradients, in
              2 log2(W) phases, as a tree does (gloo's ring has as many for two and three trainers)
    update    as a lookup; the reply counts as small

The lookup of step t starts when the update of step t - staleness - 1 has been applied; in the synchronous mode that of
all trainers. More than `MAX_GROUPS` servers are simulated as so many equal groups: their work is equal by hashing.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil, log2
from statistics import fmean
from typing import Any

from benchmarks.paper.cell import CannotRunError, Cell, Done, Figures
from benchmarks.paper.network import BATCH, DEVICE_SECONDS, LINK, MODES, POINTS

STEPS, WARM_UP = 12, 5
MAX_GROUPS = 12
TRAINERS = (1, 2, 4, 8, 16, 32, 64)
SERVERS = (1, 3, 10, 30, 100, 300)
SERVERS_PER_TRAINER = 300 / 64
SMALL = 200.0
"""Bytes of a message without rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """What a step costs."""

    device: float
    """Seconds of the forward and backward pass."""
    host: float
    """Seconds of the trainer's own work in a step that nothing hides."""
    server: float
    """CPU seconds of all servers together for a lookup of one trainer, and for an update."""
    latency: float
    """Seconds that a call takes besides, in which nothing is busy: threads that wake, and each other's CPU time."""
    ids: float
    """Bytes of a lookup's request; in all modes."""
    rows: float
    """Bytes of its reply."""
    gradients: float
    """Bytes of an update."""
    dense: float
    """Bytes of the dense gradients."""
    rate: float
    """Bytes a second of a link, each way."""
    delay: float
    """Seconds from one machine to another."""
    phase: float
    """Seconds of each of the 2 log2(W) phases of an all-reduce, without its bytes: two threads that wake, a delay and
    its share of the trainers' agreement about the step."""


class Simulation:
    """One job; `run` returns the seconds of a step."""

    def __init__(self, costs: Coefficients, trainers: int, servers: int, mode: str) -> None:
        self.costs, self.trainers = costs, trainers
        self.servers = min(servers, MAX_GROUPS)
        self._width = servers / self.servers  # servers of a group
        self.is_sync, self.is_async = mode == "sync", mode.startswith("async")
        self.staleness = 0 if self.is_sync else int(mode.split()[1])
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._free: dict[tuple[str, int], float] = defaultdict(float)
        self._left: dict[tuple[str, int, int], int] = {}  # replies that a step of a trainer waits for
        self._ready: set[tuple[int, int]] = set()
        self._computing = [0] * trainers  # the step that each trainer computes next
        self._idle = [True] * trainers
        self._reduced: dict[int, int] = defaultdict(int)
        self._applied = [0] * trainers  # steps applied without a gap
        self._settled: list[set[int]] = [set() for _ in range(trainers)]
        self._asked = [0] * trainers
        self.ends: dict[int, float] = {}

    def run(self) -> float:
        """Simulate, and return the mean seconds of a step after the warm-up."""
        for trainer in range(self.trainers):
            self._ask(trainer, 0.0)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return (self.ends[WARM_UP + STEPS] - self.ends[WARM_UP]) / STEPS

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _use(self, what: str, number: int, now: float, seconds: float) -> float:
        """Return when this use ends; uses queue."""
        end = max(now, self._free[what, number]) + seconds
        self._free[what, number] = end
        return end

    def _call(self, kind: str, trainer: int, step: int, sent: float, received: float, now: float) -> None:
        """Send a message to each server, and continue with `_replied` after each reply."""
        self._left[kind, trainer, step] = self.servers
        costs, share, width = self.costs, 1 / self.servers, self._width
        out, back = (max(size * share, SMALL * width) / costs.rate for size in (sent, received))

        def arrive(server: int, now: float) -> None:
            self._at(self._use("server in", server, now, out / width), partial(serve, server))

        def serve(server: int, now: float) -> None:
            end = self._use("server", server, now, costs.server * share / width)
            self._at(end + costs.latency, partial(answer, server))

        def answer(server: int, now: float) -> None:
            self._at(self._use("server out", server, now, back / width) + costs.delay - back / width, receive)

        def receive(now: float) -> None:
            self._at(self._use("trainer in", trainer, now, back), lambda end: self._replied(kind, trainer, step, end))

        for server in range(self.servers):  # a packet passes while the rest is sent: links overlap
            end = self._use("trainer out", trainer, now, out)
            self._at(end + costs.delay - out / width, partial(arrive, server))

    def _ask(self, trainer: int, now: float) -> None:
        """Start the lookups that the staleness permits."""
        applied = min(self._applied) if self.is_sync else self._applied[trainer]
        last = WARM_UP + STEPS + self.staleness + 1
        while self._asked[trainer] <= min(applied + self.staleness, last):
            step = self._asked[trainer]
            self._asked[trainer] += 1
            self._call("lookup", trainer, step, self.costs.ids, self.costs.rows, now)

    def _replied(self, kind: str, trainer: int, step: int, now: float) -> None:
        self._left[kind, trainer, step] -= 1
        if self._left[kind, trainer, step]:
            return
        if kind == "lookup":
            self._ready.add((trainer, step))
            self._compute(trainer, now)
            return
        settled = self._settled[trainer]
        settled.add(step)
        while self._applied[trainer] in settled:
            self._applied[trainer] += 1
        for each in range(self.trainers) if self.is_sync else (trainer,):
            self._ask(each, now)

    def _compute(self, trainer: int, now: float) -> None:
        step = self._computing[trainer]
        if self._idle[trainer] and (trainer, step) in self._ready:
            self._idle[trainer] = False
            self._at(now + self.costs.host + self.costs.device, partial(self._computed, trainer, step))

    def _computed(self, trainer: int, step: int, now: float) -> None:
        if self.is_async:
            self._finish(trainer, step, now)
            return
        self._reduced[step] += 1
        if self._reduced[step] == self.trainers:
            share, num_phases = 2 * (self.trainers - 1) / self.trainers, 2 * ceil(log2(self.trainers))
            end = now + share * self.costs.dense / self.costs.rate + num_phases * self.costs.phase
            for each in range(self.trainers):
                self._at(end, partial(self._finish, each, step))

    def _finish(self, trainer: int, step: int, now: float) -> None:
        self.ends[step] = now
        self._call("update", trainer, step, self.costs.gradients, SMALL, now)
        self._computing[trainer] = step + 1
        self._idle[trainer] = True
        self._compute(trainer, now)


def calibrate(done: Done) -> dict[str, Coefficients]:
    """Return the coefficients of each mode, from the measured points with one server and one or two trainers.

    Bytes are counted, and the servers' CPU time is measured. What the hybrid step takes beyond the device is the
    host's, since it hides the rest; what the synchronous step takes beyond all of this is the latency of its two calls.
    What two trainers' hybrid step takes beyond one's is the all-reduce.
    """
    points = {mode: done.get(f"network/point/1x1/{mode}") for mode in MODES}
    pair = done.get("network/point/2x1/hybrid 4")
    if pair is None or None in points.values():
        raise CannotRunError("the measured points are missing: run the experiment `network` first")
    dense = pair["crossed"]["between_trainers"] / 2  # a ring of two: each sends all of the gradients, in two halves
    by_mode = {}
    for mode, point in points.items():
        assert point is not None
        ids = 0.12 * point["crossed"]["to_servers"]
        costs = Coefficients(
            device=DEVICE_SECONDS, host=0.0, server=point["server_ms"] / 2e3, latency=0.0, ids=ids,
            rows=point["crossed"]["from_servers"], gradients=point["crossed"]["to_servers"] - ids, dense=dense,
            rate=LINK.bytes_per_second, delay=LINK.delay_ms / 1e3, phase=0.0,
        )  # fmt: skip
        by_mode[mode] = costs
    hosts = {mode: max(0.0, _excess(by_mode[mode], points[mode], mode)) for mode in MODES[1:]}
    hosts["sync"] = hosts["hybrid 4"]
    by_mode = {mode: replace(costs, host=hosts[mode]) for mode, costs in by_mode.items()}
    latency = max(0.0, _excess(by_mode["sync"], points["sync"], "sync")) / 2
    by_mode = {mode: replace(costs, latency=latency) for mode, costs in by_mode.items()}
    phase = max(0.0, float(pair["step_ms"]) / 1e3 - Simulation(by_mode["hybrid 4"], 2, 1, "hybrid 4").run()) / 2
    return {mode: replace(costs, phase=phase) for mode, costs in by_mode.items()}


def _excess(costs: Coefficients, point: Any, mode: str) -> float:
    return float(point["step_ms"]) / 1e3 - Simulation(costs, 1, 1, mode).run()


def cells() -> list[Cell]:
    """Return the validation and the curves."""
    found = [Cell("simulation/validation", 2, "simulated", validate)]
    found += [Cell(f"simulation/trainers/{mode}", 15, "simulated", partial(over_trainers, mode)) for mode in MODES]
    return found + [Cell(f"simulation/servers/{mode}", 25, "simulated", partial(over_servers, mode)) for mode in MODES]


def validate(done: Done) -> Figures:
    """Compare the simulation with every measured point."""
    costs, rows = calibrate(done), []
    for (trainers, servers), mode in itertools.product(POINTS, MODES):
        point = done.get(f"network/point/{trainers}x{servers}/{mode}")
        if point:
            simulated = 1e3 * Simulation(costs[mode], trainers, servers, mode).run()
            rows.append([trainers, servers, mode, point["step_ms"], simulated, simulated / point["step_ms"] - 1])
    calibrating = [[1, 1, mode] for mode in MODES] + [[2, 1, "hybrid 4"]]
    errors = [abs(row[5]) for row in rows if row[:3] not in calibrating]
    found = {mode: asdict(each) for mode, each in costs.items()}
    return {"points": rows, "mean_error": fmean(errors), "worst_error": max(errors), "coefficients": found}


def over_trainers(mode: str, done: Done) -> Figures:
    """Simulate more and more trainers, with servers in proportion."""
    costs = calibrate(done)[mode]
    rates = []
    for trainers in TRAINERS:
        servers = max(1, round(trainers * SERVERS_PER_TRAINER))
        rates.append([trainers, servers, trainers * BATCH / Simulation(costs, trainers, servers, mode).run()])
    return {"points": rates}


def over_servers(mode: str, done: Done) -> Figures:
    """Simulate 64 trainers over more and more servers."""
    costs = calibrate(done)[mode]
    return {"points": [[n, 64 * BATCH / Simulation(costs, 64, n, mode).run()] for n in SERVERS]}
