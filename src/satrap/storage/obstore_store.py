"""An object store over obstore: the buckets of S3, Google Cloud Storage and Azure. Imported only when one is used.

Credentials, region and endpoint are those that obstore finds in this process's environment, or that the machine's
metadata service gives it. A request that fails for a reason that may pass is repeated for a while.
"""

import errno
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import from_url

from satrap.config.regular_file import require_size

_PART_BYTES = 8 << 20  # S3 permits 10,000 parts: 80 GB of one file, of which a large table has 64
_PARTS_IN_FLIGHT = 3
_CONNECT_SECONDS, _REQUEST_SECONDS = 5, 60
_RETRIES, _RETRY_SECONDS = 8, 120
_LONGEST_MESSAGE = 400
_SAID = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
_REQUEST = re.compile(r"performing (\w+) (\S+) in")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
_HINTS = {
    "incorrectly configured region": "; set AWS_REGION to the region of the bucket",
    "/latest/api/token ": "; the environment of this process has no credentials: `eval $(aws configure "
    "export-credentials --format env)` takes those of a profile",
    "/computeMetadata/|/metadata/identity/": "; the environment of this process has no credentials",
}
"""What to do about some messages of obstore, by a pattern in them."""
_QUERY = re.compile(r"\?\S+")


def _message(error: Exception) -> str:
    """Return what the store said: the code and message of its XML, or else the first lines, without queries, in which
    there may be signatures."""
    text = str(error).partition("Debug source:")[0]
    said, request = _SAID.search(text), _REQUEST.search(text)
    if said is None:
        hints = [hint for pattern, hint in _HINTS.items() if re.search(pattern, text)]
        return "".join([" ".join(_QUERY.sub("", text).split())[:_LONGEST_MESSAGE], *hints])
    return f"{said[1]}: {' '.join(said[2].split())}" + (
        "" if request is None else f" ({request[1]} {_QUERY.sub('', request[2])})"
    )


class ObstoreStore:
    """One bucket. Its keys are those of the bucket."""

    def __init__(self, bucket_url: str, *, is_patient: bool = True) -> None:
        """is_patient: whether to repeat requests for as long as a store may be disturbed; else for some seconds."""
        retries, seconds = (_RETRIES, _RETRY_SECONDS) if is_patient else (1, 10)
        options = {
            "allow_http": True,  # only an endpoint that begins with http:// uses it
            "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
            "timeout": timedelta(seconds=_REQUEST_SECONDS if is_patient else 10),
        }
        retry: Any = {"max_retries": retries, "retry_timeout": timedelta(seconds=seconds)}
        self._bucket: Any = from_url(bucket_url, client_options=options, retry_config=retry)  # type: ignore[call-overload]

    @staticmethod
    def explain(error: Exception) -> tuple[int, str]:
        text, code = _message(error), errno.EIO
        if isinstance(error, FileNotFoundError):
            code = errno.ENXIO if _NO_BUCKET.search(text) else errno.ENOENT  # a missing bucket is no missing object
        elif isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            code = errno.EACCES
        return code, text

    def get(self, key: str, max_bytes: int | None) -> bytes:
        answer = obstore.get(self._bucket, key)  # its size is known before its bytes are read
        require_size(int(answer.meta["size"]), max_bytes, key)
        return bytes(answer.bytes())

    def get_range(self, key: str, begin: int, end: int) -> Any:
        return obstore.get_range(self._bucket, key, start=begin, end=end)

    def size(self, key: str) -> int:
        return int(obstore.head(self._bucket, key)["size"])

    def put(self, key: str, data: bytes) -> None:
        obstore.put(self._bucket, key, data)

    def open_writer(self, key: str) -> "_ObstoreWriter":
        return _ObstoreWriter(
            obstore.open_writer(self._bucket, key, buffer_size=_PART_BYTES, max_concurrency=_PARTS_IN_FLIGHT)
        )

    def names(self, prefix: str) -> list[str]:
        listed = obstore.list_with_delimiter(self._bucket, prefix or None)
        paths = [*listed["common_prefixes"], *(entry["path"] for entry in listed["objects"])]
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def sizes(self, prefix: str) -> Mapping[str, int]:
        start = len(prefix) + 1 if prefix else 0
        chunks = obstore.list(self._bucket, prefix or None)
        return {entry["path"][start:]: int(entry["size"]) for chunk in chunks for entry in chunk}

    def delete(self, key: str) -> None:
        obstore.delete(self._bucket, key)

    def delete_folder(self, prefix: str) -> None:
        """Do nothing: there are no folders."""


class _ObstoreWriter:
    """An object that is uploaded in parts while it is written."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, piece: memoryview) -> None:
        self._file.write(piece)

    def complete(self) -> None:
        self._file.close()

    def abort(self) -> None:
        """Complete the upload: obstore cannot cancel one, and its parts would be stored and paid for. The caller
        deletes the object."""
        self._file.close()
