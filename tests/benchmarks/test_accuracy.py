"""The accuracy benchmark: its arithmetic by hand, how it reads Adult's files, and a small run of all of it."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.accuracy import adult, cases, figures, jobs, synthetic
from benchmarks.accuracy.__main__ import SUITE, main
from benchmarks.accuracy.training import Outcome, one_thread
from benchmarks.harness.case import Case, Target
from benchmarks.harness.record import complaints, judge, make_record
from examples import flights

from satrap.data.synthetic import Clicks


def outcome(auc: float, staleness: int = 0, best: float | None = None) -> Outcome:
    seen = {min(step, staleness): 1 for step in range(staleness)} | {staleness: 100 - staleness}
    return Outcome(auc=auc, num_steps=100, num_rows=7, staleness_seen=seen, num_test_samples=50, best_auc=best)


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_students_t() -> None:
    found = figures.interval([1.0, 2.0, 3.0, 4.0, 5.0])  # deviation sqrt(2.5), over sqrt(5): 0.707107
    assert (found["mean"], found["low"], found["high"]) == (3.0, 1.037072, 4.962928)  # 3 -+ 2.776 * 0.707107
    pair = figures.interval([0.0, 2.0])  # deviation sqrt(2), over sqrt(2): 1; times 12.706
    assert (pair["mean"], pair["low"], pair["high"]) == (1.0, -11.706, 13.706)


def test_the_cost_of_staleness_is_taken_within_pairs() -> None:
    fresh, stale = [0.70, 0.80, 0.90], [0.701, 0.799, 0.903]
    outcomes = {(0, seed): outcome(auc, best=0.9) for seed, auc in enumerate(fresh)}
    outcomes |= {(4, seed): outcome(auc, 4, best=0.9) for seed, auc in enumerate(stale)}
    case = Case(kind="some", stalenesses=(0, 4))
    record = make_record(case, jobs.results_of(case, outcomes), figures.record)
    found = record["figures"]
    assert found["auc_0"]["values"] == fresh and found["auc_4"]["values"] == stale
    assert found["difference_4"]["values"] == [0.001, -0.001, 0.003] and found["difference_4"]["mean"] == 0.001
    assert found["difference_4"]["high"] - 0.001 == pytest.approx(4.303 * 0.002 / 3**0.5, abs=1e-6)
    assert found["share_of_best_0"]["values"] == [0.5, 0.75, 1.0]
    assert found["held_0"]["mean"] == 1.0 and found["held_4"]["mean"] == 0.96
    assert record["staleness_seen"] == {"0": {0: 300}, "4": {0: 3, 1: 3, 2: 3, 3: 3, 4: 288}}


@pytest.mark.parametrize(("value", "met"), [(0.8909, True), (0.8949, True), (0.8908, False), (0.895, False)])
def test_a_target_may_have_two_limits(value: float, met: bool) -> None:
    target = Target(figure="auc_0", at_least=0.8909, at_most=0.8949)
    judged = judge(target, {"auc_0": {"mean": value}})
    assert judged == {"figure": "auc_0", "wanted": "0.8909 to 0.8949", "value": value, "met": met}


def test_a_missed_target_and_one_not_measured_are_named() -> None:
    judged = [judge(Target(figure=name, at_least=0.9), {"auc_0": {"mean": 0.8}}) for name in ("auc_0", "auc_1")]
    first, second = complaints({"case": "some", "targets": judged})
    assert first == "some: auc_0 is 0.8, expected at least 0.9"
    assert second.startswith("some: auc_1 was not measured")


def test_every_case_has_targets_for_staleness_and_includes_staleness_0() -> None:
    for case in cases.full_cases():
        assert case.stalenesses[0] == 0
        assert {"held_4", "difference_4"} <= {target.figure for target in case.targets}
    assert [case.name for case in cases.quick_cases()] == [case.name for case in cases.full_cases()]


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_adult_is_read_as_the_original_reads_it() -> None:
    train, test = (adult.read(adult.FOLDER / f"adult.{name}.gz") for name in ("data", "test"))
    assert {len(column) for column in train.values()} == {32561}
    assert {len(column) for column in test.values()} == {16281}
    # 39, State-gov, Bachelors, Never-married, Adm-clerical, Not-in-family, White, Male, United-States
    assert [int(train[name][0]) for name in adult.CATEGORIES] == [7, 9, 4, 1, 1, 4, 1, 39]
    assert [float(train[name][0]) for name in adult.NUMBERS] == [39.0, 13.0, 2174.0, 0.0, 40.0]
    # No person in the test file is from Holland, so there the countries after it have other codes.
    assert int(train["native_country"].max()) == 41 and int(test["native_country"].max()) == 40
    assert int(test["native_country"][0]) == 38
    assert train["workclass"].dtype == np.uint64 and train["age"].dtype == np.float32
    assert float(train["label"].sum()) == 7841 and float(test["label"].sum()) == 3846


def test_each_file_has_its_own_codes() -> None:
    row = ["30", "b", "1", "x", "9", "x", "x", "x", "x", "x", "0", "0", "40", "x", ">50K."]
    other = ["31", "?", *row[2:14], "<=50K."]
    both, alone = adult.encode([row, other]), adult.encode([row])
    assert both["workclass"].tolist() == [1, 0] and alone["workclass"].tolist() == [0]
    assert both["label"].tolist() == [1.0, 0.0]


def test_the_original_network_is_linear_except_for_normalisations() -> None:
    torch.manual_seed(0)
    model = adult.Original().eval()
    assert sum(p.numel() for p in model.parameters()) == 5 * 16 + 16 + 32 + 64 * 128 + 128 + 256 + 144 * 256 + 256 + (
        256 * 128 + 128 + 128 + 1
    )
    first, second = torch.randn(2, 3, 5), torch.randn(2, 3, 64)
    middle = model(first.mean(0), second.mean(0))
    torch.testing.assert_close(middle, (model(first[0], second[0]) + model(first[1], second[1])) / 2)


def test_no_seed_of_synthetic_clicks_trains_on_a_test_sample() -> None:
    assert len(figures.T95) <= synthetic.MAX_SEEDS
    clicks = Clicks(num_samples=10, num_dense=2, num_ids=3, cardinalities=[5, 6, 7])
    first, second = synthetic.batches(clicks, 6)
    assert (first.batch_size, second.batch_size) == (6, 4)
    (block,) = clicks.batches(10)
    assert np.array_equal(
        np.concatenate([first.values.reshape(3, 6), second.values.reshape(3, 4)], axis=1), block["ids"].T
    )


def test_torch_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before


# -- flights -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with flights of January, late more often in the rain; one never arrived."""
    draw = random.Random(0)
    lines = [
        "year,month,day,sched_dep_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin,dest,distance,hour,time_hour"
    ]
    weather = ["origin,time_hour,temp,dewp,humid,wind_speed,precip,pressure,visib"]
    for day in range(1, 31):
        for hour in range(5, 23):
            time, rain = f"2013-01-{day:02}T{hour:02}:00:00Z", draw.random() < 0.3
            weather.append(f"EWR,{time},40,30,60,5,{0.3 * rain},NA,{3 if rain else 10}")
            for minute in (10, 40):
                delay = draw.choice([40, 5] if rain else [20, -5, -9, 0])
                row = f"2013,1,{day},{hour}{minute},{(hour + 2) % 24}{minute}"
                lines.append(f"{row},{delay},UA,{hour},N{minute},EWR,IAH,1400,{hour},{time}")
    lines.append("2013,1,1,2359,300,NA,UA,1,NA,EWR,IAH,1400,23,2013-01-01T23:00:00Z")
    (tmp_path / "flights.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "weather.csv").write_text("\n".join(weather) + "\n")
    (tmp_path / "planes.csv").write_text("tailnum,year,model,seats\nN10,2001,A320,150\n")
    return tmp_path


def test_the_flights_columns(folder: Path) -> None:
    table = flights.flights(folder)
    assert len(table) == 30 * 18 * 2
    assert {name: table[name].null_count for name in flights.NUMBERS if table[name].null_count} == {}
    assert set(flights.IDS) | set(flights.NUMBERS) | {"late", "day"} == set(table.column_names)
    first = table.slice(0, 1).to_pylist()[0]
    assert first["route"] == "EWR-IAH" and first["number"] == "UA-5" and first["weekday"] == 1
    assert first["tailnum"] == "N10" and first["model"] == "A320"
    train, test = flights.split(table)
    assert set(test["day"].to_pylist()) == {10, 20, 30} and len(train) == 9 * len(test)


def test_clocks_and_ranges() -> None:
    import pyarrow as pa

    assert flights.minutes(pa.array([2359, 5])).to_pylist() == [1439.0, 5.0]
    clocks = pa.table({"sched_dep_time": [2300, 1200], "sched_arr_time": [100, 1130]})
    assert flights.duration(clocks).to_pylist() == [120.0, -30.0]
    assert flights.rounded(pa.array([9.9, 10.0, None]), 5).to_pylist() == [1, 2, None]
    assert flights.scaled(pa.array([1.0, 3.0, None])).to_pylist() == [-1.0, 1.0, 0.0]
    many = flights.scaled(pa.array([0.0] * 99 + [1000.0])).to_pylist()
    assert max(many) == 5.0


def test_a_folder_without_flights_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no flights\.csv"):
        flights.flights(tmp_path)


# -- all of it ---------------------------------------------------------------------------------------------------------


def test_the_recorded_command_has_no_path() -> None:
    arguments = ["--flights", "/secret/a", "--out=/secret/b", "--case", "flights", "--seeds", "3"]
    header = SUITE.header(SUITE.parse(arguments), arguments)
    assert header["command"] == "python -m benchmarks.accuracy --flights PATH --case flights --seeds 3"
    assert header["num_rounds"] == 3


@pytest.mark.parametrize("wrong", [["--seeds", "1"], ["--seeds", "11"], ["--processes", "0"]])
def test_options_out_of_range_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        SUITE.parse(wrong)
    assert wrong[1] in capsys.readouterr().err


def test_a_case_of_no_such_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "none"]) == 2
    assert "--case" in capsys.readouterr().err


