"""Generated click data that the tests of the sources share: samples as plain Python, a writer for each format, and the
expected result of a loader, from a model of dicts and lists with its own implementation of XXH64.
"""

import csv
import gzip
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from satrap.config.columns import IdColumn
from satrap.data.arrow import Arrow
from satrap.data.delimited import CSV
from satrap.data.inputs import Inputs
from satrap.data.parquet import Parquet
from satrap.data.source import Source

FEATURES = ("user", "item", "history", "tags")
DENSE = ("age", "price")
OPTIONS: dict[str, Any] = {
    "dense": DENSE,
    "label": "click",
    "weights": {"history": "history_weight"},
    "extra": ["session"],
}
"""The declarations of these columns for files with types."""
TEXT_OPTIONS: dict[str, Any] = OPTIONS | {
    "ids": {
        "user": IdColumn(kind="integer"),
        "history": IdColumn(kind="integer", separator="|"),
        "tags": IdColumn(separator="|"),
    },
}
"""The declarations of these columns for text files."""
SCHEMA = pa.schema(
    [
        ("session", pa.string()),
        ("click", pa.int8()),
        ("age", pa.float32()),
        ("price", pa.float64()),
        ("user", pa.int64()),
        ("item", pa.string()),
        ("history", pa.list_(pa.uint64())),
        ("history_weight", pa.list_(pa.float32())),
        ("tags", pa.large_list(pa.string())),
    ]
)
Sample = dict[str, Any]
SampleTuple = tuple[Any, ...]


def make(n: int, seed: int, *, missing: float = 0.15, first: int = 0) -> list[Sample]:
    """Generate n samples. `session` identifies a sample; values have few digits, so that text holds them exactly."""
    draw = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if draw.random() < missing else value

    samples = []
    for i in range(first, first + n):
        history = maybe([draw.randrange(2**64) for _ in range(draw.randrange(1, 5))])
        samples.append(
            {
                "session": f"s{i}",
                "click": draw.randrange(2),
                "age": maybe(float(draw.randrange(90))),
                "price": maybe(draw.randrange(-400, 4000) / 4),
                "user": maybe(draw.randrange(-(2**62), 2**62)),
                "item": maybe(draw.choice(["", "x", "é" * 3, "word "]) + str(draw.randrange(50))),
                "history": history,
                "history_weight": None if history is None else [draw.randrange(-8, 9) / 8 for _ in history],
                "tags": maybe([draw.choice(["red", "green", "blue"]) for _ in range(draw.randrange(1, 3))]),
            }
        )
    return samples


def xxh64(data: bytes) -> int:
    """Compute XXH64 with seed 0, after its specification."""
    p1, p2, p3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    p4, p5, mask = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 2**64 - 1

    def rotate(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (64 - bits))) & mask

    def step(lane: int, word: int) -> int:
        return rotate((lane + word * p2) & mask, 31) * p1 & mask

    at, h = 0, p5
    if len(data) >= 32:
        lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
        while at + 32 <= len(data):
            for i in range(4):
                lanes[i] = step(lanes[i], int.from_bytes(data[at : at + 8], "little"))
                at += 8
        h = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & mask
        for lane in lanes:
            h = ((h ^ step(0, lane)) * p1 + p4) & mask
    h = (h + len(data)) & mask
    while at + 8 <= len(data):
        h = (rotate(h ^ step(0, int.from_bytes(data[at : at + 8], "little")), 27) * p1 + p4) & mask
        at += 8
    if at + 4 <= len(data):
        h = (rotate(h ^ (int.from_bytes(data[at : at + 4], "little") * p1 & mask), 23) * p2 + p3) & mask
        at += 4
    for byte in data[at:]:
        h = rotate(h ^ (byte * p5 & mask), 11) * p1 & mask
    h = (h ^ (h >> 33)) * p2 & mask
    h = (h ^ (h >> 29)) * p3 & mask
    return h ^ (h >> 32)


