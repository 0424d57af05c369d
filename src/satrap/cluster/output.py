"""What the processes of a run write: all of it in a log file each, the first trainer's on the user's terminal as well.

The other trainers say the same again, and a server that runs well says nothing; of a process that failed the last
lines are shown.
"""

import sys
from pathlib import Path
from typing import Literal

from satrap.cluster.supervisor import Process, Role

_TAIL_LINES = 20
_TAIL_BYTES = 1 << 14


class Output:
    """See the file's docstring."""

    def __init__(self, folder: Path) -> None:
        """folder: for the log files; each start of a process adds to the same one."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._begins: dict[Process, int] = {}  # in its log file

    def path(self, process: Process) -> Path:
        """Of its log file."""
        return self._folder / f"{process.role}-{process.number}.log"

    def begin(self, process: Process) -> None:
        """It is started."""
        self._begins[process] = self._log(process, f"--- {process}, start {process.start}\n".encode())

    def take(self, process: Process, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """It wrote this."""
        self._log(process, data)
        if _is_shown(process):
            to = sys.stdout if stream == "stdout" else sys.stderr
            to.flush()
            to.buffer.write(data)
            to.flush()

    def end(self, process: Process, *, failed: bool) -> None:
        """It ended."""
        begin = self._begins.pop(process)
        if failed and not _is_shown(process):
            for line in self._tail(process, begin):
                self.say(f"{process} | {line}")
        if failed:
            self.say(f"{process}: its log is {self.path(process)}")

    def _log(self, process: Process, data: bytes) -> int:
        """Returns how long the file is then."""
        with open(self.path(process), "ab") as file:
            file.write(data)
            return file.tell()

    def _tail(self, process: Process, begin: int) -> list[str]:
        with open(self.path(process), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(begin, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]

    def say(self, text: str) -> None:
        """A line of the run's own."""
        print(f"satrap run: {text}", file=sys.stderr, flush=True)


def _is_shown(process: Process) -> bool:
    return process.role is Role.TRAINER and process.number == 0
