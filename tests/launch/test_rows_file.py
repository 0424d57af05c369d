"""The shared-memory file of a server of a run: if another user has a file of that name, another name is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs import JOB, assert_nothing_is_left
from satrap.errors import ConfigError
from satrap.launch.rows_file import has_rows, remove_rows, rows_file
from waiting import DEADLINE_SECONDS

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def create_rows(path: Path, user: int, mode: int = 0o600) -> Path:
    path.write_bytes(b"rows")
    path.chmod(mode)
    os.chown(path, user, -1)
    return path


def test_the_file_of_a_restarted_server_is_found_again(tmp_path: Path) -> None:
    path, warning = rows_file(tmp_path, "run", "server-0")
    assert path == tmp_path / "satrap-run-server-0" and warning is None and not has_rows(path)
    create_rows(path, os.geteuid())
    assert rows_file(tmp_path, "run", "server-0") == (path, None) and has_rows(path)
    path.write_bytes(b"")
    assert rows_file(tmp_path, "run", "server-0") == (path, None) and not has_rows(path)


@pytest.mark.parametrize("how", [pytest.param("owner", marks=needs_root), "mode", "link", "folder"])
def test_files_that_another_user_may_have_created_are_not_used(tmp_path: Path, how: str) -> None:
    first = tmp_path / "satrap-run-server-0"
    match how:
        case "owner":
            create_rows(first, STRANGER)
        case "mode":
            create_rows(first, os.geteuid(), 0o620)
        case "link":
            first.symlink_to(create_rows(tmp_path / "theirs", os.geteuid()))
        case _:
            first.mkdir()
    path, warning = rows_file(tmp_path, "run", "server-0")
    assert path == tmp_path / "satrap-run-1-server-0" and warning is not None and str(path) in warning
    create_rows(path, os.geteuid())
    assert rows_file(tmp_path, "run", "server-0")[0] == path
    if how != "folder":
        first.unlink()
        assert rows_file(tmp_path, "run", "server-0")[0] == path, "existing rows are found"
        create_rows(first, STRANGER if how == "owner" else os.geteuid(), 0o620)
    remove_rows(tmp_path, "run")
    assert not path.exists() and first.exists() == (how in ("owner", "folder"))


def test_an_error_if_all_names_are_taken(tmp_path: Path) -> None:
    for n in range(100):
        (tmp_path / f"satrap-run-{f'{n}-' if n else ''}server-0").mkdir()
    with pytest.raises(ConfigError, match="belong to other users; choose another folder with --memory"):
        rows_file(tmp_path, "run", "server-0")


@needs_root
def test_a_run_uses_another_name_beside_another_users_file(tmp_path: Path) -> None:
    """Another user may learn the name of the run from its first file."""
    program = (
        "import secrets, sys; was = secrets.token_hex; secrets.token_hex = lambda n: 'beef' if n == 4 else was(n);"
        "from satrap.cli.main import main; sys.exit(main())"
    )
    (memory := tmp_path / "memory").mkdir()
    theirs = create_rows(memory / "satrap-beef-server-0", STRANGER)
    command = [sys.executable, "-c", program, "run", str(JOB), "--folder", str(tmp_path / "run")]
    command += ["--memory", str(memory), "--", str(tmp_path), "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert f"server 0: {theirs} belongs to another user" in done.stderr
    assert theirs.read_bytes() == b"rows" and theirs.stat().st_uid == STRANGER
    theirs.unlink()
    assert_nothing_is_left(tmp_path, [])
