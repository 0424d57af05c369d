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

    def update(self, step: int) -> tuple[list[int], list[int]]:
        """Join a step with gradients; return the steps to join with nothing before it, and after it."""
        if step < self.next_step:
            raise StreamError(
                f"step {step} is updated after step {self.next_step - 1}; trainers with rows on devices update steps "
                "in ascending order: call optimizer.step() for the batches in the order of the stream"
            )
        earlier = list(range(self.next_step, step))
        return earlier, self._advance(step)[len(earlier) + 1 :]

    def skip(self, step: int) -> list[int]:
        """Note that a step has no gradients; return the steps to join with nothing now."""
        self._skipped.add(step)
        return self._advance(self.next_step - 1)

    def pass_through(self, step: int) -> list[int]:
        """Note that no update of a step up to this one is to come; return the steps to join with nothing now."""
        return self._advance(step)

    def _advance(self, last: int) -> list[int]:
        """Join all steps up to `last`, and the skipped ones that follow."""
        first, last = self.next_step, max(last, self.next_step - 1)
        while last + 1 in self._skipped:
            last += 1
        self.next_step = last + 1
        self._skipped = {step for step in self._skipped if step > last}
        return list(range(first, last + 1))
