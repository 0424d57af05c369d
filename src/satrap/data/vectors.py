"""Pretrained vectors in files: `read_vectors` yields ids and rows for `write` of a table, part by part.

It reads .npy files, .safetensors files and Parquet files, which are mapped or read in parts, so memory holds a part at
a time. A file whose ids are the numbers of its rows, as the weights of an `nn.Embedding` are, needs no ids.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.config.array_args import as_ids
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import known_arguments, suggest
from satrap.data.decode import is_list
from satrap.data.file_source import errors_naming
from satrap.data.hashing import hash_strings, is_text
from satrap.errors import InputError, SourceError

_PART_BYTES = 16 << 20
_LARGEST_HEADER = 100 << 20  # that safetensors itself reads
_PARQUET = b"PAR1"  # begins each Parquet file
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_TYPES = _FLOATS | {"I64": "<i8", "U64": "<u8"}
Part = tuple[NDArray[np.uint64], NDArray[np.float32]]


@known_arguments()
def read_vectors(
    path: str | os.PathLike[str], *, ids: str | os.PathLike[str] | None = None, vectors: str | None = None
) -> Iterator[Part]:
    """Yield the ids and vectors of a file in parts: uint64 [n] and float32 [n, dim].

    path: a .npy file of shape [rows, dim], a .safetensors file, or a Parquet file.
    ids: for .npy, the path of a .npy file of ids; for .safetensors, the name of their tensor. None: the numbers of the
        rows. For Parquet, the name of their column, of integers, or of strings, which are hashed as those of a source;
        None: "id".
    vectors: the name of the tensor; None: the only one of two dimensions. For Parquet, the name of the column of lists
        of numbers; None: "vector".
    """
    file = Path(path)
    if not file.is_file():
        raise SourceError(f"{file}: there is no such file; expected a .npy, .safetensors or Parquet file of vectors")
    with errors_naming(str(file)):
        match file.suffix:
            case ".npy":
                if vectors is not None:
                    raise InputError(f"{file}: vectors is {vectors!r}, and a .npy file has one array: leave it out")
                rows = np.load(file, mmap_mode="r", allow_pickle=False)
                yield from _parts(file, None if ids is None else _load_ids(Path(ids)), rows, rows.dtype.kind == "f")
            case ".safetensors":
                tensors = _tensors(file)
                known = [name for name, (_, shape, _) in tensors.items() if len(shape) == 2]
                if vectors is None and len(known) != 1:
                    raise InputError(
                        f"{file} has {len(known)} tensors of two dimensions, {known}; name one by vectors= (--vectors)"
                    )
                rows = _map_tensor(file, tensors, known[0] if vectors is None else vectors, _FLOATS)
                id_rows = None if ids is None else _map_tensor(file, tensors, os.fspath(ids), {"I64": "", "U64": ""})
                yield from _parts(file, id_rows, rows)
            case ".pt" | ".pth":
                raise InputError(
                    f"{file} is a file of torch.save; expected a .npy, .safetensors or Parquet file of vectors: "
                    "save its weight by numpy.save('vectors.npy', weight.numpy())"
                )
            case _:
                yield from _parquet_parts(file, "id" if ids is None else os.fspath(ids), vectors or "vector")


def _load_ids(file: Path) -> NDArray[Any]:
    if not file.is_file():
        raise SourceError(f"{file}: there is no such file; expected a .npy file of ids")
    with errors_naming(str(file)):
        ids: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        return ids


def _parts(file: Path, ids: NDArray[Any] | None, rows: NDArray[Any], is_float: bool = True) -> Iterator[Part]:
    """Yield parts of two arrays."""
    if rows.ndim != 2 or not is_float:
        raise InputError(f"{file}: found {rows.dtype} of shape {rows.shape}; expected floats of shape [rows, dim]")
    if ids is not None and ids.shape != (len(rows),):
        raise InputError(f"{file}: found ids of shape {ids.shape} for {len(rows)} vectors; expected one for each")
    step = max(1, _PART_BYTES // max(1, rows.shape[1] * 4))
    for begin in range(0, len(rows), step):
        part = np.asarray(rows[begin : begin + step])
        if part.dtype == np.uint16:
            part = (part.astype(np.uint32) << 16).view(np.float32)  # bfloat16
        numbers = np.arange(begin, begin + len(part), dtype=np.uint64)
        with np.errstate(over="ignore"):  # `write` refuses what float32 cannot hold
            values = np.ascontiguousarray(part, np.float32)
        yield (numbers if ids is None else as_ids(str(file), np.asarray(ids[begin : begin + step]))), values


def _tensors(file: Path) -> dict[str, tuple[str, list[int], int]]:
    """Return the type, shape and first byte of each tensor of a safetensors file."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= min(size - 8, _LARGEST_HEADER):
            raise SourceError(f"{file}: it is not a safetensors file, or is cut off; write it again")
        header = json.loads(opened.read(length))
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__":
            kind, shape, (begin, end) = about["dtype"], about["shape"], about["data_offsets"]
            width = np.dtype(_TYPES[kind]).itemsize if kind in _TYPES else 0
            if not 0 <= begin <= end <= size - 8 - length or (width and end - begin != width * math.prod(shape)):
                raise SourceError(f"{file}: the bytes of tensor {name!r} do not fit its shape; write the file again")
            tensors[name] = kind, shape, 8 + length + begin
    return tensors


