"""The manifest of a snapshot: which table was saved, which files hold it, and how to verify that they are whole.

Pure: converts a `Manifest` to JSON bytes and back and checks every field, without access to a disk (`directory`
does that; `writer` fills the files). docs/format.md is the specification; a change here is a change there.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from satrap.config.durable import json_checksum, json_with_checksum, parse_json
from satrap.config.tables import LAST_VERSION, Table
from satrap.config.validation import LARGEST_FLOAT32, LAST_STEP, flat
from satrap.errors import ConfigError, SnapshotError

FORMAT = "satrap-table"
FORMAT_VERSION = 1
FILE_NAME = "manifest.json"

Kind = Literal["full", "changes"]
FileKind = Literal["rows", "sightings", "removed"]

_NAMES: dict[FileKind, re.Pattern[str]] = {
    "rows": re.compile(r"part-([0-9a-f]{16})-\d{5}\.arrow"),
    "sightings": re.compile(r"sightings-([0-9a-f]{16})\.arrow"),
    "removed": re.compile(r"removed-([0-9a-f]{16})\.arrow"),
}
_TEMPORARY = re.compile(r"manifest-[0-9a-f]{16}\.tmp")
_OBJECT = re.compile(r"manifest-([0-9a-f]{16})\.json")
_LARGEST = 2**64 - 1


def is_ours(name: str) -> bool:
    """Return whether only a save can have left a file of this name."""
    return any(pattern.fullmatch(name) for pattern in (*_NAMES.values(), _TEMPORARY, _OBJECT))


def temporary_name(token: str) -> str:
    """Return the name under which a manifest is written. It is renamed once it is complete."""
    return f"manifest-{token}.tmp"


def object_name(snapshot_id: str) -> str:
    """Return the name of a snapshot's manifest under a URL. The name holds the snapshot's id, since object stores do
    not rename: with one common name, two saves could overwrite each other's manifest."""
    return f"manifest-{snapshot_id}.json"


def is_of_other(name: str, ids: Iterable[str]) -> bool:
    """Return whether an object of this name was left by the save of a snapshot that is not among `ids`."""
    return is_ours(name) and not any(part_id in name for part_id in ids)


class Since(NamedTuple):
    """The snapshot on which saved changes build: its version and id."""

    version: int
    id: str | None


