"""When a call is sent, sent again and given up. Pure: time is passed in, in seconds.

Invariants: not due within `retry_seconds` of the last sending, unless the server said busy; then not due before a pause
that doubles with every further one, up to half a second; never due at or after the deadline.
"""

from dataclasses import dataclass, field

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5


@dataclass(kw_only=True, slots=True)
class Schedule:
    """Of one call."""

    deadline: float
    """When the caller stops waiting."""
    retry_seconds: float
    due: float
    """When it is to be sent next."""
    num_sent: int = 0
    num_busy: int = 0
    _pause: float = field(default=_FIRST_PAUSE)

    def is_due(self, now: float) -> bool:
        return self.due <= now < self.deadline

    def is_over(self, now: float) -> bool:
        return now >= self.deadline

    def wait(self, now: float) -> float:
        """Seconds until something is to be done if no answer comes."""
        return max(0.0, min(self.due, self.deadline) - now)

    def sent(self, now: float) -> None:
        self.num_sent += 1
        self.due = now + self.retry_seconds

    def busy(self, now: float, spread: float) -> None:
        """The server had no room; `spread`, from 0 to 1, keeps callers that were refused together apart."""
        self.num_busy += 1
        self.due = now + self._pause * (0.5 + spread)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
