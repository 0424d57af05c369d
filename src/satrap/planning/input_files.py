"""Reads the description of a job, the list of machines and a file of coefficients. Every error names the file and the
key.

`--set KEY=VALUE` changes a key before it is checked: "training.staleness=4", "tables.item.rows=1e9" of the job,
"machines.c2-standard-30.price_per_hour=1.7", "limits.memory=0.7" of the price list.

The bytes of a row are measured by filling a small table of the same configuration, so the layout of a row has one
owner, the core. What a row takes beyond values and state is its head and its share of the index; a table without a
capacity has room for growth, too.
"""

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from satrap.config.durable import replace_file
from satrap.config.tables import Table
from satrap.config.validation import check_number, describe, require_mapping, suggest
from satrap.errors import ConfigError
from satrap.planning.coefficients import Coefficients
from satrap.planning.machines import PriceList
from satrap.planning.workload import TableLoad, Training, Workload, whole_number
from satrap.table.snapshot.writer import row_bytes
from satrap.table.store import Store

T = TypeVar("T")
_KEYS = ("training", "tables")
_PRICE_KEYS = ("machines", "limits")
_TABLE_KEYS = ("rows", "vectors_per_sample", "ids_per_sample", "zipf", "unique_share")
_BUCKETS = 8  # they grow at different sizes, as those of a large table do
_MAX_BUCKET_ROWS = 4096


def read_prices(path: Path, changes: Sequence[str] = ()) -> PriceList:
    """Read machines.toml. changes: those of `--set`."""

    def read() -> PriceList:
        data = _toml(path)
        for change in changes:
            _apply(change, data, "limits", "machines")
        return PriceList.from_dict(data)

    return _checked(path, read)


