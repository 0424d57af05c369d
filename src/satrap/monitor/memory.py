"""Reads how much memory a process may use and how much of it is in use: of its container or machine, and of the file
system of its rows."""

import os
from contextlib import suppress
from pathlib import Path

from satrap.cgroups import memory_groups


def memory(rows: str | os.PathLike[str] | None = None) -> dict[str, list[int]]:
    """Return bytes used and allowed: "machine" is the container with the least memory left, or the whole machine;
    "rows", if a shared-memory file for rows is given, the file system that holds it."""
    tightest = min(_machine_and_groups(), key=lambda numbers: numbers[1] - numbers[0])
    limits = {"machine": [*tightest]}
    if rows is not None:
        with suppress(OSError):
            system = os.statvfs(os.path.dirname(os.path.abspath(rows)))
            limits["rows"] = [(system.f_blocks - system.f_bfree) * system.f_frsize, system.f_blocks * system.f_frsize]
    return limits


def memory_limit(rows: str | os.PathLike[str] | None = None) -> int:
    """Return the bytes that this process and its rows may use at most: the smallest of the machine, of each container
    around the process, and of the file system of a shared-memory file. Rows there count in the container, too."""
    limits = [allowed for _, allowed in _machine_and_groups()]
    if rows is not None:
        limits += [allowed for _, allowed in [memory(rows).get("rows", (0, 0))] if allowed]
    return min(limits)


def resident_bytes(process: int | str = "self") -> int | None:
    """Return how much of the machine's memory a process uses, with memory that it shares; None: not known."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def _machine_and_groups() -> list[tuple[int, int]]:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return [(total - available, total), *((group.used_bytes, group.limit_bytes) for group in memory_groups())]
