"""The table of all metrics that `--http` serves: their names, units, help and labels.

docs/metrics.md and the Grafana dashboard and alert rules in deploy/grafana are made from it (docs/metrics.py). Values
only; `samples` has the numbers and `endpoint` serves them.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
SERVER, WORKER, TRAINER, RUN = "server", "worker", "trainer", "run"
_ALL = (SERVER, WORKER, TRAINER, RUN)
_SERVICES = (SERVER, WORKER)
_TABLES = (SERVER, TRAINER)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    """Name; that of a counter without its suffix "_total"."""
    kind: Kind
    unit: str
    help: str
    roles: tuple[str, ...]
    """Commands that serve it."""
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> str:
        """Name in queries: of a counter with its suffix; of a histogram without the suffixes of its series."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _metrics(roles: tuple[str, ...], labels: tuple[str, ...], *rows: tuple[str, Kind, str, str]) -> tuple[Metric, ...]:
    """Return metrics of the same roles and labels. rows: name, kind, unit and help of each."""
    return tuple(Metric(*row, roles, labels) for row in rows)


GROUPS: dict[str, tuple[Metric, ...]] = {
    "Tables": _metrics(
        _TABLES, ("table",),
        ("satrap_table_rows", "gauge", "rows", "Rows in the table."),
        ("satrap_table_bytes", "gauge", "bytes", "Memory of the table."),
        ("satrap_table_sightings", "gauge", "ids", "Ids seen and not yet admitted."),
        ("satrap_table_lookups", "counter", "ids", "Ids of training lookups; an id counts once in each call."),
        ("satrap_table_hits", "counter", "ids", "Ids of training lookups with a row."),
        ("satrap_table_inserted", "counter", "rows", "Rows inserted."),
        ("satrap_table_refused", "counter", "ids", "Ids of training lookups that got no row."),
        ("satrap_table_evicted", "counter", "rows", "Rows removed to make room for others."),
        ("satrap_table_expired", "counter", "rows", "Rows removed because they were not used."),
        ("satrap_table_updated", "counter", "rows", "Rows updated; a row counts once in each update."),
        ("satrap_table_absent", "counter", "ids", "Ids with a gradient and without a row."),
        ("satrap_table_skipped", "counter", "gradients", "Gradients left out because they were not finite."),
        ("satrap_table_repeated", "counter", "ids", "Ids of updates that had already been applied."),
    ),
    "Calls": (
        *_metrics(_SERVICES, (), ("satrap_calls", "counter", "calls", "Calls accepted.")),
        Metric("satrap_call_seconds", "histogram", "seconds",
            "Time from the start of a call to its reply, including waits for other trainers.", _SERVICES, ("method",)),
        *_metrics(
            _SERVICES, (),
            ("satrap_calls_queued", "gauge", "calls", "Calls that wait for a thread."),
            ("satrap_calls_running", "gauge", "calls", "Calls that run or wait for other trainers."),
            ("satrap_calls_duplicate", "counter", "calls", "Duplicates of open calls."),
            ("satrap_calls_busy", "counter", "calls", "Calls refused because too many were open; callers retry."),
            ("satrap_calls_expired", "counter", "calls", "Calls whose deadline passed in the queue."),
            ("satrap_calls_failed", "counter", "calls", "Calls answered with an error."),
            ("satrap_calls_unsent", "counter", "calls", "Replies whose caller was disconnected."),
            ("satrap_frames_bad", "counter", "messages", "Messages that were not readable or named an unknown method."),
            ("satrap_connections_ended", "counter", "connections", "Connections that a limit has ended."),
            ("satrap_received_bytes", "counter", "bytes", "Bytes of messages received."),
            ("satrap_sent_bytes", "counter", "bytes", "Bytes of replies sent."),
        ),
    ),
    "Training": (
        Metric("satrap_attempt", "gauge", "", "Number of the current attempt; 0 before the first.", _SERVICES),
        Metric("satrap_step", "gauge", "steps", "Latest step.", _TABLES),
        Metric("satrap_staleness_steps", "histogram", "steps",
            "Earlier steps of the same trainer whose updates a lookup missed, for each batch.", (TRAINER,)),
        Metric("satrap_staleness_bound_steps", "gauge", "steps", "Largest staleness permitted.", (TRAINER,)),
        Metric("satrap_missed_updates", "histogram", "updates",
            "Updates of other trainers that a server applied between a lookup and its update, for each update.",
            (SERVER,)),
        Metric("satrap_stage_seconds", "counter", "seconds",
            "Time in each stage of the prefetch pipeline: read, lookup, update, wait.", (TRAINER,), ("stage",)),
        *_metrics(
            (TRAINER,), (),
            ("satrap_stream_seconds", "counter", "seconds", "Time of the training loop in calls of its stream."),
        ),
        Metric("satrap_lost", "counter", "",
            "Batches, samples and ids not trained on, by cause.", (TRAINER,), ("what",)),
        Metric("satrap_sessions", "gauge", "trainers", "Trainers with a session in this worker.", (WORKER,)),
    ),
    "Saves, restores and migrations": (
        *_metrics(
            (TRAINER,), (),
            ("satrap_checkpoints", "counter", "checkpoints", "Checkpoints that this trainer has saved."),
            ("satrap_checkpoints_failed", "counter", "saves", "Saves of checkpoints that failed."),
            ("satrap_last_checkpoint_step", "gauge", "steps", "Step of the last checkpoint."),
            ("satrap_last_checkpoint_seconds", "gauge", "seconds", "Duration of the last checkpoint."),
            ("satrap_last_checkpoint_pause_seconds", "gauge", "seconds",
                "Time that training waited for the last checkpoint."),
            ("satrap_last_checkpoint_timestamp_seconds", "gauge", "seconds",
                "Unix time of the last checkpoint that this process saved or resumed; 0 before the first."),
        ),
        *_metrics(
            _TABLES, ("work",),  # save, verify or restore
            ("satrap_snapshots", "counter", "", "Saves, verifications and restores of tables completed."),
            ("satrap_snapshots_running", "gauge", "", "Saves, verifications and restores of tables in progress."),
            ("satrap_snapshot_done_bytes", "gauge", "bytes", "Bytes that the work in progress has moved."),
            ("satrap_snapshot_expected_bytes", "gauge", "bytes",
                "Estimate of all bytes of the work in progress; 0 if not known, as for a delta."),
            ("satrap_snapshot_left_seconds", "gauge", "seconds",
                "Estimate of the time until the work in progress is completed; absent if not known."),
            ("satrap_last_snapshot_bytes", "gauge", "bytes", "Bytes of the last completed work."),
            ("satrap_last_snapshot_seconds", "gauge", "seconds", "Duration of the last completed work."),
        ),
        Metric("satrap_buckets", "gauge", "buckets",
            "Buckets that this server owns, has frozen for a migration, or is receiving.", (SERVER,), ("state",)),
        Metric("satrap_moved_rows", "counter", "rows",
            "Rows that migrations sent and received.", (SERVER,), ("direction",)),
        Metric("satrap_migration_buckets", "gauge", "buckets",
            "Buckets that the migration in progress moves, and has moved.", (RUN,), ("state",)),
    ),
    "Processes": (
        Metric("satrap_info", "gauge", "",
            "1, labelled with the kind of process and the release.", _ALL, ("process", "version")),
        Metric("satrap_ready", "gauge", "", "1 if /readyz answers that the process is ready, otherwise 0.", _ALL),
        Metric("satrap_memory_used_bytes", "gauge", "bytes",
            "Memory in use: of the machine or container (machine), and of the file system that holds the rows (rows).",
            _ALL, ("of",)),
        Metric("satrap_memory_allowed_bytes", "gauge", "bytes", "Limit of the memory in use.", _ALL, ("of",)),
        Metric("satrap_run_launches", "counter", "launches", "Launches of the trainers.", (RUN,)),
        Metric("satrap_run_restarts", "counter", "restarts", "Restarts of processes.", (RUN,), ("process",)),
        Metric("satrap_run_faults", "counter", "faults", "Failures of processes and migrations.", (RUN,)),
        Metric("satrap_run_processes", "gauge", "processes", "Processes of the run.", (RUN,), ("process", "state")),
    ),
}  # fmt: skip
METRICS: dict[str, Metric] = {metric.name: metric for group in GROUPS.values() for metric in group}
