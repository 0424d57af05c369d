"""The switch of an emulated network: `python -m benchmarks.paper.switch <machines>` forwards until stdin ends.

It has a tun device for each machine, the machine's end of its cable. Its first line on stdout has their names as JSON,
and its parent moves each to its machine (`machines.py`). The devices end with the process. Machine i has the address
10.231.0.(i + 1). A line on stdin, {"gbit": ..., "delay_ms": ...}, changes the shape of the network; the reply has the
counts since the line before.

Large packets stay whole, as between a kernel and a network card that splits them (TCP segmentation offload), so Python
is fast enough: `link.py` counts the bytes of the parts. There is no jitter, and no loss but in a full switch.
"""

import errno
import fcntl
import heapq
import itertools
import json
import os
import select
import struct
import sys
import time
from contextlib import suppress
from typing import Any

from benchmarks.paper.link import Network, Shape, wire_bytes

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_PACKET_INFO, _OFFLOAD_HEADER = 0x0001, 0x1000, 0x4000
_ANY_CHECKSUM, _TCP4_SEGMENTS = 1, 2
_INTERFACE = struct.Struct("16sH22x")
_HEADER_BYTES = 10  # virtio's, before each packet
_CONNECTION = slice(_HEADER_BYTES + 12, _HEADER_BYTES + 24)  # addresses and ports, of a packet without options
_SEGMENT = struct.Struct("<4xH")
_MAX_BYTES = 1 << 17
NETWORK = "10.231.0.0/24"
_BURST = 16  # packets of one machine before the others' turn


def address_of(machine: int) -> str:
    return f"10.231.0.{machine + 1}"


def open_device() -> tuple[int, str]:
    """Create a tun device; return it and its name, which the kernel chooses."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = _INTERFACE.pack(b"satrap%d", _TUN | _NO_PACKET_INFO | _OFFLOAD_HEADER)
    name = _INTERFACE.unpack(fcntl.ioctl(device, _TUNSETIFF, request))[0]
    fcntl.ioctl(device, _TUNSETOFFLOAD, _ANY_CHECKSUM | _TCP4_SEGMENTS)
    return device, name.rstrip(b"\0").decode()


class Switch:
    """The forwarding between the devices."""

    def __init__(self, devices: list[int]) -> None:
        self._devices = devices
        self._network: Network[bytes] = Network(len(devices))
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()  # packets that arrive together keep their order
        self._start_counts()

    def reshape(self, shape: Shape) -> dict[str, Any]:
        """Give the network a shape; return the bytes on the wire, [source][target], and the packets lost so far."""
        counts = {"bytes": self._bytes, "lost": self._lost + self._network.lost}
        self._network.shape = shape
        self._start_counts()
        return counts

    def _start_counts(self) -> None:
        self._bytes = [[0] * len(self._devices) for _ in self._devices]
        self._lost = self._network.lost = 0

    def run(self, commands: int) -> None:
        """Forward until `commands`, a file descriptor with lines, ends."""
        while True:
            self._deliver()
            due = [self._network.due(), self._waiting[0][0] if self._waiting else None]
            first = min((at for at in due if at is not None), default=None)
            timeout = None if first is None else max(0.0, first - time.monotonic())
            for ready in select.select([commands, *self._devices], [], [], timeout)[0]:
                if ready != commands:
                    self._receive(self._devices.index(ready))
                    continue
                line = os.read(commands, 4096)  # one command at a time: the parent waits for the reply
                if not line:
                    return
                print(json.dumps(self.reshape(Shape(**json.loads(line)))), flush=True)

    def _receive(self, source: int) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(self._devices[source], _MAX_BYTES)
            except BlockingIOError:
                return
            if packet[_HEADER_BYTES] >> 4 != 4:  # the kernel's own IPv6 packets
                continue
            target = packet[_HEADER_BYTES + 19] - 1
            if not 0 <= target < len(self._devices):
                continue
            size = wire_bytes(len(packet) - _HEADER_BYTES, _SEGMENT.unpack_from(packet)[0])
            self._bytes[source][target] += size
            self._network.send(time.monotonic(), size, source, target, packet[_CONNECTION], packet)
            self._deliver()

    def _deliver(self) -> None:
        for at, target, packet in self._network.leave(time.monotonic()):
            heapq.heappush(self._waiting, (at, next(self._numbers), target, packet))
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._waiting)
            try:
                os.write(self._devices[target], packet)
            except OSError as error:
                if error.errno not in (errno.EIO, errno.EAGAIN):  # the device is down, or full
                    raise
                self._lost += 1


def main() -> None:
    opened = [open_device() for _ in range(int(sys.argv[1]))]
    with suppress(PermissionError):  # a real switch waits for no trainer's time slice
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print(json.dumps([name for _, name in opened]), flush=True)
    Switch([device for device, _ in opened]).run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
