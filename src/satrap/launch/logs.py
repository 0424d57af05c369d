"""What the processes of a run write: all of it in a log file each, the first trainer's on the user's terminal as well.

The other trainers say the same again, and a server that runs well says nothing; of a process that failed the last
lines are shown.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from satrap.launch.child_processes import OutputLine, ProcessExited, Report, Stream
from satrap.launch.supervisor import Ended, Event, Process, Role
from satrap.launch.terminal import Terminal

_TAIL_LINES = 20
_TAIL_BYTES = 1 << 14


class RunLogs:
    """See the file's docstring. A context manager: at its end what was said is shown."""

    def __init__(self, folder: Path) -> None:
        """folder: for the log files; each start of a process adds to the same one."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._stdout, self._stderr = Terminal(sys.stdout), Terminal(sys.stderr)
        self._begins: dict[Process, int] = {}  # in its log file
        self._missing: dict[Path, int] = {}  # bytes that a log file had no room for

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if left := self._stdout.close():
            self.say(f"{left} bytes of standard output were not read, or found no room; {self.folder} has them")
        self._stderr.close()

    def path(self, process: Process) -> Path:
        """Of its log file."""
        return self.folder / f"{process.role}-{process.number}.log"

    def begin(self, process: Process) -> None:
        """It is started."""
        self._log(process, f"--- {process}, start {process.start}\n".encode())
        path = self.path(process)
        self._begins[process] = path.stat().st_size if path.exists() else 0

    def hear(self, reports: Iterable[Report]) -> list[Event]:
        """Writes down what was reported; returns what the supervisor must know of it. Of processes that went together
        the one that did not go by itself comes first: it took the others with it."""
        found: list[Event] = []
        ended: list[Ended] = []
        for report in reports:
            if isinstance(report, OutputLine):
                self._take(report.process, report.stream, report.data)
            elif isinstance(report, ProcessExited):
                self._end(report.process, failed=report.status != 0 and not report.was_told)
                ended.append(Ended(report.process, report.status))
            else:
                found.append(report)
        return found + sorted(ended, key=lambda event: event.status > 0)

    def _take(self, process: Process, stream: Stream, data: bytes) -> None:
        self._log(process, data)
        if _is_shown(process):
            (self._stdout if stream == "stdout" else self._stderr).write(data)

    def _end(self, process: Process, *, failed: bool) -> None:
        begin = self._begins.pop(process)
        if failed and not _is_shown(process):
            for line in self._tail(process, begin):
                self.say(f"{process} | {line}")
        if failed:
            self.say(f"{process}: its log is {self.path(process)}")

    def _log(self, process: Process, data: bytes) -> None:
        """A run does not end because a disk is full: what finds no room is counted, which is told here and there."""
        path = self.path(process)
        missing = self._missing.pop(path, 0)
        note = f"\n--- up to {missing} bytes are missing here: they could not be written\n".encode() if missing else b""
        try:
            with open(path, "ab") as file:
                file.write(note + data)
        except OSError as error:
            self._missing[path] = missing + len(data)
            if not missing:
                self.say(f"{path} cannot be written ({error.strerror}): until it can, what {process} says is not in it")

    def _tail(self, process: Process, begin: int) -> list[str]:
        try:
            with open(self.path(process), "rb") as file:
                size = file.seek(0, 2)
                file.seek(max(begin, size - _TAIL_BYTES))
                return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError:  # it was never written, or somebody removed it
            return []

    def say(self, text: str) -> None:
        """A line of the run's own."""
        self._stderr.write(f"satrap run: {text}\n".encode(errors="replace"))


def _is_shown(process: Process) -> bool:
    return process.role is Role.TRAINER and process.number == 0
