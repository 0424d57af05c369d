"""The cluster benchmark on one machine: records, the parts of each kind that need no Paddle, and small runs."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cluster import echo, paddle, tables
from benchmarks.cluster.__main__ import SUITE, main
from benchmarks.cluster.proxy import CountingProxy
from benchmarks.harness import peers
from benchmarks.harness.case import select_cases
from benchmarks.harness.record import complaints, make_record
from benchmarks.workload import BATCH_IDS, NUM_FEATURES, SAMPLES

from satrap.config.features import Features
from satrap.worker.local_rows import local_worker
from waiting import DEADLINE_SECONDS

QUIET = {"other_cpu": 0.0, "steal": 0.0, "noisy": False}


def round_of(kind: str, streams: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the result of one round."""
    named = {f"{kind}:{label}": {**QUIET, **each} for label, each in streams.items()}
    return {"streams": named, "peak_resident_bytes": 1, "versions": {}}


def record_of(name: str, *rounds: dict[str, dict[str, Any]], paddle: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the record of a case. rounds: the worker's streams in each round, with {} for one that failed."""
    (case,) = select_cases(SUITE.full_cases, [name])
    results: Any = {"worker": [round_of(case.kind, streams) if streams else None for streams in rounds]}
    if paddle:
        results["paddle"] = [round_of(case.kind, {"paddle": paddle})]
    return make_record(case, results, SUITE.kinds[case.kind].record)


def test_each_kind_has_its_ratios_and_targets() -> None:
    rates = [(1.0, 2.0, False), (3.0, 4.0, False), (4.0, 4.0, True)]
    echoes = [
        {name: {"gb_per_s": rate, "step_ms": 1.0, "noisy": noisy} for name, rate in pairs.items()}
        for rpc, raw, noisy in rates
        for pairs in [{"rpc": rpc, "raw": raw, "rpc_free": raw, "raw_free": rpc}]
    ]
    record = record_of("echo/20Mx16", *echoes[:2], {}, echoes[2])
    assert record["figures"]["ratio"]["rounds"] == [0.5, 0.75, None, 1.0]
    assert record["figures"]["ratio"]["median"] == 0.625
    assert record["figures"]["ratio_free"]["rounds"] == [2.0, 1.333, None, 1.0]
    assert record["clean_rounds"] == [True, True, True, False]
    assert [target["met"] for target in record["targets"]] == [None, None]  # not in every round
    assert "ratio is 0.625, expected at least 0.7" in complaints(record_of("echo/20Mx16", *echoes[:2]))[0]

    times = {"step_ms": 3.0, "lookup_ms": 1.0, "update_ms": 2.0}
    ours = {"local": {"rows_per_s": 10e6, **times}, "remote": {"rows_per_s": 6e6, **times}}
    record = record_of("rows/20Mx16", ours, paddle={"rows_per_s": 1e6, "step_ms": 100.0, "flush_ms": 100.0})
    assert {name: figure["median"] for name, figure in record["figures"].items()} == {
        "ratio_local": 0.6,
        "ratio_paddle": 6.0,
    }
    assert [target["met"] for target in record["targets"]] == [True, False]
    (complaint,) = complaints(record_of("rows/20Mx16", ours))
    assert "ratio_paddle was not measured" in complaint

    loss = {"step_ms": 1.0, "loss_first": 0.7, "loss_last": 0.6}
    trained = {"satrap": {"samples_per_s": 40, **loss}, "satrap_stale": {"samples_per_s": 20, **loss}}
    record = record_of("train/20Mx64", trained, paddle={"samples_per_s": 10, **loss})
    assert [record["figures"][name]["median"] for name in ("ratio", "ratio_stale")] == [4.0, 2.0]
    assert record["loss"]["paddle"] == [[0.7, 0.6]]

    counted = {"there": 900.0, "back": 900.0, "share": 0.5}
    record = record_of("bytes/20Mx16", {"float32": counted, "float16": {**counted, "share": 0.31}})
    assert [target["met"] for target in record["targets"]] == [True, False]
    assert record["naive_bytes_per_sample"] == 26 * (8 + 2 * 64)
    assert complaints(record_of("restart/10Mx64", {"server": {"away_s": 2.5, "listens_s": 1.0}})) == [
        "restart/10Mx64/2t: away_s is 2.5, expected at most 2"
    ]


def test_cases_are_listed_and_their_steps_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "ecko"]) == 2
    assert "--case: no case has such a name" in capsys.readouterr().err
    assert main(["--list", "--case", "echo/20Mx16", "--case", "bytes/20Mx16"]) == 0
    assert capsys.readouterr().out.split() == ["echo/20Mx16/2t", "bytes/20Mx16/2t"]
    assert {case.kind for case in SUITE.quick_cases} == {case.kind for case in SUITE.full_cases} == SUITE.kinds.keys()
    assert all(case.targets for case in SUITE.full_cases)
    (case,) = select_cases(SUITE.cases(SUITE.parse(["--steps", "7"])), ["rows/20Mx16"])
    assert case.num_steps == 7


def test_a_peer_that_is_missing_is_left_out_and_one_that_fails_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = select_cases(SUITE.quick_cases, ["rows"])
    options = SUITE.parse(["--quick", "--steps", "1", "--tmpfs", str(tmp_path), "--contenders", "paddle"])
    monkeypatch.setattr(peers, "find_python", lambda contender: None)
    assert SUITE.measure([case], options, tmp_path) == ({}, [])
    assert "paddle left out: paddle is not installed" in capsys.readouterr().err
    monkeypatch.setattr(peers, "find_python", lambda contender: Path(sys.executable))
    results, failures = SUITE.measure([case], options, tmp_path)
    assert results == {} and "paddle failed in round 1" in failures[0]
    assert "Paddle's server exited with status 1" in failures[0]


