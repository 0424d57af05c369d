"""Files for `satrap train`, and what its tests do with the command and its script."""

import gzip
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import satrap
from satrap.cli.main import main
from waiting import DEADLINE_SECONDS

METRICS = re.compile(
    r"^(DCN|logistic regression): AUC ([\d.]+), log loss ([\d.]+); ([\d,]+) steps, ([\d,]+) rows$", re.MULTILINE
)


def clicks(num_rows: int = 3000, seed: int = 0) -> pa.Table:
    """Users who like some items: what a logistic regression over users and items learns in part."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(0, 40, num_rows), draw.integers(0, 25, num_rows)
    price = draw.gamma(2.0, 10.0, num_rows).round(2) + 0.01
    logit = 1.5 * ((user % 5) - 2) + ((item % 3) - 1) - 0.02 * price
    return pa.table(
        {
            "user_id": user,
            "item": [f"item {number}" for number in item],
            "price": pa.array(price, mask=draw.random(num_rows) < 0.1),
            "day": np.arange(num_rows) // 100,
            "click": (draw.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(int),
        }
    )


def write(folder: Path, suffix: str, table: pa.Table, name: str = "clicks") -> Path:
    path = folder / f"{name}.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    elif suffix == "arrow":
        pyarrow.feather.write_feather(table, str(path), compression="uncompressed")
    else:
        delimiter = {"tsv": "\t", "txt": ";"}.get(suffix, ",")
        sink = pa.BufferOutputStream()
        pyarrow.csv.write_csv(table, sink, pyarrow.csv.WriteOptions(delimiter=delimiter))
        text = sink.getvalue().to_pybytes()
        path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    return path


def run(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script_of(folder: Path, *options: str) -> dict[str, Any]:
    """Write a script in the working folder, which the data is in, and return its names."""
    assert main(["train", "clicks.parquet", "--script", "train.py", *options]) == 0
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile((folder / "train.py").read_text(), "train.py", "exec"), names)
    return names


def rows_of(folder: Path) -> dict[str, dict[int, bytes]]:
    """Return the rows of all tables of the newest checkpoint, by id."""
    records = {}
    with satrap.Reader(folder / "checkpoint") as reader:
        for name, table in reader.tables.items():
            records[name] = {
                int(i): row.tobytes() for ids, rows in table.rows() for i, row in zip(ids, rows.values, strict=True)
            }
    return records


def error_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["train", *map(str, arguments)]) == 1
    return capsys.readouterr().err
