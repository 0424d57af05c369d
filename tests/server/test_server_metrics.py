"""Metrics and status of a server: scraped numbers equal what was done, and the call `status` waits for nothing."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from bag_oracle import update
from cluster import ANYWHERE, batch, one_table, running_servers, sharded_worker
from oracle import COUNTERS, Oracle
from satrap import transfer
from satrap.cli.http import StatusEndpoint
from satrap.config.tables import MinCount
from satrap.errors import SatrapError
from satrap.monitor.samples import call_samples
from satrap.rpc import Client, Origin, Service
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.server.status import server_samples
from satrap.table.snapshot import verified_file
from scrape import Numbers, get, number, scrape
from waiting import DEADLINE_SECONDS, wait_until


@contextmanager
def served(server: Server) -> Iterator[tuple[Service, str]]:
    """Serve a server and its metrics; yields the service and the URL of the metrics."""
    with (
        StatusEndpoint("server", "0", lambda: server.status(Origin()), server_samples) as endpoint,
        Service(server, ServerCalls, ANYWHERE) as service,
    ):
        (line,) = endpoint.attach(service)
        yield service, line.split()[-1]


def table_numbers(numbers: Numbers) -> dict[str, float]:
    return {
        name.removeprefix("satrap_table_").removesuffix("_total"): value
        for (name, labels), value in numbers.items()
        if labels == (("table", "t"),)
    }


def update_ids(worker: Any, step: int, ids: Any, gradient: float) -> None:
    found = worker.lookup(batch(ids), step=step)
    assert found.ticket is not None
    worker.update([found.ticket], [np.full_like(found.block, gradient)], [{}], step=step)


def test_scraped_numbers_are_what_was_done(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    server = Server(num_threads=1, checkpoints=[tmp_path], shared=tmp_path / "rows")
    with served(server) as (service, url):
        ready = url.replace("metrics", "readyz")
        assert get(ready) == (503, "no trainer has given this server its job yet\n")
        limits: dict[str, Any] = {"num_buckets": 1, "capacity": 20, "expire_after": 3}
        features = one_table(admission=MinCount(2), on_nonfinite="skip", **limits)
        of_step = [40] * 16 + [5] * 4  # at the end few ids, so that the rows of the others expire
        steps = [draw.integers(0, each, 20).astype(np.uint64) for each in of_step]
        with sharded_worker(features, [service.address]) as worker:
            for step, ids in enumerate(steps, 1):
                update_ids(worker, step, ids, np.nan if step == len(steps) else 1.0)
            numbers = scrape(url)
            stats = worker.tables["t"].stats() | {"skipped": 0}  # by this process, before the server sees them
            version = worker.tables["t"].save(tmp_path / "saved")
            after_save = scrape(url)
        assert get(ready) == (200, "ready\n")
        # The table, by a model of it.
        model = Oracle(features.tables[0], seed=0)
        for step, ids in enumerate(steps, 1):
            model.lookup(ids.tolist(), step=step)
            if step < len(steps):
                model.update(ids.tolist(), np.ones((len(ids), 2), np.float32), step=step)
        found = table_numbers(numbers)
        named = {"absent": "not_applied_absent"}
        counted = {name: model.counters[named.get(name, name)] for name in found if named.get(name, name) in COUNTERS}
        assert {name: found[name] for name in counted} == counted and len(counted) == len(COUNTERS)
        assert all(count > 0 for name, count in counted.items() if name != "skipped")
        assert found["rows"] == len(model.rows)
        assert found == {name: stats[named.get(name, name)] for name in found} and len(found) == len(stats)
        # The calls.
        for method, calls in (
            ("lookup", len(steps)),
            ("update", len(steps) - 1),
        ):  # an update without a finite gradient is not sent
            assert number(numbers, "satrap_call_seconds_count", method=method) == calls
            assert 0 < number(numbers, "satrap_call_seconds_sum", method=method) < 60
        assert number(numbers, "satrap_step") == len(steps)
        assert number(numbers, "satrap_attempt") > 0
        assert number(numbers, "satrap_buckets", state="owned") == 1
        assert number(numbers, "satrap_calls_queued") == number(numbers, "satrap_calls_failed_total") == 0
        # Ids cross once with the lookup; rows and gradients of two floats each, of unique ids.
        num_ids = sum(len(np.unique(ids)) for ids in steps)
        assert number(numbers, "satrap_received_bytes_total") > 16 * num_ids
        assert number(numbers, "satrap_sent_bytes_total") > 8 * num_ids
        # The save.
        assert version == 2
        assert number(after_save, "satrap_snapshots_total", work="save") == 1
        assert number(after_save, "satrap_snapshots_running", work="save") == 0
        size = sum(each.stat().st_size for each in (tmp_path / "saved").rglob("*.arrow"))
        assert number(after_save, "satrap_last_snapshot_bytes", work="save") >= size
        assert number(after_save, "satrap_snapshot_done_bytes", work="save") == 0
        assert number(after_save, "satrap_snapshots_total", work="restore") == 0
        for of in ("machine", "rows"):
            allowed = number(numbers, "satrap_memory_allowed_bytes", of=of)
            assert 0 < number(numbers, "satrap_memory_used_bytes", of=of) < allowed


def test_every_counter_of_a_service_has_its_metric() -> None:
    """The numbers differ, so no two can be exchanged. What a closed service counts is not served."""
    with Service(Server(num_threads=1), ServerCalls, ANYWHERE) as service:
        counts = {name: number for number, name in enumerate(service.counts(), 1)}
    found = {each.name: each.value for each in call_samples(counts, (), {})}
    names = {
        **{name: f"satrap_calls_{name}" for name in ("queued", "running", "busy", "expired", "failed", "unsent")},
        **{name: f"satrap_{name}" for name in ("received_bytes", "sent_bytes")},
        "arrived": "satrap_calls",
        "duplicates": "satrap_calls_duplicate",
        "bad": "satrap_frames_bad",
        "ended_connections": "satrap_connections_ended",
    }
    assert found == {name: counts[key] for key, name in names.items()}
    assert counts.keys() - names.keys() == {"dropped", "replied"}


def test_faulty_calls_are_counted() -> None:
    server = Server(num_threads=1)
    with served(server) as (service, url), zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        with Client(ServerCalls, service.address) as client, pytest.raises(SatrapError):
            client.call.check(Origin(), 0)
        peer.connect(service.address)
        peer.send(b"not a header")
        assert peer.poll(60_000)
        numbers = scrape(url)
        assert number(numbers, "satrap_calls_failed_total") == 1
        assert number(numbers, "satrap_frames_bad_total") == 1
        assert number(numbers, "satrap_calls_total") == 1
        assert number(numbers, "satrap_call_seconds_count", method="check") == 1


def test_a_restore_in_progress_is_shown_and_delays_no_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restore holds the server's lock; status and scrape answer nevertheless, with the rows read so far."""
    server = Server(num_threads=1, checkpoints=[tmp_path])
    with (
        served(server) as (service, url),
        sharded_worker(one_table(), [service.address]) as worker,
        Client(ServerCalls, service.address) as client,
    ):
        update_ids(worker, 1, np.arange(50), 1.0)
        worker.tables["t"].save(tmp_path / "saved")
        imported, may_continue = threading.Event(), threading.Event()

        def advance(num_bytes: int) -> None:
            transfer.advance(num_bytes)
            current = transfer.current_transfer()
            if current is not None and current.kind == "restore":
                imported.set()
                assert may_continue.wait(DEADLINE_SECONDS)

        monkeypatch.setattr(verified_file, "advance", advance)
        restore = threading.Thread(target=worker.tables.restore, args=({"t": [tmp_path / "saved"]},))
        restore.start()
        assert imported.wait(DEADLINE_SECONDS)
        numbers, status = scrape(url), client.call.status(Origin())
        assert get(url.replace("metrics", "readyz")) == (503, "a restore is running\n")
        may_continue.set()
        restore.join()
        assert number(numbers, "satrap_snapshots_running", work="restore") == 1
        done = number(numbers, "satrap_snapshot_done_bytes", work="restore")
        assert 0 < done <= number(numbers, "satrap_snapshot_expected_bytes", work="restore")
        assert number(numbers, "satrap_snapshot_left_seconds", work="restore") >= 0
        assert number(numbers, "satrap_snapshots_total", work="verify") == 0  # the tables before were verified
        assert status["not_ready"] == "a restore is running" and number(numbers, "satrap_ready") == 0
        assert number(scrape(url), "satrap_snapshots_total", work="restore") == 1
        assert client.call.status(Origin())["tables"]["t"]["rows"] == 50


