"""How many servers a run should have, by what they and the trainers measured. Pure: figures, limits and time in, a
decision out; `satrap.server.migration.coordinator` does it.

Servers are added when one of them is above a mark, in memory or in work, and taken away when fewer would still be well
below it. Between the two marks nothing happens, what was decided must be so several times in a row, and after a change
there is a pause: moving buckets costs time, and a run whose load goes up and down should not follow it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from satrap.config.validation import check_integer, check_number
from satrap.errors import ConfigError
from satrap.sharding.bucket_map import MOST_SERVERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Of one server, over a window of time."""

    address: str
    rows: int
    used_bytes: float
    limit_bytes: float
    """What it may use of its machine's memory."""
    calls: float = 0.0
    """Under way at a time; more than a server has threads wait."""
    work_seconds: float = 0.0
    """Of all its calls that belong to one step."""

    @classmethod
    def between(
        cls, address: str, before: Mapping[str, float], after: Mapping[str, float], limit_bytes: float | None = None
    ) -> "ServerLoad":
        """Of two answers to a server's `load`. limit_bytes: None: all of its machine's memory."""
        num_steps = after["latest_step"] - before["latest_step"]
        worked = after["work_seconds"] - before["work_seconds"]
        return cls(
            address=address,
            rows=int(after["rows"]),
            used_bytes=after["bytes"],
            limit_bytes=after["memory_bytes"] if limit_bytes is None else limit_bytes,
            calls=(before["calls"] + after["calls"]) / 2,
            work_seconds=worked / num_steps if num_steps > 0 and worked >= 0 else 0.0,  # it may have been started anew
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLimits:
    """What is wanted."""

    min_servers: int = 1
    max_servers: int
    memory_high: float = 0.8
    """Of a server's limit: above, servers are added."""
    memory_goal: float = 0.6
    """What a change aims at, so that it is not undone by the next."""
    work_high: float = 0.7
    """Of a trainers' step, that a server works on it: above, trainers wait for servers."""
    work_goal: float = 0.4
    patience: int = 3
    """How many windows in a row must say the same."""
    pause_seconds: float = 300.0
    """After a change."""

    def __post_init__(self) -> None:
        check_integer("Bounds", "min_servers", self.min_servers, 1, MOST_SERVERS)
        check_integer("Bounds", "max_servers", self.max_servers, self.min_servers, MOST_SERVERS)
        check_integer("Bounds", "patience", self.patience, 1, 1000)
        check_number("Bounds", "pause_seconds", self.pause_seconds, 0.0)
        for name in ("memory", "work"):
            goal, high = getattr(self, f"{name}_goal"), getattr(self, f"{name}_high")
            if not 0 < goal < high <= 1:
                raise ConfigError(f"Bounds: {name}_goal is {goal} and {name}_high {high}; wanted 0 < goal < high <= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why."""

    add: int = 0
    remove: tuple[str, ...] = ()
    """Addresses."""
    why: str = ""

    @property
    def change(self) -> int:
        """By how many servers."""
        return self.add - len(self.remove)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleHistory:
    """What the next decision must know of those before."""

    same: int = 0
    """For how many windows as many servers were wanted."""
    change: int = 0
    changed_at: float = -math.inf


def decide(
    servers: Sequence[ServerLoad], step_seconds: float, bounds: ScaleLimits, past: ScaleHistory, now: float
) -> tuple[Decision, ScaleHistory]:
    """What to do now, and the past of the next decision. step_seconds: of the trainers; 0: they do not train.

    now: in seconds, of any clock that only rises.
    """
    if not servers:
        raise ConfigError("there are no servers; wanted the figures of each")
    found = _wanted(servers, step_seconds, bounds)
    same = past.same + 1 if found.change and _sign(found.change) == _sign(past.change) else int(found.change != 0)
    then = replace(past, same=same, change=found.change)
    outside = not bounds.min_servers <= len(servers) <= bounds.max_servers
    if not found.change or (same < bounds.patience and not outside):
        return Decision(why=found.why), then
    if now - past.changed_at < bounds.pause_seconds and not outside:
        return Decision(why=f"{found.why}; but the last change was {now - past.changed_at:.0f} s ago"), then
    return found, ScaleHistory(changed_at=now)


def _wanted(servers: Sequence[ServerLoad], step_seconds: float, bounds: ScaleLimits) -> Decision:
    """As if there had been no decision before."""
    have = len(servers)
    memory = max(each.used_bytes / each.limit_bytes for each in servers)
    work = max(each.work_seconds for each in servers) / step_seconds if step_seconds > 0 else 0.0
    # As if all had as much as the one that has most: with so many, that one is at the goals.
    needed = max(1, math.ceil(have * max(memory / bounds.memory_goal, work / bounds.work_goal)))
    why = f"memory at {memory:.2f} of its limit, work at {work:.2f} of a step, with {have} servers"
    if memory > bounds.memory_high or work > bounds.work_high:
        wanted = needed
    elif needed < have and step_seconds > 0:
        wanted = have - 1  # one at a time: nothing is urgent
    else:
        wanted = have
    wanted = min(max(wanted, bounds.min_servers), bounds.max_servers)
    if wanted >= have:
        return Decision(add=wanted - have, why=why)
    least = sorted(servers, key=lambda each: each.rows)  # the fewest rows move
    return Decision(remove=tuple(each.address for each in least[: have - wanted]), why=why)


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
