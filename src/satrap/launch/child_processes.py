"""Child processes of this process: starts, watches and stops them, and reports their output and their exits.

One thread waits for all of them: on their pipes, and on a pidfd of each, which is readable once the process has exited.
A child dies with the thread that started it (`die_with_parent`), so a launcher that is killed leaves no process behind.
"""

import ctypes
import fcntl
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from satrap.errors import ConfigError
from satrap.event_log import place_of_process
from satrap.launch.run_events import Process, ProcessReady, Role, ScriptStarted, StopMode
from satrap.monitor.memory import resident_bytes

GRACE_SECONDS = 10.0
"""Grace period: a process that has not exited this long after it was stopped is killed."""
_MIN_MEASURED, _MAX_MEASURED, _MEASURED_SHARE = 1.0, 60.0, 0.01
"""Seconds between two measurements of memory, and their share of the time since the start."""
_PR_SET_PDEATHSIG = 1
_SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}
_SERVED = re.compile(rb"metrics at (http://\S+?/metrics)\b")
_MAX_PRINTED = 1 << 16  # bytes of a trainer's output in which its address is looked for
_LISTENING = re.compile(rb"satrap (?:server|worker): listening at (\S+)\n")

Stream = Literal["stdout", "stderr", "record"]
"""What a process writes: "record" is what a trainer records of its training."""


@dataclass(frozen=True, slots=True)
class ProcessOutput:
    """Report: a process wrote this."""

    process: Process
    stream: Stream
    data: bytes


@dataclass(frozen=True, slots=True)
class ChildExited:
    """Report, the last one of a process: it exited."""

    process: Process
    status: int
    """Exit status, as in `satrap.launch.supervisor.ProcessExited`."""
    was_stopped: bool
    """Whether it was stopped, rather than exited by itself."""


@dataclass(frozen=True, slots=True)
class ProcessPlaced:
    """Report, the first one of a process: it was started."""

    process: Process
    where: str
    """Its process id and the name of its machine."""


@dataclass(frozen=True, slots=True)
class MetricsServed:
    """Report: a process serves its metrics."""

    process: Process
    url: str


@dataclass(frozen=True, slots=True)
class MemoryUsed:
    """Report: a process uses so much of its machine's memory, with what it shares."""

    process: Process
    num_bytes: int


Report = ProcessPlaced | ProcessOutput | MetricsServed | MemoryUsed | ProcessReady | ScriptStarted | ChildExited


@dataclass(slots=True, eq=False)
class _Child:
    process: Process
    popen: subprocess.Popen[bytes]
    pidfd: int
    pipes: dict[Stream, IO[bytes]]
    rows_file: Path
    release: bool = False
    announces_on: Stream | None = None
    """Stream on which it prints its addresses: a server or worker where it listens, a trainer only its metrics."""
    printed: bytes = b""
    """First output on that stream, kept until the line with the address is complete."""
    runs_script: bool = False
    """Whether a trainer has written to its record, which it does first when it starts the script."""
    kill_at: float | None = None
    was_stopped: bool = False


