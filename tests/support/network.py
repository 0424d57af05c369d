"""An emulated network for tests: two namespaces with one interface each, and a wire between them that can be cut and
that can lose, duplicate, delay and reorder packets.

The kernel's TCP runs at both ends; the wire is a thread that reads IP packets from one end's tun device and writes them
to the other's. So it needs neither a queueing discipline nor a firewall of the kernel, and a cut is silent, like that
of a cable. The namespaces and devices have no names outside and disappear with the last process in them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

TRAINER, SERVER = 0, 1
ADDRESSES = ("10.213.0.1", "10.213.0.2")
_CLONE_NEWNET, _TUNSETIFF, _TUN_WITHOUT_INFO = 0x40000000, 0x400454CA, 0x1001
_LONGEST_PACKET = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Weather:
    """Probabilities of packet loss and duplication, and the range of the delay in seconds."""

    drop: float = 0.0
    repeat: float = 0.0
    delay: tuple[float, float] = (0.0, 0.0)


CALM, CUT = Weather(), Weather(drop=1.0)


class Network:
    """Two namespaces and the wire between them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._weather = CALM, CALM  # for packets of each end
        self._namespaces: list[int] = []
        self._devices: list[int] = []
        self._held: list[tuple[float, int, int, bytes]] = []
        self._num_packets = 0
        self._stop = threading.Event()
        self._wire = threading.Thread(target=self._carry, name="wire")

    def open(self) -> None:
        """Creates both ends; OSError if this process may not."""
        with _home():
            for address in ADDRESSES:
                _require(_libc.unshare(_CLONE_NEWNET))
                self._namespaces.append(_own_namespace())
                self._devices.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
                fcntl.ioctl(self._devices[-1], _TUNSETIFF, struct.pack("16sH22x", b"wire", _TUN_WITHOUT_INFO))
                for command in (f"address add {address}/24 dev wire", "link set wire up", "link set lo up"):
                    _ip(command)
        self._wire.start()

    def close(self) -> None:
        self._stop.set()
        if self._wire.ident is not None:
            self._wire.join()
        for fd in (*self._devices, *self._namespaces):
            os.close(fd)

    @contextmanager
    def inside(self, end: int) -> Iterator[None]:
        """Moves this thread, and the threads and processes that it starts, into the network of one end."""
        with _home():
            _require(_libc.setns(self._namespaces[end], _CLONE_NEWNET))
            yield

    def be(self, from_trainer: Weather, from_servers: Weather) -> None:
        """Sets the weather of both directions."""
        self._weather = from_trainer, from_servers

    def link(self, end: int, state: str) -> None:
        """Sets the interface of one end "up" or "down", which the system of that end notices."""
        with self.inside(end):
            _ip(f"link set wire {state}")

    def _carry(self) -> None:
        poller = select.poll()
        for device in self._devices:
            poller.register(device, select.POLLIN)
        while not self._stop.is_set():
            ready = poller.poll(2 if self._held else 20)
            for device, _ in ready:
                with suppress(BlockingIOError):
                    self._take(self._devices.index(device), os.read(device, _LONGEST_PACKET))
            now = time.monotonic()
            while self._held and self._held[0][0] <= now:
                _, _, device, packet = heapq.heappop(self._held)
                try:
                    os.write(device, packet)
                except OSError as error:
                    if error.errno not in (errno.EIO, errno.EAGAIN):  # that end's interface is down, or its queue full
                        raise

    def _take(self, end: int, packet: bytes) -> None:
        weather = self._weather[end]
        for _ in range(2 if self._random.random() < weather.repeat else 1):
            if self._random.random() < weather.drop:
                continue
            self._num_packets += 1
            due = time.monotonic() + self._random.uniform(*weather.delay)
            heapq.heappush(self._held, (due, self._num_packets, self._devices[1 - end], packet))


@contextmanager
def network(seed: int) -> Iterator[Network]:
    """Opens a network; skips the test where that is not possible."""
    if shutil.which("ip") is None:
        pytest.skip("the command `ip` is missing, which configures interfaces")
    emulated = Network(seed)
    try:
        try:
            emulated.open()
        except OSError as error:
            pytest.skip(f"no network namespace or tun device can be created here: {error}")
        yield emulated
    finally:
        emulated.close()


@contextmanager
def only_ipv6() -> Iterator[None]:
    """Moves this thread, and the threads and processes that it starts, into a network with the addresses ::1 and
    fd00::1 alone; skips the test where that is not possible."""
    commands = ("link set lo up", "address del 127.0.0.1/8 dev lo", "address add fd00::1/128 dev lo")
    with _home():
        try:
            _require(_libc.unshare(_CLONE_NEWNET))
            for command in (*commands, "-6 route add default dev lo"):
                _ip(command)
        except OSError as error:
            pytest.skip(f"no network of IPv6 alone can be created here: {error}")
        yield


@contextmanager
def _home() -> Iterator[None]:
    """Returns this thread to its namespace when the context ends."""
    before = _own_namespace()
    try:
        yield
    finally:
        _require(_libc.setns(before, _CLONE_NEWNET))
        os.close(before)


def _own_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise OSError(f"ip {command}: {done.stderr.strip()}")


def _require(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