def expected(sample: Sample) -> SampleTuple:
    """Return the form in which a sample must be read: `session`, label, DENSE and FEATURES."""
    history = sample["history"] or []
    return (
        sample["session"],
        float(sample["click"]),
        tuple(0.0 if sample[name] is None else sample[name] for name in DENSE),
        () if sample["user"] is None else (sample["user"] % 2**64,),
        () if sample["item"] is None else (xxh64(sample["item"].encode()),),
        tuple(zip(history, sample["history_weight"] or [], strict=True)),
        tuple(xxh64(tag.encode()) for tag in sample["tags"] or []),
    )


def samples_in(inputs: Inputs) -> list[SampleTuple]:
    """Return the samples of a batch in the same form."""
    assert inputs.names == FEATURES
    bags = bags_of(inputs)
    weights = bags_of(inputs, inputs.weights) if inputs.weights is not None else bags
    assert inputs.dense is not None and inputs.label is not None
    assert inputs.dense.shape == (inputs.batch_size, len(DENSE)) and inputs.label.shape == (inputs.batch_size,)
    out = []
    for s, session in enumerate(inputs.extra["session"].to_pylist()):
        user, item, history, tags = (bags[f][s] for f in range(len(FEATURES)))
        pairs = tuple(zip(history, weights[2][s], strict=True))
        dense = tuple(inputs.dense[s].tolist())
        out.append((session, float(inputs.label[s]), dense, tuple(user), tuple(item), pairs, tuple(tags)))
    return out


def bags_of(inputs: Inputs, values: Any = None) -> list[list[list[Any]]]:
    """Return the ids, or other `values` with the same offsets, as [feature][sample]."""
    values = inputs.values if values is None else values
    n, count = inputs.batch_size, len(inputs.names)
    offsets = np.arange(n * count + 1) if inputs.offsets is None else inputs.offsets
    assert offsets[0] == 0 and offsets[-1] == len(inputs.values) == len(values)
    return [[values[offsets[f * n + s] : offsets[f * n + s + 1]].tolist() for s in range(n)] for f in range(count)]


def read(source: Any, **options: Any) -> list[SampleTuple]:
    """Return all samples of a source, in order."""
    return [sample for inputs in source.batches(FEATURES, **options) for sample in samples_in(inputs)]


# -- files -------------------------------------------------------------------------------------------------------------


def table(samples: Iterable[Sample]) -> pa.Table:
    return pa.Table.from_pylist(list(samples), SCHEMA)


def write_parquet(path: Path, samples: Sequence[Sample], rows: int = 100) -> None:
    pq.write_table(table(samples), path, row_group_size=rows)


def write_arrow(path: Path, samples: Sequence[Sample], rows: int = 100, *, stream: bool = False) -> None:
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, SCHEMA) as writer:
        writer.write_table(table(samples), max_chunksize=rows)


def write_csv(path: Path, samples: Sequence[Sample], delimiter: str = ",") -> None:
    """Write the samples with a header; .gz is compressed."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(SCHEMA.names)
        for sample in samples:
            writer.writerow([_text(sample[name]) for name in SCHEMA.names])


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "|".join(map(str, value))
    return "" if value is None else str(value)


WRITERS: dict[str, Callable[[Path, list[Sample]], None]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "arrows": lambda path, samples: write_arrow(path, samples, stream=True),
    "csv": write_csv,
    "tsv": lambda path, samples: write_csv(path, samples, "\t"),
    "csv.gz": write_csv,
}


def source(kind: str, path: Any, **options: Any) -> Source:
    """Return the source for files of a kind."""
    if kind == "parquet":
        return Parquet(path, **{"block_rows": 70, **OPTIONS, **options})
    if kind in ("arrow", "arrows"):
        return Arrow(path, **{"block_rows": 70, **OPTIONS, **options})
    delimiter = "\t" if kind == "tsv" else ","
    return CSV(path, **{"block_bytes": 3000, "delimiter": delimiter, **TEXT_OPTIONS, **options})
