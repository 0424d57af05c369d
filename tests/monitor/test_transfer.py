"""Transfers: what they log at the start, in between and at the end, and how nested ones and other threads count."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logged import received
from satrap import transfer
from satrap.byte_sizes import format_bytes
from satrap.checkpoint.checkpoint_writer import in_background
from satrap.monitor.progress import Progress
from satrap.monitor.sinks import Screen
from satrap.transfer import Transfer, Transfers, advance, current_transfer, format_seconds, in_context

LOG = logging.getLogger("satrap.tests")


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(transfer, "time", clock)
    return clock


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    with received(LOG.name) as records:
        yield records


def test_a_bar_shows_how_far_a_save_is(clock: Clock) -> None:
    """Every second, also from a thread that writes it beside training, and until it has ended."""
    stream = io.StringIO()
    with Progress(None, [Screen(stream, as_bar=True)], every_seconds=1e-9) as progress:
        progress.step(OneBatch())
        drawn = stream.getvalue()

        def save() -> None:
            with Transfer(LOG, "save", "save", total=100), Transfer(LOG, "save", "save of a table"):
                for _ in range(4):
                    clock.now += 0.5
                    advance(20)

        in_background(save).result()
        notes = re.findall(r"\r([^|]*) \| step 7", stream.getvalue().removeprefix(drawn))
        assert notes == ["save: 40 %, 40 bytes, about 2 s left", "save: 80 %, 80 bytes, about 0 s left"]
        assert stream.getvalue().endswith(drawn.rpartition("\r")[2]), "the note is gone"
    before = stream.getvalue()
    save()
    assert stream.getvalue() == before, "a Progress that is closed draws nothing"


class OneBatch:
    step, label = 7, None

    def __len__(self) -> int:
        return 1


def values(record: logging.LogRecord) -> dict[str, Any]:
    return {"event": record.event, **record.event_values}  # type: ignore[attr-defined]


def test_a_transfer_logs_its_start_and_its_end(clock: Clock, records: list[logging.LogRecord]) -> None:
    with Transfer(LOG, "save", "save of table 'a'", total=3 << 20, table="a"):
        advance(1 << 20)
        clock.now += 2.5
        advance(2 << 20)
    assert [each.getMessage() for each in records] == [
        "save of table 'a' begun",
        "save of table 'a' done: 3.0 MiB in 2.5 s",
    ]
    assert values(records[1]) == {"event": "save_done", "table": "a", "bytes": 3 << 20, "seconds": 2.5}
    assert current_transfer() is None


def test_a_transfer_that_fails_says_why(clock: Clock, records: list[logging.LogRecord]) -> None:
    with pytest.raises(OSError, match="disk full"), Transfer(LOG, "save", "save"):
        raise OSError("disk full")
    assert records[-1].levelno == logging.WARNING and values(records[-1])["event"] == "save_failed"
    assert records[-1].getMessage() == "save failed after 0.0 s: disk full"


def test_of_nested_transfers_that_fail_the_outermost_says_why(records: list[logging.LogRecord]) -> None:
    """Also if the inner one failed in another thread: the exception and one line of the log are enough."""

    def part() -> None:
        with Transfer(LOG, "verify", "part"), Transfer(LOG, "verify", "part of it"):
            raise OSError("disk full")

    for is_beside in (False, True):
        records.clear()
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(OSError, match="disk full"),
            Transfer(LOG, "restore", "all"),
        ):
            pool.submit(in_context(part)).result() if is_beside else part()
        failed = [record.getMessage() for record in records if record.levelno > logging.INFO]
        assert len(failed) == 1 and re.fullmatch(r"all failed after .* s: disk full", failed[0])


@pytest.mark.parametrize("how", ["advance", "reach", "observe"])
def test_progress_and_the_time_left(how: str, clock: Clock, records: list[logging.LogRecord]) -> None:
    """At a steady rate the estimate is exact, and a line appears every ten seconds."""
    with Transfer(LOG, "move", "move", total=None if how == "observe" else 100) as work:
        for second in range(1, 51):
            clock.now += 1
            if how == "advance":
                advance(2)
            elif how == "reach":
                work.reach(2 * second, 100, 5 * second)
            else:
                work.observe([{"done": second, "total": 50, "bytes": second}] * 2)
    lines = [each for each in records if values(each)["event"] == "move_progress"]
    assert [values(each)["seconds_left"] for each in lines] == [40, 30, 20, 10, 0]
    assert re.fullmatch(r"move: 20 %, \d+ bytes, about 40 s left", lines[0].getMessage())


def test_progress_without_a_total(clock: Clock, records: list[logging.LogRecord]) -> None:
    with Transfer(LOG, "save", "save"):
        clock.now += 10
        advance(2048)
    assert records[1].getMessage() == "save: 2.0 KiB so far" and values(records[1])["seconds_left"] is None


def test_a_nested_transfer_advances_the_outer_one(clock: Clock, records: list[logging.LogRecord]) -> None:
    """And leaves the progress to it, if it knows its total."""
    with Transfer(LOG, "save", "whole", total=100) as whole:
        for number in range(2):
            with Transfer(LOG, "save", f"part {number}", total=50):
                clock.now += 20
                advance(50)
    assert whole.figures() == {"done": 100, "total": 100, "bytes": 100, "seconds_left": 0}
    progress = [each.getMessage() for each in records if values(each)["event"] == "save_progress"]
    assert progress == ["whole: 50 %, 50 bytes, about 20 s left", "whole: 100 %, 100 bytes, about 0 s left"]


@given(st.lists(st.lists(st.integers(0, 1000), max_size=20), min_size=1, max_size=5))
def test_threads_count_for_the_transfer_that_started_them(parts: list[list[int]]) -> None:
    def work(numbers: list[int]) -> None:
        for number in numbers:
            advance(number)

    with ThreadPoolExecutor(4) as pool:
        transfers = []
        for _ in range(2):  # one after the other, each with threads of the same pool
            with Transfer(LOG, "save", "save") as one:
                for future in [pool.submit(in_context(work), numbers) for numbers in parts]:
                    future.result()
            transfers.append(one)
    assert all(each.figures()["bytes"] == sum(map(sum, parts)) for each in transfers)


def test_the_transfers_of_an_engine(clock: Clock) -> None:
    """Sums over those that run, and of those that completed the last; one that fails is not counted."""
    among = Transfers()
    idle = among.to_dict()["save"]
    assert idle == {
        "running": 0,
        "bytes": 0,
        "total": 0,
        "seconds_left": None,
        "completed": 0,
        "last_bytes": 0,
        "seconds": 0.0,
        "ended_at": 0.0,
    }
    with pytest.raises(OSError), Transfer(LOG, "save", "save", among=among):
        raise OSError
    assert among.to_dict()["save"] == idle
    with Transfer(LOG, "save", "a", total=10, among=among), Transfer(LOG, "restore", "b", among=among) as inner:
        clock.now += 6
        advance(4)
        assert among.running() == {"done": 8, "total": 10, "bytes": 8}
        found = among.to_dict()
        assert found["save"] == {**idle, "running": 1, "bytes": 4, "total": 10, "seconds_left": 9}
        assert found["restore"] == {**idle, "running": 1, "bytes": 4} and inner.figures()["total"] is None
    found = among.to_dict()
    assert found["save"] == {**idle, "completed": 1, "last_bytes": 4, "seconds": 6.0, "ended_at": clock.time()}
    assert found["verify"] == idle and among.running() == {"done": 0, "total": 0, "bytes": 0}


def test_words() -> None:
    assert [format_bytes(each) for each in (0, 1023, 1024, 5 << 20, 3 << 29)] == [
        *("0 bytes", "1023 bytes", "1.0 KiB", "5.0 MiB", "1.5 GiB")
    ]
    assert [format_seconds(each) for each in (0, 119, 120, 7199, 7200)] == ["0 s", "119 s", "2 min", "120 min", "2.0 h"]
