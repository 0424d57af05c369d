"""What each process of a layout gets, and how a run with these processes starts. Pure.

`requests_of` sizes the processes. The same sizes decide whether a layout fits its machines, and are written into the
job file and the command, so a plan that fits is one that starts. Name, script, images and storage of a run are in the
user's job file, which `satrap deploy render` reads before this one.
"""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from satrap.planning.machines import ROLES, Layout, Limits, Pool

_GIB, _MIB = 2**30, 2**20
_LEAST_GIB = 2
_POD_BYTES = _GIB // 2
"""Memory of Ray's own processes beside one of ours."""
_BESIDE_ROWS = _GIB
"""Memory that a job file demands of a server beside its rows."""
_LEAST_ROWS_MIB = 1024
_FILE_STEP_BYTES = 16 * _MIB
"""By how much the file with a server's rows grows at once."""


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
    rows_mib: int = 0
    """Part of a server's memory for rows: the size of its /dev/shm."""
    gpus: int = 0


def requests_of(
    layout: Layout, memory: Mapping[str, float], rows_bytes: float, seconds: Mapping[str, float], limits: Limits
) -> dict[str, Request]:
    """Return what a process of each role asks for: memory with head room, and its share of the machine's cores.

    memory: bytes that a process of each role needs. rows_bytes: those of a server's rows. seconds: of a core that a
    batch takes in all processes of a role, by which roles on one machine divide its cores.
    """
    found = {}
    for pool in layout.pools:
        cpus = _cpus(pool, seconds)
        for role in pool.roles:
            least = (memory[role] + _POD_BYTES) / limits.memory
            rows_mib = 0
            if role == "server":
                rows_mib = max(_LEAST_ROWS_MIB, math.ceil((rows_bytes + _FILE_STEP_BYTES) / limits.memory / _MIB))
                least = max(least, rows_mib * _MIB + _BESIDE_ROWS)
            gpus = pool.machine.gpus // pool.trainers if role == "trainer" else 0
            memory_gib = max(_LEAST_GIB, math.ceil(least / _GIB))
            found[role] = Request(cpus=cpus[role], memory_gib=memory_gib, rows_mib=rows_mib, gpus=gpus)
    return found


def _cpus(pool: Pool, seconds: Mapping[str, float]) -> dict[str, int]:
    """Return the whole CPUs of a process of each role: one, and a part of the others by its work."""
    processes = sum(pool.each(role) for role in pool.roles)
    spare = pool.machine.pod_cores - processes
    total = sum(seconds[role] for role in pool.roles)
    if spare <= 0 or not total:
        return {role: max(1, pool.machine.pod_cores // processes) for role in pool.roles}
    return {role: 1 + int(spare * seconds[role] / total / pool.each(role)) for role in pool.roles}


def misfit_of(pool: Pool, requests: Mapping[str, Request], limits: Limits) -> str | None:
    """Return why the processes of a pool do not fit on its machines; None if they do."""
    machine = pool.machine
    who = f"{machine.name}: the {' and '.join(_counted(pool.each(role), role) for role in pool.roles)} of a machine"
    memory = sum(pool.each(role) * requests[role].memory_gib for role in pool.roles)
    if memory * _GIB > machine.pod_bytes:
        return (
            f"{who} need {memory:,} GiB together, so that they use at most {limits.memory:.0%} of it, and may have "
            f"{machine.pod_bytes / _GIB:,.1f} of its {machine.memory_gib:,.0f} GiB"
        )
    cpus = sum(pool.each(role) * requests[role].cpus for role in pool.roles)
    if cpus > machine.pod_cores:
        return f"{who} need {cpus} CPUs together, and may have {machine.pod_cores} of its {machine.cores}"
    return None


def _counted(count: int, role: str) -> str:
    return role if count == 1 else f"{count} {role}s"


def run_line(layout: Layout, requests: Mapping[str, Request], start: Start) -> str:
    """Return the command that starts a run on these machines."""
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
            request = requests[role]
            words += [f"--{role}-cpus", str(request.cpus), f"--{role}-memory", f"{request.memory_gib}GiB"]
            words += [f"--{role}-gpus", str(request.gpus)] if request.gpus else []
    return shlex.join([*words, *(["--", *arguments] if arguments else [])])


def deploy_toml(name: str, layout: Layout, requests: Mapping[str, Request]) -> str:
    """Return the roles of a job file. Every key is there, since this file replaces values of another one.

    The layout has a server: on Kubernetes rows survive a restart there and nowhere else.
    """
    lines = [f"# Written by satrap plan for {' '.join(name.split())}: satrap deploy render JOB THIS_FILE"]
    for role in ROLES:
        lines += ["", f"[{role}s]", f"count = {layout.count(role)}"]
        if not layout.count(role):
            continue
        pool, request = layout.pool_of(role), requests[role]
        lines += [
            f"per_pod = {pool.trainers if role == 'trainer' and not pool.servers else 1}",
            f"cpus = {request.cpus}",
            f'memory = "{request.memory_gib}GiB"',
            *([f'rows = "{request.rows_mib}MiB"'] if role == "server" else []),
            f"gpus = {request.gpus}",
            f"machine = {json.dumps(pool.machine.name)}",
        ]
    return "\n".join(lines) + "\n"
