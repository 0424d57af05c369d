"""When a call is sent, sent again and given up. Pure: time is passed in, in seconds.

A patient call is given up only when nothing was heard of it for `patience` seconds: a server that says that it still
works at it may take as long as it needs. Any other ends at its deadline, whatever is heard. Time in which the caller
did not look at the call (its process was stopped) does not count.

Invariants: not due within `retry_seconds` of the last sending, unless the server said busy; then not due before a pause
that doubles with every further one, up to half a second; never due at or after the deadline, which never moves back,
and for a call without patience only by time in which nobody looked.
"""

from dataclasses import dataclass

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.5
_BLINK = 2.0  # seconds between two looks that count as waiting


@dataclass(kw_only=True, slots=True)
class Schedule:
    """Of one call."""

    deadline: float
    """When the caller stops waiting."""
    retry_seconds: float
    due: float
    """When it is to be sent next."""
    patience: float = 0.0
    """Of a patient call: seconds of silence after which it is given up."""
    num_sent: int = 0
    num_busy: int = 0
    num_working: int = 0
    _seen: float | None = None
    _pause: float = _FIRST_PAUSE

    def look(self, now: float) -> None:
        """The caller waits at this time."""
        if self._seen is not None and now - self._seen > _BLINK:
            self.deadline += now - self._seen
        self._seen = now

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

    def working(self, now: float) -> None:
        """The server knows the call and has not ended it."""
        self.num_working += 1
        if self.patience:
            self.deadline = max(self.deadline, now + self.patience)

    def busy(self, now: float, spread: float) -> None:
        """The server had no room; `spread`, from 0 to 1, keeps callers that were refused together apart."""
        self.num_busy += 1
        self.due = now + self._pause * (0.5 + spread)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
