"""The pure parts of a report: thinning, bins, axes, escaping, and the sums over records, as properties."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import groupby, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from satrap.html_report.chart import (
    LineChart,
    Listing,
    averaged,
    axis,
    bar,
    draw,
    evenly,
    number,
    thin,
    tick_texts,
)
from satrap.html_report.figures import _validation, bins
from satrap.html_report.markup import element, escape, json_script
from satrap.html_report.run_records import Loop, Point, RunRecords, Series, cuts, rates, series_of
from satrap.html_report.summary import listings, tiles, title_of, warnings

numbers = st.floats(-1e12, 1e12)
points = st.lists(st.tuples(numbers, st.none() | numbers), max_size=200)


# -- thinning ----------------------------------------------------------------------------------------------------------


@given(points, st.integers(5, 60))
def test_thin_curves_keep_ends_extremes_and_interruptions(drawn: list[Point], limit: int) -> None:
    kept = thin(drawn, limit)
    assert len(kept) <= limit
    rest = iter(drawn)
    assert all(any(each is point for point in rest) for each in kept), "points of the curve, in its order"
    if len(drawn) <= limit:
        assert kept == drawn
        return
    assert (kept[0], kept[-1]) == (drawn[0], drawn[-1])
    before, after = ([y for _, y in each if y is not None] for each in (drawn, kept))
    assert (min(before, default=0), max(before, default=0)) == (min(after, default=0), max(after, default=0))
    assert any(y is None for _, y in drawn) == any(y is None for _, y in kept)


@given(st.integers(100, 1000), st.integers(5, 60), st.data())
def test_no_peak_is_lost(length: int, limit: int, data: st.DataObject) -> None:
    peak, dip = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2, unique=True))
    values = {peak: 2.0, dip: -2.0}
    kept = thin([(float(index), values.get(index, 0.0)) for index in range(length)], limit)
    assert {(float(peak), 2.0), (float(dip), -2.0)} <= set(kept) and len(kept) <= limit


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=2, max_size=80), st.floats(0.01, 50))
def test_a_moving_average_is_between_its_points_and_crosses_no_gap(values: list[float | None], width: float) -> None:
    found = averaged([(float(x), y) for x, y in enumerate(values)], width)
    xs = [x for x, _ in found]
    assert xs == sorted(xs)
    assert [key for key, _ in groupby(y is None for _, y in found)] == [
        key for key, _ in groupby(y is None for y in values)
    ]
    for x, y in found:
        if y is None:
            continue
        begin = max((at for at, value in enumerate(values) if value is None and at < x), default=-1)
        end = min((at for at, value in enumerate(values) if value is None and at > x), default=len(values))
        near = [
            v for at, v in enumerate(values) if v is not None and begin < at < end and abs(at - x) <= width / 2 + 1e-9
        ]
        assert min(near) - 1e-6 <= y <= max(near) + 1e-6


def test_a_moving_average_has_equal_distances_where_points_have_not() -> None:
    drawn = [(x**2 / 100, float(x % 2)) for x in range(1001)]
    found = averaged(drawn, 500.0)
    assert len(found) > 100 and len({round(two[0] - one[0], 6) for one, two in pairwise(found)}) == 1
    assert (found[0][0], found[-1][0]) == (0.0, 10_000.0)
    assert all(y is not None and abs(y - 0.5) < 0.05 for _, y in found)


@given(points, st.integers(2, 30))
def test_figures_are_evenly_spaced_points(drawn: list[Point], limit: int) -> None:
    picked = evenly(drawn, limit)
    assert len(picked) == min(limit, len(drawn))
    if drawn:
        assert (picked[0], picked[-1]) == (drawn[0], drawn[-1])


def test_figures_are_values_since_the_row_above() -> None:
    one = Series(name="one", points=[(1, 10.0), (3, 30.0)])
    two = Series(name="two", points=[(2, 5.0), (4, None), (4, 6.0), (5, None)])
    cells = re.findall(r"<td>(.*?)</td>", draw(LineChart(title="t", y="y", series=[one, two])))
    rows = [cells[begin : begin + 3] for begin in range(0, len(cells), 3)]
    assert rows == [["1", "10", ""], ["2", "", "5"], ["3", "30", ""], ["4", "", "6"], ["5", "", "not finite"]]


def test_a_long_table_says_that_it_is_cut() -> None:
    text = draw(Listing("t", ("n",), [(index,) for index in range(205)], "All."))
    assert "All. These are the first 200 of 205." in text and text.count("<tr>") == 201


@given(st.dictionaries(st.integers(0, 500), st.integers(1, 10**9), max_size=30), st.integers(1, 40))
def test_bins_lose_nothing(counts: dict[int, int], limit: int) -> None:
    found = bins(counts, limit)
    assert len(found) <= limit + 1 and sum(found.values()) == sum(counts.values())
    for name, count in found.items():
        low = int(name.removesuffix(" or more"))
        assert count == (counts.get(low, 0) if name.isdecimal() else sum(n for key, n in counts.items() if key >= low))
    assert list(found)[: max(counts, default=-1) + 1][:limit] == [
        str(n) for n in range(min(limit, max(counts, default=-1) + 1))
    ]


# -- axes and numbers --------------------------------------------------------------------------------------------------


@given(st.lists(numbers, max_size=20), st.booleans(), st.booleans())
def test_an_axis_holds_its_values(values: list[float], from_zero: bool, is_steps: bool) -> None:
    found = axis(values, 50, 500, from_zero=from_zero, is_steps=is_steps)
    room = 0.1 + 1e-6
    assert all(50 - room <= found.at(value) <= 500 + room for value in values)
    assert all(50 - room <= found.at(tick) <= 500 + room for tick in found.ticks)
    assert len(found.ticks) <= 9 and list(found.ticks) == sorted(set(found.ticks))
    if from_zero:
        assert found.low <= 0 <= found.high
    if is_steps:
        assert all(float(tick).is_integer() for tick in found.ticks)
    at = [found.at(value) for value in sorted(values)]
    assert at == sorted(at)


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=5))
def test_ticks_have_different_texts(values: list[float]) -> None:
    ticks = axis(values, 0, 100).ticks
    assert len(set(tick_texts(ticks))) == len(ticks) > 1


@given(numbers)
def test_a_number_is_close_to_its_text(value: float) -> None:
    assert math.isclose(float(number(value).replace(",", "")), value, rel_tol=1e-4, abs_tol=1e-9)
    assert number(float(int(value))).replace(",", "") == str(int(value)), "an integer in full"


def test_numbers_as_text() -> None:
    assert [number(value) for value in (None, 0.123456, 12345.67, 3.0)] == ["not finite", "0.12346", "12,345.7", "3"]


# -- escaping ----------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Reads a page as a browser does: its elements with their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


shown = st.text().filter(lambda text: escape(text) == escape(text.replace("\r", "")) and "�" not in escape(text))
hostile = shown | st.sampled_from(
    ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "<!--", "]]>"]
)


@given(hostile, hostile)
def test_text_never_becomes_markup(text: str, value: str) -> None:
    reader = Reader(element("p", text, data_x=value))
    assert reader.elements == [("p", {"data-x": value})] and reader.text == text


@given(hostile)
def test_data_blocks_hold_any_text(text: str) -> None:
    block = json_script({"name": text})
    reader = Reader(block)
    assert [tag for tag, _ in reader.elements] == ["script"] and block.count("<") == 2
    assert json.loads(reader.text) == {"name": text}


@given(hostile, hostile)
def test_charts_and_tables_hold_any_text(name: str, title: str) -> None:
    line = LineChart(title=title, y=name, notes=[name], series=[Series(name=name, points=[(1, 2.0), (2, 3.0)])] * 2)
    rows = Listing(title, (name, name), [(name, bar(0.5, 0))], name)
    parts: list[LineChart | Listing] = [line, rows]
    for part in parts:
        found, expected = Reader(draw(part)), Reader(draw(_renamed(part)))
        assert [tag for tag, _ in found.elements] == [tag for tag, _ in expected.elements]


def _renamed(part: LineChart | Listing) -> LineChart | Listing:
    if isinstance(part, Listing):
        return Listing("t", ("n", "n"), [("n", bar(0.5, 0))], "n" if part.note else "")
    series = [Series(name="n", points=each.points) for each in part.series]
    return LineChart(title="t", y="n", notes=["n"] if part.notes[0] else [], series=series)


def test_controls_and_surrogates_are_replaced() -> None:
    assert escape("a\x00b\x1b[2J\ud800") == "a\ufffdb\ufffd[2J\ufffd"
    element("p", "\ud800").encode()


# -- records -----------------------------------------------------------------------------------------------------------


def loop(rank: int, launch: int, first: int, lengths: list[int]) -> Loop:
    """Return a loop with intervals of so many steps, of one second a step and 10 samples."""
    found = Loop(rank=rank, launch=launch)
    done = 0
    for steps in lengths:
        done += steps
        place = {"first_step": first + done - steps, "step": first + done - 1, "steps": steps}
        found.intervals.append({"at": done, "seconds": done, "trained": steps, "rate": 10.0, **place})
    return found


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(st.lists(st.tuples(st.integers(1, 40), lengths), min_size=1, max_size=4))
def test_each_step_counts_once(drawn: list[tuple[int, list[int]]]) -> None:
    loops = [loop(0, launch, first, steps) for launch, (first, steps) in enumerate(drawn, 1)]
    of_loops = [[(float(one["step"]), float(each.launch)) for one in each.intervals] for each in loops]
    curve = series_of("loss", loops, of_loops)
    kept, superseded = curve.points, curve.superseded
    steps = [step for step, value in kept if value is not None]
    assert steps == sorted(set(steps)), "no step is drawn twice"
    ends = [
        (cut - 1, float(each.launch))
        for each, cut in zip(loops, cuts(loops), strict=True)
        if any(one["first_step"] < cut <= one["step"] for one in each.intervals)
    ]
    assert Counter(p for p in (*kept, *superseded) if p[1] is not None) == Counter(
        point for points in [*of_loops, ends] for point in points
    ), "an interval that was trained again in part also ends the part that counts"
    assert [p for p in kept if p in of_loops[-1]] == of_loops[-1], "the last launch counts"
    assert cuts(loops)[-1] == math.inf


@given(st.lists(st.tuples(st.integers(1, 40), lengths), min_size=1, max_size=4))
def test_the_number_of_steps_that_were_trained_again(drawn: list[tuple[int, list[int]]]) -> None:
    loops = [loop(0, launch, first, steps) for launch, (first, steps) in enumerate(drawn, 1)]
    trained = [range(first, first + sum(steps)) for first, steps in drawn]
    again = sum(
        1
        for number, steps in enumerate(trained)
        for s in steps
        if any(s >= later[0] for later in trained[number + 1 :])
    )
    notes = [note for note in warnings(RunRecords(name="run", loops=loops)) if "again" in note]
    assert notes == [] if again == 0 else f"trained {again:,} step" in notes[0]


@given(lengths, lengths, st.integers(1, 4))
def test_the_rate_of_all_trainers_is_the_sum(one: list[int], other: list[int], trainers: int) -> None:
    """All trainers of a launch have the same rate in all their intervals, which end at different times."""
    total = sum(one)
    each = [loop(rank, 1, 1, one if rank % 2 == 0 else [total]) for rank in range(trainers)]
    again = [loop(rank, 2, total + 1, other) for rank in range(trainers)]
    for launch in (each, again):
        found = rates(each + again, launch[0])
        assert [step for step, _ in found] == [interval["step"] for interval in launch[0].intervals]
        assert {rate for _, rate in found} == {10.0 * trainers}


@pytest.mark.parametrize(("watched", "value"), [("log_loss", "0.6"), ("auc", "0.7"), (None, "0.7")])
def test_the_tiles_of_validation_have_the_metric_that_decided(watched: str | None, value: str) -> None:
    """The best evaluation, and the last one if it is another."""
    judgement = {"is_best": True, "best_by": watched} if watched else {}
    run = RunRecords(name="run", loops=[loop(0, 1, 1, [1])])
    run.loops[0].start = {"at": 0.0}
    run.loops[0].intervals[0]["samples"] = 10
    run.loops[0].evaluations.append({"step": 1, "metrics": {"auc": 0.7, "log_loss": 0.6}} | judgement)
    first = (f"Validation {watched or 'auc'}", value, f"{'best' if watched else 'last'}, step 1")
    assert validation_tiles(run) == [first]
    run.loops[0].evaluations.append({"step": 2, "metrics": {"auc": 0.5, "log_loss": 0.5}})
    assert validation_tiles(run) == [*([first] if watched else []), (first[0], "0.5", "last, step 2")]
    run.loops[0].evaluations.append({"step": 3, "metrics": {"test auc": 0.4}})
    if watched:
        assert validation_tiles(run) == [first, (first[0], "0.5", "last, step 2")], "the last with its metric"


def validation_tiles(run: RunRecords) -> list[tuple[str, str, str]]:
    return [tile for tile in tiles(run) if tile[0].startswith("Validation")]


def test_a_metric_that_the_best_evaluation_lacks_has_no_note_of_it() -> None:
    """Such as that of a test after the best was restored."""
    run = RunRecords(name="run", loops=[loop(0, 1, 1, [1])])
    lines = [{"step": 1, "metrics": {"auc": 0.7}, "is_best": True}, {"step": 1, "metrics": {"test AUC": 0.6}}]
    run.loops[0].evaluations += [line | {"seconds": 1.0} for line in lines]
    notes = {name: _validation({"": run}, name).notes for name in ("auc", "test AUC")}
    assert notes == {"auc": ["At the best evaluation, step 1: 0.7."], "test AUC": []}


def test_a_run_that_recorded_nothing_does_not_name_the_charts_of_an_earlier_one() -> None:
    runs = [
        {"kind": "run", "at": at, "settings": {"script": f"/job/{name}.py", "servers": at}}
        for at, name in ((10, "a"), (20, "b"))
    ]
    records = RunRecords(name="run", events=runs)

    def shown() -> tuple[str, object, list[str]]:
        settings = [listing.rows for listing in listings(records) if listing.title == "Settings of satrap run"]
        return title_of(records), settings[0][1][1], warnings(records)

    assert shown() == ("b.py in run", "20", []), "the only thing known"
    records.loops = [Loop(rank=0, start={"at": 11.0})]
    title, servers, (warning,) = shown()
    assert (title, servers) == ("a.py in run", "10")
    assert warning.startswith("The last run in this folder (b.py) recorded no step, so the charts and settings are")
    records.loops.insert(0, Loop(rank=0, start={"at": 30.0, "script": "c.py"}))
    assert shown() == ("c.py in run", "20", []), "the latest, whichever trainer is listed last"
