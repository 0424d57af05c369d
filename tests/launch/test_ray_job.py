"""Where the script of a Ray job is: in the job's working directory, or on every node. Needs no Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from satrap.launch.ray_job import job_directory, script_path

COPY = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_12")


def environment(config: object) -> dict[str, str]:
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(config)}


@pytest.mark.parametrize("folder", [COPY, COPY / "jobs/deep"])
def test_the_copy_of_the_working_directory(folder: Path) -> None:
    job = environment({"runtime_env": {"working_dir": "gcs://_ray_pkg_12.zip", "env_vars": {}}, "metadata": {}})
    assert job_directory(job, folder) == COPY
    assert job_directory(job, Path("/elsewhere/x")) == Path("/elsewhere/x")


@pytest.mark.parametrize(
    "config",
    [{}, {"runtime_env": None}, {"runtime_env": {"env_vars": {"A": "1"}}}, {"runtime_env": {"working_dir": ""}}],
)
def test_without_a_working_directory_the_run_names_its_own(config: object) -> None:
    assert job_directory(environment(config), COPY) is None
    assert job_directory({}, COPY) is None
    for torn in ("{", "[]", '{"runtime_env": 3}'):
        assert job_directory({"RAY_JOB_CONFIG_JSON_ENV_VAR": torn}, COPY) is None


def test_the_path_of_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert script_path(Path("a/job.py"), None) == Path("job.py")
    assert script_path(Path("a/job.py"), tmp_path) == Path("a/job.py")
    assert script_path(tmp_path / "a/job.py", tmp_path) == Path("a/job.py")
    assert script_path(Path("/app/job.py"), tmp_path) == Path("/app/job.py")
