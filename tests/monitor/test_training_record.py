"""What a training loop records for its report: the lines, what damages them, and how often it costs time."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from example_reports import Clock, ListSink
from logged import logged
from report_records import read_records
from satrap import run_context
from satrap.errors import ConfigError
from satrap.monitor.progress import Progress
from satrap.monitor.record_file import RecordFile, decode, encode
from satrap.monitor.report import Counters
from satrap.monitor.training_record import (
    _COST_SHARE,
    _FREE_SECONDS,
    _MAX_GROWTH,
    _MIN_SECONDS,
    _MIN_SUMMARIES,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
values = st.dictionaries(st.text().filter(lambda name: name not in ("kind", "crc")), plain, max_size=4)


# -- lines -------------------------------------------------------------------------------------------------------------


@given(values)
def test_a_record_is_read_as_it_was_written(record: dict[str, Any]) -> None:
    line = encode({"kind": "a", **record})
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode(line[:-1]) == {"kind": "a", **record}
    assert json.loads(line).keys() == {"kind", *record, "crc"}, "each line is JSON for other programs, too"


@given(values, st.data())
def test_a_damaged_record_is_refused(record: dict[str, Any], data: Any) -> None:
    line = bytearray(encode({"kind": "a", **record})[:-1])
    at = data.draw(st.integers(0, len(line) - 1))
    if data.draw(st.booleans()):
        assert decode(bytes(line[:at])) is None, "a process was killed while it wrote"
    line[at] ^= data.draw(st.integers(1, 255))
    assert decode(bytes(line)) is None


def test_values_that_are_no_json() -> None:
    odd = {"nan": math.nan, "inf": [math.inf], 3: Path("a"), "numpy": np.float32(0.5), "set": {1}, "none": None}
    assert decode(encode({"kind": "a", **{str(key): value for key, value in odd.items()}})[:-1]) == {
        "kind": "a", "nan": None, "inf": [None], "3": "a", "numpy": "0.5", "set": [1], "none": None
    }  # fmt: skip
    loop: list[Any] = []
    loop.append(loop)
    assert decode(encode({"kind": "a", "loop": loop})[:-1]) is not None


def test_a_record_after_an_incomplete_one_starts_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    for text in ("one", "two"):
        file = RecordFile.open(path)
        file.append("a", text=text)
        file.close()
        with path.open("ab") as torn:
            torn.write(b'{"kind": "a", "te')
    found = read_records(path)
    assert [each["text"] for each in found.lines] == ["one", "two"]
    assert (found.damaged, found.missing) == (2, 0)


def test_records_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    """A pipe that is not read stands for a full disk, too: both write a part, or nothing."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    file = RecordFile(writer, "the pipe")
    with logged("satrap.monitor", match="the pipe cannot be written") as warnings:
        for number in range(200):
            file.append("a", number=number, text="x" * 1000)
        unread = os.read(reader, 1 << 20)
        file.append("a", number=200)
    file.close()
    (tmp_path / "read").write_bytes(unread + os.read(reader, 1 << 20))
    os.close(reader)
    found = read_records(tmp_path / "read")
    numbers = [each["number"] for each in found.lines]
    assert numbers == [*range(len(numbers) - 1), 200] and 10 < len(numbers) < 200
    assert found.missing == 201 - len(numbers) and found.damaged <= 1
    assert len(warnings) == 1, "one warning, not one for each record"


# -- Progress ----------------------------------------------------------------------------------------------------------


class Embedded:
    """Stands for embeddings: counts, and takes some time to do so."""

    def __init__(self, clock: Clock, cost: float = 0.0) -> None:
        self.clock, self.cost, self.steps = clock, cost, 0

    def counters(self) -> Counters:
        self.clock.now += self.cost
        return Counters(
            rows={"a": 10 * self.steps}, bytes={"a": 320 * self.steps}, staleness={1: self.steps},
            stages={"read": 0.01 * self.steps}, inside=0.02 * self.steps, lost={"batches/unused": 1},
        )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        return {"rank": 3, "staleness": 2}


class OneBatch(SimpleNamespace):
    """A batch of two samples."""

    def __len__(self) -> int:
        return 2


