"""From tables to the native engine: creates or attaches the `_core.Engine` that holds the rows of some tables.

Takes `Table` configurations and a store's settings, and checks the settings. A `Slot` identifies one table of an engine
for `store` and `snapshot`. `look_up` and `update` are the calls that one table and many have in common; their ids,
offsets and gradients were checked before. Nothing here saves.
"""

import json
import math
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.array_args import as_out, as_step
from satrap.config.cores import thread_count
from satrap.config.id_set import IdSet
from satrap.config.location import local_path
from satrap.config.tables import Constant, Normal, ScaledUniform, Table, Uniform, Zeros, with_frozen_ids
from satrap.config.validation import LAST_STEP, check_choice, check_flag, check_integer, is_path
from satrap.errors import ConfigError, InputError, SharedMemoryError, TicketError
from satrap.transfer import Transfers

_SHARED_FORMAT = "satrap-shared"  # marks the blob from which attach() takes the configuration
_SHARED_FORMAT_VERSION = 1


class RowAccess(Protocol):
    """Reads and writes the rows of an engine's tables. `_core.Engine` implements this for the rows that it holds."""

    def lookup(
        self,
        ids: NDArray[np.uint64],
        offsets: NDArray[np.int64],
        step: int,
        oldest_open: int,
        train: bool,
        out: NDArray[np.float32],
        ticket: bool,
        first_epoch: bool = True,
    ) -> Any:
        """Fill `out` with the rows of the ids of each table, one after another; return the ticket, or None.

        step: the step of a lookup that trains; 0: the next step, which begins once the ids were checked.
        oldest_open: the oldest open step; 0: `step`."""

    def prepare(self, ids: NDArray[np.uint64], offsets: NDArray[np.int64]) -> _core.Ticket:
        """Return a ticket for an update of ids that were looked up without one."""

    def read(
        self,
        table: int,
        ids: NDArray[np.uint64],
        values: NDArray[np.float32],
        state: NDArray[np.float32],
        present: NDArray[np.bool_],
    ) -> None:
        """Fill `present` for all ids, and `values` and `state` for those that have a row."""

    def export_rows(self, table: int, bucket_begin: int, bucket_end: int, since: int) -> dict[str, NDArray[Any]]:
        """Return the rows of some buckets as columns."""

    def export_cut(self, table: int, bucket_begin: int, bucket_end: int, since: int) -> dict[str, Any]:
        """Return the rows of some buckets at the cut as columns."""

    def import_rows(
        self,
        table: int,
        id: NDArray[np.uint64],
        step: NDArray[np.uint32],
        values: NDArray[Any],
        state: NDArray[np.float32],
    ) -> None:
        """Insert or replace rows."""

    def stats(self, table: int) -> dict[str, int]:
        """Return the counts of a table."""

    def check(self, table: int) -> None:
        """Raise AssertionError if an invariant does not hold."""


class Directory(Protocol):
    """Knows which ids of an engine's tables have rows. Its methods do what `_core.Engine` does by the same names."""

    def num_rows(self, table: int) -> int:
        """Return how many rows a table has."""

    def export_rows(self, table: int, bucket_begin: int, bucket_end: int, since: int) -> dict[str, NDArray[Any]]:
        """Return the rows of some buckets as columns: at least their ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one table in an engine."""

    engine: _core.Engine
    """The engine that knows the rows, those of other tables too."""
    rows: RowAccess
    """The engine if it holds the rows; it is only the directory of rows on a device."""
    directory: Directory
    """The engine, unless its tables have `num_rows` and their rows are on a device, which then knows them itself."""
    index: int
    """The table's number in the engine."""
    num_tables: int
    """How many tables the engine has."""
    table: Table
    """The configuration that the engine was created with."""
    seed: int
    """Initial values and draws are functions of it."""
    transfers: Transfers = field(compare=False)
    """Saves, verifications and restores of the engine's tables."""

    @property
    def keeps_cuts(self) -> bool:
        """Whether the rows of a cut are kept while it is written. Those on a device are changed in place."""
        return self.rows is self.engine


