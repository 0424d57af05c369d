"""The launcher of this machine: starts the processes of a run as children, watches them, ends them.

One thread waits for all of them: their pipes, and a file descriptor of each process that is readable once it is gone.
A child dies with its parent (`die_with`), so a supervisor that is killed leaves no process behind.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from satrap.cluster.output import Output
from satrap.cluster.supervisor import Ended, Event, Process, Ready, Role
from satrap.errors import ConfigError

GRACE_SECONDS = 10.0
"""A process that was told to end and is still there then is killed."""
_PR_SET_PDEATHSIG = 1
_SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}
_LISTENS = re.compile(rb"satrap (?:server|worker): listening at (\S+)\n")


@dataclass(slots=True, eq=False)
class _Child:
    process: Process
    popen: subprocess.Popen[bytes]
    fd: int
    """Of the process."""
    said: bytes = b""
    """The beginning of what a server or worker printed, until it says where it listens."""
    listens: bool = False
    kill_at: float | None = None
    was_told: bool = False
    pipes: list[int] = field(default_factory=list)


class LocalLauncher:
    """Satisfies `satrap.cluster.run.Launcher`."""

    def __init__(self, folder: Path, output: Output, memory: Path) -> None:
        """memory: a folder in shared memory, for the rows."""
        if not os.access(memory, os.W_OK | os.X_OK):
            raise ConfigError(f"memory is {os.fspath(memory)!r}; wanted a folder that can be written to, for the rows")
        self._folder, self._output, self._memory = folder, output, memory
        self._children: dict[Process, _Child] = {}
        self._selector = selectors.DefaultSelector()

    def listen_address(self) -> str:
        """See Launcher."""
        return "tcp://127.0.0.1:0"

    def meeting(self, name: str, launch: int) -> str:
        """See Launcher."""
        return f"file://{(self._folder / f'meeting-{name}-{launch}').absolute()}"

    def rows(self, name: str, server: int) -> str:
        """See Launcher."""
        return str(self._memory / f"satrap-{name}-{server}")

    def forget(self, name: str) -> None:
        """See Launcher."""
        for file in [*self._memory.glob(f"satrap-{name}-*"), *self._folder.glob(f"meeting-{name}-*")]:
            file.unlink(missing_ok=True)

    def start(self, process: Process, arguments: Sequence[str]) -> None:
        """See Launcher."""
        command = [sys.executable, "-u", "-m", "satrap", "--die-with", str(os.getpid()), *arguments]
        self._output.begin(process)
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the supervisor's alone to hear
        )
        child = _Child(process, popen, os.pidfd_open(popen.pid))
        self._children[process] = child
        self._selector.register(child.fd, selectors.EVENT_READ, (child, "gone"))
        for name, pipe in (("stdout", popen.stdout), ("stderr", popen.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, (child, name))
            child.pipes.append(pipe.fileno())

    def end(self, process: Process, how: Literal["interrupt", "terminate", "kill"]) -> None:
        """See Launcher."""
        child = self._children.get(process)
        if child is None:
            return
        child.was_told = True
        child.popen.send_signal(_SIGNALS[how])
        if child.kill_at is None:
            child.kill_at = time.monotonic() + GRACE_SECONDS

    def events(self, timeout: float) -> list[Event]:
        """See Launcher."""
        self._kill_overdue()
        found: list[Event] = []
        gone: list[_Child] = []
        for key, _ in self._selector.select(timeout):
            child, what = key.data
            if what == "gone":
                gone.append(child)
            elif (data := self._read(key.fd)) is not None:
                found += self._took(child, what, data)
        ended = [event for child in gone for event in self._reap(child)]
        # Of those that went together the one that did not go by itself first: it took the others with it.
        return found + sorted(ended, key=lambda event: isinstance(event, Ended) and event.status > 0)

    def close(self) -> None:
        """See Launcher."""
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

    def _took(self, child: _Child, stream: Literal["stdout", "stderr"], data: bytes) -> list[Event]:
        self._output.take(child.process, stream, data)
        if child.process.role is Role.TRAINER or child.listens or stream == "stderr":
            return []
        child.said += data
        if (line := _LISTENS.search(child.said)) is None:
            return []
        child.listens, child.said = True, b""
        return [Ready(child.process, line[1].decode())]

    def _reap(self, child: _Child) -> list[Event]:
        """A child that is gone: its last words, its status, and what it left."""
        found: list[Event] = []
        watched = self._selector.get_map()
        for name, fd in zip(("stdout", "stderr"), child.pipes, strict=True):
            while fd in watched and (data := self._read(fd)) is not None:
                found += self._took(child, name, data)  # type: ignore[arg-type]
            if fd in watched:  # a grandchild holds it
                self._selector.unregister(fd)
        status = child.popen.wait()
        for pipe in (child.popen.stdout, child.popen.stderr):
            assert pipe is not None
            pipe.close()
        with suppress(ProcessLookupError):  # of its own children
            os.killpg(child.popen.pid, signal.SIGKILL)
        self._selector.unregister(child.fd)
        os.close(child.fd)
        del self._children[child.process]
        if child.was_told and status == -signal.SIGKILL:
            status = -signal.SIGTERM
        self._output.end(child.process, failed=status != 0 and not child.was_told)
        return [*found, Ended(child.process, status)]

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.kill_at is not None and now > child.kill_at:
                child.popen.kill()


def die_with(parent: int) -> None:
    """This process is killed when the thread that started it ends, which is one of the process `parent`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ConfigError(f"this system cannot end a process with its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        raise ConfigError(f"process {parent}, which started this one, is gone already")
