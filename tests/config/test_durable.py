"""Files that are replaced at once or not at all, locks of files and folders, JSON with a checksum."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from satrap.config.durable import json_checksum, json_with_checksum, opened, replace_file, try_lock, write_file


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_cannot_be_replaced_stays(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    replace_file(file, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match="full"):
            replace_file(file, b"new")
    assert os.listdir(tmp_path) == ["run.json"] and file.read_bytes() == b"old"
    replace_file(file, b"new")
    assert os.listdir(tmp_path) == ["run.json"] and file.read_bytes() == b"new"


def test_a_new_file_replaces_none(tmp_path: Path) -> None:
    write_file(tmp_path / "key", b"secret", 0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "key", b"another")
    assert (tmp_path / "key").read_bytes() == b"secret"


def test_one_lock_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second:
        assert try_lock(first, shared=True) and try_lock(second, shared=True)
        assert not try_lock(first)
    with opened(tmp_path) as file:
        assert try_lock(file), "closing releases the lock"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", fail)
    with opened(tmp_path) as file:
        assert try_lock(file, required=False)
        with pytest.raises(OSError, match="no locks"):
            try_lock(file)


@pytest.mark.parametrize("indent", [None, 1])
def test_json_carries_its_checksum(indent: int | None) -> None:
    content = {"b": [1.5, None], "a": "é"}
    read = json.loads(json_with_checksum(content, indent))
    assert read == content | {"crc32c": json_checksum(content, indent)}
    assert json_checksum(read, indent) == read["crc32c"] != json_checksum(read | {"a": "e"}, indent)
