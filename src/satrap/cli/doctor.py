"""`satrap doctor`: reports the installed packages, the hardware, and the bottleneck of a short training run.

Yields plain lines. Every number in them was measured on this machine. With files, `examine_data` reports instead how
often their ids repeat from batch to batch, and what staleness that permits (docs/theory.md).
"""

import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice

import numpy as np

from satrap import _core
from satrap.cli.options import in_options
from satrap.cli.train_plan import described_lists, list_hint, require_lists
from satrap.config.columns import IdColumn
from satrap.config.cores import num_cores
from satrap.config.tables import Table
from satrap.config.validation import check_integer
from satrap.data.column_profile import ColumnProfile, profile_column
from satrap.data.criteo import Criteo
from satrap.data.delimited import CSV
from satrap.data.file_source import find_files
from satrap.data.inferred_source import column_names, infer_source, sample_rows
from satrap.data.inputs import Inputs
from satrap.data.reuse import LAGS, Reuse, measure_reuse
from satrap.data.source import FileSource
from satrap.errors import ConfigError, SourceError
from satrap.monitor.memory import memory
from satrap.monitor.status_line import StatusLine

_PACKAGES = (
    *("satrap", "numpy", "torch", "pyarrow", "safetensors", "fsspec", "tensorboard", "pandas", "polars", "pyzmq"),
    "ray",
)
CRITEO_IDS = tuple(f"C{number}" for number in range(1, 27))
_LEAST_BATCHES = LAGS[-1] + 1
_SAMPLED_ROWS = 50_000
_NUM_FEATURES, _BATCH, _ROWS, _STEPS = 26, 4096, 1_000_000, 20


def examine(dim: int, *, run: bool) -> Iterator[str]:
    """Yield the report. dim: embedding dimension of the short run; run: whether to do it."""
    yield f"python {platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    for package in _PACKAGES:
        yield f"{package:12} {_version(package)}"
    yield f"SIMD         {_core.simd_paths()[0]} (this machine has {', '.join(_core.simd_paths())})"
    cores, (used, allowed) = num_cores(), memory()["machine"]
    yield f"cores        {cores} for this process"
    load, host_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > host_cores:
        yield (
            f"load         {load:.1f} on {host_cores} cores: figures are those of a busy machine; where cores are "
            "shared, OMP_NUM_THREADS=1 may be faster"
        )
    yield f"memory       {allowed / 2**30:.1f} GiB, {(allowed - used) / 2**30:.1f} GiB available"
    yield f"huge pages   {_huge_pages()}"
    if _version("torch") == "not installed":
        yield "torch is not installed, so only tables work; to train: pip install 'satrap[train]'"
        return
    import torch

    from satrap.train.torch_threads import spare_cores

    yield from _gpus()
    spare = spare_cores()
    table_threads = f"{cores} between dense steps" + (f"; with staleness, {spare} during them" if spare else "")
    yield f"threads      torch {torch.get_num_threads()}, tables {table_threads}"
    if torch.get_num_threads() > cores:
        yield f"  torch's threads exceed the cores; set OMP_NUM_THREADS={cores}"
    if run:
        needed = (2 * _ROWS + 6 * _NUM_FEATURES * _BATCH) * 4 * dim  # rows, optimizer states, copies of a batch
        if needed > _available() / 2:
            raise ConfigError(
                f"--dim {dim}: the short run needs about {needed / 2**30:.1f} GiB, and {_available() / 2**30:.1f} GiB "
                "are available; use a smaller --dim, or --no-run"
            )
        yield from _slow_threads()
        yield from _short_run(dim)


