"""What a process with some of the buckets reads of a snapshot: its record batches, each once, and any damage in them.

The parts of N servers are saved by one engine that takes the role of each server in turn, and read by M processes. The
counts include the manifests; SATRAP_FULL_SIZE=1 makes the counted checkpoint larger than 200 MB.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from satrap._core import bucket_of
from satrap.config.optimizers import Adagrad
from satrap.config.tables import MinCount, Table
from satrap.errors import SnapshotError
from satrap.sharding.bucket_map import BucketMap
from satrap.table.snapshot.directory import part_name
from satrap.table.snapshot.manifest import Manifest
from satrap.table.snapshot.writer import TARGET_BYTES, cut_batches
from satrap.table.store import Store
from satrap.table.table_group import TableGroup
from snapshots import by_id, manifest, read_file

FULL_SIZE = os.environ.get("SATRAP_FULL_SIZE") == "1"
FAULT_AROUND = 64 << 10  # bytes that Linux maps around a page that is read
Owners = NDArray[np.uint32]


class Saved:
    """A table and its snapshots in `folder`: full, and the changes after it, both saved by servers that own buckets."""

    def __init__(self, folder: Path, table: Table, owners: Owners, rows: int, changed: int) -> None:
        self.table, self.folders = table, [folder / "full", folder / "changes"]
        self.group = TableGroup([table], num_threads=2)
        self.store = self.group[table.name]
        self._look_up(np.arange(rows, dtype=np.uint64), step=1)
        versions = self._save(owners, {})
        self._look_up(np.arange(rows - changed, rows + changed, dtype=np.uint64), step=4)
        self._save(owners, versions)

    def _look_up(self, ids: NDArray[np.uint64], step: int) -> None:
        for part in np.array_split(ids, -(-len(ids) // 200_000)):
            self.store.lookup(part, step=step)

    def _save(self, owners: Owners, since: dict[int, int]) -> dict[int, int]:
        folder, num = self.folders[bool(since)], int(owners.max()) + 1
        engine, name, versions = self.store._engine, self.table.name, {}
        for server in range(num):
            engine.set_owners(owners, server)
            part = folder / part_name(server, num)
            cut = self.group.take_cut({name: since[server]} if since else None, owned=[owners == server])
            cut.write({name: part}, is_full=not since)
            versions[server] = cut.versions[name]
        engine.set_owners(np.zeros_like(owners), 0)
        return versions

    @property
    def files(self) -> list[Path]:
        return [path for folder in self.folders for path in folder.rglob("*") if path.is_file()]

    def restored(self, owned: NDArray[np.bool_] | None, table: Table | None = None) -> tuple[Store, int, int]:
        """Returns a new table, like `table` if given, with these buckets, the bytes that were read of data files, and
        the bytes of the pages that the system had to show for it."""
        group = TableGroup([table or self.table], num_threads=1)
        chains = group.verify({"t": self.folders}, None if owned is None else [owned])
        group.fill(chains)
        read = sum(saved.bytes_read for level in chains["t"] for saved in level)
        return group["t"], read, _resident(self.folders[0].parent)

    def exported(self, store: Store, owned: NDArray[np.bool_], direct: bool) -> list[dict[str, NDArray[Any]]]:
        """Returns the rows and sightings of these buckets, in a table that is direct or not."""
        engine, buckets = store._engine, store.table.resolved_num_buckets
        found = []
        for columns in (engine.export_rows(0, 0, buckets, 0), engine.export_sightings(0, 0, buckets)):
            mine = owned[np.asarray(bucket_of(columns["id"], len(owned), direct))]
            found.append(by_id({name: column[mine] for name, column in columns.items()}))
        return found

    def assert_restored(self, store: Store, owned: NDArray[np.bool_]) -> None:
        store.check()
        everything = np.ones_like(owned)
        direct = store.table.is_direct
        restored, saved = self.exported(store, everything, direct), self.exported(self.store, owned, direct)
        for found, wanted in zip(restored, saved, strict=True):
            for name, column in wanted.items():
                assert found[name].tobytes() == column.tobytes(), name


def _resident(folder: Path) -> int:
    """Returns the bytes of the pages of files in the folder that this process has mapped and touched."""
    total, is_ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0]:
                is_ours = str(folder) in line
            elif is_ours and line.startswith("Rss:"):
                total += 1024 * int(line.split()[1])
    return total


def even(num_buckets: int, num_servers: int) -> Owners:
    return np.array(BucketMap.even([num_buckets], num_servers).owners[0], np.uint32)


def spread(num_buckets: int, num_servers: int) -> Owners:
    """The map of servers that joined one by one, so that buckets of each are scattered."""
    found = BucketMap.even([num_buckets], 1)
    for servers in range(2, num_servers + 1):
        found = found.renumbered({server: server for server in range(servers - 1)}, servers)
        found = found.with_owners(found.spread(range(servers)))
    return np.array(found.owners[0], np.uint32)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Saved]:
    """By number of servers: a table of 8 MB, or of 210 MB, and changes of a fifth of it."""
    rows, buckets = (1_500_000, 256) if FULL_SIZE else (60_000, 64)
    table = Table("t", dim=16, optimizer=Adagrad(lr=0.1), num_buckets=buckets)
    return {
        num: Saved(tmp_path_factory.mktemp(f"of-{num}"), table, even(buckets, num), rows, rows // 10)
        for num in ((1, 4, 16) if FULL_SIZE else (1, 5))
    }


@pytest.mark.draw(4)
@pytest.mark.parametrize("servers", [even, spread])
@pytest.mark.parametrize("num", range(1, 17) if FULL_SIZE else (1, 3, 8, 16))
def test_bytes_that_all_servers_read(num: int, servers: Any, counted: dict[int, Saved]) -> None:
    for before, saved in counted.items():
        total = sum(path.stat().st_size for path in saved.files)
        manifests = sum(path.stat().st_size for path in saved.files if path.name == "manifest.json")
        assert total > 200e6 or not FULL_SIZE
        owners, read = servers(saved.table.num_buckets, num), 0
        for server in range(num):
            owned = owners == server
            store, of_files, resident = saved.restored(owned)
            saved.assert_restored(store, owned)
            runs = 1 + np.count_nonzero(np.diff(owned))
            assert resident <= of_files + 2 * FAULT_AROUND * (runs + 1) * len(saved.files), "no other byte is touched"
            read += of_files + manifests
        assert read <= 1.1 * total, f"{before} -> {num}: {read / total:.3f}"
        if num == 1:
            assert read == total, "each byte once"


@settings(max_examples=settings().max_examples // 10)
@given(
    before=st.integers(0, 4),
    after=st.integers(0, 6),
    direct=st.one_of(st.none(), st.tuples(st.booleans(), st.booleans())),
    seed=st.integers(0, 2**32 - 1),
)
def test_another_number_of_buckets(
    before: int, after: int, direct: tuple[bool, bool] | None, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A table without a capacity is restored with more buckets than it was saved with, or fewer, and if no row leaves
    it, with `num_rows` or without: every server gets the rows of its buckets, and no other; what changes then can be
    saved and restored with a third number."""
    table, rng = Table("t", dim=3, admission=MinCount(2), expire_after=40), np.random.default_rng(seed)
    other = table
    if direct is not None:
        table, other = (Table("t", dim=3, num_rows=300 if each else None) for each in direct)
    owners = [rng.integers(0, 3, 1 << bits).astype(np.uint32) for bits in (before, after)]
    folder = tmp_path_factory.mktemp("numbers")
    saved = Saved(folder, replace(table, num_buckets=1 << before), owners[0], 200, 60)
    other = replace(other, num_buckets=1 << after)
    for server in range(3):
        saved.assert_restored(saved.restored(owners[1] == server, other)[0], owners[1] == server)
    whole = Saved(folder / "whole", replace(table, num_buckets=1 << before), np.zeros(1 << before, np.uint32), 200, 60)
    store = whole.restored(None, other)[0]
    version = store.version
    whole.store, whole.table = store, replace(table, num_buckets=4)
    whole._look_up(np.arange(100, 300, dtype=np.uint64), step=5)
    store.save_changes(folder / "more", since=version)
    whole.folders.append(folder / "more")
    whole.assert_restored(whole.restored(None)[0], np.ones(4, np.bool_))


