"""Values that the threads of a prefetch pipeline share: stages, updates, times. Plain data without locks."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from satrap.data.inputs import Inputs

Item = TypeVar("Item")


class Stage(Enum):
    """One kind of work in a pipeline."""

    READ = "read"
    LOOKUP = "lookup"
    UPDATE = "update"


@dataclass(slots=True, kw_only=True)
class Update:
    """The table update of one optimizer step."""

    steps: Sequence[int]
    """The step of each batch in it, ascending. The update has the number of the last."""
    apply: Callable[[], None]
    """Sends the gradients to the worker and updates; idempotent."""


@dataclass(slots=True)
class Seconds:
    """Time spent in each stage so far. Table work in its own threads overlaps the other stages; with a thread each,
    lookups and updates overlap, too."""

    read: float = 0.0
    lookup: float = 0.0
    update: float = 0.0
    wait: float = 0.0
    """Time that the user's thread waited for other threads."""
    inside: float = 0.0
    """Time that the user's thread spent in next() and submit(): waiting, or without threads doing all the work
    above."""


@dataclass(slots=True)
class State(Generic[Item]):
    """State that the threads share, under one condition variable."""

    waiting: deque[Inputs] = field(default_factory=deque)
    ahead: deque[tuple[Inputs, Item]] = field(default_factory=deque)  # returned before their lookup
    ready: deque[Item] = field(default_factory=deque)
    updates: deque[Update] = field(default_factory=deque)
    running: set[Stage] = field(default_factory=set)  # table work that the pipeline's threads are doing
    is_resolving: bool = False  # in the thread that reads
    unfinished_lookup: tuple[Inputs, int, int, Item | None] | None = None  # a lookup in the user's thread
    exhausted: bool = False
    paused: int | None = None  # ident of the thread that paused table work
    closed: bool = False
    error: BaseException | None = None
    is_reported: bool = False  # whether the error was raised to the user
    num_failed: int = 0  # batches whose update was refused
