"""`satrap train`: infers what the columns of a file mean, writes a training script by it, and runs the script.

    file -> inferred_source -> column_profile -> train_plan -> train_script -> RUN/train.py -> a process that runs it

The script is all that trains, so the command and the script give the same bits.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from satrap.cli.conversion import conversion_lines
from satrap.cli.options import Commands, add_names, add_number, add_path, add_split, in_options, separators_in
from satrap.cli.train_plan import (
    LABEL_NAMES,
    ColumnPlan,
    LabelPlan,
    Overrides,
    missing_words,
    plan_columns,
)
from satrap.cli.train_script import ScriptSettings, write_script
from satrap.config.location import GLOB_CHARACTER, Location
from satrap.config.validation import check_integer
from satrap.data.column_profile import ColumnProfile, clean_values, labels_of, profile_column, reveals_label, value_at
from satrap.data.delimited import CSV
from satrap.data.inferred_source import column_names, infer_source, sample_rows
from satrap.data.source import FileSource
from satrap.errors import ConfigError, InputError, SourceError

_SAMPLED_ROWS = 200_000
_HELD_OUT = 0.1
_LEAST_EPOCHS, _MOST_EPOCHS = 3, 20
_ROWS_TRAINED = 2_000_000
"""By default training reads about this many rows, but the data at least three and at most twenty times."""
_BATCHES = ((20_000, 64), (100_000, 256))
"""Pairs: with fewer rows than the first number, the second is the default number of samples in a batch."""
_LARGEST_BATCH = 512
_ROWS_COUNTED = 10_000
"""With fewer rows, the samples for training, validation and the test are counted before a script is written."""
_ROWS_AT_ONCE = 8192
"""Rows in a batch when a file is read only to count its rows."""


def add_train(commands: Commands) -> None:
    """Declare the command."""
    train = commands.add_parser(
        "train",
        help="train a model on a file, without code",
        usage="satrap train FILES [options]",
        description="Train a model that predicts a column of two values. The use of every column is inferred from its "
        "values and shown as a table; a script is written and run: it trains a DCN, and a logistic regression to "
        "compare, until their log loss on samples for validation stops falling, and prints the AUC and log loss of "
        "both on held-out samples. The folder of the run gets the script, train.py, which you can edit and run, "
        "checkpoints, and a report. Under `satrap run` the script trains the DCN only.",
        epilog="Example: satrap train clicks.parquet --label label --ignore C3",
    )
    train.add_argument(
        "files",
        nargs="+",
        metavar="FILES",
        help="files, folders, globs or URLs: .parquet or .pq; .arrow, .arrows, .feather or .ipc; or text that begins "
        "with a line of the names of the columns: .csv, .tsv, .tab, .txt or .psv, also compressed: .csv.gz, .csv.bz2, "
        ".csv.zst, .csv.lz4",
    )
    train.add_argument(
        "--label",
        metavar="COLUMN",
        help=f"column to predict, of two values (default: the only column named {', '.join(LABEL_NAMES)})",
    )
    for option, what in (
        ("--ids", "whose values get embeddings"),
        ("--numbers", "of numbers for the dense network"),
        ("--ignore", "to leave out, such as those that are known only after the label"),
    ):
        add_names(train, option, f"columns {what} (default: inferred)", metavar="COLUMN")
    add_split(train)
    add_names(
        train,
        "--missing",
        "words of text files that stand for a missing value, besides NA, null, ? and similar ones, and besides those "
        "inferred: the few words in columns of numbers",
        metavar="WORD",
    )
    held_out = train.add_mutually_exclusive_group()
    held_out.add_argument(
        "--test", metavar="FILES", help="files or URL to test on, as FILES (default: a random tenth of FILES)"
    )
    after = "hold out the tenth with the largest values of COLUMN, such as a day"
    held_out.add_argument("--test-after", metavar="COLUMN", help=after)
    for option, what in (
        ("--dim", "dim of the embeddings (default: 4 to 16, by the number of ids)"),
        ("--epochs", "most passes over the data (default: 3 to 20, by the number of rows)"),
        ("--batch-size", "samples of a batch (default: 64 to 512, by the number of rows)"),
    ):
        add_number(train, option, what)
    add_number(train, "--max-bad-rows", "malformed rows that are left out in each pass, before one is an error", 0)
    add_number(train, "--staleness", "steps whose updates a lookup may miss", 0)
    add_number(train, "--seed", "seed of all random numbers", 0)
    add_path(train, "--out", "folder of the run", "run", metavar="DIR")
    add_path(train, "--script", "write the script to this file and train nothing")


def train_model(options: argparse.Namespace) -> Iterator[str]:
    """Carry out the command; yield what it prints besides the output of the script."""
    _check_options(options)
    path = options.files[0] if len(options.files) == 1 else list(options.files)
    try:
        source = infer_source(path).replace(seed=options.seed, max_bad_rows=options.max_bad_rows)
        plan, settings, num_sampled = _infer(source, path, options)
    except SourceError as error:
        raise SourceError(in_options(str(error))) from error
    yield from plan.lines()
    yield f"(inferred from {num_sampled:,} rows; to correct a column: --label, --ids, --numbers, --ignore, --split)"
    yield from plan.hints()
    if isinstance(source, CSV):
        yield from conversion_lines(plan, source, settings.missing)
    script = options.script or options.out / "train.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(write_script(plan, settings))
    command = shlex.join(["python", str(script)])
    if options.script is not None:
        on_servers = shlex.join(["satrap", "run", str(script), *_outside(script, options)])
        yield f"{script}: written; run it with: {command} (on servers: {on_servers})"
        return
    yield f"{script}: written, and running: a DCN, then a logistic regression"
    passes = "1 pass" if settings.epochs == 1 else f"{settings.epochs} passes"
    yield f"each: at most {passes}, until 2 evaluations in a row have no lower log loss"
    status = subprocess.run([sys.executable, str(script)], check=False).returncode
    if status != 0:
        raise InputError(
            f"{script} ended with status {status}; its error is above, and what it asks to set is set in the script: "
            f"edit it; to run it again: {command}"
        )
    from satrap.cli.report import write_report

    yield write_report(options.out, None)


def _check_options(options: argparse.Namespace) -> None:
    for name, low, high in (
        ("dim", 1, 65536),
        ("epochs", 1, 2**31),
        ("batch_size", 1, 2**30 - 1),
        ("max_bad_rows", 0, 2**63 - 1),
        ("staleness", 0, 2**31),
        ("seed", 0, 2**63 - 1),
    ):
        value = getattr(options, name)
        if value is not None:
            check_integer("train", f"--{name.replace('_', '-')}", value, low, high)
    for path in (*options.files, *([options.test] if options.test else [])):
        Location.parse(path, "the path")
    if options.script is not None and options.script.exists():
        raise ConfigError(f"--script: {options.script} exists; expected a new file: name another, or remove it")


def _require_new_folder(options: argparse.Namespace) -> None:
    out, script = options.out, options.out / "train.py"
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    is_same = script.is_file() and all(f'"{file}"' in script.read_text() for file in options.files)
    resume = f", or continue its run: {shlex.join(['python', str(script)])}" if is_same else ""
    raise ConfigError(
        f"the folder {out} (--out) exists and is not empty; expected a new one: name another with --out{resume}"
    )


def _outside(script: Path, options: argparse.Namespace) -> list[str]:
    """Return the options of `satrap run` that let workers read data outside the script's folder."""
    folders: dict[str, None] = {}
    for path in (*options.files, *([options.test] if options.test else [])):
        base = GLOB_CHARACTER.split(path, maxsplit=1)[0]
        folder = base if os.path.isdir(base) else os.path.dirname(base) or "."
        is_url = bool(Location.parse(path).scheme)
        if is_url or not Path(folder).resolve().is_relative_to(script.parent.resolve()):
            folders[folder] = None
    return [word for folder in folders for word in ("--data", folder)]


