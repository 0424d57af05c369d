"""What an arrival and a departure ask, migrate and log, with other servers and migrations that the test scripts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from logged import logged
from satrap.errors import NotReadyError
from satrap.rpc import Origin
from satrap.server.migration import arrival, coordinator, departure
from satrap.server.migration.arrival import Arrival
from satrap.server.migration.departure import Departure
from waiting import DEADLINE_SECONDS, wait_until

IN_NO_JOB: dict[str, Any] = {}
MEMBER: dict[str, Any] = {"number": 1, "addresses": ["a", "own", "b"], "leaves": False, "buckets": {"owned": 5}}
OTHER = {"number": 0, "addresses": ["a", "b"], "leaves": False}


class ScriptedServer:
    """Has each status in turn, and then the last one."""

    leaves = False

    def __init__(self, *statuses: dict[str, Any]) -> None:
        self._statuses = list(statuses)

    def status(self, origin: Origin) -> dict[str, Any]:
        return self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]


@pytest.fixture
def migrations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The migrations that were run; the first one fails."""
    made: list[tuple[Any, dict[str, Any]]] = []

    def migration(current: Any, target: Any, **options: Any) -> Any:
        made.append(((list(current), list(target)), options))

        def run() -> Any:
            if len(made) == 1:
                raise NotReadyError("another migration is running")
            return SimpleNamespace(buckets=3)

        return SimpleNamespace(run=run)

    for module in (arrival, departure):
        monkeypatch.setattr(module, "Migration", migration)
        monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    return made


def run_to_the_end(one: Arrival, monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], dict[str, Any]]) -> None:
    monkeypatch.setattr(arrival, "ask_status", lambda address, keys: answer(address))
    one.start()
    one.join(DEADLINE_SECONDS)
    assert not one._thread.is_alive()


def test_an_arrival_asks_others_until_it_has_joined(
    monkeypatch: pytest.MonkeyPatch, migrations: list[tuple[Any, dict[str, Any]]]
) -> None:
    """A migration that fails is logged, and tried again at the next question."""
    asked: list[str] = []
    answers = [IN_NO_JOB, OTHER, OTHER | {"leaves": True}, OTHER, OTHER]

    def answer(address: str) -> dict[str, Any]:
        asked.append(address)
        return answers[len(asked) - 1]

    server = ScriptedServer(*[IN_NO_JOB] * 4, MEMBER)
    with (
        logged("satrap.server", "taking a share of the buckets: another migration is running; retrying"),
        logged("satrap.server", "taken 3 buckets of the job's 2 other servers", logging.INFO),
    ):
        run_to_the_end(Arrival(server.status, "own", ["own", "a"], None), monkeypatch, answer)
    assert asked == ["a"] * 5, "never itself"
    assert [made for made, _ in migrations] == [(["a", "b"], ["a", "b", "own"])] * 2


def test_an_arrival_without_others_asks_no_server() -> None:
    one = Arrival(ScriptedServer(IN_NO_JOB).status, "own", ["own"], None)
    one.start()
    assert not one._thread.is_alive()


def test_an_arrival_that_is_closed_asks_no_longer(
    monkeypatch: pytest.MonkeyPatch, migrations: list[tuple[Any, dict[str, Any]]]
) -> None:
    one = Arrival(ScriptedServer(IN_NO_JOB).status, "own", ["a"], None)

    def answer(address: str) -> dict[str, Any]:
        one.close()
        return OTHER | {"leaves": True}

    run_to_the_end(one, monkeypatch, answer)
    assert not migrations


def depart(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], Any], seconds: float = 1000.0
) -> None:
    """Runs a departure until it has called its `on_end`, as the last thing that its thread does."""
    ended, one = threading.Event(), Departure(server, None, seconds)
    monkeypatch.setattr(one, "_ask", answer)
    one.start(ended.set)
    assert server.leaves, "others learn at once that it leaves"
    assert ended.wait(DEADLINE_SECONDS) and one._thread is not None
    wait_until(lambda: one._thread is not None and not one._thread.is_alive())


def test_a_departure_moves_the_buckets_of_all_that_leave(
    monkeypatch: pytest.MonkeyPatch, migrations: list[tuple[Any, dict[str, Any]]]
) -> None:
    """It waits for answers, and looks again after a migration that failed."""
    rounds = [("silent", "stays"), ("stays", "leaves"), ("stays", "leaves")]
    asked: list[str] = []

    def answer(address: str) -> str:
        asked.append(address)
        return rounds[(len(asked) - 1) // 2][address == "b"]

    with logged("satrap.server", "moving this server's buckets: another migration is running"):
        depart(ScriptedServer(MEMBER, MEMBER, MEMBER, IN_NO_JOB), monkeypatch, answer)
    assert asked == ["a", "b"] * 3, "not itself, and no server once it is in no job"
    assert [made for made, _ in migrations] == [(["a", "own", "b"], ["a"])] * 2
    for _, options in migrations:
        assert options["pause_ratio"] == 0.0 and 0 < options["deadline"] <= 1000


@pytest.mark.parametrize("others", ["leaves", "silent"])
def test_a_departure_moves_nothing_if_no_server_stays(
    others: str, monkeypatch: pytest.MonkeyPatch, migrations: list[tuple[Any, dict[str, Any]]]
) -> None:
    depart(ScriptedServer(MEMBER), monkeypatch, lambda address: others)
    assert not migrations


def test_a_departure_ends_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, migrations: list[tuple[Any, dict[str, Any]]]
) -> None:
    asked: list[str] = []
    depart(ScriptedServer(MEMBER), monkeypatch, asked.append, seconds=0.0)
    assert not asked and not migrations
    times = iter([0.0, 4.0, 9.0, 10.0])
    monkeypatch.setattr(departure, "time", SimpleNamespace(monotonic=lambda: next(times), sleep=lambda seconds: None))
    depart(ScriptedServer(MEMBER), monkeypatch, lambda address: {"a": "silent", "b": "stays"}[address], seconds=10.0)
    assert next(times, None) is None and not migrations


@pytest.mark.parametrize(
    ("status", "level", "text"),
    [
        (IN_NO_JOB, logging.INFO, "this server's buckets have moved to other servers"),
        (MEMBER, logging.WARNING, "ends with 5 buckets, which did not move to other servers within 7.5 s"),
    ],
)
def test_what_a_departure_reports(status: dict[str, Any], level: int, text: str) -> None:
    with logged("satrap.server", text, level):
        Departure(ScriptedServer(status), None, 7.5).report()


@pytest.mark.parametrize(
    ("status", "answer"), [({"leaves": True}, "leaves"), ({"leaves": False}, "stays"), (None, "silent")]
)
def test_the_answer_of_another_server(
    status: dict[str, Any] | None, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not answer in two seconds, or with an error, is silent."""

    def ask(origin: Origin) -> dict[str, Any]:
        if status is None:
            raise NotReadyError("no answer")
        return status

    class Client:
        """Is itself the client, as the real one."""

        def __init__(self, calls: Any, address: str, **options: Any) -> None:
            assert address == "a" and options == {"keys": None, "deadline": 2.0}
            self.call = SimpleNamespace(status=ask)

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(coordinator, "Client", Client)
    assert coordinator.ask_status("a", None) == (status or {})
    assert Departure(ScriptedServer(MEMBER), None, 1.0)._ask("a") == answer
