"""The ledger of a stream: what has happened to each of its batches, and what may happen next. Pure: events in, actions
out; it uses neither threads, nor clocks, nor torch.

    READ ──lookup──> LOOKED_UP ──next()──> RETURNED ──first use──> USED ──step()──> SUBMITTED ──update──> SETTLED
      └──next(), where the lookup must wait──> AHEAD ──lookup──┘
                                       (all but READ and SUBMITTED: ──dropped, for a cause──> SETTLED)

Batches are looked up and returned in the order of the source; of the two, either may come first. A batch belongs to an
optimizer step; with accumulation several batches do. A step is open from the lookup of its first batch until all its
batches are settled: updated or dropped. There are two rules for staleness k:

    1. a batch of step t may be looked up once all steps up to t - k - 1 are settled;
    2. if the order is deterministic, the update of step t waits for the lookups of all steps up to t + k, so that a
       lookup of step t sees exactly the updates up to t - k - 1.

k = 0 is fully synchronous. Where only rule 1 holds, lookups and updates may run concurrently (`allows_overlap`): a step
is open until its updates are applied, so a lookup that starts before then does not depend on them.

Whether a batch has a gradient, and whether the user still holds it, changes without an event: the record knows.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any, Generic, NamedTuple, TypeVar

from satrap.errors import StreamError


class State(StrEnum):
    """Where a batch is."""

    NEW = "new"
    READ = "read"
    AHEAD = "returned ahead of its lookup"
    LOOKED_UP = "looked up"
    RETURNED = "returned with its rows"
    USED = "used"
    SUBMITTED = "submitted"
    SETTLED = "settled"


class Event(StrEnum):
    """What happens to a batch."""

    READ = "read"
    LOOKUP_STARTED = "lookup started"
    LOOKED_UP = "looked up"
    RETURNED = "returned"
    USED = "used"
    SUBMITTED = "submitted"
    SETTLED = "settled"
    """Updated, or not: refused by the tables, dropped, returned by an evaluation, or padding that no loop needs."""


_NEXT = {
    Event.READ: {State.NEW: State.READ},
    Event.LOOKUP_STARTED: {State.READ: State.READ, State.AHEAD: State.AHEAD},
    Event.LOOKED_UP: {
        State.READ: State.LOOKED_UP,
        State.AHEAD: State.RETURNED,
        State.SETTLED: State.SETTLED,  # dropped meanwhile, by a stream that closes
    },
    Event.RETURNED: {State.READ: State.AHEAD, State.LOOKED_UP: State.RETURNED},
    Event.USED: {State.RETURNED: State.USED, State.USED: State.USED},
    Event.SUBMITTED: {State.USED: State.SUBMITTED},
    Event.SETTLED: dict.fromkeys(set(State) - {State.NEW, State.SETTLED}, State.SETTLED),
}
"""The state that follows an event, by the state before; an event in any other state is a mistake of this package."""
_WITHOUT_ROWS = (State.READ, State.AHEAD)
_IN_LOOP = (State.AHEAD, State.RETURNED, State.USED)
_BEGUN = (State.LOOKED_UP, *_IN_LOOP)
"""Dropping such a batch ends its step, so trainers agree on the last one, however fast their threads look up."""


class Stage(StrEnum):
    """One kind of work for a batch."""

    READ = "read"
    LOOKUP = "lookup"
    UPDATE = "update"


class BatchRecord:
    """One batch, as its stream tracks it."""

    def __init__(self, *, position: Any = None, has_rows: bool = True) -> None:
        """position: of the source after the batch.
        has_rows: False for padding, which only keeps a trainer in step with the others."""
        self.position, self.has_rows = position, has_rows
        self.number = self.step = 0
        """Its number in the stream, from 0, and the optimizer step that it belongs to; set when it is read."""
        self.state = State.NEW
        self.cause = ""
        """Why it has no update; "" if it has one, or needs none."""
        self.is_resolved = False
        """Whether the part of its lookup that needs no row's values was done ahead."""
        self.story: list[Event] = []

    def __repr__(self) -> str:
        story = ", ".join(self.story)
        return f"batch {self.number} of step {self.step} ({story}{self.cause and f': {self.cause}'})"

    @property
    def is_used(self) -> bool:
        """Whether the rows were returned to the user."""
        return Event.USED in self.story

    @property
    def has_gradient(self) -> bool:
        """Whether any backward pass has reached the batch."""
        return False

    @property
    def may_get_gradient(self) -> bool:
        """Whether a loss has reached the batch, or may: the user used it and still holds it."""
        return False

    @property
    def is_released_unused(self) -> bool:
        """Whether the user released the batch and never used its rows: no loss will reach it."""
        return False


