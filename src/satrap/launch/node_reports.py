"""What a node of a cluster does with the reports of its process on their way to the run: it copies the output to a file
of the node, such as the standard output of its pod, and names the node in the URL of metrics."""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from satrap.launch.child_processes import MetricsServed, ProcessOutput, Report
from satrap.monitor.endpoint import reachable_from_others

_LOG = logging.getLogger("satrap.launch")


class NodeReports:
    """The reports of a process on one node."""

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
