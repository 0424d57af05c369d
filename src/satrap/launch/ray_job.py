"""Where the script is on the nodes of a run inside a Ray job, which `ray job submit` or Kubernetes' RayJob started.

Such a job may have a working directory, which Ray has copied to every node: this process and the actors start in their
node's copy. The run cannot name another one then, so the script must be in that copy, or on every node under one path.
"""

from pathlib import Path

_COPIES = "working_dir_files"  # the folder of all copies on a node


def job_directory(folder: Path) -> Path:
    """Return this node's copy of the job's working directory.

    folder: this process's working directory, which is the copy or below it."""
    return next((parent for parent in (folder, *folder.parents) if parent.parent.name == _COPIES), folder)


def script_path(script: Path, directory: Path | None) -> Path:
    """Return the path of the script for a process that starts in a copy of its folder: relative to the copy, or
    absolute for a script outside the job's working directory.

    directory: the job's working directory; None: the script's own folder is copied."""
    if directory is None:
        return Path(script.name)
    absolute = script.absolute()
    return absolute.relative_to(directory) if absolute.is_relative_to(directory) else absolute