def test_a_quick_run(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    options = ["--quick", "--check", "--case", "flights", "synthetic", "--flights", str(folder), "--out", str(out)]
    assert main([*options, "--processes", "1"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["case"] for line in lines] == ["flights", "synthetic"]
    assert capsys.readouterr().out == out.read_text()
    for line in lines:
        assert line["seeds"] == [0, 1] and line["seconds"] > 0 and str(tmp_path) not in json.dumps(line)
        assert set(line["staleness_seen"]["0"]) == {"0"}
        assert len(line["figures"]["difference_4"]["values"]) == 2
    assert max(lines[1]["staleness_seen"]["4"]) == "4"
    assert 0.7 < lines[1]["figures"]["best_auc"]["mean"] < 0.9
    assert 0.4 < lines[0]["figures"]["linear_auc"]["mean"] < 0.9


def test_a_run_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adult, "read", small_adult)
    job = jobs.Job(case="adult", staleness=4, seed=1, quick=True, flights=None)
    assert jobs.run_job(job) == jobs.run_job(job)


def small_adult(path: Path, read: Any = adult.read) -> adult.Columns:
    return {name: column[:2000] for name, column in read(path).items()}


def test_without_flights_the_case_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--case", "flights"]) == 0
    printed = capsys.readouterr()
    assert "flights: left out" in printed.err and "--flights PATH" in printed.err and printed.out == ""


def test_check_names_what_was_missed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    impossible = Case(kind="adult", stalenesses=(0,), targets=(Target(figure="auc_0", at_least=2.0),))
    monkeypatch.setattr(type(SUITE), "cases", lambda suite, options: [impossible])
    monkeypatch.setattr(jobs, "run_job", lambda job: outcome(0.9))
    assert main(["--check", "--case", "adult", "--processes", "1"]) == 1
    assert "adult: auc_0 is 0.9, expected at least 2" in capsys.readouterr().err
