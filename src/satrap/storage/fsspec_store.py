"""An object store over any file system of fsspec. Imported only when one is used."""

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import fsspec

from satrap.config.regular_file import require_size

_PART_BYTES = 8 << 20


def open_url(url: str) -> tuple["FsspecStore", str]:
    """Return the file system of a URL, and the key that the URL names."""
    files, path = fsspec.core.url_to_fs(url)
    return FsspecStore(files), str(path).rstrip("/")


class FsspecStore:
    """A file system of fsspec. Its keys are the paths that fsspec knows."""

    def __init__(self, files: Any) -> None:
        self._files = files

    @staticmethod
    def explain(error: Exception) -> tuple[int, str]:
        kinds = ((FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES))
        code = next((code for kind, code in kinds if isinstance(error, kind)), errno.EIO)
        return code, f"{type(error).__name__}: {error}"

    def get(self, key: str, max_bytes: int | None) -> bytes:
        if max_bytes is not None:
            require_size(self.size(key), max_bytes, key)
        return bytes(self._files.cat_file(key))

    def get_range(self, key: str, begin: int, end: int) -> Any:
        return self._files.cat_file(key, start=begin, end=end)

    def size(self, key: str) -> int:
        info = self._files.info(key)
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "it is a folder", key)
        return int(info["size"])

    def put(self, key: str, data: bytes) -> None:
        self._in_folder(key, lambda: self._files.pipe_file(key, data))

    def open_writer(self, key: str) -> "_FsspecWriter":
        return _FsspecWriter(self._in_folder(key, lambda: self._files.open(key, "wb", block_size=_PART_BYTES)))

    def names(self, prefix: str) -> list[str]:
        self._files.invalidate_cache()
        names = [_within(str(path), prefix) for path in self._files.ls(prefix, detail=False)]
        return [name for name in names if name and "/" not in name]

    def sizes(self, prefix: str) -> Mapping[str, int]:
        self._files.invalidate_cache()
        listed = self._files.find(prefix, detail=True)
        return {key: int(info.get("size") or 0) for path, info in listed.items() if (key := _within(str(path), prefix))}

    def delete(self, key: str) -> None:
        self._files.rm_file(key)

    def delete_folder(self, prefix: str) -> None:
        self._files.rmdir(prefix)

    def _in_folder(self, key: str, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except FileNotFoundError:  # this file system requires the folder to exist
            self._files.makedirs(key.rpartition("/")[0], exist_ok=True)
            return write()


class _FsspecWriter:
    """An object that is uploaded in parts while it is written, as far as its file system can."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, piece: memoryview) -> None:
        self._file.write(piece)

    def complete(self) -> None:
        self._file.close()

    def abort(self) -> None:
        with suppress(AttributeError, NotImplementedError):  # few files can be; the caller deletes the object
            self._file.discard()
        self._file.closed = True  # else it is completed when it is collected


def _within(path: str, top: str) -> str:
    """Return the key below `top` of a listed path; "" if the path is not below it."""
    stripped, start = path.rstrip("/"), top.rstrip("/") + "/"
    for prefix in (stripped, "/" + stripped):  # some lists omit the first slash
        if prefix.startswith(start):
            return prefix[len(start) :]
    return ""
