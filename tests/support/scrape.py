"""Reads the HTTP endpoints of processes, for tests: the numbers of a scrape, and the answers to probes."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

Numbers = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def get(url: str) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(url: str) -> Numbers:
    """Return the numbers of a page of metrics by name and sorted labels; each may be there once."""
    status, text = get(url)
    assert status == 200, text
    found: Numbers = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def number(numbers: Numbers, name: str, **labels: str) -> float:
    """Return one number of a scrape."""
    return numbers[name, tuple(sorted(labels.items()))]
