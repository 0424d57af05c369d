"""`satrap train`: its script gives the same bits as the command, in every format."""

import contextlib
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
from train_files import METRICS, clicks, error_of, rows_of, run, script_of, write
from waiting import DEADLINE_SECONDS

FORMATS = ("parquet", "arrow", "csv", "tsv", "csv.gz", "txt")


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
    assert resumed.endswith("better in validation: DCN\n")
    page = (tmp_path / "run/report.html").read_text()
    assert "<title>train.py in run: clicks.parquet</title>" in page and "Validation: test AUC" in page


def test_a_script_in_another_folder_names_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "parquet", clicks())
    names = script_of(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="run this script in the folder in which `satrap train` was called"):
        names["main"]()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_the_script_trains_its_model_under_satrap_run(num_trainers: int, tmp_path: Path) -> None:
    write(tmp_path, "parquet", clicks())
    options = ("--ignore", "day", "--epochs", "4", "--script", "mine.py", "--out", "mine")
    run(tmp_path, SATRAP, "train", "clicks.parquet", *options)
    trainers = ("--trainers", str(num_trainers), "--folder", "of_run")
    (metrics,) = METRICS.findall(run(tmp_path, SATRAP, "run", "mine.py", "--servers", "2", *trainers))
    assert metrics[0] == "DCN" and 0.65 < float(metrics[1]) < 1
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"checkpoint", "finished"}
    if num_trainers == 1:
        alone = METRICS.findall(run(tmp_path, sys.executable, "mine.py"))
        assert alone[0] == metrics, "the run has finished, so the script returns to its best"


def test_the_calls_for_several_trainers_change_nothing_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows and metrics are those of a script without them."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "parquet", clicks(1000))
    script_of(tmp_path, "--epochs", "1")
    text = Path("train.py").read_text()
    plain = text.replace("    net = embeddings.parallel(net)\n", "").replace('RUN = "run"', 'RUN = "plain"')
    plain = plain.replace("    train = train.replace(batch_size=max(1, BATCH_SIZE // trainers.world_size))\n", "")
    assert len(text.splitlines()) - len(plain.splitlines()) == 2
    Path("plain.py").write_text(plain)
    outputs = [METRICS.findall(run(tmp_path, sys.executable, name)) for name in ("train.py", "plain.py")]
    assert outputs[0] == outputs[1] and len(outputs[0]) == 2
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "plain")


def test_the_progress_of_each_model_begins_with_its_name(tmp_path: Path) -> None:
    write(tmp_path, "parquet", clicks(1000))
    run(tmp_path, SATRAP, "train", "clicks.parquet", "--script", "train.py", "--epochs", "1")
    command = (sys.executable, "train.py")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True)
    lines = done.stderr.splitlines()
    assert lines[0] == "DCN:" and lines.index("logistic regression:") > 1


def test_the_first_number_of_each_embedding_is_a_weight_of_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The regression has such weights; without them the DCN finds the effects of ids later, and overfits first."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "parquet", clicks())
    names = script_of(tmp_path, "--ids", "day")
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
    assert (
        METRICS.findall(again) == METRICS.findall(output)
        and again.count("had finished; to train it longer, raise epochs") == 2
    )
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


def uses_in(shown: str) -> dict[str, str]:
    """Return the use of each column of the table."""
    return dict(re.findall(r"^(\w+) +\w+ +[\d,]+ (?: +\d+ %)? +(number and id|\w+)", shown, re.MULTILINE))


@pytest.mark.parametrize(
    "files", [["one.parquet", "two.parquet"], ["by_day"], ["*.parquet"], ["file://{folder}/one.parquet"]]
)
def test_the_files_of_a_list_a_folder_a_glob_and_a_url_are_read(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table = clicks().append_column("number", pa.array(range(3000)))
    pq.write_to_dataset(table, "by_day", partition_cols=["day"])
    half = 3000 if "://" in files[0] else 1000
    write(tmp_path, "parquet", table[:half], "one")
    write(tmp_path, "parquet", table[half:], "two")
    given = [file.format(folder=tmp_path) for file in files]
    assert main(["train", *given, "--ignore", "number", "--script", "train.py"]) == 0
    uses = {"user_id": "id", "item": "id", "price": "number", "day": "number and id", "click": "label"}
    assert uses_in(capsys.readouterr().out) == uses | {"number": "ignored"}
    train, validate, test = parts_of(tmp_path / "train.py", table)
    assert sorted([*train, *validate, *test]) == list(range(3000))


@pytest.mark.parametrize("suffix", FORMATS)
def test_files_of_every_format_are_planned_alike(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, suffix, clicks())
    assert main(["train", str(path), "--script", str(tmp_path / "train.py")]) == 0
    assert uses_in(capsys.readouterr().out) == {
        "user_id": "id",
        "item": "id",
        "price": "number",
        "day": "number and id",
        "click": "label",
    }
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
    assert "(day holds times as text; from a Parquet file, its weekday is an id)" in shown
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


def test_the_help_holds_for_the_file_of_the_readme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its example runs, and all endings that it names are read."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (call,) = re.findall(r"^clicks = (satrap\.synthetic\.Clicks\((?:.|\n)*?\n\))$", readme, re.MULTILINE)
    eval(call.replace("220_000", "2_000"), {"satrap": satrap}).write_parquet("clicks.parquet")
    (example,) = re.findall(r"^Example: satrap (train clicks\.parquet .*)$", shown, re.MULTILINE)
    assert main([*shlex.split(example), "--script", "train.py"]) == 0
    endings = set(re.findall(r"\.[a-z]+(?![a-z.])", shown.partition("FILES  ")[2].partition("compressed")[0]))
    assert len(endings) == 11
    for ending in endings:
        Path(f"data{ending}").write_text("a,b\n1,2\n")
        infer_source(f"data{ending}")


def test_the_guide_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    guide = (Path(__file__).parents[2] / "docs/training.md").read_text().partition("\n## Declare tables")[0]
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert len(options) > 10 and options <= set(re.findall(r"--[a-z-]+", guide))


def test_the_command_for_servers_permits_data_outside_the_folder_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (data := tmp_path / "data").mkdir()
    write(data, "csv", clicks(200))
    monkeypatch.chdir(tmp_path)
    for given, script, permitted in (
        ("data/clicks.csv", "a.py", ""),
        ("data/clicks.csv", "scripts/b.py", " --data data"),
        (f"{data}/*.csv", "scripts/c.py", f" --data {data}/"),
        (str(data), "data/d.py", ""),
    ):
        assert main(["train", given, "--script", script]) == 0
        assert f"(on servers: satrap run {script}{permitted})" in capsys.readouterr().out
