"""Sinks of progress: what a terminal, a file of JSON lines, and TensorBoard get, and how the sinks handle failures."""

import io
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from example_reports import BARE, EVALUATED, FULL
from satrap.errors import ConfigError
from satrap.monitor.report import Report, bar, line
from satrap.monitor.sinks import BAR_SECONDS, JsonLines, Screen, Sink, TensorBoard


def test_other_streams_get_lines(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.write(FULL)
    screen.write(BARE)
    screen.close()
    assert capsys.readouterr().err == f"{line(FULL)}\n{line(BARE)}\n"


def test_a_terminal_gets_one_bar_that_is_redrawn() -> None:
    """Uses a real terminal, 60 columns wide."""
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(ours, "rb", buffering=0) as reader, os.fdopen(theirs, "w", encoding="utf-8") as stream:
        screen = Screen(stream)
        screen.write(FULL)
        screen.write(BARE)
        screen.close()
        screen.close()
        expected = f"\r{bar(FULL, 59, '█░')}\x1b[K\r{bar(BARE, 59)}\x1b[K\r{line(BARE)}\x1b[K\r\n".encode()
        found = b""
        while len(found) < len(expected):
            found += reader.read(1024)
    assert found == expected


def test_an_evaluation_stays_on_a_terminal() -> None:
    stream = io.StringIO()
    screen = Screen(stream, as_bar=True)
    for report in (FULL, EVALUATED, BARE, EVALUATED):
        screen.write(report)
    screen.close()
    whole, bare = bar(FULL, 79), bar(BARE, 79)
    assert stream.getvalue() == (f"\r{whole}\x1b[K\r{line(EVALUATED)}\x1b[K\n\r{bare}\x1b[K\r{line(EVALUATED)}\x1b[K\n")


def test_a_notebook_gets_one_line_that_is_redrawn() -> None:
    """A notebook's stream is no terminal, and shows no more of escape sequences than colours."""
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    screen = Screen(notebook)
    assert screen.every_seconds == BAR_SECONDS
    for report in (FULL, BARE, EVALUATED):
        screen.write(report)
    screen.write(BARE)
    screen.close()
    whole, bare, evaluated = bar(FULL, 79), bar(BARE, 79), line(EVALUATED)
    assert notebook.getvalue() == f"\r{whole}\r{bare.ljust(len(whole))}\r{evaluated}\n\r{bare}\r{line(BARE)}\n"


def test_a_bar_in_an_encoding_without_blocks() -> None:
    for encoding, marks in (("ascii", "#."), ("utf-8", "█░"), ("cp437", "█░"), ("latin-1", "#.")):
        data = io.BytesIO()
        stream = io.TextIOWrapper(data, encoding=encoding, newline="")
        screen = Screen(stream, as_bar=True)
        screen.write(FULL)
        screen.close()
        assert data.getvalue().decode(encoding) == f"\r{bar(FULL, 79, marks)}\x1b[K\r{line(FULL)}\x1b[K\n"


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for report in (FULL, Report(step=4, samples=40, seconds=1.0, samples_per_second=5.0, loss=math.nan, auc=math.inf)):
        sink = JsonLines(path)  # appends
        sink.write(report)
        sink.close()
    full, odd = (json.loads(text, parse_constant=pytest.fail) for text in path.read_text().splitlines())
    assert full == {
        "step": 1200,
        "samples": 4_915_200,
        "seconds": 62.5,
        "samples_per_second": 81_234.5,
        "loss": 0.44118,
        "auc": 0.78124,
        "normalised_entropy": 0.84006,
        "staleness": 3.25,
        "max_staleness": 4,
        "rows/user": 1_000_000,
        "rows/item": 230_000,
        "seconds/lookup": 0.0021,
        "seconds/dense": 0.0402,
        "lost/batches/overflow": 2,
        "lost/rows/malformed": 1500,
    }
    assert odd == {"step": 4, "samples": 40, "seconds": 1.0, "samples_per_second": 5.0, "loss": None, "auc": None}


def test_json_lines_in_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        JsonLines(tmp_path / "none" / "log.jsonl")


def test_numbers_of_the_script_are_in_both_files(tmp_path: Path) -> None:
    sinks: list[Sink] = [JsonLines(tmp_path / "log.jsonl"), TensorBoard(tmp_path / "run")]
    for sink in sinks:
        sink.write(replace(BARE, logged={"learning rate": 0.125}))
        sink.close()
    assert json.loads((tmp_path / "log.jsonl").read_text())["learning rate"] == 0.125
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    (tag,) = {tag for tag in events.Tags()["scalars"] if tag.startswith("learning")}
    assert [(event.step, event.value) for event in events.Scalars(tag)] == [(BARE.step, 0.125)]


def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path / "run")
    sink.write(FULL)
    sink.write(Report(step=1300, samples=5_000_000, seconds=63.0, samples_per_second=1.0, loss=0.25))
    sink.close()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    expected = set(FULL.scalars()) - {"step"}
    assert set(events.Tags()["scalars"]) == expected
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1200, pytest.approx(0.44118)),
        (1300, 0.25),
    ]
    assert [event.value for event in events.Scalars("rows/user")] == [1_000_000]


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"TensorBoard: .*: pip install 'satrap\[tensorboard\]', or omit this sink"):
        TensorBoard(tmp_path)


def test_a_closed_terminal_does_not_stop_training() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    screen = Screen(stream, as_bar=True)
    screen.write(FULL)
    screen.close()
    with pytest.raises(BrokenPipeError):  # the stream was broken: flushing the buffered text fails again
        stream.close()


def test_a_process_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    Screen().write(FULL)