class ChildProcesses:
    """The child processes of one thread."""

    def __init__(self) -> None:
        self._children: dict[Process, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._placed: list[Report] = []
        self._started = self._measured_at = time.monotonic()

    def start(self, process: Process, arguments: Sequence[str], rows_file: Path, pass_fds: Sequence[int] = ()) -> None:
        """Start `satrap ARGUMENTS...`. Always call it from the same thread, which must outlive the children.

        rows_file: shared-memory file that a server creates.
        """
        is_trainer = process.role is Role.TRAINER
        command = [sys.executable, "-u", "-m", "satrap", "--die-with", str(os.getpid())]
        pipes: dict[Stream, IO[bytes]] = {}
        with ExitStack() as stack:
            if is_trainer:
                reader, writer = os.pipe()
                stack.callback(os.close, writer)
                pipes["record"] = os.fdopen(reader, "rb", buffering=0)
                command += ["--record", str(writer)]
                pass_fds = (*pass_fds, writer)
            popen = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # only the supervisor receives Ctrl-C
                pass_fds=pass_fds,
            )
        assert popen.stdout is not None and popen.stderr is not None
        pipes |= {"stdout": popen.stdout, "stderr": popen.stderr}
        announces_on: Stream | None = ("stderr" if "--http" in arguments else None) if is_trainer else "stdout"
        child = _Child(process, popen, os.pidfd_open(popen.pid), pipes, rows_file, announces_on=announces_on)
        self._children[process] = child
        self._placed.append(ProcessPlaced(process, place_of_process(popen.pid)))
        self._selector.register(child.pidfd, selectors.EVENT_READ, (child, "exit"))
        for name, pipe in pipes.items():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (child, name))

    def stop(self, process: Process, mode: StopMode, release: bool = False) -> None:
        """Signal a process to stop, and kill it after the grace period. release: remove its rows when it exits."""
        child = self._children.get(process)
        if child is None:
            return
        child.was_stopped, child.release = True, child.release or release
        signal.pidfd_send_signal(child.pidfd, _SIGNALS[mode])
        if child.kill_at is None:
            child.kill_at = time.monotonic() + GRACE_SECONDS

    def poll(self, timeout: float) -> list[Report]:
        """Return new reports; wait at most `timeout` seconds for one."""
        self._kill_overdue()
        reports, self._placed = [*self._placed, *self._measure()], []
        exited: list[_Child] = []
        for key, _ in self._selector.select(0 if reports else timeout):
            child, source = key.data
            if source == "exit":
                exited.append(child)
            elif (data := self._read(key.fd)) is not None:
                reports += self._on_output(child, source, data)
        return reports + [report for child in exited for report in self._reap(child)]

    def close(self, *, release: bool = False) -> None:
        """Kill the remaining children and wait for them. release: remove their rows."""
        for child in list(self._children.values()):
            child.was_stopped, child.release = True, child.release or release
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
            self._reap(child)
        self._selector.close()

    # -- internals ----------------------------------------------------------------------------------------------------

    def _read(self, fd: int) -> bytes | None:
        """Return what the pipe holds; None if it is empty or at its end. A pipe at its end is unregistered."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return None
        if not data:
            self._selector.unregister(fd)
            return None
        return data

    def _on_output(self, child: _Child, stream: Stream, data: bytes) -> list[Report]:
        output = ProcessOutput(child.process, stream, data)
        if stream == "record" and not child.runs_script:
            child.runs_script = True
            return [ScriptStarted(child.process), output]
        if stream != child.announces_on:
            return [output]
        child.printed += data
        is_trainer = child.process.role is Role.TRAINER
        listening, served = _LISTENING.search(child.printed), _SERVED.search(child.printed)
        if (served if is_trainer else listening) is None and not (is_trainer and len(child.printed) > _MAX_PRINTED):
            return [output]
        child.announces_on, child.printed = None, b""
        reports: list[Report] = [output]
        if served is not None:
            reports.append(MetricsServed(child.process, served[1].decode()))
        if listening is not None:
            reports.append(ProcessReady(child.process, listening[1].decode()))
        return reports

    def _reap(self, child: _Child) -> list[Report]:
        """Kill the process group of a child that has exited, read its remaining output, and release its descriptors and
        its rows."""
        with suppress(ProcessLookupError):
            os.killpg(child.popen.pid, signal.SIGKILL)  # before `wait`, after which another process may get the id
        status = child.popen.wait()
        reports: list[Report] = []
        watched = self._selector.get_map()
        for name, pipe in child.pipes.items():
            fd = pipe.fileno()
            left = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)  # a grandchild in another session may write forever
            while left > 0 and fd in watched and (data := self._read(fd)) is not None:
                reports += self._on_output(child, name, data)
                left -= len(data)
            if fd in watched:  # a grandchild holds it
                self._selector.unregister(fd)
            pipe.close()
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        if child.release:
            child.rows_file.unlink(missing_ok=True)
        del self._children[child.process]
        if child.was_stopped and status == -signal.SIGKILL:
            status = -signal.SIGTERM
        return [*reports, ChildExited(child.process, status, child.was_stopped)]

    def _measure(self) -> list[Report]:
        """Return the memory of each child but trainers, which record theirs: every second, later every minute."""
        now = time.monotonic()
        if now < self._measured_at + min(max(_MIN_MEASURED, _MEASURED_SHARE * (now - self._started)), _MAX_MEASURED):
            return []
        self._measured_at = now
        others = [child for child in self._children.values() if child.process.role is not Role.TRAINER]
        sizes = [(child.process, resident_bytes(child.popen.pid)) for child in others]
        return [MemoryUsed(process, num_bytes) for process, num_bytes in sizes if num_bytes]

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.kill_at is not None and now > child.kill_at:
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it exits, and unblock SIGINT and SIGTERM, which
    the parent may have blocked.

    parent: the process of that thread; ConfigError if it has exited already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ConfigError(f"this system cannot kill a process with its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        raise ConfigError(f"process {parent}, which started this one, has already exited")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
