"""How far the trainers of a run are, all together, from what they record while they train.

A launch that resumes a checkpoint continues the count: samples of steps that it trains again count once. Steps before
the first launch of this `satrap run` count as many samples as those that followed, in the mean: nothing else is known
of them. Pure: the caller passes the time.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from satrap.monitor.record_file import SHOWN
from satrap.monitor.report import Report

_COUNTS = ("first", "step", "samples")
_RATE_SECONDS = 30.0  # time over which the rate is measured


@dataclass(slots=True)
class _Trainer:
    """The progress of one trainer."""

    loop: str = ""
    """Identity of the training loop that runs."""
    first_step: int = 1
    step: int = 0
    samples: int = 0
    """Number of samples of this loop."""
    earlier_samples: float | None = None
    """Number of samples before this loop; None: not known."""
    counts: list[tuple[int, float]] = field(default_factory=list)
    """Some steps with the number of samples until then, for a later launch that resumes in between."""
    end_step: int | None = None
    note: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """loss and auc of the last interval."""

    def count(self) -> float:
        """Return the number of samples of all loops until the last step."""
        if self.earlier_samples is not None:
            return self.earlier_samples + self.samples
        steps = self.step - self.first_step + 1
        return self.samples * self.step / steps if steps > 0 else 0.0

    def return_to(self, step: int) -> None:
        """Forget what came after the step, which is trained again."""
        self.counts.append((self.step, self.count()))
        self.counts.sort()
        at = bisect_right(self.counts, (step, float("inf")))
        if at == len(self.counts):
            until = self.counts[-1][1]
        else:
            (before, low), (after, high) = self.counts[at - 1] if at else (0, 0.0), self.counts[at]
            until = low + (high - low) * (step - before) / max(1, after - before)
        self.counts[at:] = [(step, until)]
        self.earlier_samples, self.samples, self.step = until, 0, min(self.step, step)


class RunProgress:
    """Counts what all trainers of a run have done."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._trainers: dict[int, _Trainer] = {}
        self._launch: object = None
        self._running: set[int] = set()  # trainers whose loops run in this launch
        self._counts: deque[tuple[float, int, float]] = deque()  # time, step and samples of recent reports

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """Add a record of a trainer."""
        if record["kind"] == "start" and record.get("launch") != self._launch:
            self._launch = record.get("launch")
            self._running.clear()
            self._counts.clear()
        elif record["kind"] == SHOWN and all(isinstance(record.get(name), int) for name in _COUNTS):
            self._begin(rank, record)
            trainer = self._trainers[rank]
            trainer.step, trainer.samples = record["step"], record["samples"]
            trainer.note = record.get("note")
            trainer.end_step = record.get("end_step")
        elif record["kind"] == "interval" and rank in self._running:
            trainer = self._trainers[rank]
            trainer.counts.append((trainer.step, trainer.count()))
            trainer.metrics = {name: value for name in ("loss", "auc") if (value := record.get(name)) is not None}

    def report(self, now: float) -> Report | None:
        """Return the progress of all trainers; None before the first step of a launch."""
        trainers = [self._trainers[rank] for rank in self._running]
        if not trainers:
            return None
        step = min(trainer.step for trainer in trainers)
        samples = sum(trainer.count() for trainer in self._trainers.values())
        while self._counts and self._counts[0][0] < now - _RATE_SECONDS:
            self._counts.popleft()
        self._counts.append((now, step, samples))
        (before, first_step, first_samples), seconds = self._counts[0], now - self._counts[0][0]
        ends = [trainer.end_step for trainer in trainers if trainer.end_step is not None]
        return Report(
            step=step,
            samples=round(samples),
            end_step=max(ends) if len(ends) == len(trainers) else None,
            seconds=now - self._started,
            samples_per_second=(samples - first_samples) / seconds if before < now else 0.0,
            steps_per_second=(step - first_step) / seconds if before < now else 0.0,
            loss=_mean([trainer.metrics.get("loss") for trainer in trainers]),
            auc=_mean([trainer.metrics.get("auc") for trainer in trainers]),
        )

    @property
    def notes(self) -> list[str]:
        """What a trainer does beside training, in words: the note of the first trainer that has one."""
        notes = (self._trainers[rank].note for rank in sorted(self._running))
        return [str(note) for note in notes if note][:1]

    def _begin(self, rank: int, record: Mapping[str, Any]) -> None:
        """Begin to count a training loop, if it is a new one."""
        known = self._trainers.get(rank)
        if known is not None and known.loop == record.get("id"):
            return
        first = record["first"]
        if not self._running:  # all trainers of a launch resume the same checkpoint
            for trainer in self._trainers.values():
                trainer.return_to(first - 1)
        elif known is not None:
            known.return_to(first - 1)
        trainer = self._trainers.setdefault(rank, _Trainer())
        trainer.loop, trainer.first_step = str(record.get("id")), first
        trainer.metrics.clear()
        self._running.add(rank)


def _mean(values: Sequence[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return sum(given) / len(given) if given else None
