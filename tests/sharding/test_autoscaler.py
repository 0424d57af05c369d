"""When servers are added and removed: pure figures in, a decision out, and no oscillation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.errors import ConfigError
from satrap.sharding.autoscaler import Decision, ScaleHistory, ScaleLimits, ServerLoad, decide

BOUNDS = ScaleLimits(max_servers=8, patience=3, pause_seconds=100.0)


def servers(*used: float, work: float = 0.1) -> list[ServerLoad]:
    return [
        ServerLoad(
            address=f"tcp://host:{n}", rows=int(1000 * each), used_bytes=each, limit_bytes=1.0, work_seconds=work
        )
        for n, each in enumerate(used)
    ]


def follow(windows: list[list[ServerLoad]], step_seconds: float = 1.0, **bounds: Any) -> list[Decision]:
    """Return a decision for each window, 10 seconds apart."""
    past, found = ScaleHistory(), []
    for n, each in enumerate(windows):
        decision, past = decide(each, step_seconds, ScaleLimits(**{"max_servers": 8, **bounds}), past, 10.0 * n)
        found.append(decision)
    return found


def test_servers_are_added_for_a_full_one_after_some_windows() -> None:
    found = follow([servers(0.85, 0.5)] * 4)
    assert [each.change for each in found] == [0, 0, 1, 0]
    assert "memory at 0.85 of its limit" in found[2].reason
    assert "the last change was 10 s ago" not in found[2].reason


def test_enough_servers_are_added_to_reach_the_goal() -> None:
    assert follow([servers(0.9, 0.9, 0.9)], patience=1)[0].add == 2  # 3 * 0.9 / 0.6 = 4.5
    assert follow([servers(0.9, 0.9, 0.9)], patience=1, max_servers=4)[0].add == 1
    assert follow([servers(0.9, 0.9, 0.9)], patience=1, max_servers=3)[0] == Decision(
        reason="memory at 0.90 of its limit, work at 0.10 of a step, with 3 servers"
    )


def test_servers_are_added_when_trainers_wait_for_them() -> None:
    assert follow([servers(0.1, 0.1, work=0.8)], patience=1)[0].add == 2  # 2 * 0.8 / 0.4 = 4
    assert follow([servers(0.1, 0.1, work=0.8)], patience=1, step_seconds=2.0)[0].change == 0


def test_servers_are_removed_one_at_a_time_fewest_rows_first() -> None:
    found = follow([servers(0.12, 0.1, 0.11)] * 3)
    assert [each.remove for each in found] == [(), (), ("tcp://host:1",)]


def test_no_server_is_removed_without_training() -> None:
    assert follow([servers(0.1, 0.1)], patience=1, step_seconds=0.0)[0].change == 0


FULL, FULLER, CALM, IDLE = servers(0.85, 0.5), servers(0.95, 0.5), servers(0.7, 0.5), servers(0.1, 0.1)


@pytest.mark.parametrize(
    ("windows", "bounds", "changes"),
    [
        ([FULL, FULL, CALM, FULL, FULL, FULL], {}, [0, 0, 0, 0, 0, 1]),
        ([FULL, FULL, IDLE, IDLE, FULL, FULL, FULL], {}, [0, 0, 0, 0, 0, 0, 1]),
        ([FULL, FULLER, FULL], {}, [0, 0, 1]),
        ([FULL, IDLE, IDLE, IDLE], {}, [0, 0, 0, -1]),
        ([FULL] * 3, {"min_servers": 2}, [0, 0, 1]),
        ([IDLE] * 3, {"max_servers": 2}, [0, 0, -1]),
        ([FULL] * 7, {"pause_seconds": 0.0}, [0, 0, 1, 0, 0, 1, 0]),
    ],
)
def test_patience_counts_windows_of_one_direction_since_the_last_change(
    windows: Any, bounds: Any, changes: list[int]
) -> None:
    """Whatever the number of servers that they ask for, and at the bounds, too."""
    assert [each.change for each in follow(windows, **bounds)] == changes


def test_at_a_mark_nothing_happens_and_the_busiest_server_counts() -> None:
    assert follow([servers(0.8, 0.5)], patience=1)[0].change == 0
    assert follow([servers(0.1, 0.1, work=0.7)], patience=1)[0].change == 0
    uneven = [*servers(0.1, work=0.8), *servers(0.1, work=0.1)]
    assert follow([uneven], patience=1)[0].add == 2
    roomy = [replace(each, limit_bytes=2.0) for each in servers(0.85, 0.5)]
    assert follow([roomy], patience=1)[0].change == 0
    assert follow([servers(0.0, 0.0)], patience=1)[0].change == -1


def test_after_a_change_there_is_a_pause() -> None:
    found = follow([servers(0.85, 0.5)] * 16, pause_seconds=100.0)
    assert [n for n, each in enumerate(found) if each.change] == [2, 12]
    assert "but the last change was 90 s ago" in found[11].reason


def test_bounds_are_kept_at_once() -> None:
    assert follow([servers(0.6, 0.6)], min_servers=3)[0].add == 1
    assert len(follow([servers(0.6, 0.6, 0.6)], max_servers=2)[0].remove) == 1


@given(
    used=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    work=st.floats(0.0, 1.0),
    step_seconds=st.floats(0.1, 10.0),
)
def test_a_change_is_not_reverted(used: list[float], work: float, step_seconds: float) -> None:
    """Assumes that the load of the busiest server is spread over the new number: the opposite must not follow."""
    now = servers(*used, work=work)
    decision, _ = decide(now, step_seconds, ScaleLimits(max_servers=100, patience=1), ScaleHistory(), 0.0)
    have, after = len(now), len(now) + decision.change
    assert 1 <= after <= 100
    spread = servers(*[max(used) * have / after] * after, work=work * have / after)
    again, _ = decide(spread, step_seconds, ScaleLimits(max_servers=100, patience=1), ScaleHistory(), 0.0)
    assert decision.change * again.change >= 0
    assert not (decision.change > 0 and again.change)


def test_loads_are_differences_of_two_answers() -> None:
    before = {"rows": 5, "bytes": 10.0, "memory_bytes": 100.0, "work_seconds": 3.0, "latest_step": 10}
    after = {"rows": 7, "bytes": 20.0, "memory_bytes": 100.0, "work_seconds": 4.0, "latest_step": 30}
    found = ServerLoad.between("tcp://host:1", before, after)
    assert (found.rows, found.used_bytes, found.limit_bytes) == (7, 20.0, 100.0)
    assert found.work_seconds == pytest.approx(0.05)
    same = ServerLoad.between("a", after, after, limit_bytes=50.0)
    assert (same.work_seconds, same.limit_bytes) == (0.0, 50.0)
    step = after | {"latest_step": 31, "work_seconds": 4.5}
    assert ServerLoad.between("a", after, step).work_seconds == 0.5
    assert same == ServerLoad(address="a", rows=7, used_bytes=20.0, limit_bytes=50.0)
    assert ServerLoad.between("a", after, before).work_seconds == 0.0, "the server was restarted"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_servers": 0}, "max_servers is 0"),
        ({"max_servers": 2, "min_servers": 0}, "min_servers is 0"),
        ({"max_servers": 2, "patience": 1001}, "patience is 1001"),
        ({"max_servers": 2, "memory_goal": 0.0}, "memory_goal is 0.0 and memory_high 0.8"),
        ({"max_servers": 2, "memory_goal": 0.8}, "memory_goal is 0.8 and memory_high 0.8"),
        ({"max_servers": 2, "min_servers": 3}, "max_servers is 2"),
        ({"max_servers": 2, "memory_goal": 0.9}, "memory_goal is 0.9 and memory_high 0.8"),
        ({"max_servers": 2, "work_high": 1.5}, "work_goal is 0.4 and work_high 1.5"),
        ({"max_servers": 2, "patience": 0}, "patience is 0"),
        ({"max_servers": 2, "pause_seconds": -1.0}, "pause_seconds is -1.0"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScaleLimits(**wrong)
    with pytest.raises(ConfigError, match="there are no servers"):
        decide([], 1.0, BOUNDS, ScaleHistory(), 0.0)


def test_the_bounds_of_a_run() -> None:
    """The defaults, which docs/cluster.md quotes; a mark may equal the limit."""
    assert ScaleLimits(max_servers=8) == ScaleLimits(
        min_servers=1,
        max_servers=8,
        memory_high=0.8,
        memory_goal=0.6,
        work_high=0.7,
        work_goal=0.4,
        patience=3,
        pause_seconds=300.0,
    )
    assert ScaleLimits(max_servers=8, memory_high=1.0).memory_high == 1.0
