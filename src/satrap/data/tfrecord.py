"""TFRecord files of tf.train.Example as sources. TensorFlow is not needed: this module reads the framing, verifies its
checksums, and decodes the part of protobuf that an Example uses.

A record is its length, a checksum of the length, the bytes, and a checksum of them. A file can only be read from its
start, so it is one block. The values are decoded in Python, a record at a time; for faster reading write Parquet.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from satrap import _core
from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.data.block import Block
from satrap.data.file_source import File, find_files, refuse_other_format
from satrap.data.inputs import Position
from satrap.data.source import FileSource, RowBlockSource
from satrap.data.table_rows import TableDecoder, TableRows
from satrap.errors import SourceError

_FRAME = struct.Struct("<QI")
_MOST_BYTES = 1 << 30  # a longer record is refused
_LOOK_AHEAD = 1000  # records in which each column has to occur once
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3  # the fields of tf.train.Feature
_Example = dict[str, tuple[int, list[Any]]]


@dataclass(frozen=True)
class TFRecord(FileSource, RowBlockSource):
    """TFRecord files of tf.train.Example, or folders, globs and URLs of them; .gz is decompressed.

    A feature of ids takes all values of its key: integers, or byte strings, which are hashed. Labels, and dense columns
    without a `width`, have one number. A key that is missing or empty is a missing value."""

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        files = find_files(self.path, self.filesystem)
        types = _types_of(files, columns)
        return [] if types is None else [Block(read=_Reader(self, file, columns, types).read) for file in files]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one file."""

    source: TFRecord
    file: File
    columns: Columns
    types: Mapping[str, tuple[int, bool]]

    def read(self) -> Iterator[TableRows]:
        rows: list[_Example] = []
        before = 0
        for example in _examples(self.file):
            rows.append(example)
            if len(rows) == self.source.block_rows:
                yield self._rows(rows, before)
                rows, before = [], before + len(rows)
        if rows:
            yield self._rows(rows, before)

    def _rows(self, rows: list[_Example], before: int) -> TableRows:
        arrow = pyarrow_for("reading TFRecord")
        plain = {_BYTES: arrow.binary(), _FLOATS: arrow.float32(), _INTEGERS: arrow.int64()}
        arrays = {}
        for name, (kind, is_single) in self.types.items():
            column = []
            for number, row in enumerate(rows):
                row_kind, values = row.get(name, (kind, []))
                where = f"{self.file.name}, record {before + number + 1}"
                if row_kind != kind and values:
                    raise SourceError(
                        f"{where}: {name!r} has {_NAMES[row_kind]}, and {_NAMES[kind]} before; write one type"
                    )
                if is_single and len(values) > 1:
                    raise SourceError(f"{where}: {name!r} has {len(values)} values; expected one, or declare its width")
                column.append(None if not values else values[0] if is_single else values)
            arrays[name] = arrow.array(column, plain[kind] if is_single else arrow.list_(plain[kind]))
        table = arrow.table(arrays)
        decoder = TableDecoder.for_schema(table.schema, self.columns, self.file.name, self.source.max_bad_rows)
        return TableRows(decoder, table, before)


_NAMES = {_BYTES: "byte strings", _FLOATS: "floats", _INTEGERS: "integers"}


def _types_of(files: Sequence[File], columns: Columns) -> dict[str, tuple[int, bool]] | None:
    """Return for each required column which values it has, and whether it has one in each record; None: there is no
    record."""
    required, kinds, seen = columns.required(), dict[str, int](), set[str]()
    single = {label.name for label in columns.label} | {dense.name for dense in columns.dense if dense.width is None}
    single |= {name for column in columns.ids for name in ((column.name, *column.crossed) if column.crossed else ())}
    count = 0
    for example in islice((example for file in files for example in _examples(file)), _LOOK_AHEAD):
        count += 1
        seen |= example.keys()
        kinds |= {name: kind for name, (kind, values) in example.items() if name in required and values}
        if len(kinds) == len(required):
            break
    if not count:
        return None
    columns.check_present(f"{files[0].name}, in its first records,", sorted(seen))
    for name in required:
        if name not in kinds:
            raise SourceError(f"{files[0].name}: {name!r} is empty in the first {count} records; leave the column out")
    return {name: (kinds[name], name in single) for name in required}


def _examples(file: File) -> Iterator[_Example]:
    """Yield the examples of a file; raise SourceError if a record is damaged or cut off."""
    with file.open() as opened:
        is_compressed = file.path.endswith(".gz")
        stream = pyarrow_for("reading TFRecord").CompressedInputStream(opened, "gzip") if is_compressed else opened
        number = 0
        while head := bytes(stream.read(_FRAME.size)):
            number += 1
            where = f"{file.name}, record {number}"
            if len(head) < _FRAME.size:
                raise SourceError(f"{where}: the file ends within it; write the file again")
            length, checksum = _FRAME.unpack(head)
            if _masked_crc(head[:8]) != checksum or length > _MOST_BYTES:
                refuse_other_format(file.name, head)
                raise SourceError(f"{where}: its length is damaged, or this is not a TFRecord file; write it again")
            data = bytes(stream.read(length + 4))
            if len(data) < length + 4:
                raise SourceError(f"{where}: the file ends within it; write the file again")
            if _masked_crc(data[:length]) != int.from_bytes(data[length:], "little"):
                raise SourceError(f"{where}: its checksum is wrong, so it is damaged; write the file again")
            try:
                yield _example(data[:length])
            except (IndexError, ValueError, struct.error) as error:
                raise SourceError(f"{where}: it is not a tf.train.Example ({error}); expected one") from error


def _masked_crc(data: bytes) -> int:
    crc = _core.crc32c(np.frombuffer(data, np.uint8))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _example(data: bytes) -> _Example:
    """Return the values of each key, with the number of their type."""
    example: _Example = {}
    for features in _fields(data, 1):
        for entry in _fields(features, 1):
            key, feature = b"", b""
            for number, value in _messages(entry):
                key, feature = (value, feature) if number == 1 else (key, value)
            kind, values = 0, list[Any]()
            for kind, part in _messages(feature):
                values += _values(kind, part)
            if kind:
                example[key.decode()] = kind, values
    return example


def _values(kind: int, data: bytes) -> list[Any]:
    """Return the values of a BytesList, a FloatList or an Int64List; numbers may be packed or not."""
    values: list[Any] = []
    for number, value in _messages(data):
        if number != 1 or kind not in _NAMES:
            raise ValueError("a field is unknown")
        if kind == _BYTES:
            values.append(value)
        elif kind == _FLOATS:
            values += np.frombuffer(value, "<f4").tolist()
        else:
            at = 0
            while at < len(value):
                word, at = _varint(value, at)
                values.append(word - 2**64 if word >= 2**63 else word)
    return values


def _fields(data: bytes, number: int) -> Iterator[bytes]:
    return (value for field, value in _messages(data) if field == number)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each field of a message. The bytes of an integer are its varint."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        begin = at
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                length, begin = _varint(data, at)
                at = begin + length
            case 5:
                at += 4
            case other:
                raise ValueError(f"wire type {other} is unknown")
        if at > len(data):
            raise ValueError("a field is longer than the record")
        yield tag >> 3, data[begin:at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
        if shift > 63:
            raise ValueError("an integer has more than 64 bits")
