"""The staleness gate: decides when a batch may be looked up and when an update may be applied.

A batch belongs to an optimizer step; with accumulation several batches do. A step is open from the lookup of its first
batch until all its batches are settled: updated or dropped. There are two rules for staleness k:

    1. a batch of step t may be looked up once all steps up to t - k - 1 are settled;
    2. if the order is deterministic, the update of step t waits for the lookups of all steps up to t + k, so that a
       lookup of step t sees exactly the updates up to t - k - 1.

k = 0 is fully synchronous. Where only rule 1 holds, lookups and updates may run concurrently (`allows_overlap`): a step
is open until its updates are applied, so a lookup that starts before then does not depend on them. `PrefetchPipeline`
reports what happened and queries what may happen; the gate uses no threads, clocks or torch.
"""

from collections import Counter, OrderedDict


class StalenessGate:
    """The open steps of one stream, and what they allow.

    Invariants: open steps ascend; none is later than the next batch's; each has a batch that is not settled.
    """

    def __init__(self, staleness: int, *, accumulate: int = 1, deterministic: bool = False, last_step: int = 0) -> None:
        """last_step: the step before the first; all steps up to it are settled."""
        self.staleness = staleness
        self.accumulate = accumulate
        self.deterministic = deterministic
        self.seen: Counter[int] = Counter()
        """Number of batches that were looked up with n earlier steps of this stream open: the actual staleness."""
        self._step = last_step + 1  # the next batch's
        self._in_step = 0  # batches of that step looked up so far
        self._open: OrderedDict[int, int] = OrderedDict()  # step -> batches looked up and not settled
        self._exhausted = False

    @property
    def allows_overlap(self) -> bool:
        """Whether a lookup and an update may run concurrently. With k = 0 there is never one of each to run."""
        return self.staleness > 0 and not self.deterministic

    @property
    def next_step(self) -> int:
        """The step of the next batch to look up."""
        return self._step

    def step_after(self, num_batches: int) -> int:
        """Return the step of the batch that is looked up `num_batches` batches later."""
        return self._step + (self._in_step + num_batches) // self.accumulate

    @property
    def oldest_open(self) -> int:
        """The oldest step whose rows are in use; the next batch's step if none is."""
        return next(iter(self._open), self._step)

    def may_look_up(self) -> bool:
        """Apply rule 1 to the next batch."""
        return self.oldest_open >= self._step - self.staleness

    def look_up(self, *, has_rows: bool = True) -> int:
        """Record that the lookup of the next batch starts; return its step.

        has_rows: whether the batch has rows, which may miss updates; padding has none."""
        assert self.may_look_up() and not self._exhausted
        step = self._step
        if has_rows:
            self.seen[len(self._open) - (step in self._open)] += 1
        self._open[step] = self._open.get(step, 0) + 1
        self._in_step += 1
        if self._in_step == self.accumulate:
            self._step, self._in_step = step + 1, 0
        return step

    def exhaust(self) -> None:
        """Record that there are no more batches."""
        self._exhausted = True

    def may_update(self, step: int) -> bool:
        """Apply rule 2 to the update of `step`; of several steps in one update, to the first of them, since the lookups
        that rule 2 wants wait for all of them by rule 1."""
        return not self.deterministic or self._exhausted or self._step > step + self.staleness

    def settle(self, step: int) -> None:
        """Record that one batch of the step was updated or dropped."""
        self._open[step] -= 1
        if self._open[step] == 0:
            del self._open[step]