@pytest.mark.parametrize("name", ["rows", "train", "modules", "bytes", "restart"])
def test_a_table_that_does_not_fit_in_memory_is_left_out(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = select_cases(SUITE.quick_cases, [name])
    monkeypatch.setattr(peers, "find_python", lambda contender: Path(sys.executable))
    options = SUITE.parse(["--quick", "--tmpfs", str(tmp_path)])
    assert SUITE.measure([replace(case, rows=10**12)], options, tmp_path) == ({}, [])
    assert "worker left out: it needs" in (printed := capsys.readouterr().err)
    assert ("paddle left out: it needs" in printed) == (name in ("rows", "train"))


def test_the_raw_peer_replies_with_as_many_floats() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with echo.server("raw", {"dim": 4, "max_ids": 100, "cores": cores}) as (port, _):
        client = echo.RawClient(port, 4, 100)
        rows = np.random.default_rng(3).random(400, np.float32)
        for count in (100, 1, 7):
            assert np.array_equal(client.lookup(np.arange(count, dtype=np.uint64)), rows[: 4 * count])
        client.close()


def test_the_proxy_counts_both_directions() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_SECONDS)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE_SECONDS)
                received = 0
                while received < 100_000:
                    received += len(connection.recv(1 << 16))
                connection.sendall(b"x" * 300_000)

        server = threading.Thread(target=answer)
        server.start()
        target = listener.getsockname()[1]
        with CountingProxy(f"tcp://127.0.0.1:{target}") as proxy:
            port = int(proxy.address.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS) as client:
                client.sendall(b"y" * 100_000)
                received = 0
                while part := client.recv(1 << 16):
                    received += len(part)
            assert received == 300_000
            assert proxy.counts() == {"there": 100_000, "back": 300_000}
        server.join()
    with CountingProxy(f"tcp://127.0.0.1:{target}") as proxy:  # where no process listens any more
        port = int(proxy.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS) as client:
            assert client.recv(1) == b""


def test_filling_creates_every_row() -> None:
    worker = local_worker(Features(tables.one_table(BATCH_IDS + 1000, 4)), num_threads=1)
    tables.fill(worker, worker.tables, BATCH_IDS + 1000)
    assert len(worker.tables["ids"]) == (BATCH_IDS + 1000) // NUM_FEATURES * NUM_FEATURES


def test_paddle_gets_the_same_rows_sample_by_sample_and_its_processes_know_each_other() -> None:
    like = {"ids": np.zeros((4, 1)), "dense": np.ones((SAMPLES, 13), np.float32)}
    parts = list(paddle.filling({"rows": BATCH_IDS + 1000}, like))
    assert np.array_equal(np.concatenate([part["ids"] for part in parts]).ravel(), np.arange(BATCH_IDS + 988))
    assert [len(part["dense"]) * NUM_FEATURES for part in parts] == [len(part["ids"]) for part in parts]
    numbers = np.arange(NUM_FEATURES * 3)
    assert paddle.by_sample(numbers)[:NUM_FEATURES, 0].tolist() == list(range(0, NUM_FEATURES * 3, 3))
    first, second = paddle.free_ports(2)
    server, trainer = (paddle.environment(role, (first, second), 2) for role in ("PSERVER", "TRAINER"))
    assert (server["PADDLE_PORT"], trainer["PADDLE_PORT"]) == (str(first), str(second))
    assert server["PADDLE_PSERVERS_IP_PORT_LIST"] == trainer["PADDLE_PSERVERS_IP_PORT_LIST"] == f"127.0.0.1:{first}"
    assert paddle.result_of('noise\n{"streams": {}}\nmore noise\n') == {"streams": {}}
    assert paddle.result_of("noise\n") is None


def test_the_kinds_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--quick", "--contenders", "satrap", "--check", "--steps", "2", "--case"]
    assert main([*arguments, "echo", "rows", "train", "modules", "bytes", "restart", "--tmpfs", str(tmp_path)]) == 0
    records = {record["kind"]: record for record in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(records) == ["echo", "rows", "train", "modules", "bytes", "restart"]
    assert all(figure["median"] > 0 for figure in records["echo"]["figures"].values())
    rows = records["rows"]
    (local,), (remote,) = (rows["rows_per_s"][name]["rounds"] for name in ("local", "remote"))
    assert rows["figures"]["ratio_local"]["median"] == pytest.approx(remote / local, abs=0.001)
    assert rows["figures"]["ratio_paddle"]["median"] is None
    assert min(records["train"]["samples_per_s"][label]["median"] for label in ("satrap", "satrap_stale")) > 0
    counted = records["bytes"]
    back, share = counted["back_bytes_per_sample"]["float32"]["median"], counted["figures"]["share"]["median"]
    # Rows of 16 floats come back, each once, and little else; a half of what a step moves, but for the ids.
    assert back / (NUM_FEATURES * 64) == pytest.approx(share, rel=0.05)
    assert 0.5 < counted["figures"]["share_float16"]["median"] / share < 0.6
    restarted = records["restart"]["figures"]
    assert restarted["listens_s"]["median"] > 0 and 0 < restarted["away_s"]["median"] < 60
    assert list(tmp_path.iterdir()) == []
