"""The ratios in README and docs/comparison.md are those of the committed records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.ranges import STORE, medians, ratios, table, table_of_direct, tables

ROOT = Path(__file__).parents[2]


def test_the_tables_are_made_of_the_records() -> None:
    comparison = (ROOT / "docs/comparison.md").read_text()
    for lines in tables():
        assert "\n".join(lines) in comparison, "docs/comparison.md differs from `python -m benchmarks.ranges`"


def test_the_results_of_the_readme_are_those_of_the_records() -> None:
    cases = [
        "20Mx64/adagrad/zipf/2t",
        "20Mx16/rowwise/zipf/2t",
        "20Mx16/rowwise/zipf/2t num_rows",
        "20Mx16/light/bf16/adagrad/2t",
        "20Mx16/heavy/fp32/adagrad/2t",
    ]
    readme = (ROOT / "README.md").read_text()
    found = re.findall(r"^\| .* \| (\S+) to (\S+) \|$", readme, re.MULTILINE)
    of_cases = [medians(f"train/{case}") for case in cases]
    worst_and_best = [(min(processors), max(processors)) for processors in of_cases]
    assert found == [(f"{worst:.1f}", f"{best:.1f}") for worst, best in worst_and_best]


def record(case: str, cpu: str, date: str, ratio: float | None, one_thread: float | None = None) -> dict[str, Any]:
    figures = {name: {"median": each, "low": each, "high": each} for name, each in (("ratio", ratio),) if each}
    if one_thread:
        figures["ratio_1t"] = {"median": one_thread, "low": one_thread, "high": one_thread}
    return {"case": case, "date": date, "machine": {"cpu": cpu}, "figures": figures}


def test_the_newest_record_of_each_processor_counts_and_the_worst_is_first() -> None:
    xeon, epyc = "Intel(R) Xeon(R) Processor", "AMD EPYC (family 26, model 2, stepping 1)"
    without_a_peer = record("a/2t", xeon, "2026-04", 7.0)
    without_a_peer["figures"]["ratio"]["all_peers_present"] = False
    measured = ratios(
        [
            record("a/2t", xeon, "2026-02", 3.0),
            record("a/2t", xeon, "2026-01", 9.0),
            record("a/1t", xeon, "2026-01", 2.0),
            record("a/2t", epyc, "2026-01", 1.0, one_thread=0.5),
            record("a/2t", "another processor", "2026-03", 0.1),
            record("b/2t", xeon, "2026-01", None),
            without_a_peer,
        ]
    )
    assert {(case, name): median for (case, name), (median, *_) in measured.items()} == {
        ("a/2t", "Xeon"): 3.0,
        ("a/2t one thread", "Xeon"): 2.0,
        ("a/2t", "EPYC, Zen 5"): 1.0,
        ("a/2t one thread", "EPYC, Zen 5"): 0.5,
    }
    _, _, line = table({"a": "a/2t"}, "head", measured)
    assert line == "| a | 1.0 to 3.0 |  | 1.00 | 3.00 | 0.5 to 2.0 |"
    _, _, line = table({"b": "b/2t"}, "head", measured)
    assert line == "| b |  |  |  |  |  |"


def test_tables_with_num_rows_stand_beside_hashed_ones() -> None:
    name, case = next(iter(STORE.items()))
    both = record(case, "AMD EPYC (family 26, model 2, stepping 1)", "2026-02", 3.0, one_thread=2.0)
    both["figures"]["ratio_direct"] = {"median": 4.0, "low": 3.5, "high": 4.5}
    hashed = record(case, "Intel(R) Xeon(R) Processor", "2026-02", 3.0)
    _, _, *lines = table_of_direct(ratios([both, hashed]))
    assert lines == [f"| {name} | EPYC, Zen 5 | 4.00 (3.50-4.50) | 3.00 |  | 2.00 |"]


def test_all_runs_of_the_newest_day_count_together() -> None:
    """Else the last of several runs, which may be repeated until it pleases, would stand for them."""
    runs = [("01-01T08", 9.0), ("01-02T08", 1.0), ("01-02T09", 1.5), ("01-02T10", 3.0)]
    records = [record("a/2t", "Intel(R) Xeon(R) Processor", f"2026-{at}", ratio) for at, ratio in runs]
    assert ratios(records) == {("a/2t", "Xeon"): (1.5, 1.0, 3.0)}
