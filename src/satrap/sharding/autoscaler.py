"""Decides how many servers a run needs, from what the servers and the trainers measured.

Pure: figures, limits and the time in, a decision out; `satrap.server.migration.coordinator` carries it out. Servers are
added when one of them exceeds its upper mark for memory or work, and removed when fewer servers would still stay well
below it. Moving buckets costs time, so the number of servers does not follow every change of load: between the marks
nothing changes, several windows in a row must agree, and a pause follows each change.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from satrap.config.validation import check_integer, check_number
from satrap.errors import ConfigError
from satrap.sharding.bucket_map import MOST_SERVERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The load of one server over a window of time."""

    address: str
    rows: int
    used_bytes: float
    limit_bytes: float
    """How much memory the server may use."""
    work_seconds: float = 0.0
    """Time that the server spent on all calls of one step."""

    @classmethod
    def between(
        cls, address: str, before: Mapping[str, float], after: Mapping[str, float], limit_bytes: float | None = None
    ) -> "ServerLoad":
        """Return the load between two answers to `load`. limit_bytes: None stands for what the server reported."""
        num_steps = after["latest_step"] - before["latest_step"]
        worked = after["work_seconds"] - before["work_seconds"]
        return cls(
            address=address,
            rows=int(after["rows"]),
            used_bytes=after["bytes"],
            limit_bytes=after["memory_bytes"] if limit_bytes is None else limit_bytes,
            work_seconds=worked / num_steps if num_steps > 0 and worked >= 0 else 0.0,  # negative after a restart
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLimits:
    """When to add and remove servers, and how many there may be."""

    min_servers: int = 1
    max_servers: int
    memory_high: float = 0.8
    """Share of a server's memory limit above which servers are added."""
    memory_goal: float = 0.6
    """Share that a change aims for, so that the next decision does not undo it."""
    work_high: float = 0.7
    """Share of a step's time that a server works on it, above which servers are added: trainers wait for it then."""
    work_goal: float = 0.4
    patience: int = 3
    """Number of consecutive windows that must agree."""
    pause_seconds: float = 300.0
    """Time to wait after a change."""

    def __post_init__(self) -> None:
        check_integer("ScaleLimits", "min_servers", self.min_servers, 1, MOST_SERVERS)
        check_integer("ScaleLimits", "max_servers", self.max_servers, self.min_servers, MOST_SERVERS)
        check_integer("ScaleLimits", "patience", self.patience, 1, 1000)
        check_number("ScaleLimits", "pause_seconds", self.pause_seconds, 0.0)
        for name in ("memory", "work"):
            goal, high = getattr(self, f"{name}_goal"), getattr(self, f"{name}_high")
            if not 0 < goal < high <= 1:
                raise ConfigError(
                    f"ScaleLimits: {name}_goal is {goal} and {name}_high {high}; expected 0 < goal < high <= 1"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many servers to add, which ones to remove, and why."""

    add: int = 0
    remove: tuple[str, ...] = ()
    """Addresses of the servers to remove."""
    reason: str = ""

    @property
    def change(self) -> int:
        """The difference in the number of servers."""
        return self.add - len(self.remove)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleHistory:
    """What a decision needs to know about the earlier ones."""

    same: int = 0
    """Number of consecutive windows that called for a change in the same direction."""
    change: int = 0
    changed_at: float = -math.inf


def decide(
    servers: Sequence[ServerLoad], step_seconds: float, bounds: ScaleLimits, past: ScaleHistory, now: float
) -> tuple[Decision, ScaleHistory]:
    """Return the decision and the history to pass to the next one.

    step_seconds: the duration of a trainers' step; 0 while they do not train.
    now: seconds of any monotonic clock.
    """
    if not servers:
        raise ConfigError("there are no servers; expected the load of at least one")
    decision = _decide_now(servers, step_seconds, bounds)
    same = past.same + 1 if decision.change * past.change > 0 else int(decision.change != 0)
    then = replace(past, same=same, change=decision.change)
    outside = not bounds.min_servers <= len(servers) <= bounds.max_servers
    if not decision.change or (same < bounds.patience and not outside):
        return Decision(reason=decision.reason), then
    if now - past.changed_at < bounds.pause_seconds and not outside:
        return Decision(reason=f"{decision.reason}; but the last change was {now - past.changed_at:.0f} s ago"), then
    return decision, ScaleHistory(changed_at=now)


def _decide_now(servers: Sequence[ServerLoad], step_seconds: float, bounds: ScaleLimits) -> Decision:
    """Return the decision that ignores the history."""
    have = len(servers)
    memory = max(server.used_bytes / server.limit_bytes for server in servers)
    work = max(server.work_seconds for server in servers) / step_seconds if step_seconds > 0 else 0.0
    # Assumes that all servers carry as much as the busiest one, which reaches the goals with this many servers.
    needed = max(1, math.ceil(have * max(memory / bounds.memory_goal, work / bounds.work_goal)))
    why = f"memory at {memory:.2f} of its limit, work at {work:.2f} of a step, with {have} servers"
    if memory > bounds.memory_high or work > bounds.work_high:
        target = needed
    elif needed < have and step_seconds > 0:
        target = have - 1  # one at a time: removing a server is not urgent
    else:
        target = have
    target = min(max(target, bounds.min_servers), bounds.max_servers)
    if target >= have:
        return Decision(add=target - have, reason=why)
    least = sorted(servers, key=lambda server: server.rows)  # so that the fewest rows move
    return Decision(remove=tuple(server.address for server in least[: have - target]), reason=why)