class RecordBatch(NamedTuple):
    """One record batch of a data file. It begins where the one before ends, the first at the start of the file."""

    bucket_begin: int
    """The first of the buckets that its ids are in."""
    bucket_end: int
    """The bucket after the last of them."""
    rows: int
    """Number of lines in it."""
    end: int
    """The byte of the file after its last one."""
    crc32c: int
    """Checksum of the file up to `end`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One Arrow file of a snapshot."""

    name: str
    """Its name in the manifest's folder."""
    kind: FileKind
    """The kind of its lines."""
    bytes: int
    """Its size."""
    rows: int
    """Number of lines in it."""
    crc32c: int
    """Checksum of all its bytes."""
    bucket_begin: int
    """The first of the buckets that its ids are in."""
    bucket_end: int
    """The bucket after the last of them."""
    batches: tuple[RecordBatch, ...]
    """Its record batches, with lines in the order of their ids' hashes."""

    def problems(self, holds: NDArray[np.bool_]) -> Iterator[str]:
        """Yield the contradictions between its record batches and the rest. holds: the buckets of the snapshot."""
        bucket, at = self.bucket_begin, 0
        for i, batch in enumerate(self.batches):
            where = f"record batch {i} of {self.name}"
            if not bucket <= batch.bucket_begin < batch.bucket_end <= self.bucket_end:
                yield f"{where} holds the buckets {batch.bucket_begin} to {batch.bucket_end}, but {bucket} is the next"
            elif len(missing := np.flatnonzero(~holds[batch.bucket_begin : batch.bucket_end])):
                yield f"{where} holds bucket {batch.bucket_begin + missing[0]}, which is not in buckets"
            if not at < batch.end < self.bytes or batch.rows < 1:
                yield f"{where} ends at byte {batch.end} of {self.bytes}, after {at}, with {batch.rows} lines"
            bucket, at = batch.bucket_end, batch.end
        rows = sum(batch.rows for batch in self.batches)
        if rows != self.rows:
            yield f"the record batches of {self.name} hold {rows} lines; expected {self.rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`; format.md explains each field."""

    kind: Kind
    """A whole table, or what changed since another snapshot."""
    id: str
    """16 hex digits drawn at random, in the name of every file of this snapshot."""
    version: int
    """The table's version that this snapshot holds."""
    since: int | None
    """The version that changes start at; None: a whole table."""
    since_id: str | None
    """The id of the snapshot that changes start at, if the saver knew it."""
    config: dict[str, Any]
    """`Table.to_dict()`."""
    seed: int
    """The store's seed."""
    latest_step: int
    """The store's latest step."""
    expire_before: int
    """Rows stamped before this step have expired; 0: none."""
    lr: float
    """The store's learning rate, which may differ from the configuration's."""
    num_buckets: int
    """Number of buckets of the table."""
    buckets: tuple[tuple[int, int], ...]
    """The buckets that the saver owned, as rising ranges [begin, end)."""
    rows: int
    """Number of rows in the rows files."""
    removed: int
    """Number of ids in the removed file."""
    sightings: int
    """Number of lines of the sightings file."""
    files: tuple[DataFile, ...]
    """Rows files in order of their buckets, then sightings, then removed."""

    @property
    def is_direct(self) -> bool:
        """Whether the table was direct (`Table.num_rows`), which decides an id's hash: its bucket and its order."""
        return self.config.get("num_rows") is not None

    def of_kind(self, kind: FileKind) -> list[DataFile]:
        """Return the data files of one kind, such as "rows"."""
        return [file for file in self.files if file.kind == kind]

    def holds(self) -> NDArray[np.bool_]:
        """Return for each bucket whether the process that saved the snapshot owned it."""
        holds = np.full(self.num_buckets, False)
        for begin, end in self.buckets:
            holds[begin:end] = True
        return holds

    def differences(self, config: dict[str, Any], seed: int) -> list[str]:
        """Return how a table of this configuration and seed differs from the snapshot's, field by field."""
        if (config, seed) == (self.config, self.seed):
            return []
        here, saved = flat(config) | {"seed": seed}, flat(_with_defaults(self.config)) | {"seed": self.seed}
        of_no_row = {"shard", "num_rows", "frozen"} | (set() if _may_evict(saved) else {"num_buckets"})
        return [
            f"{name} is {here.get(name)!r} in the table and {saved.get(name)!r} in the snapshot"
            for name in sorted((here.keys() | saved.keys()) - of_no_row)
            if here.get(name) != saved.get(name)
        ]

    def to_json(self) -> bytes:
        """Return canonical JSON that includes the checksum, and a newline."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION} | asdict(self)
        return json_with_checksum(content) + b"\n"

    @classmethod
    def from_json(cls, text: bytes, where: str) -> Self:
        """Parse the manifest in the file `where`; check every field against every other."""
        content = _verified(text, where)
        fields = _Fields(content, where)
        manifest = cls(
            kind=fields.choice("kind", get_args(Kind)),
            id=fields.string("id"),
            version=fields.integer("version", 1, LAST_VERSION),
            since=None if content.get("since") is None else fields.integer("since", 1, LAST_VERSION),
            since_id=None if content.get("since_id") is None else fields.string("since_id"),
            config=fields.mapping("config"),
            seed=fields.integer("seed"),
            latest_step=fields.integer("latest_step", 0, LAST_STEP),
            expire_before=fields.integer("expire_before", 0, LAST_STEP),
            lr=fields.number("lr"),
            num_buckets=fields.integer("num_buckets", 1, 65536),
            buckets=fields.ranges("buckets"),
            rows=fields.integer("rows"),
            removed=fields.integer("removed"),
            sightings=fields.integer("sightings"),
            files=tuple(_data_file(mapping) for mapping in fields.mappings("files")),
        )
        for problem in manifest._problems():
            raise SnapshotError(f"{where}: {problem}; the program that wrote it is not compatible with this Satrap")
        return manifest

    def _problems(self) -> Iterator[str]:
        """Yield the contradictions in a manifest whose fields are each valid."""
        if (self.kind == "changes") != (self.since is not None):
            yield f"kind is {self.kind!r} and since is {self.since}"
        if self.since is not None and self.since >= self.version:
            yield f"since is {self.since} and version is {self.version}"
        for file in self.files:
            match = _NAMES[file.kind].fullmatch(file.name)
            if match is None or match[1] != self.id:
                yield f"the {file.kind} file is called {file.name!r} in the snapshot {self.id!r}"
        at = 0
        for begin, end in self.buckets:
            if not at <= begin < end <= self.num_buckets:
                yield f"buckets has the range {begin} to {end}, after {at} and of {self.num_buckets}"
            at = end
        at = 0
        for file in self.of_kind("rows"):
            if file.bucket_begin != at or file.bucket_end <= at:
                yield f"{file.name} holds the buckets {file.bucket_begin} to {file.bucket_end}, but {at} is the next"
            at = file.bucket_end
        if at != self.num_buckets:
            yield f"the rows files end at bucket {at} of {self.num_buckets}"
        if not any(begin < 0 or end > self.num_buckets for begin, end in self.buckets):
            holds = self.holds()
            for file in self.files:
                yield from file.problems(holds)
        expected = {"sightings": 1, "removed": int(self.kind == "changes")}
        for kind, total in (("rows", self.rows), ("sightings", self.sightings), ("removed", self.removed)):
            files = [file for file in self.files if file.kind == kind]
            if len(files) != expected.get(kind, len(files)):
                yield f"there are {len(files)} {kind} files"
            if sum(file.rows for file in files) != total:
                yield f"{kind} is {total}, but its files hold {sum(file.rows for file in files)}"


class _Fields:
    """Takes fields from a JSON object; refuses one that is missing or has a wrong type."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self._content = content
        self._where = where

    def _take(self, name: str, valid: bool, expected: str) -> Any:
        if not valid:
            shown = repr(self._content[name]) if name in self._content else "missing"
            raise SnapshotError(f"{self._where}: the field {name!r} is {shown}; expected {expected}")
        return self._content[name]

    def integer(self, name: str, low: int = 0, high: int = _LARGEST) -> int:
        value = self._content.get(name)
        valid = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return int(self._take(name, valid, f"an integer from {low} to {high}"))

    def number(self, name: str) -> float:
        value = self._content.get(name)
        valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST_FLOAT32
        return float(self._take(name, valid, "a number of at least 0 that float32 can hold"))

    def string(self, name: str) -> str:
        return str(self._take(name, isinstance(self._content.get(name), str), "a string"))

    def choice(self, name: str, choices: tuple[Any, ...]) -> Any:
        return self._take(name, self._content.get(name) in choices, f"one of {', '.join(map(repr, choices))}")

    def ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        value = self._content.get(name)
        valid = isinstance(value, list) and all(
            isinstance(pair, list) and len(pair) == 2 and all(type(at) is int for at in pair) for pair in value
        )
        return tuple((begin, end) for begin, end in self._take(name, valid, "pairs of integers"))

    def batches(self, name: str) -> tuple[RecordBatch, ...]:
        value = self._content.get(name)
        size = len(RecordBatch._fields)
        valid = isinstance(value, list) and all(
            isinstance(pair, list) and len(pair) == size and all(type(n) is int and 0 <= n <= _LARGEST for n in pair)
            for pair in value
        )
        return tuple(RecordBatch(*entry) for entry in self._take(name, valid, f"lists of {size} integers"))

    def mapping(self, name: str) -> dict[str, Any]:
        return dict(self._take(name, isinstance(self._content.get(name), dict), "an object"))

    def mappings(self, name: str) -> "list[_Fields]":
        value = self._content.get(name)
        valid = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
        return [
            _Fields(entry, f"{self._where}: {name}[{i}]") for i, entry in enumerate(self._take(name, valid, "objects"))
        ]


