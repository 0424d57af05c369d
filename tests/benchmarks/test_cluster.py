"""The cluster benchmark on one machine: records, the parts of each kind that need no Paddle, and small runs."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.cluster import cases, echo, paddle, paddle_role, rows, servers, tables, train, wire
from benchmarks.cluster.__main__ import SUITE, main
from benchmarks.cluster.proxy import CountingProxy
from benchmarks.harness import peers
from benchmarks.harness.case import Case, select_cases
from benchmarks.harness.record import complaints, make_record
from benchmarks.harness.rounds import Results
from benchmarks.workload import BATCH_IDS, NUM_FEATURES, SAMPLES, hashed_ids, row_numbers

from satrap.config.features import Features
from satrap.worker.local_rows import local_worker

DEADLINE_SECONDS = 240.0
QUIET = {"other_cpu": 0.0, "steal": 0.0, "noisy": False}


def case_named(pattern: str) -> Case:
    (found,) = select_cases(cases.full_cases(), [pattern])
    return found


def round_of(kind: str, streams: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the result of one round."""
    named = {f"{kind}:{label}": {**QUIET, **each} for label, each in streams.items()}
    return {"streams": named, "peak_resident_bytes": 1, "versions": {}, **more}


def echo_round(rpc: float, raw: float, noisy: bool = False) -> dict[str, Any]:
    rates = {"rpc": rpc, "raw": raw, "rpc_free": raw, "raw_free": rpc}
    streams = {name: {"gb_per_s": rate, "step_ms": 1.0, "noisy": noisy} for name, rate in rates.items()}
    return round_of("echo", streams, bytes_per_batch=10)


def rows_results() -> Results:
    times = {"step_ms": 3.0, "lookup_ms": 1.0, "update_ms": 2.0}
    ours = {"local": {"rows_per_s": 10e6, **times}, "remote": {"rows_per_s": 6e6, **times}}
    theirs = {"paddle": {"rows_per_s": 1e6, "step_ms": 100.0, "flush_ms": 100.0}}
    return {"worker": [round_of("rows", ours, unique_share=0.5)], "paddle": [round_of("rows", theirs)]}


# -- records ----------------------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_round_and_clean_rounds_count() -> None:
    results = {"worker": [echo_round(1.0, 2.0), echo_round(3.0, 4.0), None, echo_round(4.0, 4.0, noisy=True)]}
    record = make_record(case_named("echo/20Mx16"), results, echo.record)
    assert record["figures"]["ratio"]["rounds"] == [0.5, 0.75, None, 1.0]
    assert record["figures"]["ratio"]["median"] == 0.625
    assert record["figures"]["ratio_free"]["rounds"] == [2.0, 1.333, None, 1.0]
    assert record["clean_rounds"] == [True, True, True, False]
    (complaint,) = complaints(record)
    assert "ratio is 0.625, expected at least 0.7" in complaint


def test_the_remote_worker_is_compared_with_local_rows_and_paddle() -> None:
    record = make_record(case_named("rows/20Mx16"), rows_results(), rows.record)
    assert {name: figure["median"] for name, figure in record["figures"].items()} == {
        "ratio_local": 0.6,
        "ratio_paddle": 6.0,
    }
    assert [target["met"] for target in record["targets"]] == [True, False]
    (complaint,) = complaints(record)
    assert "ratio_paddle is 6, expected at least 7.12" in complaint


def test_without_paddle_its_ratio_is_none_and_reported() -> None:
    ours = {"worker": rows_results()["worker"]}
    record = make_record(case_named("rows/20Mx16"), ours, rows.record)
    assert record["figures"]["ratio_paddle"]["median"] is None
    assert record["figures"]["ratio_paddle"]["all_peers_present"] is False
    assert [target["met"] for target in record["targets"]] == [True, None]
    (complaint,) = complaints(record)
    assert "ratio_paddle was not measured" in complaint


