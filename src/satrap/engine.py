"""From tables to the native engine: makes or re-attaches the one `_core.Engine` that holds the rows of some tables.

Takes `Table` configurations and a store's own settings, checks the settings, and flattens each table into the names
that the core knows. `Place` says where in an engine one table lives; `store` and `snapshot` work with it. The steps of
training lookups are numbered here, because all tables of an engine share them. Nothing here looks up, updates or saves.
"""

import json
import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from satrap import _core
from satrap.arrays import LAST_STEP, as_step
from satrap.config import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Always,
    Constant,
    Ftrl,
    MinCount,
    Normal,
    Probability,
    RowWiseAdagrad,
    ScaledUniform,
    Table,
    Uniform,
    Zeros,
)
from satrap.errors import ConfigError, InputError, SharedMemoryError

_MAX_THREADS = 1024
_SHARED_FORMAT = "satrap-shared"  # the blob that a shared-memory file carries, so that attach() needs no configuration
_SHARED_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One table's place in an engine."""

    engine: _core.Engine
    """Holds the rows, of other tables too."""
    index: int
    """The table's number in the engine."""
    num_tables: int
    """How many tables the engine has."""
    table: Table
    """The configuration that the engine was given."""
    seed: int
    """What initial values and draws are a function of."""
    num_threads: int
    """Threads of a call, the caller's among them."""


def open_engine(
    tables: Sequence[Table], *, seed: int, num_threads: int | None, simd: str, shared: str | os.PathLike[str] | None
) -> list[Place]:
    """A new engine for the tables: in anonymous memory, or in a new shared-memory file at `shared`."""
    for table in tables:
        if not isinstance(table, Table):
            raise ConfigError(f"table is {table!r} ({type(table).__name__}); wanted a satrap.Table")
    seed = _setting("seed", seed, 0, 2**64 - 1)
    threads = thread_count(num_threads)
    configs = [native_config(table) for table in tables]
    path, blob = "", b""
    if shared is not None:
        path = _shared_path("shared", shared)
        blob = _shared_blob(tables, seed)
    engine = _core.Engine(configs, seed, threads, _simd(simd), path, blob)
    return _places(engine, tables, seed, threads)


def attach_engine(path: str | os.PathLike[str], *, num_threads: int | None, simd: str) -> list[Place]:
    """The engine whose rows lie in the shared-memory file at `path`, made by an earlier process."""
    path = _shared_path("path", path)
    threads, simd = thread_count(num_threads), _simd(simd)
    tables, seed = _read_shared_blob(path, _core.Engine.shared_config(path))
    engine = _core.Engine.attach(path, [native_config(table) for table in tables], seed, threads, simd)
    return _places(engine, tables, seed, threads)


def open_step(where: str, engine: _core.Engine, step: int | None, oldest_open: int | None) -> tuple[int, int]:
    """A training lookup's (step, oldest open step) from what the caller gave; takes no step if that is wrong."""
    if step is not None:
        step = as_step(where, "step", step)
    if oldest_open is not None:
        high = engine.latest_step + 1 if step is None else step
        oldest_open = as_step(where, "oldest_open", oldest_open, high=high)
    if step is None and engine.latest_step >= LAST_STEP:
        raise InputError(f"{where}: the latest step is {LAST_STEP}, the last there is; give a step yourself")
    at = engine.next_step() if step is None else step
    return at, at if oldest_open is None else oldest_open


def state_dim(table: Table) -> int:
    """Floats of optimizer state in a row. The core decides; an engine without rows costs nothing."""
    config = native_config(table)
    config.capacity, config.num_buckets = 0, 1
    return _core.Engine([config], 0, 1).state_dim(0)


def native_config(table: Table) -> _core.TableConfig:
    """The table in the core's words."""
    config = _core.TableConfig()
    config.name, config.dim, config.dtype = table.name, table.dim, table.dtype
    config.capacity, config.on_full = table.capacity or 0, table.on_full
    config.expire_after = table.expire_after or 0
    config.absent, config.on_nonfinite = table.absent, table.on_nonfinite
    config.num_buckets = table.resolved_num_buckets
    _set_optimizer(config, table)
    _set_initial(config, table)
    match table.admission:
        case Always():
            config.admission = "always"
        case Probability(p=p):
            config.admission, config.probability = "probability", p
        case MinCount(n=n, window=window):
            config.admission, config.min_count, config.window = "min_count", n, window
    return config