def _data_file(fields: _Fields) -> DataFile:
    return DataFile(
        name=fields.string("name"),
        kind=fields.choice("kind", get_args(FileKind)),
        bytes=fields.integer("bytes"),
        rows=fields.integer("rows"),
        crc32c=fields.integer("crc32c", 0, 2**32 - 1),
        bucket_begin=fields.integer("bucket_begin", 0, 65536),
        bucket_end=fields.integer("bucket_end", 0, 65536),
        batches=fields.batches("batches"),
    )


def _may_evict(config: dict[str, Any]) -> bool:
    """Return whether the number of buckets decides which rows a table of this configuration holds."""
    return config.get("capacity") is not None and config.get("on_full") != "grow"


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return a table's configuration with the fields that its writer left out."""
    try:
        return Table.from_dict(config).to_dict()
    except ConfigError:
        return config


def _verified(text: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object if it is a manifest of a version that this Satrap reads, and intact."""
    try:
        content: Any = parse_json(text)
    except ValueError as error:  # invalid JSON or UTF-8, or endlessly nested lists
        raise SnapshotError(f"{where} is no JSON ({error}): torn, or not a Satrap manifest") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        name = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise SnapshotError(f"{where} is no manifest of a Satrap table: its format is {name!r}; expected {FORMAT!r}")
    if content.get("format_version") != FORMAT_VERSION:
        raise SnapshotError(
            f"{where} is of format_version {content.get('format_version')!r}; this Satrap reads {FORMAT_VERSION}"
        )
    written = content.get("crc32c")
    try:
        computed = json_checksum(content)
    except ValueError as error:  # NaN or infinity, which Python reads and JSON does not have
        raise SnapshotError(f"{where} is damaged: {error}") from error
    if written != computed:
        raise SnapshotError(f"{where} is damaged: it gives its crc32c as {written!r}, but it is {computed}")
    return content
