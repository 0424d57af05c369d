"""`satrap train`: bad input is an error before anything is trained or written."""

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from satrap.cli.main import main
from train_files import clicks, error_of, write


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
        (["clicks.xls", "--out", "."], "rename or link the file, or declare it in a script, such as by satrap.CSV"),
        (["missing.csv", "--out", "."], "there is no such file or folder"),
        (["clicks.csv", "--label", "clik", "--out", "."], "--label: there is no column 'clik'"),
        (["missing.csv"], "there is no such file or folder"),
        (["clicks.csv", "--label", "clik"], "--label: there is no column 'clik'"),
        (["clicks.csv", "--epochs", "0"], "--epochs is 0; expected"),
        (["clicks.csv", "--max-bad-rows", "-1"], "--max-bad-rows is -1; expected"),
        (["clicks.csv", "--out", "."], "exists and is not empty"),
        (["clicks.csv", "--out", "a run"], "name another with --out, or continue its run: python 'a run/train.py'"),
        (
            ["clicks.parquet", "--out", "a run"],
            "(--out) exists and is not empty; expected a new one: name another with",
        ),
        (["clicks.csv", "--script", "clicks.csv"], "exists; expected a new file"),
        (
            ["clicks.csv", "--script", "new.py", "--out", "a run"],
            "exists and is not empty; expected a new one: name another",
        ),
        (
            ["clicks.csv", "--split", "item=;"],
            "--split: no text of column 'item' has ';'; expected the character between",
        ),
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
    (tmp_path / "a run/train.py").write_text('source("clicks.csv")')
    (tmp_path / "other.csv").write_text("a,click\nx,1\n")
    (tmp_path / "empty.csv").write_text(",".join(table.column_names) + "\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert message in error_of(capsys, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("x,1,no.\ny,2,yes.\n", "test.csv: column 'click' holds 'no.', 'yes.'; expected 'no' or 'yes', as in training"),
        (
            "x,1,no\ny,2,\n",
            "test.csv: column 'click' has no value in 1 of 2 rows; expected a label in every row, 'no' or",
        ),
        ("x,1,no\ny,many,yes\n", "test.csv: column 'b' holds 'many'; expected numbers, as in"),
        (" x , ?, no \n y , 2, yes \n", ""),
    ],
)
def test_the_test_file_is_checked_before_training(
    rows: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blanks and words for missing values that only the test file has are declared in the script."""
    train, test, script = tmp_path / "clicks.csv", tmp_path / "test.csv", tmp_path / "train.py"
    train.write_text("a,b,click\n" + "x,1.5,no\ny,2.5,yes\nx,2.5,no\ny,0.5,yes\nx,0.5,yes\n" * 50)
    test.write_text(f"a,b,click\n{rows}")
    arguments = (train, "--test", test)
    if message:
        error = error_of(capsys, *arguments, "--out", tmp_path / "run")
        assert message in error and "fix the row" not in error
        assert not (tmp_path / "run").exists()
        return
    assert main(["train", *map(str, arguments), "--script", str(script)]) == 0
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    with contextlib.closing(names["source"](path=str(test)).batches(["a"])) as batches:
        assert next(iter(batches)).label.tolist() == [0, 1]


def test_a_script_that_fails_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test file has a third label beyond the rows that were checked: the run has not finished."""
    monkeypatch.setattr("satrap.cli.train_command._SAMPLED_ROWS", 100)
    train, test = (write(tmp_path, "csv", clicks(300, seed), name) for seed, name in enumerate(("train", "test")))
    with test.open("a") as file:
        file.write("1,item 1,2.5,3,7\n")
    out = tmp_path / "run"
    options = ("--test", str(test), "--out", str(out), "--epochs", "1", "--ignore", "day")
    assert main(["train", str(train), *options]) == 1
    error = capfd.readouterr().err
    assert "column 'click' holds '7'; expected 0 or 1" in error and "train.py ended with status 1" in error
    assert (out / "checkpoint").is_dir() and not (out / "finished").exists()


def test_files_that_an_option_took_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--ignore", "day", "clicks.csv"])
    assert (
        "required: FILES (put them first: an option such as --ids takes all words after it)" in capsys.readouterr().err
    )
