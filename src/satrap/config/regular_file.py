"""Reads files of a disk that another program may have put there: a FIFO, a socket or a device in place of a file is an
error at once, where opening or reading it could wait for ever, and so is a file of JSON that is too large to be one of
Satrap's.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_JSON_BYTES = 64 << 20
"""More than any JSON that Satrap writes: a manifest has about 40 bytes for each MiB of rows."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; OSError if it is no regular file.

    Its kind is found without opening it: opening a FIFO would wait. O_NONBLOCK would help against that, but fails for a
    file on which another process has a lease, as a server of NFS or SMB has."""
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(handle).st_mode)
        if kind == stat.S_IFREG:
            return open(f"/proc/self/fd/{handle}", "rb")
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'no regular file')}; expected a regular file", str(path))


def read_regular(path: Path, max_bytes: int | None = None) -> bytes:
    """Return the content of a file; OSError if it is no regular file, or larger than `max_bytes`."""
    with open_regular(path) as file:
        if max_bytes is None:
            return file.read()
        data = file.read(max_bytes + 1)
    require_size(len(data), max_bytes, str(path))
    return data


def require_size(num_bytes: int, max_bytes: int | None, where: str) -> None:
    """Raise OSError if a file is larger than `max_bytes`."""
    if max_bytes is not None and num_bytes > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes, and is none that Satrap wrote", where)
