"""The pages of a process: /metrics in Prometheus's format, /healthz and /readyz for probes.

`samples` has the numbers and `http_server` serves pages; this file only writes them, and is the only one that uses
prometheus_client. It reads when it is asked, in the threads of the server.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from satrap.errors import ConfigError
from satrap.monitor.http_server import TEXT, HttpServer, Reply
from satrap.monitor.metric_table import METRICS
from satrap.monitor.samples import Distribution, Sample

_ADDRESS = re.compile(r"(?:(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:/\[\]]+)):)?(?P<port>\d{1,5})(-(?P<last>\d{1,5}))?")
_ALL_ADDRESSES = ("*", "0.0.0.0", "::")
_NUM_PORTS = 256  # for a run's processes on one machine


def split_http_address(text: str) -> tuple[str, range]:
    """Return host and ports of PORT, HOST:PORT, [IPV6]:PORT or one of these with FIRST-LAST: the first free port of
    several. The host is loopback by default; "*" is all addresses."""
    match = _ADDRESS.fullmatch(text)
    ports = range(0) if match is None else range(int(match["port"]), int(match["last"] or match["port"]) + 1)
    if match is None or not ports or ports[-1] > 0xFFFF:
        raise ConfigError(
            f"--http is {text!r}; expected PORT, such as 9100 (0: any free port), or HOST:PORT to serve other "
            "machines; or FIRST-LAST in place of PORT: the first free one of these"
        )
    return match["v6"] or match["host"] or "127.0.0.1", ports


def join_http_address(host: str, port: int | str) -> str:
    """Return the text that `split_http_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of_processes(text: str) -> str:
    """Return the address for each process of a run: the run's port or, where that is in use, the next free one. So
    each process that is alone in a pod serves at the same port, run after run. Port 0, any free port, stays."""
    host, ports = split_http_address(text)
    first = ports[0]
    return join_http_address(host, f"{first}-{min(first + _NUM_PORTS - 1, 0xFFFF)}" if first else 0)


def next_port(text: str, offset: int) -> str:
    """Return the address with a port that is higher by `offset`; port 0, any free port, stays, and so do several."""
    host, ports = split_http_address(text)
    return text if len(ports) > 1 else join_http_address(host, ports[0] + offset if ports[0] else 0)


def reachable_from_others(url: str, listens_at: str, host: str) -> str:
    """Return the URL of a process's metrics for other machines. listens_at: its --http. host: an address of its
    machine, which stands for all addresses: the name of a pod, which the process itself knows, is in no DNS."""
    if split_http_address(listens_at)[0] not in _ALL_ADDRESSES:
        return url
    return f"http://{join_http_address(host, url.removesuffix('/metrics').rpartition(':')[2])}/metrics"


class HttpEndpoint:
    """Serves metrics until it is closed. A context manager."""

    def __init__(
        self,
        address: str,
        samples: Callable[[], Iterable[Sample]],
        not_ready: Callable[[], str],
        *,
        targets: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        """address: as `split_http_address` reads it.
        samples: returns the current samples.
        not_ready: returns why the process is not ready, or "" if it is.
        targets: returns the targets of a run, which /targets serves for Prometheus's discovery over HTTP.
        """
        host, ports = split_http_address(address)
        self._samples, self._not_ready, self._targets = samples, not_ready, targets
        self._registry, self._write = _registry_of(_Collector(self._all_samples))
        self._draining = False
        pages = {"/metrics": self._metrics_page, "/readyz": self._ready_page}
        if targets is not None:
            pages["/targets"] = self._targets_page
        listen = "" if host == "*" else host
        try:
            self._server = HttpServer(listen, ports, pages, {"/healthz": (200, TEXT, b"alive\n")})
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"--http {address} cannot be served: {error}; use a free port of this machine, or 0"
            ) from None
        shown = os.uname().nodename if host in _ALL_ADDRESSES else host
        self.address = join_http_address(shown, self._server.port)
        """Host and port for clients."""
        self.url = f"http://{self.address}/metrics"

    def drain(self) -> None:
        """Answer from now on that the process is not ready, because it stops."""
        self._draining = True

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _why_not_ready(self) -> str:
        return "the process is stopping" if self._draining else self._not_ready()

    def _all_samples(self) -> Iterator[Sample]:
        yield Sample("satrap_ready", int(not self._why_not_ready()))
        yield from self._samples()

    def _metrics_page(self) -> Reply:
        return 200, "text/plain; version=0.0.4; charset=utf-8", self._write(self._registry)

    def _ready_page(self) -> Reply:
        reason = self._why_not_ready()
        return (503 if reason else 200), TEXT, f"{reason or 'ready'}\n".encode()

    def _targets_page(self) -> Reply:
        assert self._targets is not None
        return 200, "application/json", json.dumps(self._targets()).encode()


class _Collector:
    """Presents samples to prometheus_client."""

    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self._samples = samples

    def describe(self) -> Iterable[Any]:
        """Return nothing: otherwise prometheus_client would collect when the registry is made."""
        return ()

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        families: dict[str, Any] = {}
        kinds: Mapping[str, Any] = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        for sample in self._samples():
            metric = METRICS[sample.name]
            if sample.name not in families:
                families[sample.name] = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
            labels = [sample.labels[label] for label in metric.labels]
            if isinstance(sample.value, Distribution):
                families[sample.name].add_metric(labels, _cumulative(sample.value), sample.value.total)
            else:
                families[sample.name].add_metric(labels, sample.value)
        return families.values()


def _cumulative(value: Distribution) -> list[tuple[str, int]]:
    bins, so_far = [], 0
    for bound, count in zip((*map(float, value.bounds), float("inf")), value.counts, strict=True):
        so_far += count
        bins.append(("+Inf" if bound == float("inf") else str(bound), so_far))
    return bins


def _registry_of(collector: _Collector) -> tuple[Any, Callable[[Any], bytes]]:
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    except ImportError as error:
        raise ConfigError(
            f"--http requires prometheus_client ({error}): pip install 'satrap[metrics]', or leave out --http"
        ) from error
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry, generate_latest
