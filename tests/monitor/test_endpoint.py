"""The endpoint of `--http`: its pages, its addresses, and samples that become Prometheus's text."""

from __future__ import annotations

import bisect
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from logged import logged
from satrap.errors import ConfigError
from satrap.monitor import samples
from satrap.monitor.endpoint import (
    HttpEndpoint,
    address_of_processes,
    next_port,
    reachable_from_others,
    split_http_address,
)
from satrap.monitor.memory import memory, memory_limit
from satrap.monitor.metric_table import GROUPS, METRICS
from satrap.monitor.report import Counters
from satrap.monitor.samples import (
    STALENESS_BOUNDS,
    Distribution,
    Sample,
    collect,
    merged,
    not_ready,
    register,
    staleness_distribution,
    training_samples,
)
from scrape import get, number, scrape


def endpoint(samples: Callable[[], Iterable[Sample]] = lambda: (), reason: str = "") -> HttpEndpoint:
    return HttpEndpoint("0", samples, lambda: reason)


def test_pages_and_probes() -> None:
    with endpoint(lambda: [Sample("satrap_attempt", 7)]) as served:
        base = served.url.removesuffix("/metrics")
        assert base.startswith("http://127.0.0.1:")
        assert get(f"{base}/healthz") == (200, "alive\n")
        assert get(f"{base}/readyz") == (200, "ready\n")
        numbers = scrape(served.url)
        assert number(numbers, "satrap_attempt") == 7 and number(numbers, "satrap_ready") == 1
        assert number(numbers, "process_start_time_seconds") > 0
        assert get(f"{base}/targets") == (404, "expected one of /healthz /metrics /readyz\n")
        served.drain()
        assert get(f"{base}/readyz") == (503, "the process is stopping\n")
        assert number(scrape(served.url), "satrap_ready") == 0
    with endpoint(reason="no rows yet") as served:
        assert get(served.url.replace("metrics", "readyz")) == (503, "no rows yet\n")


def test_a_failed_scrape_is_answered_and_logged() -> None:
    def fail() -> list[Sample]:
        raise ValueError("no such table")

    with endpoint(fail) as served, logged("satrap.monitor", "/metrics failed", logging.ERROR):
        assert get(served.url) == (500, "ValueError: no such table\n")
        assert get(served.url.replace("metrics", "healthz"))[0] == 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9100", ("127.0.0.1", range(9100, 9101))),
        ("10.0.0.5:0", ("10.0.0.5", range(1))),
        ("*:80", ("*", range(80, 81))),
        ("[::1]:9100", ("::1", range(9100, 9101))),
        ("[::1]:9100-9102", ("::1", range(9100, 9103))),
    ],
)
def test_addresses(text: str, expected: tuple[str, range]) -> None:
    assert split_http_address(text) == expected


def test_the_processes_of_a_run_take_its_port_or_the_next_free_ones() -> None:
    assert address_of_processes("*:9100") == "*:9100-9355" and address_of_processes("[::1]:0") == "[::1]:0"
    assert address_of_processes("65530") == "127.0.0.1:65530-65535"
    assert (next_port("*:9100", 3), next_port("0", 3)) == ("*:9103", "127.0.0.1:0")
    with endpoint() as run:
        several = address_of_processes(run.address)
        with HttpEndpoint(several, lambda: (), lambda: "") as one, HttpEndpoint(several, lambda: (), lambda: "") as two:
            ports = [int(each.address.rpartition(":")[2]) for each in (run, one, two)]
    assert ports == sorted(set(ports)) and ports[2] in split_http_address(several)[1]


def test_other_machines_get_an_address_that_they_can_call() -> None:
    found = reachable_from_others("http://clicks-head-x7:9101/metrics", "*:9100-9355", "10.0.0.7")
    assert found == "http://10.0.0.7:9101/metrics"
    assert reachable_from_others("http://b:1/metrics", "[::]:0", "fd00::7") == "http://[fd00::7]:1/metrics"
    assert reachable_from_others("http://10.0.0.8:9101/metrics", "10.0.0.8:0", "10.0.0.7") == (
        "http://10.0.0.8:9101/metrics"
    )


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":9100", "65536", "::1:9100", "http://a:1", "-1", "9101-9100", "1-65536"]
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--http is .*; expected PORT"):
        split_http_address(text)


