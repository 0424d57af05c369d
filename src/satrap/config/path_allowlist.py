"""What a server may write and a worker may read on behalf of its callers: folders, files and URLs, and what lies below.

A path is compared after ".." and symbolic links are resolved; a URL is compared as it is written, part by part. Knows
paths only, and opens nothing.
"""

import os
import re
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from satrap.errors import ConfigError

STAGING_PREFIX = "satrap-checkpoint-"
"""Of the private folders, among those for temporary files, in which trainers put together a checkpoint for a URL."""
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
GLOB_CHARACTER = re.compile(r"[*?\[]")
_LOCAL = re.compile(r"(file|local)://", re.IGNORECASE)


class PathAllowlist:
    """Paths and URLs that were named, and everything below them."""

    def __init__(self, named: Iterable[str | os.PathLike[str]], flag: str) -> None:
        """flag: of the command line, with which they were named, such as "--data"."""
        texts = [os.fspath(each) for each in named]
        if "" in texts:
            raise ConfigError(f"{flag} is ''; wanted a folder, a file or a URL")
        self._flag = flag
        self._folders = [os.path.realpath(_local(each)) for each in texts if not is_url(each)]
        self._urls = [each.rstrip("/") for each in texts if is_url(each)]

    def require(self, path: str) -> None:
        """Raises ConfigError unless the path or URL is permitted."""
        if not self.permits(path):
            known = dict.fromkeys([*self._folders, *self._urls])
            raise ConfigError(
                f"{path!r} is refused: what is permitted is {', '.join(map(repr, known)) or 'nothing'}; name the "
                f"folder or URL that it is in, too, with {self._flag} (of `satrap run`, or of the `satrap server` or "
                "`satrap worker` that was started by hand)"
            )

    def require_below(self, glob: str) -> None:
        """As `require`, of all that a glob may match."""
        whole = glob if is_url(glob) else _local(glob)
        if not self.permits(whole):
            self.require(without_glob(whole))

    def permits(self, path: str) -> bool:
        """Whether it is a path or URL that was named, or below one."""
        if is_url(path):
            return _is_plain(path) and any(path == root or path.startswith(f"{root}/") for root in self._urls)
        real = os.path.realpath(_local(path))
        return any(_is_below(real, root) for root in self._folders) or (bool(self._urls) and _is_staged(real))


def is_url(path: str) -> bool:
    """Whether it lies in another system than this one's files."""
    return URL.match(path) is not None and _LOCAL.match(path) is None


def without_glob(path: str) -> str:
    """The folder in which a glob begins; what is no glob, as it is."""
    scheme = URL.match(path)
    begin = 0 if scheme is None else scheme.end()
    magic = GLOB_CHARACTER.search(path, begin)
    if magic is None:
        return path
    folder, slash, _ = path[begin : magic.start()].rpartition("/")
    return path[:begin] + (folder or slash or ("." if scheme is None else ""))


def _local(path: str) -> str:
    """A path as sources take it."""
    return os.path.abspath(os.path.expanduser(_LOCAL.sub("", path, count=1)))


def _is_below(real: str, root: str) -> bool:
    return real == root or real.startswith(root if root.endswith("/") else f"{root}/")


def _is_plain(url: str) -> bool:
    """Whether a URL is what it seems: nothing that goes up again, and no second URL inside (fsspec chains them)."""
    return "::" not in url and ".." not in unquote(unquote(url)).split("/")


def _is_staged(real: str) -> bool:
    """Whether it is in a folder for temporary files that this user made, and no other may enter."""
    place = os.path.realpath(tempfile.gettempdir())
    if not real.startswith(f"{place}/{STAGING_PREFIX}"):
        return False
    try:
        found = os.lstat(Path(*Path(real).parts[: len(Path(place).parts) + 1]))
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
