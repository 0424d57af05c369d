"""Files with damaged bytes: reading raises a SourceError that names the file, unless the format cannot detect it.

Parquet can store a checksum of each page, which is verified; its footer and Arrow files have none. Data without a
checksum is checked as far as its use requires: offsets, indexes, UTF-8, numbers of rows.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import clicks
from satrap.data.arrow import Arrow
from satrap.data.criteo import Criteo
from satrap.data.delimited import CSV
from satrap.data.inputs import Inputs
from satrap.data.json_lines import JSON
from satrap.data.parquet import Parquet
from satrap.data.source import Source
from satrap.data.tfrecord import TFRecord
from satrap.errors import SourceError

N = 100
FEATURES = ["number", "text", "coded", "list", "texts"]


def columns(rng: np.random.Generator) -> pa.Table:
    return pa.table(
        {
            "number": rng.integers(0, 50, N),
            "text": [f"tëxt{i % 13}" if i % 7 else None for i in range(N)],
            "coded": pa.array([f"d{i % 9}" for i in range(N)]).dictionary_encode(),
            "list": [list(range(i % 5)) for i in range(N)],
            "texts": [[f"x{k}" for k in range(i % 4)] for i in range(N)],
            "age": rng.random(N),
            "wide": pa.array(rng.random((N, 2)).tolist(), pa.list_(pa.float64(), 2)),
            "click": rng.integers(0, 2, N).astype(np.float64),
            "note": [{"a": i, "b": [f"é{i}"]} for i in range(N)],
        }
    )


def write(kind: str, table: pa.Table, path: Path) -> Source:
    options: dict[str, Any] = {"dense": ["age", "wide"], "label": "click", "extra": "note", "batch_size": 16}
    if kind.startswith("parquet"):
        version = "2.0" if kind.endswith("2") else "1.0"
        sums = kind.startswith("parquet sums")
        pq.write_table(table, path, row_group_size=32, write_page_checksum=sums, data_page_version=version)
        return Parquet(path, block_rows=20, num_threads=0, **options)
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    packed = pa.ipc.IpcWriteOptions(compression="lz4" if kind == "packed arrow" else None)
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema, options=packed) as writer:
        writer.write_table(table, max_chunksize=32)
    return Arrow(path, block_rows=20, num_threads=0, **options)


def content(batches: Iterator[Inputs]) -> list[Any]:
    """Return the complete content of batches, for comparison, without the names in `note`, which are in the footer."""
    return [
        (
            [None if a is None else a.tobytes() for a in (each.values, each.offsets, each.dense, each.label)],
            [list(note.values()) if isinstance(note, dict) else note for note in each.extra["note"].to_pylist()],
        )
        for each in batches
    ]


@pytest.mark.parametrize("kind", ["parquet sums 1", "parquet sums 2", "parquet 2", "arrow", "packed arrow", "stream"])
def test_flipped_bytes_are_refused_by_file_name(kind: str, tmp_path: Path, rng: np.random.Generator, seed: int) -> None:
    """Without a checksum they may read as other values. No other error is raised; with checksums no value differs."""
    path, draw = tmp_path / "flipped", random.Random(seed)
    data = write(kind, columns(rng), path)
    whole, expected, refused = path.read_bytes(), content(data.batches(FEATURES)), 0
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 8])):
            damaged[draw.randrange(len(damaged))] ^= draw.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            found = content(data.batches(FEATURES))
        except SourceError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert found == expected or "sums" not in kind
    assert refused > 10


def test_the_page_checksum_detects_a_flipped_value(tmp_path: Path) -> None:
    path, table = tmp_path / "a.parquet", pa.table({"id": np.arange(1000, 1100)})
    pq.write_table(table, path, row_group_size=50, use_dictionary=False, compression="none", write_page_checksum=True)
    whole = path.read_bytes()
    at = whole.find(struct.pack("<q", 1077))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(SourceError, match=f"^{path}, row group 1: cannot be read.*(CRC|checksum)"):
        list(Parquet(path, block_rows=50).batches(["id"]))


def test_a_footer_that_contradicts_its_pages(tmp_path: Path) -> None:
    """Footers have no checksum: whichever number of rows in it is changed, no row is lost silently."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": range(77), "b": [1.0] * 77}), path)
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    offsets_of_77 = [at.start() for at in re.finditer(b"\x9a\x01", whole[footer:])]  # 77, as Thrift writes it
    refused = 0
    assert len(offsets_of_77) >= 4
    for at in offsets_of_77:
        for other in (b"\x98\x01", b"\x9c\x01", b"\x82\x00", b"\x80\x00"):
            path.write_bytes(whole[: footer + at] + other + whole[footer + at + 2 :])
            try:
                batches = Parquet(path, dense="b").batches(["a"])
                assert sum(inputs.batch_size for inputs in batches) == 77
            except SourceError as error:
                assert str(path) in str(error)
                refused += 1
    assert refused >= 8