def test_tables_that_a_restore_removes_meanwhile_are_left_out() -> None:
    server = Server(num_threads=1)
    with served(server) as (service, url), sharded_worker(one_table(), [service.address]):
        state = server._fence.state
        assert state is not None
        tables = state.tables
        del state.tables
        assert number(scrape(url), "satrap_ready") == 0 and "tables" not in server.status(Origin())
        state.tables = tables
        assert number(scrape(url), "satrap_ready") == 1


def test_status_starts_no_attempt_and_takes_no_lease() -> None:
    server = Server(num_threads=1)
    with Service(server, ServerCalls, ANYWHERE) as service, Client(ServerCalls, service.address) as client:
        status = client.call.status(Origin())
        assert "tables" not in status and status["leases"] == {}
        with sharded_worker(one_table(), [service.address]) as worker:
            for step in (1, 2, 3):
                worker.lookup(batch([step]), step=step, oldest_open=1)
            before = client.call.status(Origin())
            for _ in range(3):
                after = client.call.status(Origin())
            assert (before["attempt"], before["step"], before["map_version"]) == (
                after["attempt"],
                after["step"],
                after["map_version"],
            )
            assert before["staleness"] == {"0": 2} and before["tables"]["t"]["rows"] == 3
            assert after["addresses"] == [service.address] and after["tables"] == before["tables"]
            wait_until(lambda: client.call.status(Origin())["leases"])  # the worker's thread takes it, see Lease
            (lease,) = client.call.status(Origin())["leases"].values()
            assert lease[0] == status["where"]


