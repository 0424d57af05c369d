"""Opens a folder by its path or URL."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from satrap.config.path_allowlist import is_url
from satrap.errors import ConfigError
from satrap.storage.folder import Folder
from satrap.storage.local_folder import LocalFolder
from satrap.storage.object_folder import ObjectFolder, url_of

_LOCAL = ("file://", "local://")
_OBSTORE_SCHEMES = {"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"}


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path or URL, without accessing it yet."""
    text = url_of(path)
    if is_url(text):
        return _object_folder(text, is_patient=True)
    return LocalFolder(Path(next((text.removeprefix(each) for each in _LOCAL if text.startswith(each)), text)))


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same in another working directory; a URL is returned unchanged."""
    text = url_of(path)
    return text if is_url(text) else os.path.abspath(open_folder(text))


def require_usable(path: str | os.PathLike[str]) -> None:
    """Raise an OSError, within seconds, unless this process can write, read, list and delete objects below a URL. A
    folder on a disk is not accessed."""
    text = url_of(path)
    if is_url(text):
        _object_folder(text, is_patient=False).probe()


def _object_folder(url: str, *, is_patient: bool) -> ObjectFolder:
    scheme, _, rest = url.partition("://")
    if scheme.lower() in _OBSTORE_SCHEMES and "::" not in url:
        bucket, _, prefix = rest.partition("/")
        return ObjectFolder(_bucket(f"{scheme.lower()}://{bucket}", is_patient), prefix, url)
    store = _file_system(url)
    return ObjectFolder(store, store.prefix, url)


@lru_cache(maxsize=16)
def _bucket(url: str, is_patient: bool) -> Any:
    """Return the store of a bucket: one for all its folders, because it has the connections."""
    try:
        from satrap.storage.obstore_store import ObstoreStore
    except ImportError as error:
        raise ConfigError(f"{url} needs the package obstore ({error}): pip install obstore") from error
    try:
        return ObstoreStore(url, is_patient=is_patient)
    except OSError as error:
        raise ConfigError(f"{url} cannot be opened: {error.strerror}; expected e.g. s3://bucket/run") from error


def _file_system(url: str) -> Any:
    try:
        from satrap.storage.fsspec_store import FsspecStore

        return FsspecStore(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be opened: {error}; correct the URL, or install what its scheme needs"
        ) from error
