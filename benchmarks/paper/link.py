"""The rules of an emulated network: when a packet arrives, given each machine's rate and the delay between any two.

Every machine has a cable to one switch, with the same rate both ways. A machine's connections take turns, as in Linux.
A packet passes the switch while it is received, as soon as its receiver's cable is free, and arrives the delay later. A
packet that would wait in the switch behind more than LIMIT bytes is lost. Pure: time is an argument, and `switch.py`
moves the packets.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Packet = TypeVar("Packet")

LIMIT = 8 << 20
"""Bytes that may wait in the switch for one cable."""
_HEADERS = 52  # IPv4 and TCP with timestamps, in every packet on the wire
_FRAME = 38  # Ethernet's header, check sum, preamble and gap


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The rate and delay of a network."""

    gbit: float | None = None
    """Rate of each cable, each way, in 10^9 bits per second; None: no limit."""
    delay_ms: float = 0.0
    """Delay from one machine to another; a round trip takes twice that."""

    @property
    def name(self) -> str:
        return "unshaped" if self.gbit is None else f"{self.gbit:g}gbit-{self.delay_ms:g}ms"

    @property
    def bytes_per_second(self) -> float:
        return float("inf") if self.gbit is None else self.gbit * 1e9 / 8


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Packet]):
    since: float
    size: int
    target: int
    packet: Packet


class Network(Generic[Packet]):
    """Numbered machines, and the packets that wait for their cables."""

    def __init__(self, num_machines: int) -> None:
        self.shape = Shape()
        self.lost = 0
        self._out, self._in = ([0.0] * num_machines for _ in range(2))  # end of each cable's use
        self._waiting: list[dict[Hashable, deque[_Waiting[Packet]]]] = [{} for _ in range(num_machines)]

    def send(self, now: float, size: int, source: int, target: int, flow: Hashable, packet: Packet) -> None:
        """Send a packet of `size` bytes on the wire. flow: the connection, which keeps its order. now: any clock."""
        waiting = _Waiting(now, size, target, packet)
        self._waiting[source].setdefault(flow, deque()).append(waiting)

    def due(self) -> float | None:
        """Return when the next packet leaves, None if none waits."""
        return min((free for free, flows in zip(self._out, self._waiting, strict=True) if flows), default=None)

    def leave(self, now: float) -> Iterator[tuple[float, int, Packet]]:
        """Yield the packets that left by now, with arrival and target. A late call delays only packets sent later."""
        for source, flows in enumerate(self._waiting):
            while flows and self._out[source] <= now:
                flow = next(iter(flows))
                line = flows.pop(flow)
                arrival = self._pass(source, line[0])
                if arrival is not None:
                    yield arrival, line[0].target, line[0].packet
                line.popleft()
                if line:
                    flows[flow] = line  # after the other connections

    def _pass(self, source: int, waiting: "_Waiting[Packet]") -> float | None:
        rate = self.shape.bytes_per_second
        begin = max(waiting.since, self._out[source])
        self._out[source] = begin + waiting.size / rate
        through = max(begin, self._in[waiting.target])
        if (through - begin) * rate > LIMIT:
            self.lost += 1
            return None
        self._in[waiting.target] = through + waiting.size / rate
        return self._in[waiting.target] + self.shape.delay_ms / 1e3


def wire_bytes(size: int, segment: int) -> int:
    """Return the bytes of a packet on the wire. segment: payload of its parts if a card would split it, or 0."""
    parts = -(-max(1, size - _HEADERS) // segment) if segment else 1
    return size + (parts - 1) * _HEADERS + parts * _FRAME
