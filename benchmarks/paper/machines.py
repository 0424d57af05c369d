"""Machines that are network namespaces of this one, with an emulated network between them (`switch.py`).

Nothing can be left behind: a namespace lives as long as the process that holds it, a device as long as the switch. Both
processes are children, so any signal to this process's group ends them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from benchmarks.cluster.processes import Process, receive, send, talking
from benchmarks.paper.link import Shape
from benchmarks.paper.switch import NETWORK, address_of

TOOLS = ("ip", "nsenter", "unshare")


def unable() -> str | None:
    """Return why this machine cannot have an emulated network, None if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} here (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces and tun devices need root"
    if not os.path.exists("/dev/net/tun"):
        return "no /dev/net/tun here"
    trial = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {trial.stderr.strip()}" if trial.returncode else None


class Machines:
    """Machines numbered from 0; `emulated` creates them."""

    def __init__(self, holders: Sequence[int], devices: Sequence[str], switch: Process) -> None:
        self.devices, self.switch_pid = devices, switch.pid
        self.addresses = [address_of(number) for number in range(len(holders))]
        self._holders, self._switch = holders, switch

    def command(self, machine: int, arguments: Sequence[str]) -> list[str]:
        """Return the arguments of a process on a machine, which becomes the command and keeps its process id."""
        return ["nsenter", f"--net=/proc/{self._holders[machine]}/ns/net", "--", *arguments]

    def reshape(self, shape: Shape) -> dict[str, Any]:
        """Give the network a shape; return what crossed it since the last call (`Switch.reshape`)."""
        send(self._switch, asdict(shape))
        counts: dict[str, Any] = receive(self._switch)
        return counts


@contextmanager
def emulated(num_machines: int) -> Iterator[Machines]:
    """Create the machines, with a network that has no limit yet."""
    with ExitStack() as stack:
        holders = []
        for _ in range(num_machines):
            holder = stack.enter_context(talking(["unshare", "--net", "sh", "-c", "echo true; exec cat"]))
            receive(holder)  # its namespace exists
            holders.append(holder.pid)
        switch = stack.enter_context(talking([sys.executable, "-m", "benchmarks.paper.switch", str(num_machines)]))
        machines = Machines(holders, receive(switch), switch)
        for number, device in enumerate(machines.devices):
            run(["ip", "link", "set", device, "netns", str(holders[number])])
            for interface in ("lo", device):
                run(machines.command(number, ["ip", "link", "set", interface, "up"]))
            address = machines.addresses[number]
            run(machines.command(number, ["ip", "address", "add", f"{address}/32", "dev", device]))
            # A control that remembers an earlier delay (BBR does) would use that of the previous network.
            route = ["ip", "route", "add", NETWORK, "dev", device, "src", address, "congctl", "cubic"]
            run(machines.command(number, route))
        yield machines


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
