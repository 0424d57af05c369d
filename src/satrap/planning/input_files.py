"""Reads the description of a job, the list of machines and a file of coefficients. Every error names the file and the
key.

`--set KEY=VALUE` changes a key of the description before it is checked: "training.staleness=4", "tables.item.rows=1e9".
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from satrap.config.durable import replace_file
from satrap.config.validation import describe, require_mapping, suggest
from satrap.errors import ConfigError
from satrap.planning.coefficients import Coefficients
from satrap.planning.machines import PriceList
from satrap.planning.row_bytes import memory_row_bytes, saved_row_bytes
from satrap.planning.workload import TableLoad, Training, Workload, read_table

T = TypeVar("T")
_KEYS = ("training", "tables")


def read_prices(path: Path) -> PriceList:
    """Read machines.toml."""
    return _checked(path, lambda: PriceList.from_dict(_toml(path)))


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
    training = dict(require_mapping("training", given.get("training", {})))
    tables = [dict(require_mapping("tables", each)) for each in tables]
    for change in changes:
        _apply(change, training, tables)
    loads = tuple(_table_load(each) for each in tables)
    names = [each.table.name for each in loads]
    if repeated := sorted({each for each in names if names.count(each) > 1}):
        raise ConfigError(f"table {repeated[0]!r} is listed more than once; expected each name once")
    return Workload(name=name, tables=loads, training=Training.from_dict(training), assumptions=tuple(assumptions))


def _table_load(data: Mapping[str, Any]) -> TableLoad:
    table, keys = read_table(data)
    return TableLoad(
        table=table,
        rows=keys.rows,
        row_bytes=memory_row_bytes(table, keys.rows),
        saved_row_bytes=saved_row_bytes(table),
        vectors_per_sample=keys.vectors_per_sample,
        ids_per_sample=keys.ids_per_sample,
        zipf=keys.zipf,
        unique_share=keys.unique_share,
    )


def _apply(change: str, training: dict[str, Any], tables: list[dict[str, Any]]) -> None:
    """Change one key: training.KEY, tables.NAME.KEY, or tables.*.KEY for all tables."""
    key, equals, text = change.partition("=")
    room, _, rest = key.strip().partition(".")
    name, _, own = rest.rpartition(".")
    where = f"--set {change}"
    if not equals or not rest or room not in _KEYS or (room == "tables" and not name):
        raise ConfigError(f"{where}: expected training.KEY=VALUE, tables.NAME.KEY=VALUE or tables.*.KEY=VALUE")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if room == "training":
        training[rest] = value
        return
    chosen = [each for each in tables if name in ("*", each.get("name"))]
    if not chosen:
        raise ConfigError(f"{where}: no table {name!r}; {suggest(name, [str(each.get('name')) for each in tables])}")
    for each in chosen:
        each[own] = value


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
