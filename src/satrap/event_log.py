"""The form of Satrap's log: one line for each event, as text or as JSON, with the role, number, job and step of the
process that logs it.

The library only calls `logging.getLogger("satrap....")`, with `extra=event(...)` for what a program may want to read.
The command line installs a handler with one of these formatters; importing satrap installs none. A script that is
started without `satrap` may do the same: `handler.setFormatter(satrap.event_log.formatter("json"))`.
"""

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")
_ROUTINE = re.compile(r'\d{4}-\d\d-\d\dT\S+Z (?:DEBUG|INFO) |\{"time": "[^"]*", "level": "(?:DEBUG|INFO)"')
_CHECKPOINT = re.compile(r"\S+ INFO (?:\S+ ){4}satrap\.checkpoint: (.*(?<! begun)\n)", re.DOTALL)
_TRAINER = "trainer"
# Control characters, which a peer may have put into a name: a line stays one line, and moves no cursor.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}
_ESCAPES |= {ord("\n"): "\\n", ord("\t"): "\\t", ord("\r"): "\\r"}


@dataclass(slots=True)
class _ProcessFields:
    """What every line of this process has."""

    role: str | None = None
    number: int | None = None
    has_fixed_number: bool = False
    job: str | None = None
    step: Callable[[], int | None] | None = None


_process = _ProcessFields()


def set_role(role: str, number: int | None = None) -> None:
    """Set the role of this process, and its number if it was given one. For the command line."""
    _process.role, _process.number, _process.has_fixed_number = role, number, number is not None


def describe_process(
    role: str, *, number: int | None = None, job: str | None = None, step: Callable[[], int | None] | None = None
) -> None:
    """Set what is known of this process, if it has that role. A process without a role may become a trainer."""
    if _process.role is None and role == _TRAINER:
        _process.role = role
    if _process.role != role:
        return
    if number is not None and not _process.has_fixed_number:
        _process.number = number
    _process.job = job or _process.job
    _process.step = step or _process.step


def place_of_process(process: int | None = None) -> str:
    """Return where a process is, in words. process: its id on this machine; None: this process."""
    return f"process {process or os.getpid()} on {socket.gethostname()}"


def event(name: str, /, **values: Any) -> dict[str, Any]:
    """Return the `extra` of a log record: the name of its event, and values that JSON lines have beside the message.
    `number`, `job` and `step` replace those of the process."""
    return {"event": name, "event_values": values}


def is_routine(line: str) -> bool:
    """Return whether a line of either format has a level below WARNING."""
    return _ROUTINE.match(line) is not None


def message_for_terminal(line: str) -> str | None:
    """Return what a terminal shows of a line that a trainer wrote, or None. A line of the log below WARNING is shown
    only if it says what became of a checkpoint, as its message. Lines in JSON are not known."""
    if not is_routine(line):
        return line
    match = _CHECKPOINT.match(line)
    return None if match is None else f"satrap run: {match[1]}"


def formatter(name: str) -> logging.Formatter:
    """Return the formatter of a name in `FORMATS`."""
    return JsonFormatter() if name == "json" else TextFormatter()


class TextFormatter(logging.Formatter):
    """Lines for people: `2026-11-23T14:53:12.123Z INFO server 0 job=1f0c3a9b step=120 satrap.server: message`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line = _fields(self, record)
        shown = {name: "-" if line[name] is None else line[name] for name in ("role", "number", "job", "step")}
        text = " | ".join([str(line["message"]), *([line["exception"]] if "exception" in line else [])])
        return (
            f"{line['time']} {line['level']} {shown['role']} {shown['number']} job={shown['job']} "
            f"step={shown['step']} {line['logger']}: {text.translate(_ESCAPES)}"
        )


class JsonFormatter(logging.Formatter):
    """Lines for programs: one JSON object each, with the event's name and values."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return json.dumps(_fields(self, record), default=str)


def _fields(form: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    moment = datetime.fromtimestamp(record.created, UTC)
    line: dict[str, Any] = {
        "time": f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z",
        "level": record.levelname,
        "role": _process.role,
        "number": _process.number,
        "job": _process.job,
        "step": _latest_step(),
        "logger": record.name,
        "event": getattr(record, "event", None),
        "message": record.getMessage(),
    }
    line |= getattr(record, "event_values", {})
    if record.exc_info:
        line["exception"] = form.formatException(record.exc_info)
    return line


def _latest_step() -> int | None:
    with suppress(Exception):  # in a fork, or while the process ends: the event matters more
        return None if _process.step is None else _process.step()
    return None


class LimitedLog:
    """Logs at most one record every so many seconds; of those that come sooner only the last, and later."""

    def __init__(self, log: Callable[..., None], seconds: float = 1.0) -> None:
        """log: a method of a logger."""
        self._log, self._seconds = log, seconds
        self._lock = threading.Lock()
        self._next_at = -1e9
        self._waiting: tuple[str, tuple[object, ...], dict[str, Any]] | None = None

    def __call__(self, message: str, *arguments: object, extra: dict[str, Any]) -> None:
        """Log the record now, or later unless another one follows."""
        with self._lock:
            now = time.monotonic()
            if now < self._next_at:
                if self._waiting is None:
                    timer = threading.Timer(self._next_at - now, self._log_waiting)
                    timer.daemon = True
                    timer.start()
                self._waiting = message, arguments, extra
                return
            self._next_at = now + self._seconds
        self._log(message, *arguments, extra=extra)

    def _log_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
            self._next_at = time.monotonic() + self._seconds
        if waiting is not None:
            self._log(waiting[0], *waiting[1], extra=waiting[2])
