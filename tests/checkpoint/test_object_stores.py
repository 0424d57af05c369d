"""Checkpoints in object stores: servers in processes that are killed, and errors that take seconds.

What depends on the kind of store is tested with all of them, by the fixture `store`; the rest with S3.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from checkpoint_job import NUM_IDS, Job, same
from cluster import ANYWHERE, running_servers, server_processes
from logged import logged
from object_stores import BUCKET, S3, SCHEMES, ObjectStore, use
from satrap import Deployment, Reader
from satrap.checkpoint.run_owner import OWNER
from satrap.errors import ChangesError, CheckpointError, ConfigError, SnapshotError
from satrap.storage.object_folder import ObjectFolder
from satrap.storage.open_folder import open_folder
from waiting import DEADLINE_SECONDS

ROOT = f"s3://{BUCKET}"
IDS = np.arange(NUM_IDS, dtype=np.uint64)


@pytest.fixture
def store(object_store: ObjectStore) -> ObjectStore:
    return object_store


def permitted(store: ObjectStore) -> tuple[str, list[str]]:
    """Return how to start servers that may use the store."""
    return ANYWHERE, ["--checkpoints", store.root]


def rows(addresses: list[str]) -> dict[str, Deployment]:
    return {"deployment": Deployment(addresses)}


def versions(store: ObjectStore, run: str) -> set[str]:
    """Return the folders of the run; not the file of its owner."""
    names = {key.removeprefix(f"{run}/").split("/")[0] for key in store.sizes(f"{run}/")}
    return names - {OWNER}


# -- objects -----------------------------------------------------------------------------------------------------------


def test_a_large_object_is_written_in_parts_and_read_in_ranges(store: ObjectStore, seed: int) -> None:
    data = np.random.default_rng(seed).bytes(20_000_001)  # three parts
    folder = open_folder(f"{store.root}/large-{store.scheme}")
    for key in ("d/e[1] %20/part", "aborted"):
        writer = folder.create(key)
        for start in range(0, len(data), 1_500_000):
            writer.write(memoryview(data)[start : start + 1_500_000])
        writer.complete() if key != "aborted" else writer.abort()
    folder.write("small", b"1")
    folder.write("small", b"22")
    assert folder.sizes() == {"d/e[1] %20/part": len(data), "small": 2}
    assert sorted(folder.names()) == ["d", "small"] and (folder / "d").names() == ["e[1] %20"]
    opened = folder.open("d/e[1] %20/part")
    opened.load(9, 15_000_000)  # four requests
    assert opened.size == len(data) and opened.memory[9:15_000_000] == data[9:15_000_000]
    folder.delete("small")
    folder.delete("small")
    for read in (folder.read, folder.open):
        with pytest.raises(FileNotFoundError):
            read("small")
    folder.delete_all()
    assert not folder.sizes() and not folder.names() and not store.sizes(f"large-{store.scheme}/")


# -- the probe ---------------------------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_used_is_refused_within_seconds(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(str(tmp_path / "run"), 1)  # imports what a first job does
    began, root = time.monotonic(), store.root
    none = f"{store.scheme}://none/run"
    with pytest.raises(CheckpointError, match=rf"{none} cannot be used: {store.no_bucket}: .* at {none}/\.probe"):
        Job(none, 1)
    with (
        store.refused(),
        pytest.raises(CheckpointError, match=rf"{root}/run cannot be used: AccessDenied: Access Denied"),
    ):
        Job(f"{root}/run", 1)
    use(monkeypatch, store, "http://127.0.0.1:1")
    with pytest.raises(CheckpointError, match=rf"{root}/run cannot be used: .* PUT http://127\.0\.0\.1:1/{BUCKET}/run"):
        Job(f"{root}/run", 1)
    assert time.monotonic() - began < 30
    assert not store.sizes("run/")


def test_a_scheme_that_nothing_opens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nothing://x/run cannot be opened: Protocol not known: nothing"):
        Job("nothing://x/run", 1)


def test_a_server_that_cannot_use_it_is_named_at_once(s3: S3) -> None:
    words = rf"'{ROOT}/run' is refused: expected a path below '/'; allow .* with --checkpoints"
    with running_servers(1, checkpoints=["/"]) as services, pytest.raises(ConfigError, match=words):
        Job(f"{ROOT}/run", 1, rows=rows([services[0].address]))
    assert not s3.sizes("run/"), "the trainer has removed what it wrote"


def test_each_server_uses_its_own_environment(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        with monkeypatch.context() as patched:
            use(patched, s3, "http://127.0.0.1:1")
            (server,) = stack.enter_context(server_processes(tmp_path, 1, *permitted(s3)))
        use(monkeypatch, s3)
        asked = rf"PUT http://127\.0\.0\.1:1/{BUCKET}/run/"
        words = rf"(?s)^this server cannot use {ROOT}/run: .* {asked}.* at {server.address}$"
        with pytest.raises(SnapshotError, match=words):
            Job(f"{ROOT}/run", 1, rows=rows([server.address]))


# -- servers -----------------------------------------------------------------------------------------------------------


def test_servers_write_and_read_their_parts(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer stages nothing. Any number of servers, the process itself and a `Reader` read what others wrote."""
    whole = Job(str(tmp_path / "run"), 6)
    whole.train(every_steps=10**6)
    written: Counter[str] = Counter()
    write, staged = ObjectFolder.write, set(os.listdir(tempfile.gettempdir()))

    def counted(folder: ObjectFolder, key: str, data: bytes) -> None:
        written[key.rpartition("/")[2]] += len(data)
        write(folder, key, data)

    url = f"{store.root}/parts-{store.scheme}/run"
    with server_processes(tmp_path, 3, *permitted(store)) as servers, monkeypatch.context() as patched:
        patched.setattr(ObjectFolder, "write", counted)
        patched.setattr(ObjectFolder, "create", None)  # the servers write all data files
        job = Job(url, 6, keep=2, full_every=4, rows=rows([each.address for each in servers]))
        job.train(every_steps=2)
        expected = job.state()
        job.embeddings.close()
    same(expected, whole.state())
    assert len(versions(store, f"parts-{store.scheme}/run")) == 3, "two, and a parent of theirs"
    probes = [name for name in written if name.startswith(".probe-")]
    assert written.keys() == {"parts.json", "state.safetensors", "checkpoint.json", ".owner.json", *probes}
    assert not {name for name in set(os.listdir(tempfile.gettempdir())) - staged if "checkpoint" in name}
    with running_servers(2, checkpoints=[store.root]) as services:
        again = Job(url, 6, rows=rows([each.address for each in services]))
        assert again.run.resume() and again.embeddings.step == 6
        same(again.state(), expected)
        again.embeddings.close()
    alone = Job(url, 6)
    assert alone.run.resume()
    same(alone.state(), expected)
    with Reader(url) as reader:
        for name, table in alone.embeddings.tables.items():
            np.testing.assert_array_equal(reader.lookup(name, IDS), table.lookup(IDS, train=False))


