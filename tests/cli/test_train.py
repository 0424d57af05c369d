"""`satrap train`: its script gives the same bits as the command, in every format; bad input is an error."""

import contextlib
import gzip
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

import satrap
from child_processes import SATRAP
from satrap.cli.main import main
from satrap.data.inferred_source import column_names, infer_source, sample_rows
from waiting import DEADLINE_SECONDS

FORMATS = ("parquet", "arrow", "csv", "tsv", "csv.gz", "txt")
METRICS = re.compile(
    r"^(DCN|logistic regression): AUC ([\d.]+), log loss ([\d.]+); ([\d,]+) steps, ([\d,]+) rows$", re.MULTILINE
)


def clicks(num_rows: int = 3000, seed: int = 0) -> pa.Table:
    """Users who like some items: what a logistic regression over users and items learns in part."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(0, 40, num_rows), draw.integers(0, 25, num_rows)
    price = draw.gamma(2.0, 10.0, num_rows).round(2) + 0.01
    logit = 1.5 * ((user % 5) - 2) + ((item % 3) - 1) - 0.02 * price
    return pa.table(
        {
            "user_id": user,
            "item": [f"item {each}" for each in item],
            "price": pa.array(price, mask=draw.random(num_rows) < 0.1),
            "day": np.arange(num_rows) // 100,
            "click": (draw.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(int),
        }
    )


def write(folder: Path, suffix: str, table: pa.Table, name: str = "clicks") -> Path:
    path = folder / f"{name}.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    elif suffix == "arrow":
        pyarrow.feather.write_feather(table, str(path), compression="uncompressed")
    else:
        delimiter = {"tsv": "\t", "txt": ";"}.get(suffix, ",")
        sink = pa.BufferOutputStream()
        pyarrow.csv.write_csv(table, sink, pyarrow.csv.WriteOptions(delimiter=delimiter))
        text = sink.getvalue().to_pybytes()
        path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    return path


def run(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(folder: Path) -> dict[str, dict[int, bytes]]:
    """Return the rows of all tables of the newest checkpoint, by id."""
    found = {}
    with satrap.Reader(folder / "checkpoint") as reader:
        for name, table in reader.tables.items():
            found[name] = {
                int(i): row.tobytes() for ids, rows in table.rows() for i, row in zip(ids, rows.values, strict=True)
            }
    return found


def test_the_command_and_its_script_give_the_same_bits(tmp_path: Path) -> None:
    write(tmp_path, "parquet", clicks())
    output = run(tmp_path, SATRAP, "train", "clicks.parquet", "--ignore", "day", "--epochs", "4")
    assert "and running: a DCN, then a logistic regression\neach: at most 4 passes, until 2 evaluations" in output
    metrics = METRICS.findall(output)
    assert [each[0] for each in metrics] == ["DCN", "logistic regression"]
    assert all(0.65 < float(each[1]) < 1 for each in metrics), output
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"train.py", "report.html", "checkpoint"}
    assert re.search(r"^user_id +integer +40 +id +by its name; dim 8$", output, re.MULTILINE)

    options = ("--ignore", "day", "--epochs", "4", "--script", "mine.py", "--out", "mine")
    assert "mine.py: written" in run(tmp_path, SATRAP, "train", "clicks.parquet", *options)
    assert not (tmp_path / "mine").exists()
    again = run(tmp_path, sys.executable, "mine.py")
    assert METRICS.findall(again) == metrics
    assert rows_of(tmp_path / "mine") == rows_of(tmp_path / "run")
    resumed = run(tmp_path, sys.executable, "run/train.py")
    assert METRICS.findall(resumed) == metrics, "a script that runs again returns to the best"


def test_the_first_number_of_each_embedding_is_a_weight_of_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The regression has such weights; without them the DCN finds the effects of ids later, and overfits first."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "parquet", clicks())
    assert main(["train", "clicks.parquet", "--ids", "day", "--script", "train.py"]) == 0
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(Path("train.py").read_text(), "train.py", "exec"), names)
    with names["embeddings_of"](names["IDS"], 0.1) as embeddings:
        net = names["Net"](lambda numbers, _: numbers.new_zeros(len(numbers)), embeddings, 0.0)
        parts = [torch.randn(3, dim) for dim in names["IDS"].values()]
        logits = net(torch.zeros(3, len(names["NUMBERS"])), torch.cat(parts, 1))
    torch.testing.assert_close(logits, sum(part[:, 0] for part in parts))


def test_training_stops_when_validation_gets_worse(tmp_path: Path) -> None:
    """Labels that are noise: a model that reads the same samples twenty times would only learn them by heart."""
    noise = np.random.default_rng(1).permutation(clicks(2000)["click"].to_numpy())
    write(tmp_path, "parquet", clicks(2000).set_column(4, "click", pa.array(noise)))
    output = run(tmp_path, SATRAP, "train", "clicks.parquet", "--ignore", "day")
    assert "epochs=20" in (tmp_path / "run/train.py").read_text()
    (_, _, dcn_loss, dcn_steps, _), _ = METRICS.findall(output)
    assert int(dcn_steps) < 10 * 25 and float(dcn_loss) < 0.72, output

    saved = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*.safetensors"))
    again = run(tmp_path, sys.executable, "run/train.py")
    assert METRICS.findall(again) == METRICS.findall(output) and again.count("had finished; to train it longer") == 2
    assert saved == sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*.safetensors"))
    record = (tmp_path / "run/records/trainer-0.jsonl").read_text()
    assert '"steps"' in record and '"steps"' not in record.rpartition('"start"')[2], "no step was trained again"
    (tmp_path / "run/finished").unlink()
    assert run(tmp_path, sys.executable, "run/train.py").count("had finished") == 1


def parts_of(script: Path, read: pa.Table) -> list[set[int]]:
    """Return the rows that a script trains, validates and tests on, by the column `number`."""
    text = script.read_text()
    calls = re.findall(r"^    (train|validate|test) = (source\((?:.|\n)*?\))$", text, re.MULTILINE)
    assert [name for name, _ in calls] == ["train", "validate", "test"]
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, str(script), "exec"), names)
    parts = []
    for _, call in calls:
        source = eval(call, names).replace(shuffle=False, epochs=1, extra=("number",))
        parts.append({int(number) for batch in source.batches(()) for number in batch.extra["number"].to_pylist()})
    assert set().union(*parts) <= set(range(len(read)))
    return parts


@pytest.mark.parametrize(
    "options", [[], ["--test-after", "day"], ["--test-after", "half"], ["--test", "later.parquet"]]
)
def test_training_validation_and_test_share_no_row(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = clicks().append_column("number", pa.array(range(3000))).append_column("half", pa.array([0, 1] * 1500))
    write(tmp_path, "parquet", table)
    write(tmp_path, "parquet", table, "later")
    assert main(["train", "clicks.parquet", "--ignore", "number", "--script", "train.py", *options]) == 0
    train, validate, test = parts_of(tmp_path / "train.py", table)
    assert train and validate and not train & validate
    if options[:1] == ["--test"]:
        assert train | validate == test == set(range(3000))
        return
    assert not (train | validate) & test and train | validate | test == set(range(3000))
    if options:
        assert max(train | validate) < min(test) or options[1] == "half"
    if options[1:] == ["day"]:
        assert max(train) < min(validate), "validation is later than training, as the test is later than both"


@pytest.mark.parametrize("suffix", FORMATS)
def test_files_of_every_format_are_planned_alike(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, suffix, clicks())
    assert main(["train", str(path), "--script", str(tmp_path / "train.py")]) == 0
    uses = dict(
        re.findall(r"^(\w+) +\w+ +[\d,]+ (?: +\d+ %)? +(number and id|\w+)", capsys.readouterr().out, re.MULTILINE)
    )
    assert uses == {"user_id": "id", "item": "id", "price": "number", "day": "number and id", "click": "label"}
    compile((tmp_path / "train.py").read_text(), "train.py", "exec")
    source = infer_source(str(path))
    assert column_names(source) == clicks().column_names
    rows = sample_rows(source, ["user_id", "day"], 1000)
    assert len(rows["user_id"]) == len(rows["day"]) == 1000


TEXT_OF_A_LABEL = clicks().set_column(4, "bought it", pa.array(["no", "yes"]).take(clicks()["click"]))


@pytest.mark.parametrize(
    ("table", "suffix", "options"),
    [
        (TEXT_OF_A_LABEL, "csv", ["--label", "bought it", "--test-after", "day"]),
        (clicks().select(["user_id", "item", "click"]), "tsv", ["--dim", "4", "--staleness", "2"]),
        (
            clicks()
            .append_column("tags", pa.array([["a", "b"], ["c"], []] * 1000))
            .append_column("at", pa.array(np.arange(3000), pa.int64()).cast(pa.timestamp("s")))
            .append_column("seen", pa.array([True, False, None] * 1000)),
            "parquet",
            ["--test-after", "at", "--ids", "day"],
        ),
        (clicks().append_column("float_id", pa.array([1.0, None, 3.0] * 1000)), "arrow", ["--seed", "5"]),
    ],
)
def test_scripts_of_all_kinds_of_columns_run(table: pa.Table, suffix: str, options: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, suffix, table)
    output = run(tmp_path, SATRAP, "train", path.name, "--epochs", "1", *options)
    assert len(METRICS.findall(output)) == 2, output
    script = (tmp_path / "run/train.py").read_text()
    assert max(map(len, script.splitlines())) <= 80


def test_the_index_of_pandas_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clicks(300).to_pandas().to_csv(tmp_path / "clicks.csv")
    assert main(["train", str(tmp_path / "clicks.csv"), "--script", str(tmp_path / "train.py")]) == 0
    assert "ignored" in capsys.readouterr().out.splitlines()[1]


def test_a_second_file_is_the_test(tmp_path: Path) -> None:
    write(tmp_path, "csv", clicks())
    write(tmp_path, "csv", clicks(500, seed=1), "later")
    output = run(tmp_path, SATRAP, "train", "clicks.csv", "--test", "later.csv", "--epochs", "2", "--ignore", "day")
    assert int(METRICS.findall(output)[0][3]) <= 2 * -(-2800 // 64)


@pytest.mark.parametrize("options", [[], ["--test", "clicks.csv"], ["--ids", "price", "--ignore", "day"]])
def test_a_script_in_the_style_of_the_formatter(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "csv", clicks())
    assert main(["train", "clicks.csv", "--script", "train.py", *options]) == 0
    isolated = ("--isolated", "--line-length", "80", "train.py")
    assert "All checks passed" in run(tmp_path, ruff, "check", "--select", "E,F,I,W", *isolated)
    assert run(tmp_path, ruff, "format", "--diff", *isolated) == ""


def conversion_in(shown: str) -> list[str]:
    """Return the arguments of python in the command that converts a file, which is a line by itself."""
    (command,) = re.findall(r"^to convert the file to Parquet:\n(python -c .*)$", shown, re.MULTILINE)
    return shlex.split(command)[1:]


def table_in(shown: str) -> dict[str, str]:
    """Return the lines of the table of columns, by column, without what only text shows."""
    lines = shown.partition("\n(inferred from ")[0].splitlines()[1:]
    return {line.split()[0]: re.sub(r"(; |  +)'.*' counts? as missing$|\s+", " ", line).strip() for line in lines}


@pytest.mark.parametrize("bad_rows", [0, 1])
def test_the_command_that_is_shown_converts_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad_rows: int
) -> None:
    times = pa.array(np.arange(3000) * 7000, pa.int64()).cast(pa.timestamp("s"))
    path = write(tmp_path, "tsv", clicks().append_column("at", times))
    path.write_text(path.read_text() + "1\tonly two\n" * bad_rows)
    script = str(tmp_path / "text.py")
    assert main(["train", str(path), "--script", script, "--max-bad-rows", str(bad_rows)]) == 0
    shown = capsys.readouterr().out
    assert "(at holds times as text; from a Parquet file, its hour and its weekday are ids)" in shown
    run(tmp_path, sys.executable, *conversion_in(shown))
    assert main(["train", f"{path}.parquet", "--script", str(tmp_path / "typed.py")]) == 0
    assert "convert" not in capsys.readouterr().out
    assert 'time="hour_of_day"' in (tmp_path / "typed.py").read_text()


@pytest.mark.parametrize("days", ["2024-01-%02d", "%02d.01.2024"])
def test_a_converted_file_has_the_columns_of_the_text(
    days: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for times and decimal commas; words and empty fields are missing there, too, and codes stay text."""
    draw = np.random.default_rng(0)
    rows = [
        {
            "click": draw.choice(["", "no", "yes"], p=[0.1, 0.5, 0.4]),
            "item": draw.choice(["", "red", "it's", "-", "$HOME"]),
            "zip": f"{draw.integers(0, 90):05}",
            "opens": f"{draw.integers(7, 12):02}:30",
            "is_new": draw.choice(["true", "false", ""]),
            "hashed": 2**63 + int(draw.integers(0, 50)) * 5**20,
            "price": draw.choice(["-", "7", f"{draw.integers(0, 900) / 4:.2f}".replace(".", ",")], p=[0.05, 0.05, 0.9]),
            "visits": draw.choice(["?", f"{draw.integers(0, 10**6)}"], p=[0.04, 0.96]),
            "day": draw.choice(["", days % draw.integers(1, 29)], p=[0.1, 0.9]),
        }
        for _ in range(1000)
    ]
    path = tmp_path / "data.csv"
    path.write_text(
        "\n".join(";".join(map(str, row)) for row in [list(rows[0]), *(row.values() for row in rows)]) + "\n"
    )
    assert main(["train", str(path), "--script", str(tmp_path / "text.py")]) == 0
    shown = capsys.readouterr().out
    assert "(day holds times as text; from a Parquet file, its weekday are ids)" in shown
    run(tmp_path, sys.executable, *conversion_in(shown))
    assert main(["train", f"{path}.parquet", "--script", str(tmp_path / "typed.py")]) == 0
    text, typed = table_in(shown), table_in(capsys.readouterr().out)
    assert re.fullmatch(r"price real \d+ \d %? ?number numbers with fractions", typed.pop("price")), typed
    assert re.fullmatch(r"day time 28 \d+ % id its weekday; dim 4", typed.pop("day")), typed
    assert typed == {name: line for name, line in text.items() if name not in ("price", "day")}


