"""The data files of a snapshot: their Arrow schemas, rows in and out as columns without a copy.

Of the package `table` only this file imports pyarrow, and only when something is saved or loaded. docs/format.md
specifies the columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from satrap.config.tables import Table
from satrap.errors import SnapshotError
from satrap.storage.folder import Folder, Readable
from satrap.table.snapshot.manifest import FORMAT, FORMAT_VERSION, DataFile, FileKind, Kind

Columns = dict[str, NDArray[Any]]


def pyarrow_or_error() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise SnapshotError(f"saving and loading need pyarrow ({error}): pip install 'satrap[arrow]'") from error
    return pyarrow


def schema_of(arrow: Any, file: FileKind, kind: Kind, snapshot_id: str, table: Table, states: int) -> Any:
    """Return the columns of a file of this kind, with the metadata that identifies it."""
    columns = [("id", arrow.uint64())]
    if file in ("rows", "sightings"):
        columns.append(("step", arrow.uint32()))
    if file == "sightings":
        columns.append(("count", arrow.uint32()))
    if file == "rows":
        number = arrow.float32() if table.dtype == "float32" else arrow.uint16()
        columns.append(("values", _list_type(arrow, number, table.dim)))
        if states > 0:
            columns.append(("state", _list_type(arrow, arrow.float32(), states)))
    metadata = {
        "satrap.format": FORMAT,
        "satrap.format_version": str(FORMAT_VERSION),
        "satrap.table": table.name,
        "satrap.dtype": table.dtype,
        "satrap.kind": kind,
        "satrap.file": file,
        "satrap.id": snapshot_id,
    }
    return arrow.schema([arrow.field(name, type_, nullable=False) for name, type_ in columns], metadata)


def items(arrow: Any, column: Any) -> Any:
    """Return the numbers of a column; of a column of lists, the numbers in its lists."""
    return column.flatten() if arrow.types.is_fixed_size_list(column.type) else column


def _list_type(arrow: Any, number: Any, size: int) -> Any:
    return arrow.list_(arrow.field("item", number, nullable=False), size)


def as_batch(arrow: Any, columns: Columns, schema: Any) -> Any:
    """Wrap the columns as a record batch, without a copy."""
    arrays = []
    for column in schema:
        data = columns[column.name]
        if data.ndim == 1:
            arrays.append(arrow.Array.from_buffers(column.type, len(data), [None, arrow.py_buffer(data)]))
            continue
        items = arrow.Array.from_buffers(column.type.value_type, data.size, [None, arrow.py_buffer(data)])
        arrays.append(arrow.Array.from_buffers(column.type, len(data), [None], children=[items]))
    return arrow.RecordBatch.from_arrays(arrays, schema=schema)


def new_file(arrow: Any, sink: Any, schema: Any) -> Any:
    """Return the writer of a new file. A record batch has a whole bucket, which may hold more numbers than 32 bits
    count; Arrow writes such a batch only with this option."""
    return arrow.ipc.new_file(sink, schema, options=arrow.ipc.IpcWriteOptions(allow_64bit=True))


def as_columns(batch: Any) -> Columns:
    """Return the columns of a record batch without nulls, as views of its memory."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in ("values", "state"):
            columns[name] = column.flatten().to_numpy().reshape(batch.num_rows, column.type.list_size)
        else:
            columns[name] = column.to_numpy()
    return columns


def open_file(folder: Folder, file: DataFile) -> Readable:
    """Open a data file of the size that its manifest gives."""
    with read_errors(folder, file):
        opened = folder.open(file.name)
    if opened.size != file.bytes or opened.size == 0:
        raise SnapshotError(
            f"{folder}/{file.name} has {opened.size} bytes; expected {file.bytes}, as when it was saved: restore it"
        )
    return opened


@contextmanager
def read_errors(folder: Folder, file: DataFile) -> Iterator[None]:
    """Convert the errors of reading a data file."""
    path = f"{folder}/{file.name}"
    try:
        yield
    except FileNotFoundError:
        raise SnapshotError(f"{path} is missing, and the manifest names it: restore it") from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
