"""Generates docs/metrics.md, and the dashboard and alert rules in deploy/grafana, from the table of metrics.

`make reference` writes the files after a change of `satrap.monitor.metric_table`; tests/project/test_metrics_files.py
compares them with the table, and checks the rules with promtool where there is one.
"""

import json
from pathlib import Path
from typing import Any

from satrap.monitor.metric_table import GROUPS, METRICS, Metric

ROOT = Path(__file__).parents[1]
_HEAD = """\
# Metrics

With `--http PORT`, each server, worker, trainer and run serves three pages: `/metrics` for
[Prometheus](https://prometheus.io), `/healthz`, which answers 200 while the process is alive, and `/readyz`, which
answers 200 while it is ready and otherwise 503 with the reason. [Monitoring](monitoring.md) shows the setup. Timing
the calls takes 0.06 % of the CPU time of a step of 512 ids (0.68 of 1,129 µs on an AMD EPYC), less of a larger one.
A scrape takes 7.6 ms of CPU time: 0.05 % of a core for one scrape every 15 seconds.

A name that ends in `_total` belongs to a counter, which starts at 0 with the process. A histogram `NAME` has the series
`NAME_bucket`, `NAME_sum` and `NAME_count`. Every endpoint also serves prometheus_client's `process_*`: resident memory,
CPU seconds, open files, start time. The last column names the processes that serve a metric; a trainer serves the
metrics of tables if it holds the rows itself.
"""
_FOOT = """\

This page, the dashboard `deploy/grafana/dashboard.json` and the rules `deploy/grafana/alerts.yml` are made from
`src/satrap/monitor/metric_table.py` by `docs/metrics.py`.
"""
# The panels of the dashboard: group, title, unit in Grafana, and queries with their legends.
_PANELS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Run", "Processes", "short", (("sum by (process, state) ({satrap_run_processes})", "{{process}} {{state}}"),)),
    ("Run", "Ready", "short", (("{satrap_ready}", "{{instance}}"),)),
    (
        "Run",
        "Processes that are scraped, by release",
        "short",
        (("count by (process, version) ({satrap_info})", "{{process}} {{version}}"),),
    ),
    ("Run", "Launches", "short", (("{satrap_run_launches}", "{{instance}}"),)),
    (
        "Run",
        "Restarts and faults in 10 minutes",
        "short",
        (
            ("sum by (process) (increase({satrap_run_restarts}[10m]))", "{{process}} restarts"),
            ("increase({satrap_run_faults}[10m])", "faults"),
        ),
    ),
    (
        "Run",
        "Memory in use",
        "percentunit",
        (("{satrap_memory_used_bytes} / {satrap_memory_allowed_bytes}", "{{instance}} {{of}}"),),
    ),
    ("Training", "Steps per second", "short", (("clamp_min(deriv({satrap_step}[1m]), 0)", "{{instance}}"),)),
    (
        "Training",
        "Staleness: mean and bound",
        "short",
        (
            (
                "rate({satrap_staleness_steps}_sum[5m]) / rate({satrap_staleness_steps}_count[5m])",
                "{{instance}} mean",
            ),
            ("{satrap_staleness_bound_steps}", "{{instance}} bound"),
        ),
    ),
    (
        "Training",
        "Updates of other trainers that an update missed",
        "short",
        (
            ("rate({satrap_missed_updates}_sum[5m]) / rate({satrap_missed_updates}_count[5m])", "{{instance}} mean"),
            ("histogram_quantile(0.99, rate({satrap_missed_updates}_bucket[5m]))", "{{instance}} 99 %"),
        ),
    ),
    (
        "Training",
        "Time in each stage",
        "percentunit",
        (("rate({satrap_stage_seconds}[1m])", "{{instance}} {{stage}}"),),
    ),
    (
        "Training",
        "Time of the loop in its stream",
        "percentunit",
        (("rate({satrap_stream_seconds}[1m])", "{{instance}}"),),
    ),
    (
        "Training",
        "Attempt, and sessions with workers",
        "short",
        (("max by (job) ({satrap_attempt})", "attempt"), ("{satrap_sessions}", "{{instance}} sessions")),
    ),
    ("Training", "Lost", "short", (("{satrap_lost}", "{{instance}} {{what}}"),)),
    ("Tables", "Rows", "short", (("sum by (table) ({satrap_table_rows})", "{{table}}"),)),
    ("Tables", "Ids not yet admitted", "short", (("sum by (table) ({satrap_table_sightings})", "{{table}}"),)),
    (
        "Tables",
        "Rows updated per second",
        "short",
        (("sum by (table) (rate({satrap_table_updated}[1m]))", "{{table}}"),),
    ),
    ("Tables", "Memory", "bytes", (("sum by (table) ({satrap_table_bytes})", "{{table}}"),)),
    (
        "Tables",
        "Lookups per second",
        "short",
        (("sum by (table) (rate({satrap_table_lookups}[1m]))", "{{table}}"),),
    ),
    (
        "Tables",
        "Share of lookups with a row",
        "percentunit",
        (
            (
                "sum by (table) (rate({satrap_table_hits}[5m])) / sum by (table) (rate({satrap_table_lookups}[5m]))",
                "{{table}}",
            ),
        ),
    ),
    (
        "Tables",
        "Rows inserted, evicted, expired, refused per second",
        "short",
        tuple(
            (f"sum by (table) (rate({{satrap_table_{what}}}[1m]))", f"{{{{table}}}} {what}")
            for what in ("inserted", "evicted", "expired", "refused")
        ),
    ),
    (
        "Tables",
        "Gradients skipped, ids without a row, repeated ids per second",
        "short",
        tuple(
            (f"sum by (table) (rate({{satrap_table_{what}}}[1m]))", f"{{{{table}}}} {what}")
            for what in ("skipped", "absent", "repeated")
        ),
    ),
    (
        "Calls",
        "99th percentile of a call's time",
        "s",
        (("histogram_quantile(0.99, sum by (le, method) (rate({satrap_call_seconds}_bucket[5m])))", "{{method}}"),),
    ),
    (
        "Calls",
        "Calls per second",
        "short",
        (("sum by (method) (rate({satrap_call_seconds}_count[1m]))", "{{method}}"),),
    ),
    (
        "Calls",
        "Calls accepted, and connections ended by a limit, per second",
        "short",
        (
            ("sum by (instance) (rate({satrap_calls}[1m]))", "{{instance}} accepted"),
            ("sum by (instance) (rate({satrap_connections_ended}[1m]))", "{{instance}} ended"),
        ),
    ),
    (
        "Calls",
        "Queue",
        "short",
        (("{satrap_calls_queued}", "{{instance}} queued"), ("{satrap_calls_running}", "{{instance}} running")),
    ),
    (
        "Calls",
        "Refused, repeated and failed calls per second",
        "short",
        tuple(
            (f"sum by (instance) (rate({{{name}}}[1m]))", f"{{{{instance}}}} {name.rpartition('_')[2]}")
            for name in (
                *("satrap_calls_busy", "satrap_calls_duplicate", "satrap_calls_expired"),
                *("satrap_calls_failed", "satrap_calls_unsent", "satrap_frames_bad"),
            )
        ),
    ),
    (
        "Calls",
        "Network",
        "Bps",
        (
            ("rate({satrap_received_bytes}[1m])", "{{instance}} received"),
            ("rate({satrap_sent_bytes}[1m])", "{{instance}} sent"),
        ),
    ),
    (
        "Checkpoints and migrations",
        "Age of the last checkpoint",
        "s",
        (("time() - ({satrap_last_checkpoint_timestamp_seconds} > 0)", "{{instance}}"),),
    ),
    (
        "Checkpoints and migrations",
        "Duration of the last checkpoint, and pause of training",
        "s",
        (
            ("{satrap_last_checkpoint_seconds}", "{{instance}} duration"),
            ("{satrap_last_checkpoint_pause_seconds}", "{{instance}} pause"),
        ),
    ),
    (
        "Checkpoints and migrations",
        "Checkpoints saved and failed",
        "short",
        (
            ("{satrap_checkpoints}", "{{instance}} saved"),
            ("{satrap_checkpoints_failed}", "{{instance}} failed"),
        ),
    ),
    (
        "Checkpoints and migrations",
        "Step of the last checkpoint",
        "short",
        (("{satrap_last_checkpoint_step}", "{{instance}}"),),
    ),
    (
        "Checkpoints and migrations",
        "Tables: duration of the last save, verification or restore, and time left",
        "s",
        (
            ("max by (work) ({satrap_last_snapshot_seconds})", "{{work}}: slowest server"),
            ("max by (work) ({satrap_snapshot_left_seconds})", "{{work}} left"),
        ),
    ),
    (
        "Checkpoints and migrations",
        "Tables: bytes of the last save, verification or restore",
        "bytes",
        (("sum by (work) ({satrap_last_snapshot_bytes})", "{{work}}"),),
    ),
    (
        "Checkpoints and migrations",
        "Tables: saves, verifications and restores",
        "short",
        (
            ("sum by (work) ({satrap_snapshots})", "{{work}} completed"),
            ("sum by (work) ({satrap_snapshots_running})", "{{work}} in progress"),
        ),
    ),
    (
        "Checkpoints and migrations",
        "Buckets of the migration in progress",
        "short",
        (("{satrap_migration_buckets}", "{{state}}"),),
    ),
    (
        "Checkpoints and migrations",
        "Saves and restores in progress",
        "percentunit",
        (("{satrap_snapshot_done_bytes} / ({satrap_snapshot_expected_bytes} > 0)", "{{instance}} {{work}}"),),
    ),
    ("Checkpoints and migrations", "Buckets", "short", (("{satrap_buckets}", "{{instance}} {{state}}"),)),
    (
        "Checkpoints and migrations",
        "Rows moved per second",
        "short",
        (("rate({satrap_moved_rows}[1m])", "{{instance}} {{direction}}"),),
    ),
)
# The rules: name, expression, how long it must hold, severity, summary, what to do.
_RULES = (
    (
        "SatrapTargetDown",
        "up == 0 and on (job, instance) group by (job, instance) (last_over_time({satrap_info}[1h]))",
        "2m",
        "critical",
        "{{ $labels.instance }} served metrics within the last hour, and does not answer any more",
        "Look at the process or pod, and at the end of its log; satrap status shows what the run does about it.",
    ),
    (
        "SatrapNoStep",
        "max by (job) (changes({satrap_step}[10m])) == 0 unless on (job) "
        'max by (job) ({satrap_snapshots_running}{work="restore"}) > 0',
        "5m",
        "critical",
        "no trainer of {{ $labels.job }} has made a step for 15 minutes",
        "satrap status shows whether a server, a save or the data is waited for; /readyz of each process has a reason.",
    ),
    (
        "SatrapRunEnded",
        'count by (job) (last_over_time({satrap_info}{process=~"run|trainer"}[15m])) '
        'unless count by (job) ({satrap_info}{process=~"run|trainer"})',
        "1m",
        "warning",
        "the run of {{ $labels.job }} has ended: neither it nor a trainer serves metrics",
        "Read the end of the run's log; if it did not end by itself, run the command again: it resumes.",
    ),
    (
        "SatrapSaveFailed",
        "increase({satrap_checkpoints_failed}[30m]) > 0",
        "0m",
        "critical",
        "{{ $labels.instance }} could not save a checkpoint",
        "See the log of satrap.checkpoint: it has the file and the cause. Make room, or repair the storage.",
    ),
    (
        "SatrapMemory",
        "{satrap_memory_used_bytes} / {satrap_memory_allowed_bytes} > 0.8",
        "5m",
        "warning",
        "memory of {{ $labels.instance }} ({{ $labels.of }}) is {{ $value | humanizePercentage }} full",
        "Add servers (satrap scale), or bound the tables with capacity= or expire_after=.",
    ),
    (
        "SatrapStalenessAtBound",
        "{satrap_staleness_bound_steps} > 0 and rate({satrap_staleness_steps}_sum[5m]) "
        "/ rate({satrap_staleness_steps}_count[5m]) >= 0.99 * {satrap_staleness_bound_steps}",
        "10m",
        "info",
        "lookups of {{ $labels.instance }} always miss as many steps as permitted",
        "Updates take longer than a step: add servers or threads, or accept the staleness.",
    ),
    (
        "SatrapLastSaveTooOld",
        "time() - ({satrap_last_checkpoint_timestamp_seconds} > 0) > 7200",
        "1m",
        "warning",
        "the last checkpoint of {{ $labels.instance }} is {{ $value | humanizeDuration }} old",
        "See the log of satrap.checkpoint; make room where checkpoints are saved.",
    ),
    (
        "SatrapNeverSaved",
        "time() - process_start_time_seconds > 7200 and on (instance) {satrap_last_checkpoint_timestamp_seconds} == 0",
        "1m",
        "warning",
        "{{ $labels.instance }} has not saved a checkpoint since it started",
        "See the log of satrap.checkpoint; make room where checkpoints are saved.",
    ),
    (
        "SatrapRestarts",
        "sum by (instance, process) (increase({satrap_run_restarts}[15m])) > 0",
        "0m",
        "warning",
        "processes of the run were started again: {{ $labels.process }}",
        "Read the end of the process's log in the run's logs/.",
    ),
    (
        "SatrapRestartsRepeatedly",
        "sum by (instance, process) (increase({satrap_run_restarts}[15m])) > 3",
        "0m",
        "critical",
        "processes of the run are started again and again: {{ $labels.process }}",
        "Stop the run and read the end of the process's log in its logs/.",
    ),
    (
        "SatrapNotReady",
        "{satrap_ready} == 0",
        "10m",
        "warning",
        "{{ $labels.instance }} has not been ready for 10 minutes",
        "GET /readyz of the process has the reason.",
    ),
)


