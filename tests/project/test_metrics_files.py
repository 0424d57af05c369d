"""docs/metrics.md, the dashboard and the alert rules are those that the table of metrics makes, and the rules fire when
they should.

promtool, which comes with Prometheus (apt install prometheus), checks the rules and evaluates them on made-up series.
Without it the rules are only parsed, and their names compared with the table.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from satrap.monitor.metric_table import METRICS

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/grafana/alerts.yml"
DASHBOARD = ROOT / "deploy/grafana/dashboard.json"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (apt install prometheus): the alert rules are parsed, but not evaluated",
)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "docs/metrics.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def test_the_files_are_made_from_the_table() -> None:
    for path, text in generator().FILES.items():
        assert path.read_text() == text(), f"{path.relative_to(ROOT)} is older than the table: run make reference"


def series_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:satrap|process)_[a-z_]+", query))


def test_queries_use_only_series_that_are_served() -> None:
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules()]
    served = {metric.series for metric in METRICS.values()} | {"process_start_time_seconds"}
    for metric in METRICS.values():
        if metric.kind == "histogram":
            served = served - {metric.series} | {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    assert all(series_in(query) and series_in(query) <= served for query in queries), served
    shown = {name for query in queries for name in series_in(query)}
    assert {metric for metric in served if metric.startswith("satrap_") and not metric.endswith("_sum")} <= (
        shown | {"satrap_call_seconds_count", "satrap_staleness_steps_bucket"}
    ), "each metric is on the dashboard or in a rule"


def test_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_rules_cover_what_must_not_be_missed() -> None:
    assert {"SatrapMemory", "SatrapStalenessAtBound", "SatrapLastSaveTooOld", "SatrapRestarts"} <= {
        rule["alert"] for rule in rules()
    }
    assert all(
        rule["annotations"].keys() == {"summary", "description"} and rule["labels"]["severity"] for rule in rules()
    )


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and f"{len(rules())} rules found" in done.stdout, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_configuration() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", str(ALERTS.with_name("prometheus.yml"))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "is valid prometheus config" in done.stdout, done.stdout + done.stderr


# Series of one minute each, the time in minutes, and the alerts that fire then.
FIRING: list[tuple[dict[str, str], int, set[str]]] = [
    ({'satrap_memory_used_bytes{of="rows"}': "79x30", 'satrap_memory_allowed_bytes{of="rows"}': "100x30"}, 20, set()),
    (
        {'satrap_memory_used_bytes{of="rows"}': "81x30", 'satrap_memory_allowed_bytes{of="rows"}': "100x30"},
        20,
        {"SatrapMemory"},
    ),
    (
        {
            "satrap_staleness_bound_steps": "3x40",
            "satrap_staleness_steps_sum": "0+30x40",
            "satrap_staleness_steps_count": "0+10x40",
        },
        30,
        {"SatrapStalenessAtBound"},
    ),
    (
        {
            "satrap_staleness_bound_steps": "3x40",
            "satrap_staleness_steps_sum": "0+25x40",
            "satrap_staleness_steps_count": "0+10x40",
        },
        30,
        set(),
    ),
    (
        {
            "satrap_staleness_bound_steps": "0x40",
            "satrap_staleness_steps_sum": "0x40",
            "satrap_staleness_steps_count": "0+10x40",
        },
        30,
        set(),
    ),
    ({"satrap_last_checkpoint_timestamp_seconds": "60x200"}, 120, set()),
    ({"satrap_last_checkpoint_timestamp_seconds": "60x200"}, 130, {"SatrapLastSaveTooOld"}),
    (
        {"satrap_last_checkpoint_timestamp_seconds": "0x200", "process_start_time_seconds": "60x200"},
        130,
        {"SatrapNeverSaved"},
    ),
    ({"process_start_time_seconds": "60x200"}, 130, set()),
    ({'satrap_run_restarts_total{process="server"}': "0x10 1x20"}, 20, {"SatrapRestarts"}),
    ({'satrap_run_restarts_total{process="server"}': "0x10 1x30"}, 35, set()),
    ({'satrap_run_restarts_total{process="server"}': "0+1x30"}, 20, {"SatrapRestarts", "SatrapRestartsRepeatedly"}),
    ({"satrap_ready": "0x30"}, 20, {"SatrapNotReady"}),
    ({"satrap_ready": "1x30"}, 20, set()),
    ({"satrap_checkpoints_failed_total": "0x10 1x30"}, 20, {"SatrapSaveFailed"}),
    ({"satrap_checkpoints_failed_total": "1x60"}, 50, set()),
    ({"satrap_step": "0+100x40"}, 30, set()),
    ({"satrap_step": "0+100x10 1000x30"}, 30, {"SatrapNoStep"}),
    (
        {
            'satrap_step{job="a",instance="s"}': "0+100x10 1000x30",
            'satrap_step{job="a",instance="t"}': "0+100x40",
        },
        30,
        set(),
    ),
    (
        {
            'satrap_step{job="a",instance="t"}': "500x40",
            'satrap_snapshots_running{job="a",instance="s",work="restore"}': "1x40",
        },
        30,
        set(),
    ),
    ({'satrap_info{job="a",instance="r",process="run"}': "1x20"}, 25, set()),
    ({'satrap_info{job="a",instance="r",process="run"}': "1x20"}, 30, {"SatrapRunEnded"}),
    (
        {
            'satrap_info{job="a",instance="r",process="run"}': "1x40",
            'satrap_info{job="a",instance="t",process="trainer"}': "1x20",
        },
        30,
        set(),
    ),
    (
        {'satrap_info{job="a",instance="s",process="server"}': "1x20", 'up{job="a",instance="s"}': "1x20 0x20"},
        30,
        {"SatrapTargetDown"},
    ),
    ({'up{job="other",instance="x"}': "0x40"}, 30, set()),
]


@needs_promtool
@pytest.mark.parametrize(("series", "minutes", "expected"), FIRING)
def test_alerts_fire(series: dict[str, str], minutes: int, expected: set[str], tmp_path: Path) -> None:
    inputs = [
        {"series": name if "{" in name else f'{name}{{instance="a:1"}}', "values": re.sub(r"^(\d+)x", r"\1+0x", values)}
        for name, values in series.items()
    ]
    firing = {f"{rule['alert']}": rule for rule in rules()}
    checks = [
        {
            "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
            "eval_time": f"{minutes}m",
            "exp_samples": [{"value": int(name in expected)}],
        }
        for name in firing
    ]
    tests = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": checks}],
    }
    (file := tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
