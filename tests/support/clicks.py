"""Generated click data that the tests of the sources share: samples as plain Python, a writer of each format, and the
expected result of a loader, from a model of dicts and lists and the reference implementation of XXH64.
"""

import csv
import gzip
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from xxhash import xxh64_intdigest as xxh64

from satrap.config.columns import IdColumn
from satrap.data.arrow import Arrow
from satrap.data.delimited import CSV
from satrap.data.inputs import Inputs
from satrap.data.json_lines import JSON
from satrap.data.parquet import Parquet
from satrap.data.source import Source

KINDS = ("parquet", "arrow", "arrows", "csv", "tsv", "csv.gz", "jsonl", "jsonl.gz")
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


def write_table(path: Path, table: pa.Table, rows: int = 100) -> None:
    """Write a table as Parquet, as an Arrow file or as a stream (.arrows), in parts of so many rows; or as CSV."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
    elif path.suffix == ".csv":
        pa.csv.write_csv(table, str(path))
    else:
        new = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)


def write(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples in the format that the ending names, one of KINDS."""
    if path.suffix in (".parquet", ".arrow", ".arrows"):
        write_table(path, table(samples))
        return
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        if ".jsonl" in path.suffixes:  # a missing value is null, or its key is left out
            present = [
                {name: each[name] for name in each if each[name] is not None or i % 3} for i, each in enumerate(samples)
            ]
            file.writelines(json.dumps(each) + "\n" for each in present)
            return
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",", lineterminator="\n")
        writer.writerow(SCHEMA.names)
        for sample in samples:
            writer.writerow([_text(sample[name]) for name in SCHEMA.names])


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "|".join(map(str, value))
    return "" if value is None else str(value)


def source(kind: str, path: Any, **options: Any) -> Source:
    """Return the source for files of a kind."""
    if kind == "parquet":
        return Parquet(path, **{"block_rows": 70, **OPTIONS, **options})
    if kind in ("arrow", "arrows"):
        return Arrow(path, **{"block_rows": 70, **OPTIONS, **options})
    if kind.startswith("jsonl"):
        return JSON(path, **{"block_bytes": 6000, **OPTIONS, **options})
    delimiter = "\t" if kind == "tsv" else ","
    return CSV(path, **{"block_bytes": 3000, "delimiter": delimiter, **TEXT_OPTIONS, **options})
