"""The user's own loop with rows on servers: the bits of a run with local rows, through checkpoints from any number of
servers to any other, or none.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cluster import running_servers
from contents import bits
from loop import batches, deployed, job, loss_of, running, take_step, train
from satrap import Checkpoint, ConfigError, Embeddings, StreamError, Table
from satrap.errors import SnapshotError
from satrap.server.migration.coordinator import Migration
from satrap.worker.rows import UpdateRequest
from satrap.worker.sharded_rows import ShardedRows
from waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.draw(6)
each_way = pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlap"])


@each_way
@pytest.mark.parametrize("options", [{}, {"staleness": 2, "deterministic": True}], ids=["sync", "stale"])
def test_a_loop_over_servers_has_the_bits_of_a_local_loop(overlap: bool, options: dict[str, Any]) -> None:
    found = []
    for num_servers in (0, 2):
        with running(num_servers, **options) as (embeddings, model, optimizer):
            losses = train(embeddings, model, optimizer, batches(12), overlap=overlap)
            embeddings.drain()
            embeddings.eval()
            with embeddings.stream(batches(3, seed=1)) as stream:
                losses += [model(batch.dense, batch.embeddings).sum().item() for batch in stream]
            counters = embeddings.counters()
            assert counters.rows == {name: len(table) for name, table in embeddings.tables.items()}
            found.append((losses, bits(embeddings, model), counters.rows, counters.lost))
    assert found[0] == found[1]


def test_lookups_overlap_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of step 2 is held until the lookup of step 5, which needs the update of step 1."""
    lookup, update = ShardedRows.lookup, ShardedRows.update
    came, threads = threading.Event(), set()

    def looked_up(rows: ShardedRows, *given: Any) -> Any:
        found = lookup(rows, *given)
        threads.add(threading.current_thread().name)
        if given[0].step == 5:
            came.set()
        return found

    def updated(rows: ShardedRows, request: UpdateRequest) -> None:
        threads.add(threading.current_thread().name)
        assert request.step != 2 or came.wait(DEADLINE_SECONDS)
        update(rows, request)

    monkeypatch.setattr(ShardedRows, "lookup", looked_up)
    monkeypatch.setattr(ShardedRows, "update", updated)
    with running(2, staleness=3) as (embeddings, model, optimizer):
        train(embeddings, model, optimizer, batches(12), overlap=True)
        counters = embeddings.counters()
        assert sum(counters.staleness.values()) == 12 and max(counters.staleness) == 3 and not counters.lost
    assert threads == {"satrap-lookups", "satrap-updates"}


@pytest.mark.parametrize("known", [False, True], ids=["unheard", "heard"])
def test_the_next_checkpoint_after_a_migration_is_whole(known: bool, tmp_path: Path) -> None:
    """Whether or not the trainer knows of the migration when it saves; later checkpoints are changes again."""
    with running_servers(3) as services:
        addresses = [service.address for service in services]
        embeddings, model, optimizer = job(servers=addresses[:2])
        run = Checkpoint(tmp_path, model, optimizer, embeddings, None, full_every=100, keep=100)
        parents = []
        for n in range(6):
            train(embeddings, model, optimizer, batches(2, seed=n))
            embeddings.drain()
            if n in (2, 4):
                Migration(addresses[:2], addresses if n == 2 else addresses[1:], pause_ratio=0.0).run()
            if known:
                assert len(embeddings.tables["item"]) > 0
            run.save()
            newest = max(each for each in tmp_path.iterdir())
            parents.append(json.loads((newest / "checkpoint.json").read_text())["parent"] is not None)
            with running(0) as (restored, other, its):
                assert Checkpoint(tmp_path, other, its, restored, None).resume()
                assert bits(restored, other) == bits(embeddings, model)
        assert parents == [False, True, False, True, False, True]
        assert embeddings.worker.servers is not None
        embeddings.worker.servers.close()


@pytest.mark.draw(4)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2), (2, 2), (0, 3), (2, 0)])
@pytest.mark.parametrize("full_every", [1, 3])
def test_a_checkpoint_of_any_number_of_servers_goes_into_any_other(
    before: int, after: int, full_every: int, tmp_path: Path
) -> None:
    data = batches(20)
    with running(0) as (embeddings, model, optimizer):
        train(embeddings, model, optimizer, data)
        wanted = bits(embeddings, model)
    with running(before) as (embeddings, model, optimizer):
        run = Checkpoint(tmp_path, model, optimizer, embeddings, data, full_every=full_every)
        assert not run.resume()
        _train_and_save(embeddings, model, optimizer, run, data, 11)
    with running(after) as (embeddings, model, optimizer):
        run = Checkpoint(tmp_path, model, optimizer, embeddings, data, full_every=full_every)
        assert run.resume() and embeddings.step == 10
        _train_and_save(embeddings, model, optimizer, run, data, 17)
    with running(before) as (embeddings, model, optimizer):
        run = Checkpoint(tmp_path, model, optimizer, embeddings, data, full_every=full_every)
        assert run.resume() and embeddings.step == 16
        _train_and_save(embeddings, model, optimizer, run, data, None)
        assert embeddings.step == 20 and bits(embeddings, model) == wanted
        for table in embeddings.tables.values():
            table.check()


def _train_and_save(embeddings: Any, model: Any, optimizer: Any, run: Checkpoint, data: Any, until: int | None) -> None:
    """Save every second step, and stop in the middle of one."""
    for batch in embeddings.stream(data):
        if batch.step == until:
            return
        take_step(loss_of(model, batch), optimizer)
        run.save(every_steps=2)


def test_a_missing_part_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    data = batches(4)
    with running(2) as (embeddings, model, optimizer):
        run = Checkpoint(tmp_path, model, optimizer, embeddings, data)
        train(embeddings, model, optimizer, data)
        run.save()
        before = bits(embeddings, model)
        part = next(tmp_path.rglob("1-of-2"))
        part.rename(tmp_path / "away")
        with pytest.raises(SnapshotError, match="holds the parts 0-of-2; expected all of one save, 0-of-2 to 1-of-2"):
            run.resume()
        assert bits(embeddings, model) == before


def test_rows_of_an_earlier_run_are_not_trained_by_mistake() -> None:
    with running_servers(2) as services:
        addresses = [service.address for service in services]
        for again in (False, True):
            embeddings, model, optimizer = job(servers=addresses)
            assert embeddings.worker.servers is not None
            if again:
                with pytest.raises(StreamError, match=r"of an earlier run, trained up to step 3.*tables.clear\(\)"):
                    embeddings.stream(batches(3))
                embeddings.tables.clear()  # type: ignore[union-attr]
                assert not any(len(table) for table in embeddings.tables.values())
            train(embeddings, model, optimizer, batches(3))
            embeddings.worker.servers.close()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"workers": ["tcp://127.0.0.1:1"]}, "found workers but no servers"),
        ({"keys": "client.key"}, "found keys but no servers"),
        (
            {"servers": ["tcp://127.0.0.1:1"], "staleness": 32},
            "staleness is 32; expected at most 31 with several trainers or servers",
        ),
        ({"servers": ["127.0.0.1"]}, "127.0.0.1"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        Embeddings({"id": Table("t", dim=2)}, **deployed(options))
