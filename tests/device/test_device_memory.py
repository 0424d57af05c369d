"""How device_memory is divided over tables: pure functions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from satrap.byte_sizes import parse_bytes
from satrap.config.tables import Table
from satrap.device.device_memory import ALL, Share, divide_bytes, shares_of
from satrap.errors import ConfigError

demands = st.lists(st.one_of(st.none(), st.integers(0, 1000)), min_size=1, max_size=8)


@given(st.integers(0, 5000), demands)
def test_the_division_is_fair(total: int, demanded: list[int | None]) -> None:
    """Nothing is over-committed or left while a table has less than it demands, and who has less than it demands has
    no less than any other, up to a byte of rounding for each table."""
    sizes = divide_bytes(total, demanded)
    assert sum(sizes) <= total and all(size >= 0 for size in sizes)
    wants = [demand is None or size < demand for size, demand in zip(sizes, demanded, strict=True)]
    assert all(demand is None or size <= demand for size, demand in zip(sizes, demanded, strict=True))
    if any(wants):
        assert sum(sizes) == total
        least = min(size for size, want in zip(sizes, wants, strict=True) if want)
        assert max(sizes) <= least + len(sizes)


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("0", 0), ("12", 12), ("100GiB", 100 << 30), ("1.5 kB", 1500), ("2 MiB", 2 << 20), ("3TB", 3 * 10**12)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes("device_memory", text) == size


@pytest.mark.parametrize("size", ["4G", "GiB", "-1", "", -1, True, None])
def test_wrong_sizes_are_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"memory is .*; expected bytes as an integer, or a string such as '100GiB'"):
        parse_bytes("memory", size)


def test_shares_of_tables() -> None:
    small = Table("small", dim=1, capacity=10)
    large = Table("large", dim=1)
    grows = Table("grows", dim=1, capacity=10, on_full="grow")
    assert shares_of([small, large], [8, 8], None, [10, None]) == [ALL, ALL]
    assert shares_of([small, large], [8, 8], 1000, [10, None]) == [Share("shared", 80), Share("shared", 920)]
    assert shares_of([large, grows], [8, 8], 1000, [None, None]) == [Share("shared", 500)] * 2
    assert shares_of([small, large], [8, 8], 1000, [0, None]) == [Share("shared", 0), Share("shared", 1000)]
    assert shares_of([small, large, grows], [8, 8, 8], {"large": "1kB", "grows": "none"}, [10, None, None]) == [
        ALL,
        Share("table large", 1000),
        Share("none", 0),
    ]