def test_a_capacity_fixes_the_number_of_buckets(tmp_path: Path) -> None:
    table = Table("t", dim=3, capacity=300, num_buckets=8)
    saved = Saved(tmp_path, table, np.zeros(8, np.uint32), 200, 60)
    with pytest.raises(SnapshotError, match="num_buckets is 16 in the table and 8 in the snapshot"):
        saved.restored(None, replace(table, num_buckets=16))
    hint = replace(table, on_full="grow")
    grown = Saved(tmp_path / "hint", hint, np.zeros(8, np.uint32), 400, 60)
    grown.assert_restored(grown.restored(None, replace(hint, num_buckets=16))[0], np.ones(16, np.bool_))


draw_owners = st.lists(st.integers(0, 2), min_size=8, max_size=8).map(lambda each: np.array(each, np.uint32))


@settings(max_examples=settings().max_examples // 10)
@given(
    before=draw_owners,
    after=draw_owners,
    target=st.sampled_from([1, 2000, TARGET_BYTES]),
    which=st.integers(0, 1000),
    where=st.floats(0, 1, exclude_max=True),
)
def test_any_map_to_any_map(
    before: Owners, after: Owners, target: int, which: int, where: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every server gets its rows. One wrong bit anywhere, or a file cut anywhere, is refused by some server, which
    names the file, and the record batch if it is in one."""
    table = Table("t", dim=3, capacity=300, num_buckets=8, admission=MinCount(2), expire_after=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("satrap.table.snapshot.writer.TARGET_BYTES", target)
        saved = Saved(tmp_path_factory.mktemp("maps"), table, before, 200, 60)
    for server in range(3):
        saved.assert_restored(saved.restored(after == server)[0], after == server)
    paths = [path for path in saved.files if path.name != "manifest.json"]
    path = paths[which % len(paths)]
    good = path.read_bytes()
    at = int(where * len(good))
    path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
    errors = [_refusal(saved, after == server) for server in range(3)]
    file = next(each for each in manifest(path.parent)["files"] if each["name"] == path.name)
    batch = next((i for i, each in enumerate(file["batches"]) if at < each[3]), None)
    place = "in its footer" if batch is None else f"in record batch {batch} "
    assert any(errors) and all(error is None or f"{path} is damaged {place}" in error for error in errors), errors
    path.write_bytes(good[:at])
    errors = [_refusal(saved, after == server) for server in range(3)]
    assert any(error is not None and f"{path} has {at} bytes; expected {len(good)}" in error for error in errors)


def _refusal(saved: Saved, owned: NDArray[np.bool_]) -> str | None:
    try:
        saved.restored(owned)
    except SnapshotError as error:
        return str(error)
    return None


def mix64(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The hash of docs/format.md."""
    x = ids.copy()
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@pytest.mark.parametrize(("num_buckets", "rows"), [(1, 32_768), (64, 150_000)])
def test_a_mapped_file_is_its_own_index(num_buckets: int, rows: int, tmp_path: Path) -> None:
    """Every id is found in its record batch by interpolation, nearly all within a cache line after three rounds."""
    store, rng = Store(Table("t", dim=1, num_buckets=num_buckets), num_threads=1), np.random.default_rng(3)
    ids = np.unique(rng.integers(0, 2**40, rows).astype(np.uint64))
    store.lookup(ids)
    store.save(tmp_path)
    file = manifest(tmp_path)["files"][0]
    column = read_file(tmp_path / file["name"]).column("id")
    assert [len(chunk) for chunk in column.chunks] == [batch[2] for batch in file["batches"]]
    buckets, close = np.asarray(bucket_of(ids, num_buckets)), 0
    for (begin, end, *_), chunk in zip(file["batches"], column.chunks, strict=True):
        keys = mix64(chunk.to_numpy())
        wanted = mix64(ids[(begin <= buckets) & (buckets < end)])
        assert np.all(keys[1:] > keys[:-1]) and len(keys) == len(wanted)
        found, rounds = interpolate(keys, wanted)
        np.testing.assert_array_equal(keys[found], wanted)
        close += int(np.count_nonzero(rounds <= 3))
    assert close >= 0.99 * len(ids)


def interpolate(keys: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns where each key is among the rising keys, and after how many rounds its cache line was known."""
    low, high = np.zeros(len(wanted), np.int64), np.full(len(wanted), len(keys) - 1)
    at, rounds = low.copy(), np.zeros(len(wanted), np.int64)
    true = np.searchsorted(keys, wanted)
    is_open = np.ones(len(wanted), np.bool_)
    for number in range(1, 65):
        a, b = keys[low].astype(np.float64), keys[high].astype(np.float64)
        part = np.divide(wanted - keys[low], b - a, out=np.zeros(len(wanted)), where=b > a)
        at = np.where(is_open, np.clip(low + (part * (high - low)).astype(np.int64), low, high), at)
        rounds[(rounds == 0) & (np.abs(at - true) < 8)] = number
        low = np.where(is_open & (keys[at] < wanted), at + 1, low)
        high = np.where(is_open & (keys[at] > wanted), at - 1, high)
        is_open &= keys[at] != wanted
        if not is_open.any():
            break
    return at, rounds


@given(
    rows=st.lists(st.integers(0, 40), min_size=16, max_size=16),
    owned=st.lists(st.booleans(), min_size=16, max_size=16),
    line_bytes=st.sampled_from([8, 1000, TARGET_BYTES]),
    at=st.tuples(st.integers(0, 16), st.integers(0, 16)).map(sorted),
)
def test_where_lines_are_cut(rows: Sequence[int], owned: Sequence[bool], line_bytes: int, at: list[int]) -> None:
    begin, end = at
    held = [n if own and begin <= b < end else 0 for b, (n, own) in enumerate(zip(rows, owned, strict=True))]
    buckets = np.repeat(np.arange(16, dtype=np.uint32), held)
    edges = np.flatnonzero(np.diff([0, *map(int, owned), 0])).tolist()
    cuts = cut_batches(buckets, begin, end, list(zip(edges[::2], edges[1::2], strict=True)), line_bytes)
    assert [line for cut in cuts for line in range(cut.first, cut.last)] == list(range(len(buckets)))
    mean = max(1, len(buckets) * line_bytes / max(1, sum(owned[begin:end])))
    group = 1 << max(0, int(np.log2(TARGET_BYTES / mean)))
    for cut in cuts:
        assert begin <= cut.bucket_begin < cut.bucket_end <= end and all(owned[cut.bucket_begin : cut.bucket_end])
        assert all(cut.bucket_begin <= bucket < cut.bucket_end for bucket in buckets[cut.first : cut.last])
        width = cut.bucket_end - cut.bucket_begin
        assert width == 1 or width * mean <= TARGET_BYTES
        assert cut.bucket_begin // group == (cut.bucket_end - 1) // group, "aligned"
    assert all(a.bucket_end <= b.bucket_begin for a, b in pairwise(cuts))


def test_an_old_manifest_has_no_batches(tmp_path: Path) -> None:
    store = Store(Table("t", dim=2), num_threads=1)
    store.lookup(np.arange(10, dtype=np.uint64))
    store.save(tmp_path)
    text = (tmp_path / "manifest.json").read_bytes()
    found = Manifest.from_json(text, "here")
    assert found.to_json() == text and all(file.batches is not None for file in found.files)