def _map_tensor(
    file: Path, tensors: dict[str, tuple[str, list[int], int]], name: str, kinds: dict[str, str]
) -> NDArray[Any]:
    if name not in tensors:
        raise InputError(f"{file} has no tensor {name!r}; {suggest(name, list(tensors)) if tensors else 'it has none'}")
    kind, shape, begin = tensors[name]
    if kind not in kinds:
        raise InputError(f"{file}: tensor {name!r} is {kind}; expected one of {', '.join(kinds)}")
    if 0 in shape:
        return np.empty(shape, _TYPES[kind])
    return np.memmap(file, _TYPES[kind], "r", begin, tuple(shape))


def _parquet_parts(file: Path, ids: str, vectors: str) -> Iterator[Part]:
    arrow = pyarrow_for("reading vectors")
    from pyarrow.parquet import ParquetFile

    with open(file, "rb") as opened:
        if opened.read(len(_PARQUET)) != _PARQUET:
            raise InputError(f"{file} is not a Parquet file; expected a .npy, .safetensors or Parquet file of vectors")
    with ParquetFile(file) as parquet:
        names = parquet.schema_arrow.names
        for name in (ids, vectors):
            if name not in names:
                option = "ids= (--ids)" if name == ids else "vectors= (--vectors)"
                raise InputError(f"{file} has no column {name!r}; {suggest(name, names)}: name it by {option}")
            if names.count(name) > 1:
                raise InputError(f"{file} has several columns {name!r}; expected one of that name")
        before = 0
        for batch in parquet.iter_batches(4096, columns=[ids, vectors]):
            id_column, lists = batch.column(ids), batch.column(vectors)
            where = f"{file}, rows {before + 1} to {before + len(lists)}"
            if id_column.null_count or lists.null_count:
                raise InputError(f"{where}: an id or a vector is missing; leave these rows out")
            if not is_list(arrow, lists.type):
                raise InputError(f"{where}: column {vectors!r} is {lists.type}; expected lists of floats")
            lengths = np.unique(arrow.compute.list_value_length(lists).to_numpy())
            numbers = lists.flatten()
            if len(lengths) > 1 or not arrow.types.is_floating(numbers.type) or numbers.null_count:
                raise InputError(
                    f"{where}: column {vectors!r} is {lists.type} of {lengths} numbers; expected lists of floats of "
                    "one length, without missing ones"
                )
            with np.errstate(over="ignore"):  # `write` refuses what float32 cannot hold
                values = numbers.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(lists), -1)
            yield _parquet_ids(arrow, where, ids, id_column), values
            before += len(lists)


def _parquet_ids(arrow: Any, where: str, name: str, column: Any) -> NDArray[np.uint64]:
    if is_text(arrow, column.type):
        return hash_strings(column)
    if not arrow.types.is_integer(column.type):
        raise InputError(f"{where}: column {name!r} is {column.type}; expected integers or strings for ids")
    wide = arrow.uint64() if arrow.types.is_unsigned_integer(column.type) else arrow.int64()
    ids: NDArray[Any] = column.cast(wide).to_numpy()
    return ids.view(np.uint64)
