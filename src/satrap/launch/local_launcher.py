"""The launcher of one machine: the processes of a run are children of the supervisor's process.

They communicate over Unix sockets, in a folder of the run that no other user may enter.
"""

import logging
import os
import shutil
import tempfile
from pathlib import Path

from satrap.errors import ConfigError
from satrap.launch.child_processes import ChildProcesses
from satrap.launch.logs import RunLogs
from satrap.launch.process_command import LaunchSite, ProcessSpec
from satrap.launch.rows_file import has_rows, remove_rows, rows_file
from satrap.launch.run_events import Event, Process, Role, StopMode
from satrap.rpc.address import MAX_PATH_BYTES
from satrap.rpc.unix_socket import require_private

_LOG = logging.getLogger("satrap.launch")
_MAX_NAME_BYTES = 30  # a socket's name has at most: "/server-65535.4294967295"


class LocalLauncher:
    """Implements `satrap.launch.run_loop.Launcher`."""

    def __init__(self, folder: Path, logs: RunLogs, memory: Path) -> None:
        """memory: the folder in shared memory for the servers' rows."""
        if not os.access(memory, os.W_OK | os.X_OK):
            raise ConfigError(
                f"memory is {os.fspath(memory)!r}; expected a folder that can be written to, for the servers' rows"
            )
        self._folder, self._logs, self._memory = folder, logs, memory
        self._children = ChildProcesses()

    def remove_files(self, name: str) -> None:
        remove_rows(self._memory, name)
        for file in self._folder.glob(f"rendezvous-{name}-*"):
            file.unlink(missing_ok=True)
        shutil.rmtree(_socket_folder(name), ignore_errors=True)

    def start(self, spec: ProcessSpec) -> None:
        name, process = spec.run_state.name, spec.process
        rendezvous = (self._folder / f"rendezvous-{name}-{process.incarnation}").absolute()
        rows, warning = rows_file(self._memory, name, f"{process.role}-{process.number}")
        if warning is not None and process.role is Role.SERVER:
            _LOG.warning("%s: %s", process, warning)
        folder = _socket_folder(name)
        require_private(folder)
        listen = spec.listen(f"ipc://{folder}", has_rows(rows))
        if listen != spec.address:
            rows.unlink(missing_ok=True)
        site = LaunchSite(listen=listen, rows=rows, script=spec.script.path, rendezvous=f"file://{rendezvous}")
        self._logs.record_start(process)
        self._children.start(process, spec.arguments(site), rows)

    def stop(self, process: Process, mode: StopMode, release: bool) -> None:
        self._children.stop(process, mode, release)

    def poll(self, timeout: float) -> list[Event]:
        return self._logs.handle(self._children.poll(timeout))

    def close(self) -> None:
        self._children.close()


def _socket_folder(name: str) -> Path:
    """Return the folder of the run's sockets. The run's own folder may have too long a path for them."""
    folders = [Path(parent) / f"satrap-{name}" for parent in (tempfile.gettempdir(), "/tmp")]
    fitting = [folder for folder in folders if len(os.fsencode(folder)) + _MAX_NAME_BYTES <= MAX_PATH_BYTES]
    return (fitting or folders)[0]
