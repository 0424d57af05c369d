"""Files and folders that survive a crash of the machine, locks that end with their process, JSON with a checksum."""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from satrap._core import crc32c

_MAX_DEPTH = 50


def put_on_disk(path: Path) -> None:
    """Flush the file or folder to disk: after it returns, a crash of the machine does not lose it."""
    with opened(path) as file:
        os.fsync(file)


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Create a file and flush it to disk; its folder is not flushed. FileExistsError if there is one."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace or create a file. It is never seen in part, and it is on disk when this returns."""
    temporary = path.with_name(f".{secrets.token_hex(4)}.{path.name}.tmp")
    try:
        write_file(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    put_on_disk(path.parent)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield a file descriptor of the file or folder, such as `try_lock` takes."""
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def try_lock(file: int, *, shared: bool = False, required: bool = True) -> bool:
    """Lock an open file or folder until it is closed; return False if another process holds the lock.

    required: whether to raise OSError on a file system without locks; False: return True there.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        if required:
            raise
    return True


def checksum(data: bytes) -> int:
    """Return the CRC-32C of the bytes."""
    return crc32c(np.frombuffer(data, np.uint8))


def json_checksum(content: Mapping[str, Any], indent: int | None = None) -> int:
    """Return the checksum of the content's JSON without its key "crc32c"."""
    return checksum(_canonical({key: value for key, value in content.items() if key != "crc32c"}, indent))


def json_with_checksum(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return the content as JSON that includes `json_checksum` as "crc32c"."""
    return _canonical({**content, "crc32c": json_checksum(content, indent)}, indent)


def parse_json(data: bytes | str) -> Any:
    """Return the value of a JSON text; ValueError if it is none, or nested deeper than anything that Satrap writes."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        if not level:
            return value
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
    raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")


def _canonical(content: Mapping[str, Any], indent: int | None) -> bytes:
    compact = indent is None
    separators = (",", ":") if compact else None
    return json.dumps(content, sort_keys=True, indent=indent, separators=separators, allow_nan=not compact).encode()
