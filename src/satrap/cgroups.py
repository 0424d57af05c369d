"""Reads the limits that control groups put on this process: those of a container, a Slurm job or a systemd unit.

Knows both versions of the kernel's interface. A group's limit also holds for the groups below it, so every group from
the process's own up to the root that is visible here counts. Nothing is cached: a limit may change meanwhile.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_PROC = Path("/proc")
_NO_LIMIT = 1 << 60  # version 1 writes a number of about 2^63 where there is no limit
_ESCAPED = re.compile(r"\\(\d{3})")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that limits memory."""

    used_bytes: int
    """What the kernel counts against the limit: private and shared memory, and cached files; without cached files that
    it can drop at any time. Shared memory counts in the group of the process that touched it first."""
    limit_bytes: int


def memory_groups(proc: Path = _PROC) -> list[MemoryGroup]:
    """Return the groups of this process that limit its memory, its own first."""
    return [group for folder in _folders("memory", proc) if (group := _memory_group(folder)) is not None]


def cpu_limit(proc: Path = _PROC) -> float | None:
    """Return how many CPUs the groups of this process let it use at a time on average; None: as many as there are."""
    quotas = [quota for folder in _folders("cpu", proc) if (quota := _cpu_quota(folder)) is not None]
    return min(quotas, default=None)


def _memory_group(folder: Path) -> MemoryGroup | None:
    with suppress(OSError, ValueError):  # no such file at the root; "max" is no limit
        limit, used = (_number((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        return MemoryGroup(max(0, used - _statistic(folder, "inactive_file", 0)), limit)
    with suppress(OSError, ValueError):
        limit, used = (_number((folder / f"memory.{name}_in_bytes").read_text()) for name in ("limit", "usage"))
        # This limit holds for groups above, which may not be visible.
        limit = min(limit, _statistic(folder, "hierarchical_memory_limit", limit))
        if limit < _NO_LIMIT:
            return MemoryGroup(max(0, used - _statistic(folder, "total_inactive_file", 0)), limit)
    return None


def _statistic(folder: Path, name: str, default: int) -> int:
    lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return next((_number(line[1]) for line in lines if len(line) == 2 and line[0] == name), default)


def _cpu_quota(folder: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = map(_number, (folder / "cpu.max").read_text().split())
        return quota / period or None
    with suppress(OSError, ValueError, ZeroDivisionError):  # a quota of -1 is none
        quota, period = (_number((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period or None
    return None


def _number(text: str) -> int:
    """Return a number of the kernel's; ValueError if it is none, such as "max", or cannot be one."""
    number = int(text)
    if not 0 <= number < 2**63:
        raise ValueError(f"{number} is no number of the kernel's")
    return number


def _folders(controller: str, proc: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups that may limit a resource, from its own group up to the root that is
    visible here."""
    try:
        mounts = [_Mount.parse(line) for line in (proc / "self/mountinfo").read_text().splitlines()]
        lines = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except (OSError, ValueError):
        return  # not Linux, or /proc is hidden
    for _, controllers, path in lines:
        if controller not in controllers.split(",") and controllers:
            continue
        visible = [mount for mount in mounts if mount.has(controller if controllers else None)]
        folder = next((place for mount in visible if (place := mount.folder(path)) is not None), None)
        if folder is None and visible:  # the group is outside what this mount shows; its root is all there is to see
            folder = visible[0].point
        while folder is not None:
            yield folder
            folder = None if any(folder == mount.point for mount in visible) else folder.parent


@dataclass(frozen=True, slots=True)
class _Mount:
    kind: str
    options: tuple[str, ...]
    root: PurePosixPath
    """The group at the mount point."""
    point: Path

    @classmethod
    def parse(cls, line: str) -> "_Mount":
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = (_ESCAPED.sub(lambda code: chr(int(code[1], 8)), field) for field in before.split(" ")[3:5])
        return cls(kind, tuple(options.split(",")), PurePosixPath(root), Path(point))

    def has(self, controller: str | None) -> bool:
        """Return whether this mount has the groups of a controller; None: the groups of version 2, for all
        controllers."""
        return self.kind == "cgroup2" if controller is None else self.kind == "cgroup" and controller in self.options

    def folder(self, group: str) -> Path | None:
        """Return the folder of a group; None if it is not below this mount."""
        path = PurePosixPath(group)
        if ".." in path.parts or not path.is_relative_to(self.root):
            return None
        return self.point / path.relative_to(self.root)
