"""The file of a Unix socket: in a folder that only this user may enter, and used by one server at a time.

The folder (owner, mode 0700, no symbolic link) keeps other users of the machine out, on both sides: servers listen and
clients connect only in such a folder. A server that was killed leaves its socket file behind, and the next server at
the path replaces it. The lock file beside it keeps two live servers from replacing each other's.
"""

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from satrap.config.durable import try_lock
from satrap.errors import ConfigError
from satrap.rpc.address import join_unix, unix_path


def require_private(folder: Path) -> None:
    """Create the folder with mode 0700 if it is missing; ConfigError if other users own it or may enter it."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = os.lstat(folder)
    except OSError as error:
        raise ConfigError(f"folder {str(folder)!r} of a Unix socket cannot be used: {error.strerror}") from None
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link"
    elif not stat.S_ISDIR(status.st_mode):
        problem = "is not a folder"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    elif mode := stat.S_IMODE(status.st_mode) & 0o077:
        problem = f"may be used by others (mode {stat.S_IMODE(status.st_mode):o}, {mode:o} too many)"
    else:
        return
    raise ConfigError(
        f"folder {str(folder)!r} of a Unix socket {problem}; expected a folder of this user with mode 0700: "
        "create another with `mkdir -m 700`, or chmod 700 this one"
    )


class SocketFile:
    """A socket path that this process has locked for itself."""

    def __init__(self, address: str) -> None:
        path = unix_path(address)
        require_private(path.parent)
        if path.name == "*":
            path = unix_path(join_unix(path.with_name(secrets.token_hex(4))))
        self.address = join_unix(path)
        self._lock_path = path.with_name(f".{path.name}.lock")
        self._lock = self._take_lock()

    def release(self) -> None:
        """Remove the file, so that another process may listen here. Idempotent."""
        if self._lock >= 0:
            for path in (unix_path(self.address), self._lock_path):
                with suppress(OSError):
                    path.unlink()
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a fork may still have the file open
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> int:
        try:
            while True:
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    if not try_lock(lock):
                        raise ConfigError(
                            f"{self.address} cannot be served: another server listens there; stop it, or choose "
                            "another name"
                        )
                    with suppress(FileNotFoundError):
                        if os.path.samestat(os.fstat(lock), os.lstat(self._lock_path)):
                            return lock
                except BaseException:
                    os.close(lock)
                    raise
                os.close(lock)  # another server just released this lock file
        except OSError as error:
            raise ConfigError(f"{self.address} cannot be served: {error}; choose another name or folder") from None
