"""The kind `network`: the rules of the emulated network, its prediction and records; and where this machine supports
it, packets over it and a small run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster import link, machines, network
from benchmarks.cluster.__main__ import SUITE, main
from benchmarks.cluster.link import Network, Shape
from benchmarks.cluster.network import Alone, link_bytes, step_seconds
from benchmarks.cluster.processes import receive, talking
from benchmarks.harness.case import select_cases
from benchmarks.harness.machine import ROOT
from benchmarks.harness.record import complaints, make_record

pytestmark = pytest.mark.draw(6)
QUIET = {"other_cpu": 0.0, "steal": 0.0, "noisy": False}
emulation = pytest.mark.skipif(machines.unable() is not None, reason=str(machines.unable()))


# -- the network ------------------------------------------------------------------------------------------------------


def shaped(gbit: float | None, delay_ms: float) -> Network[str]:
    found: Network[str] = Network(3)
    found.shape = Shape(gbit=gbit, delay_ms=delay_ms)
    return found


def arrivals(net: Network[str]) -> dict[str, float]:
    """Return when each waiting packet arrives, in the order in which they leave."""
    found = {}
    while (due := net.due()) is not None:
        found.update({packet: at for at, _, packet in net.leave(due)})
    return found


def test_a_packet_takes_its_size_over_the_rate_and_the_delay() -> None:
    for net, at in ((shaped(None, 0.0), 5.0), (shaped(1, 2.0), 5.003)):
        net.send(5.0, 125_000, 0, 1, "flow", "a")
        assert arrivals(net) == pytest.approx({"a": at})
        assert net.due() is None


def test_packets_of_one_sender_follow_each_other_and_another_sender_does_not_wait() -> None:
    net = shaped(1, 0.0)
    for name, source, target in (("a", 0, 1), ("b", 0, 1), ("c", 2, 0)):
        net.send(0.0, 125_000, source, target, "flow", name)
    assert [(target, name) for _, target, name in net.leave(0.0)] == [(1, "a"), (0, "c")]
    assert net.due() == pytest.approx(0.001)
    assert arrivals(net) == pytest.approx({"b": 0.002})


def test_the_connections_of_one_sender_take_turns() -> None:
    net = shaped(1, 0.0)
    for name in ("a1", "a2", "a3", "b1", "b2"):
        net.send(0.0, 125_000, 0, 1, name[0], name)
    assert list(arrivals(net)) == ["a1", "b1", "a2", "b2", "a3"]


def test_two_senders_share_the_cable_of_their_receiver() -> None:
    net = shaped(1, 0.0)
    for name, source in (("a", 0), ("b", 2), ("c", 0), ("d", 2)):
        net.send(0.0, 125_000, source, 1, source, name)
    assert arrivals(net) == pytest.approx({"a": 0.001, "b": 0.002, "c": 0.003, "d": 0.004})


def test_a_late_call_delays_no_packet() -> None:
    net = shaped(1, 0.0)
    for name in "ab":
        net.send(0.0, 125_000, 0, 1, "flow", name)
    assert [at for at, _, _ in net.leave(10.0)] == pytest.approx([0.001, 0.002])
    net.send(10.0, 125_000, 0, 1, "flow", "c")
    assert arrivals(net) == pytest.approx({"c": 10.001})


def test_a_full_switch_drops_packets() -> None:
    net, size = shaped(1, 0.0), link.LIMIT // 4 - 1
    for number in range(8):
        for source in (0, 2):
            net.send(0.0, size, source, 1, source, f"{source}-{number}")
    # Two packets arrive for each one that leaves, so after four of each the switch is full, and takes one of two.
    assert len(arrivals(net)) == 12
    assert net.lost == 4


def test_a_large_packet_is_counted_as_its_parts() -> None:
    assert link.wire_bytes(52, 0) == 90
    assert link.wire_bytes(52 + 1448, 1448) == 1500 + 38
    assert link.wire_bytes(52 + 3 * 1448 + 1, 1448) == 3 * (1500 + 38) + 52 + 1 + 38


# -- the prediction ---------------------------------------------------------------------------------------------------

CROSSED = [[0.0, 3e6, 3e6], [2e6, 0.0, 1e6], [2e6, 1e6, 0.0]]
LONE = {
    "0": Alone(seconds=0.05, crossed=CROSSED),
    "4": Alone(seconds=0.03, crossed=CROSSED),
    "async": Alone(seconds=0.02, crossed=[[0.0, 5e6, 5e6], [3e6, 0.0, 0.0], [3e6, 0.0, 0.0]]),
}


def test_without_a_network_the_prediction_is_the_measurement() -> None:
    assert [step_seconds(Shape(), LONE, mode) for mode in ("0", "1", "4", "async")] == [0.05, 0.03, 0.03, 0.02]


def test_synchronous_steps_add_up_waits_and_stale_steps_take_the_longest() -> None:
    slow = Shape(gbit=1, delay_ms=0.5)
    assert link_bytes(CROSSED) == 6e6
    serial = 0.05 + (4e6 + 6e6 + 1e6) / 125e6 + 4 * 1e-3
    assert step_seconds(slow, LONE, "0") == pytest.approx(serial)
    assert step_seconds(slow, LONE, "1") == pytest.approx(serial / 2)
    assert step_seconds(slow, LONE, "16") == pytest.approx(6e6 / 125e6)
    assert step_seconds(slow, LONE, "async") == pytest.approx(10e6 / 125e6)
    fast = Shape(gbit=10, delay_ms=1)
    assert step_seconds(fast, LONE, "4") == pytest.approx(0.03 + 1e6 / 1.25e9 + 2 * 2e-3)


def test_a_turn_is_timed_once_the_pipeline_is_full() -> None:
    assert [network.Turn(mode=mode, num_warmup=2, num_steps=5).num_untimed for mode in ("0", "16", "async")] == [
        2,
        18,
        6,
    ]


def test_rows_are_counted_per_lookup_and_the_rest_per_step() -> None:
    total = [[0, 600, 700], [100, 0, 50], [110, 50, 0]]
    assert network.per_step(total, 10, [12, 14]) == [[0, 50, 50], [10, 0, 5], [11, 5, 0]]


# -- records ----------------------------------------------------------------------------------------------------------


def results(modes: Mapping[str, float], predicted: Mapping[str, float], **more: Any) -> dict[str, Any]:
    """Return one round in which every network is the same."""
    streams = {
        f"network:{shape.name}/{mode}": {"ms": modes[mode], "predicted_ms": predicted[mode], **QUIET, **more}
        for shape in network.SHAPES
        for mode in modes
    }
    measured = {"alone": {}, "probes": {}, "lost_packets": 0, "peak_resident_bytes": 1, "versions": {}}
    return {"streams": streams, **measured}


TOOK = {"0": 90.0, "1": 50.0, "4": 30.0, "16": 30.0, "async": 27.0}
EXPECTED = {"0": 90.0, "1": 45.0, "4": 27.0, "16": 27.0, "async": 27.0}


def test_a_record_has_every_network_and_mode() -> None:
    (case,) = select_cases(SUITE.full_cases, ["network/20Mx64"])
    noisy = results({mode: 2 * ms for mode, ms in TOOK.items()}, EXPECTED, noisy=True)
    record = make_record(case, {"worker": [results(TOOK, EXPECTED), noisy, None]}, network.record)
    assert record["clean_rounds"] == [True, False, True]
    slow = record["networks"]["1gbit-0.2ms"]
    assert {mode: figure["median"] for mode, figure in slow["ratio"].items()} == {
        mode: round(90 / ms, 3) for mode, ms in TOOK.items()
    }
    assert record["figures"]["of_predicted/10gbit-1ms"]["median"] == 0.9
    assert record["figures"]["ratio/1gbit-0.2ms"]["median"] == 3.0
    assert slow["of_async"]["4"]["rounds"] == [0.9, 0.9, None]
    (complaint,) = complaints(record)
    assert "of_async/1gbit-0.2ms is 0.9, expected at least 0.95" in complaint


def test_a_case_that_cannot_run_reports_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machines, "TOOLS", ("ip", "no-such-tool"))
    assert SUITE.kinds["network"].unable() == "no no-such-tool here (iproute2, util-linux)"
    assert main(["--quick", "--case", "network", "--check"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "network/26kx16/2t was not run: no no-such-tool here" in said.err


# -- the machines and the case, small ---------------------------------------------------------------------------------


@emulation
def test_packets_cross_and_are_counted() -> None:
    listen = "import socket; s = socket.create_server(('{}', 5000)); print('true', flush=True); c, _ = s.accept()\n"
    echo = listen + "while part := c.recv(1 << 16): c.sendall(part)"
    ask = (
        "import socket, time; s = socket.create_connection(('{}', 5000)); start = time.perf_counter()\n"
        "s.sendall(b'x'); s.recv(1); print(time.perf_counter() - start)"
    )
    with machines.emulated(3) as made:
        here = made.addresses[0]
        with talking(made.command(0, [sys.executable, "-c", echo.format(here)])) as server:
            assert receive(server) is True
            made.reshape(Shape(gbit=1, delay_ms=30))
            command = made.command(2, [sys.executable, "-c", ask.format(here)])
            took = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
            assert 0.06 <= float(took) < 10
            counted = made.reshape(Shape())
    assert counted["bytes"][0][2] > 90 and counted["bytes"][2][0] > 90
    assert counted["bytes"][0][1] == counted["bytes"][1][2] == counted["lost"] == 0


@emulation
def test_machines_end_with_their_parent() -> None:
    code = (
        "import json, time; from benchmarks.cluster.machines import emulated\n"
        "with emulated(2) as made: print(json.dumps([made.switch_pid, *made._holders]), flush=True); time.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        pids = receive(driver)
    finally:
        driver.kill()
        driver.communicate()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < until, "a process of the emulated network is left"


@emulation
@pytest.mark.draw(2, of="whole runs")
def test_the_case_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--case", "network", "--steps", "2", "--check"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["networks"].keys() == {shape.name for shape in network.SHAPES}
    for measured in record["networks"].values():
        assert measured["step_ms"].keys() == set(network.MODES)
        assert all(figure["median"] > 0 for figure in measured["step_ms"].values())
    (alone,), (probes,) = record["alone"], record["probes"]
    crossed = alone["0"]["crossed"]
    # The dense gradients went over the cables between the trainers: 240k parameters.
    assert 0.9e6 < crossed[1][2] < 1.4e6 and 0.9e6 < crossed[2][1] < 1.4e6
    assert probes["10gbit-1ms"]["trip_ms_plain"] >= 2
    assert probes["1gbit-0.2ms"]["gbit_plain"] < 1
