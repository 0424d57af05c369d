"""Reads how much memory a process may use and how much of it is in use: of its container or machine, and of the file
system of its rows."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def memory(rows: str | os.PathLike[str] | None = None) -> dict[str, list[int]]:
    """Return bytes used and allowed: "machine" is the container with the least memory left, or the whole machine;
    "rows", if a shared-memory file for rows is given, the file system that holds it."""
    tightest = min(_machine_and_containers(), key=lambda numbers: numbers[1] - numbers[0])
    found = {"machine": [*tightest]}
    if rows is not None:
        with suppress(OSError):
            system = os.statvfs(os.path.dirname(os.path.abspath(rows)))
            found["rows"] = [(system.f_blocks - system.f_bfree) * system.f_frsize, system.f_blocks * system.f_frsize]
    return found


def _machine_and_containers() -> Iterator[tuple[int, int]]:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    yield total - available, total
    with suppress(OSError, ValueError, IndexError):
        yield from _limits(Path("/proc/self/cgroup").read_text(), _CGROUPS)


def _limits(groups: str, root: Path) -> Iterator[tuple[int, int]]:
    """Yield bytes used and allowed of each control group of this process that has a limit. Files that the kernel can
    drop at any time are not counted as used."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        names = ("memory.current", "memory.max") if not controllers else (
            "memory.usage_in_bytes",
            "memory.limit_in_bytes",
        )  # fmt: skip
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            with suppress(OSError, ValueError):
                used, allowed = (int((each / name).read_text()) for name in names)  # "max" is no limit
                if allowed < 1 << 60:
                    yield max(0, used - _droppable(each)), allowed
            if each == top:
                break


def _droppable(folder: Path) -> int:
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, number = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(number)
    return 0
