"""One round of Paddle's parameter server, in its environment: a server and a trainer (`paddle_role.py`) on free ports
of this machine. Both end with the round, whose result is the trainer's.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from benchmarks.cluster.processes import Process, wait_or_kill
from benchmarks.harness.clock import available_bytes
from benchmarks.harness.machine import ROOT

START_SECONDS = 120.0
RUN_SECONDS = 1500.0
HOST = "127.0.0.1"
ROW_BYTES = 320  # measured bound on what both processes need for a row beside its numbers
DROPPED = "resquest cmd_id"  # sic: the start of its client's line about a message that it dropped


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]


def environment(role: str, ports: tuple[int, int], num_threads: int) -> dict[str, str]:
    """Return what Paddle's fleet reads: the role of the process, and the addresses of server and trainer."""
    server, trainer = ports
    return {
        "TRAINING_ROLE": role,
        "PADDLE_PORT": str(server if role == "PSERVER" else trainer),
        "PADDLE_PSERVERS_IP_PORT_LIST": f"{HOST}:{server}",
        "PADDLE_TRAINER_ENDPOINTS": f"{HOST}:{trainer}",
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_TRAINER_ID": "0",
        "PADDLE_WITH_GLOO": "0",
        "POD_IP": HOST,
        "FLAGS_START_PORT": "0",
        "GLOG_v": "0",
        "CPU_NUM": "1",
        "OMP_NUM_THREADS": str(num_threads),
    }


def start(role: str, job: Mapping[str, Any], ports: tuple[int, int]) -> Process:
    """Start a process of one role. The output of a server is not read."""
    unread = subprocess.DEVNULL if role == "PSERVER" else subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cluster.paddle_role", json.dumps(job)],
        cwd=ROOT,
        env={**os.environ, **environment(role, ports, job["num_threads"])},
        stdout=unread,
        stderr=unread,
        text=True,
    )


def await_port(process: Process, port: int) -> None:
    """Wait until the server listens."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"Paddle's server exited with status {process.returncode} before it listened")
        try:
            socket.create_connection((HOST, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"Paddle's server does not listen after {START_SECONDS:g} s")


def result_of(stdout: str) -> dict[str, Any] | None:
    """Return the trainer's last line that is a result, None without one; Paddle prints other lines."""
    results = [line for line in stdout.splitlines() if line.startswith('{"streams"')]
    result: dict[str, Any] | None = json.loads(results[-1]) if results else None
    return result


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one round. A trainer that fails after its result, in Paddle's teardown, has been measured."""
    needed, available = job["rows"] * (4 * job["dim"] + ROW_BYTES), available_bytes()
    if needed > available:
        raise RuntimeError(f"needs {needed / 2**30:.1f} GiB of memory and {available / 2**30:.1f} are available")
    first, second = free_ports(2)
    with ExitStack() as stack:
        server = start("PSERVER", job, (first, second))
        stack.callback(wait_or_kill, server, 5)
        await_port(server, first)
        trainer = start("TRAINER", {**job, "server": server.pid}, (first, second))
        stack.callback(wait_or_kill, trainer, 5)
        try:
            stdout, stderr = trainer.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            trainer.kill()
            stdout, stderr = trainer.communicate()
            stderr += f"\nstill running after {RUN_SECONDS:g} s"
    result = result_of(stdout)
    if result is None:
        raise RuntimeError(f"Paddle's trainer gave no result: {' | '.join(stderr.strip().splitlines()[-3:])}")
    if DROPPED in stderr:
        raise RuntimeError("Paddle's trainer dropped messages, so its server did not do all the work")
    return result
