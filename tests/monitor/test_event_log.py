"""The lines of the log, in both formats: one for each event, with all fields, whatever the message holds."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logged import logged
from satrap import event_log
from satrap.config.job import Job
from satrap.config.optimizers import Adagrad, Ftrl
from satrap.config.tables import Table
from satrap.event_log import (
    FORMATS,
    LimitedLog,
    describe_process,
    event,
    formatter,
    is_routine,
    message_for_terminal,
    set_role,
)
from waiting import wait_until

LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>[A-Z]+) (?P<role>\S+) (?P<number>\S+) "
    r"job=(?P<job>\S+) step=(?P<step>\S+) (?P<logger>[\w.]+): (?P<message>.*)"
)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(event_log, "_process", event_log._ProcessFields())
    yield


def record(message: str, *arguments: object, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("satrap.tests", logging.INFO, __file__, 1, message, arguments, None)
    vars(made).update(extra)
    return made


def parse(line: str) -> dict[str, str]:
    match = LINE.fullmatch(line)
    assert match is not None, line
    return match.groupdict()


@given(st.text(), st.text())
def test_a_line_is_one_line_whatever_the_message_holds(message: str, name: str) -> None:
    made = record("%s", message, **event("job", name=name))
    text, line = formatter("text").format(made), formatter("json").format(made)
    assert len(text.splitlines()) == len(line.splitlines()) == 1
    assert parse(text)["message"].isprintable() or not message.isprintable()
    read = json.loads(line)
    assert (read["message"], read["name"], read["event"]) == (message, name, "job")
    assert is_routine(text) and is_routine(line)
    made.levelname = "WARNING"
    assert not any(is_routine(formatter(form).format(made)) for form in FORMATS)
    assert read.keys() >= {"time", "level", "role", "number", "job", "step", "logger"}


def test_of_routine_lines_a_terminal_shows_what_became_of_checkpoints() -> None:
    def shown(message: str, *, logger: str = "satrap.checkpoint", level: int = logging.INFO) -> str | None:
        line = formatter("text").format(logging.LogRecord(logger, level, "", 0, message, None, None)) + "\n"
        told = message_for_terminal(line)
        return "all" if told == line else told

    resumed = "launch 2 continues after step 30, from run: step-30"
    assert shown(resumed) == f"satrap run: {resumed}\n"
    assert shown("save of step 30 into run done: 3 KiB in 0.1 s") is not None
    assert shown("save of step 30 into run begun") is None
    assert shown("attempt 65537 started", logger="satrap.worker") is None
    assert shown("satrap.checkpoint: done", logger="satrap.worker") is None
    assert shown("the disk is full", level=logging.WARNING) == "all"
    assert message_for_terminal("the script's own line\n") == "the script's own line\n"


def test_the_fields_of_the_process() -> None:
    made = record("news")
    assert parse(formatter("text").format(made)) | {"time": ""} == {
        "time": "",
        "level": "INFO",
        "role": "-",
        "number": "-",
        "job": "-",
        "step": "-",
        "logger": "satrap.tests",
        "message": "news",
    }
    set_role("server")
    describe_process("trainer", number=7, job="another role is ignored")
    describe_process("server", number=2, job="12345678", step=lambda: 30)
    found = parse(formatter("text").format(made))
    assert [found[name] for name in ("role", "number", "job", "step")] == ["server", "2", "12345678", "30"]
    read = json.loads(formatter("json").format(record("news", **event("x", step=31))))
    assert [read[name] for name in ("role", "number", "job", "step")] == ["server", 2, "12345678", 31]
    set_role("server", 5)
    describe_process("server", number=2)
    assert parse(formatter("text").format(made))["number"] == "5", "the command line's number stays"


def test_a_process_without_a_role_becomes_a_trainer() -> None:
    describe_process("server", number=1)
    assert parse(formatter("text").format(record("news")))["role"] == "-"
    describe_process("trainer", number=1)
    assert parse(formatter("text").format(record("news")))["role"] == "trainer"


@pytest.mark.parametrize("form", FORMATS)
def test_an_exception_stays_on_the_line(form: str) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    line = formatter(form).format(made)
    assert len(line.splitlines()) == 1 and "Traceback" in line and "test_event_log.py" in line


def test_importing_satrap_installs_no_handler() -> None:
    code = "import logging, satrap, satrap.server.server, satrap.launch.run_loop, satrap.cli.main\n"
    code += "print([name for name, each in logging.root.manager.loggerDict.items() if name.startswith('satrap') "
    code += "and getattr(each, 'handlers', ())], logging.root.handlers)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[] []\n"


def test_a_limited_log_keeps_the_last_record() -> None:
    with logged("satrap.tests", "number 0", logging.INFO) as records:
        log = LimitedLog(logging.getLogger("satrap.tests").info, seconds=0.2)
        for number in range(100):
            log("number %d", number, extra=event("x", number=number))
        wait_until(lambda: len(records) >= 2)
    assert records[0].getMessage() == "number 0" and records[-1].getMessage() == "number 99"
    assert len(records) < 100


def test_fingerprints_differ_as_jobs_do() -> None:
    tables = [Table("a", dim=4), Table("b", dim=4), Table("a", dim=8), Table("a", dim=4, optimizer=Ftrl(lr=0.2))]
    tables += [Table("a", dim=4, optimizer=Adagrad(lr=lr)) for lr in (0.1, 0.2)]
    jobs = [Job(tables=(table,), seed=seed) for table in tables for seed in (0, 1)]
    for one in jobs:
        for other in jobs:
            assert (one.fingerprint == other.fingerprint) == (not one.differences(other))
