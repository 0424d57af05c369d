"""Output of a run: each process has a log file, and the first trainer's output is also shown, between the run's events.
On a terminal, a line below it shows the progress of all trainers, and the first trainer's own lines of it are left out.

The other trainers print the same lines, and a healthy server prints nothing. When a process fails, the last lines of
its log are shown. Events are records of the logger "satrap.launch", which a handler writes to standard error.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self, TextIO

from satrap.event_log import event, formatter, is_routine, message_for_terminal, set_role
from satrap.launch.child_processes import (
    ChildExited,
    MemoryUsed,
    MetricsServed,
    ProcessOutput,
    ProcessPlaced,
    Report,
    Stream,
)
from satrap.launch.run_events import Event, Process, ProcessExited, Role
from satrap.launch.run_progress import RunProgress
from satrap.launch.terminal import Terminal
from satrap.monitor.record_file import FOLDER, SHOWN, decode, encode
from satrap.monitor.report import fit, is_progress, run_bar
from satrap.monitor.sinks import BAR_SECONDS
from satrap.monitor.status_line import draws_in_place

_LOG = logging.getLogger("satrap.launch")
_SAVED = re.compile(r"satrap run: save of step \S+ into .* done")
_TAIL_LINES = 20
_TAIL_BYTES = 1 << 14


class RunLogs:
    """The log files and the terminal output of one run. A context manager: within it the terminal shows Satrap's log,
    and on exit it is flushed."""

    def __init__(self, folder: Path, log_format: str = "text") -> None:
        """folder: for the log files, beside the folder of the records. All incarnations of a process append to one
            file.
        log_format: of run.log, which has the run's own events; as "json" also of standard error."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._records = folder, folder.with_name(FOLDER)
        self._records.mkdir(parents=True, exist_ok=True)
        self._stderr = Terminal(sys.stderr)
        self._log_format = log_format
        self._has_line = log_format == "text" and draws_in_place(sys.stderr)
        # Two streams to one terminal are written in one order, so that the line stays below both.
        is_one = self._has_line and draws_in_place(sys.stdout) and _device(sys.stdout) == _device(sys.stderr)
        self._stdout = self._stderr if is_one else Terminal(sys.stdout)
        self._progress, self._show_at, self._restarts = RunProgress(time.monotonic()), 0.0, 0
        self._handlers: list[logging.Handler] = [_TerminalHandler(self._stderr), _RunLog(folder / "run.log")]
        self._handlers[1].setFormatter(formatter(log_format))
        if log_format == "json":
            self._handlers[0].setFormatter(formatter(log_format))
        self._start_offsets: dict[Process, int] = {}  # in its log file
        self._unwritten: dict[
            Path, int
        ] = {}  # counts what a full disk kept from files: bytes of logs, lines of records
        self._incomplete_records: dict[Process, bytes] = {}  # the start of a line
        self._incomplete_line = b""  # what the first trainer has begun to log
        self._last_save: str | None = None  # its line of the last save, if not shown; None: it has not saved yet
        self.places: dict[Process, str] = {}
        """Process id and machine of each process that runs."""
        self.metrics: dict[Process, str] = {}
        """URL of the metrics of each process that serves them."""
        self.memory: dict[Process, int] = {}
        """Bytes of processes that were measured since the last time they were recorded."""

    def __enter__(self) -> Self:
        logger = logging.getLogger("satrap")
        for handler in self._handlers:
            logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        set_role("run")
        _LOG.info("started: process %d, logs in %s", os.getpid(), self.folder, extra=event("started", pid=os.getpid()))
        return self

    def __exit__(self, *_: object) -> None:
        self._show_at = 0.0
        self.show(None, self._restarts, is_over=True)  # it remains on the terminal
        if self._stdout is not self._stderr and (unshown := self._stdout.close()):
            _LOG.warning(
                "%d bytes of standard output were not read, or did not fit; the logs are in %s", unshown, self.folder
            )
        for handler in self._handlers:
            logging.getLogger("satrap").removeHandler(handler)
            handler.close()
        self._stderr.close()

    def path(self, process: Process) -> Path:
        return self.folder / f"{process.role}-{process.number}.log"

    def record_path(self, process: Process) -> Path:
        """Return the file of what a trainer records, which `satrap report` reads."""
        return self._records / f"{process.role}-{process.number}.jsonl"

    def record_start(self, process: Process) -> None:
        """Mark the start of a process in its log file."""
        self._append(process, f"--- {process}, start {process.incarnation}\n".encode())
        if process.role is Role.TRAINER:
            self._append_record(process, b"\n")  # ends a line that an earlier incarnation did not complete
        path = self.path(process)
        self._start_offsets[process] = path.stat().st_size if path.exists() else 0

    def show(self, phase: str | None, restarts: int, *, is_over: bool = False) -> None:
        """Draw the line on the terminal, if there is one and it is due. phase: what the run does instead of training.
        restarts: number of processes that were started again. is_over: the run has ended, so no time is left."""
        now = time.monotonic()
        if not self._has_line or now < self._show_at:
            return
        self._show_at, self._restarts = now + BAR_SECONDS, restarts
        columns, report = self._stderr.columns(), self._progress.report(now)
        notes = [f"{restarts} restart{'s' * (restarts != 1)}"] if restarts else []
        notes[:0] = [phase] if phase is not None else []
        if report is not None:
            notes += self._progress.notes
            self._stderr.show(run_bar(report, columns, self._stderr.marks, notes, is_over=is_over))
        else:  # the script has not begun, or has no Progress
            self._stderr.show(fit(notes, columns) if notes else "")

    def handle(self, reports: Iterable[Report]) -> list[Event]:
        """Log reports and return the supervisor's events. Among processes that exited together, those killed by a
        signal come first: they are the cause of the others' exits."""
        events: list[Event] = []
        exits: list[ProcessExited] = []
        for report in reports:
            if isinstance(report, ProcessOutput):
                self._on_output(report.process, report.stream, report.data)
            elif isinstance(report, ProcessPlaced):
                self.places[report.process] = report.where
            elif isinstance(report, MetricsServed):
                self.metrics[report.process] = report.url
            elif isinstance(report, MemoryUsed):
                self.memory[report.process] = report.num_bytes
            elif isinstance(report, ChildExited):
                self.places.pop(report.process, None)
                self.metrics.pop(report.process, None)
                self._on_exit(report.process, failed=report.status != 0 and not report.was_stopped)
                exits.append(ProcessExited(report.process, report.status))
            else:
                events.append(report)
        return events + sorted(exits, key=lambda event: event.status > 0)

    def _on_output(self, process: Process, stream: Stream, data: bytes) -> None:
        if stream == "record":
            self._on_records(process, data)
            return
        self._append(process, data)
        if _is_shown(process):
            (self._stdout if stream == "stdout" else self._stderr).write(
                self._without_routine(data) if stream == "stderr" and self._log_format == "text" else data
            )

    def _without_routine(self, data: bytes) -> bytes:
        """Return what the terminal shows of the first trainer's standard error: its lines of progress, and of saves
        between the first and the last, only where no line below shows how far it is. What begins like a line of its log
        is kept until the line is complete."""
        lines = (self._incomplete_line + data).splitlines(keepends=True)
        self._incomplete_line = b""
        if lines and not lines[-1].endswith(b"\n") and is_routine(lines[-1].decode(errors="replace")):
            self._incomplete_line = lines.pop()
        lines = [line for line in lines if not (self._has_line and is_progress(line))]
        shown = []
        for line in lines:
            text = message_for_terminal(line.decode(errors="surrogateescape")) or ""
            if self._has_line and _SAVED.match(text):
                text, self._last_save = (text, "") if self._last_save is None else ("", text)
            shown.append(text)
        return "".join(shown).encode(errors="surrogateescape")

    def _on_records(self, process: Process, data: bytes) -> None:
        """Keep a trainer's records, except those that are only shown."""
        *lines, incomplete = (self._incomplete_records.pop(process, b"") + data).split(b"\n")
        if incomplete:
            self._incomplete_records[process] = incomplete
        records = [(line, decode(line)) for line in lines]
        for _, record in records:
            if record is not None:
                self._progress.add(process.number, record)
        kept = [line + b"\n" for line, record in records if record is None or record["kind"] != SHOWN]
        if kept:
            self._append_record(process, b"".join(kept))

    def _on_exit(self, process: Process, *, failed: bool) -> None:
        start_offset = self._start_offsets.pop(process)
        if _is_shown(process):
            self._stderr.write((self._last_save or "").encode(errors="surrogateescape"))
            self._incomplete_line, self._last_save = b"", None
        if incomplete := self._incomplete_records.pop(process, b""):
            self._append_record(process, incomplete)
        if failed and not _is_shown(process) and (tail := self._tail(process, start_offset)):
            _LOG.warning("%s failed; the end of its log:", process)
            for line in tail:
                _LOG.warning("%s | %s", process, line)
        if failed:
            _LOG.warning("%s: log file %s", process, self.path(process))

    def _append(self, process: Process, data: bytes) -> None:
        """Append to a process's log file. The terminal and the log file report the bytes that did not fit."""

        def gap(unwritten: int) -> bytes:
            return f"\n--- up to {unwritten} bytes are missing here: they could not be written\n".encode()

        self._write(self.path(process), data, len(data), gap, f"output of {process} is not logged until it can")

    def _append_record(self, process: Process, data: bytes) -> None:
        """Append to a trainer's record. Lines that did not fit are counted, and the report says so."""

        def gap(unwritten: int) -> bytes:
            return b"\n" + encode({"kind": "gap", "missing": unwritten})

        self._write(self.record_path(process), data, data.count(b"\n"), gap, "satrap report will lack this")

    def _write(self, path: Path, data: bytes, size: int, gap: Callable[[int], bytes], effect: str) -> None:
        """Append to a file. A full disk does not end the run: what did not fit is counted, and the next data that does
        comes behind a note. size: of the data, as it is counted. gap: returns the note."""
        unwritten = self._unwritten.pop(path, 0)
        try:
            with open(path, "ab") as file:
                file.write((gap(unwritten) if unwritten else b"") + data)
        except OSError as error:
            self._unwritten[path] = unwritten + size
            if not unwritten:
                _LOG.warning("%s cannot be written (%s); %s", path, error.strerror, effect)

    def _tail(self, process: Process, start_offset: int) -> list[str]:
        """Return the last lines of a process, except log lines of routine events."""
        try:
            with open(self.path(process), "rb") as file:
                size = file.seek(0, 2)
                file.seek(max(start_offset, size - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
                return [line for line in lines if not is_routine(line)][-_TAIL_LINES:]
        except OSError:  # the file was never written, or was removed
            return []


class _RunLog(logging.FileHandler):
    """Writes run.log. On a full disk its lines are missing; the terminal has them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the file cannot be opened
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Close the file. Lines that did not fit are lost."""
        with suppress(OSError):
            super().close()


class _TerminalHandler(logging.Handler):
    """Writes the lines of a log to a terminal that may be paused, for which `logging.StreamHandler` would wait. Without
    a formatter, lines for people."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        line = f"satrap run: {record.getMessage()}" if self.formatter is None else self.format(record)
        self._terminal.write(f"{line}\n".encode(errors="replace"))


def _device(stream: TextIO) -> int:
    """Return the device number of a stream's terminal, which may have no name here, as in a container."""
    return os.fstat(stream.fileno()).st_rdev


def _is_shown(process: Process) -> bool:
    return process.role is Role.TRAINER and process.number == 0