def report_steps(progress: Progress, embedded: Embedded, steps: int, seconds: float) -> None:
    for _ in range(steps):
        embedded.steps += 1
        embedded.clock.now += seconds
        batch = OneBatch(step=embedded.steps, label=np.array([0.0, 1.0]))
        progress.step(batch, loss=0.5 / embedded.steps, scores=np.array([0.1, 0.2]))


def lines_of(folder: Path, rank: int = 3) -> list[dict[str, Any]]:
    return read_records(folder / "records" / f"trainer-{rank}.jsonl").lines


def test_the_record_has_the_numbers_of_a_report(tmp_path: Path) -> None:
    clock = Clock()
    embedded = Embedded(clock)
    sink = ListSink()
    length = _MIN_SECONDS
    assert length == 4 / 256
    with Progress(
        embedded, [sink], every_seconds=length, record=tmp_path, settings={"lr": 0.1}, clock=clock
    ) as progress:
        report_steps(progress, embedded, 8, 1 / 256)
        progress.report_evaluation(8, {"auc": 0.75, "log_loss": math.nan}, is_best=True, best_by="auc", seconds=0.5)
    start, *intervals, evaluation, end = lines_of(tmp_path)
    assert start["settings"] == {"rank": 3, "staleness": 2, "script": {"lr": 0.1}} and start["launch"] is None
    reports = [each for each in sink.reports if not each.validation]
    assert len(intervals) == 2 and {each["kind"] for each in intervals} == {"interval"}
    for line, report in zip(intervals, reports, strict=False):
        assert {name: line[name] for name in ("step", "steps", "samples", "rate", "loss", "auc", "rows", "bytes")} == {
            "step": report.step,
            "steps": report.steps,
            "samples": report.samples,
            "rate": report.samples_per_second,
            "loss": report.loss,
            "auc": report.auc,
            "rows": report.rows,
            "bytes": report.bytes,
        }
        assert line["staleness"] == {"1": report.steps} and line["stages"] == report.stages
        assert line["trained"] == pytest.approx(length) and line["rate"] == pytest.approx(2 * 256)
    assert evaluation["metrics"] == {"auc": 0.75, "log_loss": None} and evaluation["is_best"] is True
    assert evaluation["best_by"] == "auc"
    assert (end["kind"], end["step"], end["error"]) == ("end", 8, None)


