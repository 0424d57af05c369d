"""The kind `network`: whole steps of two trainers and a server on three emulated machines, over several networks and
with several stalenesses, beside what a bound on them says (`prediction.py`).

Everything goes over the emulated cables as it would for a user: rows with keys, so encrypted, and the all-reduces of
dense gradients. A round measures every mode over every network with the same processes, and before and after that steps
over the same machines with nothing slowed down. `probe.py` says what each network really carries.
"""

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.cluster.cases import ClusterCase
from benchmarks.cluster.link import Shape
from benchmarks.cluster.machines import Machines, emulated
from benchmarks.cluster.prediction import ASYNC, HYBRID, SYNCHRONOUS, Alone, step_seconds
from benchmarks.cluster.processes import talking, tell, told
from benchmarks.cluster.turn import BATCH, Turn
from benchmarks.machine import versions
from benchmarks.records import clean_rounds, each, judge, processes, spread, streams_of, worst_noise
from benchmarks.runs import Results, Round
from benchmarks.train.workload import batches_file

SHAPES = tuple(Shape(gbit=gbit, delay_ms=delay) for gbit, delay in ((10, 0.2), (10, 1), (1, 0.2)))
MODES = (SYNCHRONOUS, "1", HYBRID, "16", ASYNC)
ALONE = (SYNCHRONOUS, HYBRID, ASYNC)
SERVER, TRAINERS = 0, (1, 2)
FILE_BATCHES = 8  # of 4,096 samples
PORT = 29500  # of gloo's meeting; the machine has no other process
Crossed = list[list[float]]


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """One round."""
    with ExitStack() as stack:
        rig = Rig(stack, job)
        for mode in (SYNCHRONOUS, ASYNC):
            rig.turn(mode, Shape(), num_warmup=rig.num_batches)  # makes the rows
        before = read_cpu(rig.pids)
        lone = {mode: [rig.turn(mode, Shape())] for mode in ALONE}
        probes = {Shape().name: rig.probe(Shape())}
        took: dict[tuple[Shape, str], float] = {}
        for shape in SHAPES:
            probes[shape.name] = rig.probe(shape)
            took |= {(shape, mode): rig.turn(mode, shape)["seconds"] for mode in MODES}
        for mode, turns in lone.items():
            turns.append(rig.turn(mode, Shape()))
        noise = noise_between(before, read_cpu(rig.pids))
        peak = peak_resident_bytes(rig.pids)
    alone = {
        mode: Alone(seconds=statistics.fmean(each["seconds"] for each in turns), crossed=turns[0]["crossed"])
        for mode, turns in lone.items()
    }
    streams = {
        f"network:{shape.name}/{mode}": {
            "ms": round(1e3 * seconds, 3),
            "predicted_ms": round(1e3 * step_seconds(shape, alone, mode), 3),
            **noise,
        }
        for (shape, mode), seconds in took.items()
    }
    return {
        "streams": streams,
        "alone": {mode: asdict(each) for mode, each in alone.items()},
        "lost_packets": rig.lost,
        "probes": probes,
        "peak_resident_bytes": peak,
        "versions": versions("satrap", "torch", "numpy", "pyzmq"),
    }


class Rig:
    """The machines and what runs on them."""

    def __init__(self, stack: ExitStack, job: Mapping[str, Any]) -> None:
        from benchmarks.cluster.command import satrap_server
        from satrap.rpc.keys import make_keys

        self.machines = machines = stack.enter_context(emulated(1 + len(TRAINERS)))
        self._job, self.lost = job, 0
        server_key, client_key = map(str, make_keys(Path(job["tmpfs"], "keys")))
        host = machines.addresses[SERVER]
        servers = {
            name: stack.enter_context(
                satrap_server(
                    int(job["num_threads"]),
                    f"tcp://{host}:0",
                    ["--keys", server_key],
                    lambda command: machines.command(SERVER, command),
                )
            )
            for name in ("sync", ASYNC)
        }
        answering = stack.enter_context(process(machines, SERVER, "probe", "serve", host=host, keys=server_key))
        asked = {"host": host, "address": told(answering), "port": told(answering), "keys": client_key}
        self._probe = stack.enter_context(process(machines, TRAINERS[0], "probe", "ask", **asked))
        common = {"rows": job["rows"], "dim": job["dim"], "keys": client_key, "world": len(TRAINERS)}
        common["file"] = str(batches_file(Path(job["batches"]), int(job["rows"]), FILE_BATCHES, int(job["part"])))
        common["meeting"] = f"tcp://{machines.addresses[TRAINERS[0]]}:{PORT}"
        common["servers"] = {name: address for name, (address, _) in servers.items()}
        self._trainers = [
            stack.enter_context(process(machines, machine, "trainer", rank=rank, **common))
            for rank, machine in enumerate(TRAINERS)
        ]
        self.num_batches = min(told(each) for each in self._trainers)
        started = [*self._trainers, self._probe, answering]
        self.pids = [machines.switch_pid, *(pid for _, pid in servers.values()), *(each.pid for each in started)]

    def turn(self, mode: str, shape: Shape, num_warmup: int | None = None) -> dict[str, Any]:
        """Some steps of all trainers: what one took, the slower trainer's, and what crossed for it."""
        num_warmup = int(self._job["num_warmup"]) if num_warmup is None else num_warmup
        turn = Turn(mode=mode, num_warmup=num_warmup, num_steps=int(self._job["num_steps"]))
        self.machines.reshape(shape)
        for trainer in self._trainers:
            tell(trainer, asdict(turn))
        found = [told(trainer) for trainer in self._trainers]
        counted = self.machines.reshape(Shape())
        self.lost += counted["lost"]
        num_steps, lookups = turn.num_untimed + turn.num_steps, each(found, "lookups")
        crossed = per_step(counted["bytes"], num_steps, lookups)
        return {"seconds": max(each(found, "seconds")), "crossed": crossed}

    def probe(self, shape: Shape) -> dict[str, float]:
        """What such a network carries."""
        self.machines.reshape(shape)
        tell(self._probe, None)
        found: dict[str, float] = told(self._probe)
        self.machines.reshape(Shape())
        return found


