"""Servers write and workers read for others only allowed paths and those below, with links and ".." resolved."""

from __future__ import annotations

import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from clicks import write_table
from cluster import batch, one_table, running_servers, sharded_worker
from remote_worker_parts import Working, running, source, train_and_note, write
from satrap import CSV, Arrow, Checkpoint, Parquet
from satrap.config.location import Location
from satrap.config.path_allowlist import PathAllowlist
from satrap.data.registry import restrict
from satrap.data.source import Source
from satrap.errors import ConfigError, InputError, SatrapError
from satrap.launch.process_command import Script
from satrap.rpc import Client, Origin
from satrap.server.protocol import ServerCalls
from satrap.server.state import CUT_SECONDS


@pytest.mark.parametrize(
    ("path", "permitted"),
    [
        ("data", True),
        ("data/", True),
        ("data/day/0.csv", True),
        ("data/../data/0", True),
        ("file://{}/data/0", True),
        ("single.csv", True),
        ("inner/x", True),
        ("data2/0", False),
        ("dat", False),
        ("data/../other", False),
        ("data/out/0", False),
        ("data/out", False),
        ("data/out/../data/0", True),
        ("file://{}/other", False),
        ("FILE://{}/other", False),
        ("local://{}/other", False),
        ("single.csv2", False),
    ],
)
def test_paths(tmp_path: Path, path: str, permitted: bool) -> None:
    for name in ("data", "other", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "out").symlink_to(tmp_path / "other")
    (tmp_path / "named").symlink_to(tmp_path / "inner")
    allowlist = PathAllowlist([tmp_path / "data", f"{tmp_path}/single.csv", tmp_path / "named"], "--data")
    text = path.format(tmp_path) if "://" in path else f"{tmp_path}/{path}"
    assert allowlist.permits(text) == permitted
    if not permitted:
        leads = ", which a link leads to '.*/other(/0)?'," if path.startswith("data/out") else ""
        with pytest.raises(ConfigError, match=f"'{leads} is refused: expected a path below .*data', .*; .*with --data"):
            allowlist.require(text)


@pytest.mark.parametrize(
    ("url", "permitted"),
    [
        ("s3://bucket/runs", True),
        ("s3://bucket/runs/a/b", True),
        ("s3://bucket/runs2", False),
        ("s3://bucket/run", False),
        ("s3://bucket", False),
        ("gs://bucket/runs", False),
        ("s3://bucket/runs/../secret", False),
        ("s3://bucket/runs/%2e%2E/secret", False),
        ("s3://bucket/runs/%252e%252e/secret", False),
        ("s3://bucket/runs/a::file:///etc/passwd", False),
        ("zip://a::file:///etc/passwd", False),
        ("/bucket/runs", False),
    ],
)
def test_urls(url: str, permitted: bool) -> None:
    assert PathAllowlist(["s3://bucket/runs/"], "--data").permits(url) == permitted


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/data/day_*.gz", "/data"),
        ("/data/*/x", "/data"),
        ("*.csv", "."),
        ("/*", "/"),
        ("a/b", "a/b"),
        ("s3://bucket/day?", "s3://bucket"),
    ],
)
def test_where_a_glob_begins(path: str, folder: str) -> None:
    assert str(Location.parse(path).without_glob()) == folder


def test_everything_below_the_root_is_permitted(tmp_path: Path) -> None:
    allowlist = PathAllowlist(["/"], "--data")
    assert allowlist.permits("/") and allowlist.permits(f"{tmp_path}/x") and not allowlist.permits("s3://bucket")


@pytest.mark.parametrize("path", ["c://x", "a/s3://x", "{}/data/file://../0", "s3://", "s3:/bucket", ""])
def test_what_is_neither_a_path_nor_a_url_is_refused(tmp_path: Path, path: str) -> None:
    text = path.format(tmp_path)
    allowlist = PathAllowlist([tmp_path, "s3://bucket"], "--data")
    for call in (allowlist.permits, allowlist.require, allowlist.require_below):
        with pytest.raises(ConfigError, match=f"^path is '{re.escape(text)}'"):
            call(text)
    with pytest.raises(ConfigError, match=f"^--data is '{re.escape(text)}'"):
        PathAllowlist([text], "--data")