def test_malformed_rows_that_are_allowed_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "csv", clicks())
    path.write_text(path.read_text() + "1,only two\n")
    assert "allow more with --max-bad-rows" in error_of(capsys, path, "--out", tmp_path / "refused")
    output = run(tmp_path, SATRAP, "train", path.name, "--epochs", "1", "--max-bad-rows", "1")
    assert len(METRICS.findall(output)) == 2, output
    assert "        max_bad_rows=1,\n" in (tmp_path / "run/train.py").read_text()


def test_words_among_numbers_are_missing_in_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    price = np.array([f"{number:.2f}" for number in clicks()["price"].to_numpy(zero_copy_only=False)], object)
    price[:30], price[30:60] = "-", "unknown"
    path = write(tmp_path, "csv", clicks().set_column(2, "price", pa.array(price)).drop_columns(["day"]))
    script = tmp_path / "train.py"
    assert main(["train", str(path), "--script", str(script), "--missing", "never seen"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"^price +real +[\d,]+ +\d+ % +number +numbers with fractions; '-', 'nan', 'unknown' count as missing$",
        shown,
        re.M,
    ), shown
    assert 'missing=["-", "nan", "never seen", "unknown"]' in script.read_text()
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    with contextlib.closing(names["source"]().replace(batch_size=60).batches(["item"])) as batches:
        assert np.all(next(iter(batches)).dense == np.float32(names["NUMBERS"]["price"][0]))


# -- bad input ---------------------------------------------------------------------------------------------------------


def error_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["train", *map(str, arguments)]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "give columns=; columns= is an argument of satrap.CSV in a script"),
        ("a,click\n\xe9,0\n", "; encoding= is an argument of satrap.CSV in a script, for which this command has no"),
        ("a,click\n\xe9,0\n", "convert the file, such as by iconv -f latin1 -t utf-8 FILE > NEW"),
        ("a,click\n", "found no rows; expected at least one"),
        ("1.5,0\n2.5,1\n", "its first line has '1.5', which is no name of a column"),
        ("a,a,click\nx,y,0\nx,y,1\n", "has several columns 'a'"),
        ("a,b\nx,0\ny,1\n", "no label was named; name it with --label COLUMN"),
        ("a,click\nx,0\nx,2\ny,5\n", "label 'click' has 3 distinct values"),
        ("a,click\nx,1\ny,1\n", "label 'click' has one value only, '1'"),
        ("a,click\nx,0\ny,1\n", " 0 for test among the rows with a label; expected at least 1 for each: give more"),
        ("a,click\n" + "x,\ny,\n" * 200 + "x,1\ny,0\n", "2 for training, 0 for validation, 0 for test among the rows"),
        ("a,click\n" + "x,0\ny,1\n" * 20, "column 'a' tells the label 'click' in every row"),
    ],
)
def test_files_that_cannot_be_trained_on(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.csv").write_text(text, encoding="latin-1")
    assert message in error_of(capsys, tmp_path / "data.csv", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clicks.xls"], "the name ends with .xls; expected .parquet"),
        (["missing.csv"], "there is no such file or folder"),
        (["clicks.csv", "--label", "clik"], "--label: there is no column 'clik'"),
        (["clicks.csv", "--epochs", "0"], "--epochs is 0; expected"),
        (["clicks.csv", "--max-bad-rows", "-1"], "--max-bad-rows is -1; expected"),
        (["clicks.csv", "--out", "."], "exists and is not empty"),
        (["clicks.csv", "--out", "a run"], "or remove it, or continue it: python 'a run/train.py'"),
        (["clicks.csv", "--script", "clicks.csv"], "exists; expected a new file"),
        (["clicks.csv", "--test", "other.csv"], "other.csv has no column 'user_id'"),
        (["clicks.csv", "--test", "clicks.parquet"], "is of another format"),
        (["clicks.csv", "--test", "empty.csv"], "empty.csv: found no rows; expected at least one"),
        (["clicks.csv", "--test-after", "same"], "nine tenths of column 'same' hold"),
        (["clicks.csv", "clicks.parquet"], "files of one format"),
        (["clicks.parquet", "--missing", "-"], "--missing: words stand for missing values in text files, and"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    table = clicks(100).append_column("same", pa.array([3] * 99 + [4]))
    write(tmp_path, "csv", table)
    write(tmp_path, "parquet", table)
    (tmp_path / "clicks.xls").write_text("x")
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run/train.py").touch()
    (tmp_path / "other.csv").write_text("a,click\nx,1\n")
    (tmp_path / "empty.csv").write_text(",".join(table.column_names) + "\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert message in error_of(capsys, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_script_that_fails_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The label has a third value beyond the rows by which the columns were planned."""
    (tmp_path / "clicks.csv").write_text("a,b,click\n" + "x,1,0\ny,2,1\nx,1,1\n" * 50)
    (tmp_path / "test.csv").write_text("a,b,click\nx,1,3\n")
    out = tmp_path / "run"
    assert main(["train", str(tmp_path / "clicks.csv"), "--test", str(tmp_path / "test.csv"), "--out", str(out)]) == 1
    error = capfd.readouterr().err
    assert "column 'click' holds '3'; expected 0 or 1" in error and "train.py ended with status 1" in error


def test_the_guide_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    guide = (Path(__file__).parents[2] / "docs/training.md").read_text().partition("\n## Declare tables")[0]
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert len(options) > 10 and options <= set(re.findall(r"--[a-z-]+", guide))
