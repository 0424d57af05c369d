"""The store and the training benchmark: cases, the processes that they need, figures from records, timing, workload."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.harness.case import Case, group_cases, select_cases
from benchmarks.harness.ranks import use_threads
from benchmarks.harness.record import Rounds, complaints, make_record
from benchmarks.harness.rounds import Results, Run
from benchmarks.store.__main__ import SUITE as STORE
from benchmarks.summary import summary
from benchmarks.train import pairs, recipe
from benchmarks.train.__main__ import SUITE
from benchmarks.workload import NUM_FEATURES, SAMPLES

from benchmarks import workload

QUIET = {"other_cpu": 0.0, "steal": 0.0, "noisy": False}
LOUD = {"other_cpu": 0.5, "steal": 0.0, "noisy": True}
LIGHT = "train/20Mx16/light/fp32/adagrad"


def planned(group: Sequence[Case], folder: Path, number: int = 0, suite: Any = SUITE) -> dict[str, Run]:
    """Return the runs of a round by label, with few steps."""
    small = [replace(case, num_warmup=1, num_steps=1) for case in group]
    return {run.label: run for run in suite.kinds[group[0].kind].plan(small, number, folder)}


def record_of(pattern: str, results: Results) -> dict[str, Any]:
    (case,) = select_cases(SUITE.full_cases, [pattern])
    return make_record(case, results, SUITE.kinds[case.kind].record)


def stream(rate: float, step: float, cost: float, noise: Mapping[str, Any] = QUIET) -> dict[str, Any]:
    """Return the figures of one mode with one model."""
    return {
        "samples_per_s": rate,
        "step_ms": step,
        "dense_ms": step - cost,
        "cost_ms": cost,
        "loss_first": 0.7,
        "loss_last": 0.6,
        **noise,
    }


def run(streams: Mapping[str, dict[str, Any]], change: float = 0.02) -> dict[str, Any]:
    named = {f"light/fp32:{label}": each for label, each in streams.items()}
    return {"streams": named, "change": change, "peak_resident_bytes": 1, "versions": {"numpy": "2"}}


def one_round(**changes: Any) -> Results:
    steps = {"": (90, 40, 5), "_stale": (80, 50, 6), "_plain": (70, 60, 7), "_modules": (90, 40, 5)}
    satrap = {f"satrap{mode}": stream(*given) for mode, given in steps.items()}
    peers = {"torchrec": stream(30, 100, 60), "fbgemm": stream(45, 90, 50), "torch": stream(40, 95, 40)}
    return {"satrap": [run(satrap)], **{label: [run({label: each})] for label, each in peers.items()}, **changes}


# -- cases and processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", [STORE, SUITE], ids=lambda suite: str(suite.name))
def test_cases_have_names_of_a_kind_and_processes(suite: Any, tmp_path: Path) -> None:
    for cases in (suite.full_cases, suite.quick_cases):
        assert len({case.name for case in cases}) == len(cases)
        assert {case.kind for case in cases} == suite.kinds.keys()
    for group in group_cases(suite.quick_cases, lambda case: suite.kinds[case.kind].shares_table):
        runs = planned([replace(case, rows=2600) for case in group], tmp_path, 0, suite)
        assert {run.contender for run in runs.values()} <= set(suite.contenders)


def test_cases_of_a_table_share_processes_and_a_peer_has_every_form(tmp_path: Path) -> None:
    trained = [case for case in SUITE.quick_cases if case.kind == "train"]
    (group,) = group_cases(trained, lambda case: SUITE.kinds[case.kind].shares_table)
    runs = planned(group, tmp_path)
    several = [f"{peer}{form}" for peer in ("fbgemm", "torch") for form in ("", "/huge", "/2p", "/2p/huge")]
    ours = [f"{name}{form}" for name in ("satrap", "satrap_direct") for form in ("", "/1t")]
    assert list(runs) == [*ours, "torchrec", "torchrec/huge", *several]
    models = {label: [(m["top"], m["precision"]) for m in run.job["models"]] for label, run in runs.items()}
    light = [("light", "fp32"), ("light", "bf16")]
    assert models["satrap"] == models["satrap_direct"] == models["fbgemm/huge"] == [*light, ("heavy", "fp32")]
    assert models["satrap/1t"] == models["fbgemm/2p"] == light  # heavy models are for all cores of one process
    labels = [form["labels"]["torch"] for run in runs.values() for form in run.job["forms"] if run.contender == "torch"]
    assert labels == ["torch", "torch/1t", "torch/huge", "torch/1t/huge", "torch/2p", "torch/2p/huge"]
    for label, run in runs.items():
        assert (run.environment.get("THP_MEM_ALLOC_ENABLE") == "1") == label.endswith("/huge")
        processes, threads = run.job["num_processes"], run.job["table"]["num_threads"]
        assert (processes, threads) == ((2, 1) if "/2p" in label else (1, 1 if "/1t" in label else 2))


def test_each_mode_has_its_batches_and_peers_get_those_of_the_first(tmp_path: Path) -> None:
    def files(round_number: int) -> dict[str, str]:
        runs = planned(SUITE.quick_cases[:1], tmp_path, round_number)
        return {label: mode["file"] for run in runs.values() for label, mode in run.job["modes"].items()}

    first, second = files(0), files(1)
    assert len(set(first.values())) == 4
    assert {first[label] for label in ("satrap", "torchrec", "fbgemm", "torch")} == {first["satrap"]}
    assert not set(first.values()) & set(second.values())


def test_the_recorded_command_has_no_local_path_and_zero_rounds_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--quick", "--out", "/a/b.jsonl", "--tmpfs=/c", "--case", "train"]
    header = SUITE.header(SUITE.parse(arguments), arguments)
    assert header["command"] == "python -m benchmarks.train --quick --case train"
    assert (header["num_rounds"], header["benchmark"]) == (1, "train")
    with pytest.raises(SystemExit):
        SUITE.parse(["--rounds", "0"])
    assert "--rounds must be at least 1" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="needs 100000 threads"):
        use_threads(100_000)


# -- figures ----------------------------------------------------------------------------------------------------------


def test_ratios_are_taken_against_the_best_peer_of_the_round() -> None:
    record = record_of(LIGHT, one_round())
    figures = {name: figure["median"] for name, figure in record["figures"].items()}
    # 90 / 45; 70 / 45; 5 / 40; 40 / 50; 40 / 40
    ratios = {"ratio": 2.0, "ratio_plain": 1.556}
    assert figures == {**ratios, "cost_ratio": 0.125, "stale_ratio": 0.8, "modules_ratio": 1.0}
    assert record["figures"]["ratio"]["against"] == ["fbgemm"]
    assert record["figures"]["cost_ratio"]["against"] == ["torch"]
    assert [target["met"] for target in record["targets"]] == [True, True, False, True]
    (complaint,) = complaints(record)
    assert "stale_ratio is 0.8, expected at least 0.97" in complaint


def test_the_best_form_of_a_peer_counts_and_one_thread_is_compared_with_one() -> None:
    ours = {"satrap/1t": stream(50, 80, 6), "satrap_plain/1t": stream(40, 90, 7)}
    forms = {"fbgemm/1t": stream(40, 99, 30), "fbgemm/1t/huge": stream(20, 99, 30), "fbgemm/2p": stream(60, 70, 20)}
    changes = {"satrap/1t": [run(ours)], **{label: [run({label: each})] for label, each in forms.items()}}
    record = record_of(LIGHT, one_round(**changes))
    figures = {name: (figure["median"], figure["against"]) for name, figure in record["figures"].items()}
    assert figures["ratio"] == (1.5, ["fbgemm/2p"])  # 90 / 60
    assert figures["ratio_1t"] == (1.25, ["fbgemm/1t"])
    assert figures["cost_ratio"] == (0.25, ["fbgemm/2p"])
    assert not record["figures"]["ratio_1t"]["all_peers_present"]  # TorchRec's module has no run of one thread here

    header = {"machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 4}, "date": "today", "num_rounds": 1}
    lines = summary([{**header, "command": "this", "commit": "0" * 40, **record}])
    assert lines[0].startswith("today, Some CPU")
    (row,) = [line for line in lines if line.startswith("| train/")]
    assert "| 0.1 2p |" in row and "| 1.50 (1.50-1.50) |" in row and "| 1.25 (1.25-1.25) |" in row
    assert [line.split(":")[0] for line in lines if "expected" in line] == ["missed", "met", "missed", "met"]


def test_what_is_missing_or_free_makes_no_ratio_and_a_disturbed_round_no_median() -> None:
    results = one_round()
    del results["torch"]
    targets = {target["figure"]: target["met"] for target in record_of(LIGHT, results)["targets"]}
    assert targets == {"ratio": True, "cost_ratio": None, "stale_ratio": False, "modules_ratio": True}
    free = record_of(LIGHT, one_round(torch=[run({"torch": stream(40, 95, -1)}, change=0.2)]))
    assert free["figures"]["cost_ratio"]["median"] is None and free["figures"]["cost_ratio"]["against"] == ["torch"]
    assert any("changed their rows differently" in line for line in complaints(free))
    two = {label: [*rounds, *rounds] for label, rounds in one_round().items()}
    two["satrap"][1] = run(
        {label: stream(1, 1, 1, LOUD) for label in ("satrap", "satrap_stale", "satrap_plain", "satrap_modules")}
    )
    record = record_of(LIGHT, two)
    assert record["clean_rounds"] == [True, False] and record["noise"] == {"other_cpu": 0.5, "steal": 0.0}
    assert record["figures"]["ratio"]["median"] == 2.0 and record["figures"]["ratio"]["rounds"] == [2.0, 0.022]


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


def test_a_contender_that_steps_too_often_or_diverges_is_refused() -> None:
    surplus = pairs.Stream(trainer=Recorder("a", [], surplus=1), batches=[0, 1])
    with pytest.raises(RuntimeError, match="more steps than it has batches"):
        pairs.take_turn(surplus, 0, 2)
    diverged = pairs.Stream(trainer=Recorder("a", []), batches=[0])
    pairs.take_turn(diverged, 0, 1)
    diverged.losses = [float("nan")]
    with pytest.raises(RuntimeError, match="expected finite losses"):
        pairs.summarize(diverged, num_warmup=0)


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


def test_the_recipe_trains_both_contenders_on_the_same_windows(tmp_path: Path) -> None:
    (case,) = select_cases(SUITE.quick_cases, ["recipe"])
    small = replace(case, rows=40_000, dim=8, num_warmup=1, num_steps=3)
    turns = [list(SUITE.kinds["recipe"].plan([small], number, tmp_path)) for number in range(2)]
    assert [[run.label for run in turn] for turn in turns] == [["satrap", "torch"], ["torch", "satrap"]]
    results: Results = {run.label: [recipe.measure(run.job | {"num_threads": 1})] for run in turns[0]}
    rounds = Rounds(small, results)
    losses = rounds.losses()
    for ours, theirs in zip(losses["satrap"][0], losses["torch"][0], strict=True):
        assert ours == pytest.approx(theirs, abs=0.01), "rows begin within 0.01 in both"
    (ratio,) = SUITE.kinds["recipe"].record(small, rounds)["figures"].values()
    rates = rounds.values("samples_per_s")
    assert ratio["median"] == pytest.approx(rates["satrap"][0] / rates["torch"][0], rel=1e-2)