def test_relative_paths_and_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    allowlist = PathAllowlist(["~/data", "here"], "--data")
    for path in ("~/data/0", "file://~/data/0", f"{tmp_path}/home/data", "here/0", "file://here", f"{tmp_path}/here"):
        assert allowlist.permits(path), path
    for path in ("~/other", "data/0", f"{tmp_path}/~/data", "~"):
        assert not allowlist.permits(path), path


@pytest.mark.parametrize(
    ("glob", "folder"),
    [
        ("{}/data/*.csv", None),
        ("{}/data*", "{}"),
        ("{}/data[1", None),  # the name of a file that was allowed, although it looks like a glob
        ("{}/data[2", "{}"),
        ("file://{}/data/?", None),
        ("{}/*/../data/x", None),  # ".." is resolved first, as in a source
        ("s3://bucket/data/*", None),
        ("s3://bucket/*", "s3://bucket"),
        ("s3://bucket/data/*/../x", None),
    ],
)
def test_all_that_a_glob_may_match(tmp_path: Path, glob: str, folder: str | None) -> None:
    """`folder`: what is refused."""
    allowed = [f"{tmp_path}/data", f"{tmp_path}/data[1", f"{tmp_path}/data", "s3://bucket/data"]
    allowlist, text = PathAllowlist(allowed, "--data"), glob.format(tmp_path)
    if folder is None:
        allowlist.require_below(text)
    else:
        known = rf"'{tmp_path}/data', '{tmp_path}/data\[1', 's3://bucket/data'; allow"
        with pytest.raises(ConfigError, match=f"^'{folder.format(tmp_path)}' is refused: expected .* below {known}"):
            allowlist.require_below(text)


def test_nothing_is_permitted_unless_it_was_named() -> None:
    with pytest.raises(ConfigError, match=r"'/x' is refused: expected a path below nothing; .* with --checkpoints"):
        PathAllowlist([], "--checkpoints").require("/x")


def test_what_a_command_line_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").touch()
    given: tuple[str, ...] = (
        "day_*.gz",
        "--run=s3://b/run",
        "--test",
        "/a/x.csv,/b/*/y",
        "--flag",
        "-n",
        "3",
        "--sep=/",
        "../up",
    )
    given += ("ck=S3://b/other/", "data=/d/x,gs://c/*", "n=4")
    given += ("--rest=s3:/b/r", "s3:/b/s", "s3://", "x=s3:/b/t", "--u=s3:b/u")  # no URLs, nor local paths
    named = Script(path=Path("jobs/train.py"), arguments=given).named_paths()
    wanted = {f"{tmp_path}/jobs", str(tmp_path), "s3://b/run", "/a/x.csv", "/b", str(tmp_path.parent / "up")}
    wanted |= {"s3://b/other", "/d/x", "gs://c"}
    assert named[0] == f"{tmp_path}/jobs" and wanted <= set(named)
    # Words that may be paths, and a list as one name.
    assert set(named) - wanted == {"/a/x.csv,/b", *(f"{tmp_path}/{each}" for each in ("3", "n=4", "4", "data=/d/x"))}


