"""One round of Paddle's parameter server: `python -m benchmarks.cluster.paddle '<job as JSON>'`, in its environment.

Starts a server and a trainer (`paddle_role.py`) on free ports of this machine; both are gone when it ends. The last
line of stdout is the trainer's result.
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

from benchmarks.clock import available_bytes
from benchmarks.machine import ROOT

START_SECONDS = 120.0
RUN_SECONDS = 1500.0
HOST = "127.0.0.1"
ROW_BYTES = 320  # of both processes for a row beside its numbers, at most, as measured
REFUSED = "resquest cmd_id"  # sic: how its client begins the line about a message that it gave up


def free_ports(count: int) -> list[int]:
    """Different ones, free a moment ago."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]


def environment(role: str, ports: tuple[int, int], num_threads: int) -> dict[str, str]:
    """What Paddle's fleet reads: who this process is, and where the server and the trainer are."""
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


def start(role: str, job: Mapping[str, Any], ports: tuple[int, int]) -> subprocess.Popen[str]:
    """A process of one role. What a server says is not read, so it goes nowhere."""
    unread = subprocess.DEVNULL if role == "PSERVER" else subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cluster.paddle_role", json.dumps(job)],
        cwd=ROOT,
        env={**os.environ, **environment(role, ports, int(job["num_threads"]))},
        stdout=unread,
        stderr=unread,
        text=True,
    )


def await_port(process: subprocess.Popen[str], port: int) -> None:
    """Returns once the server listens."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"Paddle's server ended with exit status {process.returncode} before it listened")
        try:
            socket.create_connection((HOST, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"Paddle's server does not listen after {START_SECONDS:g} s")


def end(process: subprocess.Popen[str]) -> None:
    """It has a moment to end by itself."""
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def result_of(stdout: str) -> dict[str, Any] | None:
    """The trainer's last line that is a result; Paddle prints lines of its own."""
    found = [line for line in stdout.splitlines() if line.startswith('{"streams"')]
    result: dict[str, Any] | None = json.loads(found[-1]) if found else None
    return result


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """One round. A trainer that ended badly after its result (Paddle's teardown) has been measured all the same."""
    needed, available = int(job["rows"]) * (4 * int(job["dim"]) + ROW_BYTES), available_bytes()
    if needed > available:
        raise RuntimeError(f"needs {needed / 2**30:.1f} GiB of memory and {available / 2**30:.1f} are available")
    first, second = free_ports(2)
    with ExitStack() as stack:
        server = start("PSERVER", job, (first, second))
        stack.callback(end, server)
        await_port(server, first)
        trainer = start("TRAINER", {**job, "server": server.pid}, (first, second))
        stack.callback(end, trainer)
        try:
            stdout, stderr = trainer.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            trainer.kill()
            stdout, stderr = trainer.communicate()
            stderr += f"\nstill running after {RUN_SECONDS:g} s"
    result = result_of(stdout)
    if result is None:
        raise RuntimeError(f"Paddle's trainer gave no result: {' | '.join(stderr.strip().splitlines()[-3:])}")
    if REFUSED in stderr:
        raise RuntimeError("Paddle's trainer gave messages up, so its server did not do all the work")
    return result


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
