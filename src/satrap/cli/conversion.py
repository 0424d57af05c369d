"""The command that `satrap train` prints to convert text to Parquet, which has types for dates and decimal commas.

Pure but for the names of the files. All other columns keep their use: what is missing in the text is null in Parquet,
and text stays text, which 007 or 12:30 would not be if pyarrow inferred the types.
"""

import json
import shlex
from collections.abc import Iterator, Sequence

from satrap.cli.train_plan import TEXT_TIME, ColumnPlan, decimal_commas, parts_of_time
from satrap.data.column_profile import ColumnProfile
from satrap.data.delimited import CSV
from satrap.data.file_source import find_files

_DAY_FIRST = ("%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S")


def conversion_lines(plan: ColumnPlan, source: CSV, missing: Sequence[str]) -> Iterator[str]:
    """Yield what a conversion is good for, then its command alone on a line; nothing if the file has neither times as
    text nor decimal commas. missing: further texts that stand for a missing value, beside the plan's."""
    times = [column.profile for column in plan.columns if column.why.startswith(TEXT_TIME)]
    for profile in times:
        parts = [*parts_of_time(profile)]
        ids = " and its ".join(parts) + (" are ids" if len(parts) > 1 else " is an id")
        yield f"({profile.name} holds times as text; from a Parquet file, its {ids})"
    commas = dict(decimal_commas(plan))
    for name, number in commas.items():
        yield f"({name} is text, since it has decimal commas as in {number!r}; from a Parquet file, it is numbers)"
    if not times and not commas:
        return
    profiles = [column.profile for column in plan.columns]
    words = {"", *missing}.union(*(profile.missing_texts for profile in profiles))
    if any(profile.has_blanks for profile in profiles):
        words |= {f" {word}" for word in words}
    options = f"strings_can_be_null=True, null_values={_code(sorted(words))}"
    types = {profile.name: _type(profile) for profile in profiles if profile.name not in commas and _type(profile)}
    if types:
        options += f", column_types={_code(types)}"
    if commas:
        options += ', decimal_point=","'
    if any(profile.is_day_first for profile in times):
        options += f", timestamp_parsers=[csv.ISO8601, {_code(_DAY_FIRST)[1:]}"
    files = find_files(source.path, source.filesystem)
    parsing = f"parse_options=csv.ParseOptions(delimiter={_code(source.delimiter)})"
    if source.max_bad_rows:  # with threads, one run in thirty aborts at exit: a thread of pyarrow still has the lambda
        parsing = (
            f'{parsing[:-1]}, invalid_row_handler=lambda row: "skip"), read_options=csv.ReadOptions(use_threads=False)'
        )
    table = f"csv.read_csv({_code(files[0].name)}, {parsing}, convert_options=csv.ConvertOptions({options}))"
    code = f"from pyarrow import csv, parquet; parquet.write_table({table}, {_code(files[0].name + '.parquet')})"
    yield f"to convert {'the file' if len(files) == 1 else 'each file, here the first,'} to Parquet:"
    yield shlex.join(["python", "-c", code])


def _type(profile: ColumnProfile) -> str:
    """Return the Arrow type of a column that pyarrow might infer wrongly, otherwise an empty text."""
    if profile.kind == "integer" and profile.least >= 0 and profile.most >= 2**63:
        return "uint64"
    return "string" if profile.kind == "text" else ""


def _code(value: str | Sequence[str] | dict[str, str]) -> str:
    """Return Python code in double quotes, since the shell's are single."""
    return json.dumps(value, ensure_ascii=False)