def _infer(source: FileSource, path: Any, options: argparse.Namespace) -> tuple[ColumnPlan, ScriptSettings, int]:
    """Return the plan of the columns, the settings of the script, and the number of rows they were inferred from."""
    names = column_names(source)
    rows = sample_rows(source, names, _SAMPLED_ROWS)
    is_typed = not isinstance(source, CSV)
    overrides = Overrides(
        label=options.label,
        ids=tuple(options.ids),
        numbers=tuple(options.numbers),
        ignore=tuple(options.ignore),
        split=separators_in(options.split),
        dim=options.dim,
        split_by=options.test_after,
    )
    if is_typed and options.missing:
        raise ConfigError(
            f"--missing: words stand for missing values in text files, and {source.path} is {type(source).__name__}, "
            "which has nulls: leave it out"
        )

    def profiles_with(missing: Collection[str]) -> list[ColumnProfile]:
        how: dict[str, Any] = {"is_typed": is_typed, "missing": missing}
        return [profile_column(name, rows[name], separator=overrides.split.get(name), **how) for name in names]

    profiles = profiles_with(options.missing)
    if words := missing_words(profiles, overrides):
        words |= frozenset(options.missing)
        profiles = profiles_with(words)
    if not is_typed:
        missing = frozenset(options.missing) | words
        rows = {name: clean_values(rows[name], is_typed=False, missing=missing).array for name in names}
    plan = plan_columns(profiles, overrides)
    _refuse_leaks(plan, rows, is_typed)
    _require_new_folder(options)
    tested = () if options.test is None else _tested_columns(source, plan, options)
    num_sampled = len(rows[names[0]])
    num_rows = num_sampled if num_sampled < _SAMPLED_ROWS else _count_rows(source, names[0])
    epochs = min(_MOST_EPOCHS, max(_LEAST_EPOCHS, round(_ROWS_TRAINED / num_rows)))
    batch_size = next((size for limit, size in _BATCHES if num_rows < limit), _LARGEST_BATCH)
    batch_size = options.batch_size or batch_size
    settings = ScriptSettings(
        path=path,
        kind=type(source).__name__,
        delimiter=source.delimiter if isinstance(source, CSV) else None,
        missing=tuple(sorted({*options.missing}.union(*(profile.missing_texts for profile in tested)))),
        strip=any(profile.has_blanks for profile in (*plan.used, *tested)),
        parts=_parts(rows, path, is_typed, options),
        epochs=options.epochs or epochs,
        validate_steps=max(1, round(num_rows * (1 - 2 * _HELD_OUT) / batch_size)),
        batch_size=batch_size,
        max_bad_rows=options.max_bad_rows,
        staleness=options.staleness,
        seed=options.seed,
        out=str(options.out),
        checked=next((path for path in options.files if not Path(path).is_absolute() and Path(path).exists()), None),
    )
    if num_rows < _ROWS_COUNTED:
        _check_parts(source, plan, settings)
    return plan, settings, num_sampled


