"""The children of one process of ours: starts them, watches them, ends them, and reports what they did.

One thread waits for all of them: their pipes, and a file descriptor of each process that is readable once it is gone.
A child dies with the thread that started it (`die_with`), so whoever is killed leaves no process behind.
"""

import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from satrap.errors import ConfigError
from satrap.launch.supervisor import How, Process, Ready, Role

GRACE_SECONDS = 10.0
"""A process that was told to end and is still there then is killed."""
_PR_SET_PDEATHSIG = 1
_SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}
_LISTENS = re.compile(rb"satrap (?:server|worker): listening at (\S+)\n")

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A report: a process wrote this."""

    process: Process
    stream: Stream
    data: bytes


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """A report, the last one of a process."""

    process: Process
    status: int
    """See `satrap.launch.supervisor.Ended`."""
    was_told: bool
    """To end."""


Report = OutputLine | Ready | ProcessExited


@dataclass(slots=True, eq=False)
class _Child:
    process: Process
    popen: subprocess.Popen[bytes]
    fd: int
    """Of the process."""
    pipes: dict[Stream, IO[bytes]]
    rows: Path
    for_good: bool = False
    said: bytes = b""
    """The beginning of what a server or worker printed, until it says where it listens."""
    listens: bool = False
    kill_at: float | None = None
    was_told: bool = False


class ChildProcesses:
    """See the file's docstring."""

    def __init__(self) -> None:
        self._children: dict[Process, _Child] = {}
        self._selector = selectors.DefaultSelector()

    def start(self, process: Process, arguments: Sequence[str], rows: Path, pass_fds: Sequence[int] = ()) -> None:
        """Starts `satrap ARGUMENTS...`. Only one thread may call this, and it lives as long as they shall.

        rows: the shared-memory file that a server makes.
        """
        popen = subprocess.Popen(
            [sys.executable, "-u", "-m", "satrap", "--die-with", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the supervisor's alone to hear
            pass_fds=pass_fds,
        )
        assert popen.stdout is not None and popen.stderr is not None
        pipes: dict[Stream, IO[bytes]] = {"stdout": popen.stdout, "stderr": popen.stderr}
        child = _Child(process, popen, os.pidfd_open(popen.pid), pipes, rows)
        self._children[process] = child
        self._selector.register(child.fd, selectors.EVENT_READ, (child, "gone"))
        for name, pipe in pipes.items():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (child, name))

    def end(self, process: Process, how: How, for_good: bool = False) -> None:
        """Tells a process to end; kills it if it does not within some seconds. for_good: its rows are removed then."""
        child = self._children.get(process)
        if child is None:
            return
        child.was_told, child.for_good = True, child.for_good or for_good
        child.popen.send_signal(_SIGNALS[how])
        if child.kill_at is None:
            child.kill_at = time.monotonic() + GRACE_SECONDS

    def reports(self, timeout: float) -> list[Report]:
        """What they did; waits that long for it."""
        self._kill_overdue()
        found: list[Report] = []
        gone: list[_Child] = []
        for key, _ in self._selector.select(timeout):
            child, what = key.data
            if what == "gone":
                gone.append(child)
            elif (data := self._read(key.fd)) is not None:
                found += self._took(child, what, data)
        return found + [report for child in gone for report in self._reap(child)]

    def close(self) -> None:
        """Kills what is left, and waits for it."""
        for child in list(self._children.values()):
            child.was_told = True
            child.popen.kill()
            child.popen.wait()
            self._reap(child)
        self._selector.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _read(self, fd: int) -> bytes | None:
        """What is there; None if nothing is. A pipe that was closed is not watched any more."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return None
        if not data:
            self._selector.unregister(fd)
            return None
        return data

    def _took(self, child: _Child, stream: Stream, data: bytes) -> list[Report]:
        said = OutputLine(child.process, stream, data)
        if child.process.role is Role.TRAINER or child.listens or stream == "stderr":
            return [said]
        child.said += data
        if (line := _LISTENS.search(child.said)) is None:
            return [said]
        child.listens, child.said = True, b""
        return [said, Ready(child.process, line[1].decode())]

    def _reap(self, child: _Child) -> list[Report]:
        """A child that is gone: its last words, its status, and what it left."""
        found: list[Report] = []
        watched = self._selector.get_map()
        for name, pipe in child.pipes.items():
            fd = pipe.fileno()
            while fd in watched and (data := self._read(fd)) is not None:
                found += self._took(child, name, data)
            if fd in watched:  # a grandchild holds it
                self._selector.unregister(fd)
            pipe.close()
        status = child.popen.wait()
        with suppress(ProcessLookupError):  # of its own children
            os.killpg(child.popen.pid, signal.SIGKILL)
        self._selector.unregister(child.fd)
        os.close(child.fd)
        if child.for_good:
            child.rows.unlink(missing_ok=True)
        del self._children[child.process]
        if child.was_told and status == -signal.SIGKILL:
            status = -signal.SIGTERM
        return [*found, ProcessExited(child.process, status, child.was_told)]

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.kill_at is not None and now > child.kill_at:
                child.popen.kill()


def die_with(parent: int) -> None:
    """This process is killed when the thread that started it ends, which is one of the process `parent`. Until then it
    hears the signals that end it, even if that one blocked them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ConfigError(f"this system cannot end a process with its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        raise ConfigError(f"process {parent}, which started this one, is gone already")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
