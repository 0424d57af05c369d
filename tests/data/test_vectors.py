"""Files of pretrained vectors: each form yields the same ids and numbers, and `satrap import` saves them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import satrap
from satrap.cli.main import main
from satrap.data.hashing import hash_strings
from satrap.errors import CheckpointError, InputError, SatrapError

N = 9000  # more than a part of a Parquet file


def joined(*arguments: Any, **options: Any) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    ids, values = zip(*satrap.read_vectors(*arguments, **options), strict=True)
    return np.concatenate(ids), np.concatenate(values)


@pytest.fixture
def vectors(rng: np.random.Generator) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    ids = rng.permutation(np.unique(rng.integers(0, 2**64, 2 * N, dtype=np.uint64)))[:N]
    return ids, rng.normal(size=(N, 6)).astype(np.float32)


def test_every_form_holds_the_same(
    tmp_path: Path, vectors: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ids, values = vectors
    np.save(tmp_path / "rows.npy", values)
    np.save(tmp_path / "ids.npy", ids)
    tensors = {"ids": torch.from_numpy(ids.view(np.int64)), "rows": torch.from_numpy(values), "bias": torch.zeros(3)}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"half": tensors["rows"].bfloat16()}, tmp_path / "half.safetensors")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 6)
    pq.write_table(pa.table({"id": ids, "vector": lists, "name": list(map(str, ids))}), tmp_path / "a.parquet")
    for found in (
        joined(tmp_path / "rows.npy", ids=tmp_path / "ids.npy"),
        joined(tmp_path / "a.safetensors", ids="ids"),
        joined(tmp_path / "a.parquet"),
    ):
        assert [each.tobytes() for each in found] == [ids.tobytes(), values.tobytes()]
    numbers = np.arange(N, dtype=np.uint64)
    for path in ("rows.npy", "a.safetensors"):
        assert np.array_equal(joined(tmp_path / path)[0], numbers)
    np.testing.assert_array_equal(joined(tmp_path / "half.safetensors")[1], tensors["rows"].bfloat16().float().numpy())
    np.testing.assert_array_equal(joined(tmp_path / "a.parquet", ids="name")[0], hash_strings(list(map(str, ids))))

    folder = str(tmp_path / "snapshot")
    assert main(["import", str(tmp_path / "a.parquet"), folder, "--table", "item"]) == 0
    with satrap.Reader(folder) as reader:
        np.testing.assert_array_equal(reader.lookup("item", ids), values)
    other = ["import", str(tmp_path / "rows.npy"), folder, "--table", "other"]
    assert main(other) == 1
    message = r"snapshot exists and holds .*\.json.*; expected a new folder: name another, or replace it with --force"
    assert re.search(message, capsys.readouterr().err)
    embeddings = satrap.Embeddings({"item": satrap.Table("item", dim=6)})
    with satrap.Reader(folder) as reader:
        for part, rows in reader.tables["item"].rows():
            embeddings.tables["item"].write(part, rows.values)
    np.testing.assert_array_equal(embeddings.tables["item"].read(ids).values, values)
    weights = torch.nn.Embedding(20, 6).weight
    embeddings.tables["item"].write(list(range(20)), weights.detach())
    assert torch.equal(torch.from_numpy(embeddings.tables["item"].read(list(range(20))).values), weights)


@pytest.mark.parametrize("form", ["npy", "safetensors"])
def test_a_run_starts_from_imported_rows_once(tmp_path: Path, vectors: tuple[Any, Any], form: str) -> None:
    """A run that resumes keeps what it has trained; one without a checkpoint writes the rows again."""
    _, values = vectors
    pretrained, file = str(tmp_path / "pretrained"), tmp_path / f"rows.{form}"
    np.save(file, values) if form == "npy" else save_file({"rows": torch.from_numpy(values)}, file)
    assert main(["import", str(file), pretrained, "--table", "item"]) == 0
    expected = values.copy()
    for launch in range(3):
        with satrap.Embeddings({"item": satrap.Table("item", dim=6, optimizer=satrap.SGD(lr=0.5))}) as embeddings:
            model = torch.nn.Linear(6, 1)
            optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            with pytest.raises(CheckpointError, match="pretrained is the snapshot of a table"):
                satrap.Checkpoint(pretrained, model, optimizer, embeddings).resume()
            run = satrap.Checkpoint(tmp_path / "run", model, optimizer, embeddings)
            assert run.resume() == (launch > 1), "the first launch saved nothing"
            table = embeddings.tables["item"]
            if embeddings.step == 0:
                with satrap.Reader(pretrained) as reader:
                    for ids, rows in reader.tables["item"].rows():
                        table.write(ids, rows.values)
            np.testing.assert_array_equal(table.read(np.arange(N)).values, expected)
            for batch in embeddings.stream([{"item": np.array([3, 5])}]):
                batch["item"].sum().backward()
                optimizer.step()
            if launch:
                expected[[3, 5]] -= 0.5
                run.save()


def broken(tmp_path: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return files that are refused, and the options with which they are read, by the message."""
    np.save(tmp_path / "ints.npy", np.ones((3, 2), np.int64))
    np.save(tmp_path / "halves.npy", np.ones((3, 2), np.uint16))
    np.save(tmp_path / "rows.npy", np.ones((3, 2), np.float32))
    np.save(tmp_path / "ids.npy", np.arange(4))
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(3, 2), "c": torch.zeros(3)}, tmp_path / "two.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "two.safetensors").read_bytes()[:-9])
    (tmp_path / "text.safetensors").write_bytes(b"no such file")
    uneven = pa.array([[1.0], [1.0, 2.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": [1, 2], "vector": uneven, "x": [0.5, 1.5]}), tmp_path / "uneven.parquet")
    pq.write_table(pa.table({"id": [1, None], "vector": [[1.0], [2.0]]}), tmp_path / "missing.parquet")
    pq.write_table(pa.table({"id": [1, 2], "vector": [0.5, 1.5]}), tmp_path / "numbers.parquet")
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([1]), pa.array([[0.5]])], ["id", "id", "vector"])
    pq.write_table(twice, tmp_path / "double.parquet")
    torch.save({"rows": torch.zeros(3, 2)}, tmp_path / "rows.pt")
    (tmp_path / "rows.csv").write_text("id,vector\n1,2\n")
    (tmp_path / "damaged.npy").write_bytes(b"no array")
    return {
        "nope.npy: there is no such file; expected a .npy file of ids": ("rows.npy", {"ids": tmp_path / "nope.npy"}),
        "damaged.npy: cannot be read": ("rows.npy", {"ids": tmp_path / "damaged.npy"}),
        "column 'vector' is double; expected lists of floats": ("numbers.parquet", {}),
        "has several columns 'id'; expected one": ("double.parquet", {}),
        "rows.pt is a file of torch.save; expected a .npy, .safetensors or Parquet file": ("rows.pt", {}),
        "rows.csv is not a Parquet file": ("rows.csv", {}),
        "there is no such file": ("none.npy", {}),
        "found int64 of shape (3, 2); expected floats": ("ints.npy", {}),
        "found uint16 of shape (3, 2); expected floats": ("halves.npy", {}),
        "found ids of shape (4,) for 3 vectors": ("rows.npy", {"ids": tmp_path / "ids.npy"}),
        "a .npy file has one array": ("rows.npy", {"vectors": "a"}),
        "has 2 tensors of two dimensions, ['a', 'b']; name one by vectors= (--vectors)": ("two.safetensors", {}),
        "has no tensor 'd'": ("two.safetensors", {"vectors": "d"}),
        "tensor 'c' is F32; expected one of I64, U64": ("two.safetensors", {"vectors": "a", "ids": "c"}),
        "the bytes of tensor": ("cut.safetensors", {"vectors": "a"}),
        "it is not a safetensors file": ("text.safetensors", {}),
        "has no column 'vectr'; the nearest known one is 'vector': name it by vectors= (--vectors)": (
            "uneven.parquet",
            {"vectors": "vectr"},
        ),
        "has no column 'key'; known are 'id', 'vector', 'x': name it by ids= (--ids)": (
            "uneven.parquet",
            {"ids": "key"},
        ),
        "expected lists of floats of one length": ("uneven.parquet", {}),
        "rows 1 to 2: an id or a vector is missing": ("missing.parquet", {}),
    }


def test_numbers_beyond_float32_are_infinite(tmp_path: Path) -> None:
    """`write` refuses them with their row; read_vectors does not warn."""
    pq.write_table(pa.table({"id": [1, 2], "vector": [[1e300], [0.5]]}), tmp_path / "a.parquet")
    assert joined(tmp_path / "a.parquet")[1].tolist() == [[np.inf], [0.5]]


def test_bad_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for message, (name, options) in broken(tmp_path).items():
        with pytest.raises(SatrapError, match=re.escape(message)):
            joined(tmp_path / name, **options)
    np.save(tmp_path / "twice.npy", np.arange(3) * 0)
    with pytest.raises(InputError, match="ids hold 0 twice"):
        for part in satrap.read_vectors(tmp_path / "rows.npy", ids=tmp_path / "twice.npy"):
            satrap.Store(satrap.Table("t", dim=2)).write(*part)
    assert main(["import", str(tmp_path / "none.npy"), str(tmp_path / "to"), "--table", "t"]) == 1
    assert "there is no such file" in capsys.readouterr().err and not (tmp_path / "to").exists()
    np.save(tmp_path / "nan.npy", np.array([[1, 2], [3, np.nan]], np.float32))
    assert main(["import", str(tmp_path / "nan.npy"), str(tmp_path / "to"), "--table", "t"]) == 1
    assert "nan.npy: table 't': values[1] holds nan, for id 1; expected finite" in capsys.readouterr().err