def _check_parts(source: FileSource, plan: ColumnPlan, settings: ScriptSettings) -> None:
    """Raise if no sample is left for training, validation or the test, as in a file of few rows."""
    sizes, label = {}, plan.label.column
    options: dict[str, Any] = {"is_typed": not isinstance(source, CSV), "missing": plan.missing_texts}
    for name, part in zip(("training", "validation", "test"), settings.parts, strict=True):
        reader = source.replace(batch_size=_ROWS_AT_ONCE, extra=(label,), **part)
        with closing(reader.batches(())) as batches:
            values = [clean_values(batch.extra[label], **options).array for batch in batches]
        sizes[name] = sum(len(array) - array.null_count for array in values)
    if 0 in sizes.values():
        shown = ", ".join(f"{size} for {name}" for name, size in sizes.items())
        raise InputError(
            f"{source.path}: found {shown} among the rows with a label; expected at least 1 for each: give more rows, "
            "such as 100"
        )


def _count_rows(source: FileSource, column: str) -> int:
    """Return the number of rows; a file that does not say it is read once."""
    try:
        return len(source.replace(batch_size=1).batches(()))
    except TypeError:
        with closing(source.replace(batch_size=_ROWS_AT_ONCE, extra=(column,)).batches(())) as batches:
            return sum(batch.batch_size for batch in batches)


