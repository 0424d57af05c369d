"""What servers read for a restore: the files' parts that their buckets need, once, before any row is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import ANYWHERE, batch, one_table, sharded_worker
from contents import contents
from satrap.config.regular_file import read_regular
from satrap.errors import InputError, SnapshotError
from satrap.rpc import Service
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.storage import local_folder
from satrap.table.snapshot.saved_table import checksum_of
from satrap.table.snapshot.verified_file import VerifiedFile
from snapshots import manifest

IDS = np.arange(600, dtype=np.uint64)


class Cluster:
    """Two servers with the rows of step 1 saved in `folder`, and others since."""

    def __init__(self, servers: list[Server], worker: Any, folder: Path) -> None:
        self.servers, self.worker, self.folder = servers, worker, folder
        self.step(1)
        worker.tables["t"].save(folder)
        self.saved = contents(worker, IDS)
        self.step(2)

    def step(self, number: int) -> None:
        looked = self.worker.lookup(batch(IDS), step=number)
        assert looked.ticket is not None
        self.worker.update([looked.ticket], [np.full((len(IDS), 2), number, np.float32)], step=number)

    def restore(self) -> None:
        self.worker.tables.restore({"t": [self.folder]})

    def call(self, name: str) -> list[Any]:
        arguments = [[str(self.folder)]], [[checksum_of(self.folder)]]
        return list(self.worker.servers.call_all(name, *arguments, patient=True))

    def open_files(self) -> list[bool]:
        return [server._fence.state is not None and server._fence.state.verified is not None for server in self.servers]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        servers = [Server(num_threads=1, checkpoints=["/"]) for _ in range(2)]
        addresses = [stack.enter_context(Service(server, ServerCalls, ANYWHERE)).address for server in servers]
        yield Cluster(servers, stack.enter_context(sharded_worker(one_table(), addresses)), tmp_path / "a")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """The bytes of data files that were verified, by path; of manifests, how often they were read."""
    found: Counter[Path] = Counter()
    verify, read = VerifiedFile.__init__, read_regular

    def counted_verify(self: VerifiedFile, *arguments: Any) -> None:
        verify(self, *arguments)
        found[Path(self.path)] += self.bytes_read

    def counted_read(path: Path, max_bytes: int | None = None) -> bytes:
        found[path] += path.name == "manifest.json"
        return read(path, max_bytes)

    monkeypatch.setattr(VerifiedFile, "__init__", counted_verify)
    monkeypatch.setattr(local_folder, "read_regular", counted_read)
    return found


def test_each_byte_is_read_once(cluster: Cluster, reads: Counter[Path]) -> None:
    reads.clear()
    cluster.restore()
    assert contents(cluster.worker, IDS) == cluster.saved
    files = [path for path in cluster.folder.rglob("*") if path.is_file()]
    assert len(files) == 2 * 3
    readers = 1 + len(cluster.servers)  # the trainer reads the manifests, too
    expected = {path: readers if path.name == "manifest.json" else path.stat().st_size for path in files}
    assert +reads == expected
    assert cluster.open_files() == [False, False]
    cluster.step(2)


def test_a_restore_without_the_verification_reads_once_too(cluster: Cluster, reads: Counter[Path]) -> None:
    """The verification is missing when a server was restarted in between, or the shard map has changed."""
    cluster.worker.servers.attempt += 1
    reads.clear()
    assert cluster.call("restore") == [False, False]
    assert contents(cluster.worker, IDS) == cluster.saved
    assert all(count == path.stat().st_size for path, count in reads.items() if path.suffix == ".arrow")


def test_damage_is_found_by_the_server_that_owns_the_buckets(cluster: Cluster) -> None:
    """Nothing has changed then. The servers let go of what they have opened with the next save, or attempt."""
    before = contents(cluster.worker, IDS)
    part = cluster.folder / "1-of-2"
    file = next(each for each in manifest(part)["files"] if each["kind"] == "rows")
    path = part / file["name"]
    good = path.read_bytes()
    for at in (file["batches"][0][3] // 2, len(good) - 1):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        where = "record batch 0" if at < file["batches"][0][3] else "its footer"
        address = cluster.worker.servers.addresses[1]
        with pytest.raises(SnapshotError, match=rf"^{address}: {path} is damaged in {where} \(bytes"):
            cluster.restore()
        assert contents(cluster.worker, IDS) == before
        assert cluster.open_files()[1] is False
    path.write_bytes(good)
    cluster.call("verify")
    assert cluster.open_files() == [True, True]
    cluster.worker.tables["t"].save(cluster.folder.parent / "b")
    assert cluster.open_files() == [False, False]
    cluster.call("verify")
    cluster.worker.servers.begin_next_attempt()
    cluster.worker.servers.call_all("begin_attempt")
    assert cluster.open_files() == [False, False]
    cluster.restore()
    assert contents(cluster.worker, IDS) == cluster.saved


def test_damage_that_is_found_without_the_verification_drops_no_row(cluster: Cluster) -> None:
    before = contents(cluster.worker, IDS)
    for path in cluster.folder.rglob("part-*"):
        path.write_bytes(path.read_bytes()[:-1])
    attempt = cluster.worker.servers.attempt
    cluster.worker.servers.attempt += 1
    with pytest.raises(SnapshotError, match="bytes; expected"):
        cluster.call("restore")
    cluster.worker.servers.attempt = attempt
    assert contents(cluster.worker, IDS) == before


def test_folders_of_some_tables(cluster: Cluster) -> None:
    for name in ("verify", "restore"):
        cluster.worker.servers.attempt += name == "restore"
        with pytest.raises(InputError, match="found folders of 2 tables; expected those of all 1"):
            cluster.worker.servers.call_all(name, [[str(cluster.folder)]] * 2, [[0]] * 2, patient=True)