def open_engine(
    tables: Sequence[Table],
    *,
    seed: int,
    num_threads: int | None,
    simd: str = "auto",
    shared: str | os.PathLike[str] | None,
    complete: bool = True,
    note: Mapping[str, int] | None = None,
) -> list[Slot]:
    """Create an engine for the tables: in anonymous memory, or in a new shared-memory file at `shared`. Unless
    `complete`, the file cannot be attached before `set_complete(True)`: the caller has more to put into it. The file
    keeps the note: see `shared_note`."""
    for table in tables:
        if not isinstance(table, Table):
            raise ConfigError(f"table is {table!r} ({type(table).__name__}); expected a satrap.Table")
    seed = check_integer("store", "seed", seed, 0, 2**64 - 1)
    threads = thread_count(num_threads)
    configs = [native_config(table) for table in tables]
    path, blob = "", b""
    if shared is not None:
        path = _shared_path("shared", shared)
        blob = _shared_blob(tables, seed, {} if note is None else note)
    engine = _core.Engine(configs, seed, threads, _simd(simd), path, blob, complete)
    return slots_of(engine, tables, seed)


def attach_engine(path: str | os.PathLike[str], *, num_threads: int | None, simd: str = "auto") -> list[Slot]:
    """Attach the engine whose rows are in the shared-memory file at `path`, created by an earlier process."""
    path = _shared_path("path", path)
    threads, simd = thread_count(num_threads), _simd(simd)
    tables, seed, _ = _read_shared_blob(path, _core.Engine.shared_config(path))
    engine = _core.Engine.attach(path, [native_config(table) for table in tables], seed, threads, simd)
    return slots_of(engine, tables, seed)


def remove_unfinished(path: str | os.PathLike[str]) -> bool:
    """Remove the shared-memory file at `path` if the process that created or filled it was killed before the file was
    complete; return whether it did."""
    path = _shared_path("path", path)
    unfinished: bool = _core.Engine.shared_unfinished(path)
    if unfinished:
        os.unlink(path)
    return unfinished


