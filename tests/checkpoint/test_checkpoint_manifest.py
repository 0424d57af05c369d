"""checkpoint.json: what is written is read again, and which checkpoints and tables are refused with which words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satrap.checkpoint.run_directory import (
    CheckpointManifest,
    RunDirectory,
    _is_hidden,
    _is_json,
    _parent_and_best,
    require_rows,
    table_folders,
)
from satrap.config.durable import checksum
from satrap.data.inputs import Position
from satrap.errors import CheckpointError
from satrap.storage.open_folder import open_folder
from satrap.table.snapshot.saved_table import SavedPart, SavedTable

FOLDER = open_folder("/runs/000002-step-20")


def saved(rows: int, *parts: int) -> SavedTable:
    names = [""] if len(parts) == 1 else [f"{number}-of-{len(parts)}" for number in range(len(parts))]
    own = [
        SavedPart(folder=name, id="0123abcd", version=1, rows=held, crc32c=5)
        for name, held in zip(names, parts, strict=True)
    ]
    return SavedTable(rows=rows, parts=tuple(own))


def manifest(**fields: Any) -> CheckpointManifest:
    values: dict[str, Any] = {
        "folder": FOLDER,
        "name": "000002-step-20",
        "step": 20,
        "parent": None,
        "parent_crc32c": None,
        "positions": (None, Position(epoch=1, block=2, batch=3)),
        "source": {"files": 3},
        "tables": ("item", "user"),
        "saved": (saved(7, 7), saved(5, 3, 2)),
        "state_crc32c": 9,
    }
    return CheckpointManifest(**values | fields)


@given(
    parent=st.sampled_from([(None, None), ("000001-step-10", 0), ("000001-step-10", 77)]),
    positions=st.lists(st.none() | st.builds(Position, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))),
    is_best=st.booleans(),
    source=st.none() | st.just({"a": 1}),
    num_tables=st.integers(0, 2),
)
@settings(max_examples=settings().max_examples // 2)
def test_what_is_written_is_read_again(
    parent: tuple[str | None, int | None], positions: list[Position | None], is_best: bool, source: Any, num_tables: int
) -> None:
    whole = manifest(
        parent=parent[0], parent_crc32c=parent[1], positions=tuple(positions), is_best=is_best, source=source,
        tables=("item", "user")[:num_tables], saved=(saved(7, 7), saved(5, 3, 2))[:num_tables],
    )  # fmt: skip
    data = whole.to_json()
    assert CheckpointManifest.parse(data, FOLDER) == whole
    assert _parent_and_best(data) == (parent[0], is_best)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "another"}, "is of format 'another' version 1; expected 'satrap-checkpoint' version 1"),
        ({"format_version": 2}, "is of format 'satrap-checkpoint' version 2; expected .*: resume it with the release"),
        ({"step": 21}, "is damaged: its checksum does not match; remove /runs/000002-step-20 to use an older"),
        ({"tables": None}, "is damaged"),
    ],
)
def test_a_checkpoint_that_is_refused(change: dict[str, Any], text: str) -> None:
    data = json.dumps(json.loads(manifest().to_json()) | change).encode()
    with pytest.raises(CheckpointError, match=f"^/runs/000002-step-20/checkpoint.json {text}"):
        CheckpointManifest.parse(data, FOLDER)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"{}", b'{"format_version": 1}'])
def test_a_torn_checkpoint_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint.json cannot be read \(.*; remove /runs/000002-step-20"):
        CheckpointManifest.parse(data, FOLDER)
    assert _parent_and_best(data) == (None, False)
    assert _is_json(data) == (data not in (b"", b"{"))


@pytest.mark.parametrize("is_best", [True, False, 1, "yes", None])
def test_only_true_marks_the_best(is_best: Any) -> None:
    assert _parent_and_best(json.dumps({"parent": None, "is_best": is_best}).encode()) == (None, is_best is True)


def test_names_and_parents_are_compared() -> None:
    child = manifest(parent="000001-step-10", parent_crc32c=checksum(b"parent"))
    child.require_name("000002-step-20")
    child.require_parent(b"parent")
    with pytest.raises(CheckpointError, match="was saved as 000002-step-20, but its folder is called other: rename"):
        child.require_name("other")
    with pytest.raises(CheckpointError, match=f"another parent 000001-step-10: .* {checksum(b'x')}; expected "):
        child.require_parent(b"x")


def test_the_folders_of_each_table_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are numbered in each checkpoint. What a folder holds is compared by `SavedTable.require`."""
    asked: list[str] = []
    monkeypatch.setattr(SavedTable, "require", lambda self, folder, checkpoint: asked.append(f"{folder} {checkpoint}"))
    older = manifest(folder=open_folder("/runs/a"), saved=(saved(4, 4), saved(3, 1, 2)))
    newer = manifest(parent="a", parent_crc32c=1, tables=("user", "item"), saved=(saved(9, 1), saved(9, 2)))
    found = {name: [str(each) for each in folders] for name, folders in table_folders([older, newer]).items()}
    assert found == {
        "user": ["/runs/a/tables/1", "/runs/000002-step-20/tables/0"],
        "item": ["/runs/a/tables/0", "/runs/000002-step-20/tables/1"],
    }
    assert asked == [
        "/runs/a/tables/0 /runs/a",
        "/runs/a/tables/1 /runs/a",
        "/runs/000002-step-20/tables/0 /runs/000002-step-20",
        "/runs/000002-step-20/tables/1 /runs/000002-step-20",
    ]
    other = replace(older, tables=("item", "shop"))
    with pytest.raises(
        CheckpointError, match=r"/runs/a has tables \['item', 'shop'\], but .*20, .* \['item', 'user'\]"
    ):
        table_folders([other, newer])
    short = replace(older, saved=(saved(4, 4), saved(4, 1, 2)))
    with pytest.raises(CheckpointError, match="/runs/a: table 'user' has 3 rows in its files; expected 4, as"):
        table_folders([short, newer])


def test_the_rows_of_each_table_are_counted() -> None:
    require_rows(manifest(), {"item": 7, "user": 5})
    for found in ({"item": 8, "user": 5}, {"item": 6, "user": 5}):
        with pytest.raises(CheckpointError, match=f"table 'item' has {found['item']} rows; expected 7, the number"):
            require_rows(manifest(), found)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        (".0123abcd.000007-step-9", True),
        (".0123abcd.000007-step-9-0123abcd", True),
        (".0123abc.000007-step-9", False),
        (".0123abcde.000007-step-9", False),
        ("x.0123abcd.000007-step-9", False),
        (".0123abcd.notes", False),
        (".0123abcd", False),
        (".", False),
        ("", False),
        ("000007-step-9", False),
    ],
)
def test_what_a_killed_save_leaves(name: str, hidden: bool) -> None:
    assert _is_hidden(name) == hidden


def test_the_name_of_a_run_is_the_last_part_of_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [RunDirectory(path).name for path in ("clicks", f"{tmp_path}/a/b/", "memory://bucket/runs")]
    assert names == ["clicks", "b", "runs"]
    with RunDirectory(f"{tmp_path}/none").chain_of() as chain:
        assert chain == []
