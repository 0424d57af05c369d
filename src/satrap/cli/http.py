"""Opens the HTTP endpoint of a process, if `--http` was given: which samples it serves, and when the process is ready.

counters of tables, service, session ──> samples ──> `satrap.monitor.endpoint.HttpEndpoint` ──> Prometheus
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from satrap.monitor import samples
from satrap.monitor.endpoint import HttpEndpoint, reachable_from_others
from satrap.monitor.memory import memory
from satrap.monitor.samples import Sample

if TYPE_CHECKING:
    from satrap.launch.logs import RunLogs
    from satrap.launch.run_monitor import RunMonitor
    from satrap.rpc import Service


class StatusEndpoint:
    """The endpoint of a server or worker. It outlives the service, so that it can answer that the process is stopping.
    A context manager; without an address it does nothing."""

    def __init__(
        self,
        role: str,
        address: str | None,
        status: Callable[[], Mapping[str, Any]],
        samples_of: Callable[[Mapping[str, Any]], list[Sample]],
    ) -> None:
        """status: returns what the process answers to the call `status`. samples_of: turns that into samples."""
        self._role, self._status, self._samples_of = role, status, samples_of
        self._service: Service | None = None
        self._endpoint = None if address is None else HttpEndpoint(address, self._collect, self._not_ready)

    def attach(self, service: "Service") -> list[str]:
        """Serve the metrics of the service, too, and return the lines to print."""
        self._service = service
        return [] if self._endpoint is None else [f"satrap {self._role}: metrics at {self._endpoint.url}"]

    def drain(self) -> None:
        """Answer from now on that the process is not ready, because it stops."""
        if self._endpoint is not None:
            self._endpoint.drain()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._endpoint is not None:
            self._endpoint.close()

    def _collect(self) -> Iterator[Sample]:
        from satrap.rpc.ledger import BOUNDS

        yield info(self._role)
        yield from self._samples_of(self._status())
        if self._service is not None:
            yield from samples.call_samples(self._service.counts(), BOUNDS, self._service.call_times())

    def _not_ready(self) -> str:
        return str(self._status()["not_ready"])


@contextmanager
def serve_trainer(address: str | None, rank: int) -> Iterator[None]:
    """Serve the metrics of the embeddings and checkpoints of this process."""
    if address is None:
        yield
        return

    def collect() -> list[Sample]:
        return [info("trainer"), *samples.memory_samples(memory()), *samples.collect()]

    with HttpEndpoint(address, collect, samples.not_ready) as endpoint:
        logging.getLogger("satrap.train").info("trainer %d: metrics at %s", rank, endpoint.url)
        yield


@contextmanager
def monitor_run(
    address: str | None,
    folder: Path,
    logs: "RunLogs",
    settings: Mapping[str, Any],
    client_key: bytes | None = None,
    host: str | None = None,
) -> Iterator["RunMonitor"]:
    """Yield what records a run, and serve its metrics if there is an address. settings: the run's, for its record.
    client_key: the key with which to call servers that have keys. host: an address of this machine that others can
    call; None: its name."""
    from satrap.launch.run_monitor import RunMonitor

    monitor = RunMonitor(folder, logs.places, logs.metrics, client_key, settings, logs.show, logs.memory)
    if address is None:
        yield monitor
        return

    def collect() -> list[Sample]:
        return [info("run"), *monitor.samples()]

    with HttpEndpoint(address, collect, monitor.not_ready, targets=monitor.targets) as endpoint:
        monitor.url = endpoint.url if host is None else reachable_from_others(endpoint.url, address, host)
        targets = monitor.url.removesuffix("/metrics") + "/targets"
        logging.getLogger("satrap.launch").info("metrics at %s; those of all processes: %s", monitor.url, targets)
        yield monitor


def info(role: str) -> Sample:
    """Return the sample that names the kind of process and its release."""
    return Sample("satrap_info", 1, {"process": role, "version": version("satrap")})
