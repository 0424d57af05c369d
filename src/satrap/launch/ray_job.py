"""The Ray job that a run belongs to, if `ray job submit` or Kubernetes' RayJob started it. Knows no Ray.

Such a job may have a working directory, which Ray has copied to every node: this process and the actors start in their
node's copy. The run cannot name another one then, so the script must be in that copy, or on every node under one path.
"""

import json
from collections.abc import Mapping
from pathlib import Path

_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the command of a job; ray.init reads it
_COPIES = "working_dir_files"  # the directory of all copies on a node


def job_directory(environment: Mapping[str, str], folder: Path) -> Path | None:
    """Returns this node's copy of the job's working directory; None: there is no job, or it has no such directory.

    folder: this process's directory, which is the copy or below it."""
    try:
        config = json.loads(environment.get(_CONFIG, "{}"))
        has_directory = bool((config.get("runtime_env") or {}).get("working_dir"))
    except (ValueError, AttributeError):
        return None  # ray.init reports what is wrong with it
    if not has_directory:
        return None
    return next((each for each in (folder, *folder.parents) if each.parent.name == _COPIES), folder)


def script_path(script: Path, directory: Path | None) -> Path:
    """Returns the path of the script for a process that starts in a copy of its directory: relative to the copy, or
    absolute for a script outside the job's working directory.

    directory: the job's working directory; None: the script's own directory is copied."""
    if directory is None:
        return Path(script.name)
    absolute = script.absolute()
    return absolute.relative_to(directory) if absolute.is_relative_to(directory) else absolute
