"""Sources that another process can read as well: those that only declare files.

They are sent as plain JSON types. A source that holds data, code or an open filesystem is read in its own process.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from satrap.config.path_allowlist import PathAllowlist
from satrap.config.validation import require_mapping, suggest
from satrap.data.arrow import Arrow
from satrap.data.criteo import Criteo
from satrap.data.delimited import CSV
from satrap.data.file_source import PermittedFiles, make_absolute
from satrap.data.json_lines import JSON
from satrap.data.parquet import Parquet
from satrap.data.source import FileSource
from satrap.data.tfrecord import TFRecord
from satrap.errors import ConfigError

_KINDS: dict[str, type[FileSource]] = {kind.__name__: kind for kind in (Arrow, Criteo, CSV, JSON, Parquet, TFRecord)}


def is_portable(data: Any) -> bool:
    """Return whether this is a source that another process can read."""
    if type(data) not in _KINDS.values() or data.filesystem is not None:
        return False
    paths = data.path if isinstance(data.path, list | tuple) else [data.path]
    return all(isinstance(path, str | PathLike) for path in paths)


def source_to_dict(source: FileSource) -> dict[str, Any]:
    """Return a source that another process can read as plain JSON types, with absolute paths."""
    return source.replace(path=make_absolute(source.path)).to_dict()


def source_from_dict(data: Mapping[str, Any]) -> FileSource:
    """Return the source that `source_to_dict` wrote."""
    kind = require_mapping("source", data).get("type")
    if kind not in _KINDS:
        raise ConfigError(f"source: type is {kind!r}; {suggest(kind, list(_KINDS))}")
    return _KINDS[kind].from_dict(data)


def restrict(source: FileSource, permitted: PathAllowlist) -> FileSource:
    """Return the same source, restricted to the permitted paths: it raises for any other."""
    if not is_portable(source):
        raise ConfigError(f"source: its path is {source.path!r}; expected paths or URLs, and no filesystem")
    return source.replace(filesystem=PermittedFiles(permitted))