# -- Arrow: damage that its reader does not detect ---------------------------------------------------------------------


def array_of_buffers(kind: Any, *buffers: Any, children: list[Any] | None = None) -> Any:
    memory = [None if each is None else pa.py_buffer(each) for each in buffers]
    return pa.Array.from_buffers(kind, 100, memory, children=children)


def damaged_offsets(dtype: Any, bound: int = 3) -> Any:
    """Return the offsets of 100 bags of one id each, with one offset replaced."""
    offsets = np.arange(101, dtype=dtype)
    offsets[70] = bound
    return offsets


INDEX = np.zeros(100, np.int32)
INDEX[70] = 9
ITEMS = pa.array(range(100))
TEXT = bytearray(b"x" * 100)
TEXT[70] = 0xFF
DAMAGED: dict[str, Any] = {
    "index": pa.DictionaryArray.from_arrays(pa.array(INDEX), pa.array(["a", "b"]), safe=False),
    "negative index": pa.DictionaryArray.from_arrays(pa.array(-INDEX), pa.array(["a", "b"]), safe=False),
    "number index": pa.DictionaryArray.from_arrays(pa.array(INDEX), pa.array([1, 2]), safe=False),
    "list": array_of_buffers(pa.list_(pa.int64()), None, damaged_offsets(np.int32), children=[ITEMS]),
    "large list": array_of_buffers(pa.large_list(pa.int64()), None, damaged_offsets(np.int64), children=[ITEMS]),
    "list beyond": array_of_buffers(pa.list_(pa.int64()), None, damaged_offsets(np.int32, 10**6), children=[ITEMS]),
    "list before": array_of_buffers(pa.list_(pa.int64()), None, damaged_offsets(np.int32, -10), children=[ITEMS]),
    "text": array_of_buffers(pa.string(), None, damaged_offsets(np.int32), b"x" * 100),
    "large text": array_of_buffers(pa.large_string(), None, damaged_offsets(np.int64), b"x" * 100),
    "text beyond": array_of_buffers(pa.string(), None, damaged_offsets(np.int32, 10**6), b"x" * 100),
    "bytes": array_of_buffers(pa.binary(), None, damaged_offsets(np.int32), b"x" * 100),
    "utf8": array_of_buffers(pa.string(), None, np.arange(101, dtype=np.int32), bytes(TEXT)),
    "texts": array_of_buffers(
        pa.list_(pa.string()), None, np.arange(101, dtype=np.int32),
        children=[array_of_buffers(pa.string(), None, damaged_offsets(np.int32), b"x" * 100)],
    ),
    "indexes": array_of_buffers(
        pa.list_(pa.dictionary(pa.int32(), pa.string())), None, np.arange(101, dtype=np.int32),
        children=[pa.DictionaryArray.from_arrays(pa.array(INDEX), pa.array(["a"]), safe=False)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["file", "stream", "memory"])
@pytest.mark.parametrize("use", ["id", "extra"])
@pytest.mark.parametrize("case", DAMAGED)
def test_damage_that_arrow_does_not_detect(case: str, use: str, kind: str, tmp_path: Path) -> None:
    """The error names file, rows and column. The samples before are returned: only data in use is checked."""
    path = tmp_path / ("a.arrows" if kind == "stream" else "a.arrow")
    table = pa.table({"a": DAMAGED[case], "b": range(100)})
    clicks.write_table(path, table)
    data: Source = Arrow(table if kind == "memory" else path, block_rows=50, batch_size=50)
    features = ["a"] if use == "id" else ["b"]
    data = data.replace(extra="a") if use == "extra" else data
    where = {"file": f"{path}, record batch 0", "stream": f"{path}", "memory": "the table"}[kind]
    num_read = 0
    with pytest.raises(SourceError, match=f"^{where}, rows 51 to 100, column 'a': cannot be read"):
        for inputs in data.batches(features):
            num_read += inputs.batch_size
            assert inputs.values[0] != inputs.values[-1] or use == "id"
    assert num_read == 50


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_a_union_is_refused_with_its_name(mode: str, tmp_path: Path) -> None:
    which = pa.array([0, 1], pa.int8())
    parts = [pa.array([1, 2]), pa.array(["a", "b"])]
    union = (
        pa.UnionArray.from_dense(which, pa.array([0, 1], pa.int32()), parts)
        if mode == "dense"
        else pa.UnionArray.from_sparse(which, parts)
    )
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), union)
    for column in (union, nested):
        table = pa.table({"a": [1, 2], "u": column})
        clicks.write_table(tmp_path / "a.arrow", table)
        for data in (Arrow(tmp_path / "a.arrow", extra="u"), Arrow(table, extra="u")):
            with pytest.raises(
                SourceError, match=f"(a.arrow|the table): column 'u' is of type .*{mode}_union.*; leave"
            ):
                list(data.batches(["a"]))
        (inputs,) = Arrow(tmp_path / "a.arrow").batches(["a"])
        assert inputs.values.tolist() == [1, 2], "an unused column may be of any type"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *(("a.csv", "use satrap.CSV"), ("a.TSV.gz", "use satrap.CSV"), ("a.jsonl", "use satrap.JSON")),
        *(("a.json", "use satrap.JSON"), ("a.parquet", "write it again"), ("a.csv.parquet", "write it again")),
    ],
)
def test_a_text_file_in_a_binary_source(name: str, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("a,b\n1,2\n")
    for kind in (Parquet, Arrow):
        with pytest.raises(SourceError, match=f"{name}: cannot be read .*, or of another format: {remedy}$"):
            list(kind(path).batches(["a"]))


@pytest.mark.parametrize("num_rows", [0, 1, 20_000])
@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"use_dictionary": False, "version": "1.0"}])
@pytest.mark.parametrize("kind", [CSV, JSON, Criteo, TFRecord, Arrow])
def test_a_parquet_file_in_another_source(kind: Any, options: dict[str, Any], num_rows: int, tmp_path: Path) -> None:
    path = tmp_path / "a.data"
    pq.write_table(pa.table({"a": np.arange(num_rows)}), path, **options)
    sources = [kind(path)] if kind is not CSV else [CSV(path), CSV(path, columns=["a"]), CSV(path, encoding="latin-1")]
    for source in sources:
        with pytest.raises(SourceError, match=r"a\.data: it is of the format Parquet: use satrap\.Parquet$"):
            list(source.batches(["C1" if kind is Criteo else "a"]))


@pytest.mark.parametrize("kind", [CSV, JSON, TFRecord])
def test_an_arrow_file_in_another_source(kind: Any, tmp_path: Path) -> None:
    clicks.write_table(tmp_path / "a.arrow", pa.table({"a": [1]}))
    with pytest.raises(SourceError, match=r"a\.arrow: it is of the format Arrow: use satrap\.Arrow$"):
        list(kind(tmp_path / "a.arrow").batches(["a"]))


@pytest.mark.parametrize("name", ["PAR1", "ARROW1"])
def test_a_header_that_begins_like_another_format_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{name},b\n1,2\n")
    (inputs,) = CSV(tmp_path / "a.csv").batches([name])
    assert inputs.batch_size == 1
