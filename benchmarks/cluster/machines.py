"""Machines that are network namespaces of this one, with an emulated network between them (`switch.py`).

Nothing has a name that could be left behind: a namespace lives as long as the process that holds it, a device as long
as the switch. All of them are children, so whatever ends this process's group, by whatever signal, ends them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from benchmarks.cluster.link import Shape
from benchmarks.cluster.processes import talking, tell, told
from benchmarks.cluster.switch import NETWORK, address_of

TOOLS = ("ip", "nsenter", "unshare")


def unable() -> str | None:
    """Why this machine cannot have an emulated network; None if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} here (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces and tun devices need root"
    if not os.path.exists("/dev/net/tun"):
        return "no /dev/net/tun here"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None


class Machines:
    """Numbered from 0; made by `emulated`."""

    def __init__(self, holders: Sequence[int], devices: Sequence[str], switch: "subprocess.Popen[str]") -> None:
        self.devices, self.switch_pid = devices, switch.pid
        self.addresses = [address_of(number) for number in range(len(holders))]
        self._holders, self._switch = holders, switch

    def command(self, machine: int, arguments: Sequence[str]) -> list[str]:
        """The arguments of a process there. It becomes the command, so its process id is the command's."""
        return ["nsenter", f"--net=/proc/{self._holders[machine]}/ns/net", "--", *arguments]

    def reshape(self, shape: Shape) -> dict[str, Any]:
        """Makes the network like that; what crossed since it was last asked: see `Switch.reshape`."""
        tell(self._switch, asdict(shape))
        found: dict[str, Any] = told(self._switch)
        return found


@contextmanager
def emulated(num_machines: int) -> Iterator[Machines]:
    """The machines, with nothing between them that slows them down yet."""
    with ExitStack() as stack:
        holders = []
        for _ in range(num_machines):
            holder = stack.enter_context(talking(["unshare", "--net", "sh", "-c", "echo true; exec cat"]))
            told(holder)  # it is in a namespace of its own now
            holders.append(holder.pid)
        switch = stack.enter_context(talking([sys.executable, "-m", "benchmarks.cluster.switch", str(num_machines)]))
        machines = Machines(holders, told(switch), switch)
        for number, device in enumerate(machines.devices):
            run(["ip", "link", "set", device, "netns", str(holders[number])])
            for each in ("lo", device):
                run(machines.command(number, ["ip", "link", "set", each, "up"]))
            ours = machines.addresses[number]
            run(machines.command(number, ["ip", "address", "add", f"{ours}/32", "dev", device]))
            # One that keeps to a delay it saw earlier (BBR does) would take that of the network before.
            route = ["ip", "route", "add", NETWORK, "dev", device, "src", ours, "congctl", "cubic"]
            run(machines.command(number, route))
        yield machines


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
