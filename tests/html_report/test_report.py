"""`satrap report` on records as they are found: damaged, incomplete, of one process or many, of a live run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from report_records import AT, write_long_run
from satrap.cli.main import main
from satrap.cli.report import write_report
from satrap.errors import ConfigError
from satrap.html_report.chart import LineChart
from satrap.html_report.figures import charts_of
from satrap.html_report.page import page
from satrap.html_report.record_reader import read_run
from satrap.html_report.run_records import RunRecords
from satrap.html_report.summary import events, listings, state_of, tiles, warnings
from satrap.monitor import record_file
from satrap.monitor.record_file import RecordFile, encode


def write(folder: Path, name: str, *lines: dict[str, Any]) -> None:
    path = folder / "records" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.writelines(encode(line) for line in lines)


def start(loop: str = "a", **more: Any) -> dict[str, Any]:
    return {"kind": "start", "id": loop, "at": AT, "process": loop, "launch": None, **more}


def interval(step: int, steps: int = 1, loop: str = "a", **more: Any) -> dict[str, Any]:
    numbers = {"at": AT + step, "seconds": float(step), "trained": float(steps), "samples": 4 * step, "rate": 4.0}
    return {"kind": "interval", "id": loop, "step": step, "steps": steps, **numbers, **more}


def shown(folder: Path, **options: Any) -> str:
    return page([read_run(folder, **options)], AT + 1000)


def line_charts(folder: Path, heading: str = "Training") -> dict[str, LineChart]:
    charts = charts_of({"": read_run(folder)})[heading]
    return {chart.title: chart for chart in charts if isinstance(chart, LineChart)}


def tile_values(run: RunRecords) -> dict[str, str]:
    return {name: value for name, value, _ in tiles(run)}


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"there is no record of a run in .* expected the --folder of satrap run, or"):
        write_report(tmp_path, None)
    assert main(["report", str(tmp_path / "no")]) == 1 and "there is no folder" in capsys.readouterr().err
    (tmp_path / "records").mkdir()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=rf"did you mean '{tmp_path}'\?"):
        write_report(tmp_path / "checkpoints", None)
    (tmp_path / "checkpoints").rmdir()
    with pytest.raises(ConfigError, match=r"cannot be written .* choose another file with --output"):
        write_report(tmp_path, tmp_path / "no" / "page.html")
    assert [each.name for each in tmp_path.iterdir()] == ["records"], "what is refused changes nothing"


def test_the_page_is_written_beside_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "trainer-0", start(), interval(1, loss=0.5))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"report: {tmp_path / 'report.html'} (")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "b.html")]) == 0
    first, second = ((tmp_path / name).read_text().splitlines() for name in ("report.html", "b.html"))
    assert first[0] == second[0] == "<!doctype html>" and len(first) == len(second)


def test_missing_parts_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    text = shown(tmp_path)
    for sentence in (
        "No loss was given to Progress.step(loss=...).",
        "No scores were given to Progress.step(scores=...), so there is no AUC.",
        "No steps were recorded.",
        "No evaluation was recorded",
        "No staleness was recorded",
        "No times of stages were recorded",
        "No rows were recorded",
        "No memory of tables was recorded",
        "No memory of a process was recorded",
        "No gradient norm was recorded",
        "No learning rate was recorded",
        "No launch was recorded.",
        "No tables were recorded",
    ):
        assert text.count(sentence) == 1, sentence
    assert "<svg" not in text
    write(tmp_path, "trainer-0", start(), interval(1, loss=0.5), interval(2, loss=0.25))
    text = shown(tmp_path)
    assert text.count("<svg") == 2, "loss and samples per second"
    assert "No loss" not in text and "No steps" not in text and "so there is no AUC" in text


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, seed: int) -> None:
    lines = [start(), *(interval(step, loss=0.5) for step in range(1, 21))]
    draw = random.Random(seed)
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        damaged = sorted(draw.sample(range(1, 20), draw.randint(1, 6)))
        data = [encode(line) for line in lines]
        for index in damaged:
            at = draw.randrange(len(data[index]) - 1)
            data[index] = data[index][:at] + bytes([data[index][at] ^ 1]) + data[index][at + 1 :]
        (folder / "records").mkdir()
        (folder / "records" / "trainer-0.jsonl").write_bytes(b"".join(data) + data[-1][:30])
        run = read_run(folder)
        assert run.damaged == {"records/trainer-0.jsonl": len(damaged) + 1}
        assert [each["step"] for each in run.loops[0].intervals] == [n for n in range(1, 21) if n not in damaged]
        (note,) = warnings(run)
        assert note.startswith(f"{len(damaged) + 1} damaged lines of records/trainer-0.jsonl left out")
        assert f"; {len(damaged) + 1} damaged line(s) of its records were left out" in write_report(folder, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "1"}, {"steps": 1.5}, {"at": None}, {"id": 7}, {"loss": "0.5"}, {"rate": None}, {"rows": [1]},
        {"stages": {"read": None}}, {"staleness": {"-1": 1}}, {"staleness": {"many": 1}}, {"seconds": 10**400},
        {"logged": {"a": "1"}}, {"logged": 3}, {"epochs": 3}, {"epochs": ["1"]}, {"memory": "1"},
        {"gradient_norm": "1"}, {"learning_rates": [1]}, {"learning_rates": {"dense": None}},
    ],
    ids=str,
)  # fmt: skip
def test_records_that_lack_something_are_left_out(tmp_path: Path, wrong: dict[str, Any]) -> None:
    write(tmp_path, "trainer-0", start(), interval(1), interval(2) | wrong, {"kind": "of a later release"}, interval(3))
    run = read_run(tmp_path)
    assert [each["step"] for each in run.loops[0].intervals] == [1, 3] and sum(run.damaged.values()) == 1
    shown(tmp_path)


ODD: list[Any] = [None, True, -1, 3.5, 1e299, 10**400, "", "x", [], [1], [[]], [{}], {}, {"a": {"b": 1}}, {"1": 2}]
ODD += [{"name": "x"}, [{"name": [1], "dim": {}}], "\ud800", "a" * 3000, {"a": 10**400}, float("nan"), float("inf")]
DEEP = b'{"kind": "start", "settings": ' + b'{"a":' * 60 + b"1" + b"}" * 61


def forged(rng: random.Random, line: dict[str, Any]) -> bytes:
    """Returns the line of a record with up to two values of other types, and a checksum that matches."""
    line = json.loads(json.dumps(line))
    for _ in range(rng.randint(0, 2)):
        node = line
        while isinstance(node[key := rng.choice(list(node))], dict) and node[key] and rng.random() < 0.7:
            node = node[key]
        node[key] = json.loads(json.dumps(rng.choice(ODD)))
        if rng.random() < 0.1 and len(node) > 1:
            del node[key]
    return with_checksum(json.dumps(line).encode())


def with_checksum(body: bytes) -> bytes:
    return body[:-1] + b', "crc": %d}\n' % zlib.crc32(body[:-1])


def test_forged_records_of_any_types_are_shown_or_left_out(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    settings = {"rank": 0, "staleness": 1, "tables": [{"name": "t", "dim": 4}], "features": {"f": {"table": "t"}}}
    maps: dict[str, Any] = {
        "staleness": {"0": 5},
        "stages": {"lookup": 0.1},
        "rows": {"t": 5},
        "bytes": {"t": 50},
        "lost": {"x": 1},
        "logged": {"lr": 0.1},
        "epochs": [4],
        "memory": 1000,
        "gradient_norm": 2.5,
        "device_bytes": 4000,
        "learning_rates": {"dense": 0.1},
    }
    lines = [start(where="w", version="1", script="s.py", settings={**settings, "script": {"lr": 0.1}}, launch=1)]
    lines += [interval(5, 5, loss=0.5, auc=0.5, ne=0.9, window=50, **maps), interval(9, 4, loss=0.4, **maps)]
    lines += [{"kind": "evaluation", "id": "a", "at": AT, "step": 5, "metrics": {"auc": 0.5}, "is_best": True}]
    lines[-1]["best_by"] = "auc"
    lines += [{"kind": "end", "id": "a", "at": AT, "step": 9, "error": None}]
    lines += [start("b", launch=2), interval(7, 2, "b"), {"kind": "end", "id": "b", "at": AT, "step": 7, "error": "E"}]
    events = [{"kind": "run", "at": AT, "where": "w", "settings": {"script": "s.py", "arguments": ["a"]}}]
    events += [{"kind": "launch", "at": AT, "launch": 1, "servers": 2}, {"kind": "servers", "at": AT, "servers": 2}]
    events += [{"kind": "restart", "at": AT, "process": "p"}, {"kind": "fault", "at": AT, "what": "w"}]
    events += [{"kind": "memory", "at": AT, "bytes": {"server 0": 3000}}, {"kind": "exit", "at": AT, "status": 0}]
    (records := tmp_path / "records").mkdir()
    for _ in range(50):
        for name, written in (("trainer-0", lines), ("trainer-1", lines), ("run", events)):
            (records / f"{name}.jsonl").write_bytes(b"".join(forged(rng, line) for line in written))
        assert shown(tmp_path).encode("utf-8", "replace").startswith(b"<!doctype html>")


def test_memory_of_servers_is_drawn_at_the_steps_of_the_first_trainer(tmp_path: Path) -> None:
    """What was measured before its first record, or after its last one, has no step."""
    rates: list[dict[str, Any]] = [
        {"learning_rates": {"dense": 0.1, "tables": 0.05}},
        {},
        {"learning_rates": {"dense": 0.02, "tables": 0.05}},
    ]
    steps = [interval(step, memory=100, gradient_norm=step / 4, **more) for step, more in enumerate(rates, 1)]
    write(tmp_path, "trainer-0", start(), *steps)
    ends = [each["at"] for each in steps]
    times = [start()["at"] - 1, ends[0] - 0.1, ends[1] - 0.1, ends[1], ends[2] + 1]
    sizes = [{"kind": "memory", "at": at, "bytes": {"server 1": 5 + number}} for number, at in enumerate(times)]
    write(tmp_path, "run", {"kind": "run", "at": AT}, *sizes)
    charts = line_charts(tmp_path)
    found = {name: {each.name: each.points for each in chart.series} for name, chart in charts.items()}
    assert found["Memory of each process"] == {
        "trainer 0": [(1.0, 100), (2.0, 100), (3.0, 100)],
        "server 1": [(1.0, 6), (2.0, 7), (2.0, 8)],
    }
    assert found["Gradient norm"] == {"": [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75)]}
    assert found["Learning rate"] == {
        "dense": [(1.0, 0.1), (2.0, 0.1), (3.0, 0.02)],
        "tables": [(1.0, 0.05), (2.0, 0.05), (3.0, 0.05)],
    }
    assert "Memory of GPUs" not in charts


def test_deep_and_endless_lines_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "trainer-0", start(), interval(1, loss=0.5))
    monkeypatch.setattr(record_file, "_MAX_LINE", 1 << 10)
    with (tmp_path / "records" / "trainer-0.jsonl").open("ab") as file:
        file.write(with_checksum(DEEP) + b"\0" * 5000 + b"\n")
    run = read_run(tmp_path)
    assert len(run.loops) == 1 and run.damaged["records/trainer-0.jsonl"] == 6, "a long line counts as several"


def test_a_fifo_is_no_record(tmp_path: Path) -> None:
    write(tmp_path, "trainer-0", start(), interval(1, loss=0.5))
    os.mkfifo(fifo := tmp_path / "records" / "trainer-1.jsonl")
    assert "records/trainer-1.jsonl cannot be read (it is a FIFO; expected a regular file)." in shown(tmp_path)
    with pytest.raises(OSError, match="it is no regular file"):
        RecordFile.open(fifo)


def test_other_files_and_unreadable_ones(tmp_path: Path) -> None:
    write(tmp_path, "trainer-0", start(), interval(1))
    (tmp_path / "records" / "notes.jsonl").write_text("not ours")
    (tmp_path / "records" / "trainer-1.jsonl").mkdir()
    assert "records/trainer-1.jsonl cannot be read (Is a directory)." in shown(tmp_path)


def test_numbers_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    write(tmp_path, "trainer-0", *(interval(step, loss=None if step == 3 else 0.5) for step in range(1, 6)))
    text = shown(tmp_path)
    assert "The loss was not finite in 1 interval, first at step 3." in text and "<td>not finite</td>" in text
    assert text.count("M") > 1 and '"y":[0.5,0.5,null,0.5,0.5]' in text


@pytest.mark.parametrize(("first_step", "num_earlier"), [(1, 1), (8, 0)])
def test_a_run_that_did_not_continue_the_earlier_one_is_shown_alone(
    tmp_path: Path, first_step: int, num_earlier: int
) -> None:
    later = AT + 1000
    write(tmp_path, "run", {"kind": "run", "at": AT}, {"kind": "launch", "at": AT, "launch": 1})
    write(tmp_path, "run", {"kind": "run", "at": later}, {"kind": "launch", "at": later, "launch": 2})
    write(tmp_path, "trainer-0", start() | {"at": AT + 1}, *(interval(step) for step in range(1, 11)))
    write(tmp_path, "trainer-0", start("b") | {"at": later + 1}, interval(first_step, loop="b"))
    run = read_run(tmp_path)
    assert (run.num_earlier, len(run.loops), tile_values(run)["Launches"]) == (
        num_earlier, 2 - num_earlier, str(2 - num_earlier)
    )  # fmt: skip
    remarks = {name: remark for name, _, remark in tiles(run)}
    assert remarks["Launches"] == ("the last is launch 2" if num_earlier else ""), "as in the list of events"
    assert ("This folder has 1 earlier run, which this one did not continue" in shown(tmp_path)) == bool(num_earlier)


def test_a_resumed_run_counts_each_step_once_in_its_curves(tmp_path: Path) -> None:
    write(tmp_path, "trainer-0", start(), *(interval(step, loss=1.0) for step in range(1, 11)))
    write(tmp_path, "trainer-0", start("b"), *(interval(step, loop="b", loss=2.0) for step in range(6, 16)))
    run = read_run(tmp_path)
    assert "Later launches trained 5 steps again" in warnings(run)[0]
    data = json.loads(page([run], AT).partition('<script type="application/json">')[2].partition("</script>")[0])
    (series,) = data["series"]
    assert [(x, y) for x, y in zip(series["x"], series["y"], strict=True) if y is not None] == [
        *((step, 1.0) for step in range(1, 6)), *((step, 2.0) for step in range(6, 16))
    ]  # fmt: skip
    assert tile_values(run)["Launches"] == "2" and tile_values(run)["Last step"] == "15"


def test_a_chart_for_each_number_of_the_script(tmp_path: Path) -> None:
    logged = [{"lr": 0.5, "norm": step} for step in range(1, 31)]
    write(tmp_path, "trainer-0", start(), *(interval(step, logged=each) for step, each in enumerate(logged, 1)))
    write(tmp_path, "trainer-1", start(), *(interval(step, logged={"other": 1.0}) for step in range(1, 3)))
    logged_charts = line_charts(tmp_path, "Numbers of the script")
    assert {name: len(each.series) for name, each in logged_charts.items()} == {"lr": 1, "norm": 1}, "of trainer 0"
    assert logged_charts["norm"].series[0].points == [(step, step) for step in range(1, 31)]
    text = shown(tmp_path)
    assert "<h2>Numbers of the script</h2>" in text and "interval; mean over 1.45 steps" in text
    write(tmp_path, "trainer-0", interval(31, logged={f"number {index}": 1.0 for index in range(30)}))
    *_, last = charts = line_charts(tmp_path, "Numbers of the script").values()
    assert len(charts) == 24 and last.notes == ["32 numbers of this kind were recorded; these are the first 24."]


def test_epochs_and_launches_are_marked_and_the_legend_names_them(tmp_path: Path) -> None:
    def lines(loop: str, launch: int, first: int) -> list[dict[str, Any]]:
        steps = range(first, first + 10)
        epochs = {5: [5], 12: [12]}
        more: list[dict[str, Any]] = [{"epochs": epochs[step]} if step in epochs else {} for step in steps]
        numbers = [interval(step, loop=loop, loss=0.5, **each) for step, each in zip(steps, more, strict=True)]
        return [start(loop) | {"launch": launch}, *numbers]

    write(tmp_path, "trainer-0", *lines("a", 1, 1))
    assert line_charts(tmp_path)["Loss"].marks == {"launch": [], "epoch": [5.0]}
    assert "start of an epoch" in shown(tmp_path) and "start of a launch" not in shown(tmp_path)
    write(tmp_path, "trainer-0", *lines("b", 2, 8))
    assert line_charts(tmp_path)["Loss"].marks == {"launch": [8.0], "epoch": [5.0, 12.0]}
    text = shown(tmp_path)
    assert all(name in text for name in ("start of an epoch", "start of a launch", "trained again later"))
    assert text.count('class="mark epoch"') > 2 and text.count('class="mark launch"') > 2


def test_two_runs_are_drawn_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr, loss in (("one", 0.1, 0.5), ("two", 0.2, 0.25)):
        (folder := tmp_path / name).mkdir()
        stages: dict[str, Any] = {"stages": {"read": lr}, "logged": {"lr": lr}, "rows": {"t": 5}}
        settings = {"rank": 0, "script": {"lr": lr, "same": 1}}
        write(folder, "trainer-0", start(settings=settings), *(interval(n, loss=loss, **stages) for n in (1, 2, 3)))
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["report", str(one), str(two)]) == 0
    assert capsys.readouterr().out.startswith(f"report: {one / 'comparison.html'} (")
    text = (one / "comparison.html").read_text()
    assert "<title>one and two</title>" in text and "<td>script.lr</td><td>0.1</td><td>0.2</td>" in text
    data = json.loads(text.partition('<script type="application/json">')[2].partition("</script>")[0])
    assert [(each["name"], each["y"]) for each in data["series"]] == [("one", [0.5] * 3), ("two", [0.25] * 3)]
    for look in ('class="curve c0 d0"', 'class="curve c1 d0"', 'class="bar c0"', 'class="bar c1"'):
        assert look in text
    alone, both = charts_of({"": read_run(one)}), charts_of({"one": read_run(one), "two": read_run(two)})
    assert [[each.title for each in part] for part in alone.values()] == [
        [each.title for each in part] for part in both.values()
    ]
    assert "None of those that both recorded." in page([read_run(one), read_run(one)], AT)
    assert main(["report", str(one), str(one)]) == 1 and "are the same run" in capsys.readouterr().err
    assert main(["report", str(one), str(tmp_path / "no")]) == 1 and "there is no folder" in capsys.readouterr().err


def test_runs_with_different_charts_are_compared(tmp_path: Path) -> None:
    write_long_run(tmp_path / "long", num_intervals=90, trainers=9, tables=14)
    (tmp_path / "empty" / "records").mkdir(parents=True)
    for folders in (("long", "empty"), ("empty", "long"), ("empty", "empty")):
        one, two = (read_run(tmp_path / name) for name in folders)
        text = page([one, two], AT)
        assert text.count("<h3>Loss</h3>") == 1 and ("Validation: log_loss" in text) == ("long" in folders)


def test_the_code_of_the_latest_launch_is_listed(tmp_path: Path) -> None:
    def code() -> list[Sequence[Sequence[object]]]:
        return [each.rows for each in listings(read_run(tmp_path)) if each.title == "Code"]

    write(tmp_path, "trainer-0", start("a", settings={"rank": 0}))
    assert code() == [], "a record of an earlier release"
    for launch, commit in ((1, "c0ffee"), (2, f"{'5eed' * 10}-dirty")):
        begun = start(str(launch), settings={"rank": 0}, command="train.py --lr 1", commit=commit) | {"launch": launch}
        write(tmp_path, "trainer-0", begun)
    assert code() == [[("command", "train.py --lr 1"), ("commit", f"{'5eed' * 10}-dirty")]]
    write(tmp_path, "trainer-0", start("3", settings={"rank": 0}, command="train.py", commit=None) | {"launch": 3})
    assert code() == [[("command", "train.py")]], "no repository"


def test_settings_that_changed_are_listed(tmp_path: Path) -> None:
    for number, lr in enumerate((0.1, 0.1, 0.05)):
        tables = [{"name": "user", "optimizer": {"type": "SGD", "lr": lr}}]
        write(tmp_path, "trainer-0", start(str(number), settings={"tables": tables, "script": {"lr": lr}}))
    (changed,) = [each for each in listings(read_run(tmp_path)) if "changed" in each.title]
    assert changed.rows == [("tables user.optimizer.lr", "0.1", "0.05"), ("script.lr", "0.1", "0.05")]


@pytest.mark.parametrize(
    ("lines", "is_live", "expected"),
    [
        ([], True, ("live", "The run was in progress.")),
        ([{"kind": "exit", "status": 0}], False, ("done", "The run ended with exit status 0.")),
        ([{"kind": "exit", "status": 3}], False, ("failed", "The run ended with exit status 3.")),
        ([{"kind": "exit", "status": None}], False, ("failed", "satrap run ended with an error.")),
        ([{"kind": "exit", "status": 0}, {"kind": "run"}], False, ("failed", "No end was recorded: satrap run was")),
    ],
)
def test_the_state_of_a_run(
    tmp_path: Path, lines: list[dict[str, Any]], is_live: bool, expected: tuple[str, str]
) -> None:
    write(tmp_path, "run", *({"at": AT, **each} for each in ({"kind": "run"}, *lines)))
    kind, sentence = state_of(read_run(tmp_path, is_live), AT)
    assert kind == expected[0] and sentence.startswith(expected[1])


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (None, ("failed", "No end was recorded: training was killed, or still ran. The last record was 7.0 s old.")),
        ({"error": None}, ("done", "Training ended.")),
        ({"error": "ValueError: <b>"}, ("failed", "Training ended with ValueError: <b>")),
    ],
)
def test_the_state_of_a_script(tmp_path: Path, end: dict[str, Any] | None, expected: tuple[str, str]) -> None:
    ends = [] if end is None else [{"kind": "end", "id": "a", "at": AT + 9, "step": 4, **end}]
    write(tmp_path, "trainer-0", start(), interval(3), *ends)
    run = read_run(tmp_path)
    assert state_of(run, AT + 10) == expected
    rows = [str(row[2]) for row in events(run).rows]
    assert rows[0] == "Training started at step 3 (a trainer)."
    assert [row.partition(" with")[0].rstrip(".") for row in rows[1:]] == ["Trainer 0 ended after step 4"] * len(ends)


def test_a_live_run_is_known_by_its_lock(tmp_path: Path) -> None:
    write(tmp_path, "run", {"kind": "run", "at": AT})
    (tmp_path / "run.json").write_text("{}")
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write_report(tmp_path, None)
    os.close(lock)
    assert "The run was in progress." in (tmp_path / "report.html").read_text()
    write_report(tmp_path, None)
    assert "satrap run was killed" in (tmp_path / "report.html").read_text()


def test_a_report_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the run is live is not known there; its records say how it ended."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    write(tmp_path, "run", {"kind": "run", "at": AT}, {"kind": "exit", "at": AT, "status": 0})
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert main(["report", str(tmp_path)]) == 0
    assert "The run ended with exit status 0." in (tmp_path / "report.html").read_text()


def test_a_long_run_of_many_trainers_and_tables_stays_small(tmp_path: Path) -> None:
    write_long_run(tmp_path, num_intervals=900, trainers=9, tables=14)
    run = read_run(tmp_path)
    text = page([run], AT)
    assert len(text.encode()) < 250_000
    assert "9 trainers recorded; these are the first 6." in text
    assert "11 processes recorded; these are the largest 6." in text
    rows = {curve.name: curve.last for curve in run.curves["rows"]}
    chart = line_charts(tmp_path)["Rows of each table"]
    assert [curve.last for curve in chart.series[:5]] == sorted(rows.values())[:-6:-1], "the largest tables"
    assert chart.series[5].name == "9 other tables" and chart.series[5].last == sum(sorted(rows.values())[:9])
    assert [x for x, _ in chart.series[5].superseded] == [x for x, _ in chart.series[0].superseded] != []
    assert "A chart shows at most 1,000 points" in text
    values = tile_values(run)
    assert (values["Faults"], values["Launches"], values["Last step"]) == ("2", "3", "88,000")
    assert values["Samples per second"] == "123k", "nine trainers with 409,600 in 30 seconds"


def test_names_with_markup_are_text(tmp_path: Path) -> None:
    bad = "</script></style><script>document.title = 1</script><img src=x onerror=alert(1)>\"'"
    folder = tmp_path / "<b>run"
    folder.mkdir()
    tables = [{"name": bad, "dim": bad, "optimizer": {bad: bad}}]
    settings = {bad: bad, "tables": tables, "script": {bad: [bad]}, "features": {bad: {"table": bad, "pooling": bad}}}
    write(folder, "trainer-0", start(settings=settings, where=bad, version=bad))
    maps: dict[str, Any] = {
        "rows": {bad: 1},
        "bytes": {bad: 1},
        "stages": {bad: 1.0},
        "lost": {bad: 1},
        "logged": {bad: 1},
    }
    write(folder, "trainer-0", interval(1, loss=0.5, **maps), interval(2, loss=0.5, **maps))
    write(folder, "trainer-0", {"kind": "evaluation", "id": "a", "at": AT, "step": 1, "metrics": {bad: 0.5}})
    write(folder, "trainer-0", {"kind": "end", "id": "a", "at": AT, "error": bad})
    write(
        folder,
        "run",
        *({"kind": kind, "at": AT, "what": bad, "where": bad, "process": bad} for kind in ("run", "fault")),
    )
    text = shown(folder)
    assert text.count("onerror") > 15 and "<img" not in text and "<b>" not in text
    assert text.count("<script>") == 1 and text.count("<style>") == 1


def test_a_record_in_use_is_read(tmp_path: Path) -> None:
    """While a process writes: the file ends anywhere."""
    write_long_run(tmp_path / "whole", num_intervals=6, trainers=1)
    data = (tmp_path / "whole" / "records" / "trainer-0.jsonl").read_bytes()
    (tmp_path / "records").mkdir()
    for end in range(0, len(data), 97):
        (tmp_path / "records" / "trainer-0.jsonl").write_bytes(data[:end])
        run = read_run(tmp_path)
        assert sum(run.damaged.values()) <= 1
        page([run], AT)
    file = RecordFile.open(tmp_path / "records" / "trainer-0.jsonl")
    file.append("end", id="0-3", at=AT)
    file.close()
    assert read_run(tmp_path).loops[-1].end["at"] == AT
