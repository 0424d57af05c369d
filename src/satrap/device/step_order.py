"""The order in which a trainer joins the updates of steps. Pure.

All trainers take part in the update of every step, each once, in ascending order; a trainer that has nothing for a step
joins with nothing. This object decides for which steps it does so, and when.
"""

from satrap.errors import StreamError


class StepOrder:
    """The steps that a trainer has joined."""

    def __init__(self) -> None:
        self.next_step = 1
        """The first step that was not joined."""
        self._skipped: set[int] = set()

    def start(self, step: int) -> None:
        """Continue with this step, in another stream."""
        self.next_step = step
        self._skipped.clear()

    def update(self, step: int) -> list[int]:
        """Join a step with gradients; return the earlier steps to join with nothing first."""
        if step < self.next_step:
            raise StreamError(
                f"step {step} is updated after step {self.next_step - 1}; trainers with rows on devices update steps "
                "in ascending order: call optimizer.step() for the batches in the order of the stream"
            )
        earlier = self.pass_through(step - 1)
        self.next_step = step + 1
        return earlier

    def skip(self, step: int) -> list[int]:
        """Note that a step has no gradients; return the steps to join with nothing now."""
        if step >= self.next_step:
            self._skipped.add(step)
        last = self.next_step - 1
        while last + 1 in self._skipped:
            last += 1
        return self.pass_through(last)

    def pass_through(self, step: int) -> list[int]:
        """Note that no update of a step up to this one is to come; return the steps to join with nothing now."""
        found = list(range(self.next_step, step + 1))
        self.next_step = max(self.next_step, step + 1)
        self._skipped -= set(found)
        return found
