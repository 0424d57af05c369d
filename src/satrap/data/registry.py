"""Which sources another process can read as well: those that are nothing but a declaration of files.

They cross as plain JSON types. What holds data, code or an open filesystem is read where it is.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from satrap.config.path_allowlist import PathAllowlist
from satrap.config.validation import require_mapping, suggest
from satrap.data.arrow import Arrow
from satrap.data.criteo import Criteo
from satrap.data.delimited import CSV
from satrap.data.file_source import PermittedFiles, absolute
from satrap.data.parquet import Parquet
from satrap.data.source import Source
from satrap.errors import ConfigError

_KINDS: dict[str, type[Source]] = {kind.__name__: kind for kind in (Arrow, Criteo, CSV, Parquet)}


def travels(data: Any) -> bool:
    """Whether it is such a source."""
    if type(data) not in _KINDS.values() or data.filesystem is not None:
        return False
    paths = data.path if isinstance(data.path, list | tuple) else [data.path]
    return all(isinstance(each, str | PathLike) for each in paths)


def source_to_dict(source: Any) -> dict[str, Any]:
    """A source that travels, its paths absolute."""
    told: dict[str, Any] = source.replace(path=absolute(source.path)).to_dict()
    return told


def source_from_dict(data: Mapping[str, Any]) -> Source:
    """The source that `source_to_dict` told of."""
    kind = require_mapping("source", data).get("type")
    if kind not in _KINDS:
        raise ConfigError(f"source: type is {kind!r}; {suggest(kind, list(_KINDS))}")
    return _KINDS[kind].from_dict(data)


def restricted(source: Any, permitted: PathAllowlist) -> Source:
    """The same source; it reads what is permitted and refuses the rest."""
    if not travels(source):
        raise ConfigError(f"source: its path is {source.path!r}; wanted paths and URLs, and no filesystem")
    guarded: Source = source.replace(filesystem=PermittedFiles(permitted))
    return guarded
