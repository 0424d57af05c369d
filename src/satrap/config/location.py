"""The one place that tells paths from URLs: whatever names a file or a folder is parsed here.

    runs/a  /data/day=1  ~/runs  ./a:b  file:///runs      on a disk
    s3://bucket/run  memory://run  zip://a::s3://b/c      a URL
    s3:/bucket/run  s3://  run=s3://b/c  /app/s3:/b       refused

What looks like a URL and is none would else be a folder called "s3:" on the disk of this machine, which in a container
is lost with it. Parses text only, and opens nothing.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from satrap.config.validation import describe
from satrap.errors import ConfigError

GLOB_CHARACTER = re.compile(r"[*?\[]")
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+"
_URL = re.compile(rf"({_SCHEME})://")
_LOCAL = {"file", "local"}
_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss"}
"""Schemes in whose URLs the name of a bucket, or of a container, follows."""
_OTHERS = {"hdfs", "viewfs", "webhdfs", "http", "https", "ftp", "sftp", "memory"}
_NO_SLASHES = re.compile(rf"({_SCHEME}):/|({'|'.join(_BUCKETS | _OTHERS)}):", re.IGNORECASE)
_SCHEME_IN_FOLDER = re.compile(rf"(?<![A-Za-z0-9+.-])({'|'.join(_BUCKETS | _OTHERS | _LOCAL)}):(?=/|\Z)", re.IGNORECASE)
_STRING = "as a string, since pathlib.Path and os.path.abspath drop one of its slashes"


@dataclass(frozen=True, slots=True)
class Location:
    """A file, a folder or a glob: a path on a disk, or a URL of another system."""

    scheme: str
    """The URL's scheme, in lower case; "" for a path on a disk."""
    path: str
    """The path on a disk, with the user's folder in place of "~"; or what follows "://"."""

    @classmethod
    def parse(cls, path: object, what: str = "path") -> Self:
        """Return the location that a user passed; ConfigError, which calls it `what`, if it is none."""
        if not isinstance(path, str | os.PathLike) or not (text := os.fsdecode(path)):
            raise ConfigError(f"{what} is {describe(path)}; expected a path or a URL")
        url = _URL.match(text)
        if url is None:
            _refuse_lookalike(text, what)
        elif (scheme := url[1].lower()) not in _LOCAL:
            return cls(scheme, _path_of_url(scheme, text[url.end() :], text, what))
        else:
            text = re.sub(r"\Alocalhost/", "/", text[url.end() :])
            if not text or "://" in text:
                raise ConfigError(
                    f"{what} is {path!r}, which names no local file or folder; expected e.g. '{url[0]}/data/a'"
                )
        # A path "./a:b" stays one: pathlib would drop the "./".
        is_explicit = text.startswith("./") and ":" in text
        return cls("", os.path.abspath(text) if is_explicit else os.path.expanduser(text))

    @property
    def is_url(self) -> bool:
        """Whether it is a URL."""
        return self.scheme != ""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}" if self.scheme else self.path

    def absolute(self) -> Self:
        """Return the same location for a process with another working directory."""
        return self if self.scheme else type(self)("", os.path.abspath(self.path))

    def without_glob(self) -> Self:
        """Return the folder above the first wildcard of a glob; another location is returned unchanged."""
        magic = GLOB_CHARACTER.search(self.path)
        if magic is None:
            return self
        folder, slash, _ = self.path[: magic.start()].rpartition("/")
        return type(self)(self.scheme, folder or slash or ("" if self.scheme else "."))


def is_url(text: str) -> bool:
    """Return whether a text that was parsed before, such as one from another process, is a URL."""
    url = _URL.match(text)
    return url is not None and url[1].lower() not in _LOCAL


def local_path(path: object, what: str) -> Path:
    """Return the path of a local file or folder; ConfigError, which calls it `what`, if it is a URL or none of both."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{what} is {describe(path)}; expected the path of a local file or folder")
    location = Location.parse(path, what)
    if location.is_url:
        raise ConfigError(f"{what} is {str(location)!r}, a URL; expected the path of a local file or folder")
    return Path(location.path)


def _path_of_url(scheme: str, after: str, text: str, what: str) -> str:
    path = after.rstrip("/")
    bucket, _, key = path.partition("/")
    if scheme in _BUCKETS and (not bucket or GLOB_CHARACTER.search(bucket)):
        raise ConfigError(f"{what} is {text!r}, which names no bucket; expected e.g. '{scheme}://bucket/run'")
    if not path:
        raise ConfigError(f"{what} is {text!r}, which names no file or folder; expected e.g. '{scheme}://run'")
    if "://" in key and "::" not in path:  # fsspec chains URLs by "::"
        raise ConfigError(f"{what} is {text!r}, which has '://' twice; expected one URL")
    if path != path.strip():
        raise ConfigError(f"{what} is {text!r}, a URL with a blank at its begin or end; remove the blank")
    return path


def _refuse_lookalike(text: str, what: str) -> None:
    """Raise ConfigError if a text that is no URL looks like one."""
    if "://" in text:
        inner = re.search(rf"{_SCHEME}://.*", text, re.DOTALL)
        raise ConfigError(
            f"{what} is {text!r}, which has '://' and is no URL; expected a URL, such as "
            f"{'s3://bucket/run' if inner is None else inner[0]!r}, or a path, without '://'"
        )
    if begin := _NO_SLASHES.match(text):
        url = _as_url(begin[1] or begin[2], text[begin.end() :])
        raise ConfigError(
            f"{what} is {text!r}, which is no URL; expected {url!r}, {_STRING}; or, for a local file or folder, "
            f"{'./' + text!r}, as a string"
        )
    for begin in () if text.startswith("./") else _SCHEME_IN_FOLDER.finditer(text):
        folder, url = text[: begin.end()], _as_url(begin[1], text[begin.end() :])
        if not os.path.isdir(os.path.expanduser(folder)):
            raise ConfigError(
                f"{what} is {text!r}, in which {begin[0]!r} looks like the scheme of a URL; expected {url!r}, "
                f"{_STRING}; or, for a local file or folder, create the folder {folder!r} first"
            )


def _as_url(scheme: str, after: str) -> str:
    path = after.lstrip("/")
    return f"/{path}" if scheme.lower() in _LOCAL else f"{scheme.lower()}://{path}"
