"""The schedule of a call: when it is sent, sent again and abandoned. Pure: time is passed in, in seconds.

A patient call is abandoned only after `patience` seconds of silence: a server that reports the call as running may take
as long as it needs. Any other call ends at its deadline. Time during which the caller did not observe the call (its
process was suspended) does not count.

Invariants: a call is not due within `retry_seconds` of the last sending, unless the server was busy; then it is not due
before a pause, which doubles with every further busy reply, up to half a second. It is never due at or after the
deadline. The deadline never moves back, and without patience it moves only by the time that was not observed.
"""

from dataclasses import dataclass

_BUSY_PAUSES = 0.005, 0.5  # the first and the longest
_MAX_GAP_SECONDS = 2.0  # longest time between two observations that counts as waiting


@dataclass(slots=True)
class Backoff:
    """The pauses between retries: each is twice as long as the one before, up to a limit. In seconds."""

    pause: float
    """The next pause."""
    longest: float

    def next_pause(self) -> float:
        pause, self.pause = self.pause, min(2 * self.pause, self.longest)
        return pause


@dataclass(kw_only=True, slots=True)
class Schedule:
    """The schedule of one call."""

    deadline: float
    """Time at which the caller stops waiting."""
    retry_seconds: float
    due: float
    """Time at which the request is sent next."""
    patience: float = 0.0
    """Seconds of silence after which a patient call is abandoned; 0: the call is not patient."""
    num_sent: int = 0
    num_busy: int = 0
    num_working: int = 0
    _last_observed: float | None = None
    _backoff: Backoff | None = None

    def observe(self, now: float) -> None:
        """Record that the caller waits at this time."""
        if self._last_observed is not None and now - self._last_observed > _MAX_GAP_SECONDS:
            self.deadline += now - self._last_observed
        self._last_observed = now

    def is_due(self, now: float) -> bool:
        return self.due <= now < self.deadline

    def is_expired(self, now: float) -> bool:
        return now >= self.deadline

    def wait(self, now: float) -> float:
        """Return the seconds until the next action if no answer arrives."""
        return max(0.0, min(self.due, self.deadline) - now)

    def record_sent(self, now: float) -> None:
        self.num_sent += 1
        self.due = now + self.retry_seconds

    def record_working(self, now: float) -> None:
        """Record that the server reported the call as queued or running."""
        self.num_working += 1
        if self.patience:
            self.deadline = max(self.deadline, now + self.patience)

    def record_busy(self, now: float, jitter: float) -> None:
        """Record a busy reply. `jitter`, from 0 to 1, keeps callers apart that were refused together."""
        self.num_busy += 1
        self._backoff = self._backoff or Backoff(*_BUSY_PAUSES)
        self.due = now + self._backoff.next_pause() * (0.5 + jitter)