def test_each_staleness_has_a_ratio() -> None:
    stage = {"step_ms": 1.0, "lookup_ms": 1.0, "update_ms": 1.0, "loss_first": 0.7, "loss_last": 0.6}
    ours = {"satrap": {"samples_per_s": 40, **stage}, "satrap_stale": {"samples_per_s": 20, **stage}}
    theirs = {"paddle": {"samples_per_s": 10, **stage}}
    theirs["paddle"]["flush_ms"] = 100.0
    results: Results = {"worker": [round_of("train", ours)], "paddle": [round_of("train", theirs)]}
    record = make_record(case_named("train/20Mx64"), results, train.record)
    assert record["figures"]["ratio"]["median"] == 4.0
    assert record["figures"]["ratio_stale"]["median"] == 2.0
    assert record["loss"]["paddle"] == [[0.7, 0.6]]
    assert [target["met"] for target in record["targets"]] == [True, False]


def test_both_number_formats_have_a_share() -> None:
    counted = {"there": 900.0, "back": 900.0, "share": 0.5, "trainer": 3328.0}
    both = round_of("bytes", {"float32": counted, "float16": {**counted, "share": 0.31}})
    record = make_record(case_named("bytes/20Mx16"), {"worker": [both]}, wire.record)
    assert {name: figure["median"] for name, figure in record["figures"].items()} == {
        "share": 0.5,
        "share_float16": 0.31,
    }
    assert [target["met"] for target in record["targets"]] == [True, False]
    assert record["naive_bytes_per_sample"] == 26 * (8 + 2 * 64)


# -- the command line and the processes -------------------------------------------------------------------------------


def test_cases_have_unique_names_a_kind_and_targets() -> None:
    every = cases.full_cases()
    names = [f"{kind}/20Mx{dim}/2t" for kind in ("echo", "rows", "train", "bytes", "network") for dim in (16, 64)]
    names += [*(f"restart/10Mx{dim}/2t" for dim in (16, 64)), "fan_out/260kx16/2t"]
    assert [case.name for case in every] == names
    assert all(case.kind in SUITE.kinds and case.targets for case in every)
    assert {case.kind for case in cases.quick_cases()} == SUITE.kinds.keys()


def test_an_unknown_case_is_refused_and_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "ecko"]) == 2
    assert main(["--list"]) == 0
    assert "echo/20Mx64/2t" in capsys.readouterr().out
    assert main(["--list", "--case", "echo/20Mx16", "--case", "bytes/20Mx16"]) == 0
    assert capsys.readouterr().out.split() == ["echo/20Mx16/2t", "bytes/20Mx16/2t"]


def test_the_command_line_overrides_the_steps_of_a_case() -> None:
    case = case_named("rows/20Mx16")
    assert case in SUITE.cases(SUITE.parse([]))
    (other,) = select_cases(SUITE.cases(SUITE.parse(["--steps", "7", "--warmup", "0"])), ["rows/20Mx16"])
    assert (other.num_steps, other.num_warmup) == (7, 0) != (case.num_steps, case.num_warmup)
    with pytest.raises(SystemExit):
        SUITE.parse(["--steps", "0"])


def test_a_peer_that_is_not_installed_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = SUITE.parse(["--peers-home", str(tmp_path), "--contenders", "paddle"])
    assert SUITE.measure([case_named("rows/20Mx16")], options, tmp_path) == ({}, [])
    assert "paddle left out: paddle is not installed" in capsys.readouterr().err
    assert SUITE.measure([case_named("echo/20Mx16")], options, tmp_path) == ({}, [])
    assert "paddle left out" not in capsys.readouterr().err


# -- parts ------------------------------------------------------------------------------------------------------------


def test_an_id_is_sent_once() -> None:
    first, second = echo.unique_ids(26_000, 2, 0)
    rows = row_numbers(26_000, "zipf", 2, 0)
    assert len(np.unique(first)) == len(first) < len(rows[0])
    assert np.array_equal(np.sort(second), np.sort(np.unique(hashed_ids(rows[1]))))


def test_the_raw_peer_replies_with_as_many_floats() -> None:
    with servers.started("raw", {"dim": 4, "max_ids": 100, "cores": sorted(os.sched_getaffinity(0))}) as (port, _):
        client = servers.RawClient(port, 4, 100)
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
        with CountingProxy(f"tcp://127.0.0.1:{listener.getsockname()[1]}") as proxy:
            port = int(proxy.address.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS) as client:
                client.sendall(b"y" * 100_000)
                received = 0
                while part := client.recv(1 << 16):
                    received += len(part)
            assert received == 300_000
            assert proxy.counts() == {"there": 100_000, "back": 300_000}
        server.join()


