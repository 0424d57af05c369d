"""A run: one loop that hears what happened to its processes, asks the supervisor, and does what it says.

launcher.events, resizer.events ──> Supervisor.handle ──> membership on disk ──> launcher.start, .end, resizer.move
"""

import fcntl
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from satrap.errors import ConfigError
from satrap.launch.logs import RunLogs
from satrap.launch.process_command import Command, Script
from satrap.launch.run_state import RunState
from satrap.launch.scaler import Scaler
from satrap.launch.supervisor import End, Event, Finish, How, Move, Plan, Process, Say, Start, Stop, Supervisor

_EVENT_SECONDS = 0.5  # how late a Ctrl-C may be heard


class Launcher(Protocol):
    """Starts the processes of a run, somewhere."""

    def forget(self, name: str) -> None:
        """Removes the files of the run of that name."""

    def start(self, command: Command) -> None:
        """Starts a process. It has the address that it had before, or its rows are gone."""

    def end(self, process: Process, how: How, for_good: bool) -> None:
        """Tells a process to end; kills it if it does not within some seconds. for_good: its place and its rows are
        given back."""

    def events(self, timeout: float) -> list[Event]:
        """What happened; waits that long for it."""

    def close(self) -> None:
        """Kills what is left, and waits for it."""


@contextmanager
def folder_of_one_run(folder: Path) -> Iterator[None]:
    """The folder is made, and this process's alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"folder {os.fspath(folder)!r} cannot be used: {error.strerror}; name another") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another run is in folder {os.fspath(folder)!r}: end it, or name another with --folder"
            ) from error
        yield
    finally:
        os.close(lock)


def run(script: Script, plan: Plan, folder: Path, launcher: Launcher, output: RunLogs, resizer: Scaler) -> int:
    """Runs the script to its end; returns the exit status. The folder is this run's: see `folder_of_one_run`."""
    file = folder / "run.json"
    before = RunState.read(file)
    launch = 0 if before is None else before.launch
    membership = RunState(name=secrets.token_hex(4), launch=launch, first_launch=launch + 1)
    membership.write(file)
    if before is not None:
        launcher.forget(before.name)
    supervisor = Supervisor(plan, membership)
    try:
        with _stops() as stops:
            resizer.watch(lambda: supervisor.membership.servers if supervisor.membership.launch else ())
            orders = supervisor.begin(time.monotonic())
            while True:
                if supervisor.membership != membership:
                    membership = supervisor.membership
                    membership.write(file)
                for order in orders:
                    match order:
                        case Say(text):
                            output.say(text)
                        case Start(process, address):
                            launcher.start(Command(process, address, script, plan, membership))
                        case End(process, how, for_good):
                            launcher.end(process, how, for_good)
                        case Move(now, wanted):
                            resizer.move(now, wanted)
                        case Finish(status):
                            return status
                events = [*launcher.events(_EVENT_SECONDS), *resizer.events(), *_taken(stops)]
                orders = [order for event in events for order in supervisor.handle(event, time.monotonic())]
    finally:
        resizer.close()
        launcher.close()
        launcher.forget(membership.name)


@contextmanager
def _stops() -> Iterator[list[Stop]]:
    """What signals ask for, while inside."""
    found: list[Stop] = []

    def note(number: int, _: object) -> None:
        found.append(Stop(signal.Signals(number).name))

    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # whoever began this wants it to outlive the terminal
    numbers = (signal.SIGINT, signal.SIGTERM, *(() if nohup else (signal.SIGHUP,)))
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield found
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _taken(stops: list[Stop]) -> list[Stop]:
    taken = stops[:]
    del stops[: len(taken)]
    return taken
