"""Where the script of a Ray job is: in the job's working directory, or on every node. Needs no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from satrap.launch.ray_job import job_directory, script_path

COPY = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_12")


@pytest.mark.parametrize("folder", [COPY, COPY / "jobs/deep"])
def test_the_copy_of_the_working_directory(folder: Path) -> None:
    assert job_directory(folder) == COPY
    assert job_directory(Path("/elsewhere/x")) == Path("/elsewhere/x")


def test_the_path_of_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert script_path(Path("a/job.py"), None) == Path("job.py")
    assert script_path(Path("a/job.py"), tmp_path) == Path("a/job.py")
    assert script_path(tmp_path / "a/job.py", tmp_path) == Path("a/job.py")
    assert script_path(Path("/app/job.py"), tmp_path) == Path("/app/job.py")
