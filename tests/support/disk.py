"""A small file system for tests of full disks: a tmpfs, mounted while a context is open."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A mounted file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, *, leaving: int) -> None:
        """Fills the file system with one file, until only so many bytes are free."""
        free = shutil.disk_usage(self.path).free
        with open(self.path / "filling", "xb") as file:
            os.posix_fallocate(file.fileno(), 0, free - leaving)

    def make_room(self) -> None:
        (self.path / "filling").unlink()

    def grow(self, num_bytes: int) -> None:
        _run("mount", "-o", f"remount,size={num_bytes}", str(self.path))


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Disk]:
    """Mounts a small file system; skips the test where that is not possible."""
    path.mkdir(parents=True)
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes},huge=never", "satrap-test", str(path))
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield Disk(path)
    finally:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise OSError(done.stderr.strip())