@pytest.mark.parametrize(("kind", "x"), [(CSV, "x.csv"), (Parquet, "x.parquet"), (Arrow, "x.arrow")])
def test_a_source_reads_what_is_permitted(tmp_path: Path, kind: type[Source], x: str) -> None:
    for folder in ("data", "other"):
        (tmp_path / folder).mkdir()
        write_table(tmp_path / folder / x, pa.table({"id": [1, 2]}))
    (tmp_path / "data" / "link").symlink_to(tmp_path / "other" / x)
    (tmp_path / "data" / "folder").symlink_to(tmp_path / "other")
    allowlist = PathAllowlist([tmp_path / "data"], "--data")

    def read(path: Any) -> int:
        source: Any = kind(path=path, extra="id", batch_size=10, num_threads=0)  # type: ignore[call-arg]
        guarded = restrict(source, allowlist)
        guarded.signature()
        return sum(each.batch_size for each in guarded.batches(one_table()))

    assert read(f"{tmp_path}/data/{x}") == read([f"{tmp_path}/data/x*"]) == 2
    for path in (
        f"other/{x}",
        f"data/../other/{x}",
        "data/link",
        f"data/folder/{x}",
        "data/lin*",
        "data",
        f"oth*/{x}",
        f"data/*/../../other/{x}",
    ):
        with pytest.raises(SatrapError, match="with --data"):
            read(f"{tmp_path}/{path}")


def test_a_server_saves_and_restores_below_what_was_named(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "out").symlink_to(tmp_path)
    with (
        running_servers(1, checkpoints=[tmp_path / "runs"]) as services,
        sharded_worker(one_table(), [services[0].address]) as worker,
    ):
        table = worker.tables["t"]
        ticket = worker.lookup(batch(range(5)), step=1).ticket
        assert ticket is not None
        worker.drop(ticket)
        table.save(tmp_path / "runs" / "1")
        began = time.monotonic()
        for path in (tmp_path / "1", tmp_path / "runs" / ".." / "1", tmp_path / "runs" / "out" / "1"):
            with pytest.raises(ConfigError, match=r"0-of-1',? .*is refused: .*with --checkpoints"):
                table.save(path)
        assert time.monotonic() - began < CUT_SECONDS, "no save waits until a refused one is given up"
        assert sorted(each.name for each in tmp_path.iterdir()) == ["runs"]
        for folder in ("/etc", f"{tmp_path}/runs/out"):
            with pytest.raises(ConfigError, match=r"is refused: .*with --checkpoints"):
                worker.servers.call_all("verify", [[folder]], [[0]], patient=True)
        assert len(table) == 5
        with (
            Client(ServerCalls, services[0].address) as client,
            pytest.raises(InputError, match="expected an absolute path"),
        ):
            client.call.verify(Origin(attempt=1), [["runs/1"]], [[0]])
        worker.tables.restore({"t": [tmp_path / "runs" / "1"]})
        assert len(table) == 5


def test_a_checkpoint_that_could_not_be_saved_is_refused_at_the_first_step(tmp_path: Path) -> None:
    with running_servers(1, checkpoints=[tmp_path / "runs"]) as (server,), running(servers=[server.address]) as job:
        embeddings, model, optimizer = job
        data = source(write(tmp_path / "a.parquet", 2))
        refused, run = (Checkpoint(tmp_path / name, model, optimizer, embeddings, data) for name in ("other", "runs"))
        with pytest.raises(ConfigError, match=r"other' is refused: .*with --checkpoints"):
            refused.save(every_steps=1000)
        assert not (tmp_path / "other").exists()
        assert not run.save(every_steps=1000) and run.save()


def test_a_worker_reads_below_what_was_named(tmp_path: Path) -> None:
    """Nor does it disclose an `extra` column of another file."""
    for name in ("data", "secret"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.parquet", 2)
    with (
        running_servers(1) as (server,),
        closing(Working(data=[tmp_path / "data"])) as worker,
        running(servers=[server.address], workers=[worker.address]) as job,
    ):
        assert len(train_and_note(job, source(tmp_path / "data" / "a.parquet"))) == 2
        for path in (tmp_path / "secret" / "a.parquet", tmp_path / "data" / ".." / "secret" / "*.parquet"):
            with pytest.raises(ConfigError, match=r"secret.* is refused: .*with --data"):
                train_and_note(job, source(path))
