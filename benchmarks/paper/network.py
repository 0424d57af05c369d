"""Throughput over emulated links: real trainers and servers on machines that are network namespaces of this one.

Rows, keys, all-reduces and every byte are real and cross links of `LINK`. A trainer's device is not: after the forward
and backward pass of a small network its thread sleeps for `DEVICE_SECONDS`, as a host does while a GPU computes, so
that three trainers do not compete for two cores. `simulation.py` continues these points to more machines.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster.processes import receive, satrap_server, talking
from benchmarks.harness.clock import noise_between, read_cpu
from benchmarks.paper.cell import CannotRunError, Cell, Done, Figures
from benchmarks.paper.link import Shape
from benchmarks.paper.machines import emulated, unable

LINK = Shape(gbit=0.2, delay_ms=1.0)
DEVICE_SECONDS = 0.02
MODES = ("sync", "hybrid 4", "async 4")
POINTS = ((1, 1), (2, 1), (3, 1), (1, 3), (3, 2), (3, 3))
"""Trainers and servers."""
NUM_FEATURES, BATCH, DIM, NUM_IDS = 8, 512, 16, 200_000
STEPS, WARM_UP = 40, 8
PORT = 29500


def cells(*, full: bool) -> list[Cell]:
    """Return a cell for each point and mode."""
    return [
        Cell(
            f"network/point/{trainers}x{servers}/{mode}", 9, "measured", partial(measure, trainers, servers, mode, full)
        )
        for trainers, servers in POINTS
        for mode in MODES
    ]


def measure(num_trainers: int, num_servers: int, mode: str, full: bool, done: Done) -> Figures:
    """Start the processes and time some steps."""
    if obstacle := unable():
        raise CannotRunError(obstacle)
    from satrap.rpc.keys import create_keys

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        machines = stack.enter_context(emulated(num_servers + num_trainers))
        server_key, client_key = map(str, create_keys(Path(folder, "keys")))
        commands = [partial(machines.command, number) for number in range(num_servers)]
        servers = [
            stack.enter_context(satrap_server(1, f"tcp://{address}:0", ["--keys", server_key], wrap))
            for address, wrap in zip(machines.addresses, commands, strict=False)
        ]
        job = {"servers": [address for address, _ in servers], "keys": client_key, "mode": mode,
               "world_size": num_trainers, "steps": STEPS * (4 if full else 1),
               "rendezvous": f"tcp://{machines.addresses[num_servers]}:{PORT}"}  # fmt: skip
        trainers = []
        for rank in range(num_trainers):
            machine = num_servers + rank
            command = [sys.executable, "-m", "benchmarks.paper.link_trainer", json.dumps(job | {"rank": rank})]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": machines.devices[machine], "OMP_NUM_THREADS": "1"}
            trainers.append(stack.enter_context(talking(machines.command(machine, command), env=environment)))
        for trainer in trainers:
            receive(trainer)  # it is connected, and has created the rows of its first batches
        machines.reshape(LINK)
        before, server_cpu = read_cpu([each.pid for each in trainers]), sum(_cpu_seconds(pid) for _, pid in servers)
        for trainer in trainers:
            assert trainer.stdin is not None
            print("go", file=trainer.stdin, flush=True)
        replies = [receive(trainer) for trainer in trainers]
        noise = noise_between(before, read_cpu([each.pid for each in trainers]))
        server_cpu = sum(_cpu_seconds(pid) for _, pid in servers) - server_cpu
        counted = machines.reshape(Shape())
    seconds = max(reply["seconds"] for reply in replies)
    steps = sum(reply["all_steps"] for reply in replies) / num_trainers
    return {
        "trainers": num_trainers, "servers": num_servers, "mode": mode, "step_ms": 1e3 * seconds,
        "samples_per_s": num_trainers * BATCH / seconds, "crossed": _per_step(counted["bytes"], num_servers, steps),
        "server_ms": 1e3 * server_cpu / steps / num_trainers,
        "host_ms": 1e3 * sum(reply["cpu_seconds"] for reply in replies) / num_trainers,
        "lost_packets": counted["lost"], "noise": noise,
    }  # fmt: skip


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _per_step(total: Sequence[Sequence[int]], num_servers: int, steps: float) -> dict[str, Any]:
    """Return the bytes on the wire of one step: of all trainers to servers, back, and between trainers."""
    machines = range(len(total))
    kinds = {"to_servers": 0.0, "from_servers": 0.0, "between_trainers": 0.0}
    for source in machines:
        for target in machines:
            if source < num_servers <= target:
                kinds["from_servers"] += total[source][target]
            elif target < num_servers <= source:
                kinds["to_servers"] += total[source][target]
            elif source >= num_servers:
                kinds["between_trainers"] += total[source][target]
    return {name: size / steps for name, size in kinds.items()}