def per_step(total: Sequence[Sequence[int]], num_steps: int, lookups: Sequence[int]) -> Crossed:
    """Bytes of a step, [source][target]. lookups: of each trainer, whose rows are what the server sends: a turn is left
    with more lookups begun than steps done."""
    crossed = [[size / num_steps for size in row] for row in total]
    for trainer, count in zip(TRAINERS, lookups, strict=True):
        crossed[SERVER][trainer] = total[SERVER][trainer] / count
    return crossed


def process(machines: Machines, machine: int, module: str, *arguments: str, **job: Any) -> Any:
    """A process of this benchmark on a machine, that is told lines."""
    command = [sys.executable, "-m", f"benchmarks.cluster.{module}", *arguments, json.dumps(job)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": machines.devices[machine]}
    return talking(machines.command(machine, command), env=environment)


def make_record(case: ClusterCase, results: Results) -> dict[str, Any]:
    """The record of one case, network by network."""
    timed = streams_of("network:", results)
    clean = clean_rounds(timed)
    record: dict[str, Any] = {"case": case.name, "kind": case.kind, "rows": case.rows, "dim": case.dim}
    record |= {"num_threads": case.num_threads, "batch": BATCH, "num_trainers": len(TRAINERS)}
    record["networks"] = {shape.name: asdict(shape) | of_network(shape, timed, clean) for shape in SHAPES}
    record["figures"] = {
        f"{figure}/{name}": network[figure][HYBRID]
        for name, network in record["networks"].items()
        for figure in ("of_predicted", "ratio", "of_async")
    }
    rounds = [each for each in results["worker"] if each is not None]
    for name in ("alone", "probes", "lost_packets"):
        record[name] = each(rounds, name)
    record |= {"targets": judge(case, record), "clean_rounds": clean, "noise": worst_noise(timed)}
    return record | processes(results)


def of_network(shape: Shape, timed: Mapping[str, Sequence[Round]], clean: Sequence[bool]) -> dict[str, Any]:
    """By mode: milliseconds of a step and what was predicted, samples/s of all trainers, how many times those of
    staleness 0 they are and how many times they would be if every step took what was predicted, and their shares of
    the predicted ones and of the fully asynchronous ones."""
    took, expected = (
        {mode: each(timed[f"{shape.name}/{mode}"], figure) for mode in MODES} for figure in ("ms", "predicted_ms")
    )
    figures = {
        "step_ms": took,
        "predicted_ms": expected,
        "samples_per_s": {mode: over([1e3 * BATCH * len(TRAINERS)] * len(clean), took[mode]) for mode in MODES},
        "ratio": {mode: over(took[SYNCHRONOUS], took[mode]) for mode in MODES},
        "predicted_ratio": {mode: over(expected[SYNCHRONOUS], expected[mode]) for mode in MODES},
        "of_predicted": {mode: over(expected[mode], took[mode]) for mode in MODES},
        "of_async": {mode: over(took[ASYNC], took[mode]) for mode in MODES},
    }
    return {name: {mode: spread(values, clean) for mode, values in by.items()} for name, by in figures.items()}


def over(above: Sequence[float | None], below: Sequence[float | None]) -> list[float | None]:
    """Quotients, round by round."""
    return [None if a is None or b is None else round(a / b, 3) for a, b in zip(above, below, strict=True)]
