"""Texts that list ids: `satrap train` and `satrap doctor` split them and no other text, and say what is in doubt."""

import random
import re
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from child_processes import SATRAP
from satrap.cli.main import main
from satrap.cli.train_plan import ColumnPlan, Overrides, plan_columns
from satrap.data.column_profile import profile_column
from train_files import METRICS, clicks, error_of, rows_of, run, write

NUM_ROWS = 1500
Maker = Callable[[random.Random], str]
TAGS = [f"tag {number}" for number in range(40)]
WORDS = [chr(97 + number // 26) + chr(97 + number % 26) + "ing" for number in range(676)]


def drawn_list(draw: random.Random) -> list[str]:
    return draw.sample(TAGS, draw.randrange(1, 5))


def plan_of(texts: list[Any], *, is_typed: bool = False, **overrides: Any) -> ColumnPlan:
    columns = {"y": pa.array(["0", "1"] * (len(texts) // 2)), "x": pa.array(texts), "z": pa.array(["p"] * len(texts))}
    columns["z"] = pa.array(["p", "q", "r", "s", "t"] * (len(texts) // 5))
    split = overrides.get("split", {})
    how: dict[str, Any] = {"is_typed": is_typed}
    profiles = [profile_column(name, array, separator=split.get(name), **how) for name, array in columns.items()]
    return plan_columns(profiles, Overrides(label="y", **overrides))


@given(st.integers(0, 2**32), st.sampled_from("|;,"), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_many_texts_of_few_parts_are_lists(seed: int, separator: str, is_typed: bool, missing: float) -> None:
    draw = random.Random(seed)
    lists = [[] if draw.random() < missing else drawn_list(draw) for _ in range(NUM_ROWS)]
    texts = [separator.join(tags) or None for tags in lists]
    plan = plan_of(texts, is_typed=is_typed)
    num_ids = len({tag for tags in lists for tag in tags})
    (column,) = [column for column in plan.columns if column.profile.name == "x"]
    assert (column.use, column.why) == ("id", f"{num_ids} ids separated by {separator!r}; dim 16")
    (feature,) = column.features
    assert (feature.name, feature.is_bag, feature.option) == ("x", True, f'separator="{separator}"')
    assert not list(plan.hints())
    whole = plan_of(texts, is_typed=is_typed, split={"x": ""}, ids=("x",))
    assert [(feature.is_bag, feature.option) for feature in whole.features] == [(False, "")] * 2
    assert next(column.why for column in whole.columns if column.profile.name == "x").startswith("by --ids; dim")


@pytest.mark.parametrize("separator", ["|", " "])
def test_long_lists_of_which_no_two_are_equal_are_lists(separator: str) -> None:
    draw = random.Random(1)
    texts = [separator.join(f"n{draw.randrange(NUM_ROWS)}" for _ in range(draw.randrange(5, 40))) for _ in range(1500)]
    assert len(set(texts)) == len(texts)
    (feature, _) = plan_of(texts).features
    assert feature.option == f'separator="{separator}"'


def test_blanks_around_ids_are_stripped_where_the_source_does_so() -> None:
    draw = random.Random(2)
    texts = [", ".join(drawn_list(draw)) for _ in range(NUM_ROWS)]
    plan = plan_of(texts)
    assert plan.columns[1].why == "40 ids separated by ','; dim 16" and plan.columns[1].profile.has_blanks
    typed = plan_of(texts, is_typed=True)
    assert not typed.features[0].is_bag and "texts made of 80 parts, separated by ','" in next(typed.hints())


ONE_ID: dict[str, Maker] = {
    "names": lambda draw: f"{draw.choice(TAGS)}{draw.randrange(400)}",
    "unique": lambda draw: f"{draw.getrandbits(64):x}|{draw.getrandbits(64):x}",
    "prose": lambda draw: " ".join(draw.choices(WORDS, k=draw.randrange(5, 9))),
    "sentences": lambda draw: ", ".join(
        " ".join(draw.choices(WORDS, k=draw.randrange(2, 9))) for _ in range(draw.randrange(1, 4))
    ),
    "people": lambda draw: f"name{draw.randrange(60)}, {draw.choice(WORDS[:30])}",
    "cities": lambda draw: f"city {draw.randrange(800)}, land {draw.randrange(20)}",
    "times": lambda draw: f"{draw.randrange(1, 13):02}/{draw.randrange(1, 29):02}/2026 {draw.randrange(24):02}:30",
    "decimal commas": lambda draw: f"{draw.randrange(90)},{draw.randrange(90)}" if draw.random() < 0.8 else "7",
    "grouped": lambda draw: f"{draw.randrange(10**8):,}",
    "grouped by blanks": lambda draw: f"{draw.randrange(10**8):,}".replace(",", " "),
    "python": lambda draw: str(drawn_list(draw)),
    "codes": lambda draw: f"{draw.choice('ABC')} {draw.randrange(200)}",
    "few": lambda draw: draw.choice(["a|b", "a", "b|c", "c"]),
}


@pytest.mark.parametrize("kind", ONE_ID)
@pytest.mark.parametrize("is_typed", [False, True])
def test_other_texts_are_not_split(kind: str, is_typed: bool, rng: np.random.Generator) -> None:
    draw = random.Random(int(rng.integers(2**32)))
    plan = plan_of([ONE_ID[kind](draw) for _ in range(NUM_ROWS)], is_typed=is_typed)
    assert not any(feature.is_bag for feature in plan.features) and not list(plan.hints())


DOUBTFUL: dict[str, tuple[Maker, str]] = {
    "words": (lambda draw: " ".join(draw.sample(WORDS[:16], draw.randrange(1, 4))), " "),
    "keys": (lambda draw: f"{draw.choice('ABC')}|{draw.choice('xyz')}|{draw.randrange(20)}", "|"),
    "some of many": (lambda draw: ",".join(f"c{draw.randrange(200)}" for _ in range(draw.randrange(1, 4))), ","),
}


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_a_doubt_is_said_and_an_option_decides(kind: str) -> None:
    draw, (maker, separator) = random.Random(3), DOUBTFUL[kind]
    texts = [maker(draw) for _ in range(NUM_ROWS)]
    num_ids = len({part for text in texts for part in text.split(separator)})
    plan = plan_of(texts)
    assert not any(feature.is_bag for feature in plan.features)
    option = f"x={separator}" if separator == "," else f"'x={separator}'"
    assert list(plan.hints()) == [
        f"(x has {len(set(texts)):,} texts made of {num_ids} parts, separated by {separator!r}; for an embedding of "
        f"each part instead of each text: --split {option})"
    ]
    decided = plan_of(texts, split={"x": separator})
    assert decided.columns[1].why == f"{num_ids} ids separated by {separator!r}; dim 16" and not list(decided.hints())
    assert not list(plan_of(texts, split={"x": ""}).hints()) and not list(plan_of(texts, ignore=("x",)).hints())


def table_with_lists(num_rows: int = 1000) -> tuple[pa.Table, pa.Table]:
    """Return the same rows with tags as texts and as lists."""
    draw = random.Random(4)
    lists = [drawn_list(draw) if draw.random() < 0.8 else [] for _ in range(num_rows)]
    table = clicks(num_rows).drop_columns(["day"])
    texts = table.append_column("tags", pa.array(["|".join(tags) for tags in lists]))
    return texts, table.append_column("tags", pa.array(lists, pa.large_list(pa.string())))


def test_the_script_reads_the_ids_of_a_list_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts, lists = table_with_lists()
    bags, reuse = [], []
    for name, suffix, table in (("text", "csv", texts), ("typed", "parquet", texts), ("lists", "parquet", lists)):
        path = write(tmp_path, suffix, table, name)
        assert main(["train", path.name, "--script", f"{name}.py"]) == 0
        shown = capsys.readouterr().out
        is_split = re.search(r"^tags +text +\d+ +(20 %)? +id +40 ids separated by '\|'; dim 16$", shown, re.MULTILINE)
        assert bool(is_split) == (name != "lists"), shown
        script: dict[str, Any] = {"__name__": "script"}
        exec(compile(Path(f"{name}.py").read_text(), f"{name}.py", "exec"), script)
        assert script["BAGS"] == ["tags"]
        with closing(script["source"]().batches(["tags"])) as batches:
            bags.append([[part.tolist() for part in batch.bags("tags")] for batch in batches])
        assert main(["doctor", path.name, "--ids", "tags", "item", "--batch-size", "50"]) == 0
        shown = capsys.readouterr().out
        assert ("(tags has 40 ids separated by '|')\n" in shown) == (name != "lists")
        reuse.append(re.findall(r"^(?:tags|item) .*", shown, re.MULTILINE))
    assert bags[0] == bags[1] == bags[2] and reuse[0] == reuse[1] == reuse[2]
    assert reuse[0][0].split()[:2] == ["tags", "40"]
    split = ["--split", "tags="]
    assert main(["doctor", "text.csv", "--ids", "tags", *split, "--batch-size", "50"]) == 0
    assert int(re.findall(r"^tags +(\d+)", capsys.readouterr().out, re.MULTILINE)[0]) > 300


def test_the_command_and_its_script_give_the_same_bits_with_lists(tmp_path: Path) -> None:
    write(tmp_path, "csv", table_with_lists()[0])
    options = ("--epochs", "1", "--split", "item= ")
    output = run(tmp_path, SATRAP, "train", "clicks.csv", *options)
    assert "26 ids separated by ' '" in output and len(METRICS.findall(output)) == 2
    run(tmp_path, SATRAP, "train", "clicks.csv", *options, "--script", "mine.py", "--out", "mine")
    assert METRICS.findall(run(tmp_path, sys.executable, "mine.py")) == METRICS.findall(output)
    assert rows_of(tmp_path / "mine") == rows_of(tmp_path / "run")
    assert len(rows_of(tmp_path / "run")["item"]) == 26


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "item"], "--split: found 'item'; expected COLUMN= and one ASCII character, such as tags='|'"),
        (["--split", "item=ab"], "--split: found 'item=ab'; expected COLUMN= and one"),
        (["--split", "=|"], "--split: found '=|'; expected COLUMN="),
        (["--split", "itme=|"], "--split: there is no column 'itme'; the nearest known one is 'item'"),
        (["--split", "user_id=|"], "--split: column 'user_id' is of kind 'integer'; expected text that lists ids"),
        (["--split", "item=|", "--ignore", "item"], "column 'item' is named by --ignore and by --split"),
    ],
)
def test_splits_that_cannot_be_made(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "csv", clicks(100))
    assert message in error_of(capsys, path, "--out", tmp_path / "run", *arguments)
    if "there is no" in message:
        assert main(["doctor", str(path), "--ids", "item", *arguments]) == 1
        assert "doctor --split: found 'itme'; expected a column that --ids names" in capsys.readouterr().err
        assert main(["doctor", *arguments]) == 1
        assert "doctor --split without FILES" in capsys.readouterr().err