def test_a_port_in_use() -> None:
    with endpoint() as served, pytest.raises(ConfigError, match=r"cannot be served: .*in use.*; use a free port"):
        HttpEndpoint(served.address, lambda: (), lambda: "")


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"--http requires prometheus_client .*: pip install 'satrap\[metrics\]'"):
        endpoint()


def test_every_metric_of_the_table_is_served_as_declared() -> None:
    """Prometheus's own parser reads every metric with the declared kind, help and labels."""
    distribution = Distribution((0.5, 1.0), (3, 2, 1), 4.5)
    every = [
        Sample(metric.name, distribution if metric.kind == "histogram" else 5, dict.fromkeys(metric.labels, 'a "b"\n'))
        for metric in METRICS.values()
        if metric.name != "satrap_ready"
    ]
    with endpoint(lambda: every) as served:
        families = {each.name: each for each in text_string_to_metric_families(get(served.url)[1])}
    for metric in METRICS.values():
        family = families[metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        if metric.name != "satrap_ready":
            assert {name for each in family.samples for name in each.labels} - {"le"} == set(metric.labels)
    counts = {each.labels["le"]: each.value for each in families["satrap_call_seconds"].samples if "le" in each.labels}
    assert counts == {"0.5": 3, "1.0": 5, "+Inf": 6}


def test_names_and_units_agree() -> None:
    assert len(METRICS) == sum(map(len, GROUPS.values()))
    for metric in METRICS.values():
        assert metric.name.startswith("satrap_") and not metric.name.endswith("_total") and metric.help.endswith(".")
        assert not {"job", "instance", "role", "number"} & set(metric.labels), "Prometheus adds these to each target"
        for unit in ("seconds", "bytes"):
            assert metric.name.endswith(f"_{unit}") == (metric.unit == unit), metric.name


@given(st.dictionaries(st.integers(0, 200), st.integers(0, 1000)))
def test_staleness_is_binned(seen: dict[int, int]) -> None:
    found = staleness_distribution(seen)
    observations = [steps for steps, count in seen.items() for _ in range(count)]
    expected = [0] * (len(STALENESS_BOUNDS) + 1)
    for steps in observations:
        expected[bisect.bisect_left(STALENESS_BOUNDS, steps)] += 1
    assert (found.counts, found.total) == (expected, sum(observations))


def test_samples_of_several_objects_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_sources", [])  # not those that other tests left

    class Source:
        def __init__(self, steps: int, reason: str) -> None:
            self._counters = Counters(staleness={steps: 2}, stages={"read": 1.5}, inside=2.0, lost={"batches/x": 1})
            self._step, self.not_ready = steps, reason

        def samples(self) -> list[Sample]:
            return [*training_samples(self._counters), Sample("satrap_step", self._step)]

    assert collect() == [] and "has not created its embeddings" in not_ready()
    one, two = Source(1, "closed"), Source(3, "")
    register(one)
    assert not_ready() == "closed"
    register(two)
    assert not_ready() == ""
    found = {each.name: each.value for each in collect()}
    assert found["satrap_step"] == 3 and found["satrap_lost"] == 2 and found["satrap_stage_seconds"] == 3.0
    staleness = found["satrap_staleness_steps"]
    assert isinstance(staleness, Distribution) and (sum(staleness.counts), staleness.total) == (4, 8.0)
    del one, two
    assert collect() == [] and merged([]) == []


def test_memory_is_that_of_the_machine_and_of_the_file_system_of_the_rows(tmp_path: Path) -> None:
    found = memory(tmp_path / "rows")
    assert found.keys() == {"machine", "rows"} and all(0 < used < allowed for used, allowed in found.values())
    assert memory_limit(tmp_path / "rows") <= min(allowed for _, allowed in found.values())