def test_a_server_that_is_killed_during_a_save_tears_nothing(s3: S3, tmp_path: Path) -> None:
    """The server that replaces it saves again, while its last request still arrives."""
    url = f"{ROOT}/killed/run"
    with server_processes(tmp_path, 2, *permitted(s3)) as servers, ThreadPoolExecutor(1) as pool:
        job = Job(url, 4, keep=3, full_every=3, rows=rows([each.address for each in servers]))
        job.train(every_steps=2)
        with s3.held(r"000003-step-4.*/tables/1/1-of-2/part-.*\.arrow$") as (wait, let_go):
            saving = pool.submit(job.run.save)
            wait()
            servers[1].kill()
            let_go()
            servers[1].restart()
            assert saving.result(DEADLINE_SECONDS)
        expected = job.state()
        job.embeddings.close()
    alone = Job(url, 4)
    assert alone.run.resume() and alone.embeddings.step == 4
    same(alone.state(), expected)


def test_servers_write_their_parts_while_rows_are_trained(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save beside training counts only once it is complete. A server that is killed loses it, and no older one."""
    url, data_file = f"{ROOT}/beside/run", r"/tables/1/1-of-2/part-.*\.arrow$"
    with server_processes(tmp_path, 2, *permitted(s3)) as servers:
        job = Job(url, 9, keep=9, full_every=3, rows=rows([each.address for each in servers]))
        stream = job.embeddings.stream(job.source)

        def take_steps(steps: int) -> None:
            for _ in range(steps):
                job.step(next(stream))

        take_steps(1)
        assert job.run.save()
        take_steps(1)
        states = {2: job.state()}
        with s3.held(rf"000002-step-2.*{data_file}") as (wait, let_go), monkeypatch.context() as patched:
            patched.setattr(ObjectFolder, "create", None)  # the servers write all data files
            assert job.run.save(wait=False)
            wait()
            take_steps(2)
            other = Job(url, 9)
            with logged("satrap.checkpoint", match=r"000002-step-2.* has no complete checkpoint\.json: "):
                assert other.run.resume() and other.embeddings.step == 1, "what a kill at this moment would leave"
            other.embeddings.close()
            let_go()
            assert job.run.best is None  # it is complete
        states[4] = job.state()
        with s3.held(rf"000003-step-4.*{data_file}") as (wait, let_go):
            assert job.run.save(wait=False)
            wait()
            servers[1].kill()
            let_go()
            servers[1].restart()
            take_steps(1)
            with pytest.raises(ChangesError, match="no longer has the cut"):
                job.run.save(wait=False)
        assert {name[:13] for name in versions(s3, "beside/run")} == {"000001-step-1", "000002-step-2"}
        states[5] = job.state()
        assert job.run.save(wait=False)
        take_steps(1)
        job.embeddings.close()
    kept = sorted(versions(s3, "beside/run"))
    assert [name[:13] for name in kept] == ["000001-step-1", "000002-step-2", "000004-step-5"], "a name is used once"
    assert all(f"beside/run/{kept[-1]}/tables/{i}/parts.json" in s3.sizes("beside/run/") for i in range(2))
    alone = Job(url, 9)
    for name, step in zip(kept[1:], (2, 5), strict=True):
        assert alone.run.resume(name) and alone.embeddings.step == step
        same(alone.state(), states[step])


@pytest.mark.parametrize(
    ("bucket_server", "beside"),
    [("s3", ()), *((scheme, ("{}", "beside")) for scheme in SCHEMES)],
    indirect=["bucket_server"],
)
def test_a_trainer_that_is_killed_during_a_save_leaves_a_version_that_is_swept(
    store: ObjectStore, tmp_path: Path, beside: tuple[str, ...]
) -> None:
    whole = Job(str(tmp_path / "run"), 4)
    whole.train(every_steps=10**6)
    run = f"torn-{store.scheme}-{len(beside)}/run"
    url = f"{store.root}/{run}"
    script = Path(__file__).parents[1] / "support/checkpoint_job.py"
    with store.held(r"000002-step-2.*/state\.safetensors$") as (wait, _):
        child = subprocess.Popen([sys.executable, str(script), url, "4", *beside], stdout=subprocess.DEVNULL)
        wait()
        child.kill()
        child.wait()
    (torn,) = {name for name in versions(store, run) if name.startswith("000002")}
    job = Job(url, 4, keep=2)
    with logged(
        "satrap.checkpoint", match=rf"{url}/{torn} has no complete checkpoint\.json: .* The next save removes it"
    ):
        assert job.run.resume() and job.embeddings.step == 1
    job.train()
    same(job.state(), whole.state())
    assert {name[:13] for name in versions(store, run)} == {"000004-step-3", "000005-step-4"}


def test_damage_is_named_by_its_url_and_changes_nothing(s3: S3) -> None:
    url = f"{ROOT}/damaged/run"
    with running_servers(2, checkpoints=[ROOT]) as services:
        job = Job(url, 2, rows=rows([each.address for each in services]))
        job.train(every_steps=2)
        before = job.state()
        key = next(key for key in s3.sizes("damaged/run/") if "/tables/0/1-of-2/part-" in key)
        good = s3.get(key)
        for bad, words in (
            (good[:40] + bytes([good[40] ^ 1]) + good[41:], r"is damaged in record batch 0 \(bytes"),
            (good[:-1], rf"has {len(good) - 1} bytes; expected {len(good)}"),
        ):
            s3.put(key, bad)
            with pytest.raises(SnapshotError, match=rf"{re.escape(f's3://{BUCKET}/{key}')} {words}"):
                job.run.resume()
            same(job.state(), before)
        s3.put(key, good)
        assert job.run.resume()
        same(job.state(), before)
        job.embeddings.close()