def query(template: str) -> str:
    """Return a query, whose names of metrics in braces become those of their series."""
    for name in sorted(METRICS, key=len, reverse=True):
        template = template.replace(f"{{{name}}}", METRICS[name].series)
    return template


def page() -> str:
    """Return the text of docs/metrics.md."""
    lines = [_HEAD]
    for group, metrics in GROUPS.items():
        lines += [
            f"## {group}\n",
            "| metric | kind | unit | labels | what it is | served by |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(metric) for metric in metrics]
        lines.append("")
    lines += ["## Alerts\n", "| rule | fires after | severity | what to do |", "|---|---|---|---|"]
    lines += [f"| {name} | {seconds} | {severity} | {to_do} |" for name, _, seconds, severity, _, to_do in _RULES]
    return "\n".join(lines) + "\n" + _FOOT


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    cells = (f"`{metric.series}`", metric.kind, metric.unit, labels, metric.help, ", ".join(metric.roles))
    return f"| {' | '.join(cells)} |"


def alerts() -> str:
    """Return the text of the alert rules, in YAML, of which JSON's strings are a part."""
    lines = ["# Made by docs/metrics.py. Thresholds are suggestions: copy the file and change them.", "groups:"]
    lines += ["  - name: satrap", "    rules:"]
    for name, expression, seconds, severity, summary, to_do in _RULES:
        lines += [
            f"      - alert: {name}",
            f"        expr: {json.dumps(query(expression))}",
            f"        for: {seconds}",
            f"        labels: {{severity: {severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(summary)}",
            f"          description: {json.dumps(to_do)}",
        ]
    return "\n".join(lines) + "\n"


def dashboard() -> str:
    """Return the text of the Grafana dashboard."""
    panels: list[dict[str, Any]] = []
    group, column, row = "", 0, 0
    for number, (of, title, unit, queries) in enumerate(_PANELS):
        if of != group:
            row += 8 if column else 0
            place = {"x": 0, "y": row, "w": 24, "h": 1}
            panels.append({"id": 100 + number, "type": "row", "title": of, "gridPos": place, "panels": []})
            group, column, row = of, 0, row + 1
        panels.append(_panel(number + 1, title, unit, queries, {"x": column, "y": row, "w": 12, "h": 8}))
        column, row = (12, row) if column == 0 else (0, row + 8)
    source = {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    }
    content = {
        "title": "Satrap",
        "uid": "satrap",
        "tags": ["satrap"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }
    return json.dumps(content, indent=1) + "\n"


def _panel(
    number: int, title: str, unit: str, queries: tuple[tuple[str, str], ...], place: dict[str, int]
) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + i), "datasource": source, "expr": query(each), "legendFormat": legend}
        for i, (each, legend) in enumerate(queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


FILES = {
    ROOT / "docs/metrics.md": page,
    ROOT / "deploy/grafana/alerts.yml": alerts,
    ROOT / "deploy/grafana/dashboard.json": dashboard,
}

if __name__ == "__main__":
    for path, text in FILES.items():
        path.write_text(text())
        print(path.relative_to(ROOT))
