"""The paths that a server may write and a worker may read for its callers: folders, files, URLs, and all below them.

A path is compared after ".." and symbolic links are resolved; a URL is compared as it is written, part by part. Handles
paths only, and opens nothing.
"""

import os
import re
from collections.abc import Iterable
from urllib.parse import unquote

from satrap.errors import ConfigError

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
GLOB_CHARACTER = re.compile(r"[*?\[]")
_LOCAL = re.compile(r"\A(file|local)://", re.IGNORECASE)


class PathAllowlist:
    """The paths and URLs that a user allowed, and everything below them."""

    def __init__(self, named: Iterable[str | os.PathLike[str]], flag: str) -> None:
        """flag: the option of the command line that allowed them, such as "--data"."""
        texts = [os.fspath(each) for each in named]
        if "" in texts:
            raise ConfigError(f"{flag} is ''; expected a folder, a file or a URL")
        self._flag = flag
        self._folders = [os.path.realpath(_local(each)) for each in texts if not is_url(each)]
        self._urls = [each.rstrip("/") for each in texts if is_url(each)]

    def require(self, path: str) -> None:
        """Raise ConfigError unless the path or URL is permitted."""
        if not self.permits(path):
            known = dict.fromkeys([*self._folders, *self._urls])
            raise ConfigError(
                f"{path!r} is refused: expected a path below {', '.join(map(repr, known)) or 'nothing'}; allow its "
                f"folder or URL too with {self._flag} (of `satrap run`, or of the `satrap server` or `satrap worker` "
                "that was started by hand)"
            )

    def require_below(self, glob: str) -> None:
        """Raise ConfigError unless everything that the glob may match is permitted."""
        whole = glob if is_url(glob) else _local(glob)
        if not self.permits(whole):
            self.require(without_glob(whole))

    def permits(self, path: str) -> bool:
        """Return whether the path or URL was allowed, or is below one that was."""
        if is_url(path):
            return _is_plain(path) and any(path == root or path.startswith(f"{root}/") for root in self._urls)
        real = os.path.realpath(_local(path))
        return any(_is_below(real, root) for root in self._folders)


def is_url(path: str) -> bool:
    """Return whether the path is a URL of another system than the local files."""
    return URL.match(path) is not None and _LOCAL.match(path) is None


def without_glob(path: str) -> str:
    """Return the folder above the first wildcard of a glob; a path without wildcards is returned unchanged."""
    scheme = URL.match(path)
    begin = 0 if scheme is None else scheme.end()
    magic = GLOB_CHARACTER.search(path, begin)
    if magic is None:
        return path
    folder, slash, _ = path[begin : magic.start()].rpartition("/")
    return path[:begin] + (folder or slash or ("." if scheme is None else ""))


def _local(path: str) -> str:
    """Return a path as sources read it: without the scheme, absolute, with the user's folder expanded."""
    return os.path.abspath(os.path.expanduser(_LOCAL.sub("", path)))


def _is_below(real: str, root: str) -> bool:
    return real == root or real.startswith(root if root.endswith("/") else f"{root}/")


def _is_plain(url: str) -> bool:
    """Return whether a URL names what it seems to: no "..", and no second URL inside (fsspec chains them)."""
    return "::" not in url and ".." not in unquote(unquote(url)).split("/")