def _set_optimizer(config: _core.TableConfig, table: Table) -> None:
    optimizer = table.optimizer
    config.lr = optimizer.lr
    match optimizer:
        case SGD():
            config.optimizer, config.momentum, config.nesterov = "sgd", optimizer.momentum, optimizer.nesterov
            config.weight_decay = optimizer.weight_decay
        case Adagrad() | RowWiseAdagrad():
            config.optimizer = "adagrad" if isinstance(optimizer, Adagrad) else "rowwise_adagrad"
            config.weight_decay, config.eps = optimizer.weight_decay, optimizer.eps
            config.initial_accumulator_value = optimizer.initial_accumulator_value
        case Adam() | AdamW():
            config.optimizer = "adam" if isinstance(optimizer, Adam) else "adamw"
            config.weight_decay, config.eps = optimizer.weight_decay, optimizer.eps
            config.beta1, config.beta2 = optimizer.betas
        case Ftrl():
            config.optimizer, config.ftrl_beta = "ftrl", optimizer.beta
            config.l1, config.l2 = optimizer.l1, optimizer.l2


def _set_initial(config: _core.TableConfig, table: Table) -> None:
    match table.initial:
        case Uniform(low=low, high=high):
            config.initial, config.initial_a, config.initial_b = "uniform", low, high
        case ScaledUniform():
            bound = 1.0 / math.sqrt(table.dim)
            config.initial, config.initial_a, config.initial_b = "uniform", -bound, bound
        case Normal(mean=mean, std=std):
            config.initial, config.initial_a, config.initial_b = "normal", mean, std
        case Constant(value=value):
            config.initial, config.initial_a, config.initial_b = "constant", value, 0.0
        case Zeros():
            config.initial, config.initial_a, config.initial_b = "constant", 0.0, 0.0


def _places(engine: _core.Engine, tables: Sequence[Table], seed: int, num_threads: int) -> list[Place]:
    return [
        Place(engine=engine, index=i, num_tables=len(tables), table=table, seed=seed, num_threads=num_threads)
        for i, table in enumerate(tables)
    ]


def _setting(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} is {value!r} ({type(value).__name__}); wanted an integer from {low} to {high}")
    if not low <= int(value) <= high:
        raise ConfigError(f"{name} is {int(value)}; wanted an integer from {low} to {high}")
    return int(value)


def thread_count(num_threads: int | None) -> int:
    """Threads of a call: as given, or the cores that this process may use."""
    if num_threads is None:
        return min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    return _setting("num_threads", num_threads, 1, _MAX_THREADS)


def _simd(simd: object) -> str:
    known = ["auto", *_core.simd_paths()]
    if not isinstance(simd, str) or simd not in known:
        raise ConfigError(f"simd is {simd!r}; this machine has {', '.join(map(repr, known))}")
    return simd


def _shared_path(name: str, path: object) -> str:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{name} is {path!r} ({type(path).__name__}); wanted the path of a shared-memory file")
    return os.fsdecode(path)


def _shared_blob(tables: Sequence[Table], seed: int) -> bytes:
    content = {"format": _SHARED_FORMAT, "format_version": _SHARED_FORMAT_VERSION, "seed": seed}
    return json.dumps(content | {"tables": [table.to_dict() for table in tables]}).encode()


def _read_shared_blob(path: str, blob: bytes) -> tuple[list[Table], int]:
    """What `_shared_blob` wrote. The core has checked that the file is ours: this only meets other versions of us."""
    try:
        content: Any = json.loads(blob)
        if (content["format"], content["format_version"]) == (_SHARED_FORMAT, _SHARED_FORMAT_VERSION):
            tables = [Table.from_dict(table) for table in content["tables"]]
            return tables, _setting("seed", content["seed"], 0, 2**64 - 1)
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise SharedMemoryError(
            f"shared-memory file {path!r}: its configuration cannot be read ({error}): "
            "attach it with the Satrap that made it"
        ) from error
    raise SharedMemoryError(
        f"shared-memory file {path!r}: its configuration is of format {content['format']!r} version "
        f"{content['format_version']!r}; this Satrap reads {_SHARED_FORMAT!r} version {_SHARED_FORMAT_VERSION}"
    )
