"""How much of a device's memory the rows of each table take: what `Embeddings(device_memory=...)` declares. Pure
functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from satrap.byte_sizes import parse_bytes
from satrap.config.tables import Table
from satrap.errors import ConfigError

Size = int | str
DeviceMemory = Size | Mapping[str, Size] | None


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a device's memory that the rows of some tables share."""

    group: str
    """Tables of one group and one layout share their part."""
    size: int | None
    """Bytes of one table; None: all of its rows are on the device."""


ALL = Share("all", None)


def shares_of(
    tables: Sequence[Table], row_bytes: Sequence[int], device_memory: DeviceMemory, capacities: Sequence[int | None]
) -> list[Share]:
    """Return the share of the device's memory that each table gets.

    row_bytes: bytes of a row, by table.
    capacities: how many rows each table can have here.
    device_memory: bytes for all tables together; or by table bytes, "all" or "none", where a table without an entry is
        "all"; None: all rows are on the device.
    """
    if device_memory is None:
        return [ALL] * len(tables)
    if isinstance(device_memory, Mapping):
        names = [table.name for table in tables]
        for name in device_memory:
            if name not in names:
                raise ConfigError(f"device_memory names {name!r}; expected tables of the features, {names}")
        return [
            _share_of(table, size, device_memory.get(table.name, "all"))
            for table, size in zip(tables, row_bytes, strict=True)
        ]
    total = parse_bytes("device_memory", device_memory)
    sizes = divide_bytes(
        total, [None if rows is None else rows * size for rows, size in zip(capacities, row_bytes, strict=True)]
    )
    for table, size, least, rows in zip(tables, sizes, row_bytes, capacities, strict=True):
        if rows != 0:
            _require_row("device_memory", table, size, least)
    return [Share("shared", size) for size in sizes]


def _share_of(table: Table, row_bytes: int, declared: Size) -> Share:
    if declared == "all":
        return ALL
    if declared == "none":
        return Share("none", 0)
    where = f"device_memory[{table.name!r}]"
    size = parse_bytes(where, declared, ", 'all' or 'none'")
    _require_row(where, table, size, row_bytes)
    return Share(f"table {table.name}", size)


def _require_row(where: str, table: Table, size: int, row_bytes: int) -> None:
    if size < row_bytes:
        raise ConfigError(
            f"{where} leaves {size} bytes to table {table.name!r}; expected at least the {row_bytes} of one row, and "
            "enough for the rows of the batches in progress; or 'none', by table"
        )


def rows_of(table: Table) -> int | None:
    """Return how many rows the table can have; None: there is no bound."""
    return None if table.on_full == "grow" else table.capacity


def divide_bytes(total: int, demands: Sequence[int | None]) -> list[int]:
    """Divide bytes over tables. No table gets more than it demands, and what small tables leave is divided over the
    others in equal parts. A demand of None is unlimited."""
    sizes = [0] * len(demands)
    waiting = sorted(range(len(demands)), key=lambda i: (demands[i] is None, demands[i] or 0))
    while waiting:
        first, fair = waiting.pop(0), total // (len(waiting) + 1)
        demand = demands[first]
        sizes[first] = fair if demand is None else min(demand, fair)
        total -= sizes[first]
    return sizes
