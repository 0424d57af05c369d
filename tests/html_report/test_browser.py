"""A run with a kill, and its report in a real browser: no error, no request, and the numbers that were recorded."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from browser import NAMES, Browser, find_browser, running_browser
from child_processes import SATRAP
from report_records import read_records, write_long_run
from runs import JOB, name_processes, num_checkpoints, start_run, wait_for_exit
from satrap.html_report.chart import number
from waiting import wait_until

SCRIPT = JOB.with_name("report_job.py")
CUT_TEXTS = """[...document.querySelectorAll('.plot svg')].flatMap(svg => {
    const isOpen = getComputedStyle(svg).overflow === 'visible';
    const plot = (isOpen ? svg.closest('section') : svg).getBoundingClientRect();
    const isCut = box => box.left < plot.left - 1 || box.right > plot.right + 1;
    const texts = [...svg.querySelectorAll('text')];
    return texts.filter(text => isCut(text.getBoundingClientRect())).map(text => text.textContent);
})"""
needs_browser = pytest.mark.skipif(
    find_browser() is None,
    reason=f"no browser: none of {', '.join(NAMES)} is on the PATH (or name it in SATRAP_TEST_BROWSER)",
)


def report(folder: Path, *options: str) -> Path:
    """Make the report of a run, and return where the command says that it is."""
    command = [str(SATRAP), "report", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("report: /")
    return Path(done.stdout.removeprefix("report: ").partition(" (")[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two trainers, of which one was killed; `live.html` is its report before that."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "hold").touch()
    with start_run(folder, SCRIPT, "--servers", "2", "--trainers", "2", arguments=(str(folder), "200")) as run:
        wait_until(lambda: num_checkpoints(folder) >= 3, run)
        pids = name_processes(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
        # both trainers are at step 60, and their records have come through
        wait_until(lambda: all(last_step(folder, rank) == 60 for rank in (0, 1)), run)
        report(folder / "run", "--output", str(folder / "live.html"))
        os.kill(pids["trainer 1"], signal.SIGKILL)
        (folder / "hold").unlink()
        status, _, err = wait_for_exit(run)
    assert status == 0, err
    return folder


def lines_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / "run" / "records" / f"trainer-{rank}.jsonl"
    return read_records(path).lines if path.exists() else []


def last_step(folder: Path, rank: int) -> int:
    return max((line["step"] for line in lines_of(folder, rank) if line["kind"] == "interval"), default=0)


def tables(browser: Browser, title: str) -> list[list[str]]:
    """Return the rows of the table below the heading."""
    found: list[list[str]] = browser.evaluate(
        "[...[...document.querySelectorAll('section')].find(each => each.querySelector('h3')?.textContent === "
        f"{title!r}).querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    return found


def test_what_a_run_records(folder: Path) -> None:
    for rank in (0, 1):
        lines = lines_of(folder, rank)
        assert [line["launch"] for line in lines if line["kind"] == "start"] == [1, 2]
        intervals = [line for line in lines if line["kind"] == "interval"]
        assert [line["step"] for line in intervals] == list(range(4, 101, 4)), "launch 2 continues after step 60"
        assert sum(sum(line["staleness"].values()) for line in intervals) >= 100
        assert intervals[0]["learning_rates"] == {"dense": 0.01, "tables": 0.1} and intervals[-1]["gradient_norm"] > 0
        assert intervals[-1]["rows"] == {"user": 30, "item": 30} and min(intervals[-1]["bytes"].values()) > 1000
    assert lines_of(folder, 0)[-1]["kind"] == "end"
    events = read_records(folder / "run" / "records" / "run.jsonl").lines
    kinds = [each["kind"] for each in events]
    assert kinds[0] == "run" and kinds[-1] == "exit" and kinds.count("launch") == 2 and kinds.count("fault") == 1
    measured = {name for each in events if each["kind"] == "memory" for name in each["bytes"]}
    assert measured == {"server 0", "server 1"}, "trainers record their memory"
    assert all(size > 1 << 20 for each in events if each["kind"] == "memory" for size in each["bytes"].values())


@needs_browser
def test_the_report_in_a_browser(folder: Path, tmp_path: Path) -> None:
    page = report(folder / "run")
    write_long_run(tmp_path / "long", num_intervals=600)
    lines = [line for rank in (0, 1) for line in lines_of(folder, rank)]
    intervals = [line for line in lines if line["kind"] == "interval"]
    with running_browser(tmp_path) as browser:
        for path in (page, folder / "live.html", report(tmp_path / "long")):
            check_layout(browser, path)
        for scheme in ("light", "dark"):
            browser.open(page, scheme=scheme)
            check_pictures(browser, scheme)
        check_numbers(browser, intervals)
        check_events(browser)
        last = [line for line in lines_of(folder, 0) if line["kind"] == "interval"][-1]
        shown = check_tip(browser, "step 100", "trainer 0: ")
        assert float(shown) == pytest.approx(last["loss"], rel=1e-5)
        browser.open(folder / "live.html")
        assert "The run was in progress." in browser.evaluate("document.body.innerText")


def check_layout(browser: Browser, path: Path) -> None:
    for width, scheme in ((1280, "light"), (500, "light"), (360, "dark")):
        browser.open(path, width=width, scheme=scheme)
        assert browser.problems == [] and browser.requests == [path.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        assert browser.evaluate(CUT_TEXTS) == [], "no text is cut off or leaves its card"
        assert browser.evaluate("document.querySelectorAll('img, script[src], iframe, object').length") == 0


def check_pictures(browser: Browser, scheme: str) -> None:
    """Check that the page is mostly light or mostly dark, and that each of its charts shows a curve."""
    whole = browser.picture(browser.evaluate("document.body.getBoundingClientRect().toJSON()"))
    is_back = (whole < 64).all(-1) if scheme == "dark" else (whole > 192).all(-1)
    assert is_back.mean() > 0.8, scheme
    boxes = "[...document.querySelectorAll('.plot svg')].map(svg => svg.getBoundingClientRect().toJSON())"
    pictures = [browser.picture(box) for box in browser.evaluate(boxes)]
    coloured = [picture.max(-1) - picture.min(-1) > 64 for picture in pictures]  # axes and texts are grey
    assert all(10 < pixels.sum() < 0.2 * pixels.size for pixels in coloured), scheme
    assert coloured[0].any(0).mean() > 0.7, "the loss has a value at most steps"


@needs_browser
def test_two_runs_in_a_browser(tmp_path: Path) -> None:
    for name, trainers in (("one", 1), ("two", 2)):
        write_long_run(tmp_path / name, num_intervals=300, trainers=trainers)
    with running_browser(tmp_path) as browser:
        check_layout(browser, page := report(tmp_path / "one", str(tmp_path / "two")))
        browser.open(page)
        colours: list[list[str]] = browser.evaluate(
            "[...document.querySelectorAll('.plot svg')].map(svg => "
            "[...svg.querySelectorAll('path.curve:not(.old)')].map(each => getComputedStyle(each).stroke))"
        )
        assert {len(set(each)) for each in colours if each} == {2}, "each chart has a colour for each run"
        assert len(colours[0]) == 3, "of the loss of three trainers"
        check_tip(browser, "step 28,000", "one: ")


def check_numbers(browser: Browser, intervals: list[dict[str, Any]]) -> None:
    """Check the figures of each chart against the records."""
    for title, key in (("Loss", "loss"), ("AUC in training", "auc")):
        rows = tables(browser, title)
        recorded = {(number(line["step"]), number(line[key])) for line in intervals}
        shown = [(step, value) for step, *values in rows for value in values]
        assert len(shown) == 24 and set(shown) <= recorded
    counts: dict[str, int] = {}
    for line in intervals:
        for steps, batches in line["staleness"].items():
            counts[steps] = counts.get(steps, 0) + batches
    assert {name: count for name, count, *_ in tables(browser, "Staleness") if count != "0"} == {
        steps: number(count) for steps, count in counts.items()
    }
    stages = {name: float(value.replace(",", "")) for name, value, *_ in tables(browser, "Time of each stage")}
    for name, shown_value in stages.items():
        steps = sum(line["steps"] for line in intervals)
        mean = 1e3 * sum(line["stages"][name] * line["steps"] for line in intervals) / steps
        assert shown_value == pytest.approx(mean, rel=1e-3, abs=1e-4)
    assert tables(browser, "Rows of each table")[-1] == ["100", "30", "30"]
    assert tables(browser, "Validation: auc") == [["40", "0.625"]]
    assert [row[:2] for row in tables(browser, "Tables")] == [["item", "30"], ["user", "30"]]
    assert ["<script>alert(1)</script>", "</script><img src=x onerror=alert(2)>"] in tables(
        browser, "Settings of the script"
    )
    rates = [float(row[1].replace(",", "")) for row in tables(browser, "Samples per second") if row[1] != "not finite"]
    assert rates and max(rates) <= sum(sorted(line["rate"] for line in intervals)[-2:]) + 1


def check_events(browser: Browser) -> None:
    events = [row[2] for row in tables(browser, "Faults and launches")]
    order = [
        *("satrap run started", "Launch 1 of the trainers, on 2 server(s).", "Training started at step 1 ("),
        *(
            "Fault: trainer 1 was killed by signal 9",
            "Launch 2 of",
            "Training started at step 61 (",
            "The run ended with",
        ),
    ]
    places = [next(index for index, event in enumerate(events) if event.startswith(text)) for text in order]
    assert places == sorted(places), events


def check_tip(browser: Browser, step: str, name: str) -> str:
    """Move the pointer over the first chart, and check what the tooltip says; return the number of its first curve."""
    browser.evaluate("document.querySelector('.plot svg').scrollIntoView()")
    box = browser.evaluate("document.querySelector('.plot svg').getBoundingClientRect().toJSON()")
    browser.move_pointer(box["right"] - 14, box["top"] + box["height"] / 2)
    visible, text = browser.evaluate(
        "(tip => [getComputedStyle(tip).visibility, tip.textContent])(document.querySelector('.tip'))"
    )
    lines: list[str] = text.splitlines()
    assert visible == "visible" and lines[0] == step
    assert lines[1].startswith(name)
    browser.move_pointer(2, 2)
    assert browser.evaluate("getComputedStyle(document.querySelector('.tip')).visibility") == "hidden"
    return lines[1].removeprefix(name)


def test_the_report_of_a_script_without_satrap_run(tmp_path: Path) -> None:
    command = [str(SATRAP.with_name("python")), str(SCRIPT), str(tmp_path), "30", "--plain"]
    subprocess.run(command, check=True, timeout=120)
    text = report(tmp_path / "plain").read_text()
    assert "<title>report_job.py in plain</title>" in text
    assert "Training ended." in text and "Trainer 0 ended after step 30." in text
    assert "Faults are recorded by satrap run only." in text