def test_a_proxy_without_a_server_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed_port = listener.getsockname()[1]
    with CountingProxy(f"tcp://127.0.0.1:{closed_port}") as proxy:
        port = int(proxy.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS) as client:
            assert client.recv(1) == b""
        assert proxy.counts() == {"there": 0, "back": 0}


def test_filling_creates_every_row() -> None:
    worker = local_worker(Features(tables.one_table(BATCH_IDS + 1000, 4)), num_threads=1)
    tables.fill(worker, worker.tables, BATCH_IDS + 1000)
    assert len(worker.tables["ids"]) == (BATCH_IDS + 1000) // NUM_FEATURES * NUM_FEATURES
    with pytest.raises(RuntimeError, match=r"needs .* GiB of memory"):
        tables.require_memory(10**12, 64, num_tables=2)


def test_paddle_is_filled_with_the_same_rows_and_gets_ids_sample_by_sample() -> None:
    like = {"ids": np.zeros((4, 1)), "dense": np.ones((SAMPLES, 13), np.float32)}
    parts = list(paddle_role.filling({"rows": BATCH_IDS + 1000}, like))
    assert np.array_equal(np.concatenate([part["ids"] for part in parts]).ravel(), np.arange(BATCH_IDS + 988))
    assert [len(part["dense"]) * NUM_FEATURES for part in parts] == [len(part["ids"]) for part in parts]
    numbers = np.arange(NUM_FEATURES * 3)
    assert paddle_role.by_sample(numbers)[:NUM_FEATURES, 0].tolist() == list(range(0, NUM_FEATURES * 3, 3))


def test_paddles_two_processes_know_each_other() -> None:
    ports = paddle.free_ports(2)
    first, second = ports
    server, trainer = (paddle.environment(role, (first, second), 2) for role in ("PSERVER", "TRAINER"))
    assert first != second
    assert (server["PADDLE_PORT"], trainer["PADDLE_PORT"]) == (str(first), str(second))
    assert server["PADDLE_PSERVERS_IP_PORT_LIST"] == trainer["PADDLE_PSERVERS_IP_PORT_LIST"] == f"127.0.0.1:{first}"
    (table,) = paddle_role.sparse_table(16).values()
    assert table["table_parameters.rows.accessor.embedx_dim"] == 15
    assert paddle.result_of('noise\n{"streams": {}}\nmore noise\n') == {"streams": {}}
    assert paddle.result_of("noise\n") is None


# -- each of them, small ----------------------------------------------------------------------------------------------


def test_echo_runs(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_kinds_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--case", "rows", "train", "bytes", "--contenders", "satrap", "--check"]
    assert main(arguments) == 0
    records = {record["kind"]: record for record in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(records) == ["rows", "train", "bytes"]
    found = records["rows"]
    assert found["figures"]["ratio_paddle"]["median"] is None and found["num_steps"] == 4
    (local,), (remote,) = (found["rows_per_s"][name]["rounds"] for name in ("local", "remote"))
    assert found["figures"]["ratio_local"]["median"] == pytest.approx(remote / local, abs=0.001)
    for label in ("satrap", "satrap_stale"):
        assert records["train"]["samples_per_s"][label]["median"] > 0
        assert records["train"]["lookup_ms"][label]["median"] > 0
    counted = records["bytes"]
    back = counted["back_bytes_per_sample"]["float32"]["median"]
    unique = found["unique_share"][0]
    # Rows of 16 floats come back, each once, and little else.
    assert back == pytest.approx(NUM_FEATURES * unique * 64, rel=0.02)
    assert counted["figures"]["share"]["median"] == pytest.approx(unique, rel=0.03)
    assert 0.5 < counted["figures"]["share_float16"]["median"] / counted["figures"]["share"]["median"] < 0.6
    assert counted["trainer_bytes_per_sample"] == [2 * NUM_FEATURES * 64]


def test_a_peer_that_fails_leaves_its_ratio_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_python", lambda home, contender: Path(sys.executable))
    options = SUITE.parse(["--quick", "--steps", "1", "--tmpfs", str(tmp_path)])
    results, failures = SUITE.measure(select_cases(SUITE.cases(options), ["rows"]), options, tmp_path)
    assert list(results) == ["worker"]
    (failure,) = failures
    assert "paddle failed in round 1" in failure and "Paddle's server exited with status 1" in failure
