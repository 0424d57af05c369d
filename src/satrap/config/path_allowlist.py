"""The paths that a server may write and a worker may read for its callers: folders, files, URLs, and all below them.

A path is compared after ".." and symbolic links are resolved; a URL is compared as it is written, part by part. Handles
paths only, and opens nothing.
"""

import os
from collections.abc import Iterable
from urllib.parse import unquote

from satrap.config.location import Location
from satrap.errors import ConfigError


class PathAllowlist:
    """The paths and URLs that a user allowed, and everything below them."""

    def __init__(self, named: Iterable[str | os.PathLike[str]], flag: str) -> None:
        """flag: the option of the command line that allowed them, such as "--data"."""
        locations = [Location.parse(name, flag) for name in named]
        self._flag = flag
        self._folders = [os.path.realpath(location.absolute().path) for location in locations if not location.is_url]
        self._urls = [str(location) for location in locations if location.is_url]

    def require(self, path: str) -> None:
        """Raise ConfigError unless the path or URL is permitted."""
        if not self.permits(path):
            known, location = dict.fromkeys([*self._folders, *self._urls]), Location.parse(path).absolute()
            real = location.path if location.is_url else os.path.realpath(location.path)
            link = "" if real == os.path.normpath(location.path) else f", which a link leads to {real!r},"
            raise ConfigError(
                f"{path!r}{link} is refused: expected a path below {', '.join(map(repr, known)) or 'nothing'}; allow "
                f"its folder or URL too with {self._flag} (of `satrap run`, or of the `satrap server` or `satrap "
                "worker` that was started by hand)"
            )

    def require_below(self, glob: str) -> None:
        """Raise ConfigError unless everything that the glob may match is permitted."""
        location = Location.parse(glob).absolute()
        if not self._permits(location):
            self.require(str(location.without_glob()))

    def permits(self, path: str) -> bool:
        """Return whether the path or URL was allowed, or is below one that was."""
        return self._permits(Location.parse(path))

    def _permits(self, location: Location) -> bool:
        if location.is_url:
            url = str(location)
            return _is_plain(url) and any(url == root or url.startswith(f"{root}/") for root in self._urls)
        real = os.path.realpath(location.absolute().path)
        return any(_is_below(real, root) for root in self._folders)


def _is_below(real: str, root: str) -> bool:
    return real == root or real.startswith(root if root.endswith("/") else f"{root}/")


def _is_plain(url: str) -> bool:
    """Return whether a URL names what it seems to: no "..", and no second URL inside (fsspec chains them)."""
    return "::" not in url and ".." not in unquote(unquote(url)).split("/")
