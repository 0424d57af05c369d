"""An emulated network, decided: when a packet arrives, given each machine's rate and the delay between any two.

Every machine has a cable of its own to one switch, both ways at the same rate. What it sends at once takes turns,
connection by connection, as Linux lets it. A packet goes on through the switch as it comes, not when it is whole, as
soon as its receiver's cable is free, and arrives the delay later. What would wait in the switch behind more than LIMIT
bytes is lost. Values in, values out, time passed in; `switch.py` moves the packets.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Packet = TypeVar("Packet")

LIMIT = 8 << 20
"""Bytes that wait in the switch for one cable."""
_HEADERS = 52  # of IPv4 and of TCP with timestamps, in every packet on the wire
_FRAME = 38  # Ethernet's header, check sum, preamble and gap


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a network is like."""

    gbit: float | None = None
    """Of each cable, each way, in 10^9 bits per second; None: as fast as the emulation can."""
    delay_ms: float = 0.0
    """From one machine to another; there and back takes twice that."""

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
    """Some machines, numbered, and what waits for their cables."""

    def __init__(self, num_machines: int) -> None:
        self.shape = Shape()
        self.lost = 0
        self._out, self._in = ([0.0] * num_machines for _ in range(2))  # until when each cable is taken
        self._waiting: list[dict[Hashable, deque[_Waiting[Packet]]]] = [{} for _ in range(num_machines)]

    def send(self, now: float, size: int, source: int, target: int, flow: Hashable, packet: Packet) -> None:
        """A packet of `size` bytes on the wire. flow: what keeps its order. Seconds of any clock."""
        waiting = _Waiting(now, size, target, packet)
        self._waiting[source].setdefault(flow, deque()).append(waiting)

    def due(self) -> float | None:
        """When the next packet leaves; None if none waits."""
        return min((free for free, flows in zip(self._out, self._waiting, strict=True) if flows), default=None)

    def leave(self, now: float) -> Iterator[tuple[float, int, Packet]]:
        """What left by now: when it arrives, at whom. Being asked late changes no time but that of what is behind."""
        for source, flows in enumerate(self._waiting):
            while flows and self._out[source] <= now:
                flow = next(iter(flows))
                line = flows.pop(flow)
                arrival = self._pass(source, line[0])
                if arrival is not None:
                    yield arrival, line[0].target, line[0].packet
                line.popleft()
                if line:
                    flows[flow] = line  # behind the others

    def _pass(self, source: int, each: "_Waiting[Packet]") -> float | None:
        rate = self.shape.bytes_per_second
        begin = max(each.since, self._out[source])
        self._out[source] = begin + each.size / rate
        through = max(begin, self._in[each.target])
        if (through - begin) * rate > LIMIT:
            self.lost += 1
            return None
        self._in[each.target] = through + each.size / rate
        return self._in[each.target] + self.shape.delay_ms / 1e3


def wire_bytes(size: int, segment: int) -> int:
    """What a packet takes on the wire. segment: the payload of each part, if a network card would cut it; else 0."""
    parts = -(-max(1, size - _HEADERS) // segment) if segment else 1
    return size + (parts - 1) * _HEADERS + parts * _FRAME
