"""The declarations that are sent to a worker, as plain JSON types and back: sources, features and worker specs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pytest

import satrap.run_context
from cluster import features, one_table, running_servers
from remote_worker_parts import working
from satrap import (
    CSV,
    Arrow,
    ConfigError,
    Criteo,
    DenseColumn,
    Deployment,
    Embeddings,
    Frame,
    IdColumn,
    IterableSource,
    LabelColumn,
    Parquet,
)
from satrap.config.features import Features
from satrap.data.registry import is_portable, source_from_dict, source_to_dict
from satrap.run_context import RunContext
from satrap.worker.remote.client import RemoteRows
from satrap.worker.remote.worker_spec import WorkerSpec
from satrap.worker.sharded_rows import ShardedRows

SOURCES = [
    Parquet(
        "/a/*.parquet", dense=["x", DenseColumn("y", missing=1.5, log1p=True)], label="l", shuffle=True, seed=2**63
    ),
    Parquet(
        ["/a", "s3://b/c"],
        label=[LabelColumn("l", values={"type": 1, "no": 0}), LabelColumn("m", above=2.0, missing="drop")],
        ids={"f": IdColumn("g", kind="integer", hash=True, missing=-1), "h": "i"},
        weights={"f": "w"},
        missing_id=7,
        extra=("n", "o"),
        epochs=None,
    ),
    CSV("/a.csv", columns=("a", "b"), delimiter="::", missing="NA", label=LabelColumn("b", true=["y", "t"])),
    CSV("/a.csv", label="b", label_true="y", quote=None, max_bad_rows=3, num_threads=0),
    Criteo("/day_0.gz", label=None, missing_id=None),
    Criteo("/day_*", log1p=False, drop_last=True),
    Arrow(("/a.arrow", "/b.arrow"), block_rows=5),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_a_declaration_survives_the_round_trip(source: Any) -> None:
    assert is_portable(source)
    sent = json.loads(json.dumps(source_to_dict(source)))
    found: Any = source_from_dict(sent)
    assert type(found) is type(source) and source_to_dict(found) == sent
    path = source.path if isinstance(source.path, str) else list(source.path)
    assert found.replace(path=0) == source.replace(path=0) and found.path == path
    assert type(source).from_dict(sent) == found


def test_paths_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    source = Parquet([Path("a"), "b/*.parquet", "~/c", "gs://d/e"])
    assert source_to_dict(source)["path"] == [
        f"{tmp_path}/a",
        f"{tmp_path}/b/*.parquet",
        f"{tmp_path}/home/c",
        "gs://d/e",
    ]


class UserSource(Parquet):
    """A source that the user wrote; other processes do not have its code."""


@pytest.mark.parametrize(
    "data",
    [
        Arrow(pa.table({"a": [1]})),
        Parquet("a", filesystem=pyarrow.fs.LocalFileSystem()),
        UserSource("a"),
        Frame({"a": [1]}),
        IterableSource([]),
        [],
        None,
    ],
    ids=["table", "filesystem", "own", "frame", "iterable", "list", "nothing"],
)
def test_sources_with_data_or_code_do_not_travel(data: Any) -> None:
    assert not is_portable(data)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: Frame(pa.table({})).to_dict(), "(?s)Frame: data is .*, which has no form in plain JSON types"),
        (lambda: Arrow(pa.table({})).to_dict(), "(?s)Arrow: path is .*, which has no form in plain JSON types"),
        (lambda: CSV("a", filesystem=pyarrow.fs.LocalFileSystem()).to_dict(), "CSV: filesystem is "),
        (lambda: source_from_dict({"type": "Frame"}), "type is 'Frame'; known are"),
        (lambda: source_from_dict({"type": "Parket"}), "the nearest known one is 'Parquet'"),
        (lambda: source_from_dict({"type": "Parquet", "paht": ""}), "unknown key 'paht'"),
        (lambda: source_from_dict({"type": "CSV"}), "the key 'path' is missing"),
        (lambda: source_from_dict({"type": "CSV", "path": "a", "dense": [{"type": "Column"}]}), "type is 'Column'"),
        (lambda: Parquet.from_dict({"type": "CSV", "path": "a"}), "type is 'CSV'; expected 'Parquet'"),
        (lambda: Features.from_dict({}), "expected a dict of at least one"),
        (lambda: WorkerSpec.from_dict({"servers": []}), "the key 'features' is missing"),
    ],
)
def test_invalid_declarations_are_refused(call: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        call()


def worker_spec(of: Features, **changes: Any) -> WorkerSpec:
    fields: Mapping[str, Any] = {"seed": 3, "servers": ("tcp://a:1",), "wire": "float32", "barrier_size": 2}
    return WorkerSpec(features=of, **{**fields, **changes})


def test_a_worker_spec_survives_the_round_trip_in_its_order() -> None:
    one = worker_spec(features(), extra_tables=one_table().tables)
    found = WorkerSpec.from_dict(json.loads(json.dumps(one.to_dict())))
    assert found == one and list(found.features) == list(one.features) and found.job == one.job
    assert one.differences(found) == []


def test_worker_specs_differ_field_by_field() -> None:
    table = one_table().tables[0]
    one = worker_spec(Features({"id": table, "bag": table.bag("mean")}))
    other = worker_spec(Features({"id": table, "bag": table.sequence(2)}), wire="float16", barrier_size=0)
    assert one.differences(other) == [
        "wire: 'float32' here, 'float16' there",
        "barrier_size: 2 here, 0 there",
        "feature 'bag', pooling: 'mean' here, 'none' there",
        "feature 'bag', max_length: None here, 2 there",
        "feature 'bag', keep: None here, 'last' there",
    ]
    assert one.differences(worker_spec(one_table())) == ["features: ['id', 'bag'] here, ['id'] there"]


def test_a_run_context_names_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides if the script does not name them."""
    of = dict(one_table())
    with running_servers(1) as services, working(2) as workers:
        place = RunContext(
            rank=0,
            world_size=1,
            launch=1,
            servers=(services[0].address,),
            workers=tuple(each.address for each in workers),
        )
        monkeypatch.setattr(satrap.run_context, "_here", place)
        for named, kind, address in (
            (None, RemoteRows, workers[0].address),
            ([workers[1].address], RemoteRows, workers[1].address),
            ([], ShardedRows, None),
        ):
            rows = Embeddings(of, deployment=Deployment(workers=named)).worker.rows
            assert type(rows) is kind
            if isinstance(rows, RemoteRows):
                assert rows.connection.address == address
            rows.close()


def test_the_worker_process_needs_no_torch() -> None:
    code = "import satrap.worker.remote.service, satrap.worker.remote.protocol, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
