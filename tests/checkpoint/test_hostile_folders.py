"""A run's folder in which something else stands for a file, or whose files are forged: resume, Reader and save raise an
error of Satrap's within seconds, and change neither the tables nor the folder."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from checkpoint_job import Job, names
from interrupts import no_hang
from satrap import Reader
from satrap.checkpoint.run_directory import MANIFEST
from satrap.checkpoint.run_owner import OWNER
from satrap.config.durable import checksum, json_with_checksum, parse_json
from satrap.config.regular_file import MAX_JSON_BYTES
from satrap.errors import CheckpointError, SatrapError

SECONDS = 120  # ends a hang
DEEP = b"[" * 100_000 + b"]" * 100_000
DEEP_OBJECT = b'{"a":' * 60 + b"1" + b"}" * 60


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three checkpoints: a full one and two deltas."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    Job(str(folder), 3, full_every=3).train()
    assert names(folder) == ["000001-step-1", "000002-step-2", "000003-step-3"]
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def tree(folder: Path) -> dict[str, int]:
    return {str(each.relative_to(folder)): each.lstat().st_mode for each in sorted(folder.rglob("*"))}


def refused(run: Path) -> str:
    """Returns the error with which the run is neither resumed nor read, which change nothing."""
    before = tree(run)
    job = Job(str(run), 4, full_every=3)
    with no_hang(SECONDS):
        with pytest.raises(SatrapError) as caught:
            job.run.resume()
        with suppress(SatrapError), Reader(run):  # it may find what it needs, such as without the owner
            pass
    assert not sum(map(len, job.embeddings.tables.values())), "no row was restored"
    assert tree(run) == before
    return str(caught.value)


# -- something else in place of a file ---------------------------------------------------------------------------------


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(path.parent, os.O_RDONLY)
        bound.bind(f"/proc/self/fd/{here}/{path.name}")  # its own path may be too long
        os.close(here)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_folder(path: Path) -> None:
    path.mkdir()


def put_gigabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


FILES = ("000003-step-3/checkpoint.json", "000003-step-3/state.safetensors", "000001-step-1/tables/0/manifest.json")


@pytest.mark.parametrize("put", [put_fifo, put_socket, put_device, put_folder])
@pytest.mark.parametrize("file", [*FILES, "000001-step-1/tables/0/*.arrow", ".owner.json"])
def test_something_else_in_place_of_a_file(run: Path, file: str, put: Callable[[Path], None]) -> None:
    path = min(run.glob(file))
    path.unlink()
    put(path)
    assert str(path) in refused(run)


@pytest.mark.parametrize("file", [FILES[0], FILES[2], ".owner.json"])
def test_a_huge_file_is_not_read_whole(run: Path, file: str) -> None:
    (run / file).unlink()
    put_gigabyte(run / file)
    assert f"has more than {MAX_JSON_BYTES:,} bytes" in refused(run)


@pytest.mark.parametrize("content", [DEEP, DEEP_OBJECT], ids=["lists", "objects"])
@pytest.mark.parametrize("file", [FILES[0], FILES[2]])
def test_a_deeply_nested_file(run: Path, file: str, content: bytes) -> None:
    (run / file).write_bytes(content)
    words = refused(run)
    assert "nested" in words and file in words


@pytest.mark.parametrize("content", [DEEP, DEEP_OBJECT, b"", b"{"])
def test_an_owner_that_is_no_json_is_one_that_was_cut_short(run: Path, content: bytes) -> None:
    (run / OWNER).write_bytes(content)
    job = Job(str(run), 5, full_every=3)
    assert job.run.resume()
    job.train()
    assert names(run)[-1] == "000005-step-5"


@pytest.mark.parametrize("change", [{"writer": 5}, {"host": []}, {"pid": "x"}, {"announced": {}}, {"format": 1}])
def test_a_forged_owner(run: Path, change: dict[str, Any]) -> None:
    (run / OWNER).write_text(json.dumps(json.loads((run / OWNER).read_bytes()) | change))
    assert "expected the process that saves into this folder: remove the file if there is none" in refused(run)


# -- forged parents ----------------------------------------------------------------------------------------------------


def forge(run: Path, name: str, **change: Any) -> None:
    """Changes fields of a checkpoint, with a checksum that matches."""
    path = run / name / MANIFEST
    path.write_bytes(json_with_checksum(parse_json(path.read_bytes()) | change, 1))


def parent(name: object, run: Path | None = None) -> dict[str, Any]:
    path = None if run is None else run / str(name) / MANIFEST
    return {"name": name, "crc32c": 0 if path is None else checksum(path.read_bytes())}


ONE, TWO, THREE = "000001-step-1", "000002-step-2", "000003-step-3"


@pytest.mark.parametrize("name", [THREE, "000009-step-9", "000003-step-1", "../run/000001-step-1", "x", ""])
def test_a_parent_must_be_an_older_checkpoint(run: Path, name: str) -> None:
    """Else a checkpoint that is its own parent would be read for ever, and files outside the folder would be read."""
    forge(run, THREE, parent=parent(name))
    assert f"{run / THREE} names {name!r} as its parent, which is no older checkpoint" in refused(run)


def test_a_parent_that_is_missing(run: Path) -> None:
    shutil.rmtree(run / TWO)
    assert f"{run / THREE} needs its parent '{TWO}', which is not in {run}" in refused(run)


def test_the_parent_of_somebody_else(run: Path, tmp_path: Path) -> None:
    """It has the same tables, steps and name, and its checksum is forged in the end."""
    Job(str(tmp_path / "other"), 3, full_every=3, seed=1).train()
    shutil.rmtree(run / TWO)
    shutil.copytree(tmp_path / "other" / TWO, run / TWO)
    assert f"{run / THREE} has another parent {TWO}" in refused(run)
    forge(run, THREE, parent=parent(TWO, run))
    assert f"{run / TWO} has another parent {ONE}" in refused(run)
    forge(run, TWO, parent=parent(ONE, run))
    forge(run, THREE, parent=parent(TWO, run))
    assert "seed" in refused(run), "the snapshots themselves are of another run"


def test_a_delta_that_skips_a_version(run: Path) -> None:
    forge(run, THREE, parent=parent(ONE, run))
    assert f"{run / THREE}/tables/0 continues version 3 of the snapshot" in refused(run)


def test_a_delta_that_says_that_it_is_whole(run: Path) -> None:
    forge(run, THREE, parent=None)
    assert "rows" in refused(run) or "full" in refused(run)


def test_a_full_checkpoint_with_a_parent(run: Path) -> None:
    """A full snapshot in the place of the changes since its parent."""
    forge(run, THREE, parent=parent(TWO, run), tables=parse_json((run / ONE / MANIFEST).read_bytes())["tables"])
    shutil.rmtree(run / THREE / "tables")
    shutil.copytree(run / ONE / "tables", run / THREE / "tables")
    assert "full" in refused(run)


ODD: list[Any] = [None, True, -1, 2**70, 1.5, "", "x", "../x", [], [1], {}, {"a": 1}, [{}], [None]]


def test_any_forged_checkpoint_is_refused_or_resumed(run: Path, seed: int) -> None:
    """With fields of any types and a checksum that matches."""
    rng = random.Random(seed)
    content = parse_json((run / THREE / MANIFEST).read_bytes())
    job, refusals = Job(str(run), 4, full_every=3), 0
    for _ in range(60):
        forged = parse_json(json.dumps(content))
        for _ in range(rng.randint(1, 2)):
            node = forged
            while True:
                key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
                if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
                    break
                node = node[key]
            node[key] = deepcopy(rng.choice(ODD))
        (run / THREE / MANIFEST).write_bytes(json_with_checksum(forged, 1))
        try:
            with no_hang(SECONDS):
                job.run.resume()
        except SatrapError:
            refusals += 1
    assert refusals > 20
    (run / THREE / MANIFEST).write_bytes(json_with_checksum(content, 1))
    assert job.run.resume(), "nothing that was refused has changed the folder"


def test_a_save_into_a_hostile_folder_is_refused(run: Path) -> None:
    job = Job(str(run), 5, full_every=3)
    assert job.run.resume()
    (run / OWNER).unlink()
    os.mkfifo(run / OWNER)
    with no_hang(SECONDS), pytest.raises(CheckpointError, match="it is a FIFO; expected a regular file"):
        job.train()
