"""The shared-memory file of a run's server: another user's file of that name means another name, not the run's end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs import DEADLINE_SECONDS, JOB, nothing_is_left
from satrap.errors import ConfigError
from satrap.launch.rows_file import forget_rows, has_rows, rows_file

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def made(path: Path, user: int, mode: int = 0o600) -> Path:
    path.write_bytes(b"rows")
    path.chmod(mode)
    os.chown(path, user, -1)
    return path


def test_it_is_found_again(tmp_path: Path) -> None:
    path, warning = rows_file(tmp_path, "run", "server-0")
    assert path == tmp_path / "satrap-run-server-0" and warning is None and not has_rows(path)
    made(path, os.geteuid())
    assert rows_file(tmp_path, "run", "server-0") == (path, None) and has_rows(path)
    path.write_bytes(b"")
    assert rows_file(tmp_path, "run", "server-0") == (path, None) and not has_rows(path)


@pytest.mark.parametrize("how", [pytest.param("owner", marks=needs_root), "mode", "link", "folder"])
def test_what_another_may_have_made_is_left_alone(tmp_path: Path, how: str) -> None:
    first = tmp_path / "satrap-run-server-0"
    match how:
        case "owner":
            made(first, STRANGER)
        case "mode":
            made(first, os.geteuid(), 0o620)
        case "link":
            first.symlink_to(made(tmp_path / "theirs", os.geteuid()))
        case _:
            first.mkdir()
    path, warning = rows_file(tmp_path, "run", "server-0")
    assert path == tmp_path / "satrap-run-1-server-0" and warning is not None and str(path) in warning
    made(path, os.geteuid())
    assert rows_file(tmp_path, "run", "server-0")[0] == path
    if how != "folder":
        first.unlink()
        assert rows_file(tmp_path, "run", "server-0")[0] == path, "rows that are there are found"
        made(first, STRANGER if how == "owner" else os.geteuid(), 0o620)
    forget_rows(tmp_path, "run")
    assert not path.exists() and first.exists() == (how in ("owner", "folder"))


def test_where_all_names_are_taken(tmp_path: Path) -> None:
    for n in range(100):
        (tmp_path / f"satrap-run-{f'{n}-' if n else ''}server-0").mkdir()
    with pytest.raises(ConfigError, match="were made by other users: name another --memory"):
        rows_file(tmp_path, "run", "server-0")


@needs_root
def test_a_run_goes_on_beside_another_users_file(tmp_path: Path) -> None:
    """Whose name is known as soon as its first file is there."""
    program = (
        "import secrets, sys; was = secrets.token_hex; secrets.token_hex = lambda n: 'beef' if n == 4 else was(n);"
        "from satrap.cli.main import main; sys.exit(main())"
    )
    (memory := tmp_path / "memory").mkdir()
    theirs = made(memory / "satrap-beef-server-0", STRANGER)
    command = [sys.executable, "-c", program, "run", str(JOB), "--folder", str(tmp_path / "run")]
    command += ["--memory", str(memory), "--", str(tmp_path), "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert f"server 0: {theirs} was made by another user" in done.stderr
    assert theirs.read_bytes() == b"rows" and theirs.stat().st_uid == STRANGER
    theirs.unlink()
    nothing_is_left(tmp_path, [])
