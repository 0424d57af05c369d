"""Samples of metrics: the numbers of one scrape, and functions that turn counters which exist anyway into samples.

A scrape calls these functions; nothing is counted for it while the program trains. Objects of a trainer, whose script
creates them, register themselves as sources; `collect` reads those that still exist.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from satrap.monitor.metric_table import METRICS
from satrap.monitor.report import Counters

STALENESS_BOUNDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 128)
_TABLE_COUNTS = (
    *("rows", "bytes", "sightings", "lookups", "hits", "inserted", "refused"),
    *("evicted", "expired", "updated", "skipped", "repeated"),
)
_CALL_COUNTS = {
    "arrived": "satrap_calls", "queued": "satrap_calls_queued", "running": "satrap_calls_running",
    "duplicates": "satrap_calls_duplicate", "busy": "satrap_calls_busy", "expired": "satrap_calls_expired",
    "failed": "satrap_calls_failed", "unsent": "satrap_calls_unsent", "bad": "satrap_frames_bad",
    "ended_connections": "satrap_connections_ended", "received_bytes": "satrap_received_bytes",
    "sent_bytes": "satrap_sent_bytes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of a histogram."""

    bounds: Sequence[float]
    """Upper bounds of the bins; one more bin holds what is above the last."""
    counts: Sequence[int]
    """Number of observations in each bin, which the bins below are not added to."""
    total: float
    """Sum of all observations."""

    def __add__(self, other: "Distribution") -> "Distribution":
        assert self.bounds == other.bounds
        counts = [one + two for one, two in zip(self.counts, other.counts, strict=True)]
        return Distribution(self.bounds, counts, self.total + other.total)


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of a metric of `METRICS`."""

    name: str
    value: float | Distribution
    labels: Mapping[str, str] = field(default_factory=dict)


class SampleSource(Protocol):
    """An object with samples."""

    def samples(self) -> Iterable[Sample]:
        """Return the current samples. Called in another thread than the one that uses the object."""


@runtime_checkable
class ReadySource(SampleSource, Protocol):
    """A source that says whether it is ready to train, as `Embeddings` does."""

    @property
    def not_ready(self) -> str:
        """Why it is not ready; "" if it is."""


_lock = threading.Lock()
_sources: list["weakref.ref[SampleSource]"] = []  # the oldest first


def register(source: SampleSource) -> None:
    """Let `collect` read this object for as long as it exists."""
    with _lock:
        _sources[:] = [reference for reference in _sources if reference() is not None]
        _sources.append(weakref.ref(source))


def collect() -> list[Sample]:
    """Return the samples of all registered objects that still exist."""
    return merged(sample for source in _live_sources() for sample in source.samples())


def not_ready() -> str:
    """Return why no registered object is ready to train; "" if one is."""
    reasons = [source.not_ready for source in _live_sources() if isinstance(source, ReadySource)]
    if not reasons:
        return "the script has not created its embeddings yet"
    return "" if "" in reasons else reasons[-1]


def _live_sources() -> list[SampleSource]:
    with _lock:
        return [source for reference in _sources if (source := reference()) is not None]


def merged(samples: Iterable[Sample]) -> list[Sample]:
    """Return one sample for each metric and labels: the sum of counters and histograms, the last of the gauges."""
    totals: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in samples:
        key = sample.name, tuple(sorted(sample.labels.items()))
        before = totals.get(key)
        if before is not None and METRICS[sample.name].kind != "gauge":
            total: Any = sample.value + before.value  # type: ignore[operator]  # both are of the metric's kind
            sample = Sample(sample.name, total, sample.labels)
        totals[key] = sample
    return list(totals.values())


def table_samples(stats: Mapping[str, Mapping[str, int]]) -> list[Sample]:
    """Return the samples of tables. stats: `Store.stats` of each."""
    return [
        Sample(name, counts[key], {"table": table})
        for table, counts in stats.items()
        for name, key in (
            *((f"satrap_table_{key}", key) for key in _TABLE_COUNTS),
            ("satrap_table_absent", "not_applied_absent"),
        )
    ]


def call_samples(
    counts: Mapping[str, int], bounds: Sequence[float], seconds: Mapping[str, tuple[Sequence[int], float]]
) -> list[Sample]:
    """Return the samples of a service: its `counts`, and the distribution of the seconds of each method that was
    called."""
    samples = [Sample(name, counts[key]) for key, name in _CALL_COUNTS.items()]
    return samples + [
        Sample("satrap_call_seconds", Distribution(bounds, number, total), {"method": method})
        for method, (number, total) in seconds.items()
        if any(number)
    ]


def training_samples(counters: Counters) -> list[Sample]:
    """Return the samples of the counters of a training session; its rows are left to `table_samples`."""
    samples = [Sample("satrap_staleness_steps", staleness_distribution(counters.staleness))]
    samples += [Sample("satrap_stage_seconds", seconds, {"stage": stage}) for stage, seconds in counters.stages.items()]
    samples += [Sample("satrap_stream_seconds", counters.inside or 0.0)]
    return samples + [Sample("satrap_lost", count, {"what": what}) for what, count in counters.lost.items()]


def staleness_distribution(seen: Mapping[int, int]) -> Distribution:
    """Return the distribution of the staleness of batches. seen: how many batches missed n steps."""
    counts = [0] * (len(STALENESS_BOUNDS) + 1)
    for steps, batches in seen.items():
        counts[sum(bound < steps for bound in STALENESS_BOUNDS)] += batches
    return Distribution(STALENESS_BOUNDS, counts, float(sum(steps * batches for steps, batches in seen.items())))


def snapshot_samples(transfers: Mapping[str, Mapping[str, Any]]) -> list[Sample]:
    """Return the samples of saves, verifications and restores. transfers: `Transfers.to_dict`."""
    return [
        Sample(name, figures[key], {"work": work})
        for work, figures in transfers.items()
        for name, key in (
            ("satrap_snapshots", "completed"),
            ("satrap_snapshots_running", "running"),
            ("satrap_snapshot_done_bytes", "bytes"),
            ("satrap_snapshot_expected_bytes", "total"),
            ("satrap_snapshot_left_seconds", "seconds_left"),
            ("satrap_last_snapshot_bytes", "last_bytes"),
            ("satrap_last_snapshot_seconds", "seconds"),
        )
        if figures[key] is not None
    ]


def memory_samples(memory: Mapping[str, Sequence[int]]) -> list[Sample]:
    """Return the samples of memory. memory: bytes used and allowed, as `satrap.monitor.memory.memory` returns them."""
    return [
        Sample(f"satrap_memory_{what}_bytes", value, {"of": of})
        for of, numbers in memory.items()
        for what, value in zip(("used", "allowed"), numbers, strict=True)
    ]
