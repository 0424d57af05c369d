"""The loop of a run: passes events to the supervisor and executes its commands.

launcher.poll, scaler.poll ──> Supervisor.handle ──> run.json on disk ──> launcher.start, launcher.stop, scaler.migrate
"""

import logging
import os
import secrets
import shlex
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from satrap.config.durable import opened, try_lock
from satrap.errors import ConfigError
from satrap.launch.process_command import ProcessSpec, Script
from satrap.launch.run_events import (
    Event,
    ExitRun,
    LogMessage,
    MigrateBuckets,
    PauseMigration,
    Process,
    StartProcess,
    StopMode,
    StopProcess,
    StopRequested,
)
from satrap.launch.run_monitor import RunMonitor
from satrap.launch.run_state import RunState
from satrap.launch.scaler import Scaler
from satrap.launch.supervisor import RunConfig, Supervisor
from satrap.monitor.record_file import FOLDER

_LOG = logging.getLogger("satrap.launch")
_POLL_SECONDS = 0.5  # the longest delay of a Ctrl-C
_LOCK_SECONDS, _RETRY_SECONDS = 1.0, 0.01


class Launcher(Protocol):
    """Starts and stops the processes of a run, on this machine or on a cluster."""

    def remove_files(self, name: str) -> None:
        """Remove the files of the run of that name."""

    def start(self, spec: ProcessSpec) -> None:
        """Start a process, at its previous address if possible; otherwise remove its rows, because the supervisor takes
        a server at another address for one without rows."""

    def stop(self, process: Process, mode: StopMode, release: bool) -> None:
        """Stop a process, and kill it after the grace period. release: whether to release its placement and its
        rows."""

    def poll(self, timeout: float) -> list[Event]:
        """Return new events; wait at most `timeout` seconds for one."""

    def close(self) -> None:
        """Kill the remaining processes and wait for them."""


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Create the run's folder and lock it for this process."""
    where = f"folder {os.fspath(folder)!r}"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(opened(folder))
            until = time.monotonic() + _LOCK_SECONDS  # `satrap status` shares the lock for a moment
            while not (is_locked := try_lock(file)) and time.monotonic() < until:
                time.sleep(_RETRY_SECONDS)
        except OSError as error:
            raise ConfigError(f"{where} cannot be used: {error.strerror}; choose another with --folder") from error
        if not is_locked:
            raise ConfigError(f"another run uses {where}; stop it, or choose another with --folder")
        yield


def run(
    script: Script, run_config: RunConfig, folder: Path, launcher: Launcher, scaler: Scaler, monitor: RunMonitor
) -> int:
    """Run the script to its end and return the exit status. The caller holds the lock of `lock_run_folder`."""
    file = folder / "run.json"
    previous = RunState.read(file)
    launch = 0 if previous is None else previous.launch
    run_state = RunState(name=secrets.token_hex(4), launch=launch, first_launch=launch + 1)
    if previous is not None:  # while the file still has the name: this run may be killed, too
        launcher.remove_files(previous.name)
    run_state.write(file)
    if launch:
        _LOG.info("adds launch %d to the records in %s (--folder names another folder)", launch + 1, folder)
    supervisor, recorded = Supervisor(run_config, run_state), _record_sizes(folder)
    with ExitStack() as stack:  # each is called, whatever the others raise
        stack.callback(launcher.remove_files, run_state.name)
        stack.callback(launcher.close)
        stack.callback(scaler.close)
        stack.callback(monitor.close)
        with _stop_signals() as stop_requests:
            scaler.watch(lambda: supervisor.run_state.servers if supervisor.run_state.launch else ())
            commands, events = supervisor.start(time.monotonic()), list[Event]()
            while True:
                monitor.observe(events, commands, supervisor, scaler.progress)
                if supervisor.run_state != run_state:
                    run_state = supervisor.run_state
                    run_state.write(file)
                for command in commands:
                    match command:
                        case LogMessage(text):
                            _LOG.info(text)
                        case StartProcess(process, address):
                            launcher.start(ProcessSpec(process, address, script, run_config, run_state))
                        case StopProcess(process, mode, release):
                            launcher.stop(process, mode, release)
                        case MigrateBuckets(current, target, is_urgent):
                            scaler.migrate(current, target, is_urgent)
                        case PauseMigration(seconds):
                            scaler.pause(seconds)
                        case ExitRun(status):
                            if status == 0:
                                report = f"; to draw it: {shlex.join(['satrap', 'report', str(folder)])}"
                                _LOG.info("finished%s", report if _has_grown(folder, recorded) else "")
                            return status
                events = [*launcher.poll(_POLL_SECONDS), *scaler.poll()]
                events += [stop_requests.pop(0) for _ in range(len(stop_requests))]
                commands = [command for event in events for command in supervisor.handle(event, time.monotonic())]


def _record_sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in (folder / FOLDER).glob("trainer-*")}


def _has_grown(folder: Path, sizes: Mapping[Path, int]) -> bool:
    """Return whether a trainer has recorded something since its file had this size: its script has a `Progress`."""
    for path in _record_sizes(folder):
        with path.open("rb") as file:
            file.seek(sizes.get(path, 0))
            if file.read(64).strip():
                return True
    return False


@contextmanager
def _stop_signals() -> Iterator[list[StopRequested]]:
    """Collect the signals that stop the run, while the context is open."""
    requests: list[StopRequested] = []

    def on_signal(number: int, _: object) -> None:
        requests.append(StopRequested(signal.Signals(number).name))

    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # under nohup the run outlives the terminal
    numbers = (signal.SIGINT, signal.SIGTERM, *(() if ignores_hangup else (signal.SIGHUP,)))
    handlers = [signal.signal(number, on_signal) for number in numbers]
    try:
        yield requests
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
