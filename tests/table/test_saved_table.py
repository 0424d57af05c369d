"""A checkpoint is resumed with the tables, parts and parents that it was saved with, and with no others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint_job import Job, same
from cluster import running_servers
from contents import bits
from loop import batches, job, rows, train
from satrap import Checkpoint, Embeddings, Inputs, Reader, Store, Table
from satrap.config.durable import checksum
from satrap.errors import CheckpointError, SatrapError, SnapshotError, StreamError
from satrap.table.group_cut import GroupCut
from satrap.table.snapshot.saved_table import checksum_of
from satrap.table.table_group import TableGroup
from snapshots import forge, manifest


def replace(to: Path, by: Path) -> None:
    shutil.rmtree(to)
    shutil.copytree(by, to)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes checkpoint.json and its checksum."""
    path = folder / "checkpoint.json"
    content = json.loads(path.read_text())
    del content["crc32c"]
    change(content)
    content["crc32c"] = checksum(json.dumps(content, sort_keys=True, indent=1).encode())
    path.write_text(json.dumps(content, sort_keys=True, indent=1))


def refused(run: Path, words: str, error: type[SatrapError] = SatrapError) -> None:
    """An unchanged run resumes."""
    job = Job(str(run), 4)
    before = job.state()
    with pytest.raises(error, match=words):
        job.run.resume()
    with pytest.raises(error, match=words):
        Reader(run)
    same(job.state(), before)


def test_a_table_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    Job(str(tmp_path), 3).train()
    newest = tmp_path / "000003-step-3"
    replace(newest / "tables/0", tmp_path / "000002-step-2/tables/0")
    refused(tmp_path, rf"{newest}/tables/0 is not what {newest} was saved with, but snapshot \w+ of version 3 with")


def test_a_checkpoint_under_another_ones_name_is_refused(tmp_path: Path) -> None:
    Job(str(tmp_path), 3).train()
    one, other = tmp_path / "000002-step-2", tmp_path / "000003-step-3"
    one.rename(tmp_path / "kept")
    other.rename(one)
    (tmp_path / "kept").rename(other)
    refused(tmp_path, "000003-step-3 was saved as 000002-step-2, but its folder is called 000003-step-3: rename the")
    one.rename(tmp_path / "000105-step-3")
    refused(tmp_path, "000105-step-3 was saved as 000003-step-3, but its folder is called")


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_link_of_a_chain_from_another_run_is_refused(step: int, tmp_path: Path) -> None:
    """The other checkpoint has the same configuration, seed, data and names."""
    for name in ("one", "other"):
        Job(str(tmp_path / name), 3, full_every=3).train()
    link = f"00000{step}-step-{step}"
    replace(tmp_path / "one" / link / "tables", tmp_path / "other" / link / "tables")
    refused(tmp_path / "one", f"{link}/tables/0 is not what", SnapshotError)


def test_a_parent_from_another_run_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        Job(str(tmp_path / name), 3, full_every=3).train()
    replace(tmp_path / "one/000002-step-2", tmp_path / "other/000002-step-2")
    words = r"000003-step-3 has another parent 000002-step-2: its checkpoint\.json has"
    refused(tmp_path / "one", words, CheckpointError)


@pytest.mark.parametrize("full_every", [1, 3])
def test_a_table_with_other_rows_than_it_was_saved_with_is_refused(tmp_path: Path, full_every: int) -> None:
    """If it was saved in full, before a row changes. Of a delta only the filled table tells."""
    Job(str(tmp_path), 2, full_every=full_every).train()
    rewrite(tmp_path / "000002-step-2", lambda content: content["tables"][1].update(rows=7))
    words = "rows in its files; expected 7, as when" if full_every == 1 else "rows; expected 7, the number when"
    job = Job(str(tmp_path), 2)
    before = job.state()
    for call in (job.run.resume, lambda: Reader(tmp_path)):
        with pytest.raises(CheckpointError, match=rf"table 'item' has \d+ {words}"):
            call()
    if full_every == 1:
        same(job.state(), before)
        return
    with pytest.raises(StreamError, match="the tables hold a part of a checkpoint"):
        job.embeddings.stream(job.source)
    assert job.run.resume("000001-step-1") and job.embeddings.step == 1


def test_a_whole_save_without_all_rows_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(str(tmp_path), 2)
    job.train()
    write = GroupCut.write

    def counted(*arguments: Any, **options: Any) -> dict[str, int]:
        return {name: rows + 1 for name, rows in write(*arguments, **options).items()}

    monkeypatch.setattr(GroupCut, "write", counted)
    with pytest.raises(SnapshotError, match=r"table 'user' has \d+ rows, and .*/tables/0 holds \d+: nothing was saved"):
        job.run.save()
    assert not (tmp_path / "000003-step-2").exists()


@pytest.mark.parametrize("full_every", [1, 4])
def test_rows_that_expire_are_counted_alike(full_every: int, tmp_path: Path) -> None:
    tables = {"user": Table("user", dim=2, expire_after=2), "item": Table("item", dim=2, capacity=20, num_buckets=1)}

    def made() -> tuple[Embeddings, torch.nn.Module, Any, Checkpoint]:
        embeddings, model = Embeddings(tables, num_threads=1), torch.nn.Linear(4, 1)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return embeddings, model, optimizer, Checkpoint(tmp_path, model, optimizer, embeddings, full_every=full_every)

    embeddings, model, optimizer, run = made()
    ids = np.arange(7 * 16, dtype=np.uint64).reshape(7, 16)
    for batch in embeddings.stream([Inputs(names=("user", "item"), values=each, batch_size=8) for each in ids]):
        model(batch.embeddings).sum().backward()
        optimizer.step()
        run.save()
    assert made()[3].resume()