def test_a_server_counts_the_updates_of_others_that_each_update_missed(rng: np.random.Generator) -> None:
    """Three trainers with up to three open steps each, in any order; the log of updates is the oracle."""
    with (
        running_servers(1) as services,
        sharded_worker(one_table(), [services[0].address]) as first,
        Client(ServerCalls, services[0].address) as client,
        ExitStack() as stack,
    ):
        attempt, addresses = first.servers.attempt, [services[0].address]
        others = [sharded_worker(one_table(), addresses, trainer=trainer, attempt=attempt) for trainer in (1, 2)]
        workers = [first, *map(stack.enter_context, others)]
        log: list[int] = []
        pending: list[list[tuple[int, Any, int]]] = [[], [], []]
        steps, expected = [0, 0, 0], Counter[str]()
        for trainer in rng.integers(0, 3, 60).tolist():
            mine = pending[trainer]
            if len(mine) < 3 and rng.random() < 0.6:
                steps[trainer] += 1
                oldest = mine[0][0] if mine else steps[trainer]
                found = workers[trainer].lookup(batch([1, trainer]), step=steps[trainer], oldest_open=oldest)
                mine.append((steps[trainer], found, len(log)))
            elif mine:
                step, found, begin = mine.pop(0)
                update(workers[trainer], found, np.ones((2, 2), np.float32), step=step)
                expected[str(sum(each != trainer for each in log[begin:]))] += 1
                log.append(trainer)
        assert client.call.status(Origin())["missed_updates"] == expected
