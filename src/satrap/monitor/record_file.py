"""Records: lines of JSON that a run appends while it trains, from which `satrap report` makes its page.

    TrainingRecord, RunMonitor ──append──> records/trainer-N.jsonl, run.jsonl ──scan_records──> satrap.html_report

Each line has a checksum. A process may be killed at any moment, so a file may end in the middle of a line; the next
record starts a new one. A disk that is full, or a pipe that is not read, costs records and never stops training.
"""

import errno
import json
import logging
import math
import os
import stat
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from satrap.config.durable import parse_json
from satrap.config.regular_file import open_regular

FOLDER = "records"
SHOWN = "progress"
"""Kind of the records that a trainer sends to its run, and that the run shows and does not keep."""
_LOG = logging.getLogger("satrap.monitor")
_CHECKSUM = b', "crc": '
_MAX_DEPTH = 8
_MAX_LINE = 16 << 20


class RecordFile:
    """Appends records to a file, or to a pipe that another process reads."""

    def __init__(self, file: int, name: str, *, is_torn: bool = False) -> None:
        """file: an open file descriptor. name: what warnings call it. is_torn: whether its last line is incomplete."""
        self._file, self._name, self._is_torn = file, name, is_torn
        self._lock, self._is_closed = threading.Lock(), False
        self._missing = 0  # records that could not be written since the last one that could

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the file; OSError if that fails."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(file).st_size
        if not stat.S_ISREG(os.fstat(file).st_mode):  # a FIFO would stop training once it is full
            os.close(file)
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return cls(file, str(path), is_torn=size > 0 and os.pread(file, 1, size - 1) != b"\n")

    def append(self, kind: str, **values: Any) -> None:
        """Append a record, from any thread, until the file is closed. One that cannot be written is counted, and the
        next one carries the number."""
        with self._lock:
            if not self._is_closed:
                self._append(kind, values)

    def _append(self, kind: str, values: Mapping[str, Any]) -> None:
        missing = {"missing": self._missing} if self._missing else {}
        line = encode({"kind": kind, **values, **missing})
        data = b"\n" * self._is_torn + line
        try:
            written = os.write(self._file, data)
        except OSError as error:
            written = 0
            if not self._missing:
                _LOG.warning("%s cannot be written (%s); the report will lack this", self._name, error.strerror)
        if written < len(data):
            self._missing += 1
            self._is_torn = self._is_torn or written > 0
        else:
            self._missing, self._is_torn = 0, False

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._is_closed = True
            os.close(self._file)


@dataclass(slots=True)
class RecordCounts:
    """What a file of records lacks."""

    damaged: int = 0
    """Number of lines that are no record, or are incomplete or changed."""
    missing: int = 0
    """Number of records that could not be written."""


def scan_records(path: Path, counts: RecordCounts) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, of which there may be too many to hold, and count what is damaged and missing."""
    with open_regular(path) as file:
        for line in iter(partial(file.readline, _MAX_LINE), b""):  # a longer one is damaged
            if line == b"\n":
                continue
            record = decode(line.rstrip(b"\n"))
            if record is None:
                counts.damaged += 1
                continue
            missing = record.pop("missing", 0)
            counts.missing += missing if isinstance(missing, int) else 0
            yield record


def encode(record: Mapping[str, Any]) -> bytes:
    """Return the line of a record. A number that is not finite becomes null, an object of another type its text."""
    body = json.dumps(_plain(record, 0)).encode()[:-1]
    return body + _CHECKSUM + str(zlib.crc32(body)).encode() + b"}\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line without its line break; None if the line is damaged."""
    body, mark, checksum = line.rpartition(_CHECKSUM)
    if not mark or checksum != str(zlib.crc32(body)).encode() + b"}":
        return None
    try:
        record = parse_json(body + b"}")
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _plain(value: Any, depth: int) -> Any:
    """Return the value as plain JSON types."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {str(key): _plain(element, depth + 1) for key, element in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        return [_plain(element, depth + 1) for element in value]
    return str(value)
