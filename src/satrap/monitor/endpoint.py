"""Serves a process's metrics over HTTP: /metrics in Prometheus's format, /healthz and /readyz for probes.

`samples` has the numbers; this file only writes and serves them, and is the only one that uses prometheus_client. It
reads when it is asked, in its own threads.
"""

import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from satrap.errors import ConfigError
from satrap.monitor.metric_table import METRICS
from satrap.monitor.samples import Distribution, Sample

_LOG = logging.getLogger("satrap.monitor")
_ADDRESS = re.compile(r"(?:(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:/\[\]]+)):)?(?P<port>\d{1,5})")
_MAX_CONNECTIONS = 16
_READ_SECONDS = 10.0  # for a client to send its request, or to read the answer


def split_http_address(text: str) -> tuple[str, int]:
    """Return host and port of PORT, HOST:PORT or [IPV6]:PORT. The host is loopback by default; "*" is all addresses."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 0xFFFF:
        raise ConfigError(
            f"--http is {text!r}; expected PORT, such as 9100 (0: any free port), or HOST:PORT to serve other machines"
        )
    return match["v6"] or match["host"] or "127.0.0.1", int(match["port"])


def join_http_address(host: str, port: int) -> str:
    """Return the text that `split_http_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def any_port(text: str) -> str:
    """Return the address with port 0: any free port of the same host."""
    return join_http_address(split_http_address(text)[0], 0)


def next_port(text: str, offset: int) -> str:
    """Return the address with a port that is higher by `offset`; port 0, any free port, stays."""
    host, port = split_http_address(text)
    return join_http_address(host, port + offset if port else 0)


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
        host, port = split_http_address(address)
        self._samples, self._not_ready, self._targets = samples, not_ready, targets
        self._registry, self._write = _registry_of(_Collector(self._all_samples))
        self._draining = False
        try:
            self._server = _listen(host, port, self._answer)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"--http {address} cannot be served: {error}; use a free port of this machine, or 0"
            ) from None
        bound = self._server.socket.getsockname()[1]
        shown = os.uname().nodename if host in ("*", "0.0.0.0", "::") else host
        self.address = join_http_address(shown, bound)
        """Host and port for clients."""
        self.url = f"http://{self.address}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="satrap-http", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Answer from now on that the process is not ready, because it stops."""
        self._draining = True

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _why_not_ready(self) -> str:
        return "the process is stopping" if self._draining else self._not_ready()

    def _all_samples(self) -> Iterator[Sample]:
        yield Sample("satrap_ready", int(not self._why_not_ready()))
        yield from self._samples()

    def _answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, type and content of the answer to a request."""
        text = "text/plain; charset=utf-8"
        match path.partition("?")[0]:
            case "/metrics":
                return 200, "text/plain; version=0.0.4; charset=utf-8", self._write(self._registry)
            case "/healthz":
                return 200, text, b"alive\n"
            case "/readyz":
                reason = self._why_not_ready()
                return (503 if reason else 200), text, f"{reason or 'ready'}\n".encode()
            case "/targets" if self._targets is not None:
                return 200, "application/json", json.dumps(self._targets()).encode()
            case _:
                paths = "/metrics /healthz /readyz" + (" /targets" if self._targets is not None else "")
                return 404, text, f"expected one of {paths}\n".encode()


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
    found, so_far = [], 0
    for bound, count in zip((*map(float, value.bounds), float("inf")), value.counts, strict=True):
        so_far += count
        found.append(("+Inf" if bound == float("inf") else str(bound), so_far))
    return found


def _registry_of(collector: _Collector) -> tuple[Any, Callable[[Any], bytes]]:
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    except ImportError as error:
        raise ConfigError(
            f"--http requires prometheus_client ({error}): pip install it, or leave out --http"
        ) from error
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry, generate_latest


def _listen(host: str, port: int, answer: Callable[[str], tuple[int, str, bytes]]) -> ThreadingHTTPServer:
    connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    class Handler(BaseHTTPRequestHandler):
        timeout = _READ_SECONDS

        def do_GET(self) -> None:
            try:
                status, kind, content = answer(self.path)
            except Exception as error:  # a scrape must not end the thread without an answer
                _LOG.exception("%s failed", self.path)
                status, kind, content = 500, "text/plain; charset=utf-8", f"{type(error).__name__}: {error}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *_: object) -> None:
            """Log nothing: a probe calls every few seconds."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def process_request(self, request: Any, client_address: Any) -> None:
            if connections.acquire(blocking=False):
                super().process_request(request, client_address)
            else:  # more clients than any scraper and probes: they may try again
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                connections.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore a client that disconnects or is too slow."""

    return Server(("" if host == "*" else host, port), Handler)
