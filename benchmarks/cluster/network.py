"""The kind `network`: whole steps of two trainers and a server on three emulated machines, over several networks and
with several stalenesses, beside a predicted bound.

All traffic crosses the emulated cables as it would for a user: rows with keys, so encrypted, and the all-reduces of
dense gradients. A round measures every mode over every network with the same processes, and before and after that steps
over the same machines without a limit. `probe.py` measures what each network really carries.

The prediction. Machine 0 is the server, the others are trainers. Of a step of all trainers:

    sent, received, reduced bytes on the wire: trainers to the server, the server to trainers, one trainer to another
    link                    the most that crosses one cable one way / rate
    serial                  compute(0) + (sent + received + reduced) / rate + SERIAL_TRIPS x round trip
    step(0)                 serial
    step(k)                 max(compute(k) + reduced / rate + OPEN_TRIPS x round trip, link, serial / (k + 1))
    step(async)             max(compute(async), link)

compute is a step of the same job over a network without a limit: the work of trainers and server, which share the
cores. At staleness 0 each message waits for the one before. With staleness lookups and updates overlap the dense
network, but the trainers still wait for their all-reduces; and at most k + 1 steps are in flight, each of which takes
as long as at 0. The bound ignores queues, slow start and pauses between messages.
"""

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.link import Shape
from benchmarks.cluster.machines import Machines, emulated
from benchmarks.cluster.processes import receive, satrap_server, send, talking
from benchmarks.harness.case import Case
from benchmarks.harness.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.harness.machine import versions
from benchmarks.harness.record import Rounds, each
from benchmarks.workload import samples_file
from satrap.rpc.keys import create_keys

SHAPES = tuple(Shape(gbit=gbit, delay_ms=delay) for gbit, delay in ((10, 0.2), (10, 1), (1, 0.2)))
SYNCHRONOUS, HYBRID, ASYNC = "0", "4", "async"
"""Modes that are measured without a network; another staleness is predicted from HYBRID."""
MODES = (SYNCHRONOUS, "1", HYBRID, "16", ASYNC)
SERVER, TRAINERS = 0, (1, 2)
SERIAL_TRIPS = 4
"""Round trips of a synchronous step: lookup, update, DDP's all-reduce, and whether every trainer has a batch."""
OPEN_TRIPS = 2
"""Round trips that staleness does not hide: the latter two."""
FILE_BATCHES = 8  # of 4,096 samples
PORT = 29500  # of gloo's rendezvous; the machine has no other process
BATCH = 1024
"""Samples of a trainer's step. On the one core of a trainer they take about as long as 4,096 on four."""
Matrix = Sequence[Sequence[float]]
"""Bytes on the wire, [source][target]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Some steps of the trainers with one staleness, which they get as a line of JSON."""

    mode: str
    """The staleness, or "async"."""
    num_warmup: int
    num_steps: int

    @property
    def staleness(self) -> int:
        return int(HYBRID if self.mode == ASYNC else self.mode)

    @property
    def num_untimed(self) -> int:
        """Steps until as many are in flight as the staleness allows."""
        return self.num_warmup + self.staleness


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """A step over a network without a limit."""

    seconds: float
    crossed: Matrix


def link_bytes(crossed: Matrix) -> float:
    """Return the most bytes that cross one cable one way."""
    return max(map(sum, [*crossed, *zip(*crossed, strict=True)]))


