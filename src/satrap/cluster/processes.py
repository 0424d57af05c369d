"""The launcher of this machine: the processes of a run are children of the supervisor's."""

import os
from pathlib import Path

from satrap.cluster.children import Children
from satrap.cluster.command import Command, Spot
from satrap.cluster.output import Output
from satrap.cluster.supervisor import Event, How, Process
from satrap.errors import ConfigError


class LocalLauncher:
    """Satisfies `satrap.cluster.run.Launcher`."""

    def __init__(self, folder: Path, output: Output, memory: Path) -> None:
        """memory: a folder in shared memory, for the rows."""
        if not os.access(memory, os.W_OK | os.X_OK):
            raise ConfigError(f"memory is {os.fspath(memory)!r}; wanted a folder that can be written to, for the rows")
        self._folder, self._output, self._memory = folder, output, memory
        self._children = Children()

    def forget(self, name: str) -> None:
        """See Launcher."""
        for file in [*self._memory.glob(f"satrap-{name}-*"), *self._folder.glob(f"meeting-{name}-*")]:
            file.unlink(missing_ok=True)

    def start(self, command: Command) -> None:
        """See Launcher."""
        name, process = command.membership.name, command.process
        meeting = (self._folder / f"meeting-{name}-{process.start}").absolute()
        rows = self._memory / f"satrap-{name}-{process.role}-{process.number}"
        listen = command.listen("127.0.0.1", rows.exists())
        if listen != command.address:
            rows.unlink(missing_ok=True)
        spot = Spot(listen=listen, rows=rows, script=command.script.path, meeting=f"file://{meeting}")
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
