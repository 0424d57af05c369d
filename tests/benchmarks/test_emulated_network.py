"""The emulated network: its rules; and where this machine supports it, packets over it and the end of its processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from benchmarks.cluster.processes import receive, talking
from benchmarks.harness.machine import ROOT
from benchmarks.paper import link, machines
from benchmarks.paper.link import Network, Shape

from child_processes import child_process
from runs import is_running
from waiting import wait_until

pytestmark = pytest.mark.draw(6)
emulation = pytest.mark.skipif(machines.unable() is not None, reason=str(machines.unable()))


def shaped(gbit: float | None, delay_ms: float) -> Network[str]:
    found: Network[str] = Network(3)
    found.shape = Shape(gbit=gbit, delay_ms=delay_ms)
    return found


def arrivals(net: Network[str]) -> dict[str, float]:
    """Return when each waiting packet arrives, in the order in which they leave."""
    left_at = {}
    while (due := net.due()) is not None:
        left_at.update({packet: at for at, _, packet in net.leave(due)})
    return left_at


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
        "import json, time; from benchmarks.paper.machines import emulated\n"
        "with emulated(2) as made: print(json.dumps([made.switch_pid, *made._holders]), flush=True); time.sleep(600)"
    )
    with child_process([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as driver:
        pids = receive(driver)
    wait_until(lambda: not any(map(is_running, pids)), otherwise=lambda: "a process of the emulated network is left")
