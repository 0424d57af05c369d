"""What is done on the nodes of a Ray cluster that needs no Ray: finding the script, and handling the reports of its
process on their way to the run.

A run may be inside a Ray job, which `ray job submit` or Kubernetes' RayJob started. Such a job may have a working
directory, which Ray has copied to every node: this process and the actors start in their node's copy. The run cannot
name another one then, so the script must be in that copy, or on every node under one path.
"""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from satrap.launch.child_processes import MetricsServed, ProcessOutput, Report
from satrap.monitor.endpoint import reachable_from_others

_LOG = logging.getLogger("satrap.launch")
_COPIES = "working_dir_files"  # the folder of all copies on a node


def job_directory(folder: Path) -> Path:
    """Return this node's copy of the job's working directory.

    folder: this process's working directory, which is the copy or below it."""
    return next((parent for parent in (folder, *folder.parents) if parent.parent.name == _COPIES), folder)


def script_path(script: Path, directory: Path | None) -> Path:
    """Return the path of the script for a process that starts in a copy of its folder: relative to the copy, or
    absolute for a script outside the job's working directory.

    directory: the job's working directory; None: the script's own folder is copied."""
    if directory is None:
        return Path(script.name)
    absolute = script.absolute()
    return absolute.relative_to(directory) if absolute.is_relative_to(directory) else absolute


class NodeReports:
    """The reports of a process on one node: its output is copied to a file, such as the standard output of its pod, and
    the URL of its metrics names the node."""

    def __init__(self, host: str, http: str | None, output: str | None) -> None:
        """host: the node's address for others. http: where the process serves its metrics. output: file for a copy of
        its output; None: none."""
        self._host, self._http, self._file = host, http, -1
        if output is not None:
            try:
                self._file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
            except OSError as error:
                _LOG.warning("%s cannot be written (%s); the run's own logs are complete", output, error.strerror)

    def handle(self, reports: Iterable[Report]) -> list[Report]:
        """Return the reports of a node's processes in the form that the run handles."""
        return [self._handle(report) for report in reports]

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _handle(self, report: Report) -> Report:
        match report:
            case ProcessOutput(stream="stdout" | "stderr", data=data) if self._file >= 0:
                with suppress(OSError):  # a reader that is too slow misses output, which the run's logs have
                    os.write(self._file, data)
            case MetricsServed(url=url) if self._http is not None:
                return replace(report, url=reachable_from_others(url, self._http, self._host))
        return report
