"""The folder of a run: which checkpoints are in it, how one becomes visible, which go. Local, or on any fsspec system.

Knows files and checkpoint.json, and nothing of what a checkpoint holds: `checkpoint` fills its folder.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from satrap._core import crc32c
from satrap.errors import CheckpointError
from satrap.folder import put_on_disk
from satrap.inputs import Position
from satrap.path_allowlist import STAGING_PREFIX

MANIFEST, _FORMAT, _FORMAT_VERSION = "checkpoint.json", "satrap-checkpoint", 2
_NAME = re.compile(r"\d{6,}-step-\d+")  # whatever is called otherwise is not ours
_LOCK_SECONDS = 60.0
_HIDDEN = re.compile(r"\.[0-9a-f]{8}\.\d{6,}-step-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One complete checkpoint, as its checkpoint.json says."""

    folder: Path
    step: int
    parent: str | None
    positions: tuple[Position | None, ...]
    """Of each trainer's source, in the order of their ranks."""
    source: Mapping[str, Any] | None
    """The signature of the source that the positions are of."""
    tables: tuple[str, ...]
    state_crc32c: int

    @classmethod
    def read(cls, folder: Path) -> "Entry":
        """From its folder; CheckpointError if it is torn or of another format."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            body = {key: value for key, value in content.items() if key != "crc32c"}
            if (content["format"], content["format_version"]) != (_FORMAT, _FORMAT_VERSION):
                raise CheckpointError(
                    f"{path} is of format {content['format']!r} version {content['format_version']!r}; "
                    f"this Satrap reads {_FORMAT!r} version {_FORMAT_VERSION}"
                )
            if content["crc32c"] != checksum(_canonical(body)):
                raise CheckpointError(
                    f"{path} is damaged: its checksum does not match; remove {folder} to use an older"
                )
            return cls(
                folder=folder,
                step=content["step"],
                parent=content["parent"],
                positions=tuple(None if at is None else Position.from_dict(at) for at in content["positions"]),
                source=content["source"],
                tables=tuple(content["tables"]),
                state_crc32c=content["state_crc32c"],
            )
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); remove {folder} to use an older one") from error

    def write(self) -> None:
        """Into its folder, on disk."""
        body: dict[str, Any] = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "step": self.step,
            "parent": self.parent,
            "positions": [None if at is None else at.to_dict() for at in self.positions],
            "source": self.source,
            "tables": list(self.tables),
            "state_crc32c": self.state_crc32c,
        }
        with open(self.folder / MANIFEST, "xb") as file:
            file.write(_canonical(body | {"crc32c": checksum(_canonical(body))}))
            file.flush()
            os.fsync(file.fileno())


class RunFolder:
    """The folder of a run, here or on another file system."""

    def __init__(self, path: str) -> None:
        self._remote: Any = None
        if "://" in path and not path.startswith("file://"):
            import fsspec

            self._remote, self._remote_path = fsspec.core.url_to_fs(path)
            path = tempfile.mkdtemp(prefix=STAGING_PREFIX)
            weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        self._path = Path(path.removeprefix("file://"))

    @property
    def local(self) -> Path:
        """The folder itself, or the one in which checkpoints are put together for another file system."""
        return self._path

    @property
    def name(self) -> str:
        """Its last part, the same wherever the folder is seen from."""
        return Path(self._remote_path if self._remote is not None else self._path.absolute()).name

    @contextmanager
    def new(self, step: int) -> Iterator[Path]:
        """A hidden folder for a checkpoint of the step; removed unless it is published. One save at a time."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be written: {error.strerror}") from error
        folder = None
        try:
            self._wait_for(lock)
            for left in self._path.iterdir():  # of saves that were killed
                if _HIDDEN.fullmatch(left.name):
                    shutil.rmtree(left, ignore_errors=True)
            names = self._names()
            number = _number(names[-1]) + 1 if names else 1
            folder = self._path / f".{secrets.token_hex(4)}.{number:06d}-step-{step}"
            folder.mkdir()
            yield folder
        except OSError as error:
            raise CheckpointError(
                f"step {step}: saving into {self._path} failed: {error.strerror or error}; "
                "the checkpoints there are as they were"
            ) from error
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def _wait_for(self, lock: int) -> None:
        """Until nobody else saves; CheckpointError if somebody does for very long: it may be stopped."""
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"{self._path}: another process has been saving into it for {_LOCK_SECONDS:g} s; end it if it "
                        "is stopped, or one that this run has replaced"
                    ) from None
            except OSError:  # some network file systems lock no folders; the rule is then the user's to keep
                return
            time.sleep(0.02)

    def require_mine(self, last: str | None) -> None:
        """Raises if there is a checkpoint newer than `last`, the newest that this run saved or resumed: saving would
        at last remove another run."""
        newest = next(reversed(self._names()), None)
        if newest is not None and (last is None or _number(newest) > _number(last)):
            raise CheckpointError(
                f"{self._path} holds {newest}, which this run neither saved nor resumed: call resume() first, or name "
                "another folder"
            )

    def has(self, name: str) -> bool:
        """Whether a checkpoint of that name is there."""
        return name in self._names()

    def publish(self, folder: Path) -> str:
        """Makes the folder a checkpoint; returns its name."""
        name = folder.name.split(".", 2)[2]
        if self._remote is not None:
            to = f"{self._remote_path}/{name}"
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.name != MANIFEST:
                    self._remote.put_file(str(file), f"{to}/{file.relative_to(folder)}")
            self._remote.put_file(str(folder / MANIFEST), f"{to}/{MANIFEST}")
            return name
        for each in (folder / "tables", folder):
            put_on_disk(each)
        os.rename(folder, self._path / name)
        put_on_disk(self._path)
        return name

    @contextmanager
    def newest(self) -> Iterator[list[Entry]]:
        """The newest checkpoint and its parents, oldest first, in local folders; empty if there is none."""
        names = self._names()
        chain: list[Entry] = []
        name = names[-1] if names else None
        try:
            while name is not None:
                if name not in names:
                    raise CheckpointError(f"{chain[0].folder} needs its parent {name!r}, which is not in {self._path}")
                chain.insert(0, Entry.read(self._fetch(name)))
                name = chain[0].parent
            yield chain
        finally:
            if self._remote is not None:  # what was fetched
                for each in self._path.glob("*-step-*"):
                    shutil.rmtree(each, ignore_errors=True)

    def forget_beyond(self, keep: int) -> None:
        """Removes old checkpoints, but no parent of one that stays."""
        names = self._names()
        needed: set[str] = set()
        for name in names[-keep:]:
            at: str | None = name
            while at is not None and at not in needed:
                needed.add(at)
                with suppress(CheckpointError):  # a damaged one stays, too: removing it is its owner's to decide
                    at = Entry.read(self._fetch(at, only_manifest=True)).parent
                    continue
                break
        for name in names:
            if name in needed:
                continue
            if self._remote is not None:
                self._remote.rm(f"{self._remote_path}/{name}", recursive=True)
            else:  # hidden first, so that no half of it is ever seen
                hidden = self._path / f".{secrets.token_hex(4)}.{name}"
                os.rename(self._path / name, hidden)
                shutil.rmtree(hidden, ignore_errors=True)

    def _names(self) -> list[str]:
        if self._remote is not None:
            found = self._remote.glob(f"{self._remote_path}/*-step-*/{MANIFEST}")
            names = [str(path).split("/")[-2] for path in found]
        else:
            names = [path.parent.name for path in self._path.glob(f"*-step-*/{MANIFEST}")]
        return sorted((name for name in names if _NAME.fullmatch(name)), key=_number)

    def _fetch(self, name: str, only_manifest: bool = False) -> Path:
        here = self._path / name
        if self._remote is None:
            return here
        here.mkdir(exist_ok=True)
        if only_manifest:
            self._remote.get_file(f"{self._remote_path}/{name}/{MANIFEST}", str(here / MANIFEST))
        else:
            self._remote.get(f"{self._remote_path}/{name}/", str(here), recursive=True)
        return here


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


def checksum(data: bytes) -> int:
    """CRC-32C of some bytes."""
    return crc32c(np.frombuffer(data, np.uint8), 0)
