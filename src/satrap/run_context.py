"""Where this process stands in a run that `satrap run` started: what it was told, so that its script need not say it.

A script is the same alone and on a cluster. Alone there is no place; in a run, what the script leaves out (servers,
workers, keys) is the run's. Values only; who starts a trainer sets them before its script begins.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Self

from satrap.config.validation import check_integer, known_keys, set_field
from satrap.errors import ConfigError

MOST_LAUNCHES = 2**16 - 2
"""Each has 2^16 attempts of its own (`satrap.worker.server_group`), which are 32-bit numbers."""
PATIENCE = timedelta(days=7)
"""With what takes one trainer longer than the others; torch's own is half an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """A trainer's place in its run."""

    rank: int
    world: int
    """How many trainers there are."""
    launch: int
    """How often the trainers were started, this time included."""
    servers: tuple[str, ...]
    """Their addresses, in order."""
    first_launch: int = 1
    """Of this run: a later one goes on from a checkpoint, if there is one."""
    workers: tuple[str, ...] = ()
    """Those of the embedding workers; none: each trainer is its own."""
    is_copy: bool = False
    """It runs in a copy of its folder, which goes away with the run."""
    keys: str | None = None
    """The client's key file."""
    meeting: str | None = None
    """Where several trainers find each other, as torch.distributed writes it: "tcp://host:port", "file:///path"."""
    num_threads: int | None = None
    """Of torch; None: as torch chooses."""

    def __post_init__(self) -> None:
        check_integer("RunContext", "world", self.world, 1, 2**32 - 1)
        check_integer("RunContext", "rank", self.rank, 0, self.world - 1)
        check_integer("RunContext", "launch", self.launch, 1, MOST_LAUNCHES)
        check_integer("RunContext", "first_launch", self.first_launch, 1, self.launch)
        set_field(self, "servers", tuple(self.servers))
        set_field(self, "workers", tuple(self.workers))
        if not self.servers:
            raise ConfigError("RunContext: servers is empty; wanted at least one address")
        if self.world > 1 and self.meeting is None:
            raise ConfigError(f"RunContext: {self.world} trainers and no meeting; wanted where they find each other")

    def to_dict(self) -> dict[str, Any]:
        """This place as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The place that `to_dict` wrote."""
        return cls(**known_keys(cls, "RunContext", data))


_here: RunContext | None = None
_before_end: list[Callable[[], None]] = []


def current() -> RunContext | None:
    """This process's place; None if it was not started by a run."""
    return _here


def enter(place: RunContext) -> None:
    """This process stands there from now on."""
    global _here
    _here = place


def before_end(work: Callable[[], None]) -> None:
    """Have it done when the script is over; whoever is in no run ends without."""
    if _here is not None:
        _before_end.append(work)


def end() -> None:
    """The script is over."""
    for work in _before_end:
        work()
