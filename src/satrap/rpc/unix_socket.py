"""The file of a Unix socket: in a folder that only this user may enter, and held by one server at a time.

What keeps other users of the machine out is the folder (owner, mode 0700, no symbolic link), on both sides: a server
listens, and a client connects, in no other. A server that was killed leaves its socket file behind, and the next one at
the path replaces it; that two live ones do not take it from each other is what the lock file beside it is for.
"""

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from satrap.errors import ConfigError
from satrap.rpc.address import join_unix, unix_path


def require_private(folder: Path) -> None:
    """Makes the folder, mode 0700, if it is missing; refuses one that another user made or may enter."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = os.lstat(folder)
    except OSError as error:
        raise ConfigError(f"folder {str(folder)!r}, of a Unix socket, cannot be used: {error.strerror}") from None
    if stat.S_ISLNK(found.st_mode):
        why = "is a symbolic link"
    elif not stat.S_ISDIR(found.st_mode):
        why = "is no folder"
    elif found.st_uid != os.geteuid():
        why = f"belongs to user {found.st_uid}, and this is user {os.geteuid()}"
    elif mode := stat.S_IMODE(found.st_mode) & 0o077:
        why = f"may be used by others (mode {stat.S_IMODE(found.st_mode):o}, {mode:o} too many)"
    else:
        return
    raise ConfigError(
        f"folder {str(folder)!r}, of a Unix socket, {why}; wanted a folder of this user's with mode 0700: "
        "`mkdir -m 700` another, or chmod 700 this one"
    )


class SocketFile:
    """A path at which this process, and no other, listens."""

    def __init__(self, address: str) -> None:
        path = unix_path(address)
        require_private(path.parent)
        if path.name == "*":
            path = unix_path(join_unix(path.with_name(secrets.token_hex(4))))
        self.address = join_unix(path)
        self._lock_path = path.with_name(f".{path.name}.lock")
        self._lock = self._take_lock()

    def release(self) -> None:
        """Removes the file: another may listen here. Does nothing twice."""
        if self._lock >= 0:
            for path in (unix_path(self.address), self._lock_path):
                with suppress(OSError):
                    path.unlink()
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a fork may have the file open still
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> int:
        try:
            while True:
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    with suppress(FileNotFoundError):
                        if os.path.samestat(os.fstat(lock), os.lstat(self._lock_path)):
                            return lock
                except BaseException:
                    os.close(lock)
                    raise
                os.close(lock)  # of one that was released just then
        except BlockingIOError:
            raise ConfigError(
                f"{self.address} cannot be served: another server listens there; end it, or give another name"
            ) from None
        except OSError as error:
            raise ConfigError(f"{self.address} cannot be served: {error}; give another name or folder") from None