def step_seconds(shape: Shape, alone: Mapping[str, Alone], mode: str) -> float:
    """Return the predicted seconds of a step over a network."""
    rate, trip = shape.bytes_per_second, 2 * shape.delay_ms / 1e3
    if mode == ASYNC:
        return max(alone[ASYNC].seconds, link_bytes(alone[ASYNC].crossed) / rate)
    crossed = alone[SYNCHRONOUS].crossed
    sent, received = sum(crossed[trainer][0] for trainer in TRAINERS), sum(crossed[0])
    reduced = max(crossed[one][other] for one in TRAINERS for other in TRAINERS)
    serial = alone[SYNCHRONOUS].seconds + (sent + received + reduced) / rate + SERIAL_TRIPS * trip
    if mode == SYNCHRONOUS:
        return serial
    open_seconds = alone[HYBRID].seconds + reduced / rate + OPEN_TRIPS * trip
    return max(open_seconds, link_bytes(crossed) / rate, serial / (int(mode) + 1))


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure every mode over every network."""
    with ExitStack() as stack:
        rig = Rig(stack, job)
        for mode in (SYNCHRONOUS, ASYNC):
            rig.turn(mode, Shape(), num_warmup=rig.num_batches)  # creates the rows
        before = read_cpu(rig.pids)
        unshaped = {mode: [rig.turn(mode, Shape())] for mode in (SYNCHRONOUS, HYBRID, ASYNC)}
        probes = {Shape().name: rig.probe(Shape())}
        measured: dict[tuple[Shape, str], float] = {}
        for shape in SHAPES:
            probes[shape.name] = rig.probe(shape)
            measured |= {(shape, mode): rig.turn(mode, shape)["seconds"] for mode in MODES}
        for mode, turns in unshaped.items():
            turns.append(rig.turn(mode, Shape()))
        noise = noise_between(before, read_cpu(rig.pids))
        peak = peak_resident_bytes(rig.pids)
    alone = {
        mode: Alone(seconds=statistics.fmean(turn["seconds"] for turn in turns), crossed=turns[0]["crossed"])
        for mode, turns in unshaped.items()
    }
    streams = {
        f"network:{shape.name}/{mode}": {
            "ms": round(1e3 * seconds, 3),
            "predicted_ms": round(1e3 * step_seconds(shape, alone, mode), 3),
            **noise,
        }
        for (shape, mode), seconds in measured.items()
    }
    return {
        "streams": streams,
        "alone": {mode: asdict(step) for mode, step in alone.items()},
        "lost_packets": rig.lost,
        "probes": probes,
        "peak_resident_bytes": peak,
        "versions": versions("satrap", "torch", "numpy", "pyzmq"),
    }


class Rig:
    """The machines and their processes."""

    def __init__(self, stack: ExitStack, job: Mapping[str, Any]) -> None:
        self.machines = machines = stack.enter_context(emulated(1 + len(TRAINERS)))
        self._job, self.lost = job, 0
        server_key, client_key = map(str, create_keys(Path(job["folder"], "keys")))
        host = machines.addresses[SERVER]
        listen, keys = f"tcp://{host}:0", ["--keys", server_key]
        servers = {
            name: stack.enter_context(
                satrap_server(job["num_threads"], listen, keys, lambda command: machines.command(SERVER, command))
            )
            for name in ("sync", ASYNC)
        }
        replier = stack.enter_context(process(machines, SERVER, "probe", "serve", host=host, keys=server_key))
        target = {"host": host, "address": receive(replier), "port": receive(replier), "keys": client_key}
        self._probe = stack.enter_context(process(machines, TRAINERS[0], "probe", "ask", **target))
        common = {"rows": job["rows"], "dim": job["dim"], "keys": client_key, "world_size": len(TRAINERS)}
        common["file"] = str(samples_file(Path(job["batches"]), job["rows"], FILE_BATCHES, job["part"]))
        common["rendezvous"] = f"tcp://{machines.addresses[TRAINERS[0]]}:{PORT}"
        common["servers"] = {name: address for name, (address, _) in servers.items()}
        self._trainers = [
            stack.enter_context(process(machines, machine, "trainer", rank=rank, **common))
            for rank, machine in enumerate(TRAINERS)
        ]
        self.num_batches = min(receive(trainer) for trainer in self._trainers)
        started = [*self._trainers, self._probe, replier]
        self.pids = [machines.switch_pid, *(pid for _, pid in servers.values()), *(child.pid for child in started)]

    def turn(self, mode: str, shape: Shape, num_warmup: int | None = None) -> dict[str, Any]:
        """Run some steps of all trainers; return the bytes of one, and its seconds on the slower trainer."""
        num_warmup = self._job["num_warmup"] if num_warmup is None else num_warmup
        turn = Turn(mode=mode, num_warmup=num_warmup, num_steps=self._job["num_steps"])
        self.machines.reshape(shape)
        for trainer in self._trainers:
            send(trainer, asdict(turn))
        replies = [receive(trainer) for trainer in self._trainers]
        counted = self.machines.reshape(Shape())
        self.lost += counted["lost"]
        num_steps, lookups = turn.num_untimed + turn.num_steps, each(replies, "lookups")
        crossed = per_step(counted["bytes"], num_steps, lookups)
        return {"seconds": max(each(replies, "seconds")), "crossed": crossed}

    def probe(self, shape: Shape) -> dict[str, float]:
        """Return what such a network carries."""
        self.machines.reshape(shape)
        send(self._probe, None)
        figures: dict[str, float] = receive(self._probe)
        self.machines.reshape(Shape())
        return figures


def per_step(total: Sequence[Sequence[int]], num_steps: int, lookups: Sequence[int]) -> Matrix:
    """Return the bytes of a step, [source][target]. lookups: those of each trainer, whose rows are what the server
    sends; a turn starts more lookups than it finishes steps."""
    crossed = [[size / num_steps for size in row] for row in total]
    for trainer, count in zip(TRAINERS, lookups, strict=True):
        crossed[SERVER][trainer] = total[SERVER][trainer] / count
    return crossed


def process(machines: Machines, machine: int, module: str, *arguments: str, **job: Any) -> Any:
    """Start a process of this benchmark on a machine; it reads lines."""
    command = [sys.executable, "-m", f"benchmarks.cluster.{module}", *arguments, json.dumps(job)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": machines.devices[machine]}
    return talking(machines.command(machine, command), env=environment)


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return the record, network by network."""
    networks = {shape.name: asdict(shape) | figures_of(shape, rounds) for shape in SHAPES}
    done = [result for result in rounds.results["worker"] if result is not None]
    return {
        "batch": BATCH,
        "num_trainers": len(TRAINERS),
        "networks": networks,
        "figures": {
            f"{figure}/{name}": network[figure][HYBRID]
            for name, network in networks.items()
            for figure in ("of_predicted", "ratio", "of_async")
        },
        **{name: each(done, name) for name in ("alone", "probes", "lost_packets")},
    }


def figures_of(shape: Shape, rounds: Rounds) -> dict[str, Any]:
    """Return figures of one network by mode: milliseconds of a step, the same as predicted, the rate over that of
    staleness 0, and its shares of the predicted and of the fully asynchronous one."""
    ms, predicted = (
        {mode: rounds.values(name)[f"{shape.name}/{mode}"] for mode in MODES} for name in ("ms", "predicted_ms")
    )
    figures = {
        "step_ms": ms,
        "predicted_ms": predicted,
        "ratio": {mode: over(ms[SYNCHRONOUS], ms[mode]) for mode in MODES},
        "of_predicted": {mode: over(predicted[mode], ms[mode]) for mode in MODES},
        "of_async": {mode: over(ms[ASYNC], ms[mode]) for mode in MODES},
    }
    return {name: {mode: rounds.spread(values) for mode, values in by.items()} for name, by in figures.items()}


def over(numerators: Sequence[float | None], denominators: Sequence[float | None]) -> list[float | None]:
    """Return quotients, round by round."""
    pairs = zip(numerators, denominators, strict=True)
    return [None if above is None or below is None else round(above / below, 3) for above, below in pairs]