def split_changes(changes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the changes of a job, and those of a price list."""
    of_prices = [change for change in changes if change.strip().partition(".")[0] in _PRICE_KEYS]
    return [change for change in changes if change not in of_prices], of_prices


def read_description(path: Path, changes: Sequence[str] = ()) -> Workload:
    """Read the description of a job. changes: those of `--set`."""
    return _checked(path, lambda: workload_of(str(path), _toml(path), changes))


def read_coefficients(path: Path) -> Coefficients:
    """Read what `write_coefficients` wrote."""

    def read() -> Coefficients:
        try:
            return Coefficients.from_dict(json.loads(_text(path)))
        except json.JSONDecodeError as error:
            raise ConfigError(f"not JSON ({error}); expected a file that --calibrate wrote") from None

    return _checked(path, read)


def write_coefficients(path: Path, costs: Coefficients) -> None:
    """Write the coefficients of this machine."""
    try:
        replace_file(path, (json.dumps(costs.to_dict(), indent=2) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written ({error.strerror}); choose another file") from error


def workload_of(
    name: str, data: Mapping[str, Any], changes: Sequence[str] = (), assumptions: Sequence[str] = ()
) -> Workload:
    """Return the job that the content of a description describes."""
    given = dict(data)
    for key in given:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}; {suggest(key, list(_KEYS))}")
    tables: Any = given.get("tables")
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"tables is {describe(tables)}; expected at least one table [[tables]]")
    for change in changes:
        _apply(change, given, "training", "tables")
    training = require_mapping("training", given.get("training", {}))
    tables = [require_mapping("tables", table) for table in given["tables"]]
    loads = tuple(_table_load(table) for table in tables)
    names = [load.table.name for load in loads]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"table {repeated[0]!r} is listed more than once; expected each name once")
    return Workload(name=name, tables=loads, training=Training.from_dict(training), assumptions=tuple(assumptions))


def _table_load(data: Mapping[str, Any]) -> TableLoad:
    """Return one of [[tables]]: the keys of `satrap.Table`, whose optimizer may be a name alone, and the planner's."""
    given = dict(data)
    where = f"table {given['name']!r}" if isinstance(given.get("name"), str) else "tables"
    own = {key: given.pop(key) for key in _TABLE_KEYS if key in given}
    known = [*_TABLE_KEYS, *Table.__dataclass_fields__]
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {suggest(key, known)}")
    if isinstance(given.get("optimizer"), str):
        given["optimizer"] = {"type": given["optimizer"]}
    for key in ("num_rows", "capacity", "num_buckets"):
        if isinstance(given.get(key), float):
            given[key] = whole_number(where, key, given[key], 1)
    table = Table.from_dict(given)
    rows = own.get("rows", table.num_rows or table.capacity)
    if rows is None:
        raise ConfigError(
            f"{where}: found neither rows, num_rows nor a capacity; expected the number of rows at the end of "
            f"training: add rows, or for a script --set tables.{table.name}.rows=N"
        )
    rows = whole_number(where, "rows", rows, 1)
    if table.capacity is not None and table.on_full != "grow" and rows > table.capacity:
        raise ConfigError(f"{where}: rows is {rows} and capacity {table.capacity}; expected at most the capacity")
    vectors = check_number(where, "vectors_per_sample", own.get("vectors_per_sample", 1.0), 0.0)
    share = own.get("unique_share")
    if share is not None and not 0.0 < (share := check_number(where, "unique_share", share, 0.0)) <= 1.0:
        raise ConfigError(f"{where}: unique_share is {share:g}; expected a number in (0, 1]")
    return TableLoad(
        table=table,
        rows=rows,
        row_bytes=memory_row_bytes(table, rows),
        saved_row_bytes=row_bytes(table),
        vectors_per_sample=vectors,
        ids_per_sample=check_number(where, "ids_per_sample", own.get("ids_per_sample", vectors), 0.0),
        zipf=check_number(where, "zipf", own.get("zipf", 1.05), 0.0),
        unique_share=share,
    )


def memory_row_bytes(table: Table, rows: int) -> int:
    """Return the bytes of memory that each of so many rows takes, rounded up."""
    bounded = table.capacity is not None and table.on_full != "grow"
    per_bucket = max(1, min(_MAX_BUCKET_ROWS, rows // table.resolved_num_buckets))
    sample = Table(
        "planned",
        dim=table.dim,
        optimizer=table.optimizer,
        dtype=table.dtype,
        num_rows=_BUCKETS * per_bucket if table.is_direct else None,
        capacity=_BUCKETS * per_bucket if bounded else None,
        num_buckets=_BUCKETS,
    )
    return _measured(sample, _BUCKETS * per_bucket)


@lru_cache(maxsize=1024)
def _measured(table: Table, rows: int) -> int:
    store = Store(table, num_threads=1)
    # A bounded table evicts: with twice the ids, each bucket is full.
    ids = np.random.default_rng(0).integers(0, 2**63, rows if table.capacity is None else 2 * rows, dtype=np.uint64)
    if table.is_direct:
        ids = np.arange(rows, dtype=np.uint64)
    for part in np.array_split(ids, 2 * _BUCKETS):  # each fits into one bucket: no lookup needs more rows at once
        store.lookup(part)
    stats = store.stats()
    return math.ceil(stats["bytes"] / stats["rows"])


def _apply(change: str, data: dict[str, Any], one: str, many: str) -> None:
    """Change one key: ONE.KEY, MANY.NAME.KEY, or MANY.*.KEY for all. The values in `data` are replaced by changed
    copies."""
    key, equals, text = change.partition("=")
    first, _, rest = key.strip().partition(".")
    name, _, own = rest.rpartition(".")
    where = f"--set {change}"
    if not equals or not rest or first not in (one, many) or (first == many and not name):
        raise ConfigError(f"{where}: expected {one}.KEY=VALUE, {many}.NAME.KEY=VALUE or {many}.*.KEY=VALUE")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if first == one:
        data[one] = {**require_mapping(one, data.get(one, {})), rest: value}
        return
    listed: Any = data.get(many)
    entries = [require_mapping(many, entry) for entry in listed] if isinstance(listed, list) else []
    names = [str(entry.get("name")) for entry in entries]
    if name != "*" and name not in names:
        raise ConfigError(f"{where}: no {many.removesuffix('s')} {name!r}; {suggest(name, names)}")
    data[many] = [{**entry, own: value} if name in ("*", entry.get("name")) else entry for entry in entries]


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text") from None


def _checked(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
