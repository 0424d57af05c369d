"""The shared-memory file of a server of a run: its path, which stays the same while the server is started again.

Folders of shared memory are everybody's, so another user may have made a file of that name: then it is another one.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from satrap.errors import ConfigError

_MOST_NAMES = 100


def rows_file(memory: Path, run: str, server: str) -> tuple[Path, str | None]:
    """Where the rows of a server of the run are, or are to be; and a warning if that is not the first choice."""
    paths = [memory / f"satrap-{run}-{again}{server}" for again in ("", *(f"{n}-" for n in range(1, _MOST_NAMES)))]
    owners = [_owner(path) for path in paths]
    for wanted in (os.geteuid(), None):
        if wanted in owners:
            at = owners.index(wanted)
            other = f"{paths[0]} was made by another user, or others may use it: the rows are in {paths[at]}"
            return paths[at], other if at else None
    raise ConfigError(f"{paths[0]} and {_MOST_NAMES - 1} others were made by other users: name another --memory")


def has_rows(path: Path) -> bool:
    """Whether there are rows in it: one that is empty was truncated, or its server was killed at once."""
    return path.exists() and path.stat().st_size > 0


def forget_rows(memory: Path, run: str) -> None:
    """Removes what servers of the run left, and no other user's files."""
    for path in memory.glob(f"satrap-{run}-*"):
        with suppress(FileNotFoundError):
            found = os.lstat(path)
            if found.st_uid == os.geteuid() and not stat.S_ISDIR(found.st_mode):
                path.unlink()


def _owner(path: Path) -> int | None:
    """Return the file's owner: -1 if others may use it or it is no regular file; None if there is no file."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    is_private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
    return found.st_uid if is_private else -1
