"""A turn of the trainers in the kind `network`, which they get as a line of JSON."""

from dataclasses import dataclass

from benchmarks.cluster.prediction import ASYNC, HYBRID

BATCH = 1024
"""Samples of a trainer's step. On the one core of a trainer they take about as long as 4,096 on four."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Some steps with one staleness."""

    mode: str
    """The staleness, or "async"."""
    num_warmup: int
    num_steps: int

    @property
    def staleness(self) -> int:
        return int(HYBRID if self.mode == ASYNC else self.mode)

    @property
    def num_untimed(self) -> int:
        """Steps until as many are in flight as the staleness allows."""
        return self.num_warmup + self.staleness
