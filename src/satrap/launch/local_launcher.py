"""The launcher of this machine: the processes of a run are children of the supervisor's.

They talk over Unix sockets in a folder of the run's own that no other user may enter.
"""

import os
import shutil
import tempfile
from pathlib import Path

from satrap.errors import ConfigError
from satrap.launch.child_processes import ChildProcesses
from satrap.launch.logs import RunLogs
from satrap.launch.process_command import Command, LaunchSite
from satrap.launch.rows_file import forget_rows, has_rows, rows_file
from satrap.launch.supervisor import Event, How, Process, Role
from satrap.rpc.address import MOST_PATH_BYTES
from satrap.rpc.unix_socket import require_private

_MOST_NAME_BYTES = 30  # of a socket: "/server-65535.4294967295"


class LocalLauncher:
    """Satisfies `satrap.launch.run_loop.Launcher`."""

    def __init__(self, folder: Path, output: RunLogs, memory: Path) -> None:
        """memory: a folder in shared memory, for the rows."""
        if not os.access(memory, os.W_OK | os.X_OK):
            raise ConfigError(f"memory is {os.fspath(memory)!r}; wanted a folder that can be written to, for the rows")
        self._folder, self._output, self._memory = folder, output, memory
        self._children = ChildProcesses()

    def forget(self, name: str) -> None:
        """See Launcher."""
        forget_rows(self._memory, name)
        for file in self._folder.glob(f"meeting-{name}-*"):
            file.unlink(missing_ok=True)
        shutil.rmtree(_sockets(name), ignore_errors=True)

    def start(self, command: Command) -> None:
        """See Launcher."""
        name, process = command.membership.name, command.process
        meeting = (self._folder / f"meeting-{name}-{process.start}").absolute()
        rows, warning = rows_file(self._memory, name, f"{process.role}-{process.number}")
        if warning is not None and process.role is Role.SERVER:
            self._output.say(f"{process}: {warning}")
        sockets = _sockets(name)
        require_private(sockets)
        listen = command.listen(f"ipc://{sockets}", has_rows(rows))
        if listen != command.address:
            rows.unlink(missing_ok=True)
        spot = LaunchSite(listen=listen, rows=rows, script=command.script.path, meeting=f"file://{meeting}")
        self._output.begin(process)
        self._children.start(process, command.arguments(spot), rows)

    def end(self, process: Process, how: How, for_good: bool) -> None:
        """See Launcher."""
        self._children.end(process, how, for_good)

    def events(self, timeout: float) -> list[Event]:
        """See Launcher."""
        return self._output.hear(self._children.reports(timeout))

    def close(self) -> None:
        """See Launcher."""
        self._children.close()


def _sockets(name: str) -> Path:
    """The folder of the run's sockets. Not in the run's own, whose path may be too long for them."""
    folders = [Path(place) / f"satrap-{name}" for place in (tempfile.gettempdir(), "/tmp")]
    fitting = [folder for folder in folders if len(os.fsencode(folder)) + _MOST_NAME_BYTES <= MOST_PATH_BYTES]
    return (fitting or folders)[0]