def examine_data(
    paths: Sequence[str],
    ids: Sequence[str],
    *,
    batch_size: int,
    num_batches: int,
    max_bad_rows: int = 0,
    split: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Yield the reuse of each feature, and advice.

    ids: the features' columns; none: the files are Criteo's logs.
    split: the character between the ids in each text of a column; empty: each text is one id. The default is inferred.
    """
    check_integer("doctor", "--batches", num_batches, _LEAST_BATCHES, 2**31)
    check_integer("doctor", "--max-bad-rows", max_bad_rows, 0, 2**63 - 1)
    if others := set(split or ()).difference(ids):
        raise ConfigError(f"doctor --split: found {min(others)!r}; expected a column that --ids names")
    source = infer_source(list(paths)) if ids else _criteo(paths)
    source = source.replace(batch_size=batch_size, max_bad_rows=max_bad_rows)
    try:
        if ids:
            profiles = _profiles(source, ids, split or {})
            source = _with_lists(source, profiles)
            for profile in profiles:
                if described := described_lists(profile):
                    yield f"({profile.name} has {described})"
                yield from list_hint(profile)
        reuses = _reuses(source, tuple(ids or CRITEO_IDS), batch_size, num_batches)
    except SourceError as error:
        hint = "" if ids else "; without --ids, FILES are Criteo's click logs: for others, name the columns of ids"
        raise SourceError(in_options(str(error)) + hint) from error
    lags = ", ".join(map(str, LAGS))
    yield f"Share of a batch's distinct ids that the last {lags} batches of {batch_size} contained;"
    yield "alpha is the share of samples with the most frequent id. An id in 1 % of the samples is hot."
    header = [f"last {lag}" for lag in LAGS] + [f"hot {LAGS[1]}", f"cold {LAGS[1]}"]
    yield f"{'feature':20} {'ids':>9} {'alpha':>6} {' '.join(f'{name:>8}' for name in header)}"
    for reuse in reuses:
        shares = [*reuse.shares, reuse.hot[1], reuse.cold[1]]
        texts = ("-" if math.isnan(share) else f"{100 * share:.0f} %" for share in shares)
        yield f"{reuse.feature:20} {reuse.num_ids:9,} {reuse.alpha:6.2f} {' '.join(f'{text:>8}' for text in texts)}"
    yield from _advice(reuses)


def _profiles(source: FileSource, ids: Sequence[str], split: Mapping[str, str]) -> list[ColumnProfile]:
    """Return the profiles of those of these columns that the files have."""
    available, is_typed = column_names(source), not isinstance(source, CSV)
    names = [name for name in ids if name in available]
    rows = sample_rows(source, names, _SAMPLED_ROWS) if names else {}
    profiles = [profile_column(name, rows[name], is_typed=is_typed, separator=split.get(name)) for name in names]
    for profile in profiles:
        if profile.name in split:
            require_lists(profile)
    return profiles


def _with_lists(source: FileSource, profiles: Sequence[ColumnProfile]) -> FileSource:
    """Return the source with the separators of the columns that list ids."""
    known = {profile.name: profile.sure_lists for profile in profiles}
    ids = {name: IdColumn(separator=lists.separator) for name, lists in known.items() if lists is not None}
    strips = isinstance(source, CSV) and any(lists.has_blanks for lists in known.values() if lists is not None)
    return source.replace(ids=ids, **({"strip": True} if strips else {}))


def _criteo(paths: Sequence[str]) -> FileSource:
    """Return the files as Criteo's, which have no header; ConfigError if these have the names of their columns."""
    file = find_files(list(paths))[0]
    try:
        names = column_names(infer_source(list(paths)))
    except SourceError:
        return Criteo(path=list(paths), dense=())
    raise ConfigError(
        f"{file.name} has the columns {', '.join(names)}; name the columns of ids, such as --ids user item: without "
        "--ids, FILES are Criteo's click logs"
    )


def _reuses(source: FileSource, ids: tuple[str, ...], size: int, num_batches: int) -> list[Reuse]:
    """Return the reuse of each feature in at most so many whole batches. size: samples of a batch."""
    sizes: list[int] = []
    with closing(source.batches(ids)) as batches, StatusLine() as line:

        def whole() -> Iterator[Inputs]:
            for batch in line.track(islice(batches, num_batches), "reading batches", num_batches):
                sizes.append(batch.batch_size)
                if batch.batch_size == size:
                    yield batch

        reuses = measure_reuse(whole())
    if (num_whole := sizes.count(size)) < _LEAST_BATCHES:
        fitting = sum(sizes) // _LEAST_BATCHES
        advice = f"use --batch-size {fitting} or smaller, or more data" if fitting else "use more data"
        raise ConfigError(
            f"{source.path[0]}: found {sum(sizes):,} rows, {num_whole} batches of {size:,}; expected at least "
            f"{_LEAST_BATCHES} batches: {advice}"
        )
    if not any(reuse.num_ids for reuse in reuses):
        raise ConfigError(f"{source.path[0]}: found no ids in {', '.join(ids)}; name other columns with --ids")
    return reuses


def _advice(tables: Sequence[Reuse]) -> Iterator[str]:
    """Yield what docs/theory.md advises for this data."""
    hottest = max(tables, key=lambda reuse: reuse.alpha)
    if hottest.alpha >= 0.5:
        yield (
            f"advice  {hottest.feature!r} has an id in {100 * hottest.alpha:.0f} % of the samples: late rows may cost "
            "as much as late dense parameters. Use Adagrad or RowWiseAdagrad, and compare staleness 0 with 4 once."
        )
    else:
        times = hottest.alpha**-0.5
        yield (
            f"advice  no id is in more than {100 * hottest.alpha:.1f} % of the samples: by the bound, rows permit "
            f"{times:.1f} times the delay that dense parameters do. Start at staleness 4."
        )
    yield "        Tune the learning rate at the staleness with which you will train (docs/theory.md)."


def _gpus() -> Iterator[str]:
    """Yield what rows and dense networks on GPUs need; one line if there is none."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        yield f"GPU          none found; torch {torch.__version__} {built}"
        return
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield f"GPU          cuda:{number} {name}, {total / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB free"
    yield f"home         {_available() / 2**30:.1f} GiB here for rows that do not fit on a GPU, with device_memory="
    triton, missing = _version("triton"), "not installed; rows on a GPU need it: pip install triton"
    yield f"Triton       {missing if triton == 'not installed' else triton}"
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else ""
    yield f"NCCL         {version or 'not in this torch; several trainers with a GPU each need it'}"


def _slow_threads() -> Iterator[str]:
    """Yield a line if torch computes a dense layer on all its threads slower than on one."""
    import torch

    num_threads = torch.get_num_threads()
    layer, rows = torch.nn.Linear(256, 256), torch.zeros(_BATCH, 256)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        layer(rows)
        start = time.perf_counter()
        for _ in range(_STEPS):
            layer(rows).sum().backward()
        return time.perf_counter() - start

    try:
        ratio = seconds(num_threads) / seconds(1)
    finally:
        torch.set_num_threads(num_threads)
    if num_threads > 1 and ratio > 1.1:
        yield (
            f"threads      {num_threads} threads of torch took {ratio:.1f} times as long as one for a dense layer: "
            "OMP_NUM_THREADS=1 may be faster"
        )


def _short_run(dim: int) -> Iterator[str]:
    """Train a DLRM for a few steps on random ids, and yield the time of each stage."""
    import torch

    from satrap.models import DLRM
    from satrap.train.embeddings import Embeddings

    tables = {f"f{i}": Table(f"f{i}", dim=dim) for i in range(_NUM_FEATURES)}
    embeddings = Embeddings(tables)
    model = DLRM(13, embeddings)
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters()))
    rng = np.random.default_rng(0)
    batches = [
        Inputs(
            names=embeddings.features.names,
            values=rng.integers(0, _ROWS // _NUM_FEATURES, _NUM_FEATURES * _BATCH, dtype=np.uint64),
            batch_size=_BATCH,
            dense=rng.standard_normal((_BATCH, 13)).astype(np.float32),
            label=rng.integers(0, 2, _BATCH).astype(np.float32),
        )
        for _ in range(_STEPS)
    ]
    with StatusLine() as line:
        for number in range(2):  # the first pass creates the rows and warms the caches
            seconds = {"forward and backward": 0.0, "dense optimizer": 0.0}
            run_start = time.perf_counter()
            with embeddings.stream(batches, overlap=False) as stream:
                for step, batch in enumerate(stream, number * _STEPS):
                    line.show("timing a short training run", step, 2 * _STEPS)
                    start = time.perf_counter()
                    loss = torch.nn.functional.binary_cross_entropy_with_logits(
                        model(batch.dense, batch.embeddings), batch.label
                    )
                    optimizer.zero_grad()
                    loss.backward()
                    middle = time.perf_counter()
                    seconds["forward and backward"] += middle - start
                    before = stream.counters().stages["update"]
                    optimizer.step()
                    update = stream.counters().stages["update"] - before
                    seconds["dense optimizer"] += time.perf_counter() - middle - update
                seconds |= {name: spent for name, spent in stream.counters().stages.items() if name != "wait"}
            total = time.perf_counter() - run_start
    yield (
        f"short run    {_STEPS * _BATCH / total:,.0f} samples/s: DLRM, {_NUM_FEATURES} features of dim {dim}, "
        f"batches of {_BATCH}, ids in memory"
    )
    for stage, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        yield f"  {stage:22} {1000 * spent / _STEPS:7.1f} ms a step {100 * spent / total:5.0f} %"
    yield f"bottleneck   {max(seconds, key=lambda stage: seconds[stage])}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _available() -> int:
    used, allowed = memory()["machine"]
    return allowed - used


def _huge_pages() -> str:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            text = file.read()
    except OSError:
        return "not supported by this kernel"
    chosen = text.partition("[")[2].partition("]")[0]
    return "never (large tables will be slower)" if chosen == "never" else chosen
