"""The job file of `satrap deploy render` for a plan, and the command that starts it on one machine or on Ray. Pure.

The file has how many processes of each role run, of which size, and on which machines. Name, script, images and storage
of the run are in the user's job file, which `satrap deploy render` reads before this one.
"""

import json
import math
import shlex
from dataclasses import dataclass

from satrap.planning.estimate import Estimate
from satrap.planning.layout import Pool
from satrap.planning.machines import ROLES
from satrap.planning.planner import Plan

_GIB = 2**30
_NODE_MEMORY = 0.92
"""Share of a machine's memory that pods may have; the rest is for Kubernetes and the system."""
_NODE_CORES = 0.97
_LEAST_MEMORY = 2 * _GIB
_SPARE = 1.1 * _GIB  # of a server, beside its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The script of a plan."""

    script: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one process asks for."""

    cpus: int
    memory_gib: int
    gpus: int


def request_of(found: Estimate, pool: Pool, role: str, memory_share: float) -> Request:
    """Return what a process of a role asks for: its share of the machine's cores, and its memory with head room, as
    far as the machine has it. memory_share: the part of its memory that a process may use."""
    processes = sum(pool.each(each) for each in pool.roles)
    needed = found.memory[role]
    least = needed + (_SPARE if role == "server" else 0.0)
    share = _NODE_MEMORY * pool.machine.memory_bytes / processes
    memory = max(min(needed / memory_share, share), least, _LEAST_MEMORY)
    return Request(
        cpus=max(1, int(pool.machine.cores * _NODE_CORES) // processes),
        memory_gib=math.ceil(memory / _GIB),
        gpus=pool.machine.gpus // pool.trainers if role == "trainer" and pool.machine.gpus else 0,
    )


def run_line(plan: Plan, start: Start) -> str:
    """Return the command that starts the plan."""
    layout = plan.estimate.layout
    arguments = list(start.arguments)
    if not layout.count("server"):
        return shlex.join(["python", start.script, *arguments])
    words = ["satrap", "run", start.script]
    cluster = layout.num_machines > 1
    if cluster:
        words += ["--cluster", "ray", "--address", "auto"]
    for role in ROLES:
        if not layout.count(role):
            continue
        words += [f"--{role}s", str(layout.count(role))]
        if cluster:
            request = request_of(plan.estimate, layout.pool_of(role), role, plan.prices.limits.memory)
            words += [f"--{role}-cpus", str(request.cpus), f"--{role}-memory", f"{request.memory_gib}GiB"]
            words += [f"--{role}-gpus", str(request.gpus)] if request.gpus else []
    return shlex.join([*words, *(["--", *arguments] if arguments else [])])


def _rows_mib(memory_gib: int) -> int:
    """Return how much of a server's memory is for rows: all but a tenth, the default of `satrap deploy render`."""
    memory = memory_gib * 1024
    return memory - max(math.ceil(memory / 10), 1024)


def deploy_toml(plan: Plan) -> str:
    """Return the roles of a job file. Every key is there, since this file replaces values of another one."""
    layout, limits = plan.estimate.layout, plan.prices.limits
    lines = [f"# Written by satrap plan for {' '.join(plan.workload.name.split())}: satrap deploy render JOB THIS_FILE"]
    for role in ROLES:
        count = layout.count(role)
        # Without servers the trainer holds the rows; on Kubernetes a server does, on the same type of machine.
        used = "trainer" if role == "server" and not count else role
        lines += ["", f"[{role}s]", f"count = {layout.count(used)}"]
        if not layout.count(used):
            continue
        pool = layout.pool_of(used)
        request = request_of(plan.estimate, pool, used, limits.memory)
        per_pod = pool.trainers if role == "trainer" and not pool.servers else 1
        lines += [
            f"per_pod = {per_pod}",
            f"cpus = {request.cpus}",
            f'memory = "{request.memory_gib}GiB"',
            *([f'rows = "{_rows_mib(request.memory_gib)}MiB"'] if role == "server" else []),
            f"gpus = {request.gpus if role == 'trainer' else 0}",
            f"machine = {json.dumps(pool.machine.name)}",
        ]
    return "\n".join(lines) + "\n"
