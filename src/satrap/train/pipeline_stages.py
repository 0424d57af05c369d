"""What a pipeline's threads share, and what is said of their work: stages, updates, time. Plain values, no lock."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Generic, TypeVar

from satrap.data.inputs import Inputs

Item = TypeVar("Item")


class Stage(Enum):
    """A piece of a pipeline's work."""

    READ = "read"
    LOOKUP = "lookup"
    UPDATE = "update"


@dataclass(slots=True, kw_only=True)
class Update:
    """What one optimizer step asks of the tables."""

    steps: Sequence[int]
    """Of each batch in it, rising. The update is of the last."""
    apply: Callable[[], None]
    """Brings the gradients to the worker and updates; does nothing if that is done already."""


@dataclass(slots=True)
class Seconds:
    """Time spent per stage so far. Table work in threads of its own overlaps the others, and lookups updates if each
    have one."""

    read: float = 0.0
    lookup: float = 0.0
    update: float = 0.0
    wait: float = 0.0
    """That the user's thread waited for the others."""
    inside: float = 0.0
    """That the user's thread spent in next() and submit(): waiting, or without threads doing all of the above."""

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(slots=True)
class State(Generic[Item]):
    """What the threads share, under one condition."""

    waiting: deque[Inputs] = field(default_factory=deque)
    ahead: deque[tuple[Inputs, Item]] = field(default_factory=deque)  # handed over, to be looked up
    ready: deque[Item] = field(default_factory=deque)
    updates: deque[Update] = field(default_factory=deque)
    doing: set[Stage] = field(default_factory=set)  # the table work that threads of ours are at
    begun: tuple[Inputs, int, int, Item | None] | None = None  # a lookup in the user's thread, until it is made
    exhausted: bool = False
    paused: int | None = None  # by which thread
    closed: bool = False
    error: BaseException | None = None
    told: bool = False  # the error was raised to the user
    failed: int = 0  # batches whose update was refused
