"""TFRecord files against the same samples in a frame. Google's protobuf encodes the examples and TensorBoard's writer
frames the records, so nothing here trusts our own reading of either format."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter

import clicks
from satrap import DenseColumn, Frame, TFRecord
from satrap.errors import SourceError

OPTIONS: dict[str, Any] = {"dense": clicks.DENSE, "label": "click", "weights": {"history": "history_weight"}}


def example_class() -> Any:
    """Return tf.train.Example, from its published definition."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    repeated, optional = 3, 1

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        added = file.message_type.add(name=name)
        for field, number, label, kind, of in fields:
            added.field.add(name=field, number=number, label=label, type=kind, **({"type_name": of} if of else {}))
        return added

    message("BytesList", ("value", 1, repeated, 12, ""))
    message("FloatList", ("value", 1, repeated, 2, ""))
    message("Int64List", ("value", 1, repeated, 3, ""))
    feature = message(
        "Feature",
        ("bytes_list", 1, optional, 11, ".t.BytesList"),
        ("float_list", 2, optional, 11, ".t.FloatList"),
        ("int64_list", 3, optional, 11, ".t.Int64List"),
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message("Features", ("feature", 1, repeated, 11, ".t.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=optional, type=9)
    entry.field.add(name="value", number=2, label=optional, type=11, type_name=".t.Feature")
    message("Example", ("features", 1, optional, 11, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


Example = example_class()


def encode(sample: dict[str, Any]) -> bytes:
    example = Example()
    for name, value in sample.items():
        if value is None:
            if random.random() < 0.5:
                _ = example.features.feature[name]  # a key without a value
            continue
        feature = example.features.feature[name]
        values = value if isinstance(value, list) else [value]
        if isinstance(values[0], str):
            feature.bytes_list.value.extend(each.encode() for each in values)
        elif isinstance(values[0], float):
            feature.float_list.value.extend(values)
        else:
            feature.int64_list.value.extend((each + 2**63) % 2**64 - 2**63 for each in values)
    return bytes(example.SerializeToString())


def write(path: Path, records: list[bytes]) -> bytes:
    with open(path, "wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)
    return path.read_bytes()


def samples_of(source: Any, **options: Any) -> list[Any]:
    found = []
    for batch in source.batches(clicks.FEATURES, **options):
        bags, weights = clicks.bags_of(batch), clicks.bags_of(batch, batch.weights)
        lines = zip(batch.label.tolist(), batch.dense.tolist(), *bags, weights[2], strict=True)
        found += [(label, dense, *rest) for label, dense, *rest in lines]
    return found


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz"])
def test_samples_are_those_of_a_frame(name: str, tmp_path: Path, seed: int) -> None:
    samples = clicks.make(200, seed)
    random.seed(seed)
    content = write(tmp_path / "plain", [encode(sample) for sample in samples])
    (tmp_path / "plain").unlink()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    expected = samples_of(Frame(clicks.table(samples), batch_size=16, **OPTIONS))
    data = TFRecord(tmp_path, batch_size=16, block_rows=30, **OPTIONS)
    assert samples_of(data) == expected
    batches = list(data.batches(clicks.FEATURES))
    assert samples_of(data, position=batches[4].position) == expected[80:]
    parts = [samples_of(data, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(repr(each) for part in parts for each in part) == sorted(map(repr, expected))


def test_lists_of_numbers_and_an_unpacked_list(tmp_path: Path) -> None:
    unpacked = b"\x0a\x10\x0a\x0e\x0a\x01a\x12\x09\x1a\x07\x08\x05\x08\xff\x7f\x08\x01"
    write(tmp_path / "a", [unpacked])
    (batch,) = TFRecord(tmp_path / "a").batches(["a"])
    assert batch.values.tolist() == [5, 2**14 - 1, 1]
    assert Example.FromString(unpacked).features.feature["a"].int64_list.value == batch.values.tolist()
    write(tmp_path / "a", [encode({"a": 1, "x": [0.5, 2.0]}), encode({"a": 2})])
    (batch,) = TFRecord(tmp_path / "a", dense=DenseColumn("x", width=2, missing=9)).batches(["a"])
    assert batch.dense is not None and batch.dense.tolist() == [[0.5, 2.0], [9.0, 9.0]]


def test_damage_is_found(tmp_path: Path, rng: np.random.Generator) -> None:
    content = write(tmp_path / "a", [encode({"a": 7, "text": "x" * 20}) for _ in range(3)])
    data = TFRecord(tmp_path / "a")
    for _ in range(60):
        damaged = bytearray(content)
        damaged[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
        (tmp_path / "a").write_bytes(damaged)
        with pytest.raises(SourceError, match=r"a, record [123]: "):
            list(data.batches(["a"]))
    for end in rng.choice(np.arange(1, len(content)), 30, replace=False):
        (tmp_path / "a").write_bytes(content[:end])
        if end % (len(content) // 3):
            with pytest.raises(SourceError, match=r"a, record [123]: the file ends within it"):
                list(data.batches(["a"]))


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"b": 1}], {}, "a, in its first records, has no column 'a'"),
        ([{"a": 1}, {"a": "x"}], {}, "record 2: 'a' has byte strings, and integers before"),
        ([{"a": 1, "y": [0.0, 1.0]}], {"label": "y"}, "record 1: 'y' has 2 values; expected one"),
        ([{"a": 1.5}], {}, "column 'a' is of type float; expected integers or strings"),
        ([{"a": 1, "y": 7}], {"label": "y"}, "a, row 1: column 'y' holds 7"),
    ],
)
def test_bad_records_are_named(records: list[Any], options: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path / "a", [encode(each) for each in records])
    with pytest.raises(SourceError, match=re.escape(message)):
        list(TFRecord(tmp_path / "a", **options).batches(["a"]))
    write(tmp_path / "a", [b"\xff\xff"])
    with pytest.raises(SourceError, match=r"record 1: it is not a tf\.train\.Example"):
        list(TFRecord(tmp_path / "a", **options).batches(["a"]))
    write(tmp_path / "a", [])
    assert list(TFRecord(tmp_path / "a", **options).batches(["a"])) == []
