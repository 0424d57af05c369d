"""The source of a user's files, inferred from their names and their first line; and a sample of its rows.

`satrap train` and `satrap doctor` read files by it. It decides how files are read, not what their columns mean.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import PurePosixPath
from typing import Any

from satrap.config.optional_deps import pyarrow_for
from satrap.data.arrow import Arrow, open_ipc
from satrap.data.batch_assembler import joined
from satrap.data.delimited import CSV
from satrap.data.file_source import File, find_files
from satrap.data.parquet import Parquet
from satrap.data.source import FileSource
from satrap.errors import SourceError

_TEXT = (".csv", ".tsv", ".tab", ".txt", ".psv")
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_DELIMITERS = (",", "\t", ";", "|")
_NUMBER = r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?"
_BATCH_ROWS = 8192


def infer_source(path: str | Sequence[str]) -> FileSource:
    """Return the source of a file, folder, glob or URL, or of a list of those, without declared columns."""
    files = find_files(path)
    suffixes = {_suffix(file) for file in files}
    if len(suffixes) > 1:
        raise SourceError(
            f"{path}: found files that end with {', '.join(sorted(suffixes))}; expected files of one format: name them "
            "by a glob such as 'clicks/*.parquet'"
        )
    suffix = suffixes.pop()
    if suffix in (".parquet", ".pq"):
        return Parquet(path)
    if suffix in (".arrow", ".arrows", ".feather", ".ipc"):
        return Arrow(path)
    if suffix in _TEXT:
        return CSV(path, delimiter=_delimiter(path, suffix))
    raise SourceError(
        f"{files[0].name}: the name ends with {suffix or 'no suffix'}; expected .parquet, .arrow, .feather, .csv, .tsv "
        "or .txt, where text may also be compressed, as in .csv.gz: rename or link the file, or declare it in a "
        "script, such as by satrap.CSV"
    )


def column_names(source: FileSource) -> list[str]:
    """Return the names of the columns: those of the first file, then those in its path (`day=2024-01-01/`)."""
    file = find_files(source.path, source.filesystem)[0]
    if isinstance(source, CSV):
        names = list(source.columns or source.header())
        _check_header(file, names)
    else:
        with file.open() as opened:
            names = _schema(source, opened, file.name).names
    names += [name for name in file.partition if name not in names]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise SourceError(f"{file.name} has several columns {repeated!r}; expected one of each name")
    return names


def sample_rows(source: FileSource, names: Sequence[str], num_rows: int) -> dict[str, Any]:
    """Return these columns of at most `num_rows` rows as Arrow arrays. They come from blocks in the source's shuffled
    order, so they are spread over large files."""
    parts: list[dict[str, Any]] = []
    reader = source.replace(extra=tuple(names), shuffle=True, batch_size=_BATCH_ROWS, epochs=1)
    remaining = num_rows
    with closing(reader.batches(())) as batches:
        for batch in batches:
            parts.append({name: batch.extra[name].slice(0, remaining) for name in names})
            remaining -= batch.batch_size
            if remaining <= 0:
                break
    if not parts:
        raise SourceError(f"{source.path}: found no rows; expected at least one after the header")
    return {name: joined(name, [part[name] for part in parts]) for name in names}


def _suffix(file: File) -> str:
    suffixes = [suffix.lower() for suffix in PurePosixPath(file.path).suffixes]
    if len(suffixes) > 1 and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _delimiter(path: Any, suffix: str) -> str:
    """Return the delimiter that occurs most often in the header."""
    line = "".join(CSV(path, delimiter="\x01", quote=None).header())
    counts = {delimiter: line.count(delimiter) for delimiter in _DELIMITERS}
    best = max(counts, key=lambda delimiter: counts[delimiter])
    return best if counts[best] else "\t" if suffix in (".tsv", ".tab") else ","


def _check_header(file: File, names: Sequence[str]) -> None:
    """Raise if the first line looks like data. pandas' to_csv writes its index first, without a name."""
    arrow = pyarrow_for("reading text")
    is_number = arrow.compute.match_substring_regex(arrow.array(names, arrow.string()), f"^{_NUMBER}$").to_pylist()
    if any(is_number) or "" in names[1:]:
        value = names[is_number.index(True)] if any(is_number) else ""
        raise SourceError(
            f"{file.name}: its first line has {value!r}, which is no name of a column; expected a line with the names "
            "of all columns: add it, or declare satrap.CSV(columns=...) in a script"
        )


def _schema(source: FileSource, opened: Any, name: str) -> Any:
    if isinstance(source, Parquet):
        from pyarrow.parquet import read_schema

        return read_schema(opened)
    return open_ipc(opened, name)[0].schema
