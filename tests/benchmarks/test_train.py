"""The training benchmark's pure parts: cases, the processes they need, figures from records, workload."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.harness.case import Case, group_cases, select_cases
from benchmarks.harness.ranks import use_threads
from benchmarks.harness.record import complaints, make_record
from benchmarks.harness.rounds import Results, Run
from benchmarks.summary import summary
from benchmarks.train import cases, pairs, plan, reading
from benchmarks.train.__main__ import SUITE
from benchmarks.workload import NUM_FEATURES, SAMPLES

from benchmarks import workload

QUIET = {"other_cpu": 0.0, "steal": 0.0, "noisy": False}
LOUD = {"other_cpu": 0.5, "steal": 0.0, "noisy": True}


def case_named(pattern: str) -> Case:
    (found,) = select_cases(cases.full_cases(), [pattern])
    return found


def planned(group: Sequence[Case], folder: Path, number: int = 0) -> dict[str, Run]:
    """Return the runs of a round by label, with few steps."""
    small = [replace(case, num_warmup=1, num_steps=1) for case in group]
    return {run.label: run for run in plan.KINDS[group[0].kind].plan(small, number, folder)}


def record_of(pattern: str, results: Results) -> dict[str, Any]:
    case = case_named(pattern)
    return make_record(case, results, plan.KINDS[case.kind].record)


def stream(rate: float, step: float, cost: float, noise: Mapping[str, Any] = QUIET) -> dict[str, Any]:
    """Return the figures of one mode with one model."""
    return {
        "samples_per_s": rate,
        "step_ms": step,
        "dense_ms": step - cost,
        "cost_ms": cost,
        "cost_interval_ms": [cost - 1.0, cost + 1.0],
        "loss_first": 0.7,
        "loss_last": 0.6,
        **noise,
    }


def run(streams: Mapping[str, dict[str, Any]], change: float = 0.02) -> dict[str, Any]:
    named = {f"light/fp32:{label}": each for label, each in streams.items()}
    return {"streams": named, "change": change, "peak_resident_bytes": 1, "versions": {"numpy": "2"}}


def one_round(**changes: Any) -> Results:
    satrap = {"satrap": stream(90, 40, 5), "satrap_stale": stream(80, 50, 6), "satrap_plain": stream(70, 60, 7)}
    peers = {"torchrec": stream(30, 100, 60), "fbgemm": stream(45, 90, 50), "torch": stream(40, 95, 40)}
    results: Results = {"satrap": [run(satrap)], "paddle": [run({"paddle": stream(20, 200, 80)})]}
    results |= {label: [run({label: each})] for label, each in peers.items()}
    return results | changes


# -- cases and processes ----------------------------------------------------------------------------------------------


def test_case_names_are_unique_and_every_case_has_targets() -> None:
    for each in (cases.full_cases(), cases.quick_cases()):
        assert len({case.name for case in each}) == len(each)
    assert all(case.targets for case in cases.full_cases())


def test_every_dim_top_precision_and_optimizer_is_measured() -> None:
    trained = {
        (case.dim, case.top, case.precision, case.optimizer) for case in cases.full_cases() if case.kind == "train"
    }
    wanted = itertools.product((16, 64), ("light", "heavy"), ("fp32", "bf16"), ("adagrad", "rowwise"))
    assert trained == set(wanted)


@pytest.mark.parametrize(
    ("name", "least"),
    [("20Mx16/light", 1.7), ("20Mx64/light", 2.1), ("20Mx16/heavy", 1.15), ("20Mx64/heavy", 1.15)],
)
def test_end_to_end_targets_are_those_of_fp32(name: str, least: float) -> None:
    def targets(precision: str) -> dict[str, str]:
        return {t.figure: t.limits() for t in case_named(f"train/{name}/{precision}/adagrad").targets}

    assert targets("fp32") == {"ratio": f"at least {least:g}", **targets("bf16")}
    assert targets("bf16") == {"cost_ratio": "at most 0.25", "stale_ratio": "at least 0.97"}


def test_cases_of_a_table_share_processes_and_peers_run_what_they_support(tmp_path: Path) -> None:
    trained = [case for case in cases.quick_cases() if case.kind == "train"]
    (group,) = group_cases(trained, lambda case: SUITE.kinds[case.kind].shares_table)
    runs = planned(group, tmp_path)
    several = [f"{peer}{form}" for peer in ("fbgemm", "torch") for form in ("", "/huge", "/2p", "/2p/huge")]
    assert list(runs) == ["satrap", "satrap/1t", "torchrec", "torchrec/huge", *several, "paddle"]
    models = {label: [(m["top"], m["precision"]) for m in run.job["models"]] for label, run in runs.items()}
    light = [("light", "fp32"), ("light", "bf16")]
    assert models["satrap"] == models["fbgemm/huge"] == [*light, ("heavy", "fp32")]
    assert models["satrap/1t"] == models["fbgemm/2p"] == light  # heavy models are for all cores of one process
    assert models["paddle"] == [light[0], ("heavy", "fp32")]
    assert "paddle" not in plan.peers_of(case_named("train/20Mx16/light/fp32/rowwise"))


def test_each_mode_has_its_batches_and_peers_get_those_of_the_first(tmp_path: Path) -> None:
    group = [cases.quick_cases()[0]]

    def files(round_number: int) -> dict[str, str]:
        runs = planned(group, tmp_path, round_number)
        return {label: mode["file"] for run in runs.values() for label, mode in run.job["modes"].items()}

    first, second = files(0), files(1)
    assert len(set(first.values())) == 3
    assert {first[label] for label in ("satrap", "torchrec", "fbgemm", "torch", "paddle")} == {first["satrap"]}
    assert not set(first.values()) & set(second.values())


def test_a_peer_is_measured_in_every_form_and_the_form_is_in_its_environment(tmp_path: Path) -> None:
    (light, *_) = cases.quick_cases()
    runs = planned([light], tmp_path)
    labels = [form["labels"]["torch"] for run in runs.values() for form in run.job["forms"] if run.contender == "torch"]
    assert labels == ["torch", "torch/1t", "torch/huge", "torch/1t/huge", "torch/2p", "torch/2p/huge"]
    for label, run in runs.items():
        assert (run.environment.get("THP_MEM_ALLOC_ENABLE") == "1") == label.endswith("/huge")
        processes, threads = run.job["num_processes"], run.job["table"]["num_threads"]
        assert (processes, threads) == ((2, 1) if "/2p" in label else (1, 1 if "/1t" in label else 2))


def test_reading_requires_the_source(tmp_path: Path) -> None:
    read = [case for case in cases.full_cases() if case.kind == "read"]
    (group,) = group_cases(read, lambda case: SUITE.kinds[case.kind].shares_table)
    (run,) = planned(group, tmp_path).values()
    assert "from satrap import Criteo" in run.needs
    assert run.folder_bytes is not None and run.folder_bytes > 0
    assert [model["precision"] for model in run.job["models"]] == ["fp32", "bf16"]


def test_the_recorded_command_has_no_local_path() -> None:
    arguments = ["--quick", "--out", "/a/b.jsonl", "--peers-home=/c", "--case", "train"]
    header = SUITE.header(SUITE.parse(arguments), arguments)
    assert header["command"] == "python -m benchmarks.train --quick --case train"
    assert (header["num_rounds"], header["benchmark"]) == (1, "train")


def test_zero_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        SUITE.parse(["--rounds", "0"])
    assert "--rounds must be at least 1" in capsys.readouterr().err


# -- figures ----------------------------------------------------------------------------------------------------------


def test_ratios_are_taken_against_the_best_peer_of_the_round() -> None:
    record = record_of("train/20Mx16/light/fp32/adagrad", one_round())
    found = {name: figure["median"] for name, figure in record["figures"].items()}
    assert found == {
        "ratio": 2.0,  # 90 / 45
        "ratio_stale": 1.778,
        "ratio_plain": 1.556,
        "ratio_torch": 2.25,
        "ratio_paddle": 4.5,
        "cost_ratio": 0.125,  # 5 / 40
        "cost_ratio_stale": 0.15,
        "stale_ratio": 0.8,  # 40 / 50
    }
    assert record["figures"]["ratio"]["against"] == ["fbgemm"]
    assert record["figures"]["cost_ratio"]["against"] == ["torch"]
    assert record["versions"] == {label: {"numpy": "2"} for label in one_round()}
    assert record["cost_ms"]["satrap"]["intervals"] == [[4.0, 6.0]]
    assert [target["met"] for target in record["targets"]] == [True, True, False]
    (complaint,) = complaints(record)
    assert "stale_ratio is 0.8, expected at least 0.97" in complaint


def test_the_best_form_of_a_peer_counts_and_one_thread_is_compared_with_one() -> None:
    ours = {"satrap/1t": stream(50, 80, 6), "satrap_plain/1t": stream(40, 90, 7)}
    forms = {"fbgemm/1t": stream(40, 99, 30), "fbgemm/1t/huge": stream(20, 99, 30), "fbgemm/2p": stream(60, 70, 20)}
    changes = {"satrap/1t": [run(ours)], **{label: [run({label: each})] for label, each in forms.items()}}
    record = record_of("train/20Mx16/light/fp32/adagrad", one_round(**changes))
    found = {name: (figure["median"], figure["against"]) for name, figure in record["figures"].items()}
    assert found["ratio"] == (1.5, ["fbgemm/2p"])  # 90 / 60
    assert found["ratio_1t"] == (1.25, ["fbgemm/1t"])
    assert found["ratio_plain_1t"] == (1.0, ["fbgemm/1t"])
    assert found["cost_ratio"] == (0.25, ["fbgemm/2p"])
    assert not record["figures"]["ratio_1t"]["all_peers_present"]  # TorchRec's own module has no run of one thread here

    header = {"machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 4}, "date": "today", "num_rounds": 1}
    lines = summary([{**header, "command": "this", "commit": "0" * 40, **record}])
    assert lines[0].startswith("today, Some CPU")
    (row,) = [line for line in lines if line.startswith("| train/")]
    assert "| 0.1 2p |" in row and "| 1.50 (1.50-1.50) |" in row and "| 1.25 (1.25-1.25) |" in row
    assert [line.split(":")[0] for line in lines if "expected" in line] == ["missed", "met", "missed"]


def test_a_missing_peer_leaves_only_its_figures_unmeasured() -> None:
    results = one_round()
    del results["torch"]
    record = record_of("train/20Mx16/light/fp32/adagrad", results)
    assert [(target["figure"], target["met"]) for target in record["targets"]] == [
        ("ratio", True),
        ("cost_ratio", None),
        ("stale_ratio", False),
    ]
    assert "ratio_torch" not in record["figures"]


def test_a_peer_that_seems_to_pay_nothing_makes_no_ratio() -> None:
    results = one_round(torch=[run({"torch": stream(40, 95, -1)})])
    record = record_of("train/20Mx16/light/fp32/adagrad", results)
    assert record["figures"]["cost_ratio"]["median"] is None
    assert record["figures"]["cost_ratio"]["against"] == ["torch"]


def test_a_round_that_was_disturbed_does_not_enter_the_median() -> None:
    loud = {label: stream(1, 1, 1, LOUD) for label in ("satrap", "satrap_stale", "satrap_plain")}
    results = one_round()
    two = {label: [*rounds, *rounds] for label, rounds in results.items()}
    two["satrap"] = [*results["satrap"], run(loud)]
    record = record_of("train/20Mx16/light/fp32/adagrad", two)
    assert record["clean_rounds"] == [True, False]
    assert record["figures"]["ratio"]["median"] == 2.0
    assert record["figures"]["ratio"]["rounds"] == [2.0, 0.022]
    assert record["noise"] == {"other_cpu": 0.5, "steal": 0.0}


def test_contenders_that_changed_their_rows_differently_are_named() -> None:
    torch = run({"torch": stream(40, 95, 40)}, change=0.2)
    record = record_of("train/20Mx16/light/fp32/adagrad", one_round(torch=[torch]))
    assert not record["same_work"]
    assert any("changed their rows differently" in line for line in complaints(record))


def test_reading_has_figures_of_its_own() -> None:
    measured = {"mb_per_s": 160.0, "added_share": 0.2, **QUIET}
    result = {"streams": {"heavy/bf16:satrap": measured}, "peak_resident_bytes": 1, "versions": {}}
    record = record_of("read/250kx16/heavy/bf16", {"satrap": [result]})
    assert [target["met"] for target in record["targets"]] == [True, False]


# -- timing -----------------------------------------------------------------------------------------------------------


class Recorder:
    """A trainer that notes the order of its steps."""

    def __init__(self, name: str, log: list[str], surplus: int = 0) -> None:
        self.name, self.log, self.surplus = name, log, surplus

    def steps(self, batches: Sequence[Any]) -> Iterator[float]:
        for batch in [*batches, *range(self.surplus)]:
            self.log.append(f"{self.name}{batch}")
            yield 0.5
        self.log.append(f"{self.name} ends")

    def dense_steps(self, batches: Sequence[Any]) -> Iterator[float]:
        for batch in batches:
            self.log.append(f"dense{batch}")
            yield 0.5


def test_modes_take_turns_and_every_step_is_followed_by_a_dense_one() -> None:
    log: list[str] = []
    streams = [pairs.Stream(trainer=Recorder(name, log), batches=[0, 1, 2, 3]) for name in "ab"]
    for each in streams:
        pairs.take_turn(each, 0, 1)
    log.clear()
    pairs.take_turns(streams, 1, 2)
    one = ["a1", "dense1", "a2", "dense2", "a ends", "b1", "dense1", "b2", "dense2", "b ends"]
    assert log == [*one, "a3", "dense3", "a ends", "b3", "dense3", "b ends"]
    assert [len(each.whole) for each in streams] == [len(each.alone) for each in streams] == [4, 4]
    figures_of = pairs.summarize(streams[0], num_warmup=1)
    assert figures_of["loss_first"] == 0.5


def test_a_contender_that_steps_too_often_is_refused() -> None:
    stream_of = pairs.Stream(trainer=Recorder("a", [], surplus=1), batches=[0, 1])
    with pytest.raises(RuntimeError, match="more steps than it has batches"):
        pairs.take_turn(stream_of, 0, 2)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    stream_of = pairs.Stream(trainer=Recorder("a", []), batches=[0])
    pairs.take_turn(stream_of, 0, 1)
    stream_of.losses = [float("nan")]
    with pytest.raises(RuntimeError, match="expected finite losses"):
        pairs.summarize(stream_of, num_warmup=0)


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(RuntimeError, match="needs 100000 threads"):
        use_threads(100_000)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 30, 31])
def test_the_interval_of_a_median_is_that_of_the_binomial(count: int) -> None:
    # Known ranks for 30 values: the 10th and the 21st. Up to five values never reach 95 %: their whole range.
    known = {30: (9, 20), 31: (9, 21), 6: (0, 5)}
    low, high = pairs.median_interval([float(value) for value in reversed(range(count))])
    assert (low, high) == known.get(count, (0, count - 1))


def test_the_interval_contains_the_median_as_often_as_promised() -> None:
    rng = np.random.default_rng(5)
    intervals = [pairs.median_interval(sample.tolist()) for sample in rng.exponential(1.0, (2000, 30))]
    held = np.mean([low <= np.log(2.0) <= high for low, high in intervals])
    assert 0.94 <= held <= 0.98  # 0.957 in truth; its standard error here is 0.005


# -- workload ---------------------------------------------------------------------------------------------------------


def test_batches_are_reproducible_and_differ_by_part(tmp_path: Path) -> None:
    path = workload.samples_file(tmp_path, 26_000, 2, 0)
    first, again = workload.load_batches(path), workload.make_batches(26_000, 2, 0)
    other = workload.make_batches(26_000, 2, 1)
    assert len(first) == 2
    for name in ("rows", "dense", "labels"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))
    assert first.rows.shape == (2, NUM_FEATURES * SAMPLES)
    assert first.dense.shape == (2, SAMPLES, workload.NUM_DENSE)
    assert set(np.unique(first.labels)) == {0.0, 1.0}


def test_labels_follow_from_hidden_weights_of_the_rows() -> None:
    batches = workload.make_batches(26_000, 2, 0)
    scores = workload.row_weights(batches.rows).reshape(2, NUM_FEATURES, SAMPLES).sum(axis=1)
    clicked, others = scores[batches.labels == 1.0], scores[batches.labels == 0.0]
    assert clicked.mean() - others.mean() > 0.5
    weights = workload.row_weights(np.arange(100_000))
    assert abs(weights.mean()) < 0.01
    assert abs(weights.std() - workload.ROW_WEIGHT) < 0.01


def test_the_text_has_criteos_columns(tmp_path: Path) -> None:
    path = tmp_path / "day.tsv"
    reading.write_text(path, SAMPLES + 5)
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    assert len(lines) == SAMPLES + 5
    assert {len(line) for line in lines} == {40}
    assert {line[0] for line in lines} == {"0", "1"}
    counts = [field for line in lines for field in line[1:14]]
    texts = [field for line in lines for field in line[14:]]
    assert all(field == "" or int(field) >= 0 for field in counts)
    assert {len(field) for field in texts} == {0, 8}
    assert 0.15 < counts.count("") / len(counts) < 0.25
    assert 0.03 < texts.count("") / len(texts) < 0.07
    assert all(int(field, 16) < 2**32 for field in texts if field)
