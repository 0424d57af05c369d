"""Opens folders by their paths or URLs, and the stores that URLs name."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from satrap.config.location import Location
from satrap.errors import ConfigError
from satrap.storage.folder import Folder
from satrap.storage.local_folder import LocalFolder
from satrap.storage.object_folder import ObjectFolder, ObjectStore

_OBSTORE_SCHEMES = {"s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss"}


def open_folder(path: str | os.PathLike[str], what: str = "path") -> Folder:
    """Return the folder of a path or URL, without accessing it yet; a folder is returned unchanged. what: what an error
    calls the path."""
    if isinstance(path, LocalFolder | ObjectFolder):
        return path
    location = Location.parse(path, what)
    if not location.is_url:
        return LocalFolder(Path(location.path))
    return ObjectFolder(*open_store(location), str(location))


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in another working directory; a URL is returned unchanged."""
    folder = open_folder(path)
    return os.path.abspath(folder) if folder.is_local else os.fspath(folder)


def require_usable(path: str | os.PathLike[str]) -> None:
    """Raise an OSError, within seconds, unless this process can write, read, list and delete objects below a URL. A
    folder on a disk is not accessed."""
    location = Location.parse(path)
    if location.is_url:
        ObjectFolder(*open_store(location, is_patient=False), str(location)).probe()


def open_store(location: Location, *, is_patient: bool = True) -> tuple[ObjectStore, str]:
    """Return the store that has what a URL names, and the key there, without accessing it yet.

    is_patient: whether to repeat requests for as long as a store may be disturbed; else for some seconds.
    """
    scheme, url = location.scheme, str(location)
    if scheme in _OBSTORE_SCHEMES and "::" not in url:
        bucket, _, key = location.path.partition("/")
        return _bucket(f"{'gs' if scheme == 'gcs' else scheme}://{bucket}", is_patient), key
    try:
        from satrap.storage.fsspec_store import open_url

        return open_url(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be opened: {error}; correct the URL, or install what its scheme needs"
        ) from error


@lru_cache(maxsize=16)
def _bucket(url: str, is_patient: bool) -> Any:
    """Return the store of a bucket: one for all its folders, because it has the connections."""
    try:
        from satrap.storage.obstore_store import ObstoreStore
    except ImportError as error:
        raise ConfigError(f"{url} needs the package obstore ({error}): pip install 'satrap[train]'") from error
    try:
        return ObstoreStore(url, is_patient=is_patient)
    except Exception as error:
        raise ConfigError(
            f"{url} cannot be opened: {ObstoreStore.explain(error)[1]}; expected e.g. s3://bucket/run"
        ) from error