def _tested_columns(source: FileSource, plan: ColumnPlan, options: argparse.Namespace) -> list[ColumnProfile]:
    """Return the columns of the file to test on that are used. Raise if the file has another format than the training
    data, lacks a column or has no rows, or if it has other labels or no numbers where training has numbers."""
    test = options.test
    other = infer_source(test).replace(seed=options.seed, max_bad_rows=options.max_bad_rows)
    if type(other) is not type(source) or getattr(other, "delimiter", None) != getattr(source, "delimiter", None):
        raise InputError(f"--test: {test} is of another format than {source.path}; expected the same format")
    names, available = [profile.name for profile in plan.used], column_names(other)
    if absent := [name for name in names if name not in available]:
        raise InputError(f"--test: {test} has no column {absent[0]!r}; expected the columns of {source.path}")
    rows = sample_rows(other, names, _SAMPLED_ROWS)
    words = plan.missing_texts.union(options.missing)
    is_typed = not isinstance(source, CSV)
    profiles = [
        profile_column(
            profile.name,
            rows[profile.name],
            is_typed=is_typed,
            missing=words,
            separator="" if profile.sure_lists is None else profile.sure_lists.separator,
        )
        for profile in plan.used
    ]
    numbers = [number.name for number in plan.numbers]
    for known, profile in zip(plan.used, profiles, strict=True):
        if profile.name == plan.label.column:
            _check_test_label(plan.label, known, profile, f"--test: {test}")
        elif profile.name in numbers and not profile.is_number and profile.kind != "empty":
            unread = () if profile.numbers is None else profile.numbers.words
            shown = (*unread, *profile.values, profile.kind)[0]
            raise InputError(
                f"--test: {test}: column {profile.name!r} holds {shown!r}; expected numbers, as in {source.path}: if "
                "it stands for a missing value, name it with --missing"
            )
    return profiles


def _check_test_label(label: LabelPlan, known: ColumnProfile, tested: ColumnProfile, where: str) -> None:
    """Raise if a label to test on is missing, or is not one of the labels of training."""
    expected = " or ".join(map(repr, sorted(known.values)))
    if tested.kind == "empty" or (tested.num_missing and not label.drops_missing):
        raise InputError(
            f"{where}: column {label.column!r} has no value in {tested.num_missing:,} of {tested.num_rows:,} rows; "
            f"expected a label in every row, {expected}"
        )
    if known.is_number and tested.is_number:
        others = {tested.least, tested.most} - {known.least, known.most} or tested.num_distinct > 2
    else:
        others = known.is_number or set(tested.values) - set(known.values)
    if others:
        values = sorted(tested.values)
        shown = ", ".join(map(repr, values[:5]))
        raise InputError(
            f"{where}: column {label.column!r} holds {shown}; expected {expected}, as in training: replace the labels "
            "of one file; or write the script without --test, by --script FILE, and there list the labels of both, "
            f"LabelColumn({label.column!r}, values={{{values[0]!r}: 0 or 1, ...}}), and name the test file"
        )


def _parts(
    rows: dict[str, Any], path: Any, is_typed: bool, options: argparse.Namespace
) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """Return the options of the source that select the samples for training, for validation and for the test."""
    begins = (round(1 - 2 * _HELD_OUT, 2), 1 - _HELD_OUT)
    earlier, later = {"share": (0.0, begins[1])}, {"share": (begins[1], 1.0)}
    if options.test is not None:
        return {"path": path} | earlier, {"path": path} | later, {"path": options.test}
    if options.test_after is None:
        return {"share": (0.0, begins[0])}, {"share": begins}, later
    column = options.test_after
    least, first, last = (value_at(rows[column], at, is_typed=is_typed) for at in (0.0, *begins))
    if least == last:
        raise InputError(
            f"--test-after: nine tenths of column {column!r} hold {least!r}, so no rows come before; expected a column "
            "that rises with time"
        )
    bound = (column, last)
    if first in (least, last):  # the rows before the test have too few values to be divided by them
        return earlier | {"before": bound}, later | {"before": bound}, {"since": bound}
    middle = (column, first)
    return {"before": middle}, {"since": middle, "before": bound}, {"since": bound}


def _refuse_leaks(plan: ColumnPlan, rows: dict[str, Any], is_typed: bool) -> None:
    """Raise if a column that would be used tells the label of every row."""
    label = plan.label
    labels = labels_of(rows[label.column], label.values, is_typed=is_typed, above=label.above or 0.0)
    used = [column.profile.name for column in plan.columns if column.use not in ("ignored", "label")]
    leaks = [name for name in used if reveals_label(rows[name], labels, is_typed=is_typed)]
    if leaks:
        raise InputError(
            f"column {leaks[0]!r} tells the label {label.column!r} in every row, so a model would learn nothing else; "
            f"expected columns that are known before the label: leave it out with --ignore {shlex.join(leaks)}"
        )
