"""The text of a report: a line, and a bar that fits the terminal; and sums of counters."""

import re
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from example_reports import BARE, EVALUATED, FULL
from satrap.monitor.report import Counters, Report, bar, line, short


def test_line() -> None:
    assert line(FULL) == (
        "step 1,200 of 2,400 | 4.92M samples in 01:02, 01:02 left | 81.2k/s | loss 0.4412 | AUC 0.7812 NE 0.8401 of "
        "the last 65.5k | staleness 3.2, at most 4 | 1.23M rows | "
        "lost 2 batches/overflow, 1.5k rows/malformed | ms/step lookup 2.1 dense 40.2"
    )
    assert " | lost 3 batches/unused | cut 1.5k ids/clicked | ms/step" in line(
        replace(FULL, lost={"batches/unused": 3, "ids/clicked": 1500})
    )
    evaluated = (
        "step 1,200 of 2,400 | evaluation auc 0.7900 log_loss 0.4321 (best) | 4.92M samples in 01:02, 01:02 left | "
        "training loss 0.4412 | AUC 0.7812 NE 0.8401 of the last 65.5k"
    )
    assert line(EVALUATED) == evaluated
    assert line(replace(EVALUATED, is_best=False)) == evaluated.replace(" (best)", "")
    by_loss = replace(EVALUATED, best_by="log_loss")
    assert line(by_loss) == evaluated.replace("(best)", "(best log_loss)")
    assert line(replace(by_loss, is_best=False)) == evaluated.replace(" (best)", "")
    assert line(BARE) == "step 3 | 30 samples in 1:02:05 | 0/s"


def test_bar() -> None:
    assert bar(FULL, 80) == "##########..........  50% | step 1,200 of 2,400"
    assert bar(FULL, 92, "█░").startswith("██████████░░░░░░░░░░  50% | step 1,200 of 2,400 | 4.92M")
    assert bar(FULL, 400).endswith(line(FULL))
    assert bar(BARE, 400) == line(BARE)


def test_a_bar_of_the_steps_of_a_stream() -> None:
    report = Report(step=30, samples=300, end_step=120, seconds=10.0, samples_per_second=30.0, steps_per_second=3.0)
    assert bar(report, 100) == "#####...............  25% | step 30 of 120 | 300 samples in 00:10, 00:30 left | 30/s"


@given(st.integers(0, 200), st.sampled_from([FULL, BARE]))
def test_a_bar_fits(columns: int, report: Report) -> None:
    assert len(bar(report, columns)) <= columns


@example(999_500_000_000)
@given(st.integers(0, 10**14))
def test_short_numbers_are_close_and_short(number: int) -> None:
    text = short(number)
    value, letter = re.fullmatch(r"([\d.e+]+)([kMGT]?)", text).groups()  # type: ignore[union-attr]
    assert float(value) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[letter] == pytest.approx(number, rel=0.006)
    assert len(text) <= 5


def test_short_numbers() -> None:
    texts = [short(number) for number in (0, 7, 950, 999, 1000, 81_234, 999_600, 4_915_200, 2.13e9)]
    assert texts == ["0", "7", "950", "999", "1k", "81.2k", "1M", "4.92M", "2.13G"]


@given(st.lists(st.tuples(st.dictionaries(st.integers(0, 3), st.integers(0, 9)), st.integers(0, 5)), max_size=5))
def test_counters_add(drawn: list[tuple[dict[int, int], int]]) -> None:
    total = Counters()
    for seen, lost in drawn:
        total += Counters(rows={"item": lost}, staleness=seen, stages={"read": 0.5}, inside=2.0, lost={"ids/a": lost})
    assert +Counter(total.staleness) == +sum((Counter(seen) for seen, _ in drawn), Counter())
    assert total.inside == (2.0 * len(drawn) if drawn else None)
    if drawn:
        assert total.rows == {"item": drawn[-1][1]}
        assert (total.stages, total.lost) == ({"read": 0.5 * len(drawn)}, {"ids/a": sum(lost for _, lost in drawn)})
