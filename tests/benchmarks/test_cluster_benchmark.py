"""The cluster benchmark: its parts without a network, and its case run small."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
from benchmarks.cluster import cases, echo, servers
from benchmarks.cluster.__main__ import SUITE, main
from benchmarks.cluster.raw import RawClient
from benchmarks.harness.case import select_cases
from benchmarks.harness.record import complaints, make_record
from benchmarks.workload import hashed_ids, row_numbers


def round_of(rpc: float, raw: float, noisy: bool = False) -> dict[str, Any]:
    noise = {"other_cpu": 0.5 * noisy, "steal": 0.0, "noisy": noisy}
    rates = {"rpc": rpc, "raw": raw, "rpc_free": raw, "raw_free": rpc}
    streams = {f"echo:{name}": {"gb_per_s": rate, "step_ms": 1.0} for name, rate in rates.items()}
    return {
        "streams": {label: {**each, **noise} for label, each in streams.items()},
        "bytes_per_batch": 10,
        "peak_resident_bytes": 1,
        "versions": {},
    }


def test_cases_have_names_of_their_own_a_kind_and_a_target() -> None:
    every = cases.full_cases()
    names = [f"{kind}/20Mx{dim}/2t" for kind in ("echo", "rows", "train", "bytes", "network") for dim in (16, 64)]
    names += [f"restart/10Mx{dim}/2t" for dim in (16, 64)]
    assert [case.name for case in every] == names
    assert all(case.kind in SUITE.kinds and case.targets for case in every)
    assert {case.kind for case in cases.quick_cases()} == SUITE.kinds.keys()


def test_the_ratio_is_taken_in_the_round_and_clean_rounds_count() -> None:
    (case,) = select_cases(cases.full_cases(), ["echo/20Mx16"])
    results = {"worker": [round_of(1.0, 2.0), round_of(3.0, 4.0), None, round_of(4.0, 4.0, noisy=True)]}
    record = make_record(case, results, echo.record)
    assert record["figures"]["ratio"]["rounds"] == [0.5, 0.75, None, 1.0]
    assert record["figures"]["ratio"]["median"] == 0.625
    assert record["figures"]["ratio_free"]["rounds"] == [2.0, 1.333, None, 1.0]
    assert record["clean_rounds"] == [True, True, True, False]
    (complaint,) = complaints(record)
    assert "ratio is 0.625, expected at least 0.7" in complaint


def test_an_id_is_sent_once() -> None:
    first, second = echo.unique_ids(26_000, 2, 0)
    rows = row_numbers(26_000, "zipf", 2, 0)
    assert len(np.unique(first)) == len(first) < len(rows[0])
    assert np.array_equal(np.sort(second), np.sort(np.unique(hashed_ids(rows[1]))))


def test_the_raw_peer_answers_with_as_many_floats() -> None:
    with servers.started("raw", {"dim": 4, "max_ids": 100, "cores": sorted(os.sched_getaffinity(0))}) as (port, _):
        client = RawClient(port, 4, 100)
        rows = np.random.default_rng(3).random(400, np.float32)
        for count in (100, 1, 7):
            assert np.array_equal(client.lookup(np.arange(count, dtype=np.uint64)), rows[: 4 * count])
        client.close()


def test_a_case_runs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--case", "echo/26kx16", "--steps", "12", "--rounds", "2", "--check"]
    assert main(arguments) == 0
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["case"] == "echo/26kx16/2t"
    assert record["command"] == "python -m benchmarks.cluster " + " ".join(arguments)
    for where in ("", "_free"):
        rates = [record["gb_per_s"][f"{name}{where}"]["rounds"] for name in ("rpc", "raw")]
        assert min(map(min, rates)) > 0
        ratios = [rpc / raw for rpc, raw in zip(*rates, strict=True)]
        assert record["figures"][f"ratio{where}"]["rounds"] == pytest.approx(ratios, abs=0.05)


def test_no_case_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "ecko"]) == 2
    assert main(["--list"]) == 0
    assert "echo/20Mx64/2t" in capsys.readouterr().out
    assert main(["--list", "--case", "echo/20Mx16", "--case", "bytes/20Mx16"]) == 0
    assert capsys.readouterr().out.split() == ["echo/20Mx16/2t", "bytes/20Mx16/2t"]
