"""The shared-memory file of a server of a run. Its path stays the same when the server restarts.

Directories of shared memory are open to all users, so a file of that name may belong to another user. The server then
uses another name.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from satrap.errors import ConfigError

_MAX_NAMES = 100


def rows_file(memory: Path, run: str, server: str) -> tuple[Path, str | None]:
    """Return the path of a server's rows, which may not exist yet, and a warning if it is not the first choice."""
    paths = [memory / f"satrap-{run}-{prefix}{server}" for prefix in ("", *(f"{n}-" for n in range(1, _MAX_NAMES)))]
    owners = [_owner(path) for path in paths]
    for owner in (os.geteuid(), None):
        if owner in owners:
            index = owners.index(owner)
            warning = (
                f"{paths[0]} belongs to another user or is accessible to others; using {paths[index]} for the rows"
            )
            return paths[index], warning if index else None
    raise ConfigError(
        f"{paths[0]} and {_MAX_NAMES - 1} alternatives belong to other users; choose another folder with --memory"
    )


def has_rows(path: Path) -> bool:
    """Return whether the file holds rows. An empty one was truncated, or its server was killed while it started."""
    return path.exists() and path.stat().st_size > 0


def remove_rows(memory: Path, run: str) -> None:
    """Remove the files of a run's servers, except those of other users."""
    for path in memory.glob(f"satrap-{run}-*"):
        with suppress(FileNotFoundError):
            status = os.lstat(path)
            if status.st_uid == os.geteuid() and not stat.S_ISDIR(status.st_mode):
                path.unlink()


def _owner(path: Path) -> int | None:
    """Return the file's owner: -1 if others may use it or it is no regular file; None if there is no file."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    is_private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
    return status.st_uid if is_private else -1