@given(st.floats(0, 2), st.floats(0.001, 5))
def test_the_time_for_records_is_bounded(cost: float, seconds: float) -> None:
    """Whatever a summary costs: all take 250 ms, half a percent of the time, one that costs more than expected, and
    those that are written since an interval may grow by a tenth of the time only."""
    clock = Clock()
    embedded = Embedded(clock, cost)
    written: list[float] = []
    file: Any = SimpleNamespace(append=lambda kind, **_: written.append(clock.now), close=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("satrap.monitor.progress.open_record", lambda *_: file)
        progress = Progress(embedded, [], every_seconds=1e9, clock=clock, record="a")
        report_steps(progress, embedded, 300, seconds)
    began, *intervals = written
    for index, at in enumerate(intervals, 1):
        growing = 1 / _MAX_GROWTH + math.log(max(1.0, (at - began) / max(cost, 1e-9))) / math.log(1 + _MAX_GROWTH)
        assert index * cost <= _FREE_SECONDS + _COST_SHARE * (at - began) + cost * (2 + growing) + 1e-6
    for one, two in itertools.pairwise(written):
        longest = max(_MIN_SECONDS, _MAX_GROWTH * (two - began), _MIN_SUMMARIES * cost)
        assert two - one >= _MIN_SECONDS - 1e-6 and two - one <= longest + 2 * (seconds + cost)


def test_an_error_ends_the_record_without_reading_anything(tmp_path: Path) -> None:
    clock = Clock()
    embedded = Embedded(clock)
    with (
        pytest.raises(ValueError, match="no more"),
        Progress(embedded, [], record=tmp_path, clock=clock) as progress,
    ):
        report_steps(progress, embedded, 3, 0.004)
        embedded.counters = None  # type: ignore[method-assign, assignment]
        raise ValueError("no more" + "!" * 9999)
    start, end = lines_of(tmp_path)
    assert end["error"].startswith("ValueError: no more!!") and len(end["error"]) == 500 and end["step"] == 3
    assert start["id"] == end["id"]


def test_evaluations_do_not_count_for_the_throughput(tmp_path: Path) -> None:
    clock = Clock()
    embedded = Embedded(clock)
    with Progress(embedded, [], record=tmp_path, clock=clock) as progress:
        report_steps(progress, embedded, 2, 0.005)
        clock.now += 100
        progress.report_evaluation(2, {"auc": 0.5}, seconds=100)
        report_steps(progress, embedded, 1, 0.01)
    (interval,) = [each for each in lines_of(tmp_path) if each["kind"] == "interval"]
    assert interval["trained"] == pytest.approx(0.02) and interval["rate"] == pytest.approx(6 / 0.02)


def test_the_record_has_epochs_memory_and_numbers_of_the_script(tmp_path: Path) -> None:
    clock = Clock()
    with Progress(None, [], record=tmp_path, clock=clock) as progress:
        for step, epoch in enumerate((0, 0, 1, 1, 1, 2, None, 2), 1):
            clock.now += _MIN_SECONDS / 2
            progress.log({"learning rate": step})
            inputs = SimpleNamespace(position=None if epoch is None else SimpleNamespace(epoch=epoch))
            progress.step(OneBatch(step=step, inputs=inputs))
    intervals = [each for each in lines_of(tmp_path, 0) if each["kind"] == "interval"]
    assert [each["step"] for each in intervals] == [2, 4, 6, 8]
    assert [each.get("epochs") for each in intervals] == [None, [3], [6], None], "the first steps of epochs"
    assert [each["logged"]["learning rate"] for each in intervals] == [1.5, 3.5, 5.5, 7.5]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident = 1024 * int(status["VmRSS"].split()[0])
    assert all(0.5 * resident < each["memory"] < 2 * resident for each in intervals)


def test_a_short_run_has_a_hundred_intervals(tmp_path: Path) -> None:
    clock = Clock()
    embedded = Embedded(clock)
    with Progress(embedded, [], record=tmp_path, clock=clock) as progress:
        report_steps(progress, embedded, 2000, 0.001)
    assert sum(each["kind"] == "interval" for each in lines_of(tmp_path)) > 100


def test_there_is_no_record_unless_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Progress(Embedded(Clock()), []).close()
    assert not list(tmp_path.iterdir())
    for bad in ("", "s3://bucket/run"):
        with pytest.raises(ConfigError, match="expected the path of a local file or folder"):
            Progress(record=bad)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written to .*; choose another folder"):
        Progress(record=tmp_path / "file")


def test_the_record_has_the_command_and_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", script.parent, *identity, *arguments], check=True, capture_output=True, text=True, timeout=30
        ).stdout.strip()

    def start() -> dict[str, Any]:
        Progress(Embedded(Clock()), [], record=tmp_path).close()
        return lines_of(tmp_path)[-2]

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text("one")
    monkeypatch.setattr("sys.argv", [str(script), "--token", "t0p", "--name", "two words"])
    assert start()["command"] == f"{script} --token '(hidden)' --name 'two words'"
    assert "commit" in start() and start()["commit"] is None, "no repository"
    git("init", "-q")
    assert start()["commit"] is None, "no commit"
    git("add", ".")
    git("commit", "-qm", "first")
    git("tag", "v1")
    assert start()["commit"] == git("rev-parse", "HEAD")
    script.write_text("changed")
    assert start()["commit"] == f"{git('rev-parse', 'HEAD')}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start()["commit"] is None, "no git"


def test_a_run_gives_a_pipe_for_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(run_context, "_record_pipe", writer)
    for _ in range(2):  # one loop after the other, as in a script with a Progress for each epoch
        Progress(Embedded(Clock()), []).close()
    os.close(writer)
    (tmp_path / "read").write_bytes(os.read(reader, 1 << 16))
    os.close(reader)
    assert [each["kind"] for each in read_records(tmp_path / "read").lines] == ["start", "end"] * 2