def shared_note(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return the note that the creator of the shared-memory file at `path` left in it."""
    path = _shared_path("path", path)
    return _read_shared_blob(path, _core.Engine.shared_config(path))[2]


def resolve_step(
    where: str, latest_step: int, *, train: bool, step: int | None, oldest_open: int | None
) -> tuple[int | None, int | None]:
    """Check the step and the oldest open step that the caller passed to a lookup; return them."""
    if not train:
        for name, value in (("step", step), ("oldest_open", oldest_open)):
            if value is not None:
                raise InputError(
                    f"{where}: {name} is {value!r} and train=False; a lookup without training belongs to no step: "
                    f"leave {name} out, or use train=True"
                )
        return None, None
    if step is not None:
        step = as_step(where, "step", step)
    if oldest_open is not None:
        high = latest_step + 1 if step is None else step
        oldest_open = as_step(where, "oldest_open", oldest_open, high=high)
    if step is None and latest_step >= LAST_STEP:
        raise InputError(f"{where}: the latest step is {LAST_STEP}, the largest possible; pass a step yourself")
    return step, oldest_open


def look_up(
    where: str,
    slot: Slot,
    ids: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    shape: tuple[int, ...],
    *,
    train: bool,
    step: int | None,
    oldest_open: int | None,
    out: NDArray[np.float32] | None,
    with_ticket: bool = False,
) -> tuple[NDArray[np.float32], Any]:
    """Look rows up for a store or a table group; return them and the ticket, or None. shape: of the rows."""
    engine = slot.engine
    check_flag(where, "train", train, InputError)
    if out is not None:
        rows = as_out(where, out, shape)
    else:
        rows = np.asarray(engine.empty(math.prod(shape[:-1]), shape[-1])).reshape(shape)
    step, oldest_open = resolve_step(where, engine.latest_step, train=train, step=step, oldest_open=oldest_open)
    ticket = slot.rows.lookup(ids, offsets, step or 0, oldest_open or 0, train, rows, with_ticket)
    return rows if out is None else out, ticket


def update(
    where: str,
    engine: _core.Engine,
    ticket: _core.Ticket,
    gradients: NDArray[np.float32],
    step: int | None,
    lrs: Sequence[float],
) -> None:
    """Update rows by a ticket. Only the core knows whether the ticket may be used: threads may race for it."""
    at = max(1, engine.latest_step) if step is None else as_step(where, "step", step)
    try:
        engine.update(ticket, gradients.reshape(-1), at, lrs)
    except TicketError as error:
        raise TicketError(f"{where}: {error}") from None


def native_config(table: Table, frame_pool: int | None = None) -> _core.TableConfig:
    """Return the table's configuration in the core. Frozen ids that are not known are left out: servers do not need
    them, since their callers send no gradients of frozen rows. frame_pool: the pool of its rows' frames, on a
    device."""
    resolved = replace(table, initial=resolved_initial(table), num_buckets=table.resolved_num_buckets)
    frozen: Any = table.frozen
    ids = frozen.ids if isinstance(frozen, IdSet) and frozen.has_ids else None
    if isinstance(frozen, range) and frozen:
        frozen = [frozen.start, frozen.stop - 1]
    elif frozen is not True:
        frozen = False
    return _core.TableConfig(resolved.to_dict() | {"frozen": frozen}, frame_pool, ids)


def state_dim(table: Table) -> int:
    """Return the number of floats of optimizer state in a row."""
    return native_config(replace(table, frozen=False)).state_dim


def resolved_initial(table: Table) -> Constant | Normal | Uniform:
    """Return the parameters by which the core draws initial values."""
    match table.initial:
        case Zeros():
            return Constant(0.0)
        case ScaledUniform():
            bound = 1.0 / math.sqrt(table.dim)
            return Uniform(low=-bound, high=bound)
        case given:
            return given


def slots_of(
    engine: _core.Engine,
    tables: Sequence[Table],
    seed: int,
    rows: RowAccess | None = None,
    directory: Directory | None = None,
) -> list[Slot]:
    """Return the tables of a new engine that has these configurations.

    rows: where the rows are; None: in the engine itself. directory: what knows them; None: the engine.
    """
    common: dict[str, Any] = {"engine": engine, "seed": seed, "transfers": Transfers()}
    common |= {"rows": rows or engine, "directory": directory or engine}
    return [Slot(index=i, num_tables=len(tables), table=table, **common) for i, table in enumerate(tables)]


def _simd(simd: str) -> str:
    check_choice("store", "simd", simd, ("auto", *_core.simd_paths()))
    return simd


def _shared_path(name: str, path: object) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else b""
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if not text or not is_path(text):
        raise ConfigError(
            f"{name} is {path!r} ({type(path).__name__}); expected the path of a shared-memory file, of Unicode "
            "characters without NUL"
        )
    return str(local_path(text, name))


def _shared_blob(tables: Sequence[Table], seed: int, note: Mapping[str, int]) -> bytes:
    content = {"format": _SHARED_FORMAT, "format_version": _SHARED_FORMAT_VERSION, "seed": seed, "note": dict(note)}
    content |= {"tables": [table.to_dict() for table in tables]}
    known = {table.name: table.frozen_ids for table in tables}
    frozen = {name: ids.ids for name, ids in known.items() if isinstance(ids, IdSet) and ids.has_ids}
    if frozen:
        content["frozen_ids"] = {name: b64encode(ids.astype("<u8").tobytes()).decode() for name, ids in frozen.items()}
    return json.dumps(content).encode()


def _read_shared_blob(path: str, blob: bytes) -> tuple[list[Table], int, dict[str, int]]:
    """Read what `_shared_blob` wrote. The core has checked that the file is Satrap's; its version may differ."""
    try:
        content: Any = json.loads(blob)
        if (content["format"], content["format_version"]) == (_SHARED_FORMAT, _SHARED_FORMAT_VERSION):
            tables = [Table.from_dict(table) for table in content["tables"]]
            frozen = {name: b64decode(ids) for name, ids in content.get("frozen_ids", {}).items()}
            tables = [
                with_frozen_ids(table, np.frombuffer(frozen[table.name], "<u8")) if table.name in frozen else table
                for table in tables
            ]
            return tables, check_integer("store", "seed", content["seed"], 0, 2**64 - 1), content.get("note", {})
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise SharedMemoryError(
            f"shared-memory file {path!r}: its configuration cannot be read ({error}): "
            "attach it with the Satrap that created it"
        ) from error
    raise SharedMemoryError(
        f"shared-memory file {path!r}: its configuration is of format {content['format']!r} version "
        f"{content['format_version']!r}; this Satrap reads {_SHARED_FORMAT!r} version {_SHARED_FORMAT_VERSION}: "
        "attach it with the Satrap that created it"
    )
