"""An object store in memory with only the three guarantees of `satrap.checkpoint.publisher`: `hostile://` for fsspec.

It has no rename and expands no pattern; lists lag by a random number of changes; a write can fail or kill its process
with half of the object written; optionally folders must be created first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec


class KilledError(BaseException):
    """The death of the process: no handler of Exception runs."""


class Hostile:
    """The content and the behaviour of the store."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.folders: set[str] = set()
        self.requires_folders = False
        self.before_write: Callable[[str], None] = lambda path: None
        self.after_write: Callable[[str], None] = lambda path: None
        self.fail_at: Callable[[str, str], type[BaseException] | None] = lambda operation, path: None
        self._rng: random.Random | None = None
        self._listed: set[str] = set()
        self._pending: list[tuple[str, bool]] = []  # changes that lists do not show yet

    def lag(self, rng: random.Random) -> None:
        """Make lists lag from now on, by as many changes as the generator draws."""
        self._rng = rng

    def change(self, path: str, data: bytes | None) -> None:
        if data is None:
            del self.objects[path]
        else:
            self.objects[path] = data
        self._pending.append((path, data is not None))

    def listed(self) -> set[str]:
        shown = len(self._pending) if self._rng is None else self._rng.randint(0, len(self._pending))
        for _ in range(shown):
            path, there = self._pending.pop(0)
            (self._listed.add if there else self._listed.discard)(path)
        return self._listed

    def settle(self) -> None:
        """Make every operation succeed and every list complete from now on."""
        self._rng = None
        self.fail_at = lambda operation, path: None


class HostileFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """The fsspec implementation of the store."""

    protocol = "hostile"
    cachable = False
    store = Hostile()

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        path = self._strip_protocol(path)
        self._fail("ls", path)
        found: dict[str, str] = {}
        for each in self.store.listed():
            if each.startswith(path + "/"):
                name, deeper, _rest = each[len(path) + 1 :].partition("/")
                found[f"{path}/{name}"] = "directory" if deeper else "file"
        if not found:
            raise FileNotFoundError(path)
        return [{"name": n, "type": t, "size": 0} for n, t in found.items()] if detail else list(found)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._fail("read", path)
        if path not in self.store.objects:
            raise FileNotFoundError(path)
        return self.store.objects[path][start:end]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.cat_file(path)), "type": "file"}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> HostileFile:
        assert mode == "wb"
        self._require_folder(path)
        return HostileFile(self, path)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        store = self.store
        self._require_folder(path)
        store.before_write(path)
        try:
            self._fail("write", path)
        except BaseException:
            store.change(path, value[: len(value) // 2])
            raise
        store.change(path, value)
        store.after_write(path)

    def rm_file(self, path: str) -> None:
        self._fail("remove", path)
        if path not in self.store.objects:
            raise FileNotFoundError(path)
        self.store.change(path, None)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        while path:
            self.store.folders.add(path)
            path = path.rpartition("/")[0]

    def rmdir(self, path: str) -> None:
        if path not in self.store.folders or any(each.startswith(path + "/") for each in self.store.objects):
            raise OSError(f"{path} is not empty")
        self.store.folders.remove(path)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("there is no such operation here")

    mv = move = cp_file = copy = glob = expand_path = rm = put = put_file = get = get_file = exists = _refuse

    def _require_folder(self, path: str) -> None:
        if self.store.requires_folders and path.rpartition("/")[0] not in self.store.folders:
            raise FileNotFoundError(path.rpartition("/")[0])

    def _fail(self, operation: str, path: str) -> None:
        error = self.store.fail_at(operation, path)
        if error is not None:
            raise error(f"{operation} of {path} failed")


class HostileFile:
    """An object that is written in parts, and is there once it is closed."""

    def __init__(self, files: HostileFileSystem, path: str) -> None:
        self._files, self._path, self._parts = files, path, bytearray()
        self.closed = False

    def write(self, part: memoryview) -> None:
        self._files._fail("part", self._path)
        self._parts += part

    def close(self) -> None:
        self._files.pipe_file(self._path, bytes(self._parts))
        self.closed = True

    def discard(self) -> None:
        self._parts.clear()


@contextmanager
def hostile() -> Iterator[Hostile]:
    """Yield a new store behind `hostile://`."""
    fsspec.register_implementation("hostile", HostileFileSystem, clobber=True)
    HostileFileSystem.store = Hostile()
    yield HostileFileSystem.store