Record = TypeVar("Record", bound=BatchRecord)


class DropTicket(NamedTuple):
    """Tell the worker that the batch has no update, if it knows it."""

    batch: Any


class SkipStep(NamedTuple):
    """Tell the worker that the step has no update."""

    step: int


Action = DropTicket | SkipStep


@dataclass(frozen=True, slots=True, eq=False)
class Update(Generic[Record]):
    """The update of the tables by one optimizer step, which may sum the gradients of several batches."""

    batches: Sequence[Record]
    apply: Callable[[], None]
    """Sends the gradients to the worker and updates; idempotent."""


class BatchLedger(Generic[Record]):
    """The batches of one stream.

    Invariants, with the unsettled batches in the order of their numbers:
        the step of batch n is last_step + 1 + n // accumulate
        batches to look up and batches to return are two suffixes of the unsettled ones, or one less the batch whose
            lookup has started: only a dropped batch is left out
        the steps of the batches whose lookup has started are at most staleness apart, from oldest_open on
        the batches of `updates` are those that are SUBMITTED
        read = unsettled + updated + dropped, for batches with rows, of a stream that trains
    """

    def __init__(self, staleness: int, *, accumulate: int = 1, deterministic: bool = False, last_step: int = 0) -> None:
        """last_step: the step before the first; all steps up to it are settled."""
        self.staleness, self.accumulate, self.deterministic = staleness, accumulate, deterministic
        self.last_step = last_step
        """The last step that was submitted or dropped."""
        self.position: Any = None
        """The position of the source after the last batch that was submitted or dropped."""
        self.seen: Counter[int] = Counter()
        """Number of batches that were looked up with n earlier steps of this stream open: the actual staleness."""
        self.dropped: Counter[str] = Counter()
        """Number of batches with rows that were read and have no update, by cause."""
        self.num_returned = 0
        """Number of batches that the loop has received."""
        self.updates: list[Update[Record]] = []
        """Submitted and not yet applied, in order."""
        self.updating: Update[Record] | None = None
        """The one that has started."""
        self.looking_up: Record | None = None
        """The batch whose lookup has started."""
        self.in_loop: list[Record] = []
        """Received and not stepped: AHEAD, RETURNED or USED. Changes in the loop's thread only."""
        self.to_look_up: deque[Record] = deque()
        """READ or AHEAD, without the batch whose lookup has started."""
        self.offered: Record | None = None
        """The batch that `next()` is about to return."""
        self.is_exhausted = self.has_ended = False
        """Whether the source has no other batch, and whether the loop knows it."""
        self._first_step, self._num_read = last_step + 1, 0
        self._unsettled: dict[int, Record] = {}  # by number, ascending
        self._to_return: deque[Record] = deque()  # READ or LOOKED_UP
        self._stepped: set[int] = set()  # steps that were submitted, from the oldest open one on
        self._last_stepped = 0

    # -- events --------------------------------------------------------------------------------------------------------

    def handle(self, event: Event, *batches: Record, cause: str = "") -> list[Action]:
        """Record an event of these batches; return what must be done about it. cause: why they have no update."""
        actions: list[Action] = []
        steps: set[int] = set()  # whose batches were dropped
        for batch in batches:
            before, after = batch.state, _NEXT[event].get(batch.state)
            if after is None:
                raise AssertionError(f"{batch} is {before}, and cannot be {event}")
            batch.state, batch.cause = after, cause or batch.cause
            batch.story.append(event)
            self._record(event, batch, before)
            if cause and batch.has_rows and before is not State.SUBMITTED and batch is not self.looking_up:
                actions.append(DropTicket(batch))
            if cause and before in _BEGUN:
                steps.add(batch.step)
        return actions + [SkipStep(step) for step in sorted(steps - self._stepped) if self._is_left_out(step)]

    def submit(self, update: Update[Record]) -> None:
        """Record that the loop has stepped the batches of this update."""
        self.updates.append(update)
        self.handle(Event.SUBMITTED, *update.batches)
        self._stepped = {step for step in self._stepped if step >= self.oldest_open}

    def end_update(self, cause: str = "") -> None:
        """Record that the update that has started was applied. cause: why it was not."""
        update, self.updating = self.next_update, None
        self.updates.remove(update)
        self.handle(Event.SETTLED, *update.batches, cause=cause)

    def _record(self, event: Event, batch: Record, before: State) -> None:
        match event:
            case Event.READ:
                batch.number, batch.step = self._num_read, self.step_of(self._num_read)
                self._num_read += 1
                self._unsettled[batch.number] = batch
                self.to_look_up.append(batch)
                self._to_return.append(batch)
            case Event.LOOKUP_STARTED:
                assert self.may_look_up and self.to_look_up[0] is batch and self.looking_up is None
                if batch.has_rows:
                    self.seen[len({open_batch.step for open_batch in self._open()} - {batch.step})] += 1
                self.looking_up = self.to_look_up.popleft()
            case Event.LOOKED_UP:
                assert self.looking_up is batch
                self.looking_up = None
            case Event.RETURNED:
                returned = self._to_return.popleft()
                assert returned is batch
                self.in_loop.append(batch)
                self.num_returned += 1
                self.offered = None
            case Event.SUBMITTED:
                self._stepped.add(batch.step)
                self._last_stepped = max(self._last_stepped, batch.step)
                self._pass(batch)
            case Event.SETTLED:
                self._settle(batch, before)
        if before in _IN_LOOP and batch.state not in _IN_LOOP:
            self.in_loop.remove(batch)

    def _pass(self, batch: Record) -> None:
        """Record that training continues after the batch, also where it is resumed."""
        self.last_step = max(self.last_step, batch.step)
        self.position = max([at for at in (self.position, batch.position) if at is not None], default=None)

    def _settle(self, batch: Record, before: State) -> None:
        del self._unsettled[batch.number]
        if before in _WITHOUT_ROWS and batch is not self.looking_up:
            self.to_look_up.remove(batch)
        if before in (State.READ, State.LOOKED_UP):
            self._to_return.remove(batch)
            self.offered = None
        if batch.cause and batch.has_rows:
            self.dropped[batch.cause] += 1
        if batch.cause and before in _BEGUN:
            self.num_returned += before is State.LOOKED_UP
            self._pass(batch)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step_of(self, number: int) -> int:
        """Return the step of a batch by its number."""
        return self._first_step + number // self.accumulate

    @property
    def step_read_next(self) -> int:
        """The step of the next batch that is read."""
        return self.step_of(self._num_read)

    @property
    def next_step(self) -> int:
        """The step of the next batch that is looked up."""
        return self.to_look_up[0].step if self.to_look_up else self.step_read_next

    @property
    def oldest_open(self) -> int:
        """The oldest step whose rows are in use; the next batch's step if none is."""
        for batch in self._unsettled.values():
            return batch.step
        return self.step_read_next

    def number_in_step(self, batch: Record) -> int:
        """Return the number of the batch among those of its step, from 1."""
        return batch.number % self.accumulate + 1

    def num_returned_of(self, step: int) -> int:
        """Return how many batches of the step the loop has received."""
        return min(self.accumulate, max(0, self.num_returned - (step - self._first_step) * self.accumulate))

    def _is_left_out(self, step: int) -> bool:
        """Return whether no batch of a step that was not stepped is left."""
        is_whole = self.has_ended or self.num_returned_of(step) == self.accumulate
        unsettled = takewhile(lambda batch: batch.step <= step, self._unsettled.values())
        return is_whole and all(batch.step != step for batch in unsettled)

    # -- the unsettled batches, ascending ------------------------------------------------------------------------------

    def _open(self) -> Iterator[Record]:
        """Yield those whose lookup has started."""
        first = self.to_look_up[0] if self.to_look_up else None
        return takewhile(lambda batch: batch is not first, self._unsettled.values())

    def held(self) -> list[Record]:
        """Return the batches that the loop has with their rows, and has not stepped."""
        return list(takewhile(lambda batch: batch.state is not State.AHEAD, self.in_loop))

    def waiting(self) -> list[Record]:
        """Return the held batches that have gradients."""
        return [batch for batch in self.held() if batch.has_gradient]

    def unstepped(self) -> list[Record]:
        """Return the batches that still wait for their step after the stream has ended. A loop may step them then."""
        return [batch for batch in self.waiting() if batch.has_rows] if self.has_ended else []

    # -- decisions for the pipeline ------------------------------------------------------------------------------------

    @property
    def allows_overlap(self) -> bool:
        """Whether a lookup and an update may run concurrently. With k = 0 there is never one of each to run."""
        return self.staleness > 0 and not self.deterministic

    @property
    def may_look_up(self) -> bool:
        """Whether rule 1 allows the next lookup."""
        return self.oldest_open >= self.next_step - self.staleness

    @property
    def next_update(self) -> Update[Record]:
        """The update that has started, or else the next one: the first submitted, or in a deterministic order the one
        of the oldest step, for which the lookups that other updates require may wait."""
        if self.updating is None and self.deterministic:
            return min(self.updates, key=lambda update: update.batches[0].step)
        return self.updating or self.updates[0]

    @property
    def may_update(self) -> bool:
        """Whether rule 2 allows the next update; if that is of several steps, the rule for the first of them, since the
        lookups that it requires wait for all of them by rule 1."""
        if not self.updates or not self.deterministic or (self.is_exhausted and not self.to_look_up):
            return bool(self.updates)
        return self.next_step > self.next_update.batches[0].step + self.staleness

    def choose(self, stages: Sequence[Stage], *, is_needed: bool) -> Stage | None:
        """Return which of these stages may run now, updates first, or None. is_needed: whether a lookup is needed; a
        deterministic order ignores it."""
        if self.looking_up is not None and Stage.LOOKUP in stages:
            return Stage.LOOKUP
        if Stage.UPDATE in stages and self.may_update:
            return Stage.UPDATE
        if Stage.LOOKUP in stages and not ((is_needed or self.deterministic) and self.may_look_up):
            return None
        if Stage.LOOKUP in stages and self.to_look_up:
            return Stage.LOOKUP
        return Stage.READ if Stage.READ in stages and self.has_room_to_read else None

    def start_update(self) -> Update[Record]:
        """Start the next update, or continue one that was interrupted."""
        self.updating = self.next_update
        return self.updating

    def start_lookup(self) -> Record:
        """Start the next lookup, or continue one that was interrupted; return its batch."""
        if self.looking_up is None:
            self.handle(Event.LOOKUP_STARTED, self.to_look_up[0])
        assert self.looking_up is not None
        return self.looking_up

    @property
    def has_room_to_read(self) -> bool:
        """Whether another batch may be read ahead: as many wait for their lookup as may be open."""
        return (
            not self.is_exhausted
            and min(len(self.to_look_up), len(self._to_return)) < (self.staleness + 1) * self.accumulate
        )

    @property
    def must_wait_to_resolve(self) -> bool:
        """Whether a batch that could not be resolved is being looked up: its successor may be resolved after that."""
        return self.looking_up is not None and not self.looking_up.is_resolved

    @property
    def may_resolve(self) -> bool:
        """Whether the next batch may be resolved: not before an earlier one that must still be looked up as a whole."""
        return not self.to_look_up or self.to_look_up[-1].is_resolved

    @property
    def is_ready(self) -> bool:
        """Whether the next batch to return has its rows."""
        return bool(self._to_return) and self._to_return[0].state is State.LOOKED_UP

    @property
    def another(self) -> Record | None:
        """The batch that was read after the one that was returned last, or is about to be."""
        number = int(self.offered is not None)
        return self._to_return[number] if len(self._to_return) > number else None

    @property
    def is_over(self) -> bool:
        """Whether no other batch will come."""
        return self.is_exhausted and not self._to_return

    @property
    def is_stuck(self) -> bool:
        """Whether neither an update nor a lookup is allowed until the loop steps or drops a batch."""
        if self.looking_up is not None or (self.is_exhausted and not (self.to_look_up or self.updates)):
            return False
        return not self.may_update and not self.may_look_up

    @property
    def returns_ahead(self) -> bool:
        """Whether `next()` returns batches without their rows: it did so before, or only the loop can open the gate."""
        return len(self.to_look_up) > len(self._to_return) or self.is_stuck

    def offer(self) -> Record | None:
        """Return the batch that `next()` returns next, if it is there."""
        is_free = bool(self._to_return) and self._to_return[0] is not self.looking_up
        if self.offered is None and (self.is_ready or (is_free and self.returns_ahead)):
            self.offered = self._to_return[0]
        return self.offered

    # -- decisions for the loop ----------------------------------------------------------------------------------------

    def make_room(self, batch: Record) -> tuple[list[Record], str]:
        """Return the oldest step's batches, to drop because the loop passed them: they close the gate for this one; and
        why. Raise StreamError if the loop still uses them."""
        held = self.held()
        step, staleness = held[0].step, self.staleness
        oldest = [held_batch for held_batch in held if held_batch.step == step]
        remedy = f"set Embeddings(staleness={batch.step - step})"
        if not any(one.may_get_gradient for one in oldest):
            return oldest, (
                f"the batch of step {batch.step} was used before this one was stepped, and the staleness is "
                f"{staleness}: call backward() and optimizer.step() before using the next batch, or {remedy}"
            )
        has_gradient = any(one.has_gradient for one in oldest)
        what, drop = ("a loss reached", "zero_grad()") if has_gradient else ("the loop used", "deleting it")
        raise StreamError(
            f"step {batch.step}: its batch cannot be used yet: {what} the batch of step {step} and optimizer.step() "
            f"was not called, and the staleness is {staleness}; call step() of the optimizer that "
            f"embeddings.optimizer() returned before using the next batch, or drop the earlier one by {drop}, or "
            f"{remedy}, or pass accumulate=N to step once for N batches"
        )

    def require_whole_steps(self, batches: Sequence[Record], has_no_other: Callable[[], bool]) -> None:
        """Raise StreamError unless these are all batches of their steps. has_no_other: as in `completes_step`."""
        if repeated := self._stepped.intersection(batch.step for batch in batches):
            raise StreamError(
                f"step {min(repeated)} was already stepped with some of its batches; call optimizer.step() once for "
                "all of them, after the backward pass of each"
            )
        for step in {batch.step for batch in batches}:
            num_returned = self.num_returned_of(step)
            if num_returned < self.accumulate and not self.has_ended and not has_no_other():
                raise StreamError(
                    f"step {step}: optimizer.step() after {num_returned} of {self.accumulate} batches; call it after "
                    "each batch whose completes_step is True, or change accumulate="
                )

    def completes_step(self, batch: Record, has_no_other: Callable[[], bool]) -> bool:
        """Return whether the batch is the last one of its step. has_no_other: reads one batch ahead to find out whether
        the loop has received all batches."""
        number = self.number_in_step(batch)
        if number < self.num_returned_of(batch.step):
            return False
        return number == self.accumulate or self.has_ended or has_no_other()

    def passed(self) -> tuple[list[Record], str]:
        """Return a batch that keeps a submitted update waiting, to drop because a later step was stepped; and why.

        Raise StreamError if the loop must decide.
        """
        held = self.held()
        for batch in held:
            if not batch.has_gradient and batch.step < self._last_stepped:
                return [batch], f"step {self._last_stepped} was stepped before it"
        raise StreamError(
            f"an update waits for lookups that wait for step {held[0].step}: call optimizer.step(), or drop the batch "
            "by zero_grad(), before a checkpoint"
        )