# -- servers -----------------------------------------------------------------------------------------------------------


class Served:
    """A job over two servers with two checkpoints, `one` and `two`."""

    def __init__(self, addresses: list[str], folder: Path, **options: Any) -> None:
        self.embeddings, self.model, optimizer = job(servers=addresses)
        self.run = Checkpoint(folder, self.model, optimizer, self.embeddings, None, **options)
        for seed in (0, 1):
            train(self.embeddings, self.model, optimizer, batches(3, seed=seed))
            self.run.save()
        self.one, self.two = sorted(path for path in folder.iterdir() if "step" in path.name)

    def refused(self, words: str) -> None:
        before = bits(self.embeddings, self.model)
        with pytest.raises(SnapshotError, match=words):
            self.run.resume()
        with pytest.raises(SnapshotError, match=words):
            Reader(self.one.parent)
        assert bits(self.embeddings, self.model) == before

    def close(self) -> None:
        assert self.embeddings.worker.servers is not None
        self.embeddings.worker.servers.close()


def test_parts_of_servers_are_those_that_were_saved(tmp_path: Path) -> None:
    with running_servers(2) as services:
        served = Served([each.address for each in services], tmp_path)
        table = served.two / "tables/1"
        shutil.copytree(table, tmp_path / "right")
        # From another checkpoint of the run.
        replace(table / "1-of-2", served.one / "tables/1/1-of-2")
        served.refused(rf"{table}/1-of-2 is not what {served.two} was saved with, but snapshot \w+ of version 2 with")
        # Another server's.
        replace(table / "1-of-2", table / "0-of-2")
        served.refused(rf"{table}/1-of-2 is not what {served.two} was saved with")
        replace(table, tmp_path / "right")
        assert served.run.resume()
        served.close()


def test_servers_read_what_the_trainer_sees(tmp_path: Path) -> None:
    with running_servers(2) as services:
        served = Served([each.address for each in services], tmp_path)
        assert served.embeddings.worker.servers is not None
        servers = served.embeddings.worker.servers
        chains = [[str(served.two / "tables" / str(table))] for table in (0, 1)]
        seen = [[checksum_of(Path(folder)) for folder in chain] for chain in chains]
        servers.call_all("verify", chains, seen, patient=True)
        other = [[checksum_of(served.one / "tables/0")], seen[1]]
        for call in ("verify", "restore"):
            servers.attempt += call == "restore"
            with pytest.raises(
                SnapshotError, match="holds other snapshots on this machine than the trainer sees there"
            ):
                servers.call_all(call, chains, other, patient=True)
        served.close()


def test_tables_are_restored_from_all_parts_of_one_save(tmp_path: Path) -> None:
    with running_servers(2) as services:
        served = Served([each.address for each in services], tmp_path)
        found = rows(served.embeddings)
        served.close()
    folders = {"user": served.two / "tables/0", "item": served.two / "tables/1"}
    config = [Table.from_dict(manifest(folder / "0-of-2")["config"]) for folder in folders.values()]

    def restored() -> TableGroup:
        tables = TableGroup(config, num_threads=1)
        tables.restore({name: [folder] for name, folder in folders.items()})
        return tables

    for name, store in restored().items():
        np.testing.assert_array_equal(store.read(np.arange(30, dtype=np.uint64)).values, found[name])
    part = folders["user"] / "0-of-2"
    (begin, end) = manifest(part)["buckets"][0]
    forge(part, lambda content: content.update(buckets=[[begin, end - 1]]))
    with pytest.raises(SnapshotError, match=r"holds bucket \d+, which is not in buckets|is in 0 of its 2"):
        restored()


def test_ids_of_buckets_that_the_manifest_does_not_name_are_refused(tmp_path: Path) -> None:
    store = Store(Table("item", dim=2, num_buckets=2), num_threads=1)
    store.lookup(np.arange(100, dtype=np.uint64))
    store.save(tmp_path)
    forge(tmp_path, lambda content: content.update(buckets=[[0, 1]]))
    with pytest.raises(SnapshotError, match=r"record batch 0 of part-\w+-00000.arrow holds bucket 1, which is not in"):
        Store.load(tmp_path, num_threads=1)


@pytest.mark.parametrize("buckets", [[[0, 2], [1, 2]], [[1, 1]], [[0, 10**6]], [[0]], [0], [[0.5, 1]], "all"])
def test_buckets_that_are_none_are_refused(buckets: Any, tmp_path: Path) -> None:
    Store(Table("item", dim=2), num_threads=1).save(tmp_path)
    forge(tmp_path, lambda content: content.update(buckets=buckets))
    with pytest.raises(SnapshotError, match="buckets"):
        Store.load(tmp_path, num_threads=1)


def test_rows_that_are_on_their_way_to_a_server_are_not_counted_there() -> None:
    store = Store(Table("item", dim=2, num_buckets=2), num_threads=1)
    store.lookup(np.arange(100, dtype=np.uint64))
    store._engine.set_owners(np.array([0, 1], np.uint32), 0)
    here = len(store)
    store._engine.set_owners(np.array([0, 1], np.uint32), 1)
    assert 0 < here < 100 and here + len(store) == 100
