"""The gate: when a batch may be looked up and when an update may be applied. It decides and does nothing.

A batch belongs to a step (an optimizer step); with accumulation several batches do. A step is open from the lookup of
its first batch until all its batches are settled: updated, or dropped. Two rules, for staleness k:

    1. a batch of step t may be looked up once all steps up to t - k - 1 are settled;
    2. if the order is deterministic, the update of step t waits for the lookups of all steps up to t + k, so that a
       lookup of step t sees exactly the updates up to t - k - 1 and no other.

k = 0 is full synchrony. Where only rule 1 holds, lookups and updates may run at the same time (`apart`): a step is open
until its updates are applied, so a lookup that begins before that needs none of them. `Pipeline` reports what happened
and asks what may happen; no thread, no clock, no torch here.
"""

from collections import Counter, OrderedDict


class StalenessGate:
    """The steps of one stream: which are open, and what that allows.

    Invariants: open steps rise; none is later than the next batch's; each has a batch that is not settled.
    """

    def __init__(self, staleness: int, *, accumulate: int = 1, deterministic: bool = False, last_step: int = 0) -> None:
        """last_step: the step before the first; those up to it are settled."""
        self.staleness = staleness
        self.accumulate = accumulate
        self.deterministic = deterministic
        self.seen: Counter[int] = Counter()
        """How many batches were looked up with n earlier steps open: the staleness really seen."""
        self._step = last_step + 1  # of the next batch
        self._in_step = 0  # its batches looked up so far
        self._open: OrderedDict[int, int] = OrderedDict()  # step -> batches looked up and not settled
        self._exhausted = False

    @property
    def apart(self) -> bool:
        """Whether a lookup and an update may run at the same time. With k = 0 there is never one of each to run."""
        return self.staleness > 0 and not self.deterministic

    @property
    def next_step(self) -> int:
        """The step of the next batch to look up."""
        return self._step

    def step_after(self, num_batches: int) -> int:
        """The step of the batch that is looked up after so many others."""
        return self._step + (self._in_step + num_batches) // self.accumulate

    @property
    def oldest_open(self) -> int:
        """The oldest step whose rows are in use, the next batch's if none is."""
        return next(iter(self._open), self._step)

    def may_look_up(self) -> bool:
        """Rule 1, for the next batch."""
        return self.oldest_open >= self._step - self.staleness

    def look_up(self) -> int:
        """The next batch is being looked up; returns its step."""
        assert self.may_look_up() and not self._exhausted
        step = self._step
        self.seen[len(self._open) - (step in self._open)] += 1
        self._open[step] = self._open.get(step, 0) + 1
        self._in_step += 1
        if self._in_step == self.accumulate:
            self._step, self._in_step = step + 1, 0
        return step

    def exhaust(self) -> None:
        """There are no more batches."""
        self._exhausted = True

    def may_update(self, step: int) -> bool:
        """Rule 2, for the update of `step`."""
        return not self.deterministic or self._exhausted or self._step > step + self.staleness

    def settle(self, step: int) -> None:
        """One batch of the step was updated or dropped."""
        self._open[step] -= 1
        if self._open[step] == 0:
            del self._open[step]
